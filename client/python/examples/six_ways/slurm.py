#!/usr/bin/env python3
"""6. Under Slurm: srun starts the processes and says in SLURM_* who is who; nothing is left to set.

    #SBATCH --nodes=2 --ntasks-per-node=4
    srun python slurm.py

A bps-daemon runs on every node (systemctl enable --now bps-daemon). Servers on other machines are the cluster's business,
not the script's: see bps-cluster.conf(5).
"""

import os
import sys

import torch
from common import Net, load, parse_arguments, run

import bps.torch as bps


def main():
    arguments = parse_arguments(__doc__)
    if "SLURM_PROCID" not in os.environ:
        sys.exit("slurm.py: SLURM_PROCID is not set: start it by srun")
    bps.init()
    train, test = load(arguments)
    model = bps.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)
    total = lambda tensor: bps.push_pull(tensor, average=False, name="total")  # noqa: E731
    run(model, optimizer, arguments, train, test, bps.rank(), bps.size(), total)


if __name__ == "__main__":
    main()

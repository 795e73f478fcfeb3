#!/usr/bin/env python3
"""1. One process, threads: torch.nn.DataParallel. What the other five are better than.

    python data_parallel.py

It copies the model to every GPU in each forward pass and holds Python's lock all the while. Without GPUs it is the model
itself: the line to compare the others with.
"""

import torch
from common import Net, load, parse_arguments, run


def main():
    arguments = parse_arguments(__doc__)
    train, test = load(arguments)
    model = torch.nn.DataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)
    run(model, optimizer, arguments, train, test)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""The same as chaos_trainer.c, by the Python package and NumPy: rank, size and so on by BPS_*; arguments LOG STOP WHO."""
import os, sys, time
sys.path.insert(0, os.path.join(os.path.dirname(os.path.realpath(__file__)), '..', 'lib'))
import numpy as np
import bps
import reference
from chaos_values import TENSORS, digest, give

OPS = {reference.SUM: bps.Sum, reference.AVERAGE: bps.Average}


def main(log, stop, who):
    bps.init(timeout=600, request_timeout=600)
    round_number, last = 0, [np.zeros(n, reference.STORAGE[dtype]) for _, dtype, _, n in TENSORS]
    while True:
        handles = [bps.push_pull_async(give(who, round_number, t, last[t]), op=OPS[op], name=name)
                   for t, (name, _, op, _) in enumerate(TENSORS)]
        end = np.array([not bps.rank() and os.path.exists(stop)], np.int32)
        end = bps.push_pull_async(end, op=bps.Max, name='stop')
        for t, handle in enumerate(handles):
            last[t] = np.asarray(bps.synchronize(handle))
            log.write(f'{round_number} {TENSORS[t][0]} {digest(last[t])} {time.monotonic_ns()}\n')
        log.flush()
        if np.asarray(bps.synchronize(end))[0]:
            break
        round_number += 1
        time.sleep(0.01)  # the work between two rounds
    bps.shutdown()


with open(sys.argv[1], 'w') as file:
    main(file, sys.argv[2], int(sys.argv[3]))

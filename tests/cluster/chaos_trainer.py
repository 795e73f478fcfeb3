#!/usr/bin/env python3
"""The same as chaos_trainer.c, by the Python package and NumPy: rank, size and so on by BPS_*; arguments LOG STOP ROUNDS."""
import hashlib, os, sys, time
import numpy as np
import bps

TENSORS = [('weights', np.float32, 40000, bps.Average), ('bias', np.float32, 301, bps.Sum), ('counts', np.int32, 20000, bps.Sum)]


def main(log, stop, n_rounds):
    bps.init(timeout=600, request_timeout=600)
    rank, round_number, last = bps.rank(), 0, {}
    while not n_rounds or round_number < n_rounds:
        handles = []
        for t, (name, dtype, n, op) in enumerate(TENSORS):
            noise = np.random.default_rng((rank, round_number, t))
            if dtype == np.float32:
                data = noise.random(n, np.float32) + last.get(name, np.zeros(n, dtype)) * np.float32(0.25)
            else:
                data = noise.integers(0, 65536, n, dtype) + last.get(name, np.zeros(n, dtype)) // 3
            handles.append((name, bps.push_pull_async(data, op=op, name=name)))
        end = np.array([not n_rounds and not rank and os.path.exists(stop)], np.int32)
        end = bps.push_pull_async(end, op=bps.Max, name='stop')
        for name, handle in handles:
            last[name] = np.asarray(bps.synchronize(handle))
            log.write(f'{round_number} {name} {hashlib.blake2b(last[name].tobytes(), digest_size=8).hexdigest()} {time.monotonic_ns()}\n')
        log.flush()
        if np.asarray(bps.synchronize(end))[0]:
            break
        round_number += 1
        time.sleep(0.01)  # the work between two rounds
    bps.shutdown()


with open(sys.argv[1], 'w') as file:
    main(file, sys.argv[2], int(sys.argv[3]))

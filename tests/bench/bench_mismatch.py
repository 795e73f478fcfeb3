#!/usr/bin/env python3
"""How long after the first call of ranks that do not do the same each of them is told: four ranks, one of which does something else.

    bench_mismatch.py [--repeats N] [--ranks N] [--json FILE]

On one node, and with each rank on a node of its own. Each row: from the call to the error, on the rank that was told last.
"""
import itertools

from harness import *

sys.path.insert(0, os.path.join(TOP, 'client', 'python'))


def mismatches(bps, np):
    """{name: (what the last rank does, what the others do)}"""
    def push(n=3, dtype=np.float32):
        return lambda: bps.push_pull(np.ones(n, dtype))

    numbers = itertools.count()

    def name(prefix='x'):
        return f'{prefix}.{next(numbers)}'

    def push_name(*shapes, prefix='x'):
        same = name(prefix)
        for shape in shapes:
            bps.push_pull(np.ones(shape, np.float32), name=same)

    def more():
        bps.push_pull(np.ones(3, np.float32))
        bps.broadcast(np.ones(3, np.float32), 0)

    return {
        'another size': (push(4), push()),
        'another shape': (push((2, 3)), push((3, 2))),
        'another type': (push(dtype=np.int64), push()),
        'another shape of a name': (lambda: push_name((2, 3)), lambda: push_name((6,))),
        'another shape of a name in use': (lambda: push_name((6,), (2, 3)), lambda: push_name((6,), (6,))),
        'another operation of a name': (lambda: bps.broadcast(np.ones(6, np.float32), 0, name=name()), lambda: push_name((6,))),
        'another name': (lambda: push_name((6,), prefix='y'), lambda: push_name((6,))),
        'another operation': (lambda: bps.broadcast(np.ones(3, np.float32), 0), push()),
        'a barrier': (bps.barrier, push()),
        'one operation more': (more, lambda: (bps.push_pull(np.ones(3, np.float32)), bps.barrier())),
    }


def be_rank(repeats, *where):
    """where: of rank 0 --json and the file for {kind: for each time, how long the rank waited that was told last}."""
    import numpy as np

    import bps
    bps.init(request_timeout=60)
    found = {}
    for name, ways in mismatches(bps, np).items():
        waited = []
        for _ in range(repeats):
            bps.barrier()
            begun = time.monotonic()
            try:
                ways[bps.rank() != bps.size() - 1]()
            except bps.BpsValueError:
                waited.append(time.monotonic() - begun)
            else:
                raise AssertionError(f'{name}: nobody said that the ranks differ')
        found[name] = np.array(bps.allgather_object(waited)).max(axis=0).tolist()
    bps.shutdown()
    if where:
        with open(where[-1], 'w') as file:
            json.dump(found, file)


def main():
    options, report = parse_arguments('mismatch', __doc__, repeats=10, ranks=4)
    program, library = [sys.executable, __file__, 'rank'], os.path.join(BUILD, 'client', 'libbps_client.so.0')
    for n_nodes, layout in ((1, (options.ranks,)), (options.ranks, (1,) * options.ranks)):
        with Cluster(n_nodes, n_nodes) as cluster:
            found = run_ranks(cluster, layout, [options.repeats], program, LIBRARY=library)
        report.heading(f'{options.ranks} ranks on {n_nodes} node{"s" * (n_nodes > 1)}: until all are told')
        for name, seconds in found.items():
            report.against(name, [1000 * s for s in seconds], 1000, at_most=True, unit='ms', digits=1)
    report.close()


if sys.argv[1:2] == ['rank']:
    be_rank(int(sys.argv[2]), *sys.argv[3:])
else:
    main()

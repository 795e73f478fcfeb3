#!/usr/bin/env python3
"""What bps.torch adds to the C library: one step of ResNet-50's 161 gradients (102 MB), without computing.

    bench_adapter.py [--ranks N] [--steps N] [--json FILE]

wall     from the first gradient to the end of the step, by rank 0; median [lowest ... highest]
own      time that the trainer's thread spends on a CPU in it: what is taken from computing. Waiting costs none
C        the same step by bps-bench replay, which submits and waits in C, with every time of computing at its least
The budget is 5 % of the 0.8 s that 102 MB take at 1 Gbit/s: 40 ms. Gradients are reported ready as autograd would do,
last layer first; the call of a hook, which autograd makes besides, is measured by itself. Needs torch in this Python.
"""
import argparse, json, os, statistics, subprocess, sys, tempfile, time

TOP = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..')
BUILD = os.environ.get('BPS_BUILD_DIR') or os.path.join(TOP, 'build')
PYTHON = os.path.join(TOP, 'client', 'python')
BUDGET_MS = 40


def resnet50():
    """Shapes of the parameters, first layer first."""
    shapes = []

    def conv(n_out, n_in, k):
        shapes.extend([(n_out, n_in, k, k), (n_out,), (n_out,)])  # and its batch normalization

    conv(64, 3, 7)
    width_in = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            conv(width, width_in, 1)
            conv(width, width, 3)
            conv(4 * width, width, 1)
            if block == 0:
                conv(4 * width, width_in, 1)
            width_in = 4 * width
    shapes.extend([(1000, 2048), (1000,)])
    return shapes


def measured(step, steps):
    """(wall, own) of each step, in ms."""
    import bps.torch as bps

    times = []
    for _ in range(steps + 3):
        bps.barrier()
        wall, own = time.perf_counter(), time.thread_time()
        step()
        times.append(((time.perf_counter() - wall) * 1e3, (time.thread_time() - own) * 1e3))
    return times[3:]


def ways(torch, bps):
    """name: a function that makes one step, of parameters of its own."""
    def parameters():
        return [torch.nn.Parameter(torch.zeros(shape)) for shape in resnet50()]

    def of_gradients(gradients, finish):
        slots = list(reversed(gradients.slots))

        def step():
            for slot in slots:
                gradients.ready(slot)
            finish()
        return step

    def optimizer(**options):
        made = bps.DistributedOptimizer(torch.optim.SGD(parameters(), lr=0.0), **options)
        return of_gradients(made._bps, made.synchronize)

    def parallel(**options):
        module = torch.nn.ParameterList(parameters())
        ddp = bps.DistributedDataParallel(module, **options)
        for slot in ddp._gradients.slots:
            ddp._gradients._restore(slot)
        gradients = ddp._gradients
        gradients.enter = lambda: None  # there is no backward pass at whose end to wait
        return of_gradients(gradients, gradients.synchronize)

    return {
        'DistributedOptimizer': lambda: optimizer(),
        'DistributedOptimizer, bf16': lambda: optimizer(compression=bps.Compression.bf16),
        'DistributedOptimizer, 8 groups': lambda: optimizer(groups=8),
        'DistributedDataParallel': lambda: parallel(),
        'allreduce_async_ by name': lambda: by_name(torch, bps, parameters()),
    }


def by_name(torch, bps, parameters):
    """As a script does that has no optimizer: memory of its own, which is copied."""
    def step():
        handles = [bps.allreduce_async_(p.data, name=f'by name.{i}', priority=-i) for i, p in enumerate(parameters)]
        for handle in handles:
            handle.wait()
    return step


def hooks_ms(torch):
    """What autograd takes for the hooks of 161 parameters that do nothing."""
    def backward(hooked):
        parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in resnet50()]
        for p in parameters if hooked else ():
            p.register_post_accumulate_grad_hook(lambda p: None)
        times = []
        for _ in range(20):
            loss = torch.stack([p.sum() for p in parameters]).sum()
            begin = time.thread_time()
            loss.backward()
            times.append((time.thread_time() - begin) * 1e3)
        return statistics.median(times)
    return max(0.0, backward(True) - backward(False))


def rank(steps, path):
    import torch

    import bps.torch as bps

    torch.set_num_threads(1)
    bps.init()
    figures = {name: measured(make(), steps) for name, make in ways(torch, bps).items()}
    if bps.rank() == 0:
        with open(path, 'w') as file:
            json.dump({'ways': figures, 'hooks_ms': hooks_ms(torch)}, file)
    bps.barrier()


def launch(ranks, argv):
    env = {**os.environ, 'PYTHONPATH': PYTHON, 'OMP_NUM_THREADS': '1',
           'BPS_LIBRARY': os.path.join(BUILD, 'client', 'libbps_client.so.0'),
           'BPS_DAEMON': os.path.join(BUILD, 'daemon', 'bps-daemon')}
    command = [sys.executable, os.path.join(PYTHON, 'bps', 'launch.py'), '-np', str(ranks)] + argv
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f'{" ".join(command)} failed:\n{done.stdout}{done.stderr}')


def in_c(ranks, steps, path):
    least = [f'--{what}-ms=0.001' for what in ('forward', 'backward', 'update')]
    launch(ranks, [os.path.join(BUILD, 'daemon', 'bench', 'bps-bench'), 'replay', '--model=resnet50', '--barrier',
                   f'--repeats={steps}', f'--json={path}'] + least)
    with open(path) as file:
        return json.load(file)['step_p50_ms']


def spread(values):
    return f'{statistics.median(values):8.1f} ms [{min(values):.1f} ... {max(values):.1f}]'


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--ranks', type=int, default=2)
    parser.add_argument('--steps', type=int, default=20)
    parser.add_argument('--json')
    parser.add_argument('--as-rank', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank:
        return rank(args.steps, args.as_rank)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'figures')
        c_ms = in_c(args.ranks, args.steps, path)
        launch(args.ranks, [sys.executable, os.path.abspath(__file__), '--steps', str(args.steps), '--as-rank', path])
        with open(path) as file:
            figures = json.load(file)
    print(f'161 gradients, 102 MB, {args.ranks} ranks of one machine, {args.steps} steps')
    print(f'{"C":32}{c_ms:8.1f} ms wall')
    table = {}
    for name, times in figures['ways'].items():
        wall, own = [t[0] for t in times], [t[1] for t in times]
        table[name] = {'wall_ms': statistics.median(wall), 'own_ms': statistics.median(own)}
        print(f'{name:32}{spread(wall)} wall{spread(own)} own')
    print(f'{"autograd, to call 161 hooks":32}{figures["hooks_ms"]:8.2f} ms')
    print(f'budget: {BUDGET_MS} ms')
    if args.json:
        with open(args.json, 'w') as file:
            json.dump({'benchmark': 'adapter', 'ranks': args.ranks, 'steps': args.steps, 'c_wall_ms': c_ms,
                       'hooks_ms': figures['hooks_ms'], 'budget_ms': BUDGET_MS, **table}, file, indent=1)
            file.write('\n')


if __name__ == '__main__':
    main()

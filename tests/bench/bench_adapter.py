#!/usr/bin/env python3
"""What bps.torch adds to the C library: one step of ResNet-50's 161 gradients (102 MB), without computing.

wall     from the start of a backward pass that only adds to gradients to the end of the step, by rank 0
own      time that the trainer's thread spends on a CPU in it, beyond autograd alone: what is taken from computing
C        the same step by bps-bench replay, which submits and waits in C, with every time of computing at its least
The budget is 5 % of the 0.8 s that 102 MB take at 1 Gbit/s: 40 ms. Needs torch in this Python.
"""
import tempfile
from harness import *

PYTHON = os.path.join(TOP, 'client', 'python')
BUDGET_MS = 40
ALONE = 'autograd alone'


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
    """name: makes a step, of parameters of its own. Each begins with a backward pass that only adds to the gradients."""
    def parameters():
        return [torch.nn.Parameter(torch.zeros(shape)) for shape in resnet50()]

    def passes(parameters, finish=lambda: None):
        gradients = [torch.zeros_like(p) for p in parameters]

        def step():
            torch.autograd.backward(parameters[::-1], gradients[::-1])
            finish()
        return step

    def optimizer(**options):
        made = parameters()
        return passes(made, bps.DistributedOptimizer(torch.optim.SGD(made, lr=0.0), **options).synchronize)

    def parallel():
        made = bps.DistributedDataParallel(torch.nn.ParameterList(parameters()))
        return passes(list(made.parameters()), lambda: made)  # whose backward pass waits, and which lives as long as the step

    def by_name():
        """As a script without an optimizer of ours does: memory of its own, which is copied."""
        made = parameters()

        def finish():
            handles = [bps.allreduce_async_(p.grad, name=f'by name.{i}', priority=-i) for i, p in enumerate(made)]
            for handle in handles:
                handle.wait()
        return passes(made, finish)

    return {
        ALONE: lambda: passes(parameters()),
        'DistributedOptimizer': optimizer,
        'DistributedOptimizer, bf16': lambda: optimizer(compression=bps.Compression.bf16),
        'DistributedOptimizer, 8 groups': lambda: optimizer(groups=8),
        'DistributedDataParallel': parallel,
        'allreduce_async_ by name': by_name,
    }


def rank(steps, path):
    import torch

    import bps.torch as bps

    torch.set_num_threads(1)
    bps.init()
    figures = {name: measured(make(), steps) for name, make in ways(torch, bps).items()}
    if bps.rank() == 0:
        with open(path, 'w') as file:
            json.dump(figures, file)
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


def main():
    options, report = parse_arguments('adapter', __doc__, ranks=2, steps=20, as_rank='')
    if options.as_rank:
        return rank(options.steps, options.as_rank)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'figures')
        c_ms = in_c(options.ranks, options.steps, path)
        launch(options.ranks, [sys.executable, os.path.abspath(__file__), '--steps', str(options.steps), '--as-rank', path])
        with open(path) as file:
            figures = json.load(file)
    report.heading(f'161 gradients, 102 MB, {options.ranks} ranks of one machine, {options.steps} steps')
    report.row('C: wall', [c_ms], 'ms', 1)
    alone = report.row(f'{ALONE}: own', [own for _, own in figures.pop(ALONE)], 'ms', 1)
    for name, times in figures.items():
        report.row(f'{name}: wall', [wall for wall, _ in times], 'ms', 1)
        report.against(f'{name}: own', [own - alone for _, own in times], BUDGET_MS, at_most=True, unit='ms', digits=1)
    report.close()


if __name__ == '__main__':
    main()

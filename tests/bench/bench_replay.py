#!/usr/bin/env python3
"""Training steps of real models on n nodes and n spare servers, beside DistributedDataParallel on Gloo, in turns.

Models, times of computing and the link keep the ratio of V100s behind the link that --models says: tensors are divided by --shrink,
and times multiplied by that link over --rate over --shrink. Milliseconds that hosts wait for the processors they share do not shrink,
so a smaller --shrink is nearer to a cluster.

The bound of bps is a link that is never idle while a gradient waits, and always carries the one that the forward pass needs first.
DDP's bound is a forward pass that waits for all gradients, which take 2 (n - 1) / n M / B from the first bucket on. Its buckets have the
size that is fastest here. The quotient of both bounds is the best that DDP / bps can be.

Targets were declared for machines of 8 V100s behind 20 Gbit/s. Where the eight sum among themselves first, ResNet50 waits for nothing:
its target is impossible. At 2.5 Gbit/s, the share of each where all eight are nodes, it is not. VGG16's is impossible at either.

All hosts and their links share this machine's processors. What a step takes of these is said, too, beside what it would be if its
bytes were TCP streams that nobody sums; so nothing else is to run here. Where it is not much less than there is, hosts wait for each
other's processors, which hosts of their own would not. Then --rate 250mbit shows more of what bps does, as all takes twice as long.
"""
from harness import *
from rivals import SETTINGS, search, torch_ranks

TARGETS = {'vgg16': 2.0, 'resnet50': 1.44}  # DDP / bps
EFFICIENCY = {'bert-large': 90}  # %, computing alone / a step


def mbit(rate):
    return {'mbit': 1, 'gbit': 1000}[rate[-4:]] * float(rate[:-4])


def costs_s(cluster, run, repeats):
    """Of daemons, of trainers and of the machine's processors for a step: what a run costs, without what a shorter one does."""
    def total(repeats):
        before = *spent_s(cluster), busy_s()
        figures = run(repeats)
        return figures, [b - a for a, b in zip(before, (*spent_s(cluster), busy_s()))]

    _, short = total(1)
    figures, long = total(1 + repeats)
    return figures, [(l - s) / repeats for s, l in zip(short, long)]


def replay(options, report, model, wanted):
    n, rate = options.nodes, options.rate
    scale = mbit(wanted) / mbit(rate) / options.shrink
    more = ['--scale', f'{scale:.6f}', '--shrink', options.shrink]
    text = subprocess.run(list(map(str, [BENCH, 'replay', '--model', model, '--describe', *more])), capture_output=True, text=True,
                          check=True).stdout
    facts = json.loads(text)
    n_bytes = 4 * sum(t['elements'] for t in facts['tensors'])
    links, steps, others, computes, costs, bare, ddp = [], [], [], [], [], [], 'DDP on Gloo'

    def start(settings):
        return torch_ranks(prefix, n, 'rival_ddp.py', json.dumps(facts), str(options.shrink), settings=settings)

    def link():
        before = busy_s()
        links.append(link_bytes_s(prefix))
        bare.append((busy_s() - before) / (3 * 16 * MIB) * 2 * n * n_bytes)

    def step():
        (took, compute), cost = costs_s(cluster, lambda k: replay_ms(cluster, (1,) * n, model, *more, repeats=k), 3)
        steps.append(took)
        computes.append(compute)
        costs.append(cost)

    with shaped(2 * n, rate) as prefix, contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(n, n, colocated=False, netns=prefix))
        settings, turns = search(ddp, start, 0, SETTINGS[ddp], 3), [link, step]
        if settings is not None:
            rival = stack.enter_context(start(settings))
            turns.append(lambda: others.append(rival.ms(0, 3, 1)))
        in_turns(options.repeats, *turns)
    report.heading(f'{model}, V100 to {wanted}: {n} nodes + {n} spare servers at {rate}, {n_bytes / 1e6:.1f} MB, times x {scale:g}',
                   **(settings or {}))
    report.row('a link', [x / 1e6 for x in links], 'MB/s', 1)
    report.row('computing alone', computes, 'ms', 1)
    layers = [(4 * t['elements'], t['work']) for t in facts['tensors']]
    times = facts['forward_ms'], facts['backward_ms'], facts['update_ms']
    bounds = [ideal_step_ms(layers, x, *times) for x in links]
    rings = [facts['forward_ms'] + facts['update_ms'] + max(facts['backward_ms'], 1e3 * optimum_s(n, 0, n_bytes, x)) for x in links]
    report.row('bps: a step', steps, 'ms', 1)
    report.against('bps: share of its bound', [100 * b / s for b, s in zip(bounds, steps)], 95, bound=100, unit='%', digits=1)
    if others:
        report.row(f'{ddp}: a step', others, 'ms', 1)
        possible = statistics.median(r / b for r, b in zip(rings, bounds))
        ratios = [o / s for o, s in zip(others, steps)]
        if model in TARGETS:
            report.against(f'{ddp} / bps', ratios, TARGETS[model], bound=possible)
        else:
            report.row(f'{ddp} / bps', ratios, 'times', bound=possible)
    if model in EFFICIENCY:
        report.against('bps: scaling efficiency', [100 * c / s for c, s in zip(computes, steps)], EFFICIENCY[model],
                       bound=statistics.median(100 * c / b for c, b in zip(computes, bounds)), unit='%', digits=1)
    ways = [ideal_step_ms(layers, x, *times, WAY_MS, levels=levels_of(layers)) for x in links]
    report.row(f'model: eight levels, {WAY_MS} ms on the way: share of its bound', [100 * b / w for b, w in zip(bounds, ways)], '%', 1)
    for name, column in zip(('CPU of the daemons', 'CPU of the trainers', 'processors busy, links and all'), zip(*costs)):
        report.row(f'{name}, for a step', column, 's')
    report.row('the same for TCP streams with as many bytes', bare, 's')
    report.row(f'{os.cpu_count()} processors: busy of a step',
               [1e5 * busy / os.cpu_count() / s for (_, _, busy), s in zip(costs, steps)], '%', 1)


def main():
    options, report = parse_arguments('replay', __doc__, repeats=3, nodes=8, rate='500mbit', shrink=8,
                                      models='vgg16@20gbit,resnet50@20gbit,resnet50@2.5gbit,bert-large@20gbit')
    for choice in options.models.split(','):
        replay(options, report, *choice.split('@'))
    report.close()


main()

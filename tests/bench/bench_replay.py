#!/usr/bin/env python3
"""Training steps of real models on n nodes and n spare servers, beside DistributedDataParallel on Gloo, in turns.

Models, times of computing and the link keep the ratio of V100s behind 20 Gbit/s: tensors are divided by --shrink, and times
multiplied by 20 Gbit/s over --rate over --shrink. What does not shrink are the milliseconds that hosts which share processors wait for
these, so the less is shrunk, the nearer to a cluster. The bound of bps is a link that is never idle while a gradient waits and
always carries the one that the forward pass needs first: what is born last is needed first, so even then computing may stand
still. DDP's forward pass waits for all gradients, which take 2 (n - 1) / n M / B from the first bucket on.

All hosts and their links share this machine's processors. What a step takes of these is said, too, beside what it would be if its
bytes were TCP streams that nobody sums; so nothing else is to run here. Where it is not much less than there is, hosts wait for each
other's processors, which hosts of their own would not. Then --rate 250mbit shows more of what bps does, as all takes twice as long.
"""
from harness import *

TARGETS = {'vgg16': 2.0, 'resnet50': 1.44}


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


def main():
    options, report = parse_arguments('replay', __doc__, repeats=3, nodes=8, rate='500mbit', models='vgg16,resnet50,bert-large',
                                      shrink=8, link='20gbit')
    n, rate = options.nodes, options.rate
    scale = mbit(options.link) / mbit(rate) / options.shrink
    more = ['--scale', f'{scale:.6f}', '--shrink', options.shrink]
    python = torch_python()
    for model in options.models.split(','):
        text = subprocess.run(list(map(str, [BENCH, 'replay', '--model', model, '--describe', *more])), capture_output=True, text=True,
                              check=True).stdout
        facts = json.loads(text)
        n_bytes = 4 * sum(t['elements'] for t in facts['tensors'])
        links, steps, others, computes, costs, bare = [], [], [], [], [], []
        with shaped(2 * n, rate) as prefix, contextlib.ExitStack() as stack:
            cluster = stack.enter_context(Cluster(n, n, colocated=False, netns=prefix))
            argv = [python, os.path.join(HERE, 'rival_ddp.py'), json.dumps(facts), str(options.shrink)]
            rival = python and stack.enter_context(Rival(prefix, [argv] * n, [
                {'RANK': str(i), 'WORLD_SIZE': str(n), 'MASTER_ADDR': '10.88.0.1', 'MASTER_PORT': '29412',
                 'GLOO_SOCKET_IFNAME': 'eth0', 'OMP_NUM_THREADS': '1'} for i in range(n)]))
            for _ in range(options.repeats):
                before = busy_s()
                links.append(link_bytes_s(prefix))
                bare.append((busy_s() - before) / (3 * 16 * MIB) * 2 * n * n_bytes)
                (step, compute), cost = costs_s(cluster, lambda k: replay_ms(cluster, (1,) * n, model, *more, repeats=k), 3)
                steps.append(step)
                computes.append(compute)
                costs.append(cost)
                if rival:
                    others.append(rival.ms(0, 2))
        report.heading(f'{model}: {n} nodes + {n} spare servers at {rate}, {n_bytes / 1e6:.1f} MB, times x {scale:g}')
        link = report.row('one TCP stream over a link', [x / 1e6 for x in links], 'MB/s', 1) * 1e6
        compute = report.row('computing alone', computes, 'ms', 1)
        layers = [(4 * t['elements'], t['work']) for t in facts['tensors']]
        times = facts['forward_ms'], facts['backward_ms'], facts['update_ms']
        bound = ideal_step_ms(layers, link, *times)
        way = ideal_step_ms(layers, link, *times, WAY_MS, levels=levels_of(layers))
        ring = 1e3 * optimum_s(n, 0, n_bytes, link)
        ddp = facts['forward_ms'] + facts['update_ms'] + max(facts['backward_ms'], ring)
        step = report.row('bps: a step', steps, 'ms', 1, model=model)
        report.row(f'what binds: eight levels, {WAY_MS} ms on the way: share of its bound', [100 * bound / way], '%', 1, model=model)
        for name, column in zip(('CPU of the daemons', 'CPU of the trainers', 'processors busy, links and all'), zip(*costs)):
            report.row(f'{name}, for a step', column, 's', model=model)
        report.row('the same for TCP streams with as many bytes', bare, 's', model=model)
        report.row(f'what binds: {os.cpu_count()} processors: busy of a step',
                   [1e5 * busy / os.cpu_count() / s for (_, _, busy), s in zip(costs, steps)], '%', 1, model=model)
        report.against('bps: share of its bound', [100 * bound / s for s in steps], 95, unit='%', digits=1, model=model)
        if others:
            report.row('DDP on Gloo: a step', others, 'ms', 1, model=model)
            possible = ddp / bound
            target = TARGETS.get(model)
            ratios = [o / s for o, s in zip(others, steps)]
            name = f'DDP on Gloo / bps; the bounds of both allow {possible:.2f}'
            if target:
                report.against(name, ratios, min(target, 0.95 * possible), model=model)
            else:
                report.row(name, ratios, 'times', model=model)
        if model == 'bert-large':
            report.against(f'bps: scaling efficiency; its bound allows {100 * compute / bound:.1f}',
                           [100 * c / s for c, s in zip(computes, steps)], min(90, 95 * compute / bound), unit='%', digits=1, model=model)
    report.close()


main()

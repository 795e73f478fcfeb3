#!/usr/bin/env python3
"""Training steps of real models on n nodes and n spare servers, beside DistributedDataParallel on Gloo, in turns.

Models, times of computing and the link keep the ratio of V100s behind 20 Gbit/s: tensors are divided by --shrink, and times
multiplied by 20 Gbit/s over --rate over --shrink. The bound of bps is a link that is never idle while a gradient waits and
always carries the one that the forward pass needs first: what is born last is needed first, so even then computing may stand
still. DDP's forward pass waits for all gradients, which take 2 (n - 1) / n M / B from the first bucket on.
"""
from harness import *

TARGETS = {'vgg16': 2.0, 'resnet50': 1.44}


def mbit(rate):
    return {'mbit': 1, 'gbit': 1000}[rate[-4:]] * float(rate[:-4])


def main():
    options, report = parse_arguments('replay', __doc__, repeats=3, nodes=8, rate='500mbit', models='vgg16,resnet50,bert-large',
                                      shrink=16, link='20gbit')
    n, rate = options.nodes, options.rate
    scale = mbit(options.link) / mbit(rate) / options.shrink
    more = ['--scale', f'{scale:.6f}', '--shrink', options.shrink]
    python = torch_python()
    for model in options.models.split(','):
        text = subprocess.run(list(map(str, [BENCH, 'replay', '--model', model, '--describe', *more])), capture_output=True, text=True,
                              check=True).stdout
        facts = json.loads(text)
        n_bytes = 4 * sum(t['elements'] for t in facts['tensors'])
        links, steps, others, computes = [], [], [], []
        with shaped(2 * n, rate) as prefix, contextlib.ExitStack() as stack:
            cluster = stack.enter_context(Cluster(n, n, colocated=False, netns=prefix))
            argv = [python, os.path.join(HERE, 'rival_ddp.py'), json.dumps(facts), str(options.shrink)]
            rival = python and stack.enter_context(Rival(prefix, [argv] * n, [
                {'RANK': str(i), 'WORLD_SIZE': str(n), 'MASTER_ADDR': '10.88.0.1', 'MASTER_PORT': '29412',
                 'GLOO_SOCKET_IFNAME': 'eth0', 'OMP_NUM_THREADS': '1'} for i in range(n)]))
            for _ in range(options.repeats):
                links.append(link_bytes_s(prefix))
                step, compute = replay_ms(cluster, (1,) * n, model, *more)
                steps.append(step)
                computes.append(compute)
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

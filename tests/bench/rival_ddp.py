"""
One rank of a training step as torch's DistributedDataParallel on Gloo makes it: gradients become ready in backward order, are
put into buckets of $BUCKET_MB (25 if not set; the first of 1 MB), each bucket is all-reduced as soon as it is full, and the
forward pass begins when all are there. Computing is sleeping, as in `bps-bench replay --describe`, whose JSON is the first
argument. Each line of stdin is "IGNORED REPEATS"; answers with nanoseconds of each step.
"""
import json, os, sys, time
import torch, torch.distributed as dist

model, shrink, bucket_mb = json.loads(sys.argv[1]), float(sys.argv[2]), float(os.environ.get('BUCKET_MB', 25))
torch.set_num_threads(1)
dist.init_process_group('gloo')


def make_buckets():
    """Lists of (elements, moment of the backward pass at which the last of them is ready)."""
    buckets, filled, limit, done = [], 0, 1e6 / shrink, 0.0
    for tensor in reversed(model['tensors']):
        done += tensor['work']
        filled += tensor['elements']
        if filled * 4 >= limit:
            buckets.append((filled, done))
            filled, limit = 0, bucket_mb * 1e6 / shrink
    if filled:
        buckets.append((filled, done))
    return [(torch.zeros(elements), moment) for elements, moment in buckets]


def sleep_until(moment):
    left = moment - time.monotonic()
    if left > 0:
        time.sleep(left)


def step(buckets):
    began = time.monotonic()
    works = []
    for data, moment in buckets:
        sleep_until(began + moment * model['backward_ms'] / 1e3)
        works.append(dist.all_reduce(data, async_op=True))
    sleep_until(began + model['backward_ms'] / 1e3)
    for work in works:
        work.wait()
    sleep_until(time.monotonic() + (model['update_ms'] + model['forward_ms']) / 1e3)


buckets = make_buckets()
print('ready', flush=True)
for line in sys.stdin:
    repeats = int(line.split()[1])
    times = []
    for _ in range(repeats):
        dist.barrier()
        began = time.monotonic_ns()
        step(buckets)
        times.append(time.monotonic_ns() - began)
    print(*times, flush=True)
dist.destroy_process_group()

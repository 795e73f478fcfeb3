"""bps.torch on memory of devices, as far as that runs without a GPU: tensors of PyTorch's CPU lie over memory of the test double,
and a stand-in takes the place of what is PyTorch's CUDA. What is so tested is all of bps's own; PyTorch's streams are not.
"""

import contextlib
import ctypes
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch_common import assert_same, expect, loss_of, new_net, run_checks

import bps.torch as bps
from bps import _client
from bps.torch import _devices

POOL = 64 << 20


class StandIn:
    """One pretend GPU, from whose memory tensors are cut. Who waits in its stream waits for the stream, as the CPU that computes
    is not in it.
    """

    def __init__(self, ordinal):
        self.lib = ctypes.CDLL("libcuda.so.1")
        self.lib.fakecuda_host.restype = ctypes.c_void_p
        self.lib.fakecuda_host.argtypes = [ctypes.c_ulonglong]
        self.lib.cuStreamSynchronize.argtypes = [ctypes.c_void_p]
        context, stream, pool = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_ulonglong()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
        self._call("cuCtxSetCurrent", context)
        self._context = context
        self._call("cuStreamCreate", ctypes.byref(stream), 1)
        self._call("cuMemAlloc_v2", ctypes.byref(pool), ctypes.c_size_t(POOL))
        self._stream, self._pool, self._used = stream.value, pool.value, 0
        self._alias = self.lib.fakecuda_host(self._pool)
        self.n_waits = 0

    def _call(self, name, *arguments):
        status = getattr(self.lib, name)(*arguments)
        assert status == 0, f"{name}: {status}"

    def handles(self, tensor):
        return 0 <= tensor.data_ptr() - self._alias < POOL

    def address(self, tensor):
        return self._pool + tensor.data_ptr() - self._alias

    def stream(self, device):
        return self._stream

    def empty(self, shape, dtype, like):
        count = 1
        for extent in shape:
            count *= extent
        length = max(1, count) * dtype.itemsize
        at = self._used
        self._used += -(-length // 512) * 512
        assert self._used <= POOL
        memory = (ctypes.c_char * length).from_address(self._alias + at)
        return torch.frombuffer(memory, dtype=dtype)[:count].view(shape)

    def as_now(self, device):
        return contextlib.nullcontext

    def apart(self, finish, device):
        return finish

    def future_of(self, handle, device):
        future = torch.futures.Future()
        future.set_result(handle.wait())
        return future

    def wait(self):
        self.n_waits += 1
        self._call("cuCtxSetCurrent", self._context)  # of the thread, whichever it is
        self._call("cuStreamSynchronize", self._stream)


def use_stand_in():
    stand_in = _devices.platform = StandIn(int(os.environ["BPS_LOCAL_RANK"]))
    plain = _client.DeviceRequest.wait

    def wait(self, timeout=None):
        ended = plain(self, timeout)
        stand_in.wait()
        return ended

    _client.DeviceRequest.wait = wait
    return stand_in


gpu = use_stand_in()


def on_gpu(tensor):
    return gpu.empty(tensor.shape, tensor.dtype, None).copy_(tensor)


def net_on_gpu(net):
    for p in net.parameters():
        p.data = on_gpu(p.data)
    for b in net.buffers():
        b.data = on_gpu(b.data)
    return net


def check_operations():
    rank, size = bps.rank(), bps.size()
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool):
        x = on_gpu(torch.arange(7).to(dtype) + (rank if dtype != torch.bool else 0))
        total = sum(torch.arange(7).to(dtype) + (r if dtype != torch.bool else 0) for r in range(size))
        result = bps.push_pull(x, average=False, name=f"sum.{dtype}")
        assert gpu.handles(result) and torch.equal(result, total), (dtype, result, total)
        assert bps.push_pull_inplace(x, average=False, name=f"in.{dtype}") is x and torch.equal(x, total)
    x = on_gpu(torch.full((5, 3), float(rank)))
    assert torch.equal(bps.broadcast(x, size - 1, "b"), torch.full((5, 3), size - 1.0))
    bps.broadcast_(x, 0, "b_")
    assert torch.equal(x, torch.zeros(5, 3))
    x = on_gpu(torch.full((rank + 1, 2), rank))
    gathered = bps.allgather(x, "g")
    assert gpu.handles(gathered)
    assert gathered[:, 0].tolist() == [r for r in range(size) for _ in range(r + 1)]
    x = on_gpu(torch.arange(size) + 10 * rank)
    assert bps.alltoall(x, name="a").tolist() == [10 * r + rank for r in range(size)]
    x = on_gpu(torch.arange(5.0))
    scattered = bps.reducescatter(x, "s", op=bps.Sum)
    assert gpu.handles(scattered)
    assert torch.equal(scattered, (size * torch.arange(5.0)).tensor_split(size)[rank])
    empty = gpu.empty([0], torch.float32, None)
    assert bps.push_pull(empty, name="empty").numel() == 0
    assert gpu.n_waits > 0


def check_many_in_flight():
    handles = [
        bps.push_pull_async_inplace(on_gpu(torch.full((33,), float(i))), average=True, name=f"many.{i % 20}")
        for i in range(200)
    ]
    for i, handle in enumerate(handles):
        assert torch.equal(bps.synchronize(handle), torch.full((33,), float(i)))
        assert bps.poll(handle)


def train(net, steps=4, **options):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    options.setdefault("named_parameters", net.named_parameters())
    optimizer = bps.DistributedOptimizer(optimizer, **options)
    bps.broadcast_parameters(net.state_dict(), 0)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(net, step, bps.rank()).backward()
        optimizer.step()
    return net


def check_optimizer():
    for compression in (bps.Compression.none, bps.Compression.fp16, bps.Compression.bf16):
        net, plain = net_on_gpu(new_net()), new_net()
        train(net, compression=compression, num_groups=2)
        assert all(gpu.handles(p.grad) for p in net.parameters())
        train(plain, compression=compression, num_groups=2)
        assert_same(net, plain, compression.__name__)


def check_the_end_of_uneven_ranks():
    net = net_on_gpu(new_net())
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    for step in range(2 + bps.rank()):
        optimizer.zero_grad()
        loss_of(net, step, bps.rank()).backward()
        optimizer.step()
    assert bps.join() == bps.size() - 1


def check_cross_barrier():
    net, plain = net_on_gpu(torch.nn.Linear(4, 2)), torch.nn.Linear(4, 2)
    bps.broadcast_parameters(net.state_dict(), 0)
    plain.load_state_dict(net.state_dict())
    for model in (net, plain):
        optimizer = bps.CrossBarrier(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(4):
            optimizer.zero_grad()
            F.mse_loss(model(torch.full((3, 4), 1.0 + step + bps.rank())), torch.zeros(3, 2)).backward()
            optimizer.step()
        optimizer.synchronize()
    assert_same(net, plain)


def check_parallel():
    net, plain = net_on_gpu(new_net()), new_net()
    for model in (net, plain):
        ddp = bps.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(ddp, step, bps.rank()).backward()
            optimizer.step()
    assert_same(net, plain)


def check_sync_batch_norm():
    layer, plain = net_on_gpu(bps.SyncBatchNorm(3)), bps.SyncBatchNorm(3)
    x = torch.arange(24.0).view(4, 3, 2) * (bps.rank() + 1)
    for model in (layer, plain):
        model(x.clone().requires_grad_()).square().sum().backward()
    assert torch.equal(layer.running_var, plain.running_var)
    assert torch.equal(layer.weight.grad, plain.weight.grad)


def check_process_group():
    store = dist.FileStore(os.environ["TEST_STORE"], bps.size())
    dist.init_process_group("bps", store=store, rank=bps.rank(), world_size=bps.size())
    x = on_gpu(torch.full((9,), 1.0 + bps.rank()))
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    total = sum(1.0 + r for r in range(bps.size()))
    assert torch.equal(x, torch.full((9,), total))
    x = on_gpu(torch.full((4,), bps.rank()))
    parts = [on_gpu(torch.zeros(4, dtype=x.dtype)) for _ in range(bps.size())]
    dist.all_gather(parts, x)
    assert [part[0].item() for part in parts] == list(range(bps.size()))
    future = dist.all_reduce(on_gpu(torch.ones(3)), async_op=True).get_future()
    assert torch.equal(future.wait()[0], torch.full((3,), float(bps.size())))
    if bps.size() > 1 and bps.rank() < 2:
        y = on_gpu(torch.full((2, 2), float(bps.rank())))
        (dist.send if bps.rank() == 0 else dist.recv)(y, 1 - bps.rank())
        assert torch.equal(y, torch.zeros(2, 2))
    dist.destroy_process_group()


class EndsMeanwhile:
    """The library, when a request ends just after a stream has been made to wait for it."""

    def __init__(self, lib):
        self._lib = lib

    def __getattr__(self, name):
        return getattr(self._lib, name)

    def bps_request_wait_stream(self, pointer, *arguments):
        status = self._lib.bps_request_wait_stream(pointer, *arguments)
        while self._lib.bps_request_poll(pointer) == 0:
            time.sleep(0.001)
        return status


def fail(name):
    """Submits what ranks cannot mean, and waits in the stream."""
    bps.push_pull_async(on_gpu(torch.ones(4 + bps.rank())), name=name).wait()


def check_a_failure_while_a_stream_is_made_to_wait():
    if bps.size() == 1:
        return
    client = _client.current()
    lib = client.lib
    client.lib = EndsMeanwhile(lib)
    try:
        expect(bps.BpsError, "of.three.sizes", lambda: fail("of.three.sizes"))
    finally:
        client.lib = lib


def check_a_failure_is_raised_by_a_later_call():
    if bps.size() == 1:
        return

    def wait_and_call():
        # Either of the two raises if it has ended so soon.
        fail("of.two.sizes")
        client, end = _client.current(), time.monotonic() + 60
        while time.monotonic() < end:
            with client.lock:
                client.raise_late()
            time.sleep(0.001)

    expect(bps.BpsError, "of.two.sizes", wait_and_call)


if __name__ == "__main__":
    run_checks(globals())

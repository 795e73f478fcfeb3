"""Mixed precision: autocast, GradScaler, gradients in 16 bits, and weights kept in 32."""

import math

import torch
import torch.nn.functional as F
from torch_common import assert_alike, assert_same, batch, new_net, run_checks

import bps.torch as bps


def scaler_of(scale=1024.0, **options):
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2, **options)


def loss_of(net, step, dtype, factor=1.0):
    x, y = batch(step, bps.rank())
    with torch.autocast("cpu", dtype):
        return F.cross_entropy(net(x).float(), y) * factor


WAYS = {
    "optimizer": lambda net, o: (net, bps.DistributedOptimizer(o, net.named_parameters())),
    "parallel": lambda net, o: (bps.DistributedDataParallel(net), o),
    "cross barrier": lambda net, o: (net, bps.CrossBarrier(net, o)),
}
MAKERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),  # unscales by itself
}


def train(way, make, dtype, overflow_at=None, clip=None, steps=5):
    """Rank 0 alone overflows in one step: all ranks must leave that out."""
    net = new_net()
    model, optimizer = WAYS[way](net, make(net.parameters()))
    scaler, scales = scaler_of(), []
    for step in range(steps):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in net.parameters()]
        overflows = step == overflow_at and bps.rank() == 0
        scaler.scale(loss_of(model, step, dtype, math.inf if overflows else 1.0)).backward()
        if clip == "after unscale":
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            assert step == overflow_at or norm.isfinite()
        if clip == "by hand":
            if hasattr(optimizer, "synchronize"):
                optimizer.synchronize()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        changed = any(not torch.equal(p, b) for p, b in zip(net.parameters(), before))
        assert changed == (step != overflow_at), (way, step)
    if hasattr(optimizer, "synchronize"):
        optimizer.synchronize()
    return net, scales


def check_a_scaler_needs_no_help():
    for dtype in (torch.bfloat16, torch.float16):
        for maker, make in MAKERS.items():
            for overflow_at in (None, 1):
                nets = {}
                for way in WAYS:
                    net, scales = train(way, make, dtype, overflow_at)
                    assert_alike(net, f"{way}.{maker}")
                    everyone = bps.allgather_object(scales)
                    assert all(other == scales for other in everyone), everyone
                    assert (scales[1] < scales[0]) == (overflow_at == 1)
                    nets[way] = net
                assert_same(nets["optimizer"], nets["cross barrier"], (dtype, maker))
                assert_same(nets["optimizer"], nets["parallel"], (dtype, maker))


def check_a_scaler_and_clipping():
    for overflow_at in (None, 2):
        one, _ = train("optimizer", MAKERS["sgd"], torch.bfloat16, overflow_at, "after unscale")
        other, _ = train("optimizer", MAKERS["sgd"], torch.bfloat16, overflow_at, "by hand")
        third, _ = train("parallel", MAKERS["sgd"], torch.bfloat16, overflow_at, "after unscale")
        plain, _ = train("optimizer", MAKERS["sgd"], torch.bfloat16, overflow_at)
        assert_same(one, other)
        assert_same(one, third)
        assert not torch.equal(one.full.weight, plain.full.weight)


def check_a_scaler_that_does_nothing():
    net = new_net()
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    scaler = scaler_of(enabled=False)
    scaler.scale(loss_of(net, 0, torch.bfloat16)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert_alike(net)
    plain = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)  # of nobody's
    scaler = scaler_of()
    plain.param_groups[0]["params"][0].grad = torch.ones(2, 2) * 1024
    scaler.scale(torch.ones(()))
    scaler.unscale_(plain)
    assert plain.param_groups[0]["params"][0].grad[0, 0] == 1.0


def check_master_weights():
    """The recipe of bps_python(7): gradients travel in 16 bits, as the model has them."""
    for dtype in (torch.float16, torch.bfloat16):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        halves = list(net.to(dtype).parameters())
        masters = [p.detach().float().requires_grad_() for p in halves]
        optimizer = torch.optim.SGD(masters, lr=0.05)
        model = bps.DistributedDataParallel(net)
        generator = torch.Generator().manual_seed(bps.rank())
        losses = []
        for step in range(30):
            x = torch.randn(32, 4, generator=generator)
            loss = F.mse_loss(model(x.to(dtype)).float(), x.sum(1, keepdim=True))
            (loss * 128).backward()
            for master, half in zip(masters, halves):
                assert half.grad.dtype == dtype
                master.grad = half.grad.float() / 128
            optimizer.step()
            with torch.no_grad():
                for master, half in zip(masters, halves):
                    half.copy_(master)
            model.zero_grad()
            losses.append(loss.item())
        assert_alike(net, str(dtype))
        assert sum(losses[-5:]) < 0.2 * sum(losses[:5]), losses
        assert all(p.dtype == dtype for p in net.parameters())
        # Steps that are each below the resolution of 16 bits are kept.
        assert any(not torch.equal(m, h.float()) for m, h in zip(masters, halves))


def check_predivide_in_sixteen_bits():
    """The average is what it is without, also in float16."""
    net = torch.nn.Linear(1, 1, bias=False).half()
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), gradient_predivide_factor=8.0)
    net(torch.full((1, 1), 512.0 * (bps.rank() + 1)).half()).sum().backward()
    optimizer.synchronize()
    assert net.weight.grad.item() == 512.0 * (bps.size() + 1) / 2


if __name__ == "__main__":
    run_checks(globals())

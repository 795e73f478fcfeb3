"""Where tensors are: what bps asks of PyTorch about devices whose memory it hands to the daemon.

Those are the CPU, and CUDA's. Tensors on any other device are copied to the host by PyTorch. All that is CUDA's own is in the
class Cuda, in whose place tests put a stand-in.
"""

import contextlib
import functools
import warnings

import torch


class Cuda:
    def handles(self, tensor):
        """Whether the library knows such memory as CUDA's. ROCm's devices are called cuda, too."""
        return tensor.device.type == "cuda" and torch.version.hip is None

    def address(self, tensor):
        return tensor.data_ptr()

    def stream(self, device):
        """The handle of the stream that is current."""
        return torch.cuda.current_stream(device).cuda_stream

    def empty(self, shape, dtype, like):
        return torch.empty(shape, dtype=dtype, device=like.device)

    def as_now(self, device):
        """Makes contexts in which the stream is current that is current now, in whatever thread."""
        return functools.partial(torch.cuda.stream, torch.cuda.current_stream(device))

    def apart(self, finish, device):
        """finish(), for a thread of ours: behind what the stream that is current now has been given, and complete."""
        before = torch.cuda.current_stream(device).record_event()

        def run():
            before.synchronize()
            finish()
            torch.cuda.current_stream(device).synchronize()

        return run

    def future_of(self, handle, device):
        """A Future of handle.wait() that is complete at once: who waits for it waits in a stream."""
        with torch.cuda.stream(_side_stream(device)):
            result = handle.wait()
            future = torch.futures.Future(devices=[device])
            future.set_result(result)
        return future


@functools.lru_cache(maxsize=None)
def _side_stream(device):
    """Which waits for what futures stand for, so that the stream of the backward pass need not."""
    return torch.cuda.Stream(device)


platform = Cuda()
_said_staging = False


class Device:
    """As spans and requests know it."""

    __slots__ = ("device",)

    def __init__(self, device):
        self.device = device

    def stream(self):
        return platform.stream(self.device)


_known = functools.lru_cache(maxsize=None)(Device)


def device_of(tensor):
    """The Device whose memory the daemon gets, or None: that of the host."""
    return _known(tensor.device) if platform.handles(tensor) else None


def is_known(tensor):
    """Whether the daemon gets the tensor's own memory, or a copy on the host."""
    return tensor.device.type == "cpu" or platform.handles(tensor)


def brought(tensor):
    """The tensor, or a copy of it on the host, where the daemon finds it."""
    if is_known(tensor):
        return tensor
    say_staging(tensor.device)
    return tensor.cpu()


def address_of(tensor):
    return platform.address(tensor) if platform.handles(tensor) else tensor.data_ptr()


def empty(shape, dtype, like):
    """A new tensor where the daemon finds it: on the device of another one, or on the host."""
    return platform.empty(shape, dtype, like) if platform.handles(like) else torch.empty(shape, dtype=dtype, device="cpu")


def as_now(tensor):
    """Makes contexts for what is done later, in another thread, in the order of the stream that is current now."""
    return platform.as_now(tensor.device) if platform.handles(tensor) else contextlib.nullcontext


def say_staging(device):
    global _said_staging
    if not _said_staging:
        _said_staging = True
        warnings.warn(f"bps moves tensors on {device} through host memory", stacklevel=3)

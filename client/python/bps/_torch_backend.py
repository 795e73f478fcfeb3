"""Tells PyTorch that there is a backend called "bps" for torch.distributed.

torch calls register() at the end of "import torch" (the entry point torch.backends), so this imports nothing else:
what the backend is made of comes with the first process group. bps.torch calls it too, for where the package is not
installed.
"""

DEVICES = ["cpu", "cuda"]


def register():
    """May be called again. Does nothing where PyTorch was built without torch.distributed."""
    import torch.distributed as dist

    if dist.is_available() and "BPS" not in dist.Backend._plugins:
        dist.Backend.register_backend("bps", _create, extended_api=True, devices=DEVICES)


def _create(options, backend_options):
    from .torch.process_group import create

    return create(options, backend_options)

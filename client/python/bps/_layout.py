"""A job that some ranks form for themselves, beside one that a launcher started or instead of one."""

import ctypes

from ._library import JoinParams


class Layout:
    """A job: its name, its secret, and each rank's machine. Machines are numbered in the order of their first ranks."""

    def __init__(self, job, secret, machines):
        self.job = job
        self.secret = secret
        numbers = {}
        self.nodes = [numbers.setdefault(machine, len(numbers)) for machine in machines]

    def pair(self, low, high):
        """The job that two of the ranks form for themselves; low is its rank 0."""
        return Layout(f"{self.job}.{low}-{high}", self.secret, [self.nodes[low], self.nodes[high]])

    def join(self, client, rank, **settings):
        """Makes a client this rank of the job; returns when all its ranks have come.

        settings: fields of JoinParams, in the place of what the environment says.
        """
        secret = bytes.fromhex(self.secret)
        kept = ctypes.create_string_buffer(secret, len(secret))  # until the call returns
        params = JoinParams(size=ctypes.sizeof(JoinParams))
        client.call(client.lib.bps_join_params_from_settings, ctypes.byref(params))
        params.job = self.job.encode()
        params.secret = ctypes.addressof(kept)
        params.secret_len = len(secret)
        params.rank = rank
        params.world_size = len(self.nodes)
        params.local_rank = self.nodes[:rank].count(self.nodes[rank])
        params.local_size = self.nodes.count(self.nodes[rank])
        params.node = self.nodes[rank]
        params.n_nodes = max(self.nodes) + 1
        for name, value in settings.items():
            setattr(params, name, value)
        client.join(params)

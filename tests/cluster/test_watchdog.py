"""A hang is noticed, told with all that helps, and ended; what is only slow or stopped is left alone."""

import json
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from zero_jax.cluster.watchdog import EXIT_CODE, Watchdog, places


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Watched:
    """A watchdog whose time and end are in the test's hands, and that has no thread."""

    def __init__(self, folder, **options):
        self.clock, self.lines, self.exits, self.hangs = Clock(), [], [], []
        self.dog = Watchdog(
            10, folder, log=self.lines.append, clock=self.clock, exit=self.exits.append,
            on_hang=self.hangs.append, **options,
        )  # fmt: skip

    def passes(self, seconds):
        """Lets time pass, the watchdog looking every second as its thread would."""
        for _ in range(seconds):
            self.clock.now += 1
            self.dog.check()


def test_a_loop_that_gets_on_is_left_alone(tmp_path):
    watched = Watched(tmp_path)
    for step in range(20):
        watched.dog.beat("step", step)
        watched.passes(9)
    assert not watched.lines and not watched.exits


def test_a_hang_is_told_once_and_ended_after_as_long_again(tmp_path):
    watched = Watched(tmp_path)
    watched.dog.beat("step", 120)
    watched.passes(10)
    assert not watched.hangs
    watched.passes(1)
    (hang,) = watched.hangs
    assert (hang.phase, hang.step, hang.age_seconds, hang.allowed_seconds) == ("step", 120, 11, 10)
    watched.passes(9)
    assert len(watched.lines) == 1 and not watched.exits
    watched.passes(1)
    assert watched.exits == [EXIT_CODE]
    assert "hung for 21 s, ended with exit code 76" in watched.lines[-1]


def test_what_is_told_has_stacks_and_places(tmp_path):
    now = time.time()
    word = {"phase": "data", "step": 7, "beat_time": now - 40, "alive_time": now - 35, "every_seconds": 10}
    (tmp_path / "process-1.json").write_text(json.dumps(word))
    (tmp_path / "process-3.json").write_text(json.dumps({**word, "alive_time": now - 25}))
    (tmp_path / "process-2.json").write_text("{half a")
    watched = Watched(tmp_path, num_processes=5)
    waiting = threading.Event()

    def wait_for_a_batch():
        waiting.wait()

    thread = threading.Thread(target=wait_for_a_batch, name="prefetch")
    thread.start()
    watched.dog.beat("step", 8)
    watching = threading.Thread(target=watched.passes, args=[11])
    watching.start()
    watching.join()
    waiting.set()
    thread.join()
    (told,) = watched.lines
    assert "process 0 hangs: no progress for 11 s in phase 'step' at step 8, which may take 10 s" in told
    assert "process 0: step at step 8, for 0 s" in told
    assert "process 1: data at step 7, for 40 s, no sign of life for 35 s" in told
    assert "process 2: no heartbeat file" in told and "process 4: no heartbeat file" in told
    assert "process 3: data at step 7, for 40 s\n" in told
    assert told.index("thread MainThread") < told.index("thread prefetch")
    assert "in test_what_is_told_has_stacks_and_places" in told and "in wait_for_a_batch" in told
    assert told in (tmp_path / "hang-0.txt").read_text()


def test_a_loop_that_goes_on_is_told_and_watched_anew(tmp_path):
    watched = Watched(tmp_path)
    watched.passes(0)
    watched.dog.beat("data", 1)
    watched.passes(15)
    watched.dog.beat("step", 1)
    watched.passes(9)
    assert watched.lines[-1] == "watchdog: process 0 goes on, with 'step'"
    watched.passes(2)
    assert len(watched.hangs) == 2 and not watched.exits


def test_some_phases_may_take_longer(tmp_path):
    watched = Watched(tmp_path, allowances={"compile": 3})
    watched.dog.beat("compile", 0)
    watched.passes(30)
    assert not watched.lines
    watched.passes(1)
    assert watched.hangs[0].allowed_seconds == 30
    watched.passes(29)
    assert not watched.exits


def test_a_process_may_wait_for_another_that_compiles(tmp_path):
    watched = Watched(tmp_path, num_processes=2)
    watched.dog.beat("step", 1)
    now = time.time()
    other = {"phase": "compile", "step": 1, "beat_time": now, "alive_time": now, "every_seconds": 100}
    (tmp_path / "process-1.json").write_text(json.dumps(other))
    watched.passes(50)
    assert not watched.hangs and not watched.exits
    for phase, seconds in (("compile", 101), ("step", 0)):
        changed = {**other, "phase": phase, "beat_time": now - seconds}
        (tmp_path / "process-1.json").write_text(json.dumps(changed))
        watched.exits.clear()
        watched.passes(1)
        assert watched.hangs and watched.exits == [EXIT_CODE]


def test_time_in_which_nothing_ran_does_not_count(tmp_path):
    watched = Watched(tmp_path)
    watched.dog.beat("step", 1)
    watched.passes(5)
    watched.clock.now += 3600
    watched.passes(5)
    assert not watched.lines
    watched.passes(1)
    assert len(watched.hangs) == 1 and watched.hangs[0].age_seconds < 12
    watched.dog.beat("step", 2)
    watched.passes(10)
    assert len(watched.hangs) == 1
    watched.passes(1)
    assert len(watched.hangs) == 2


@pytest.mark.parametrize("broken", ["log", "on_hang"])
def test_a_log_that_fails_does_not_save_a_hung_process(tmp_path, broken, capsys):
    def fails(_):
        raise BrokenPipeError("nobody reads")

    clock, exits = Clock(), []
    dog = Watchdog(10, tmp_path, clock=clock, exit=exits.append, **{broken: fails})
    for _ in range(21):
        clock.now += 1
        dog.check()
    assert exits == [] and dog.beat("step") is None
    for _ in range(21):
        clock.now += 1
        dog.check()
    assert exits == [EXIT_CODE]
    assert "nobody reads" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path):
    (tmp_path / "file").write_text("")
    watched = Watched(tmp_path / "file")
    watched.dog._write_heartbeat()
    watched.dog._write_heartbeat()
    (line,) = watched.lines
    assert "cannot write heartbeats" in line and "it watches all the same" in line


def test_a_file_system_that_hangs_does_not_stop_it(tmp_path, monkeypatch):
    released, ended = threading.Event(), threading.Event()
    monkeypatch.setattr(Watchdog, "_write_heartbeat", lambda self: released.wait(20))
    monkeypatch.setattr("zero_jax.cluster.watchdog._within", _at_once)
    lines = []
    with Watchdog(0.1, tmp_path, log=lines.append, allowances={}, exit=lambda code: ended.set()):
        assert ended.wait(10)
        released.set()
    assert "test_a_file_system_that_hangs" in lines[0]


def _at_once(_, call, *arguments):
    """Stands in for waiting for a call that blocks."""
    if getattr(call, "__name__", "") != "<lambda>":
        call(*arguments)


def test_its_thread_leaves_word_and_ends(tmp_path):
    with Watchdog(0.2, tmp_path, process_index=1) as dog:
        dog.beat("step", 3)
        until = time.monotonic() + 5
        while places(tmp_path, 2)[1].step != 3 and time.monotonic() < until:
            time.sleep(0.01)
            dog.beat("step", 3)
        assert str(places(tmp_path, 2)[1]) == "process 1: step at step 3, for 0 s"
    assert places(tmp_path, 2)[1].phase == "ended"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("watchdog")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["process-1.json"]


def test_switched_off_it_does_nothing(tmp_path):
    with Watchdog(0, tmp_path / "none") as dog:
        dog.beat("step", 1)
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match="seconds=-1"):
        Watchdog(-1, tmp_path)


CHILD = """
import sys, time
from zero_jax.cluster import Watchdog

def the_step_that_hangs():
    time.sleep(60)

with Watchdog(float(sys.argv[1]), sys.argv[2], allowances={}) as dog:
    for step in range(int(sys.argv[3])):
        dog.beat("step", step)
        print(step, flush=True)
        time.sleep(0.05)
    if sys.argv[4] == "hang":
        the_step_that_hangs()
"""


def start_child(*arguments):
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_a_process_that_hangs_ends_with_the_code_and_its_stack(tmp_path):
    child = start_child(0.4, tmp_path, 3, "hang")
    _, errors = child.communicate(timeout=20)
    assert child.returncode == EXIT_CODE
    assert "in the_step_that_hangs" in errors and "in phase 'step' at step 2" in errors
    assert "in the_step_that_hangs" in (tmp_path / "hang-0.txt").read_text()


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="processes cannot be stopped here")
def test_a_process_that_was_stopped_goes_on(tmp_path):
    child = start_child(0.6, tmp_path, 15, "end")
    assert child.stdout.readline() == "0\n"
    child.send_signal(signal.SIGSTOP)
    time.sleep(1.4)
    child.send_signal(signal.SIGCONT)
    output, errors = child.communicate(timeout=20)
    assert child.returncode == 0 and output.endswith("14\n")
    assert "hangs" not in errors


def test_a_beat_costs_next_to_nothing(tmp_path):
    dog = Watchdog(10, tmp_path)
    started = time.perf_counter()
    for step in range(10_000):
        dog.beat("step", step)
    # Some microseconds each, and a machine may be busy.
    assert (time.perf_counter() - started) / 10_000 < 1e-4


@pytest.mark.parametrize("thread", ["check", "_write_heartbeat"])
def test_a_thread_that_fails_fails_the_next_beat(thread, tmp_path, monkeypatch):
    def broken(self):
        raise KeyError("what nobody thought of")

    lines = []
    monkeypatch.setattr(Watchdog, thread, broken)
    with Watchdog(0.1, tmp_path, log=lines.append) as dog:
        deadline = time.monotonic() + 10
        while dog._error is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(RuntimeError, match="one of its threads failed") as failed:
            dog.beat("step", 3)
        assert isinstance(failed.value.__cause__, KeyError)
        if thread == "_write_heartbeat":
            monkeypatch.undo()
    assert "what nobody thought of" in lines[-1]


def test_steps_and_times_that_are_none_are_refused_at_the_call(tmp_path):
    for seconds in (float("nan"), float("inf"), -1, "x", None):
        with pytest.raises(ValueError, match="watchdog: seconds="):
            Watchdog(seconds, tmp_path)  # type: ignore[arg-type]
    dog = Watchdog(0, tmp_path)
    dog.beat("step", np.int64(3))  # type: ignore[arg-type]
    assert type(dog._beat.step) is int
    with pytest.raises(TypeError):
        dog.beat("step", "three")  # type: ignore[arg-type]

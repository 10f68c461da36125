"""A hang is noticed, told with all that helps, and ended; what is only slow or stopped is left alone."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest

from zero_jax.cluster import watchdog
from zero_jax.cluster.watchdog import EXIT_CODE, Watchdog, process_place


class Watched:
    """A watchdog without threads, whose clock is the test's; its end does not end the test."""

    def __init__(self, folder, monkeypatch, **options):
        self.now, self.exits, self.texts = 1000.0, [], []
        clock = types.SimpleNamespace(monotonic=lambda: self.now, time=time.time, strftime=time.strftime)
        monkeypatch.setattr(watchdog, "time", clock)
        monkeypatch.setattr(watchdog.os, "_exit", self.exits.append)
        monkeypatch.setattr(watchdog, "_to_stderr", self.texts.append)
        self.dog = Watchdog(10, folder, **options)

    def passes(self, seconds):
        """Lets time pass, the watchdog looking every second as its thread would."""
        for _ in range(seconds):
            self.now += 1
            self.dog.check()

    @property
    def hangs(self):
        return [text for text in self.texts if " hangs: " in text]


@pytest.fixture
def watched(tmp_path, monkeypatch):
    return Watched(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "other", [{"phase": []}, {"phase": {}}, {"phase": 3}, {"beat_time": 10**400}, {"every_seconds": 10**400}]
)
def test_a_heartbeat_of_another_program_is_none(other, tmp_path):
    """It ended the thread that watches, and with it the run."""
    heartbeat = {"phase": "step", "step": 1, "beat_time": 0, "alive_time": time.time() - 9, "every_seconds": 1}
    (tmp_path / "process-1.json").write_text(json.dumps(heartbeat | other))
    assert str(process_place(tmp_path, 1)) == "process 1: no heartbeat file"


def test_a_loop_that_gets_on_is_left_alone(watched):
    for step in range(20):
        watched.dog.beat("step", step)
        watched.passes(9)
    assert not watched.texts and not watched.exits


def test_a_hang_is_told_once_and_ended_after_as_long_again(watched):
    watched.dog.beat("step", 120)
    watched.passes(10)
    assert not watched.texts
    watched.passes(1)
    (hang,) = watched.texts
    assert "no progress for 11 s in phase 'step' at step 120, which may take 10 s" in hang
    assert "ended with exit code 76 if nothing happens for 10 s more" in hang
    watched.passes(9)
    assert len(watched.texts) == 1 and not watched.exits
    watched.passes(1)
    assert watched.exits == [EXIT_CODE]
    assert "hung for 21 s, ended with exit code 76" in watched.texts[-1]


def test_what_is_told_has_stacks_and_places(tmp_path, monkeypatch):
    now = time.time()
    word = {"phase": "data", "step": 7, "beat_time": now - 40, "alive_time": now - 35, "every_seconds": 10}
    (tmp_path / "process-0.json").write_text(
        json.dumps({"phase": "step", "step": 8, "beat_time": now, "alive_time": now, "every_seconds": 1})
    )
    (tmp_path / "process-1.json").write_text(json.dumps(word))
    (tmp_path / "process-3.json").write_text(json.dumps({**word, "alive_time": now - 25}))
    (tmp_path / "process-2.json").write_text("{half a")
    watched = Watched(tmp_path, monkeypatch, num_processes=5)
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
    (told,) = watched.texts
    assert "process 0 hangs: no progress for 11 s in phase 'step' at step 8, which may take 10 s" in told
    assert "process 0: step at step 8, for 0 s" in told
    assert "process 1: data at step 7, for 40 s, no sign of life for 35 s" in told
    assert "process 2: no heartbeat file" in told and "process 4: no heartbeat file" in told
    assert "process 3: data at step 7, for 40 s\n" in told
    assert told.index("thread MainThread") < told.index("thread prefetch")
    assert "in test_what_is_told_has_stacks_and_places" in told and "in wait_for_a_batch" in told
    assert told in (tmp_path / "hang-0.txt").read_text()


def test_a_loop_that_goes_on_is_told_and_watched_anew(watched):
    watched.passes(0)
    watched.dog.beat("data", 1)
    watched.passes(15)
    watched.dog.beat("step", 1)
    watched.passes(9)
    assert watched.texts[-1] == "watchdog: process 0 goes on, with 'step'"
    watched.passes(2)
    assert len(watched.hangs) == 2 and not watched.exits


def test_some_phases_may_take_longer_and_are_ended_as_soon_as_others(watched):
    watched.dog.beat("compile", 0)
    watched.passes(100)
    assert not watched.texts
    watched.passes(1)
    assert "which may take 100 s" in watched.hangs[0]
    watched.passes(9)
    assert not watched.exits
    watched.passes(1)
    assert watched.exits == [EXIT_CODE]


def test_time_of_waiting_for_another_that_compiles_does_not_count(tmp_path, monkeypatch):
    watched, now = Watched(tmp_path, monkeypatch, num_processes=2), time.time()
    other = {"phase": "compile", "step": 1, "beat_time": now, "alive_time": now, "every_seconds": 100}

    def other_is(phase, seconds):
        changed = {**other, "phase": phase, "beat_time": now - seconds}
        (tmp_path / "process-1.json").write_text(json.dumps(changed))

    for phase, seconds in (("compile", 101), ("step", 0)):
        watched.dog.beat("step", 1)
        other_is("compile", 0)
        watched.passes(50)
        assert not watched.hangs and not watched.exits
        other_is(phase, seconds)
        watched.passes(10)
        assert len(watched.hangs) == 1 and not watched.exits
        watched.passes(1)
        assert watched.exits == [EXIT_CODE]
        watched.texts.clear()
        watched.exits.clear()


def test_time_in_which_nothing_ran_does_not_count(watched):
    watched.dog.beat("step", 1)
    watched.passes(5)
    watched.now += 3600
    watched.passes(5)
    assert not watched.texts
    watched.passes(1)
    assert len(watched.hangs) == 1 and "no progress for 11 s" in watched.hangs[0]
    watched.dog.beat("step", 2)
    watched.passes(10)
    assert len(watched.hangs) == 1
    watched.passes(1)
    assert len(watched.hangs) == 2


def test_time_in_which_heartbeats_could_not_be_read_counts(watched, monkeypatch):
    def blocks(*_):
        watched.now += 5
        return watchdog.ProcessPlace(process_index=0, phase=None)

    monkeypatch.setattr(watchdog, "process_place", blocks)
    watched.dog.beat("step", 1)
    watched.passes(11)
    assert len(watched.hangs) == 1 and not watched.exits
    watched.passes(1)
    assert watched.exits == [EXIT_CODE]


def test_a_log_that_fails_does_not_save_a_hung_process(watched, monkeypatch, capsys):
    def fails(_):
        raise BrokenPipeError("nobody reads")

    monkeypatch.setattr(watchdog, "_to_stderr", fails)
    watched.dog.beat("step")
    watched.passes(21)
    assert watched.exits == [EXIT_CODE]
    assert "nobody reads" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with Watchdog(1, tmp_path / "file") as dog:
        for step in range(5):  # as many heartbeats
            time.sleep(0.1)
            dog.beat("step", step)
    told = capsys.readouterr().err
    assert told.count("cannot write heartbeats") == told.count("It watches all the same") == 1


def beat_until(dog, step, is_done):
    """Beats until something is so, for 10 s at most."""
    deadline = time.monotonic() + 10
    while not is_done():
        assert time.monotonic() < deadline
        dog.beat("step", step)
        time.sleep(0.01)


def test_its_thread_leaves_word_and_ends(tmp_path):
    with Watchdog(0.2, tmp_path, process_index=1) as dog:
        beat_until(dog, np.int64(3), lambda: process_place(tmp_path, 1).step == 3)
        assert str(process_place(tmp_path, 1)) == "process 1: step at step 3, for 0 s"
    assert process_place(tmp_path, 1).phase == "ended"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("watchdog")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["process-1.json"]
    os.mkfifo(tmp_path / "process-2.json")  # which is not waited for
    assert process_place(tmp_path, 2).phase is None


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

with Watchdog(float(sys.argv[1]), sys.argv[2]) as dog:
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


@pytest.mark.parametrize("hangs_too", [pytest.param("nothing else", marks=pytest.mark.slow), "the file system"])
def test_a_process_that_hangs_ends_with_the_code_and_its_stack(hangs_too, tmp_path):
    if hangs_too == "the file system":
        os.mkfifo(tmp_path / ".partial-process-0.json")  # a pipe that nobody reads: heartbeats wait for ever
    child = start_child(0.4, tmp_path, 3, "hang")
    _, errors = child.communicate(timeout=20)
    assert child.returncode == EXIT_CODE
    assert "in the_step_that_hangs" in errors and "in phase 'step' at step 2" in errors
    assert "in the_step_that_hangs" in (tmp_path / "hang-0.txt").read_text()


@pytest.mark.slow
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


@pytest.mark.parametrize("jump_seconds", [-3600, 3600])
def test_a_clock_that_is_set_between_two_beats_changes_no_age(jump_seconds, tmp_path, monkeypatch):
    """A process that hung while its clock was set back was waited for by the others, until the clock had caught up."""
    watched = Watched(tmp_path, monkeypatch)
    watched.dog.beat("compile", 3)
    monkeypatch.setattr(watchdog.time, "time", lambda: time.time() + jump_seconds)
    watched.now += 50
    watched.dog._write_heartbeat()
    place = process_place(tmp_path, 0)
    assert place.age_seconds == pytest.approx(50, abs=5) and not place.is_silent


def test_a_beat_itself_writes_nothing(tmp_path):
    """It is called several times in each step: a thread of its own writes the last one."""
    dog = Watchdog(10, tmp_path / "processes")
    for step in range(100):
        dog.beat("step", step)
    assert not list(tmp_path.rglob("*.json"))


def test_a_heartbeat_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    """Which may be busy with a checkpoint: the others would take the process for one that is silent."""
    monkeypatch.setattr(os, "fsync", lambda _: pytest.fail("it waits"))
    Watchdog(10, tmp_path)._write_heartbeat()
    assert process_place(tmp_path, 0).phase == "start"


@pytest.mark.parametrize(("where", "name"), [(Watchdog, "check"), (watchdog, "write_text")])
def test_a_thread_that_fails_fails_the_next_beat(where, name, tmp_path, monkeypatch, capsys):
    """The one that watches, or the one that writes heartbeats."""

    def fails(*_, **__):
        raise KeyError("what nobody thought of")

    monkeypatch.setattr(where, name, fails)
    with Watchdog(0.1, tmp_path) as dog:
        with pytest.raises(RuntimeError, match="one of its threads failed") as failed:
            beat_until(dog, 3, lambda: False)
        assert isinstance(failed.value.__cause__, KeyError)
        monkeypatch.undo()
    assert "what nobody thought of" in capsys.readouterr().err


def test_steps_and_times_that_are_none_are_refused_at_the_call(tmp_path):
    for seconds in (float("nan"), float("inf"), -1, "x", None):
        with pytest.raises(ValueError, match="watchdog: seconds="):
            Watchdog(seconds, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Watchdog(0, tmp_path).beat("step", "three")  # type: ignore[arg-type]

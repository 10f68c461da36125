"""A signal to one process stops all of them at one step, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import threading

import jax
import pytest
from jax.experimental import multihost_utils
from processes import free_address

from zero_jax.cluster.preemption import Preemption

SIGNALS = [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_stops_after_the_step(number):
    lines = []
    before = [signal.getsignal(n) for n in SIGNALS]
    with Preemption(log=lines.append) as preemption:
        assert not preemption.should_stop(1) and preemption.reason is None
        signal.raise_signal(number)
        assert preemption.should_stop(2) and preemption.should_stop(3)
        assert preemption.reason == number.name
    assert lines == [f"{number.name}: stopping after step 2"]
    assert [signal.getsignal(n) for n in SIGNALS] == before


def test_the_second_interrupt_is_immediate(capfd):
    with Preemption(log=lambda _: None) as preemption:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert preemption.should_stop(1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert "once more stops at once" in capfd.readouterr().err


def test_handlers_are_restored_after_an_error():
    before = [signal.getsignal(n) for n in SIGNALS]
    with pytest.raises(ZeroDivisionError), Preemption():
        raise ZeroDivisionError
    assert [signal.getsignal(n) for n in SIGNALS] == before


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])  # the latter by `nohup`
def test_a_signal_that_is_ignored_stays_ignored(number):
    previous = signal.signal(number, signal.SIG_IGN)
    try:
        with Preemption(log=lambda _: None) as preemption:
            signal.raise_signal(number)
            assert not preemption.should_stop(1) and not preemption.stops_alone
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, previous)


def test_outside_the_main_thread_it_says_so_and_works():
    lines, answers = [], []

    def run():
        with Preemption(log=lines.append) as preemption:
            answers.append(preemption.should_stop(1))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert answers == [False]
    assert lines == ["signals cannot be handled outside the main thread: SIGTERM will not save the run"]


def test_a_notice_before_the_first_step_of_a_resumed_run_stops_it(monkeypatch):
    """JAX agrees on the count after the largest one, which is 0 for a process that has not asked yet."""
    asked = [0]
    notice_at = {0}  # the count at which the notice comes

    def reached(count):
        asked.append(count)
        return count - 1 in notice_at

    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", reached)
    monkeypatch.setattr(Preemption, "_count", 0)
    with Preemption(log=lambda _: None) as preemption:
        assert preemption.should_stop(40) and preemption.should_stop(41)
    notice_at.clear()
    with Preemption(log=lambda _: None) as preemption:
        assert not any(map(preemption.should_stop, (7, 8, 8, 9)))
    notice_at.add(asked[-1])  # between two runs of one process
    with Preemption(log=lambda _: None) as preemption:
        assert preemption.should_stop(0)
    assert asked == [0, 1, 2, 3, 3, 4, 5]


def test_processes_that_cannot_agree_are_an_error(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    jax.config.update("jax_enable_preemption_service", False)
    try:
        with pytest.raises(ValueError, match="could not agree on when to stop"), Preemption():
            pass
    finally:
        jax.config.update("jax_enable_preemption_service", True)


CHILD = """
import signal, sys, time
import jax
from zero_jax.cluster.preemption import EXIT_CODE, Preemption

index, signalled, name, first = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[5])
jax.distributed.initialize(sys.argv[4], 2, index)
with Preemption(log=lambda line: print(line, flush=True)) as preemption:
    for step in range(41, 440):
        time.sleep(0.01 if index else 0.015)
        if (index, step) == (signalled, first):
            signal.raise_signal(getattr(signal, name))
        if step == first == 41:
            time.sleep(3)  # the notice comes before any process has asked
        if preemption.should_stop(step):
            break
    # Saving takes its time, in which the signal may well come again.
    if index == signalled and name != "SIGINT":
        signal.raise_signal(getattr(signal, name))
assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
jax.distributed.shutdown()
sys.exit(EXIT_CODE if step < 439 else 1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signalled", "name", "step"),
    [
        (1, "SIGUSR1", 50),
        pytest.param(0, "SIGTERM", 41, marks=pytest.mark.slow),
        pytest.param(1, "SIGTERM", 50, marks=pytest.mark.slow),
        pytest.param(0, "SIGINT", 50, marks=pytest.mark.slow),
    ],
)
def test_two_processes_stop_at_one_step(signalled, name, step):
    address = free_address()
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(index), str(signalled), name, address, str(step)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for index in range(2)
    ]
    try:
        outputs = [child.communicate(timeout=60) for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [75, 75], outputs
    stops = [output.strip().partition(": ") for output, _ in outputs]
    assert stops[0][2] == stops[1][2]
    assert stops[0][2].startswith("stopping after step ")
    reason = "a preemption notice" if name == "SIGTERM" else name
    assert stops[signalled][0] == reason and stops[1 - signalled][0] == "a preemption notice"

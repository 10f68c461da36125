"""A launch that has lost processes starts again with those that are left, and with all of them later."""

import contextlib
import io
import json
import os
import pathlib
import re
import signal
import sys
import types
from unittest import mock

import pytest

from zero_jax.cli.commands import build_parser
from zero_jax.cluster import LaunchConfig, launch, launching, report_start
from zero_jax.cluster.launching import STARTED_AFTER, Elastic
from zero_jax.cluster.processes import Ending, Round

SCRIPT = str(pathlib.Path(__file__).parent / "launched.py")
KILLED = -int(signal.SIGKILL)


class Sizes:
    """An `Elastic` with a clock that the test sets."""

    def __init__(self, num_processes, min_processes, *, max_restarts=3, rejoin_seconds=100.0):
        self.now = 0.0
        config = LaunchConfig(
            num_processes=num_processes,
            min_processes=min_processes,
            max_restarts=max_restarts,
            rejoin_seconds=rejoin_seconds,
        )
        self.elastic = Elastic(config)
        self.size = num_processes

    def clock(self):
        return mock.patch.object(launching, "time", types.SimpleNamespace(monotonic=lambda: self.now))

    @property
    def seconds_to_larger(self):
        with self.clock():
            return self.elastic.seconds_to_larger

    def after(self, *codes, seconds=1.0, step=None, **flags):
        """Returns the next size after processes ended with these codes, the first one first."""
        self.now += seconds
        endings = [
            Ending(process_index=i, returncode=code, seconds=i, was_asked=False, last_lines=())
            for i, code in enumerate(codes)
        ]
        ended = Round(num_processes=self.size, endings=tuple(endings), seconds=seconds, **flags)
        with self.clock():
            self.size = self.elastic.next_size(ended, step=step)
        return self.size


def test_the_lost_process_is_left_out_and_tried_again_later():
    sizes = Sizes(4, 2)
    assert sizes.seconds_to_larger is None
    assert sizes.after(KILLED, 1, step=0) == 3
    assert sizes.seconds_to_larger == 100
    assert sizes.after(KILLED, seconds=30, step=0) == 2
    assert sizes.seconds_to_larger == 100  # from the start on, though the first was lost 30 s ago
    assert sizes.after(75, seconds=100, step=7, is_interrupted=True) == 4
    assert sizes.seconds_to_larger is None
    assert sizes.after(0, 0) is None


def test_two_that_are_killed_at_once_are_both_left_out():
    assert Sizes(4, 2).after(KILLED, KILLED, 1) == 2
    assert Sizes(4, 1).after(134, 1, 1) == 3  # the others fail because of the first


def test_with_fewer_than_the_least_lost_ones_are_tried_at_once():
    sizes = Sizes(3, 2)
    assert sizes.after(KILLED) == 2
    assert sizes.after(KILLED) == 2
    assert Sizes(2, 2).after(KILLED) == 2
    assert Sizes(4, 4).after(KILLED, KILLED) == 4


def test_without_a_wait_all_are_started():
    assert Sizes(4, 1, rejoin_seconds=0.0).after(KILLED) == 4


def test_a_process_that_is_lost_as_soon_as_it_is_back_is_left_out_for_longer():
    sizes = Sizes(2, 1)
    for wait in (100, 200, 400):
        assert sizes.after(KILLED, step=0 if wait == 100 else wait) == 1
        assert sizes.seconds_to_larger == wait
        assert sizes.after(75, seconds=wait, is_interrupted=True) == 2
    assert sizes.after(KILLED, seconds=500, step=900) == 1
    assert sizes.seconds_to_larger == 100


@pytest.mark.parametrize("code", [76, 75])
def test_where_nobody_knows_whose_fault_it_was_all_are_started(code):
    assert Sizes(4, 1).after(code, code, KILLED) == 4


@pytest.mark.parametrize(
    ("codes", "flags"), [((0, 0), {}), ((3, 3), {}), ((2, 2), {}), ((75, 75), {"is_stopped": True})]
)
def test_what_is_done_diverged_refused_or_stopped_by_the_user_is_not_started_again(codes, flags):
    sizes = Sizes(2, 1)
    assert sizes.after(*codes, **flags) is None
    assert sizes.elastic.reason == ""


def test_a_number_that_the_run_refuses_is_not_tried_twice():
    sizes = Sizes(4, 1)
    assert sizes.after(KILLED) == 3
    assert sizes.after(2, 2, 2) == 2
    assert "3 processes were refused" in sizes.elastic.reason
    assert sizes.after(75, seconds=100, is_interrupted=True) == 4
    assert sizes.after(KILLED, step=5) == 2
    assert "not with 3, which the run refuses" in sizes.elastic.reason
    assert sizes.seconds_to_larger == 200  # twice as long: it was lost soon after it was back


def test_with_the_least_refused_lost_ones_are_tried_at_once():
    sizes = Sizes(4, 3)
    assert sizes.after(KILLED) == 3
    assert sizes.after(2, 2, 2) == 4
    assert sizes.after(KILLED) == 4


def test_where_every_number_is_refused_the_launch_ends():
    sizes = Sizes(2, 1)
    assert sizes.after(KILLED) == 1
    assert sizes.after(2) == 2
    assert sizes.after(2, 2) is None
    assert "no number of processes from 1 to 2 is accepted" in sizes.elastic.reason


@pytest.mark.parametrize("code", [KILLED, 1, 75, 76])
def test_without_a_step_gained_there_is_an_end(code):
    sizes = Sizes(2, 2)
    for _ in range(3):
        assert sizes.after(code, step=40)
    assert sizes.after(code, step=41)
    for _ in range(2):
        assert sizes.after(code)
    assert sizes.after(code, step=41) is None
    assert sizes.elastic.reason == "3 restarts in a row did not get beyond step 41"
    assert Sizes(2, 2, max_restarts=0).after(code) is None


def test_steps_gained_until_a_lost_process_was_back_count():
    sizes = Sizes(2, 1)
    for step in range(9):
        assert sizes.after(KILLED, seconds=1000) == 1
        assert sizes.after(75, seconds=1000, step=step, is_interrupted=True) == 2


def test_the_step_is_reported_where_a_launcher_wants_it(monkeypatch, tmp_path):
    monkeypatch.delenv(STARTED_AFTER, raising=False)
    report_start(3)
    monkeypatch.setenv(STARTED_AFTER, str(tmp_path / "step"))
    report_start(3)
    assert (tmp_path / "step").read_text() == "3"
    for wrong in (-1, 1.0, True, "3", None):
        with pytest.raises(ValueError, match="give the number of steps done"):
            report_start(wrong)


class Launched:
    """What came of a launch whose processes fail by a plan: who, how, and the step that is reported, in each start."""

    def __init__(self, *plan, num_processes=4, min_processes=1, command=(sys.executable, SCRIPT, "rounds"), **fields):
        config = LaunchConfig(
            num_processes=num_processes, min_processes=min_processes, **{"grace_seconds": 2, **fields}
        )
        with (
            mock.patch.dict(os.environ, {"ROUNDS": json.dumps(plan)}),
            contextlib.redirect_stdout(io.StringIO()) as out,
            contextlib.redirect_stderr(io.StringIO()) as err,
        ):
            self.result = launch(command, config=config)
        self.sizes = [int(line) for line in out.getvalue().splitlines()]
        self.err = err.getvalue()


def test_processes_are_started_again_until_they_are_done():
    launched = Launched([1, KILLED, None], [2, 1, None], [0, 76, None])
    assert launched.result.status == 0, launched.err
    assert launched.sizes == [4, 3, 2, 2]
    assert launched.result.num_restarts == 3
    assert str(launched.result) == "all 2 processes are done, after 3 restarts"
    lines = re.findall(r"^zero-jax launch: (process .*restart.*)$", launched.err, re.MULTILINE)
    assert lines == [
        "process 1 of 4 was ended by SIGKILL (out of memory?): restart 1, with 3 of 4",
        "process 2 of 3 ended with status 1: restart 2, with 2 of 4",
        "process 0 of 2 ended with status 76: restart 3, with 2 of 4",
    ]


@pytest.mark.parametrize("saves_as", ["nobody", "forgetful"])
def test_a_lost_process_comes_back_while_the_others_run(saves_as):
    """In the second start nobody fails, and all wait until they are asked to save; a script may then end with 0."""
    launched = Launched([0, KILLED, 0], [saves_as, 0, 0], num_processes=2, rejoin_seconds=1)
    assert launched.result.status == 0, launched.err
    assert launched.sizes == [2, 1, 2]
    assert "a lost process is tried again: restart 2, with 2 of 2" in launched.err


@pytest.mark.slow
def test_a_run_that_hangs_when_it_is_asked_to_save_is_killed():
    launched = Launched([0, KILLED, 0], ["deaf", 0, 0], num_processes=2, rejoin_seconds=1, grace_seconds=0)
    assert launched.result.status == 0, launched.err
    assert launched.sizes == [2, 1, 2]
    assert re.search(r"still running [\d.]+ s after SIGTERM: killed", launched.err)


def test_a_failure_that_stays_ends_the_launch_with_its_status():
    launched = Launched(*[[0, 7, 5]] * 9, num_processes=2, min_processes=2, max_restarts=2)
    assert launched.result.status == 7
    assert launched.sizes == [2, 2, 2]
    closing = str(launched.result).splitlines()
    assert "ended with status 7" in closing[0]
    assert closing[-1] == "not started again: 2 restarts in a row did not get beyond step 5"


def test_a_program_that_cannot_be_started_any_more_ends_the_launch(tmp_path):
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\nrm -f {program}\nkill -9 $$\n")
    program.chmod(0o755)
    launched = Launched(num_processes=1, min_processes=1, command=(str(program),))
    assert launched.result.status == 1
    assert launched.result.num_restarts == 3
    assert "cannot start" in launched.result.first_failure.last_lines[0]


def test_a_run_that_would_begin_anew_is_refused(capsys):
    parser = build_parser()
    wrong = parser.parse_args(["launch", "--min-processes", "1", "--", "train"])
    with pytest.raises(SystemExit):
        wrong.run(wrong)
    assert "add `--resume auto` to it" in capsys.readouterr().err


def test_the_least_is_at_most_all():
    with pytest.raises(ValueError, match="min_processes=3 of num_processes=2: give at most as many"):
        LaunchConfig(min_processes=3)

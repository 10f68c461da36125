"""Several processes on one machine: they find each other, end together, and leave nothing."""

import contextlib
import io
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from zero_jax.cli import build_parser
from zero_jax.cli import launch as cli_launch
from zero_jax.cluster import processes
from zero_jax.cluster.joining import NUM_PROCESSES
from zero_jax.cluster.launching import LaunchConfig, launch
from zero_jax.cluster.log_merging import Merger
from zero_jax.cluster.processes import Ending, Round, patient_flags

SCRIPT = str(pathlib.Path(__file__).parent / "launched.py")
APART = "zero-jax launch: the processes have not joined each other: each runs by itself"
COMMANDS = ("launch", "plan", "train")


class Launched:
    """What came of a launch."""

    def __init__(self, *what, **fields):
        config = LaunchConfig(**{"grace_seconds": 2, **fields})
        started = time.monotonic()
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            self.result = launch([sys.executable, SCRIPT, *map(str, what)], config=config)
        self.seconds = time.monotonic() - started
        self.out, self.err = out.getvalue(), err.getvalue()


def start(*arguments, **options):
    """Starts the command line in a process of its own, as a user does."""
    command = [sys.executable, SCRIPT, "zero-jax", "launch", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def run(*arguments):
    process = start(*arguments)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def read_until(stream, pattern, count):
    """Returns the matches of a pattern in a stream's lines, as soon as there are enough."""
    found = []
    while len(found) < count:
        line = stream.readline()
        assert line, f"the stream ended after {found}"
        found += re.findall(pattern, line)
    return found


def is_alive(pid):
    """Says whether a process runs: one that has ended and waits for its parent does not."""
    try:
        os.kill(pid, 0)
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] not in "ZX"
    except (ProcessLookupError, FileNotFoundError):
        return False


def await_end(pids, seconds=5):
    deadline = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [pid for pid in pids if is_alive(pid)]


def test_processes_join_and_compute_together():
    launched = Launched("sum")
    assert launched.result.status == 0, launched.err
    assert launched.out == "0/2 launcher 4 28\n"  # process 0's own words, and nothing of gloo's
    assert "[1] 1/2 launcher 4 28\n" in launched.err
    assert APART not in launched.err


@pytest.mark.slow
def test_a_script_that_calls_initialize_without_arguments():
    launched = Launched("bare", num_processes=3, devices_per_process=2)
    assert launched.result.status == 0, launched.err
    assert launched.out == "0/3 2 15\n"
    assert "[2] 2/3 2 15\n" in launched.err
    assert APART not in launched.err


def test_processes_that_do_not_join_are_noticed(monkeypatch):
    launched = Launched("environment")
    assert launched.result.status == 0 and launched.err.count(APART) == 1
    monkeypatch.setattr(processes, "_JOIN_SECONDS", 0.0)  # while they run
    launched = Launched("environment")
    assert launched.result.status == 0 and launched.err.count(APART) == 1


def test_one_process_is_no_special_case():
    launched = Launched("sum", num_processes=1, devices_per_process=2)
    assert (launched.result.status, launched.out) == (0, "0/1 launcher 2 1\n")


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("status", [1, 3, 75, 76])
def test_the_status_is_that_of_the_first_to_fail(who, status):
    launched = Launched("exit", who, status)
    assert launched.result.status == status
    assert launched.result.first_failure.process_index == who
    assert launched.result.first_failure.last_lines == ("bye",)
    assert not launched.result.first_failure.was_asked
    assert f"process {who} of 2 " in str(launched.result).splitlines()[0]
    assert -signal.SIGKILL not in [one.returncode for one in launched.result.endings]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_the_status_of_a_signal(number):
    launched = Launched("signal", 1, int(number))
    assert launched.result.status == 128 + number
    lines = str(launched.result).splitlines()
    assert lines[0].startswith(f"process 1 of 2 was ended by {number.name}")
    assert "  bye" in lines


def test_75_says_how_to_go_on():
    assert "--resume auto" in str(Launched("exit", 0, 75).result).splitlines()[0]


def test_who_does_not_listen_is_killed_after_the_grace(tmp_path, monkeypatch):
    monkeypatch.setenv("READY", str(tmp_path / "deaf"))
    launched = Launched("stubborn", grace_seconds=0.5)
    assert launched.result.status == 3
    assert [one.returncode for one in launched.result.endings] == [3, -signal.SIGKILL]
    assert 0.5 <= launched.seconds < 10
    assert "s after SIGTERM: killed" in launched.err


@pytest.mark.slow
@pytest.mark.parametrize(("what", "who", "status"), [("raise", 0, 1), ("raise", 1, 1), ("leave", 1, 2)])
def test_an_error_in_the_middle_of_collectives_ends_all(what, who, status):
    """JAX alone would keep the process that failed at its exit for five minutes."""
    launched = Launched(what, who)
    assert launched.result.status == status
    assert launched.result.first_failure.process_index == who
    if what == "raise":
        assert launched.result.first_failure.last_lines[-1] == "RuntimeError: the disk is on fire"
    assert launched.seconds < 30


@pytest.mark.slow
def test_an_exit_that_hangs_is_ended():
    """Of a library, after the watchdog has ended; the other processes would be waited for without end."""
    launched = Launched("exit hangs")
    assert launched.result.status == 1
    assert "Timeout (0:00:01)!" in launched.err
    assert launched.seconds < 60


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_a_process_killed_in_the_middle_of_collectives_ends_all(who):
    launched = Launched("killed", who)
    assert launched.result.status == 128 + signal.SIGKILL
    first = launched.result.first_failure
    assert first.process_index == who
    # The grace, and what it takes to notice.
    assert max(ending.seconds for ending in launched.result.endings) - first.seconds < 2 + 3


def test_a_process_that_is_killed_is_the_first_though_the_error_of_another_was_noticed_before():
    def first(*codes, seconds, was_asked=False):
        endings = [
            Ending(process_index=i, returncode=code, seconds=at, was_asked=was_asked, last_lines=())
            for i, (code, at) in enumerate(zip(codes, seconds, strict=True))
        ]
        return Round(num_processes=len(codes), endings=tuple(endings)).first_failure

    assert first(1, -9, seconds=(3.0, 3.002)).process_index == 1
    assert first(1, -9, seconds=(3.0, 3.002), was_asked=True).process_index == 0
    assert first(1, -9, seconds=(3.0, 5.0)).process_index == 0
    assert first(0, -6, 1, seconds=(3.0, 3.0, 3.1)).process_index == 1
    assert first(0, 0, seconds=(3.0, 3.0)) is None


def test_progress_bars_do_not_garble():
    launched = Launched("bar")
    assert launched.out == "é after the bar\n"
    lines = sorted(line for line in launched.err.splitlines() if not line.startswith(APART))
    assert lines == ["[0] 4 of 4", "[1] 4 of 4", "[1] é after the bar"]


GLOO = """[Gloo] Rank 3 is connected to 7 peer ranks. Expected number of connected peer ranks is : 7
[Gloo] Rank [Gloo] Rank 2 is connected to 7 peer ranks. Expected number of connected peer ranks is : 7

0
[Gloo] Rank 6[Gloo] Rank 7 is connected to 7 is connected to 7 peer ranks. Expected number of connected peer ranks is :
7 peer ranks. Expected number of connected peer ranks is : 7
step 1[Gloo] Rank 1
7

it is connected to 3 hosts
"""


def test_what_gloo_says_is_left_out():
    """Its threads write into each other's lines, as seen."""
    out = io.StringIO()
    Merger(out, io.StringIO()).read(io.StringIO(GLOO), 0, False, None)
    assert out.getvalue() == "step 1\n7\n\nit is connected to 3 hosts\n"


def test_a_line_without_end_takes_little_memory():
    """A progress bar is one line until it ends: it was kept, and shown, only then."""
    out, bar = io.StringIO(), "\r".join(f"{i:05d} of 40000" for i in range(40_000))
    Merger(out, io.StringIO()).read(io.StringIO(f"{bar}\n{'x' * 150_000}\n"), 0, False, None)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 1 << 16
    assert "39999 of 40000" in lines
    assert out.getvalue().count("x") == 150_000


@pytest.mark.parametrize(
    ("how_long", "status"), [pytest.param(0, 0, marks=pytest.mark.slow), (60, 128 + signal.SIGTERM)]
)
def test_a_reader_of_the_launcher_that_does_not_read_stops_neither_the_processes_nor_a_signal(how_long, status):
    """As in a pager, or after Ctrl-S; processes that wait for room in a pipe would wait for ever."""
    launched = start("-n", "2", "--grace-seconds", "1", "--", "python", SCRIPT, "talk", str(how_long))
    try:
        if how_long:
            time.sleep(8)  # by then neither pipe has room
            launched.send_signal(signal.SIGTERM)
        launched.wait(timeout=30)
    finally:
        launched.kill()
    assert launched.returncode == status
    out, _ = launched.communicate()
    assert out.startswith("line 0 of process 0")


def test_colors_are_for_terminals():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(Terminal()) as err:
        launch([sys.executable, SCRIPT, "bar"], config=LaunchConfig())
    assert "\x1b[33m[1]\x1b[0m é after the bar\n" in err.getvalue()


def test_what_was_set_for_one_process_is_not_passed_on(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_dump_to=")
    monkeypatch.setenv("SLURM_NODEID", "3")
    launched = Launched("environment")
    names = "SLURM_JOB_ID SLURM_LOCALID SLURM_NTASKS SLURM_PROCID SLURM_STEP_NODELIST"
    assert launched.out == f"{patient_flags('--xla_dump_to=')} {names}\n"


@pytest.mark.parametrize(
    ("flags", "patient"),
    [
        ("", "--xla_cpu_collective_call_terminate_timeout_seconds=3600"),
        ("--xla_a=1", "--xla_a=1 --xla_cpu_collective_call_terminate_timeout_seconds=3600"),
        ("--xla_cpu_collective_call_terminate_timeout_seconds=9", None),
        ("flags.txt", None),
    ],
)
def test_simulated_devices_wait_for_one_another(flags, patient):
    assert patient_flags(flags) == (flags if patient is None else patient)


@pytest.mark.slow
def test_killing_the_launcher_leaves_nothing():
    process = start("-n", "2", "--", "python", SCRIPT, "children")
    pids = [int(pid) for pid in read_until(process.stdout, r"\d+", 2)]
    pids += [int(pid) for line in read_until(process.stderr, r"pids (\d+ \d+)", 1) for pid in line.split()]
    assert len(pids) == 4 and all(map(is_alive, pids))
    process.kill()
    process.communicate(timeout=10)
    assert await_end(pids) == []


def test_what_a_process_has_started_ends_with_it():
    launched = Launched("parent")
    assert launched.result.status == 0
    assert launched.seconds < 5
    assert await_end([int(pid) for pid in re.findall(r"child (\d+)", launched.out + launched.err)]) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_once(number):
    process = start("-n", "2", "--", "python", SCRIPT, "wait")
    read_until(process.stdout, "waiting", 1)
    read_until(process.stderr, "waiting", 1)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 75
    assert out == f"saved {number.name}\n"
    assert f"[1] saved {number.name}\n" in err
    assert f"{number.name} is passed on" in err


@pytest.mark.slow
def test_a_second_signal_kills():
    process = start("-n", "2", "--grace-seconds", "60", "--", "python", SCRIPT, "deaf")
    pids = [int(pid) for pid in read_until(process.stdout, r"waiting (\d+)", 1)]
    pids += [int(pid) for pid in read_until(process.stderr, r"waiting (\d+)", 1)]
    process.send_signal(signal.SIGINT)
    read_until(process.stderr, "once more kills", 1)
    assert all(map(is_alive, pids))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGKILL
    assert await_end(pids) == []


@pytest.mark.slow
def test_the_command_line_passes_arguments_on():
    status, out, err = run("-n", "1", "--", "python", SCRIPT, "arguments", "3", "4")
    assert (status, out, err) == (0, "3 4\n", "")


@pytest.mark.slow
def test_the_closing_message_has_the_reason_first():
    status, _, err = run("-n", "2", "--", "python", SCRIPT, "exit", "1", "7")
    assert status == 7
    closing = err[err.index("zero-jax launch: process 1 of 2 ended with status 7") :]
    assert closing.splitlines()[1:3] == ["the last lines of its stderr:", "  bye"]


ERRORS = {
    "nothing": ([], "follows after `--`"),
    "no dashes": (["-n", "2", "train"], "write `--` before 'train'"),
    "nothing behind": (["--"], "is no command"),
    "near": (["--", "trian"], "did you mean 'train'?"),
    "nested": (["--", "launch", "--", "train"], "cannot launch"),
    "none": (["-n", "0", "--", "train"], "num_processes=0: give at least 1"),
    "grace": (["--grace-seconds", "-1", "--", "train"], "grace_seconds=-1.0"),
    "word": (["-n", "two", "--", "train"], "invalid int value: 'two'"),
    "option": (["--num-proceses", "2", "--", "train"], "did you mean --num-processes?"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_usage(name, capsys):
    arguments, told = ERRORS[name]
    with pytest.raises(SystemExit) as ended:
        options = build_parser().parse_args(["launch", *arguments])
        options.run(options)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_command_lines():
    python = sys.executable
    assert cli_launch.command_line(["--", "train", "--help"], COMMANDS) == [
        python,
        "-m",
        "zero_jax",
        "train",
        "--help",
    ]
    assert cli_launch.command_line(["--", "python", "-c", "1"], COMMANDS) == [python, "-c", "1"]
    assert cli_launch.command_line(["--", "sh", "--", "x"], COMMANDS)[1:] == ["--", "x"]


def test_handlers_that_python_did_not_install(monkeypatch):
    """They cannot be put back from here; the launch has its result all the same."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        with monkeypatch.context() as patched:
            patched.setattr(signal, "getsignal", lambda number: None)
            assert launch(["true"], config=LaunchConfig(num_processes=1)).status == 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_no_launch_in_a_launch(monkeypatch):
    monkeypatch.setenv(NUM_PROCESSES, "2")
    with pytest.raises(ValueError, match="cannot launch"):
        cli_launch.command_line(["--", "train"], COMMANDS)


def test_a_program_that_cannot_be_started():
    with pytest.raises(ValueError, match=r"cannot start '/no/such/program' .No such file"):
        launch(["/no/such/program"], config=LaunchConfig())

"""Records survive a broken run, and no writer ever breaks one."""

import contextlib
import json
import os
import pathlib
import shutil
import sys
import types

import pytest

from zero_jax.core.files.json_lines import JsonLinesWriter, read_records
from zero_jax.trainer.reporting import trackers as trackers_module
from zero_jax.trainer.reporting.trackers import TrackedRun, Trackers, tracker_functions
from zero_jax.trainer.reporting.writers import TensorBoardWriter, WandbWriter, WriterConfig
from zero_jax.trainer.reporting.writers import open_writers as open_trackers


def train(step, **figures):
    return {"kind": "train", "step": step, "loss": 1.0 / step, **figures}


def open_writers(config, folder, *, resume_step=None, **options):
    run = TrackedRun(name="run", folder=folder, config={"steps": 3}, resume_step=resume_step)
    return open_trackers(config, run, **options)


def write_run(path, steps, resume_step=None, **options):
    with contextlib.closing(JsonLinesWriter(path, resume_step=resume_step, **options)) as writer:
        for step in steps:
            writer.write(train(step))


def steps_of(path):
    return [record["step"] for record in read_records(path)]


def test_each_record_is_on_disk_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path)
    record = train(1, skipped=True, nonfinite_leaf=None, grad_norm=float("nan"), scale=float("inf"))
    writer.write(record)
    assert json.loads(path.read_text()) == {**record, "grad_norm": None, "scale": None}
    writer.close()


def test_a_new_run_does_not_overwrite_an_old_one(tmp_path):
    write_run(tmp_path / "metrics.jsonl", [1])
    with pytest.raises(FileExistsError):
        JsonLinesWriter(tmp_path / "metrics.jsonl")


def test_a_resumed_run_cuts_off_what_came_after(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_run(path, range(1, 8))
    with path.open("a") as file:
        file.write('{"kind": "validation", "step": 4, "loss": 2.0}\n{"kind": "train", "step": 8, "lo')
    write_run(path, [5, 6], resume_step=4)
    lines = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 4, 5, 6]
    assert json.loads(lines[4])["kind"] == "validation"
    assert list(tmp_path.iterdir()) == [path]
    write_run(path, [5], resume_step=4, is_evaluated=False)
    assert [(record["kind"], record["step"]) for record in read_records(path)] == [("train", k) for k in range(1, 6)]


def test_half_a_last_line_is_dropped_even_if_it_is_of_an_early_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_run(path, [1, 2])
    path.write_bytes(path.read_bytes() + b'{"kind": "train", "step": 3')
    write_run(path, [3], resume_step=10)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_damaged_lines_are_reported_and_kept_in_another_file(tmp_path):
    path, lines = tmp_path / "metrics.jsonl", []
    write_run(path, [1, 2])
    damaged = [b"\xff\x00{}\n", b'{"step": "seven"}\n']
    path.write_bytes(b"".join([damaged[0], path.read_bytes(), damaged[1], b'{"kind":']))
    for _ in range(2):  # the second time there is nothing to report
        open_writers(WriterConfig(), tmp_path, resume_step=2, log=lines.append).close()
    assert lines == ["metrics.jsonl: 2 damaged lines, which are no records, are in metrics.jsonl.damaged now"]
    assert steps_of(path) == [1, 2] and path.read_bytes().count(b"\n") == 2
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == b"".join(damaged)


def test_a_pipe_in_place_of_the_records_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    lines = []
    open_writers(WriterConfig(), tmp_path, resume_step=2, log=lines.append).close()
    assert "metrics.jsonl: writing failed" in lines[0] and "it is no regular file: move it away" in lines[0]
    with pytest.raises(OSError, match="no regular file"):
        list(read_records(tmp_path / "metrics.jsonl"))


def test_a_cut_that_is_broken_off_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write_run(path, range(1, 8))
    before = path.read_bytes()

    def broken(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="No space left"):
        JsonLinesWriter(path, resume_step=3)
    assert path.read_bytes() == before
    assert [other.name for other in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resuming_without_a_file_starts_one(tmp_path):
    write_run(tmp_path / "metrics.jsonl", [6], resume_step=5)
    assert steps_of(tmp_path / "metrics.jsonl") == [6]


class Disk:
    """Stands in for a file on a disk that has room for so many bytes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        if not self.room:
            raise OSError(28, "No space left on device")
        written = self.file.write(data[: self.room])
        self.room -= written
        return written

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_what_a_full_disk_does_not_take_is_said_once_and_written_when_it_has_room(tmp_path):
    lines, path = [], tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path)
    writer._file = disk = Disk(writer._file, room=70)  # one record, and a part of another
    functions = {"metrics.jsonl": lambda: writer, "b": lambda: JsonLinesWriter(tmp_path / "b")}
    with contextlib.closing(Trackers(functions, log=lines.append)) as w:
        for step in (1, 2, 3):
            w.write(train(step))
            assert path.read_bytes().endswith(b"}\n") and steps_of(path) == [1]
        disk.room = 1000
        w.write(train(4))
        assert steps_of(path) == [1, 2, 3, 4]
        disk.room = 0
        w.write(train(5))
    error = "No space left on device (the disk is full: free some space)"
    full = f"metrics.jsonl: writing failed, it is tried again with each record: {path}: {error}"
    again = "metrics.jsonl: writing works again, and what waited is written"
    lost = f"metrics.jsonl: 1 records are not written there: {path}: {error}"
    assert lines == [full, again, full, lost]
    assert steps_of(tmp_path / "b") == [1, 2, 3, 4, 5]


def test_a_file_that_vanished_is_made_anew(tmp_path):
    (tmp_path / "run").mkdir()
    with contextlib.closing(JsonLinesWriter(tmp_path / "run" / "metrics.jsonl")) as writer:
        writer.write(train(1))
        shutil.rmtree(tmp_path / "run")
        writer.write(train(2))
    assert steps_of(tmp_path / "run" / "metrics.jsonl") == [2]


class Collecting:
    """A tracker that fails while it `is_down`."""

    def __init__(self):
        self.records, self.is_down, self.is_closed = [], False, False

    def write(self, record):
        if self.is_down:
            raise ConnectionError("no route")
        self.records.append(record)

    def close(self):
        self.is_closed = True
        if self.is_down:
            raise ConnectionError("no route")


def test_a_tracker_that_cannot_be_opened_at_first_or_closed_ends_nothing_and_gets_all_records():
    lines, late, down, tries = [], Collecting(), Collecting(), []

    def opens_late():
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError("no route")
        return late

    trackers = Trackers({"late": opens_late, "down": lambda: down}, log=lines.append)
    trackers.write(train(1))
    assert (late.records, down.records) == ([], [train(1)])
    trackers.write(train(2))
    down.is_down = True
    trackers.close()
    trackers.write(train(3))
    assert late.records == down.records == [train(1), train(2)] and late.is_closed
    assert lines == [
        "late: writing failed, it is tried again with each record: ConnectionError: no route",
        "late: writing works again, and what waited is written",
        "down: it could not be closed: ConnectionError: no route",
    ]


def test_a_tracker_that_takes_long_to_fail_is_not_tried_with_each_record(monkeypatch):
    now, tried, lines = [0.0], [], []
    monkeypatch.setattr(trackers_module.time, "monotonic", lambda: now[0])

    class Slow:
        def write(self, record):
            tried.append(record["step"])
            now[0] += 90
            raise TimeoutError

        def close(self):
            pass

    with contextlib.closing(Trackers({"slow": Slow}, log=lines.append)) as trackers:
        for step in range(1, 21):
            trackers.write(train(step))
            now[0] += 60
    assert tried == [1, 1, 1]  # 900 seconds after the first try, and at the end
    assert lines[-1] == "slow: 20 records are not written there: TimeoutError: TimeoutError"


def test_trackers_of_the_users_own_are_objects_or_functions_of_the_run(tmp_path):
    given, opened, lines = Collecting(), [], []

    class Own(Collecting):
        def __init__(self, run):
            super().__init__()
            opened.append((run, self))

    functions = tracker_functions([given, Own, lambda run: given])
    assert list(functions) == ["Collecting", "Own", "<lambda>"]
    with contextlib.closing(open_writers(WriterConfig(), tmp_path, own=functions, log=lines.append)) as trackers:
        trackers.write(train(1))
    ((run, own),) = opened
    assert (run.name, run.folder, run.config, run.resume_step) == ("run", tmp_path, {"steps": 3}, None)
    assert own.records == [train(1)] and given.records == [train(1)] * 2 and not lines
    for wrong, message in (
        (3, r"trackers\[0\]=3 has no write\(\) and no close\(\): give an object with write"),
        (types.SimpleNamespace(write=print), r"has no close\(\)"),
        (lambda: given, r"cannot be called with \(run\)"),
    ):
        with pytest.raises(ValueError, match=message):
            tracker_functions([wrong])


def events_of(folder):
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(pathlib.Path(folder).iterdir(), key=os.path.getmtime):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            found.append(Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    return found


def scalars_of(folder):
    return [(event.step, value.tag, value.simple_value) for event in events_of(folder) for value in event.summary.value]


def test_tensorboard_has_every_figure_under_its_name(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.write(train(1, skipped=False, nonfinite_leaf="a/b", mfu=None))
    writer.write({"kind": "validation", "step": 2, "loss": 0.5})
    writer.close()
    assert scalars_of(tmp_path) == [(1, "train/loss", 1.0), (1, "train/skipped", 0.0), (2, "validation/loss", 0.5)]
    assert not any(event.HasField("session_log") for event in events_of(tmp_path))


def test_tensorboard_hides_what_came_after_the_step_that_a_run_goes_on_from(tmp_path):
    for steps, resume_step in (((1, 2, 3), None), ((3, 4), 2)):
        writer = TensorBoardWriter(tmp_path, resume_step=resume_step)
        for step in steps:
            writer.write(train(step))
        writer.close()
    assert len(list(tmp_path.iterdir())) == 2
    (start,) = [event for event in events_of(tmp_path) if event.HasField("session_log")]
    assert (start.step, start.session_log.status) == (3, start.session_log.START)


def shown_by_tensorboard(folder):
    """Returns the scalars that TensorBoard shows: a start of a session hides what came before of later steps."""
    shown = []
    for event in events_of(folder):
        if event.HasField("session_log") and event.session_log.status == event.session_log.START:
            shown = [scalar for scalar in shown if scalar[0] < event.step]
        shown += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return shown


def test_a_validation_that_is_measured_again_at_each_resume_is_shown_once(tmp_path):
    config, validation = WriterConfig(tensorboard=True), {"kind": "validation", "step": 2}
    for attempt, resume_step in enumerate((None, 2, 2)):
        with contextlib.closing(open_writers(config, tmp_path, resume_step=resume_step, is_evaluated=False)) as writers:
            records = [train(1), train(2)] if resume_step is None else [{**validation, "loss": 8.0 + attempt}]
            for record in [*records, train(3)]:
                writers.write(record)
        os.utime(max((tmp_path / "tensorboard").iterdir(), key=os.path.getmtime), (attempt, attempt))
    assert shown_by_tensorboard(tmp_path / "tensorboard") == [
        (1, "train/loss", 1.0),
        (2, "train/loss", 0.5),
        (2, "validation/loss", 10.0),
        (3, "train/loss", pytest.approx(1 / 3)),
    ]


def test_tensorboard_writes_what_a_full_disk_lost_to_another_file(tmp_path, monkeypatch):
    writer = TensorBoardWriter(tmp_path)
    for step in (1, 2):
        writer.write(train(step))
    failures = [OSError(28, "No space left on device")]
    monkeypatch.setattr(writer._events, "flush", lambda: failures and (_ for _ in ()).throw(failures.pop()))
    (full,) = tmp_path.iterdir()
    before = full.read_bytes()
    with pytest.raises(OSError, match="No space"):
        writer.write(train(3))
    full.write_bytes(before)  # nothing of it has reached the disk
    writer.write(train(3))
    writer.close()
    assert [step for step, *_ in scalars_of(tmp_path)] == [1, 2, 3]


def test_tensorboard_has_the_start_of_a_resumed_session_on_the_disk_before_a_record(tmp_path):
    writer = TensorBoardWriter(tmp_path, resume_step=2)
    assert [event.step for event in events_of(tmp_path) if event.HasField("session_log")] == [3]
    writer.close()


def test_tensorboard_has_each_record_on_the_disk_at_once(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.write(train(1))
    assert scalars_of(tmp_path) == [(1, "train/loss", 1.0)]
    writer.close()


@pytest.fixture
def wandb(monkeypatch):
    """Stands in for the package wandb, and returns what it was told."""
    module = types.ModuleType("wandb")
    module.__spec__ = types.SimpleNamespace(name="wandb")
    module.calls, module.is_down = [], False

    class Run:
        def define_metric(self, *names, **options):
            module.calls.append(("define", *names, options))

        def log(self, figures):
            if module.is_down:
                raise ConnectionError("unreachable")
            module.calls.append(("log", figures))

        def finish(self):
            module.calls.append(("finish",))

    def init(**settings):
        module.calls.append(("init", settings))
        return Run()

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_gets_the_figures_and_goes_on_by_id(tmp_path, wandb):
    writer = WandbWriter("project", folder=tmp_path, name="run", config={"steps": 3})
    writer.write(train(1, nonfinite_leaf=None))
    writer.close()
    resumed = WandbWriter("project", folder=tmp_path, name="run", is_resumed=True)
    resumed.close()
    first, again = (call[1] for call in wandb.calls if call[0] == "init")
    assert first["id"] == again["id"]
    assert first["project"] == "project"
    assert first["config"] == {"steps": 3}
    assert again["resume"] == "allow"
    assert ("log", {"train/loss": 1.0, "step": 1}) in wandb.calls
    assert ("define", "*", {"step_metric": "step"}) in wandb.calls
    assert wandb.calls[-1] == ("finish",)
    WandbWriter("project", folder=tmp_path, name="run").close()
    assert [call[1] for call in wandb.calls if call[0] == "init"][-1]["id"] != first["id"]


def test_a_pipe_in_place_of_the_id_of_wandb_is_not_waited_for(tmp_path, wandb):
    os.mkfifo(tmp_path / "wandb-id")
    with pytest.raises(ValueError, match=r"wandb-id .it is a named pipe, not a file.: remove it"):
        WandbWriter("project", folder=tmp_path, name="run", is_resumed=True)
    WandbWriter("project", folder=tmp_path, name="run").close()
    assert (tmp_path / "wandb-id").is_file()


def test_all_writers_of_a_run_and_one_that_loses_its_network(tmp_path, wandb):
    lines = []
    config = WriterConfig(tensorboard=True, wandb="project")
    with contextlib.closing(open_writers(config, tmp_path, log=lines.append)) as writers:
        writers.write(train(1))
        wandb.is_down = True
        writers.write(train(2))
        writers.write(train(3))
        wandb.is_down = False
        writers.write(train(4))
        wandb.is_down = True
        writers.write(train(5))
    failed = "Weights & Biases: writing failed, it is tried again with each record: ConnectionError: unreachable"
    again = "Weights & Biases: writing works again, and what waited is written"
    lost = "Weights & Biases: 1 records are not written there: ConnectionError: unreachable"
    assert lines == [failed, again, failed, lost]
    assert steps_of(tmp_path / "metrics.jsonl") == [1, 2, 3, 4, 5]
    assert [call[1]["step"] for call in wandb.calls if call[0] == "log"] == [1, 2, 3, 4]
    ids = {call[1]["id"] for call in wandb.calls if call[0] == "init"}
    assert len(ids) == 1 and wandb.calls[-1] == ("finish",)  # one run, ended and gone on with
    assert [step for step, *_ in scalars_of(tmp_path / "tensorboard")] == [1, 2, 3, 4, 5]
    with contextlib.closing(open_writers(config, tmp_path, resume_step=2, log=lines.append)) as writers:
        writers.write(train(3))
    assert steps_of(tmp_path / "metrics.jsonl") == [1, 2, 3]


def test_what_is_not_installed_is_an_error_with_a_remedy(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'needs wandb: .*pip install .*"zero-jax\[wandb\]", or leave it out'):
        WriterConfig(wandb="project")
    with pytest.raises(ValueError, match=r'needs tensorboardX: .*pip install .*"zero-jax\[train\]"'):
        WriterConfig(tensorboard=True)
    with pytest.raises(ValueError, match="name of a project"):
        WriterConfig(wandb=" ")
    assert WriterConfig() == WriterConfig(tensorboard=False, wandb=None)

"""How a run ends: what its status promises, and what it may not be saved as."""

import contextlib
import dataclasses
import errno
import io
import logging
import math
import os
import pathlib
import resource
import signal
import sys
import types

import faults
import jax
import jax.numpy as jnp
import optax
import pytest
from faults import MODEL, ZERO, assert_goes_on_as_if_nothing_had_happened, checkpoints, make_config, step_folder, train

import zero_jax as zero
from zero_jax import trainer
from zero_jax.checkpoint import CheckpointConfig, Checkpointer
from zero_jax.checkpoint.array_writes import ArrayWrites
from zero_jax.cli import commands as cli
from zero_jax.core import output
from zero_jax.trainer import loop
from zero_jax.trainer import result as result_module
from zero_jax.training.state.checks import NonfiniteState

pytestmark = pytest.mark.usefixtures("no_picture")


# What is not finite is not saved as good


@pytest.mark.slow
def test_params_that_an_update_makes_infinite_are_not_saved_though_loss_and_gradients_are_finite(tmp_path):
    """As with an infinite learning rate, from the sixth update on; step 6 is the one that is saved next."""
    tx = optax.sgd(lambda count: jnp.where(count == 5, jnp.inf, 0.02))
    config, lines = make_config(tmp_path, checkpoint=CheckpointConfig(save_every=3, keep_last=1, keep_best=0)), []
    result = trainer.train(config, model=MODEL, tx=tx, log=lines.append)
    assert (result.status, trainer.EXIT_STATUS[result.status], result.num_steps) == ("diverged", 3, 6)
    assert checkpoints(tmp_path) == ["step_00000003"]
    (told,) = [line for line in lines if line.startswith("stopping at step 6")]
    assert "NaN or infinities in params/blocks/" in told and "other leaves of its state" in told
    assert "The last good checkpoint is that of step 3" in told


@pytest.mark.slow
@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_state_whose_validation_loss_is_not_finite_is_saved_but_not_as_the_best(loss, tmp_path, monkeypatch):
    losses, lines = iter([3.0, 2.0, loss, loss]), []
    monkeypatch.setattr(loop.Validation, "means", lambda *_, **__: {"loss": next(losses)})
    checkpoint = CheckpointConfig(save_every=2, keep_last=1, keep_best=1)
    result = train(tmp_path, lines=lines, steps=6, eval_every=2, checkpoint=checkpoint)
    assert result.status == "done" and checkpoints(tmp_path) == ["step_00000002", "step_00000006"]
    assert f"step 6: its validation loss is {loss}: the state is saved, but not as one of the best" in lines


@pytest.mark.slow
def test_leaves_that_were_infinite_from_the_start_are_no_reason_to_stop(tmp_path, unbroken):
    """A model may keep a mask of infinities among its params."""

    def init_fn(key):
        return {**MODEL.init_fn(key), "mask": jnp.array([0.0, -jnp.inf])}

    def loss_fn(params, batch):
        return MODEL.loss_fn({name: x for name, x in params.items() if name != "mask"}, batch)

    masked = dataclasses.replace(MODEL, init_fn=init_fn, loss_fn=loss_fn)
    config = make_config(tmp_path, steps=4)
    assert trainer.train(config, model=masked, tx=optax.sgd(0.02), log=lambda _: None).status == "done"
    assert checkpoints(tmp_path) == ["step_00000004"]


@pytest.mark.slow
def test_a_run_that_begins_with_params_that_are_not_finite_is_told_which(tmp_path):
    """The gradients that are not finite are those of all leaves, and the first of these was named alone."""

    def init_fn(key):
        params = MODEL.init_fn(key)
        return {**params, "embed": params["embed"].at[0, 0].set(jnp.nan)}

    lines = []
    config = make_config(tmp_path, max_nonfinite_steps=2)
    result = trainer.train(config, model=dataclasses.replace(MODEL, init_fn=init_fn), log=lines.append)
    assert result.status == "diverged"
    assert any(line.endswith("params/embed was not finite when the run began: look there first") for line in lines)


def test_the_library_says_which_leaf_is_not_finite_and_saves_it_where_it_is_allowed(tmp_path):
    mesh = zero.make_mesh(devices=jax.devices()[:2])
    params = {"a": jnp.ones((64, 64)), "b": jnp.full(3, jnp.nan), "count": jnp.arange(3)}
    best_so_far = optax.chain(optax.contrib.reduce_on_plateau(), optax.sgd(0.1))  # whose state begins with infinity
    for precision, leaves in {"fp32": ("params/b",), "bf16": ("master/b", "params/b")}.items():
        config = dataclasses.replace(ZERO, stage=2, precision=precision)
        state = zero.init_state(params, best_so_far, jax.random.key(0), mesh=mesh, config=config)
        folder = tmp_path / precision
        with Checkpointer(folder, log=pytest.fail) as checkpointer:
            with pytest.raises(
                NonfiniteState, match=rf"step 1 is not saved: NaN or infinities in {leaves[0]}"
            ) as caught:
                checkpointer.save(1, state)
            assert set(caught.value.leaves) == set(leaves) and isinstance(caught.value, ValueError)
            assert not checkpointer.steps()
            checkpointer.save(1, state, extra={"mine": 1}, allow_nonfinite=True)
        found = zero.checkpoint.describe(folder)
        assert found.extra["mine"] == 1 and set(found.extra["nonfinite_leaves"]) == set(leaves)


@pytest.mark.parametrize("loss", ["x", [1.0], True, 1j])
def test_a_loss_that_is_no_number_is_refused_at_the_call(loss, tmp_path):
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(ValueError, match="give the validation loss as a numb"):
        checkpointer.save(1, None, loss=loss)  # type: ignore[arg-type]


# What happens at the start


@pytest.mark.slow
def test_a_first_execution_may_take_as_long_as_compiling(tmp_path, monkeypatch, unbroken):
    """Kernels are tried out in it, and a step is only waited for when the next one is on its way."""
    beats, compiling = [], set()
    monkeypatch.setattr(loop.Watchdog, "beat", lambda self, phase, step=None: beats.append((phase, step)))
    add_step = loop.Progress.add_step

    def waited_for(self, dispatched):
        if dispatched.step in (1, 2):
            compiling.add((dispatched.step, beats[-1][0]))
        return add_step(self, dispatched)

    monkeypatch.setattr(loop.Progress, "add_step", waited_for)
    train(tmp_path, steps=4)
    assert compiling == {(1, "compile"), (2, "step")}


@pytest.mark.slow
@pytest.mark.parametrize("where", ["config.toml", "config.json"])
def test_a_disk_that_is_full_at_the_start_is_told_with_the_file_and_leaves_the_name_free(where, tmp_path, monkeypatch):
    write, full = pathlib.Path.write_text, [True]

    def no_room(path, text, **options):
        if where in path.name and full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as the system has it: without a name
        return write(path, text, **options)

    monkeypatch.setattr(pathlib.Path, "write_text", no_room)
    command, stderr = train_command(tmp_path), io.StringIO()
    with contextlib.redirect_stderr(stderr):
        assert cli.main(command) == 1
    told = stderr.getvalue()
    file, remedy = f"{tmp_path}/runs/run/{where}", "(the disk is full: free some space)"
    assert told == f"zero-jax train: error: {file}: No space left on device {remedy}\n"
    assert not (tmp_path / "runs/run").exists()
    full[0] = False
    assert cli.main(command) == 0


@pytest.mark.slow
def test_a_config_file_of_the_users_in_the_folder_of_a_run_is_kept(tmp_path, capsys):
    (folder := tmp_path / "runs/run").mkdir(parents=True)
    (path := folder / "config.toml").write_text(text := "# my notes\n[run]\nseed = 3\n")
    for data, status in ("no/such", 2), (None, 0), (None, 0):
        words = [*train_command(tmp_path), "--config", str(path), "--resume", "auto"]
        assert cli.main([*words, *(["--data", data] if data else [])]) == status
        kept = path if status else folder / "config-1.toml"
        assert kept.read_text() == text and "seed = 3" in path.read_text()
    assert capsys.readouterr().out.count("it is config-1.toml now") == 1
    assert [x.name for x in folder.glob("config-*")] == ["config-1.toml"]


@pytest.mark.slow
def test_a_run_that_is_refused_leaves_the_configs_of_the_one_that_it_would_resume(tmp_path, capsys):
    command, configs = [*train_command(tmp_path), "--resume", "auto"], ("config.toml", "config.json")
    assert cli.main(command) == 0
    before = [(tmp_path / "runs/run" / name).read_text() for name in configs]
    assert cli.main([*command, "--optimizer", "sgd", "--steps", "2"]) == 2
    assert "does not fit the state" in capsys.readouterr().err
    assert [(tmp_path / "runs/run" / name).read_text() for name in configs] == before
    assert cli.main([*command, "--steps", "2"]) == 0  # by the right options it resumes
    assert "steps = 2" in (tmp_path / "runs/run/config.toml").read_text()


def train_command(folder):
    """Returns the words of a command that takes a single step."""
    (folder / "text.txt").write_text("the same words again and " * 200)
    options = {"data": folder / "text.txt", "token-cache": "none", "out": folder / "runs", "name": "run"}
    options |= {"num-layers": 1, "d-model": 16, "num-heads": 2, "seq-len": 16, "devices": 2, "sample-tokens": 0}
    options |= {"steps": 1, "eval-batches": 1, "save-every": 0}
    return ["train", *(str(x) for name, value in options.items() for x in (f"--{name}", value))]


@pytest.mark.slow
def test_a_save_that_fails_is_a_line_on_the_screen_without_tracebacks_of_orbax(tmp_path, monkeypatch, capfd, caplog):
    def in_the_way(self, arrays, folder):
        folder.rmdir()
        folder.write_text("a file where a folder should be")
        start(self, arrays, folder)

    start = ArrayWrites.__init__
    monkeypatch.setattr(ArrayWrites, "__init__", in_the_way)
    assert cli.main(train_command(tmp_path)) == trainer.EXIT_STATUS["unsaved"]
    shown = capfd.readouterr()
    assert shown.out.count("NOT saved to") == 1 and "Not a directory" in shown.out and "Traceback" not in shown.err
    assert not [record for record in caplog.records if record.exc_info] and not logging.getLogger("absl").filters


# A run that was told to stop


def no_room(folder):
    """Returns functions that fill the disk (files may not grow), and free it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(*_):
        faults.wait_for(step_folder(folder, 4))
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))
        signal.raise_signal(signal.SIGTERM)

    return fill, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.slow
def test_a_stop_whose_state_cannot_be_saved_does_not_say_saved(tmp_path, tamper, unbroken):
    fill, free = no_room(tmp_path)
    mend, lines = tamper({6: fill}), []
    try:
        result = train(tmp_path, lines=lines)
    finally:
        free()
    assert (result.status, trainer.EXIT_STATUS[result.status]) == ("preempted_unsaved", 1)
    assert "the state of step 6 is NOT SAVED: the newest checkpoint is that of step 4" in lines
    assert "THE LAST STATE IS NOT SAVED" in str(result) and checkpoints(tmp_path) == ["step_00000004"]
    mend()
    assert_goes_on_as_if_nothing_had_happened(tmp_path, unbroken, after=4)


@pytest.mark.slow
def test_a_reader_of_the_log_that_has_gone_is_a_signal_to_save_and_stop(tmp_path, unbroken):
    """As of `| tee log` where that is killed: no step is lost."""

    def log(line):
        if line.startswith("step  5/"):
            raise BrokenPipeError

    result = train(tmp_path, lines=types.SimpleNamespace(append=log), log_every=1)
    assert result.status == "preempted" and result.num_steps in (5, 6)
    assert checkpoints(tmp_path)[-1] == f"step_{result.num_steps:08d}"
    assert_goes_on_as_if_nothing_had_happened(tmp_path, unbroken, after=result.num_steps)


@pytest.mark.slow
def test_a_reader_of_the_log_that_does_not_read_stops_neither_the_run_nor_its_end(tmp_path, monkeypatch, tamper):
    """As after Ctrl-S, in a pager, or where a collector of logs hangs."""
    monkeypatch.setattr(output, "PATIENCE_SECONDS", 0.05)
    reading, writing = os.pipe()

    def fill(*_):
        os.set_blocking(writing, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writing, b"x")
        os.set_blocking(writing, True)

    tamper({2: fill})
    with open(reading, "rb"), open(writing, "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        result = trainer.train(make_config(tmp_path, log_every=1), model=MODEL)
    assert result.status == "done" and checkpoints(tmp_path)[-1] == "step_00000012"


@pytest.mark.slow
def test_a_signal_before_the_first_step_stops_at_once_and_loses_nothing(tmp_path, monkeypatch, unbroken):
    begin = loop.begin

    def interrupted(run):
        signal.raise_signal(signal.SIGTERM)
        return begin(run)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "begin", interrupted)
        result = train(tmp_path)
        assert (result.status, result.num_steps) == ("preempted", 0) and not result.num_failed_saves
    assert_goes_on_as_if_nothing_had_happened(tmp_path, unbroken, after=0)


@pytest.mark.slow
def test_a_signal_during_an_evaluation_saves_without_it_and_the_next_processes_evaluate(
    tmp_path, monkeypatch, tamper, unbroken
):
    means = loop.Validation.means
    calls = []

    def interrupted(self, params, *, goes_on):
        calls.append(params)
        if len(calls) == 2:  # the first is that of step 0
            signal.raise_signal(signal.SIGHUP)
        return means(self, params, goes_on=goes_on)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Validation, "means", interrupted)
        result = train(tmp_path)
    assert (result.status, result.num_steps) == ("preempted", 6)
    assert checkpoints(tmp_path) == ["step_00000004", "step_00000006"]
    mend = tamper({7: lambda *_: 1 / 0})  # the next one evaluates, and saves nothing before it fails
    with pytest.raises(ZeroDivisionError):
        train(tmp_path)
    mend()
    assert_goes_on_as_if_nothing_had_happened(tmp_path, unbroken, after=6)


def test_a_picture_that_takes_long_is_not_waited_for_and_half_of_it_never_seen(tmp_path, monkeypatch):
    path, asked = tmp_path / "loss.png", {"is_hurried": lambda: True}
    losses, title = result_module.run_losses(tmp_path, train=[(1, 2.0)], validation=[]), "run"
    assert result_module.draw_losses(path, losses, title=title, **asked) is None
    assert path.read_bytes().startswith(b"\x89PNG") and os.listdir(tmp_path) == ["loss.png"]

    def forever(partial, *_, **__):
        partial.write_text("half")
        import time

        time.sleep(20)

    monkeypatch.setattr(result_module, "_HURRIED_SECONDS", 0.1)
    monkeypatch.setattr(result_module, "plot_runs", forever)
    assert result_module.draw_losses(path, losses, title=title, **asked) == "drawing it took longer than 0 s"
    assert path.read_bytes().startswith(b"\x89PNG")

"""Faults in the loop of a run: numbers, signals, data, figures, config. Nothing done is lost, and all is told."""

import dataclasses
import math
import os
import resource
import shutil
import signal

import faults
import jax
import jax.numpy as jnp
import pytest
from faults import (
    MODEL,
    STEPS,
    ZERO,
    assert_goes_on_as_if_nothing_had_happened,
    checkpoints,
    make_config,
    make_model,
    read,
    step_folder,
    train,
)

from zero_jax import trainer
from zero_jax.cli import commands as cli
from zero_jax.data.dataset import DataConfig
from zero_jax.data.parts import TokenPart
from zero_jax.models import gpt
from zero_jax.sharding.precision import LossScaleConfig, Precision
from zero_jax.trainer.inputs import text
from zero_jax.trainer.reporting.writers import WriterConfig
from zero_jax.trainer.run import prepare

pytestmark = pytest.mark.usefixtures("no_picture")


def steps_of(records):
    return [record["step"] for record in records if record["kind"] == "train"]


# Numbers


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_skipped_counted_and_named(tmp_path, tamper, monkeypatch):
    broken, without, lines = tmp_path / "broken", tmp_path / "without", []
    for folder in (broken, without):
        folder.mkdir()
    tamper({6: faults.not_a_number})
    result = train(broken, lines=lines)
    assert (result.status, result.num_skipped_steps) == ("done", 1)
    bad = next(record for record in read(broken) if record["step"] == 6)
    assert (bad["loss"], bad["skipped"], bad["nonfinite_leaf"]) == (None, True, "blocks/attention_norm")
    (told,) = [line for line in lines if "skipped" in line]
    assert "step  6/12" in told and "the gradient of blocks/attention_norm was not finite" in told

    class Without(faults.Tampered):
        def __next__(self):
            if self.position == 5 * faults.BATCH_SIZE:
                next(self.batches)
            return next(self.batches)

    monkeypatch.setattr(text.data, "train_batches", lambda *a, **o: Without(faults.real_train_batches(*a, **o), {}))
    train(without)
    after = [(r["loss"], r["grad_norm"], r["learning_rate"]) for r in read(broken) if r["kind"] == "train"]
    expected = [(r["loss"], r["grad_norm"], r["learning_rate"]) for r in read(without) if r["kind"] == "train"]
    assert after[:5] == expected[:5] and after[6:] == expected[5:-1]


@pytest.mark.slow
def test_an_infinite_gradient_of_one_leaf_is_named(tmp_path, tamper):
    @jax.custom_vjp
    def fragile(x, trigger):
        return x

    fragile.defvjp(
        lambda x, trigger: (x, trigger),
        lambda trigger, grad: (jnp.where(trigger, jnp.inf, grad).astype(grad.dtype), None),
    )

    def loss_fn(params, batch):
        norm = params["final_norm"]
        broken = jax.tree.map(lambda x: fragile(x, batch["weights"].max() > 1), norm)
        return gpt.loss_fn(faults.GPT)({**params, "final_norm": broken}, batch)

    tamper({6: lambda batch, step: {**batch, "weights": batch["weights"] * 4}})
    result = train(tmp_path, model=make_model(loss_fn=loss_fn))
    records = {record["step"]: record for record in read(tmp_path) if record["kind"] == "train"}
    assert result.num_skipped_steps == 1
    assert math.isfinite(records[6]["loss"]) and records[6]["nonfinite_leaf"].startswith("final_norm")
    assert [step for step in records if records[step]["skipped"]] == [6]


@pytest.mark.slow
@pytest.mark.parametrize("skip", [None, False], ids=["skipped", "not skipped"])
def test_too_many_bad_steps_in_a_row_stop_the_run_with_the_last_good_checkpoint(tmp_path, tamper, unbroken, skip):
    """Where bad updates are not skipped, one bad batch is enough to spoil everything after it."""
    bad = {step: faults.not_a_number for step in ([6, 7, 8, 9] if skip is None else [6])}
    mend, lines = tamper(bad), []
    zero = dataclasses.replace(ZERO, skip_nonfinite=skip)
    result = train(tmp_path, lines=lines, max_nonfinite_steps=4, zero=zero)
    assert (result.status, trainer.EXIT_STATUS[result.status]) == ("diverged", 3)
    assert result.num_steps in (9, 10)
    assert checkpoints(tmp_path) == ["step_00000004"]
    told = "\n".join(lines)
    assert "4 steps in a row were not finite, first in the gradient of blocks/" in told
    assert "The last good checkpoint is that of step 4" in told and "step 8: not saved" in told
    mend()
    assert_goes_on_as_if_nothing_had_happened(tmp_path, unbroken, after=4)


@pytest.mark.slow
@pytest.mark.parametrize("is_told", [False, True], ids=["done", "told to stop"])
def test_the_end_of_a_run_is_saved_though_its_last_update_was_skipped(tmp_path, tamper, is_told, unbroken):
    def bad(batch, step):
        if is_told:
            signal.raise_signal(signal.SIGTERM)
        return faults.not_a_number(batch, step)

    last = 6 if is_told else STEPS
    tamper({last: bad})
    result = train(tmp_path)
    assert result.status == ("preempted" if is_told else "done") and f"step_{last:08d}" in checkpoints(tmp_path)
    lines = []
    assert train(tmp_path, lines=lines).num_skipped_steps == 1
    assert any(line.startswith(f"resuming after step {last} of ") for line in lines)


@pytest.mark.slow
def test_a_loss_scale_that_is_too_large_falls_and_is_restored(tmp_path, tamper):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    # CPUs multiply no fp16, so it is the scaled loss itself that overflows, in fp32.
    zero = dataclasses.replace(ZERO, precision=Precision(loss_scale=LossScaleConfig(initial=2.0**127)))
    whole.mkdir()
    tamper({6: faults.not_a_number})
    result = train(whole, zero=zero)
    scales = [record["loss_scale"] for record in read(whole) if record["kind"] == "train"]
    assert result.num_skipped_steps == 2 and scales == [2.0**127] + [2.0**126] * 5 + [2.0**125] * 6
    shutil.copytree(whole, cut)
    for step in (8, 12):
        shutil.rmtree(step_folder(cut, step))
    train(cut, zero=zero)
    assert read(cut) == read(whole)


# Signals


@pytest.mark.parametrize(
    "name", ["SIGTERM", *(pytest.param(name, marks=pytest.mark.slow) for name in ("SIGINT", "SIGUSR1"))]
)
def test_a_signal_saves_and_stops_and_the_run_goes_on(name, tmp_path, tamper, unbroken):
    mend, lines = tamper({6: lambda *_: signal.raise_signal(getattr(signal, name))}), []
    result = train(tmp_path, lines=lines)
    assert (result.status, trainer.EXIT_STATUS[result.status], result.num_steps) == ("preempted", 75, 6)
    assert f"{name}: stopping after step 6" in lines and checkpoints(tmp_path) == ["step_00000004", "step_00000006"]
    mend()
    if name == "SIGTERM":
        assert_goes_on_as_if_nothing_had_happened(tmp_path, unbroken, after=6)


@pytest.mark.slow
def test_the_second_interrupt_ends_the_run_at_once_and_costs_the_steps_since_the_save(tmp_path, tamper, unbroken):
    def twice(*_):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    mend = tamper({6: twice})
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path)
    assert checkpoints(tmp_path) == ["step_00000004"]
    mend()
    assert_goes_on_as_if_nothing_had_happened(tmp_path, unbroken, after=4)


@pytest.mark.slow
def test_a_signal_at_the_very_last_step_changes_nothing(tmp_path, tamper, unbroken):
    tamper({STEPS: lambda *_: signal.raise_signal(signal.SIGTERM)})
    assert train(tmp_path).status == "done"
    assert read(tmp_path) == read(unbroken) and checkpoints(tmp_path) == checkpoints(unbroken)


def test_a_run_that_is_done_has_nothing_left_to_do(unbroken, tmp_path):
    shutil.copytree(unbroken, tmp_path, dirs_exist_ok=True)
    assert_goes_on_as_if_nothing_had_happened(tmp_path, unbroken, after=12)


# Errors in the loss and in the data


@pytest.mark.slow
def test_a_loss_that_raises_leaves_a_folder_to_begin_in(tmp_path, unbroken):
    def loss_fn(params, batch):
        raise TypeError("this model takes no batch of that kind")

    with pytest.raises(TypeError, match="no batch of that kind"):
        train(tmp_path, model=make_model(loss_fn=loss_fn))
    assert_goes_on_as_if_nothing_had_happened(tmp_path, unbroken, after=0)


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["cut", "deleted"])
def test_tokens_that_change_under_the_run_end_it_with_their_name(harm, tmp_path, tamper, unbroken):
    config = DataConfig(data=str(tmp_path / "text.txt"), token_cache=str(tmp_path / "cache"))

    def break_tokens(*_):
        (tokens,) = (tmp_path / "cache").glob("*/tokens.bin")
        if harm == "cut":
            os.truncate(tokens, 100)
        else:
            tokens.unlink()

    mend = tamper({6: break_tokens})
    with pytest.raises(ValueError, match=r"tokens.bin (changed|vanished|was cut) while it was read"):
        train(tmp_path, data=config)
    assert len(checkpoints(tmp_path)) == 2  # that of step 4, and of the last step before the error
    mend()
    lines = []
    train(tmp_path, data=config, lines=lines)  # the damaged cache is made anew
    assert read(tmp_path) == read(unbroken)


@pytest.mark.slow
def test_an_error_of_the_reading_thread_ends_the_run_with_its_state(tmp_path, monkeypatch, unbroken):
    cut_rows, count = TokenPart.cut_rows, []

    def broken(self, rows, *, seq_len):
        count.append(rows)
        if len(count) > 10:
            raise OSError(5, "Input/output error", "tokens.bin")
        return cut_rows(self, rows, seq_len=seq_len)

    with monkeypatch.context() as patch:
        patch.setattr(TokenPart, "cut_rows", broken)
        with pytest.raises(OSError, match=r"Input/output error: 'tokens.bin'"):
            train(tmp_path)
    step_4, last = checkpoints(tmp_path)  # threads read ahead: the step of the error is not always the same
    assert step_4 == "step_00000004"
    assert_goes_on_as_if_nothing_had_happened(tmp_path, unbroken, after=int(last.removeprefix("step_")))


def test_a_run_does_not_go_on_with_another_text(unbroken, tmp_path):
    shutil.copytree(unbroken, tmp_path, dirs_exist_ok=True)
    (tmp_path / "text.txt").write_text("other words than before and " * 200)
    with pytest.raises(ValueError, match=r"was trained on other data \(fingerprint: .*another run .* init_from"):
        train(tmp_path)
    assert read(tmp_path) == read(unbroken) and checkpoints(tmp_path) == checkpoints(unbroken)


def test_a_broken_line_of_json_is_named(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "some words"}\n' * 4 + '{"text": "half a li\n')
    with pytest.raises(ValueError, match=r"line 5 of .*text.jsonl is no JSON"):
        train(tmp_path, data=DataConfig(data=str(path), token_cache=None))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("harm", ["tokens.bin cut", "meta.json cut", "documents.npy flipped"])
def test_a_damaged_token_cache_is_told_and_made_anew(harm, tmp_path, unbroken):
    config = DataConfig(data=str(tmp_path / "text.txt"), token_cache=str(tmp_path / "cache"))
    run = prepare(make_config(tmp_path, data=config), model=MODEL)
    (folder,) = (tmp_path / "cache").iterdir()
    name, how = harm.split()
    if how == "cut":
        os.truncate(folder / name, (folder / name).stat().st_size // 2)
    else:
        raw = bytearray((folder / name).read_bytes())
        raw[-1] ^= 0x40
        (folder / name).write_bytes(raw)
    lines = []
    again = prepare(make_config(tmp_path, data=config), model=MODEL, log=lines.append)
    assert str(folder) in lines[0] and "making it anew" in lines[0]
    assert again.input.identity == run.input.identity


def test_a_token_folder_that_was_cut_is_refused(tmp_path, capfd):
    (tmp_path / "text.txt").write_text("some words " * 100)
    folder = tmp_path / "tokens"
    assert cli.main(["tokenize", "--data", str(tmp_path / "text.txt"), "--tokens", str(folder)]) == 0
    os.truncate(folder / "tokens.bin", 100)
    with pytest.raises(ValueError, match=r"tokens has 50 tokens and 1 documents, but its meta.json says .* cut off"):
        train(tmp_path, data=DataConfig(data=str(folder)))
    assert not (tmp_path / "runs").exists()
    capfd.readouterr()


# What the run writes beside its checkpoints


@pytest.mark.slow
def test_a_full_disk_under_the_figures_is_told_and_the_run_goes_on(tmp_path, tamper, unbroken):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    metrics, lines = tmp_path / "runs/run/metrics.jsonl", []

    def limit(*_):
        faults.wait_for(step_folder(tmp_path, 4))
        resource.setrlimit(resource.RLIMIT_FSIZE, (metrics.stat().st_size + 100, hard))

    def free(*_):
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    try:
        tamper({5: limit, 7: free})
        result = train(tmp_path, lines=lines)
    finally:
        free()
    assert result.status == "done" and "step_00000012" in checkpoints(tmp_path)
    (told,) = [line for line in lines if "writing failed" in line]
    assert told.startswith("metrics.jsonl: writing failed, it is tried again with each record: ")
    assert read(tmp_path) == read(unbroken)


@pytest.mark.slow
def test_tensorboard_that_fails_is_told_and_the_rest_is_written(tmp_path, monkeypatch, unbroken):
    from zero_jax.trainer.reporting.writers import TensorBoardWriter

    def broken(self, record):
        raise ConnectionError("the file server went away")

    monkeypatch.setattr(TensorBoardWriter, "write", broken)
    lines = []
    assert train(tmp_path, lines=lines, log=WriterConfig(tensorboard=True)).status == "done"
    assert read(tmp_path) == read(unbroken)
    (told,) = [line for line in lines if "writing failed" in line]
    assert told.startswith("TensorBoard: ") and "the file server went away" in told


@pytest.mark.slow
def test_a_picture_that_cannot_be_drawn_costs_nothing_else(tmp_path, monkeypatch, unbroken):
    monkeypatch.undo()
    shutil.copytree(unbroken, tmp_path, dirs_exist_ok=True)
    (tmp_path / "runs/run/loss.png").unlink(missing_ok=True)
    (tmp_path / "runs/run/loss.png").mkdir()
    lines = []
    result = train(tmp_path, lines=lines)
    assert result.status == "done" and result.loss_curve is None
    assert "\nno loss curve " in str(result) and "loss.png" not in str(result)
    assert any(line.startswith("no picture of the loss: ") for line in lines)


@pytest.mark.slow
def test_a_folder_for_signs_of_life_that_cannot_be_made_is_told(tmp_path, unbroken, capfd):
    (tmp_path / "runs/run").mkdir(parents=True)
    (tmp_path / "runs/run/processes").write_text("a file in its place")
    assert train(tmp_path).status == "done"
    assert read(tmp_path) == read(unbroken)
    assert "watchdog: cannot write heartbeats" in capfd.readouterr().err


@pytest.mark.parametrize(
    "last",
    [
        '{"kind": "train", "step": 9, "lo',
        pytest.param("\x00\x00\x00", marks=pytest.mark.slow),
        pytest.param('{"step": "seven"}\n[]\n', marks=pytest.mark.slow),
    ],
)
def test_figures_that_end_in_half_a_line_are_mended(last, tmp_path, unbroken):
    shutil.copytree(unbroken, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(step_folder(tmp_path, 12))
    with open(tmp_path / "runs/run/metrics.jsonl", "a") as file:
        file.write(last)
    assert_goes_on_as_if_nothing_had_happened(tmp_path, unbroken, after=8)


@pytest.mark.slow
def test_two_runs_do_not_share_a_folder(tmp_path, tamper, unbroken):
    lines = []

    def second(*_):
        with pytest.raises(ValueError, match=rf"in use by another run \(process {os.getpid()} on .*remove .*lock"):
            train(tmp_path)
        lines.append("refused")

    tamper({6: second})
    assert train(tmp_path).status == "done" and lines == ["refused"]
    assert read(tmp_path) == read(unbroken)


# Config


def test_a_key_that_does_not_exist_is_refused_on_resume(unbroken, tmp_path, capsys):
    shutil.copytree(unbroken, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "runs/run/config.toml"
    config.write_text('[run]\nresume = "auto"\n[optimizer]\nlearning_rat = 0.1\n')
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "--config", str(config)])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "learning_rat" in message and "learning_rate" in message and str(config) in message
    assert checkpoints(tmp_path) == checkpoints(unbroken)


def test_the_folder_of_another_run_is_not_trained_into(unbroken, tmp_path):
    shutil.copytree(unbroken, tmp_path, dirs_exist_ok=True)
    with pytest.raises(ValueError, match=r"run holds a run already: .*--resume auto"):
        train(tmp_path, resume="never")
    assert read(tmp_path) == read(unbroken) and checkpoints(tmp_path) == checkpoints(unbroken)


def test_steps_to_profile_beyond_the_end_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"profile_steps='10:15': .* within the run's 1:12"):
        train(tmp_path, profile_steps="10:15")
    assert not (tmp_path / "runs").exists()


def test_resuming_without_a_run_begins_one(tmp_path, unbroken):
    assert_goes_on_as_if_nothing_had_happened(tmp_path, unbroken, after=0)

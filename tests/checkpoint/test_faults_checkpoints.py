"""Checkpoints that are damaged, foreign or in the way: what a run resumes from, and what it says."""

import dataclasses
import errno
import math
import os
import re
import resource
import shutil
import time

import faults
import jax
import pytest
from faults import GPT, ZERO, checkpoints, make_model, read, step_folder, train

from zero_jax import trainer
from zero_jax.core.files.system_errors import with_remedy
from zero_jax.trainer.inputs import text
from zero_jax.trainer.optimizers import OptimizerConfig
from zero_jax.trainer.reporting.metrics import device_memory_bytes

pytestmark = pytest.mark.usefixtures("no_picture")


@pytest.fixture
def cut_off(unbroken, tmp_path):
    """The folder of a run that was cut off before its end: it has saved steps 4 and 8, and taken some more."""
    shutil.copytree(unbroken, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(step_folder(tmp_path, 12))
    return tmp_path


@pytest.fixture
def at_step(monkeypatch, tmp_path):
    """Lets something happen before the steps given, once step 4 is saved."""

    def start(what):
        def happen(_, step):
            faults.wait_for(step_folder(tmp_path, 4))
            what[step]()

        monkeypatch.setattr(text.data, "train_batches", faults.tampering(dict.fromkeys(what, happen)))
        return lambda: monkeypatch.setattr(text.data, "train_batches", faults.real_train_batches)

    return start


def largest(step):
    return max((path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


RECORD = "record/metadata"


def test_the_run_goes_on_from_the_newest_whole_checkpoint_as_if_nothing_had_happened(cut_off, unbroken):
    """Of one kind of damage: `test_checkpoint` restores after all kinds."""
    cut(largest(step_folder(cut_off, 8)))
    lines = []
    assert train(cut_off, lines=lines).status == "done"
    told = "\n".join(lines)
    assert "resuming after step 4 of " in told
    assert re.search(r"checkpoint of step 8 passed over: leaf '.*' of .*step_00000008 is damaged or cut off: ", told)
    assert read(cut_off) == read(unbroken)


def test_where_all_are_damaged_each_is_named_and_nothing_is_touched(cut_off):
    cut(largest(step_folder(cut_off, 8)))
    (step_folder(cut_off, 4) / RECORD).unlink()

    def files():
        found = [path for path in (cut_off / "runs").rglob("*") if path.is_file() and path.parent.name != "processes"]
        return {path: path.stat().st_mtime_ns for path in found if path.name != "lock"}

    before = files()
    with pytest.raises(ValueError, match="no undamaged checkpoint in") as caught:
        train(cut_off)
    _, first, second, remedy = str(caught.value).splitlines()
    assert remedy.startswith("Restore what is damaged from a copy of it, or begin a run of another name")
    assert "step_00000008 is damaged or cut off" in first and "step_00000004/record/metadata is missing" in second
    assert files() == before


def test_what_a_save_that_was_cut_off_left_is_removed_and_told(cut_off, unbroken):
    partial = cut_off / "runs/run/checkpoints/step_00000012.zero_jax-tmp"
    shutil.copytree(step_folder(cut_off, 8), partial)
    (partial / "zero_jax.json").write_text('{"zero_jax": "checkpoint", "step": 12}')
    (partial / RECORD).unlink()
    lines = []
    train(cut_off, lines=lines)
    assert f"removed {partial}: a save or a deletion that was cut off" in lines
    assert read(cut_off) == read(unbroken) and checkpoints(cut_off) == checkpoints(unbroken)


@pytest.mark.slow
def test_the_folder_of_checkpoints_is_gone(cut_off, unbroken):
    """There is nothing to go on from: the run begins, and its figures with it."""
    shutil.rmtree(cut_off / "runs/run/checkpoints")
    train(cut_off)
    assert read(cut_off) == read(unbroken)


# Checkpoints of something else


def assert_refused(folder, unbroken, match, **changes):
    """Checks that a run is not resumed, and that its folder is as it was."""
    with pytest.raises(ValueError, match=match) as caught:
        train(folder, **changes)
    assert checkpoints(folder) == ["step_00000004", "step_00000008"] and read(folder) == read(unbroken)
    return str(caught.value)


def test_another_model_is_refused_with_the_leaves_that_differ(cut_off, unbroken):
    wider = make_model(dataclasses.replace(GPT, mlp_ratio=8))
    message = assert_refused(cut_off, unbroken, "step_00000008 does not fit the state", model=wider)
    assert "params/blocks/" in message and "saved as [1, 16, 64], the state has [1, 16, 128]" in message
    assert "with the model that it was saved with" in message and "step_00000004" not in message


def test_another_optimizer_is_refused_with_the_leaves_that_differ(cut_off, unbroken):
    message = assert_refused(
        cut_off, unbroken, "does not fit", optimizer=OptimizerConfig(optimizer="sgd", warmup_steps=2)
    )
    assert "opt_state/" in message and "with the optimizer that it was saved with" in message


def test_another_seed_is_refused(cut_off, unbroken):
    assert_refused(cut_off, unbroken, r"trained on other data \(seed: 0 -> 1\)", seed=1)


def test_another_length_of_sequences_is_refused(cut_off, unbroken):
    longer = make_model(dataclasses.replace(GPT, seq_len=32))
    assert_refused(cut_off, unbroken, r"trained on other data \(seq_len: 16 -> 32\)", model=longer)


@pytest.mark.slow
def test_what_was_changed_since_is_told(cut_off):
    lines = []
    model = make_model(dataclasses.replace(GPT, num_heads=4))  # the params have the same shapes
    train(cut_off, lines=lines, devices=4, zero=dataclasses.replace(ZERO, stage=1), log_every=3, model=model)
    assert {"changed since: devices: 2 -> 4", "changed since: log_every: 4 -> 3"} <= set(lines)
    assert {"changed since: zero.stage: 3 -> 1", "changed since: model.num_heads: 2 -> 4"} <= set(lines)


# Saving


@pytest.mark.slow
def test_a_full_disk_during_a_save_costs_that_checkpoint_alone(tmp_path, at_step, unbroken):
    """The save of step 8 fails, the run goes on, that of step 12 is whole."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit, lines = (lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))), []

    def lift():
        while step_folder(tmp_path, 8).with_suffix(".zero_jax-tmp").exists():  # the save is under way
            time.sleep(0.01)
        limit(soft)

    try:
        at_step({8: lambda: limit(6000), 11: lift})
        result = train(tmp_path, lines=lines)
    finally:
        limit(soft)
    assert (result.status, result.num_failed_saves) == ("done", 1)
    (told,) = [line for line in lines if "NOT saved" in line]
    assert told.startswith("checkpoint of step 8 NOT saved to ") and "File too large" in told and "`ulimit -f`" in told
    assert told.endswith("Training goes on; complete: step 4")
    assert checkpoints(tmp_path) == ["step_00000004", "step_00000012"]
    assert read(tmp_path) == read(unbroken)


@pytest.mark.parametrize("full", [8, pytest.param(12, marks=pytest.mark.slow)])
def test_a_save_of_which_nothing_can_be_written_is_one_that_failed_and_no_later_one(
    full, tmp_path, monkeypatch, unbroken
):
    def refuse(file):
        if f"step_{full:08d}" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(file)

    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", refuse)
    result = train(tmp_path)
    assert (result.status, result.num_failed_saves) == ("unsaved" if full == 12 else "done", 1)
    assert checkpoints(tmp_path) == ["step_00000004", f"step_{20 - full:08d}"]


@pytest.mark.slow
def test_a_system_that_refuses_to_write_is_told_with_the_remedy(tmp_path, monkeypatch, unbroken):
    rename, number, lines = os.rename, errno.EROFS, []

    def refuse(path, target):
        if str(target).endswith("step_00000008"):
            raise OSError(number, os.strerror(number), str(path))
        rename(path, target)

    monkeypatch.setattr(os, "rename", refuse)
    result = train(tmp_path, lines=lines)
    assert (result.status, result.num_failed_saves) == ("done", 1)
    (told,) = [line for line in lines if "NOT saved" in line]
    assert with_remedy(OSError(number, os.strerror(number))) in told and "Training goes on; complete: step 4" in told
    assert checkpoints(tmp_path) == ["step_00000004", "step_00000012"] and read(tmp_path) == read(unbroken)


@pytest.mark.slow
def test_a_folder_that_vanishes_under_the_run_is_made_again(tmp_path, at_step, unbroken):
    at_step({6: lambda: shutil.rmtree(tmp_path / "runs/run/checkpoints")})
    lines = []
    assert train(tmp_path, lines=lines).status == "done"
    assert checkpoints(tmp_path) == ["step_00000008", "step_00000012"] and read(tmp_path) == read(unbroken)


@pytest.mark.slow
def test_a_file_in_place_of_the_folder_is_told_at_every_save(tmp_path, at_step, unbroken):
    folder, lines = tmp_path / "runs/run/checkpoints", []

    def replace():
        shutil.move(folder, tmp_path / "elsewhere")
        folder.write_text("a file in its place")

    def put_back():
        folder.unlink()
        shutil.move(tmp_path / "elsewhere", folder)

    mend = at_step({6: replace})
    result = train(tmp_path, lines=lines)
    assert (result.status, trainer.EXIT_STATUS[result.status], result.num_failed_saves) == ("unsaved", 1, 2)
    assert sum("NOT saved" in line and "Not a directory" in line for line in lines) == 2
    assert read(tmp_path) == read(unbroken)
    mend()
    with pytest.raises(ValueError, match=r"cannot write checkpoints to .*/checkpoints"):
        train(tmp_path)
    put_back()
    assert train(tmp_path).status == "done"
    assert read(tmp_path) == read(unbroken)


@pytest.mark.slow
def test_failed_saves_do_not_keep_what_they_were_to_write(tmp_path, monkeypatch):
    """Each has a copy of the state on the host: a disk that stays full would fill the memory too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    found = []

    def each(_, step):
        if step == 5:  # all programs are compiled, and kept, by then
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
        found.append(device_memory_bytes(jax.devices()[0]))

    monkeypatch.setattr(text.data, "train_batches", faults.tampering({"each": each}))
    try:
        result = train(tmp_path, checkpoint=dataclasses.replace(faults.CHECKPOINT, save_every=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.num_failed_saves >= faults.STEPS - 6
    assert max(found) < 12 * found[0], found


@pytest.mark.slow
def test_a_run_whose_saves_all_fail_tells_that_there_is_nothing_to_go_on_from(tmp_path, monkeypatch):
    def refuse(file):
        if "checkpoints" in os.readlink(f"/proc/self/fd/{file}"):  # the run's config can be written
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(file)

    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", refuse)
    lines = []
    result = train(tmp_path, lines=lines)
    assert (result.status, result.num_failed_saves) == ("unsaved", 3)
    assert "THE LAST STATE IS NOT SAVED" in str(result)
    assert all(line.endswith("there is no other checkpoint") for line in lines if "NOT saved" in line)


@pytest.mark.slow
@pytest.mark.parametrize("diverges", [False, True])
def test_a_folder_that_cannot_be_listed_at_the_end_hides_neither_the_end_nor_its_reason(
    tmp_path, monkeypatch, diverges
):
    """As of a file server that is gone."""
    listdir = os.listdir

    def refuse(folder="."):
        if "checkpoints" in str(folder):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(folder))
        return listdir(folder)

    def lose(*_):
        faults.wait_for(step_folder(tmp_path, 8))
        monkeypatch.setattr(os, "listdir", refuse)

    spoil = dict.fromkeys((11, 12), lambda batch, _: {**batch, "weights": batch["weights"] * math.nan})
    monkeypatch.setattr(text.data, "train_batches", faults.tampering({10: lose, **(spoil if diverges else {})}))
    lines = []
    result = train(tmp_path, lines=lines, max_nonfinite_steps=2)
    last = [line for line in lines if "Input/output error" in line][-1]
    if diverges:
        assert result.status == "diverged" and last.startswith("stopping at step 12: 2 steps in a row were not finite")
    else:
        assert result.status == "unsaved" and last.startswith("the state of step 12 is NOT SAVED: ")

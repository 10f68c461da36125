"""Checkpoints that a run deletes or saves again while another program reads them."""

import os
import shutil

import jax
import optax
import pytest
import reference

import zero_jax as zero
from zero_jax.checkpoint import (
    CheckpointConfig,
    Checkpointer,
    CheckpointError,
    describe,
    export,
    find_checkpoint,
    finding,
    leaf_files,
    list_steps,
    open_params,
    restore,
)

TX, CONFIG = optax.sgd(1e-2), reference.make_config(stage=3)
REMOVED = "step_0000000{} was deleted, or saved again, while it was read: read again, or let .* keep more"


def init_params(key):
    return {"v": jax.numpy.ones(8), "w": jax.random.normal(key, (16, 8))}


@pytest.fixture(scope="module")
def states():
    """Two states that differ."""
    mesh = reference.mesh_of("8")
    return [zero.init_state(init_params, TX, jax.random.key(seed), mesh=mesh, config=CONFIG) for seed in range(2)]


@pytest.fixture
def state(states):
    return states[0]


def save(folder, steps, state):
    with Checkpointer(folder, config=CheckpointConfig(keep_last=2, keep_best=0), log=pytest.fail) as checkpointer:
        for step in steps:
            checkpointer.save(step, state)


def reload(folder, **options):
    return restore(folder, init_fn=init_params, tx=TX, mesh=reference.mesh_of("8"), config=CONFIG, log=str, **options)


def test_a_step_that_is_saved_again_is_there_at_every_moment(tmp_path, state, monkeypatch):
    save(tmp_path, [1, 2], state)
    seen = []

    def watched(change):
        def changed(*arguments):
            change(*arguments)
            seen.append((list_steps(tmp_path), describe(tmp_path, verify_leaves=True).step))

        return changed

    monkeypatch.setattr(os, "rename", watched(os.rename))
    save(tmp_path, [2], state)
    assert seen == 3 * [([1, 2], 2)]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["step_00000001", "step_00000002"]
    assert describe(tmp_path, step=2, verify_leaves=True).problems == ()


def test_a_replaced_checkpoint_that_cannot_be_deleted_is_reported_and_the_save_counts(tmp_path, state, monkeypatch):
    save(tmp_path, [1], state)

    def fail(*_):
        raise OSError("busy")

    monkeypatch.setattr(shutil, "rmtree", fail)
    lines = []
    with Checkpointer(tmp_path, log=lines.append) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        assert (checkpointer.num_saved, checkpointer.num_failed) == (1, 0)
    assert lines == ["the checkpoint of step 1 is saved, but the older one of it cannot be deleted: busy"]
    assert describe(tmp_path, verify_leaves=True).problems == ()


@pytest.fixture
def while_reading(monkeypatch):
    """Lets something happen once, before a leaf is opened."""

    def start(change):
        pending, open_leaf = [change], leaf_files.open_leaf

        def opened(*arguments):
            if pending:
                pending.pop()()
            return open_leaf(*arguments)

        monkeypatch.setattr(leaf_files, "open_leaf", opened)

    return start


def test_a_reader_of_no_step_in_particular_takes_the_next_one(tmp_path, state, while_reading):
    save(tmp_path, [1, 2], state)
    while_reading(lambda: save(tmp_path, [3, 4], state))
    back = reload(tmp_path)
    assert back.step == 4 and "step_00000002 was deleted" in back.warnings[0]
    while_reading(lambda: save(tmp_path, [5, 6], state))
    described = describe(tmp_path, verify_leaves=True)
    assert (described.step, described.problems, described.passed_over) == (6, (), ())


@pytest.mark.parametrize("change", ["deleted", "saved again"])
def test_a_reader_of_a_step_says_that_it_was_deleted_and_not_damaged(change, tmp_path, states, while_reading):
    steps = [3, 4] if change == "deleted" else [2]
    readers = {
        "restore": lambda path: reload(path, step=2),
        "describe": lambda path: describe(path, step=2, verify_leaves=True),
        "describe a step's folder": lambda path: describe(path / "step_00000002", verify_leaves=True),
        "export": lambda path: export(path, tmp_path / "exported", step=2),
        "open_params": lambda path: list(open_params(path, step=2).pieces("w")),
    }
    for name, read in readers.items():
        folder = tmp_path / name
        save(folder, [1, 2], states[0])
        while_reading(lambda folder=folder: save(folder, steps, states[1]))
        with pytest.raises(CheckpointError, match=REMOVED.format(2)):
            read(folder)
    assert not (tmp_path / "exported").exists()


def test_a_checkpoint_that_is_deleted_after_it_was_listed_is_none(tmp_path, state, monkeypatch):
    save(tmp_path, [1, 2], state)
    pending, listed = [2], finding.list_step_folders

    def then_deleted(directory):
        steps = listed(directory)
        for step in [pending.pop()] if pending else []:
            shutil.rmtree(tmp_path / f"step_0000000{step}")
        return steps

    monkeypatch.setattr(finding, "list_step_folders", then_deleted)
    record, passed_over = find_checkpoint(tmp_path)
    assert (record.step, passed_over) == (1, [])
    pending.append(1)
    with pytest.raises(CheckpointError, match=REMOVED.format(1)):
        find_checkpoint(tmp_path, 1)

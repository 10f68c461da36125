"""Checkpoints in a bucket, where nothing is renamed and nothing is locked; the bucket is in memory."""

import fsspec
import jax
import optax
import pytest
import reference
from etils.epath import backend
from fsspec.implementations.memory import MemoryFileSystem

import zero_jax as zero
from zero_jax.checkpoint import CheckpointConfig, Checkpointer, describe, list_step_folders, saving
from zero_jax.core.files.folder_lock import FolderInUse

TX, CONFIG = optax.sgd(1e-2), reference.make_config(stage=3)
FOLDER = "gs://bucket/run/checkpoints"


class Bucket(MemoryFileSystem):
    """The objects of all buckets by name."""

    store, pseudo_dirs = {}, [""]

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + str(path).split("://")[-1].strip("/")


class Writes:
    """Stands for the arrays' files, which tensorstore writes by a connection of its own; `error` fails them."""

    error = None

    def __init__(self, arrays, folder):
        self.folder = folder

    def wait(self):
        (self.folder / "d").mkdir()
        (self.folder / "d" / "0123").write_bytes(b"values")
        if self.error:
            raise self.error

    def finalize(self):
        (self.folder / "manifest.ocdbt").write_bytes(b"index")


class Killed(BaseException):
    """The end of a process."""


@pytest.fixture
def objects(monkeypatch):
    monkeypatch.setattr(fsspec, "filesystem", lambda name, **_: Bucket())
    monkeypatch.setattr(saving, "ArrayWrites", Writes)
    monkeypatch.setattr(Writes, "error", None)
    Bucket.store.clear()
    Bucket.pseudo_dirs[:] = [""]
    backend.fsspec_backend._get_filesystem.cache_clear()
    yield Bucket.store
    backend.fsspec_backend._get_filesystem.cache_clear()


@pytest.fixture(scope="module")
def state():
    params = {"w": jax.numpy.ones((16, 8))}
    return zero.init_state(params, TX, jax.random.key(0), mesh=reference.mesh_of("8"), config=CONFIG)


def save(steps, state, *, log=pytest.fail, **config):
    with Checkpointer(FOLDER, config=CheckpointConfig(**{"keep_best": 0, **config}), log=log) as checkpointer:
        for step in steps:
            checkpointer.save(step, state)
    return checkpointer


def names(objects, step):
    return [name.rpartition(f"step_{step:08d}/")[2] for name in objects if f"step_{step:08d}/" in name]


def test_a_save_is_complete_with_its_last_object(objects, state):
    checkpointer = save([1, 2, 3, 3], state)
    assert checkpointer.steps() == [2, 3] and describe(FOLDER).step == 3
    written = names(objects, 3)
    assert (written[0], written[-1]) == ("zero_jax.json", "commit_success.txt") and "record/metadata" in written
    assert not any("step_00000001" in name or "lock" in name for name in objects)
    del objects[f"/bucket/run/checkpoints/step_00000003/{written[-1]}"]
    assert checkpointer.steps() == list_step_folders(FOLDER) == [2]


def test_what_a_save_leaves_that_failed_or_was_cut_off_is_removed(objects, state, monkeypatch):
    lines = []
    save([1], state)
    monkeypatch.setattr(Writes, "error", OSError("no connection"))
    assert save([2], state, log=lines.append).num_failed == 1
    assert "checkpoint of step 2 NOT saved" in lines.pop() and not names(objects, 2)
    monkeypatch.setattr(Writes, "error", Killed())
    with pytest.raises(RuntimeError):
        save([3], state)
    monkeypatch.setattr(Writes, "error", None)
    assert names(objects, 3) and list_step_folders(FOLDER) == [1]
    assert save([4], state, log=lines.append).steps() == [1, 4]
    assert lines == [f"removed {FOLDER}/step_00000003: a save or a deletion that was cut off"]


@pytest.mark.parametrize(
    "name", ["step_00000001/state/notes.txt", "step_00000002/notes.txt", "step_00000003/state/d/x"]
)
def test_objects_of_others_are_untouched(name, objects, state):
    save([1], state)
    key, lines, step = f"/bucket/run/checkpoints/{name}", [], int(name[5:13])
    (saving.resolve_folder(FOLDER) / name).write_text("mine")
    before = {other for other in objects if f"step_{step:08d}" in other}
    assert save([step, 4, 5], state, log=lines.append, keep_last=1).num_failed == 1
    assert "is in the way: it" in lines[0] and key in objects
    assert before == {other for other in objects if f"step_{step:08d}" in other}


def test_a_bucket_is_locked_by_the_content_of_an_object(objects, state):
    with Checkpointer(FOLDER, log=pytest.fail, run="first") as checkpointer:
        checkpointer.save(1, state)
        with pytest.raises(FolderInUse, match="run first"):
            save([2], state)
    assert save([2], state).steps() == [1, 2]

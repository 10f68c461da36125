"""Whose a folder of checkpoints is: what others put there is left alone, and one run saves there at a time."""

import errno
import fcntl
import json
import os
import pathlib
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading

import faults
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import reference
import tensorstore
from etils import epath

import zero_jax as zero
from zero_jax.checkpoint import (
    CheckpointConfig,
    Checkpointer,
    CheckpointError,
    describe,
    latest_step,
    list_steps,
    restore,
)
from zero_jax.core.files import folder_lock
from zero_jax.core.files.folder_lock import FolderInUse, FolderLock

TX, CONFIG = optax.sgd(1e-2), reference.make_config(stage=3)


def init_params(key):
    return {"w": jax.random.normal(key, (16, 8))}


@pytest.fixture(scope="module")
def state():
    return zero.init_state(init_params, TX, jax.random.key(0), mesh=reference.mesh_of("8"), config=CONFIG)


def reload(folder, **options):
    settings = {"init_fn": init_params, "tx": TX, "mesh": reference.mesh_of("8"), "config": CONFIG, "log": str}
    return restore(folder, **{**settings, **options})


def save(folder, steps, state, *, log=pytest.fail, **config):
    """Saves some steps, one after the other; returns the checkpointer."""
    with Checkpointer(folder, config=CheckpointConfig(**{"keep_last": 9, **config}), log=log) as checkpointer:
        for step in steps:
            checkpointer.save(step, state)
    return checkpointer


@pytest.fixture(scope="module")
def saved(state, tmp_path_factory):
    """A folder with the checkpoint of step 2, to be copied."""
    folder = tmp_path_factory.mktemp("saved")
    save(folder, [2], state)
    return folder / "step_00000002"


def marked(path, step):
    """Makes what a save or a deletion that was cut off leaves."""
    path.mkdir(parents=True)
    (path / "zero_jax.json").write_text(json.dumps({"zero_jax": "checkpoint", "step": step}))
    (path / "state" / "d").mkdir(parents=True)
    (path / "state" / "d" / "0123456789abcdef").write_text("half")


def put_foreign(folder, outside, saved):
    """Puts all kinds of things beside the checkpoints that no `Checkpointer` has written; returns their names."""
    before = {path.name for path in folder.iterdir()}
    (folder / "step_times.csv").write_text("1,2")
    (folder / "step_00000031").write_text("a file")
    os.mkfifo(folder / "step_00000032")
    os.mkfifo(folder / "step_00000032.zero_jax-tmp")
    for name in ("step_logs", "step_000100", "step_00000033", "step_00000034.orbax-checkpoint-tmp", "step_8",
                 "step_00000035.zero_jax-tmp", "step_00000036.zero_jax-deleted", "step_00000001.replaced",
                 "step_00000037.orbax-checkpoint-tmpdeleted", "my.zero_jax-tmp", "step_٠٠٠٠٠٠٣٨"):  # fmt: skip
        (folder / name).mkdir()
        (folder / name / "notes.txt").write_text("mine")
    (folder / "step_00000039").mkdir()
    shutil.copytree(saved, folder / "step_00000090")  # a copy, to have it at hand
    marked(folder / "step_00000041.zero_jax-tmp", 40)  # renamed by somebody
    marked(folder / "step_00000042.zero_jax-tmp", 42)
    (folder / "step_00000042.zero_jax-tmp" / "state" / "notes.txt~").write_text("mine")
    marked(outside / "checkpoint", 43)
    (folder / "step_00000043.zero_jax-tmp").symlink_to(outside / "checkpoint")
    (folder / "step_00000044").symlink_to(outside / "checkpoint")
    (folder / "step_00000045").symlink_to("step_00000045")
    marked(folder / "step_00000046.zero_jax-tmp", 46)
    (folder / "step_00000046.zero_jax-tmp" / "state" / "d" / "abcdef").symlink_to(outside / "checkpoint")
    (folder / "zero_jax.json").write_text('{"zero_jax": "checkpoint", "step": 1}')
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "step_00000047", {"w": np.zeros(3)})
    return {path.name for path in folder.iterdir()} - before


def tree(*folders):
    """Returns kind and content of all that is below folders, links not followed."""
    found = {}
    for folder in folders:
        for place, folders_there, files in os.walk(folder):
            for name in (*folders_there, *files):
                path = pathlib.Path(place, name)
                mode = path.lstat().st_mode
                content = os.readlink(path) if stat.S_ISLNK(mode) else path.read_bytes() if stat.S_ISREG(mode) else None
                found[str(path)] = stat.S_IFMT(mode), content
    return found


@pytest.mark.parametrize(
    "name", ["lr=[1e-3]", "a*", "a?", "**", "[!a]", "{a}", "a%20b", "a~", "a:b", "a#b", "a\nb", "ü"]
)
def test_a_folder_may_have_any_name(name, tmp_path, state):
    """Orbax looked for what the processes had written by a pattern with the folder's name in it, and found nothing."""
    with Checkpointer(tmp_path / name, log=pytest.fail) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.save(2, state)
    assert describe(tmp_path / name, verify_leaves=True).problems == ()


def test_a_folder_whose_name_is_no_text_is_refused(tmp_path, state):
    with pytest.raises(ValueError, match=r"is no Unicode text, .*: choose another folder"):
        Checkpointer(tmp_path / os.fsdecode(b"\xff"))


def test_a_record_that_json_cannot_hold_as_it_is_is_not_saved(tmp_path, state):
    lines = []
    with Checkpointer(tmp_path, log=lines.append) as checkpointer:
        checkpointer.save(1, state, extra={"a": {1: "one", "1": "another"}})
    assert "NOT saved" in lines[0] and "the key '1' is there twice" in lines[0]


def test_of_a_run_that_went_back_the_last_ones_are_kept_too(tmp_path, state):
    save(tmp_path, [8, 20, 30, 40], state)
    # 20 and 30 are damaged, say: they count as no checkpoints of the run that went on from 8.
    save(tmp_path, [9, 10, 11, 12], state, keep_last=2, keep_best=0)
    assert list_steps(tmp_path) == [11, 12, 30, 40]
    save(tmp_path, [30], state, keep_last=2, keep_best=0)
    assert list_steps(tmp_path) == [12, 30, 40]


def test_what_others_put_beside_the_checkpoints_is_untouched(tmp_path, state, saved):
    folder, outside, lines = tmp_path / "checkpoints", tmp_path / "outside", []
    folder.mkdir()
    outside.mkdir()
    names = put_foreign(folder, outside, saved)
    shutil.copytree(saved, folder / "step_00000002")
    (folder / "step_00000002" / "notes.txt").write_text("what I think of it")
    kept = [*(folder / name for name in names), folder / "step_00000002"]
    before = tree(outside, *kept)
    save(folder, [3, 4, 5], state, log=lines.append, keep_last=2, keep_best=0)
    for step, kind in ((6, "tmp"), (7, "deleted"), (8, "replaced")):  # what crashes leave
        marked(folder / f"step_{step:08d}.zero_jax-{kind}", step)
    (folder / "step_00000009.zero_jax-tmp").mkdir()
    (folder / "step_00000005").rename(folder / "step_00000005.zero_jax-replaced")
    save(folder, [10, 10], state, log=lines.append, keep_last=2, keep_best=0)
    assert tree(outside, *kept) == before
    own = {"step_00000005", "step_00000008", "step_00000010"}
    assert {path.name for path in folder.iterdir()} == names | own | {"step_00000002"}
    told = f"{folder / 'step_00000002'} is not deleted: it holds notes.txt, which zero_jax did not write"
    assert lines.count(told) == 2 and all(line == told or line.startswith("removed ") for line in lines), lines
    assert reload(folder).step == latest_step(folder) == 10


@pytest.mark.parametrize("step", [31, 32, 33, 35, 39, 41, 44, 45, 47, 90])
def test_a_step_of_which_something_else_has_the_name_is_not_saved(step, tmp_path, state, saved):
    folder, lines = tmp_path / "checkpoints", []
    folder.mkdir()
    put_foreign(folder, tmp_path, saved)
    before = tree(tmp_path)
    checkpointer = save(folder, [step], state, log=lines.append)
    assert checkpointer.num_failed == 1 and tree(tmp_path) == before
    assert f"checkpoint of step {step} NOT saved" in lines[0] and "is in the way" in lines[0] and len(lines) == 1


def test_a_damaged_checkpoint_of_its_own_is_saved_again(tmp_path, state, saved):
    shutil.copytree(saved, tmp_path / "step_00000002")
    (tmp_path / "step_00000002" / "record" / "metadata").write_text("{")
    save(tmp_path, [2], state)
    assert reload(tmp_path).step == 2


def test_orbax_reads_the_arrays(state, saved):
    with ocp.PyTreeCheckpointer() as checkpointer:
        found = checkpointer.restore(saved / "state")
    np.testing.assert_array_equal(found["params/w"], state.params["w"])


def test_no_chunk_is_tiny_whatever_primes_a_shard_is_made_of(tmp_path):
    """Orbax divides shards by their factors: of a prime number of elements it would write every one on its own."""
    shapes = {"prime": (4_194_319,), "twice": (2 * 4_194_319, 2), "vocabulary": (50_257, 96), "powers": (1024, 8192)}
    settings = {"mesh": reference.mesh_of("1"), "config": CONFIG}
    params = {name: jnp.zeros(shape, "float32") for name, shape in shapes.items()}
    save(tmp_path, [1], zero.init_state(params, TX, jax.random.key(0), **settings))
    for name, shape in shapes.items():
        base = {"driver": "ocdbt", "base": f"file://{tmp_path}/step_00000001/state/", "path": f"params/{name}/"}
        store = tensorstore.open({"driver": "zarr", "kvstore": base}).result()
        chunk = store.chunk_layout.read_chunk.shape
        assert store.shape == shape and np.prod(chunk) * 4 >= 8192, (name, chunk)
        assert np.prod(chunk) * 4 <= 1 << 24 or name in ("prime", "twice"), (name, chunk)


LEFT_ALONE = """
import asyncio, os, sys
os.environ.update(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="2")
import jax, optax
import reference
from zero_jax.checkpoint import Checkpointer

state, _ = reference.make_trainer(reference.loss_fn, optax.sgd(1e-2), mesh=reference.mesh_of("2"), stage=3)
checkpointer = Checkpointer(sys.argv[1])

async def save():
    checkpointer.save(1, state)

asyncio.run(save())  # as in a notebook
"""


@pytest.mark.slow
def test_a_process_that_ends_while_a_save_is_under_way_ends_when_it_is_whole(tmp_path):
    command = [sys.executable, "-c", LEFT_ALONE, tmp_path]
    done = subprocess.run(command, cwd=pathlib.Path(__file__).parents[1], capture_output=True, text=True, timeout=120)
    if (3, 12) <= sys.version_info < (3, 12, 2) and done.stderr:  # python/cpython#113964: no new threads at the end
        assert "can't create new thread at interpreter shutdown" in done.stderr, done.stderr
        assert latest_step(tmp_path) is None
        return
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert describe(tmp_path, verify_leaves=True).problems == () and latest_step(tmp_path) == 1


def test_reading_removes_nothing_of_a_save_that_is_under_way(tmp_path, state, monkeypatch):
    written, go_on, rename = threading.Event(), threading.Event(), os.rename

    def slow(path, target):
        if pathlib.Path(target).name == "step_00000002":
            written.set()
            assert go_on.wait(60)
        rename(path, target)

    monkeypatch.setattr(os, "rename", slow)
    with Checkpointer(tmp_path, log=pytest.fail) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.save(2, state)
        assert written.wait(60)
        before = tree(tmp_path)
        with Checkpointer(tmp_path, log=pytest.fail) as other:
            assert other.steps() == [1] and reload(tmp_path).step == describe(tmp_path).step == 1
            with pytest.raises(
                ValueError, match=rf"in use by another run \(process {os.getpid()} on .*close its Check"
            ):
                other.save(3, state)
        assert tree(tmp_path) == before
        go_on.set()
    assert reload(tmp_path).step == 2


def test_a_step_far_below_older_ones_is_not_deleted_by_its_own_save(tmp_path, state):
    save(tmp_path, [800, 1000], state)
    save(tmp_path, [200], state, keep_last=2, keep_best=0)
    assert latest_step(tmp_path) == 1000 and (tmp_path / "step_00000200").is_dir()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"step": -5}, "step=-5: give the number of steps done"),
        ({"step": 1.5}, "step=1.5"),
        ({"step": True}, "step=True"),
        ({"step": "7"}, "step='7'"),
        ({"step": 2**64}, "step=1844"),
        ({"loss": "x"}, "loss='x': give the validation loss"),
        ({"loss": "1.5"}, "loss='1.5'"),
        ({"loss": [1.0]}, "loss="),
    ],
)
def test_a_save_is_refused_at_the_call(changes, match, tmp_path, state):
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(ValueError, match=match):
        checkpointer.save(**{"step": 1, "state": state, **changes})
    assert not list(tmp_path.iterdir())


def test_numbers_of_numpy_and_jax_are_numbers(tmp_path, state):
    with Checkpointer(tmp_path, log=pytest.fail) as checkpointer:
        checkpointer.save(np.int64(3), state, loss=jnp.float32(1.5))
    assert describe(tmp_path).step == 3 and describe(tmp_path).loss == 1.5


@pytest.mark.parametrize("name", ["save_every", "keep_last", "keep_best"])
@pytest.mark.parametrize("value", [1.5, "3", None, True, -1, float("nan")])
def test_a_config_takes_counts_alone(name, value):
    with pytest.raises(ValueError, match=f"{name}="):
        CheckpointConfig(**{name: value})


def test_a_background_thread_that_died_fails_the_next_call_with_its_reason(tmp_path, state, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Checkpointer(tmp_path, log=lambda line: {}["gone"]) as checkpointer:
        with monkeypatch.context() as broken:
            broken.setattr(os, "rename", refuse)
            checkpointer.save(1, state)
            with pytest.raises(RuntimeError, match="thread that saved step 1 died: KeyError: 'gone'") as caught:
                checkpointer.save(2, state)
        assert isinstance(caught.value.__cause__, KeyError)
        checkpointer.save(2, state)
    assert checkpointer.steps() == [2]


# The lock

HOLD = """
import fcntl, importlib.util, sys, time
from etils import epath

def refuse(*_):
    raise OSError(37, "No locks available")

if sys.argv[3] == "content":
    fcntl.flock = refuse
spec = importlib.util.spec_from_file_location("folder_lock", sys.argv[1])
folder_lock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(folder_lock)
lock = folder_lock.FolderLock(epath.Path(sys.argv[2]), run="runs/one")
lock.take()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def no_flock(monkeypatch):
    """A file system that has no locks."""

    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.fixture(params=["flock", "content"])
def kind(request):
    """How a lock is held: by the system, or on a file system that has no locks by what the file says."""
    if request.param == "content":
        request.getfixturevalue("no_flock")
    return request.param


def test_a_lock_names_its_holder_and_outlives_neither_its_release_nor_its_process(tmp_path, kind):
    file = epath.Path(tmp_path) / "zero_jax.lock"
    process = subprocess.Popen([sys.executable, "-c", HOLD, folder_lock.__file__, file, kind], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    mine = FolderLock(file, run="runs/two")
    try:
        with pytest.raises(FolderInUse) as caught:
            mine.take()
        for word in (
            f"{tmp_path} is in use",
            f"process {process.pid} on ",
            "since 20",
            "run runs/one",
            "stop that",
            "remove",
        ):
            assert word in str(caught.value)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    with mine:
        mine.take()
        assert json.loads(file.read_text())["run"] == "runs/two"
        with pytest.raises(FolderInUse, match="run runs/two"):
            FolderLock(file).take()
    assert not file.exists()


def test_a_lock_that_is_lost_is_noticed(tmp_path, kind):
    file = epath.Path(tmp_path) / "zero_jax.lock"
    first, second = FolderLock(file, run="first"), FolderLock(file, run="second")
    first.take()
    file.unlink()  # as the message says, by somebody who was wrong
    second.take()
    with pytest.raises(FolderInUse, match="run second"):
        first.take()
    first.release()
    assert file.exists(), "it is not the first one's any more"
    second.release()
    first.take()
    first.release()


def test_without_locks_a_holder_on_another_host_is_superseded_and_learns_it(tmp_path, no_flock, monkeypatch):
    file = epath.Path(tmp_path) / "zero_jax.lock"
    there, here = FolderLock(file, run="there"), FolderLock(file, run="here")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(socket, "gethostname", lambda: "elsewhere")
        there.take()
    here.take()
    with pytest.raises(FolderInUse, match="run here"):
        there.take()
    here.take()


def test_without_locks_a_later_process_of_the_same_number_is_another(tmp_path, no_flock):
    """In a container that starts again on the same host, each process has the number of the one before."""
    file = epath.Path(tmp_path) / "zero_jax.lock"
    FolderLock(file, run="before").take()
    mine = FolderLock(file, run="after")
    with pytest.raises(FolderInUse, match="run before"):
        mine.take()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"process_start": "1"}))
    mine.take()


@pytest.mark.parametrize("what", ["text", "no text", "JSON", "a folder", "a pipe", "a link"])
def test_a_file_of_the_name_of_a_lock_is_not_taken_for_one(what, tmp_path, state):
    file = tmp_path / "zero_jax.lock"
    made = {
        "text": lambda: file.write_text("my lock"),
        "no text": lambda: file.write_bytes(b"\xff\xfe"),
        "JSON": lambda: file.write_text('{"pid": 1}'),
        "a folder": file.mkdir,
        "a pipe": lambda: os.mkfifo(file),
        "a link": lambda: file.symlink_to(tmp_path / "other"),
    }
    made[what]()
    before = tree(tmp_path)
    with Checkpointer(tmp_path, log=pytest.fail) as checkpointer:
        with pytest.raises(FolderInUse, match=r"zero_jax\.lock is not a lock file of zero_jax: move it away"):
            checkpointer.save(1, state)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_second_run_with_the_same_checkpoints_is_refused_while_the_first_lives(tmp_path, resume):
    checkpoints = tmp_path / "shared"
    (checkpoints / "run").mkdir(parents=True)
    with FolderLock(epath.Path(checkpoints) / "run" / "zero_jax.lock", run="runs-a/run"):
        with pytest.raises(ValueError, match=r"shared/run is in use by another run \(.*run runs-a/run\)"):
            faults.train(tmp_path, checkpoints=str(checkpoints), resume=resume)
    assert not list((checkpoints / "run").iterdir()) and not (tmp_path / "runs").exists()


def test_a_new_run_does_not_begin_in_the_checkpoints_of_an_older_one(tmp_path, saved):
    checkpoints = tmp_path / "shared"
    shutil.copytree(saved, checkpoints / "run" / saved.name)
    with pytest.raises(ValueError, match=r"shared/run holds a run already: choose another name"):
        faults.train(tmp_path, checkpoints=str(checkpoints), resume="never")
    assert not (tmp_path / "runs").exists()


def test_a_checkpoint_that_no_training_run_saved_is_not_resumed(tmp_path, saved):
    shutil.copytree(saved, tmp_path / "runs" / "run" / "checkpoints" / saved.name)
    with pytest.raises(ValueError, match=r"step_00000002: its record is not that of a training run \(it lacks config"):
        faults.train(tmp_path)
    with pytest.raises(CheckpointError, match="no undamaged checkpoint"):
        reload(tmp_path / "runs" / "run", accept=_refuse)


def _refuse(_):
    raise CheckpointError("not this one")


class Killed(BaseException):
    """The end of a process, at a place of a test's choice."""


@pytest.fixture
def killed_at(monkeypatch, tmp_path):
    """Ends a save before its nth change of the folder of checkpoints; in the middle of it where it has a middle."""

    def start(place):
        num_done, patches = 0, monkeypatch.context()
        patch = patches.__enter__()

        def ending(module, name, half=lambda path: None):
            change = getattr(module, name)

            def changed(path, *args, **options):
                nonlocal num_done
                place_of = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fspath(path)
                if str(tmp_path) in place_of:
                    num_done += 1
                    if num_done == place:
                        half(path)
                    if num_done >= place:
                        raise Killed
                return change(path, *args, **options)

            patch.setattr(module, name, changed)

        def half_written(file):
            if stat.S_ISREG(os.fstat(file).st_mode):
                os.ftruncate(file, 3)

        def half_removed(path):
            for file in sorted(pathlib.Path(path).rglob("*"))[::2]:
                if file.is_file():
                    file.unlink()

        ending(os, "rename")
        ending(os, "fsync", half_written)
        ending(os, "rmdir")
        ending(shutil, "rmtree", half_removed)
        return lambda: (patches.__exit__(None, None, None), num_done)[1]

    return start


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 2], ids=["a new step", "a step again"])
def test_a_process_that_is_killed_anywhere_in_a_save_loses_no_checkpoint_but_the_oldest(
    step, tmp_path, state, killed_at
):
    """Whatever a kill leaves can be resumed from, and the next save puts in order."""
    place = 0
    while True:
        place += 1
        folder = tmp_path / str(place)
        save(folder, [1, 2], state)
        revive, checkpointer = killed_at(place), Checkpointer(folder, config=CheckpointConfig(keep_last=2, keep_best=0))
        try:
            checkpointer.save(step, state)
            checkpointer.wait()
            is_done = True
        except (Killed, RuntimeError):
            is_done = False
        num_done = revive()
        checkpointer.close()
        whole = set(list_steps(folder))
        assert whole >= {1, 2} or (step == 3 and whole == {2, 3})
        assert reload(folder).step == max(whole)
        save(folder, [4], state, log=lambda _: None)
        after = {int(path.name.removeprefix("step_")) for path in folder.iterdir()}
        assert after >= {2, 4} and after >= whole and set(list_steps(folder)) == after, place
        for kept in after:
            assert describe(folder, step=kept, verify_leaves=True).problems == ()
        if is_done:
            break
    assert num_done == place - 1 and place > 4

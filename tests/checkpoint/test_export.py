"""Params of a checkpoint as safetensors files, read back with the library of that name."""

import argparse
import fcntl
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import safetensors
import safetensors.flax
import safetensors.numpy
from test_checkpoint import flip_value

import zero_jax as zero
from zero_jax.checkpoint import Checkpointer, CheckpointError, best_step
from zero_jax.checkpoint.exporting import export, open_params, parse_size
from zero_jax.cli import build_parser
from zero_jax.core.files import partial_folder as module
from zero_jax.core.files.partial_folder import partial_folder
from zero_jax.pretrained import TensorName, save_tensors
from zero_jax.training import ema

TX = optax.adamw(1e-2)


def init_params(key):
    return {
        "blocks": {"w": jax.random.normal(key, (4, 33, 70)), "scale": jnp.ones((70,), jnp.bfloat16)},
        "table": jax.random.normal(key, (50, 12)),
        "f8": jnp.arange(16.0).astype(jnp.float8_e4m3fn),
        "count": jnp.arange(5),
        "none": jnp.zeros((0, 3)),
    }


def save(folder, init_fn, tx=TX):
    config = reference.make_config(stage=3)
    state = zero.init_state(init_fn, tx, jax.random.key(0), mesh=reference.mesh_of("4"), config=config)
    with Checkpointer(folder / "checkpoints", log=pytest.fail) as checkpointer:
        checkpointer.save(1, state, extra={"config": {"run": {"seed": 3}}}, loss=1.5)
    return state


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, reference.to_host(save(folder, init_params).params)


def named(params, prefix=""):
    """Returns nested params by names with dots."""
    return {
        name: x
        for key, inner in params.items()
        for name, x in (named(inner, f"{prefix}{key}.") if isinstance(inner, dict) else {prefix + key: inner}).items()
    }


def test_one_file(run, tmp_path):
    folder, params = run
    done = export(folder, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"] and done.num_tensors == 6
    found = dict(safetensors.deserialize((tmp_path / "out" / "model.safetensors").read_bytes()))
    expected = named(params)
    assert found.keys() == expected.keys()
    dtypes = {"blocks.w": "F32", "blocks.scale": "BF16", "f8": "F8_E4M3", "count": "I32"}
    assert {name: found[name]["dtype"] for name in dtypes} == dtypes
    for name, x in expected.items():
        assert tuple(found[name]["shape"]) == x.shape and bytes(found[name]["data"]) == x.tobytes(), name
    assert done.num_bytes == sum(x.nbytes for x in expected.values()) and not list(tmp_path.glob(".*"))


def test_several_files_with_an_index(run, tmp_path, monkeypatch):
    monkeypatch.setattr("zero_jax.checkpoint.leaf_files._SLICE_BYTES", 100)  # leaves come in many slices
    folder, params = run
    done = export(folder, tmp_path, dtype="bfloat16", max_shard_bytes=5000)  # into a folder that is there
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)] and len(done.files) == 4
    assert index["metadata"]["total_size"] == done.num_bytes
    found = {}
    for file in files:
        tensors = safetensors.flax.load_file(tmp_path / file)  # checks offsets and lengths too
        assert all(index["weight_map"][name] == file for name in tensors)
        found |= tensors
    for name, x in named(params).items():
        wanted = x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x
        assert found[name].dtype == wanted.dtype
        np.testing.assert_array_equal(np.asarray(found[name]), wanted, err_msg=name)


def test_an_older_export_is_written_over_only_by_force(run, tmp_path):
    folder, _ = run
    export(folder, tmp_path, max_shard_bytes=5000)
    others = ["model-ema.safetensors", "model.safetensors.sha256", "model_of_mine.safetensors", "tokenizer.json"]
    for name in others:
        (tmp_path / name).touch()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"holds model-00001-of-.* already: .*--force"):
        export(folder, tmp_path)
    assert sorted(tmp_path.iterdir()) == before
    inode = tmp_path.stat().st_ino
    export(folder, tmp_path, force=True)
    assert tmp_path.stat().st_ino == inode
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["model.safetensors", *others])


@pytest.mark.parametrize("below", ["", "export", "state/../record/export"])
def test_nothing_is_written_into_a_checkpoint(run, below, tmp_path):
    folder, _ = run
    (step,) = folder.glob("**/step_*")
    before = sorted(step.rglob("*"))
    (tmp_path / "link").symlink_to(step / "state")
    for place in (step / below, tmp_path / "link" / "new"):
        with pytest.raises(ValueError, match=r"step_\d+ is a checkpoint, .*: choose a folder outside it"):
            export(folder, place, force=True)
        with pytest.raises(ValueError, match=r"step_\d+ is a checkpoint, .*: choose a folder outside it"):
            save_tensors(place, {"w": jnp.ones(4)}, {"w": TensorName("w")})
    assert sorted(step.rglob("*")) == before
    export(folder, step / os.path.relpath(tmp_path / "out", step))  # which is not in it


def test_the_average_of_the_params(tmp_path):
    tx = optax.chain(TX, ema.params_ema(0.5))
    state = save(tmp_path, reference.init_params, tx)
    averages = [x for x in jax.tree.leaves(state.opt_state, is_leaf=lambda x: hasattr(x, "ema")) if hasattr(x, "ema")]
    export(tmp_path, tmp_path / "out", ema=True)
    found = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    for name, x in named(reference.to_host(averages[0].ema)).items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)


def test_what_cannot_be_exported(run, tmp_path, monkeypatch):
    folder, _ = run
    with pytest.raises(ValueError, match=r"--ema: the optimizer's state .* holds none of 'params/blocks/scale'"):
        export(folder, tmp_path / "out", ema=True)
    with pytest.raises(ValueError, match=r"dtype='int8': choose one of float64, float32"):
        export(folder, tmp_path / "out", dtype="int8")
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5"):
        export(folder, tmp_path / "out", step=5)
    save(tmp_path, lambda key: {"a/b": jnp.ones(3), "a": {"b": jnp.ones(3)}, "a.b": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"several params would be called 'a.b'"):
        export(tmp_path, tmp_path / "out")
    save(tmp_path / "metadata", lambda key: {"__metadata__": jnp.ones(3), "w": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"'__metadata__', .* rename it"):
        export(tmp_path / "metadata", tmp_path / "out")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # which an empty path was taken for
    for nothing in ("", None):
        with pytest.raises(ValueError, match=rf"^out={nothing!r}: give the path of a folder"):
            export(folder, nothing)
    with pytest.raises(ValueError, match=r"directory='' is not a path: give the folder of the checkpoints"):
        export("", tmp_path / "out")
    for wrong in ({"max_shard_bytes": 0}, {"max_shard_bytes": "5GB"}, {"step": True}, {"step": 1.0}):
        with pytest.raises(ValueError, match=rf"{next(iter(wrong))}=.*: give "):
            export(folder, tmp_path / "out", **wrong)
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(ValueError, match=r"cannot write .*link: "):
        export(folder, tmp_path / "link")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file"):
        export(folder, tmp_path / "file")
    assert not (tmp_path / "out").exists()


def test_values_that_do_not_fit_and_dtypes_that_files_lack(tmp_path):
    save(tmp_path / "large", lambda key: {"w": jnp.full((8, 8), 1e6)})
    for dtype in ("float16", "float8_e4m3fn"):  # of the latter, too large a value is NaN
        with pytest.raises(ValueError, match=rf"'params/w' has values that {dtype} cannot hold: export as bfloat16"):
            export(tmp_path / "large", tmp_path / "out", dtype=dtype)
    save(tmp_path / "int4", lambda key: {"w": jnp.ones((8, 8), jnp.int4), "b": jnp.ones(8)})
    with pytest.raises(ValueError, match=r"'params/w' has dtype int4"):
        export(tmp_path / "int4", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["int4", "large"]


def test_a_damaged_checkpoint_leaves_no_export(tmp_path):
    save(tmp_path, lambda key: {"w": jax.random.normal(key, (64, 512))})
    flip_value(tmp_path / "checkpoints" / "step_00000001")
    with pytest.raises(CheckpointError, match=r"leaf 'params/w' of .* is damaged"):
        export(tmp_path, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_an_export_that_is_cut_off_while_it_replaces_an_older_one_is_no_mixture(run, tmp_path, monkeypatch):
    folder, _ = run
    export(folder, tmp_path / "out", max_shard_bytes=5000)
    replace, num_left = pathlib.Path.replace, [2]

    def killed(path, target):
        num_left[0] -= 1
        if num_left[0] < 0:
            raise KeyboardInterrupt
        return replace(path, target)

    monkeypatch.setattr(pathlib.Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        export(folder, tmp_path / "out", max_shard_bytes=5000, force=True)
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_an_export_that_cannot_replace_a_file_does_not_say_that_nothing_was_left(run, tmp_path):
    folder, _ = run
    export(folder, tmp_path, max_shard_bytes=5000)
    (second := sorted(tmp_path.glob("*.safetensors"))[1]).unlink()
    second.mkdir()
    with pytest.raises(ValueError, match=r"cannot write all of .*is a folder where .*some of its files may be new$"):
        export(folder, tmp_path, max_shard_bytes=5000, force=True)
    assert not (tmp_path / "model.safetensors.index.json").exists()


def test_exports_to_one_folder_at_once_do_not_write_into_one_another(tmp_path):
    """In containers that share a file system, processes have the same numbers."""
    with partial_folder(tmp_path / "out") as first:
        (first / "file").touch()
        with partial_folder(tmp_path / "out") as second:
            assert [*second.iterdir()] == [] and (first / "file").exists()
        assert (first / "file").exists()
    assert [*tmp_path.iterdir()] == []


KILLED = """
import os, pathlib, sys
from zero_jax.core.files.partial_folder import partial_folder
with partial_folder(pathlib.Path(sys.argv[1])) as partial:
    (partial / "model.safetensors").write_bytes(bytes(1000))
    os.kill(os.getpid(), int(sys.argv[2]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("is_there", [False, True])
def test_what_a_killed_export_has_left_goes_with_the_next_one(run, number, is_there, tmp_path):
    """It kept the disk full, and in a folder that was there already an export for the hub was refused for it."""
    folder, _ = run
    if is_there:
        (tmp_path / "out").mkdir()
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "out"), str(int(number))], timeout=60)
    assert ended.returncode == -number and len([*tmp_path.rglob(".zero_jax-partial-out-*")]) == 1
    (tmp_path / ".zero_jax-partial-out-mine").touch()  # not of this kind
    if is_there:
        save_tensors(tmp_path / "out", {"w": jnp.ones(3)}, {"w": TensorName("w")})
    else:
        export(folder, tmp_path / "out")
    assert [path.name for path in tmp_path.rglob(".*")] == [".zero_jax-partial-out-mine"]


def test_what_another_machine_writes_stays(tmp_path, monkeypatch):
    """Over NFS each machine has its own locks of folders: none sees that another one has a folder in use."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    with partial_folder(tmp_path / "out") as first:
        (tmp_path / "boot_id").write_text("of another machine")
        monkeypatch.setattr(module, "_BOOT_ID", tmp_path / "boot_id", raising=False)
        with partial_folder(tmp_path / "out"):
            assert first.exists()


def test_what_a_removal_has_left_that_was_interrupted_goes_too(tmp_path):
    left = tmp_path / "out" / f".zero_jax-discarded-{'0' * 32}"
    left.mkdir(parents=True)
    save_tensors(tmp_path / "out", {"w": jnp.ones(3)}, {"w": TensorName("w")})
    assert not left.exists()


def test_params_that_are_one_array(tmp_path):
    save(tmp_path, lambda key: jnp.arange(64.0).reshape(8, 8), optax.chain(TX, ema.params_ema(0.5)))
    for ema_too in (False, True):
        saved = open_params(tmp_path, ema=ema_too)
        assert [*saved.leaves] == [""]
        ((_, values),) = saved.pieces("")
        np.testing.assert_array_equal(values, np.arange(64.0).reshape(8, 8))
        export(tmp_path, tmp_path / f"out{ema_too}", ema=ema_too)


def test_a_file_system_that_cannot_say_what_is_on_the_disk(run, tmp_path, monkeypatch):
    def unknown(*_):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "fsync", unknown)
    assert export(run[0], tmp_path / "out").num_tensors


# A server reports at `fsync` what it could not write of a map.
@pytest.mark.parametrize("function", ["posix_fallocate", "fsync"])
def test_a_full_disk_leaves_no_export(run, tmp_path, monkeypatch, function):
    folder, _ = run

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, function, full)
    with pytest.raises(ValueError, match=r"cannot write .*out: No space left on device .*; nothing was left"):
        export(folder, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("512MiB", 2**29), ("1.5kb", 1500), ("100", 100)])
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5 TBs", "-3", "0", "9" * 400])
def test_no_sizes(text):
    with pytest.raises(ValueError, match="such as 5GB"):
        parse_size(text)


_MEASURE = """
import pathlib, re, sys
from zero_jax.checkpoint import export

def peak():  # of this program alone: `getrusage` would begin with what its parent held
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])

export(sys.argv[1], sys.argv[2] + "/small", step=1)
before = peak()
export(sys.argv[1], sys.argv[2] + "/large", step=2)
print(peak() - before)
"""


@pytest.mark.slow
def test_memory_is_bounded_whatever_the_model(tmp_path):
    config, mesh = reference.make_config(stage=3), reference.mesh_of("4")
    with Checkpointer(tmp_path / "checkpoints", log=pytest.fail) as checkpointer:
        for step, size in ((1, 256), (2, 12800)):
            # One leaf, so that a bound of a leaf would not do.
            init_fn = lambda key, size=size: {"w": jnp.arange(16384.0 * size).reshape(size, 16384)}  # noqa: E731
            tx = optax.set_to_zero()
            checkpointer.save(step, zero.init_state(init_fn, tx, jax.random.key(0), mesh=mesh, config=config))
    model_bytes = 4 * 12800 * 16384
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, tmp_path, tmp_path / "out"], capture_output=True, text=True, check=True
    )
    grown = int(done.stdout)
    print(f"{model_bytes / 2**20:.0f} MiB of params, peak {grown / 2**20:.0f} MiB above that of a small model")
    assert grown < 384 * 2**20 < model_bytes / 2


def command(*arguments):
    options = build_parser().parse_args(list(map(str, arguments)))
    assert isinstance(options, argparse.Namespace)
    return options.run(options)


def test_commands(run, tmp_path, capsys):
    folder, _ = run
    assert command("inspect", folder) == 0
    shown = capsys.readouterr().out
    assert "step 1, validation loss 1.5000" in shown and "params/blocks/w" in shown and "run.seed = 3" in shown
    assert command("inspect", folder / "checkpoints", "--step", 1, "--verify", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == [] and found["extra"] == {"config": {"run": {"seed": 3}}}
    assert command("export", folder, "--out", tmp_path / "out", "--dtype", "float16", "--max-shard-size", "1MB") == 0
    assert "6 tensors" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command("export", folder, "--out", tmp_path / "out")
    assert "--force" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command("inspect", tmp_path)
    assert "no checkpoint in" in capsys.readouterr().err
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_text("{}")
    (tmp_path / "hub" / "model.safetensors").write_text("")
    with pytest.raises(SystemExit):
        command("inspect", tmp_path / "hub")
    assert "hub is a model of the Hugging Face hub: give it to --from-hf" in capsys.readouterr().err


def test_commands_take_the_newest_undamaged_step_and_say_so_or_the_best_one(tmp_path, capsys):
    """As after a run that went back: `evaluate` took another step than `export`, which ended with an error."""
    config, steps = reference.make_config(stage=3), tmp_path / "checkpoints"
    init_fn = lambda key: {"w": jax.random.normal(key, (64, 512))}  # noqa: E731
    state = zero.init_state(init_fn, optax.sgd(1.0), jax.random.key(0), mesh=reference.mesh_of("4"), config=config)
    with Checkpointer(steps, config=zero.CheckpointConfig(keep_last=4), log=pytest.fail) as checkpointer:
        for step, loss in [(1, 3.0), (2, 1.0), (3, 2.0), (4, float("nan"))]:
            checkpointer.save(step, state, loss=loss)

    def written(*words):
        options = build_parser().parse_args(["export", str(tmp_path), *words])
        assert options.run(options) == 0
        return capsys.readouterr()

    assert written("--out", f"{tmp_path}/best", "--step", "best").out.startswith("step 2: ")
    assert written("--out", f"{tmp_path}/newest").out.startswith("step 4: ")
    flip_value(steps / "step_00000004")
    (steps / "step_00000003" / "record" / "metadata").write_text("{")
    told = written("--out", f"{tmp_path}/undamaged")
    assert told.out.startswith("step 2: ")
    lines = told.err.splitlines()
    assert [line.startswith("checkpoint passed over: ") for line in lines] == [True, True]
    assert "step_00000004 is damaged or cut off" in lines[0] and "step_00000003" in lines[1]
    with pytest.warns(UserWarning, match="^checkpoint passed over: .*step_00000003"):
        shutil.rmtree(steps / "step_00000004")
        assert export(tmp_path, tmp_path / "library").step == 2
    with pytest.raises(CheckpointError, match="is the checkpoint of step 2 itself: give the folder above it"):
        best_step(steps / "step_00000002")
    for step in (1, 2):
        shutil.rmtree(steps / f"step_{step:08d}")
    with pytest.raises(CheckpointError, match="has a validation loss: give the number of a step, or none"):
        best_step(tmp_path)
    shutil.rmtree(steps / "step_00000003")
    for path, why in [(steps, "no checkpoint in"), (tmp_path / "none", "there is no folder")]:
        with pytest.raises(CheckpointError, match=f"^{why} {path}"):
            best_step(path)

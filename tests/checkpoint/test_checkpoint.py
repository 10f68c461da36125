"""Saving, keeping and deleting checkpoints, and what is made of damaged ones."""

import json
import math
import resource
import shutil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import reference
import tensorstore

import zero_jax as zero
from zero_jax import hlo
from zero_jax.checkpoint import (
    CheckpointConfig,
    Checkpointer,
    CheckpointError,
    describe,
    latest_step,
    leaf_files,
    restore,
    saved_state,
)
from zero_jax.checkpoint.fingerprint import fingerprint, host_fingerprint
from zero_jax.checkpoint.saved_state import encode_state, saved_leaves
from zero_jax.core.files.untrusted import json_checksum

TX = optax.adamw(1e-2)
CONFIG = reference.make_config(stage=3)


def init_params(key):
    """Returns params with a leaf that is too large to be stored inside the index of the files."""
    return {"w": jax.random.normal(key, (64, 512)), "b": jnp.zeros((16,))}


def make_state(seed=0, **fields):
    config = reference.make_config(**{"stage": 3, **fields})
    return zero.init_state(init_params, TX, jax.random.key(seed), mesh=reference.mesh_of("8"), config=config)


def reload(folder, **options):
    settings = {"init_fn": init_params, "tx": TX, "mesh": reference.mesh_of("8"), "config": CONFIG, "log": str}
    return restore(folder, **{**settings, **options})


def save_steps(folder, steps, **fields):
    """Saves a state of its own for each step; returns what was told."""
    lines = []
    with Checkpointer(folder, config=CheckpointConfig(keep_last=9), log=lines.append) as checkpointer:
        for step in steps:
            checkpointer.save(step, make_state(step, **fields), extra={"position": 7 * step})
    assert checkpointer.num_failed == 0
    return lines


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    save_steps(folder, (1, 2))
    return folder


@pytest.fixture
def folder(two_steps, tmp_path):
    """A folder of checkpoints of steps 1 and 2, to be damaged."""
    return shutil.copytree(two_steps, tmp_path / "checkpoints")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def assert_equal(state, expected):
    actual, expected = (reference.to_host(saved_leaves(x)) for x in (state, expected))
    assert list(actual) == list(expected)
    for name, x in expected.items():
        assert actual[name].dtype == x.dtype, name
        np.testing.assert_array_equal(actual[name], x, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "uint8", "bool", "complex64", "int32"])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4, 5), (0, 2)])
def test_devices_and_hosts_agree_on_a_fingerprint(dtype, shape):
    x = (3 * np.random.default_rng(0).standard_normal(shape)).astype(jnp.dtype(dtype))
    assert int(jax.jit(fingerprint)(x)) == host_fingerprint(x)
    parts = leaf_files.cut_slices(shape, x.dtype.itemsize, limit_bytes=12 * x.dtype.itemsize)
    assert sum(host_fingerprint(x[index], index, shape) for index in parts) % 2**32 == host_fingerprint(x)


def test_any_flipped_bit_changes_the_fingerprint():
    x = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    before, bits = host_fingerprint(x), x.view(np.uint32)
    for i in range(x.size):
        for bit in range(32):
            bits.flat[i] ^= np.uint32(1 << bit)
            assert host_fingerprint(x) != before
            bits.flat[i] ^= np.uint32(1 << bit)
    assert host_fingerprint(x) == before
    assert host_fingerprint(x[::-1]) != before, "elements that change places are seen"


def test_fingerprints_gather_nothing():
    arrays, _ = encode_state(make_state(), mesh=reference.mesh_of("8"))
    arrays = list(arrays.values())
    program = saved_state.fingerprint_program(reference.mesh_of("8")).lower(arrays).compile()
    found = hlo.collectives(program.as_text())
    assert found and {x.kind for x in found} <= {"all-reduce", "all-gather"}
    assert sum(x.full_bytes * x.num_executions for x in found) <= 8 * 2 * 4 * len(arrays), "two sums of each shard"


def test_slices_of_chunks_cover_an_array_once():
    for shape, chunk in [((7,), (2,)), ((4, 5), (4, 2)), ((3, 4, 5), (2, 4, 3)), ((3, 4, 5), (1, 2, 5))]:
        seen = np.zeros(shape, int)
        for index in leaf_files.cut_slices(shape, 4, limit_bytes=100, chunk=chunk):
            assert all(at.start % size == 0 for at, size in zip(index, chunk, strict=True))
            seen[index] += 1
        assert (seen == 1).all()


def test_slices_cover_an_array_once_in_order():
    for shape in [(), (7,), (4, 5), (3, 4, 5), (2, 1, 9)]:
        seen = np.zeros(shape, int)
        places = np.arange(seen.size).reshape(shape)
        order = []
        for index in leaf_files.cut_slices(shape, 4, limit_bytes=24):
            assert places[index].nbytes // 2 <= 24
            seen[index] += 1
            order += places[index].reshape(-1).tolist()
        assert (seen == 1).all() and order == sorted(order)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_save_keeps_the_state_that_it_was_given_while_training_goes_on(tmp_path, stage):
    state, step = reference.make_trainer(reference.loss_fn, TX, mesh=reference.mesh_of("8"), stage=stage)
    state, _ = step(state, reference.make_batch(0))
    expected = reference.to_host(saved_leaves(state))
    with Checkpointer(tmp_path, log=pytest.fail) as checkpointer:
        checkpointer.save(1, state)
        for batch in reference.make_batches(4):  # donates the state, while it is being written
            state, _ = step(state, batch)
    options = {"init_fn": reference.init_params, "config": reference.make_config(stage=stage)}
    found = reference.to_host(saved_leaves(reload(tmp_path, **options).state))
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)


def test_every_kind_of_leaf_comes_back(tmp_path):
    kinds = ["bfloat16", "float16", "float8_e4m3fn", "float8_e4m3", "float8_e5m2", "int4", "uint8", "bool", "complex64"]

    def init_fn(key):
        return {
            **{kind: jnp.arange(16).astype(kind).reshape(8, 2) for kind in kinds},
            "scalar": jnp.float32(3),
            "empty": jnp.zeros((0, 4)),
            "keys": jax.random.split(key, 8),
            "rbg": jax.random.key(3, impl="rbg"),
            "linear/w": {"b": jnp.ones((8,))},
            "linear": {"w/b": jnp.zeros((8,))},
            **{f"{name}/": jnp.full((8,), i) for i, name in enumerate(["", "linear", "a//", "%"])},
            **{f"{name}%": jnp.full((8,), i) for i, name in enumerate(["", "/", "a//", "a///"])},
        }

    mesh, tx = reference.mesh_of("8"), optax.set_to_zero()
    state = zero.init_state(init_fn, tx, jax.random.key(1), mesh=mesh, config=CONFIG)
    with Checkpointer(tmp_path, log=pytest.fail) as checkpointer:
        checkpointer.save(3, state)
    back = reload(tmp_path, init_fn=init_fn, tx=tx)
    assert back.warnings == ()
    reference.assert_placed_alike(back.state, state)
    assert back.state.params["int4"].dtype == jnp.int4
    assert jax.random.key_impl(back.state.params["rbg"]) == "rbg"
    assert_equal(back.state, state)
    assert_equal(reload(tmp_path, init_fn=jax.eval_shape(init_fn, jax.random.key(1)), tx=tx).state, state)
    assert describe(tmp_path, verify_leaves=True).problems == ()


def test_params_that_no_precision_casts_are_not_their_master_params(tmp_path):
    """A step donates both, and refused a restored state in which they were one array."""
    mesh, config = reference.mesh_of("8"), reference.make_config(stage=1, precision="bf16")
    init_fn = lambda key: {**init_params(key), "table": jnp.arange(4), "key": key}  # noqa: E731
    loss_fn = lambda params, batch: jnp.square(batch @ params["w"]).mean()  # noqa: E731
    step = zero.make_train_step(loss_fn, TX, mesh=mesh, config=config)
    state = zero.init_state(init_fn, TX, jax.random.key(1), mesh=mesh, config=config)
    with Checkpointer(tmp_path, log=pytest.fail) as checkpointer:
        checkpointer.save(1, state)
    back = reload(tmp_path, init_fn=init_fn, config=config).state
    (state, _), (back, _) = (step(each, jnp.ones((8, 64))) for each in (state, back))
    assert_equal(back, state)


@pytest.mark.parametrize("offload", [pytest.param(None, marks=pytest.mark.slow), "state"])
def test_params_that_are_gathered_quantized_come_back_to_the_bit(tmp_path, offload):
    """A step leaves what it gathered, which a cast of the master params is not; frozen ones it leaves as they are."""
    mesh, quantize = reference.mesh_of("8"), zero.Quantize(gathers="int8")
    config = reference.make_config(stage=1, precision="bf16", quantize=quantize, offload=offload)
    init_fn = lambda key: {**init_params(key), "frozen": jax.random.normal(key, (512, 64))}  # noqa: E731
    loss_fn = lambda params, batch: jnp.square(batch @ params["w"] @ params["frozen"]).mean()  # noqa: E731
    label = lambda params: {name: name if name == "frozen" else "other" for name in params}  # noqa: E731
    tx = optax.partition({"other": TX, "frozen": optax.set_to_zero()}, label)
    step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
    state = zero.init_state(init_fn, tx, jax.random.key(1), mesh=mesh, config=config)
    for number in range(2):  # a state without a step has plain casts
        with Checkpointer(tmp_path, log=pytest.fail) as checkpointer:
            checkpointer.save(number, state)
        back = reload(tmp_path, init_fn=init_fn, tx=tx, config=config).state
        for name, x in reference.to_host(state.params).items():
            np.testing.assert_array_equal(np.asarray(back.params[name]), x, err_msg=name)
        state, _ = step(state, jnp.ones((8, 64)))


def test_the_newest_and_the_best_are_kept(tmp_path):
    losses = [3.0, 1.0, 5.0, None, -math.inf, math.nan, 6.0]
    state = make_state()
    with Checkpointer(tmp_path, config=CheckpointConfig(keep_last=2, keep_best=1), log=pytest.fail) as checkpointer:
        for step, loss in enumerate(losses[:4], 1):
            checkpointer.save(step, state, loss=loss)
        checkpointer.wait()
        assert checkpointer.steps() == [2, 3, 4]
    with Checkpointer(tmp_path, config=CheckpointConfig(keep_last=2, keep_best=1), log=pytest.fail) as checkpointer:
        for step, loss in enumerate(losses[4:], 5):  # which is best is known from the files
            checkpointer.save(step, state, loss=loss)
    assert checkpointer.steps() == [2, 6, 7] and latest_step(tmp_path) == 7
    assert names(tmp_path) == [f"step_0000000{i}" for i in (2, 6, 7)]
    description = describe(tmp_path / "step_00000006")
    assert math.isnan(description.loss) and description.to_json()["loss"] is None
    assert "\nothers: step 2, validation loss 1.0000; step 7, validation loss 6.0000\n" in str(description)
    assert description.to_json()["others"] == {"2": 1.0, "7": 6.0}


def test_a_step_can_be_saved_again(tmp_path):
    save_steps(tmp_path, (1, 2))
    lines = save_steps(tmp_path, (2,), precision="bf16")
    assert not lines and describe(tmp_path).step == 2
    assert names(tmp_path) == ["step_00000001", "step_00000002"]


def test_when_a_checkpoint_is_due(tmp_path):
    with Checkpointer(tmp_path, config=CheckpointConfig(save_every=3)) as checkpointer:
        assert [step for step in range(8) if checkpointer.is_due(step)] == [3, 6]
    with Checkpointer(tmp_path, config=CheckpointConfig(save_every=0)) as checkpointer:
        assert not any(map(checkpointer.is_due, range(8)))
    with pytest.raises(ValueError, match="keep_last=0"):
        CheckpointConfig(keep_last=0)


def test_remains_of_a_save_that_was_cut_off_are_no_checkpoint(folder):
    partial, replaced = folder / "step_00000003.zero_jax-tmp", folder / "step_00000001.zero_jax-replaced"
    shutil.copytree(folder / "step_00000002", partial)
    (partial / "zero_jax.json").write_text('{"zero_jax": "checkpoint", "step": 3}')
    (folder / "step_00000001").rename(replaced)  # cut off while it was being saved again
    assert reload(folder).step == 2
    lines = []
    with Checkpointer(folder, config=CheckpointConfig(keep_last=9), log=lines.append) as checkpointer:
        assert checkpointer.steps() == [1, 2] and reload(folder, step=1).extra == {"position": 7}
        assert partial.exists() and replaced.exists(), "who only reads removes nothing"
        checkpointer.save(4, make_state(4))
        checkpointer.wait()
        assert checkpointer.steps() == [1, 2, 4]
    assert lines == [f"removed {partial}: a save or a deletion that was cut off"]
    assert names(folder) == ["step_00000001", "step_00000002", "step_00000004"]


def test_a_full_disk_costs_no_older_checkpoint(folder):
    lines, state = [], make_state(3)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    with Checkpointer(folder, config=CheckpointConfig(keep_last=1, keep_best=0), log=lines.append) as checkpointer:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (16384, hard))
            checkpointer.save(3, state)
            checkpointer.wait()
            checkpointer.save(2, state)  # in the place of one that is whole
            checkpointer.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert checkpointer.num_failed == 2 and checkpointer.steps() == [1, 2]
        assert names(folder) == ["step_00000001", "step_00000002", "zero_jax.lock"]
        for line, step in zip(lines, (3, 2), strict=True):
            assert f"checkpoint of step {step} NOT saved" in line and "File too large" in line and "ulimit" in line
            assert "complete: step 1, 2" in line and "\n" not in line
        assert_equal(reload(folder).state, make_state(2))
        checkpointer.save(3, state)
    assert checkpointer.num_saved == 1 and checkpointer.steps() == [3]
    assert names(folder) == ["step_00000003"]


def test_a_folder_that_cannot_be_written_stops_no_run(tmp_path, capfd):
    lines, folder = [], tmp_path / "checkpoints"
    with Checkpointer(folder, log=lines.append) as checkpointer:
        folder.rmdir()
        folder.write_text("a file in its place")
        checkpointer.save(1, make_state())
        checkpointer.wait()
        assert checkpointer.num_failed == 1 and "NOT saved" in lines[0]
    assert "Traceback" not in capfd.readouterr().err
    with pytest.raises(ValueError, match=r"cannot write checkpoints to .*checkpoints"):
        Checkpointer(folder)


def test_what_json_cannot_hold_stops_no_run_and_arrays_become_lists(tmp_path):
    lines = []
    with Checkpointer(tmp_path, log=lines.append) as checkpointer:
        checkpointer.save(1, make_state(), extra={"model": object()})
        assert checkpointer.num_failed == 1 and "`extra` has a value of type object: give what JSON has" in lines[0]
        generator = np.random.Generator(np.random.MT19937(0)).bit_generator.state  # has an array
        checkpointer.save(2, make_state(), extra={"rng": generator, "loss": np.float32(0.5), "best": jnp.float32(0.5)})
    extra, key = describe(tmp_path).extra, generator["state"]["key"].tolist()
    assert (extra["rng"]["state"]["key"], extra["loss"], extra["best"]) == (key, 0.5, 0.5)


def test_a_state_of_another_kind_is_refused_with_what_saves_it(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ValueError, match=r"a dict is no zero\.TrainState: orbax saves a state of your own"):
            checkpointer.save(1, {"params": init_params(jax.random.key(0))})  # pyright: ignore[reportArgumentType]


def test_a_name_that_files_cannot_have_is_refused(tmp_path):
    state = zero.init_state(
        lambda key: {"\ud800": jnp.ones(8)}, TX, jax.random.key(0), mesh=reference.mesh_of("8"), config=CONFIG
    )
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(ValueError, match=r"leaf '.*ud800' .* rename it"):
        checkpointer.save(1, state)


def test_a_state_that_was_donated_is_refused(tmp_path):
    state = make_state()
    state.params["w"].delete()
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(ValueError, match=r"params/w.*was donated"):
        checkpointer.save(1, state)


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


def flip_value(step):
    """Flips a bit in the middle of a stored value of the leaf `params/w`."""
    base = tensorstore.KvStore.open({"driver": "file", "path": f"{step}/state/"}).result()
    root = tensorstore.ocdbt.dump(base).result()["versions"][-1]["root"]["location"]
    entries = tensorstore.ocdbt.dump(base, root).result()["entries"]
    value = next(x["indirect_value"] for x in entries if x["key"].startswith(b"params/w/") and "indirect_value" in x)
    _, folder, name, offset, length = value.split(":")
    flip(step / "state" / folder / name, int(offset) + int(length) // 2)


def largest(step):
    return max((path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def edit_record(step):
    record = step / "record" / "metadata"
    record.write_text(record.read_text().replace('"position": 14', '"position": 15'))


def make_foreign(step):
    shutil.rmtree(step)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(step, {"w": np.zeros(3)})


def make_empty(step):
    shutil.rmtree(step)
    step.mkdir()


def of_the_future(step):
    record = step / "record" / "metadata"
    record.write_text(record.read_text().replace("zero_jax 1", "zero_jax 9"))


DAMAGE = {
    "bit flipped in a value": (flip_value, r"leaf 'params/w' of .*step_00000002 is damaged .*fingerprint"),
    "data file cut off": (lambda step: truncate(largest(step)), r"leaf '.*' of .*is damaged or cut off"),
    "data file missing": (lambda step: largest(step).unlink(), r"leaf '.*' of .*is damaged or cut off"),
    "index cut off": (lambda step: truncate(step / "state" / "manifest.ocdbt"), r"leaf .*manifest.ocdbt"),
    "index missing": (lambda step: (step / "state" / "manifest.ocdbt").unlink(), "leaf .* is damaged or cut off"),
    "bit flipped in the index": (lambda step: flip(step / "state" / "manifest.ocdbt", 40), r"leaf .*manifest.ocdbt"),
    "arrays missing": (lambda step: shutil.rmtree(step / "state"), "leaf .* is damaged or cut off"),
    "record edited": (edit_record, "record/metadata does not match its checksum"),
    "record cut off": (lambda step: truncate(step / "record" / "metadata"), "record/metadata cannot be read"),
    "record missing": (lambda step: (step / "record" / "metadata").unlink(), "record/metadata is missing"),
    "foreign": (make_foreign, "this is not a complete checkpoint of zero_jax"),
    "empty": (make_empty, "record/metadata is missing"),
    "of a later release": (of_the_future, "is of format 'zero_jax 9'"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_newest_whole_checkpoint_is_taken_instead_of_a_damaged_one(folder, damage):
    harm, message = DAMAGE[damage]
    harm(folder / "step_00000002")
    with pytest.warns(UserWarning, match="checkpoint of step 2 passed over") as told:
        back = reload(folder, log=None)
    assert back.step == 1 and back.extra == {"position": 7}
    assert_equal(back.state, make_state(1))
    assert back.warnings == tuple(str(x.message) for x in told) and len(told) == 1
    with pytest.raises(CheckpointError, match=message) as error:
        reload(folder, step=2)
    assert "other checkpoints there: [1]" in str(error.value) and str(error.value).split(";")[0] in back.warnings[0]


def test_none_is_whole(folder):
    flip_value(folder / "step_00000001")
    edit_record(folder / "step_00000002")
    with pytest.raises(CheckpointError, match="no undamaged checkpoint in") as error:
        reload(folder)
    assert "params/w" in str(error.value) and "checksum" in str(error.value)
    assert describe(folder, step=1, verify_leaves=True).problems[0].startswith("leaf 'params/w'")


def test_no_checkpoint_at_all(tmp_path, folder):
    with pytest.raises(CheckpointError, match="there is no folder"):
        reload(tmp_path / "nowhere")
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=r"it holds notes.txt"):
        reload(other)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 9 .*: give one of 1, 2"):
        reload(folder, step=9)
    with pytest.raises(CheckpointError, match=r"step_00000002 is the checkpoint of step 2 itself: give the folder ab"):
        reload(folder / "step_00000002")
    with pytest.raises(ValueError, match=r"step='2': give the number of a step, as 100, or None"):
        reload(folder, step="2")
    assert latest_step(other) is None


def test_the_folder_of_a_run_leads_to_its_checkpoints(folder):
    assert folder.name == "checkpoints"
    assert reload(folder.parent).path == reload(folder).path


def test_all_that_does_not_fit_is_named_at_once(folder):
    def other(key):
        return {"w": jnp.zeros((64, 256)), "bias": jnp.zeros((16,)), "b": jnp.zeros((16,), jnp.int32)}

    with pytest.raises(ValueError, match="does not fit the state") as error:
        reload(folder, init_fn=other)
    text = str(error.value)
    assert not isinstance(error.value, CheckpointError), "no reason to take an older one"
    assert "params/w: saved as [64, 512], the state has [64, 256]" in text
    assert "params/bias: the checkpoint has no such leaf" in text
    assert "and 3 more" in text or "params/b: saved as float32, the state has int32" in text
    assert "the model that it was saved with" in text


def test_another_optimizer_takes_the_params_alone(folder):
    tx = optax.sgd(0.1, momentum=0.9)
    with pytest.raises(ValueError, match=r"opt_state/0/mu/w: the checkpoint has it(?s:.*)params_only=True"):
        reload(folder, tx=tx)
    back = reload(folder, tx=tx, params_only=True, key=jax.random.key(5))
    expected = zero.init_state(
        reference.to_host(make_state(2).params), tx, jax.random.key(5), mesh=reference.mesh_of("8"), config=CONFIG
    )
    assert back.step == 2 and int(back.state.step) == 0
    reference.assert_placed_alike(back.state, expected)
    assert_equal(back.state, expected)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: tx,
        lambda tx: optax.masked(tx, {"w": True, "b": False}),
        lambda tx: optax.MultiSteps(tx, 2),
        lambda tx: optax.inject_hyperparams(lambda learning_rate: optax.chain(tx, optax.scale(learning_rate)))(0.1),
    ],
)
def test_an_optimizer_with_fields_of_the_same_names_is_refused(tmp_path, wrap):
    adam, belief = wrap(optax.scale_by_adam()), wrap(optax.scale_by_belief())
    state = zero.init_state(init_params, adam, jax.random.key(0), mesh=reference.mesh_of("8"), config=CONFIG)
    with Checkpointer(tmp_path, log=pytest.fail) as checkpointer:
        checkpointer.save(1, state, extra={"position": 7})
    found = r"opt_state.*: saved of the class ScaleByAdamState, the state has the class ScaleByBeliefState"
    with pytest.raises(ValueError, match=rf"{found}(?s:.*)params_only=True.*renamed"):
        reload(tmp_path, tx=belief)
    assert int(reload(tmp_path, tx=belief, params_only=True).state.step) == 0
    back = reload(tmp_path, tx=adam)
    assert back.extra == {"position": 7} and back.warnings == ()
    assert_equal(back.state, state)
    file = tmp_path / "step_00000001" / "record" / "metadata"
    record = json.loads(file.read_text())
    del record["checksum"], record["extra"]["zero_jax.opt_state_classes"]  # as releases up to 0.2.0 wrote it
    file.write_text(json.dumps({**record, "checksum": json_checksum(record)}))
    assert_equal(reload(tmp_path, tx=belief).state, state)


def test_classes_of_containers_and_of_params_may_change(tmp_path):
    class Old(NamedTuple):
        w: Any
        b: Any

    class New(Old):
        pass

    tx = optax.chain(optax.masked(optax.adam(1e-2), lambda params: type(params)(True, False)), optax.trace(0.9))
    made = {kind: lambda key, kind=kind: kind(**init_params(key)) for kind in (Old, New)}
    state = zero.init_state(made[Old], tx, jax.random.key(0), mesh=reference.mesh_of("8"), config=CONFIG)
    with Checkpointer(tmp_path, log=pytest.fail) as checkpointer:
        checkpointer.save(1, state)
    assert_equal(reload(tmp_path, tx=tx, init_fn=made[New]).state, state)


def test_abstract_params_will_do(folder):
    shapes = jax.eval_shape(init_params, jax.random.key(0))
    assert_equal(reload(folder, init_fn=shapes).state, make_state(2))


def test_description(folder, tmp_path):
    for path in (folder, folder / "step_00000002", tmp_path):  # checkpoints, one step, the run
        found = describe(path)
        assert found.step == 2 and found.extra == {"position": 14} and found.problems is None
    rows = {row["path"]: row for row in json.loads(json.dumps(found.to_json()))["leaves"]}
    assert rows["params/w"] == {"path": "params/w", "shape": [64, 512], "dtype": "float32", "bytes": 131072}
    lines = [line.split() for line in str(found).splitlines()]
    assert ["params/w", "float32", "64x512", "131,072"] in lines and ["position:"] in lines
    assert (
        found.nbytes == sum(x.nbytes for x in jax.tree.leaves(make_state(2)) if x.dtype != jax.random.key(0).dtype) + 8
    )
    with pytest.raises(CheckpointError, match="step 7"):
        describe(folder, step=7)

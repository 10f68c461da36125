"""A checkpoint is reloaded on any mesh, at any stage and in any precision, and training goes on from it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from covering import covering_array

import zero_jax as zero
from zero_jax.checkpoint import Checkpointer, restore
from zero_jax.checkpoint.saved_state import saved_leaves

# Sums over devices are taken in another order, and Adam divides gradients by their size: the bound of test_parity.py.
TOLERANCE = 2e-5
TX = optax.adamw(1e-2)
SIZES, STAGES = ("8", "4", "2", "1"), (0, 1, 2, 3)
# Every pair of the number of devices and the stage before, and those after: 16 reloads instead of 256.
PAIRS = [
    ((row["from"], row["from stage"]), (row["to"], row["to stage"]))
    for row in covering_array({"from": SIZES, "from stage": STAGES, "to": SIZES, "to stage": STAGES}, seed=3)
]
# Every number of devices and every stage is saved and loaded, fewer of them by the fast tests.
CYCLE = [("8", 3), ("4", 1), ("2", 2), ("1", 0)]
SAME = [(place, place) for place in CYCLE]
COVERING = [(CYCLE[0], CYCLE[1]), (CYCLE[3], CYCLE[0]), (CYCLE[0], CYCLE[0])]
ODD = [
    (("8", 3), ("3", 3)),
    (("3", 1), ("8", 2)),
    (("replica", 3), ("8", 1)),
    (("8", 2), ("replica", 2)),
    (("staged222", 3), ("4", 3)),
    (("model2", 3), ("8", 1)),
    (("8", 2), ("model4", 3)),
    (("model4", 1), ("model2", 2)),
    (("model2", 3), ("model2", 3)),
]
BATCHES = reference.make_batches(4, 24)  # divides over 8 and over 3 devices


def config_of(mesh, stage, precision):
    """Returns the config of a place; where the mesh has a model axis, with the model's own sharding."""
    specs = reference.PARAM_SPECS if mesh.startswith("model") else None
    return reference.make_config(stage=stage, precision=precision, param_specs=specs)


@functools.cache
def trainer(mesh, stage, precision="fp32"):
    """Returns the step of a place; states are made anew, for a step donates them."""
    config = config_of(mesh, stage, precision)
    return zero.make_train_step(reference.loss_fn, TX, mesh=reference.mesh_of(mesh), config=config)


def first_state(mesh, stage, precision="fp32"):
    config = config_of(mesh, stage, precision)
    key = jax.random.PRNGKey(0)
    return zero.init_state(reference.host_params(), TX, key, mesh=reference.mesh_of(mesh), config=config)


def run(state, step, batches):
    """Returns the state after the batches, and their losses."""
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    return state, losses


class Saved:
    """Runs that were saved after two of four steps, each place once."""

    def __init__(self, root):
        self.root, self.made = root, {}

    def __call__(self, mesh, stage, precision="fp32"):
        """Returns the folder, the leaves that were saved, and the losses of the two steps after that."""
        place = (mesh, stage, precision)
        if place not in self.made:
            folder = self.root / "-".join(map(str, place))
            state, _ = run(first_state(*place), trainer(*place), BATCHES[:2])
            leaves = reference.to_host(saved_leaves(state))
            with Checkpointer(folder, log=pytest.fail) as checkpointer:
                checkpointer.save(2, state, extra={"position": 2})
                state, losses = run(state, trainer(*place), BATCHES[2:])
            self.made[place] = folder, leaves, losses, reference.to_host(saved_leaves(state))
        return self.made[place]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return Saved(tmp_path_factory.mktemp("saved"))


def reload(folder, mesh, stage, precision="fp32"):
    config = config_of(mesh, stage, precision)
    return restore(folder, init_fn=reference.init_params, tx=TX, mesh=reference.mesh_of(mesh), config=config, log=str)


def assert_placed(state, mesh, stage, precision="fp32"):
    config = config_of(mesh, stage, precision)
    key = jax.random.PRNGKey(0)
    shapes = zero.abstract_state(reference.init_params, TX, key, mesh=reference.mesh_of(mesh), config=config)
    assert jax.tree.structure(state) == jax.tree.structure(shapes)
    for x, shape in zip(jax.tree.leaves(state), jax.tree.leaves(shapes), strict=True):
        assert (x.shape, x.dtype) == (shape.shape, shape.dtype)
        assert x.sharding.is_equivalent_to(shape.sharding, x.ndim)


def check(saved, source, target):
    """Checks that the state comes back bit by bit, placed as the target's own, and that training goes on from it."""
    folder, leaves, losses, last = saved(*source)
    back = reload(folder, *target)
    assert back.step == 2 and back.warnings == () and back.extra == {"position": 2}
    assert_placed(back.state, *target)
    found = reference.to_host(saved_leaves(back.state))
    assert list(found) == list(leaves)
    for name, x in leaves.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)
    state, went_on = run(back.state, trainer(*target), BATCHES[2:])
    end = reference.to_host(saved_leaves(state))
    if source == target:
        assert went_on == losses
        for name, x in last.items():
            np.testing.assert_array_equal(end[name], x, err_msg=name)
    else:
        np.testing.assert_allclose(went_on, losses, atol=TOLERANCE, rtol=TOLERANCE)
        reference.assert_close(end, last, tolerance=TOLERANCE)


def name_of(pair):
    return "-to-".join(f"{mesh}.stage{stage}" for mesh, stage in pair)


@pytest.mark.parametrize(("source", "target"), COVERING, ids=map(name_of, COVERING))
def test_reload_elsewhere(saved, source, target):
    check(saved, source, target)


REST = [pair for pair in [*PAIRS, *SAME, *ODD] if pair not in COVERING]


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), REST, ids=map(name_of, REST))
def test_reload_anywhere(saved, source, target):
    check(saved, source, target)


@pytest.mark.slow
@pytest.mark.parametrize("place", [("8", 3), ("4", 1)], ids=["stage3", "stage1"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_goes_on_bit_by_bit(saved, place, precision):
    folder, _, losses, last = saved(*place, precision)
    back = reload(folder, *place, precision)
    state, went_on = run(back.state, trainer(*place, precision), BATCHES[2:])
    assert went_on == losses
    end = reference.to_host(saved_leaves(state))
    for name, x in last.items():
        np.testing.assert_array_equal(end[name], x, err_msg=name)


@pytest.fixture(scope="module")
def unstepped(tmp_path_factory):
    """The folder of a first state, by mesh, stage and precision."""

    @functools.cache
    def save(*place):
        folder = tmp_path_factory.mktemp("unstepped")
        with Checkpointer(folder, log=pytest.fail) as checkpointer:
            checkpointer.save(2, first_state(*place))
        return folder

    return save


QUICK = {("fp16", "bf16", 1), ("bf16", "fp32", 1)}
PRECISIONS = [(old, new) for old in ("fp32", "bf16", "fp16") for new in ("fp32", "bf16", "fp16") if old != new]


@pytest.mark.parametrize(
    ("old", "new", "stage"),
    [
        pytest.param(*pair, stage, marks=() if (*pair, stage) in QUICK else pytest.mark.slow)
        for pair in PRECISIONS
        for stage in (1, 3)
    ],
)
def test_another_precision_has_the_same_masters(unstepped, old, new, stage):
    leaves = reference.to_host(saved_leaves(first_state("8", stage, old)))
    back = reload(unstepped("8", stage, old), "8", stage, new)
    assert_placed(back.state, "8", stage, new)
    found = reference.to_host(saved_leaves(back.state))
    for name, x in leaves.items():
        if not name.startswith("loss_scale"):
            np.testing.assert_array_equal(found[name], x, err_msg=name)
    told = {"fp16": "starting with the first one"}.get(new) or ({"fp16": "dropped"}.get(old))
    assert [told in line for line in back.warnings] == ([True] if told else [])
    if back.state.master is not None:
        low = reference.to_host(jax.tree.map(lambda x: x.astype(back.state.params["embed"].dtype), back.state.master))
        jax.tree.map(np.testing.assert_array_equal, reference.to_host(back.state.params), low)
    trainer("8", stage, new).lower(back.state, BATCHES[0])  # the step takes it


def test_masters_of_another_dtype_are_cast_after_they_were_verified(unstepped, tmp_path):
    low = zero.Precision(param=jnp.bfloat16, compute=jnp.bfloat16, reduce=jnp.bfloat16, master=jnp.bfloat16)
    leaves = reference.to_host(saved_leaves(first_state("8", 3)))
    back = reload(unstepped("8", 3), "8", 3, low)
    assert len(back.warnings) == 1 and "were saved as float32 and are bfloat16 now" in back.warnings[0]
    expected = leaves["params/embed"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(reference.to_host(back.state.params["embed"]), expected)
    with Checkpointer(tmp_path, log=pytest.fail) as checkpointer:
        checkpointer.save(2, back.state)
    wide = reload(tmp_path, "4", 1)
    np.testing.assert_array_equal(reference.to_host(wide.state.params["embed"]), expected.astype(np.float32))


@pytest.mark.parametrize("params_only", [False, True])
def test_what_is_too_large_for_the_dtype_of_the_state_is_refused(tmp_path, params_only):
    arguments = {"mesh": reference.mesh_of("8"), "config": reference.make_config()}
    wide = {"w": jnp.full((16, 8), 1e6), "worst": jnp.full(3, -jnp.inf)}
    with Checkpointer(tmp_path, log=pytest.fail) as checkpointer:
        checkpointer.save(1, zero.init_state(wide, TX, jax.random.key(0), **arguments), allow_nonfinite=True)
    narrow = jax.tree.map(lambda x: x.astype(jnp.float16), wide)
    with pytest.raises(ValueError, match=r"leaf 'params/w' has values too large for float16: keep it in float32"):
        restore(tmp_path, init_fn=narrow, tx=TX, params_only=params_only, **arguments)


@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_64_bits_are_restored_where_jax_has_them(tmp_path, dtype):
    init_fn = lambda key: {"w": jnp.ones((16, 8), jnp.float32), "wide": jnp.asarray(np.ones((16, 8), dtype))}  # noqa: E731
    placed = {"mesh": reference.mesh_of("8"), "config": reference.make_config()}
    with jax.enable_x64(True), Checkpointer(tmp_path, log=pytest.fail) as checkpointer:
        checkpointer.save(1, zero.init_state(init_fn, TX, jax.random.key(0), **placed))
    with pytest.raises(ValueError, match=rf"params/wide: saved as {dtype}, (.*\n)+JAX has 64 bits with jax_enable_x64"):
        restore(tmp_path, init_fn=init_fn, tx=TX, **placed)
    with jax.enable_x64(True):
        assert restore(tmp_path, init_fn=init_fn, tx=TX, **placed).state.params["wide"].dtype == dtype

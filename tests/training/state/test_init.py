"""A train state is born sharded, with the values that one device would give it, and takes the bytes of the formula."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import two_layers
from jax.sharding import PartitionSpec as P
from reference import mesh_of

import zero_jax as zero
from zero_jax.training.state import making
from zero_jax.training.state import placement as placement_module

STAGES = (0, 1, 2, 3)
PRECISIONS = {"fp32": (4, 0), "bf16": (2, 4)}  # bytes of a param, and of its master param where it has one
NUM_LEAVES, LEAF_SHAPE = 8, (512, 1024)
LEAF_BYTES = 4 * math.prod(LEAF_SHAPE)


def init_many(key):
    return {f"kernel_{i}": jax.random.normal(k, LEAF_SHAPE) for i, k in enumerate(jax.random.split(key, NUM_LEAVES))}


@functools.cache
def one_device_params():
    return jax.tree.map(np.asarray, jax.jit(reference.init_params)(jax.random.key(5)))


@pytest.mark.parametrize(
    ("mesh", "stage", "precision"),
    [
        ("8", 3, "fp32"),
        ("replica", 1, "fp32"),
        ("staged222", 2, "bf16"),
        *[pytest.param(m, 3, "bf16", marks=pytest.mark.slow) for m in reference.MESHES],
    ],
)
def test_values_are_those_of_one_device(mesh, stage, precision):
    config = reference.make_config(stage=stage, precision=precision)
    tx, key = optax.adam(0.1), jax.random.key(5)
    state = zero.init_state(reference.init_params, tx, key, mesh=mesh_of(mesh), config=config)
    masters = state.params if state.master is None else state.master
    # Bit for bit, but for the last bit of transcendental functions, which depends on how XLA vectorizes them.
    reference.assert_close(masters, one_device_params(), tolerance=1e-6)
    if state.master is not None:
        rounded = jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16), state.master)
        chex.assert_trees_all_equal(reference.to_host(state.params), rounded)
    reference.assert_close(state.opt_state, tx.init(one_device_params()), tolerance=0)
    assert int(state.step) == int(state.num_skipped_steps) == 0


def peak_over_share(init, *, stage, precision, mesh):
    """Returns by how many bytes a device the making of a state exceeds what the state takes."""
    config, tx = zero.ZeroConfig(stage=stage, precision=precision), optax.adam(0.1)
    make, given = (init, None) if callable(init) else (None, init)
    shapes = zero.abstract_state(make or (lambda key: given), tx, mesh=mesh, config=config)
    placement = placement_module.make_placement(shapes.params, mesh=mesh, config=config)
    program, given = making._init_program(make, given, tx, shapes, placement)
    memory = program.lower(given, jax.eval_shape(lambda: jax.random.key(0))).compile().memory_analysis()
    used = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return used - memory.alias_size_in_bytes - per_device_bytes(shapes)


def per_device_bytes(tree):
    leaves = [x for x in jax.tree.leaves(tree) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [1, 3])
def test_is_born_sharded(stage, precision):
    """No more than a device's share and one leaf: whole leaves are gathered one at a time, after the program."""
    # XLA:CPU makes the random bits of all leaves at once: another 4 bytes for each param of the device's share.
    random_bits = NUM_LEAVES * LEAF_BYTES // 8
    excess = peak_over_share(init_many, stage=stage, precision=precision, mesh=mesh_of("8"))
    assert excess <= LEAF_BYTES + random_bits


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("stage", [1, 3])
def test_is_born_sharded_on_tpus(stage):
    mesh = zero.make_mesh(topology="v5p:2x2x2")
    assert peak_over_share(init_many, stage=stage, precision="bf16", mesh=mesh) <= LEAF_BYTES


@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16"), (3, "fp32")])
def test_given_params_are_held_once(stage, precision):
    given = {f"kernel_{i}": np.ones(LEAF_SHAPE, np.float32) for i in range(NUM_LEAVES)}
    excess = peak_over_share(given, stage=stage, precision=precision, mesh=mesh_of("8"))
    assert excess <= 4096  # scalars and alignment


class CallableParams(dict):
    """Params that are callable, as Equinox modules are."""

    def __call__(self, x):
        raise AssertionError("params are no init_fn")


jax.tree_util.register_pytree_with_keys(
    CallableParams,
    lambda tree: ([(jax.tree_util.DictKey(k), tree[k]) for k in sorted(tree)], tuple(sorted(tree))),
    lambda keys, values: CallableParams(zip(keys, values, strict=True)),
)


def test_takes_params_as_they_are():
    """Host arrays, device arrays wherever they lie, params of another dtype, and callable pytrees."""
    host = one_device_params()
    elsewhere = jax.device_put(host, jax.devices()[3])
    sharded = jax.device_put(host, jax.sharding.NamedSharding(mesh_of("8"), P(None)))
    callable_params = CallableParams(host)
    config = reference.make_config(stage=3)
    for given in (host, elsewhere, sharded, callable_params):
        state = zero.init_state(given, optax.sgd(0.1), jax.random.key(0), mesh=mesh_of("8"), config=config)
        chex.assert_trees_all_equal(reference.to_host(state.params), given if given is callable_params else host)
        assert {reference.num_shards(x) for x in jax.tree.leaves(state.params)} == {8}
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), host)
    state = zero.init_state(
        low,
        optax.sgd(0.1),
        jax.random.key(0),
        mesh=mesh_of("4"),
        config=reference.make_config(stage=2, precision="bf16"),
    )
    chex.assert_trees_all_equal(reference.to_host(state.params), low)
    chex.assert_type(jax.tree.leaves(state.master), jnp.float32)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_is_made_within_a_trace(stage):
    """Of `jax.jit`, `jax.eval_shape`, and `jax.vmap` over the seeds of several runs."""
    config, tx, mesh = reference.make_config(stage=stage, precision="bf16"), optax.adam(0.1), mesh_of("8")
    draw = lambda key: jax.tree.map(lambda x: jax.random.normal(key, x.shape), two_layers.host_params())  # noqa: E731
    make = lambda key: zero.init_state(draw, tx, key, mesh=mesh, config=config)  # noqa: E731
    state, keys = make(jax.random.key(5)), jax.random.split(jax.random.key(5), 2)
    of_params = lambda params: zero.init_state(params, tx, jax.random.key(5), mesh=mesh, config=config)  # noqa: E731
    for made in (jax.jit(make)(jax.random.key(5)), jax.jit(of_params)(draw(jax.random.key(5)))):
        reference.assert_placed_alike(made, state)
        reference.assert_close(made.params, reference.to_host(state.params), tolerance=1e-6)
    chex.assert_trees_all_equal_shapes_and_dtypes(jax.eval_shape(make, keys[0]), state)
    several = jax.vmap(make)(keys)
    step = zero.make_train_step(two_layers.loss_fn, tx, mesh=mesh, config=config)
    batches = [{"inputs": two_layers.make_batch()["inputs"] + number} for number in range(2)]
    _, together = jax.vmap(step)(several, jax.tree.map(lambda *x: jnp.stack(x), *batches))
    alone = [step(make(key), batch)[1].loss for key, batch in zip(keys, batches, strict=True)]
    np.testing.assert_allclose(together.loss, alone, rtol=1e-5)


@pytest.mark.parametrize(
    ("stage", "precision", "name"), [(1, "bf16", "adam"), (3, "fp16", "adafactor"), (2, "fp32", "multi_steps")]
)
def test_abstract_state_is_that_of_init_state(stage, precision, name):
    tx = {
        "adam": optax.adam(0.1),
        "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=8),
        "multi_steps": optax.MultiSteps(optax.adam(0.1), 2),
    }[name]
    config = reference.make_config(stage=stage, precision=precision)
    key = jax.random.key(0)
    abstract = zero.abstract_state(reference.init_params, tx, key, mesh=mesh_of("replica"), config=config)
    state = zero.init_state(reference.init_params, tx, key, mesh=mesh_of("replica"), config=config)
    chex.assert_trees_all_equal_shapes_and_dtypes(abstract, state)
    reference.assert_placed_alike(state, abstract)
    without_key = zero.abstract_state(reference.init_params, tx, mesh=mesh_of("replica"), config=config)
    assert jax.tree.leaves(without_key) == jax.tree.leaves(abstract)


def formula_bytes(stage, precision, num_params, num_shards):
    """Bytes a device of each group, from the paper's section 5 alone: Adam keeps two moments in full precision."""
    low, master = PRECISIONS[precision]
    moments = 8 * num_params
    if stage == 0:
        return {"params": low * num_params, "master": master * num_params, "opt_state": moments}
    if stage == 3:  # the master params are the params
        return {"params": (master or low) * num_params // num_shards, "master": 0, "opt_state": moments // num_shards}
    return {
        "params": low * num_params,
        "master": master * num_params // num_shards,
        "opt_state": moments // num_shards,
    }


@pytest.mark.parametrize(("mesh", "num_shards"), [("8", 8), ("replica", 4)])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_bytes_of_every_group_equal_the_formula(precision, mesh, num_shards):
    sizes = [x.size for x in jax.tree.leaves(one_device_params())]
    totals = []
    for stage in STAGES:
        config = reference.make_config(stage=stage, precision=precision)
        state = zero.init_state(
            one_device_params(), optax.adam(0.1), jax.random.key(0), mesh=mesh_of(mesh), config=config
        )
        expected = formula_bytes(stage, precision, sum(sizes), num_shards)
        for device in (0, mesh_of(mesh).size - 1):
            measured = {group: bytes_on(getattr(state, group), device) for group in expected}
            measured["opt_state"] -= 4  # the number of steps, which is whole
            assert measured == expected
        totals.append(bytes_on(state, 0))
    assert totals == sorted(totals, reverse=True)  # a higher stage never takes more
    assert totals[3] < totals[2] == totals[1] < totals[0]


@pytest.mark.parametrize(
    ("precision", "num_microbatches"),
    [("bf16", 1), *[pytest.param(*case, marks=pytest.mark.slow) for case in (("fp32", 1), ("fp32", 2), ("bf16", 2))]],
)
def test_a_higher_stage_never_takes_more_to_run(precision, num_microbatches):
    """State and temporaries of the compiled step, for a model whose params outweigh its activations."""

    def init(key):
        return {"layers": jax.random.normal(key, (8, 256, 256)) / 16, "head": jax.random.normal(key, (256, 8))}

    def loss_fn(params, batch):
        layer = jax.checkpoint(lambda x, kernel: (jnp.tanh(x @ kernel), None))
        hidden, _ = jax.lax.scan(layer, batch["inputs"].astype(params["head"].dtype), params["layers"])
        return jnp.square(hidden @ params["head"]).mean()

    def bytes_of(stage):
        # Skipping keeps all gradients until all are known to be finite, at stages 0 and 1 whole ones.
        config = reference.make_config(
            stage=stage, precision=precision, num_microbatches=num_microbatches, skip_nonfinite=False
        )
        state = zero.abstract_state(init, optax.adam(0.1), mesh=mesh_of("8"), config=config)
        step = zero.make_train_step(loss_fn, optax.adam(0.1), mesh=mesh_of("8"), config=config)
        batch = {"inputs": jax.ShapeDtypeStruct((16, 256), jnp.float32)}
        memory = step.lower(state, batch).compile().memory_analysis()
        return memory.argument_size_in_bytes + memory.temp_size_in_bytes

    used = [bytes_of(stage) for stage in STAGES]
    assert used == sorted(used, reverse=True)
    assert used[3] < 0.6 * used[2] and used[1] < 0.7 * used[0]


def bytes_on(tree, device):
    leaves = jax.tree.leaves(tree)
    return sum(s.data.nbytes for x in leaves for s in x.addressable_shards if s.device == jax.devices()[device])


def test_a_report_says_what_is_unsharded():
    params = {"large": np.ones((64, 64), np.float32), "odd": np.ones((63, 65), np.float32), "small": np.ones(3)}
    config = zero.ZeroConfig(stage=3)
    report = zero.sharding_report(params, mesh=mesh_of("8"), config=config)
    assert report.per_device_bytes == 4 * (64 * 64 // 8 + 63 * 65) + report.placements[2].num_bytes
    assert "unsharded leaves take more than half" in str(report) and "divisible by 8 devices" in str(report)
    assert {p.path: p.reason.split(":")[0] for p in report.placements} == {
        "large": "sharded",
        "odd": "unsharded",
        "small": "unsharded",
    }


@dataclasses.dataclass
class UserState:
    """Someone's own train state."""

    model: dict
    optimizer: tuple
    step: jax.Array


jax.tree_util.register_dataclass(UserState)


def test_shardings_of_any_train_state():
    params, tx = one_device_params(), optax.adam(0.1)
    specs = {"embed": None, "layers": {"w_in": P(None, None, "model"), "bias": P(), "w_out": P()}, "head": P()}
    mesh = zero.make_mesh(data=4, model=2)
    for stage in (1, 3):
        config = reference.make_config(stage=stage, param_specs=specs)
        expected = zero.abstract_state(lambda key: params, tx, mesh=mesh, config=config)
        mine = UserState(model=params, optimizer=tx.init(params), step=np.int32(0))
        shardings = zero.state_shardings(mine, mesh=mesh, config=config, params="model")
        placed = jax.device_put(mine, shardings)
        reference.assert_placed_alike(placed.model, expected.params)
        reference.assert_placed_alike(placed.optimizer, expected.opt_state)
        assert placed.step.sharding.is_fully_replicated
        w_in = shardings.optimizer[0].mu["layers"]["w_in"].spec
        assert "model" in str(w_in) and "data" in str(w_in)
        pair = zero.state_shardings((params, tx.init(params)), mesh=mesh, config=config, params="0")
        assert pair == (shardings.model, shardings.optimizer)
    with pytest.raises(ValueError, match=r"no params at 'params' \(it has model, optimizer, step\): say where"):
        zero.state_shardings(mine, mesh=mesh, config=config)


@pytest.mark.slow
def test_leaves_whose_paths_are_alike(tmp_path):
    """Module names of Haiku have slashes: each leaf keeps its own shape and values, and is checked by itself."""
    params = {"a/b": np.full((8, 16), 2, np.float32), "a": {"b": np.full((8, 16), 3, np.float32)}}
    params |= {"a/b~2": np.ones(3, np.float32), "c/d": np.ones(8, np.float32), "c": {"d": np.ones((2, 8), np.float32)}}
    first = lambda params: jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)  # noqa: E731
    average = lambda state, grads: jax.tree.map(lambda s, g: 0.5 * s.astype(jnp.float32) + g, state, grads)  # noqa: E731
    tx = optax.GradientTransformation(first, lambda grads, state, params=None: (grads, average(state, grads)))
    options = {"mesh": zero.make_mesh(), "config": zero.ZeroConfig(stage=1, min_shard_size=8)}
    state = zero.init_state(params, tx, jax.random.key(0), **options)
    chex.assert_trees_all_equal(jax.device_get(state.opt_state), params)
    step = zero.make_train_step(lambda p, b: sum((x * b.mean()).sum() for x in jax.tree.leaves(p)), tx, **options)
    state, _ = step(state, np.ones(8, np.float32))
    chex.assert_trees_all_equal(jax.device_get(state.opt_state), jax.tree.map(lambda x: 0.5 * x + 1, params))
    shardings = zero.state_shardings({"params": params, "opt": params}, **options)
    assert jax.tree.structure(shardings["opt"]) == jax.tree.structure(params)
    names = {"a/b~2": zero.pretrained.TensorName("second"), "a/b": zero.pretrained.TensorName("first")}
    names |= {name: zero.pretrained.TensorName(name) for name in ("a/b~2~2", "c/d", "c/d~2")}
    zero.pretrained.save_tensors(tmp_path / "tensors", params, names)
    loaded = zero.pretrained.load_tensors(tmp_path / "tensors", params, names, **options)
    chex.assert_trees_all_equal(jax.device_get(loaded), params)
    broken = dataclasses.replace(state, params=jax.tree.map(jnp.copy, state.params))
    broken.params["a"]["b"] = broken.params["a"]["b"].at[0, 0].set(jnp.nan)
    assert zero.training.nonfinite_leaves(broken, mesh=options["mesh"]) == ["params/a/b"]

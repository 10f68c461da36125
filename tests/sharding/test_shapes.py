"""Params of every odd shape and dtype train as they do on one device, and lie as well as they can be made to."""

import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from reference import assert_close, mesh_of, num_shards, run_plain

import zero_jax as zero

# Sums over a batch are made in another order on several devices: float32 rounds at 6e-8.
TOLERANCE = 1e-6


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) / 4


def make_batches(num_steps=2, size=24):
    return [{"inputs": 4 * normal(100 + i, size, 12), "targets": 4 * normal(200 + i, size)} for i in range(num_steps)]


def tx():
    return optax.chain(optax.trace(0.9), optax.add_decayed_weights(0.1), optax.scale(-0.1))


def train(loss_fn, params, *, mesh, stage, batches=None, **fields):
    """Trains with zero_jax and plainly on one device, asserts that both agree, and returns the state of the former."""
    batches = make_batches() if batches is None else batches
    expected, opt_state, losses = run_plain(loss_fn, tx(), batches, params=params)
    state, history = reference.run_zero(
        loss_fn, tx(), batches, mesh=mesh_of(mesh), params=params, stage=stage, **fields
    )
    assert_close([m.loss for m in history], losses, tolerance=TOLERANCE)
    assert_close((state.params, state.opt_state), (expected, opt_state), tolerance=TOLERANCE)
    chex.assert_trees_all_equal_dtypes(state.params, expected)
    return state


def odd_params():
    return {
        "thirteen": normal(0, 12, 13),  # 13 divides by nothing
        "table": normal(1, 50257, 4),  # nor does the vocabulary; its features are cut only by 2 and 4
        "prime": normal(2, 13, 7),
        "vector": normal(3, 13),
        "kernels": normal(4, 3, 3, 1, 8),  # a convolution
        "one": normal(5, 1),
        "scalar": normal(6),
        "nothing": np.zeros((0, 8), np.float32),
        "unused": normal(7, 16, 8),
    }


def odd_loss(params, batch):
    hidden = jnp.tanh(batch["inputs"] @ params["thirteen"] + params["vector"])
    rows = params["table"][jnp.array([3, 50256, 7])].mean(0)
    image = hidden[:, :12].reshape(-1, 3, 4, 1)
    maps = jax.lax.conv_general_dilated(
        image, params["kernels"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    out = (hidden @ params["prime"]).sum(-1) + maps.mean((1, 2)).reshape(-1, 2, 4).sum(1) @ rows + params["one"]
    error = out * params["scalar"] + params["nothing"].sum() - batch["targets"]
    return jnp.square(error).mean()


@pytest.mark.parametrize(
    ("stage", "mesh"),
    [
        (2, "3"),
        (3, "8"),
        *[pytest.param(s, m, marks=pytest.mark.slow) for s in (0, 1, 2, 3) for m in ("2", "8") if (s, m) != (3, "8")],
        *[pytest.param(s, m, marks=pytest.mark.slow) for s in (1, 3) for m in ("3", "replica", "staged24")],
    ],
)
def test_odd_shapes(stage, mesh):
    params = odd_params()
    state = train(odd_loss, params, mesh=mesh, stage=stage)
    # A param that the loss does not use has no gradient, but its weights decay all the same: twice by 0.1 x 0.1.
    np.testing.assert_allclose(state.params["unused"], params["unused"] * 0.99**2, rtol=1e-6)
    expected_shards = {
        "2": {"thirteen": 2, "table": 2, "prime": 1, "vector": 1, "kernels": 2, "one": 1, "scalar": 1, "unused": 2},
        "3": {"thirteen": 3, "table": 1, "prime": 1, "vector": 1, "kernels": 3, "one": 1, "scalar": 1, "unused": 1},
        "8": {"thirteen": 1, "table": 1, "prime": 1, "vector": 1, "kernels": 8, "one": 1, "scalar": 1, "unused": 8},
    }
    if mesh in expected_shards and stage > 0:
        velocity = state.opt_state[0].trace
        assert {name: num_shards(x) for name, x in velocity.items() if x.size} == expected_shards[mesh]
    config = reference.make_config(stage=3)
    report = zero.sharding_report(params, mesh=mesh_of(mesh), config=config)
    reasons = {p.path: p.reason for p in report.placements}
    assert "no dim of (13, 7) is divisible" in reasons["prime"] and "under 8 elements" in reasons["scalar"]
    assert (report.whole_bytes > 800_000) == (mesh in ("3", "8")) and ("warning" in str(report)) == (mesh in ("3", "8"))


def test_two_params_on_three_devices():
    loss_fn = lambda params, batch: jnp.square(params["weight"] * batch["targets"] + params["bias"]).mean()  # noqa: E731
    params = {"weight": normal(0, 1), "bias": normal(1, 1)}
    for stage in (1, 3):
        state = train(loss_fn, params, mesh="3", stage=stage, min_shard_size=1)
        assert num_shards(state.params["weight"]) == 1


def test_dims_split_over_several_axes():
    """Where no dim divides by all of `data`, its mesh axes go to different dims."""
    params = {"kernel": normal(0, 12, 2), "thin": normal(1, 2, 3)}
    loss_fn = lambda params, batch: jnp.square(batch["inputs"] @ params["kernel"] @ params["thin"]).mean()  # noqa: E731
    state = train(loss_fn, params, mesh="staged24", stage=3, min_shard_size=1)
    assert num_shards(state.params["kernel"]) == 8
    assert num_shards(state.params["thin"]) == 2
    report = zero.sharding_report(params, mesh=mesh_of("staged24"), config=reference.make_config(min_shard_size=1))
    reasons = {p.path: p.reason for p in report.placements}
    assert reasons["kernel"] == "sharded over several dims" and "partly sharded" in reasons["thin"]


@pytest.mark.parametrize(("stage", "num_microbatches"), [pytest.param(1, 2, marks=pytest.mark.slow), (3, 1)])
def test_integers_keys_and_missing_leaves_among_params(stage, num_microbatches):
    """They have no gradient and stay as they are; None is what Equinox leaves where a module has no array."""
    params = {
        "kernel": normal(0, 12, 8),
        "missing": None,
        "positions": np.arange(16, dtype=np.int32),
        "mask": np.array([True, False] * 4),
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.PRNGKey(8), 16),
        "last": normal(1, 8),
    }
    plain = {name: params[name] for name in ("kernel", "last")}

    def loss_fn(free, batch, fixed=params):
        noise = jax.random.normal(fixed["key"], (8,)) + fixed["keys"][3, 1] % 7 + fixed["positions"][5] / 4
        hidden = batch["inputs"] @ free["kernel"] + 0.1 * noise * fixed["mask"]
        return jnp.square(jnp.tanh(hidden) @ free["last"] - batch["targets"]).mean()

    batches = make_batches(2, size=16)
    expected, _, losses = run_plain(loss_fn, optax.adamw(0.01), batches, params=plain)
    state, step = reference.make_trainer(
        lambda params, batch: loss_fn(params, batch, params),
        optax.adamw(0.01),
        mesh=mesh_of("4"),
        params=params,
        stage=stage,
        num_microbatches=num_microbatches,
        skip_nonfinite=True,
    )
    for batch, loss in zip(batches, losses, strict=True):
        state, metrics = step(state, batch)
        assert_close(metrics.loss, loss, tolerance=TOLERANCE)
    assert_close({name: state.params[name] for name in plain}, expected, tolerance=TOLERANCE)
    for name in ("positions", "mask", "key", "keys"):
        chex.assert_trees_all_equal(reference.to_host(state.params[name]), reference.to_host(params[name]))
        assert state.params[name].dtype == params[name].dtype
    batches[0]["targets"][:] = np.inf
    state, metrics = step(state, batches[0])
    assert bool(metrics.skipped) and step.leaf_name(state, metrics.nonfinite_leaf) == "kernel"


@pytest.mark.parametrize(("stage", "mesh"), [pytest.param(1, "4", marks=pytest.mark.slow), (3, "8")])
def test_tied_embedding(stage, mesh):
    def loss_fn(params, batch):
        hidden = jnp.tanh(params["embed"][batch["tokens"]] @ params["kernel"])
        logits = hidden @ params["embed"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, ::-1]).mean()

    params = {"embed": 4 * normal(0, 24, 16), "kernel": normal(1, 16, 16)}
    state = train(loss_fn, params, mesh=mesh, stage=stage, batches=reference.make_batches(2))
    assert num_shards(state.opt_state[0].trace["embed"]) == mesh_of(mesh).size


@pytest.mark.parametrize(("stage", "num_microbatches"), [(2, 1), (3, 2)])
def test_mixed_dtypes_in_one_tree(stage, num_microbatches):
    """With precision "fp32" every leaf keeps the dtype that it was made with."""
    params = {
        "half": normal(0, 12, 16).astype(np.float16),
        "brain": normal(1, 16, 8).astype(jnp.bfloat16),
        "single": normal(2, 8),
        "count": np.int8(3) * np.ones(8, np.int8),
    }

    def loss_fn(params, batch):
        hidden = jnp.tanh(batch["inputs"].astype(jnp.float16) @ params["half"]).astype(jnp.bfloat16)
        out = (hidden @ params["brain"]).astype(jnp.float32) @ (params["single"] * params["count"])
        return jnp.square(out - batch["targets"]).mean()

    tx, batches = optax.sgd(0.1, momentum=0.9), make_batches(2, size=16)
    state, history = reference.run_zero(
        loss_fn, tx, batches, mesh=mesh_of("4"), params=params, stage=stage, num_microbatches=num_microbatches
    )
    chex.assert_trees_all_equal_dtypes(state.params, params)
    momentum = state.opt_state[0].trace
    assert momentum["half"].dtype == jnp.float16 and momentum["brain"].dtype == jnp.bfloat16
    trained = {name: x for name, x in params.items() if name != "count"}
    expected, _, losses = run_plain(lambda p, b: loss_fn({**params, **p}, b), tx, batches, params=trained)
    # A param moves by about 0.1 and is rounded to bfloat16 (2^-8 of at most 1) a few times on either side.
    assert_close({name: state.params[name] for name in trained}, expected, tolerance=2.0**-7)
    assert_close([m.loss for m in history], losses, tolerance=2.0**-6)


def test_nothing_is_made_64_bits_wide():
    params = {"kernel": np.ones((12, 8), np.float64), "count": np.arange(8)}  # numpy's own defaults
    batch = {"inputs": np.ones((8, 12)), "labels": np.arange(8)}
    loss_fn = lambda params, batch: (batch["inputs"] @ params["kernel"] * batch["labels"][:, None]).mean()  # noqa: E731
    state, history = reference.run_zero(loss_fn, tx(), [batch], mesh=mesh_of("2"), params=params, stage=3)
    assert {x.dtype.itemsize for x in jax.tree.leaves((state, history))} <= {1, 4}


def test_a_model_that_is_one_array():
    loss_fn = lambda params, batch: jnp.square(batch["inputs"] @ params - batch["targets"]).mean()  # noqa: E731
    for stage in (1, 3):
        state = train(loss_fn, normal(0, 12), mesh="2", stage=stage)
        assert num_shards(state.opt_state[0].trace) == 2


def test_whole_tables_are_looked_up_for_the_devices_own_examples_only():
    """At stages 1 and 2 a lookup of all examples on every device would grow with the number of devices."""
    rows, features, batch_size, length = 512, 64, 256, 4

    def init_fn(key):
        return {"embed": jax.random.normal(key, (rows, features)), "out": jnp.ones((features, 8))}

    def loss_fn(params, batch):
        return jnp.mean(jnp.square(params["embed"][batch["tokens"]] @ params["out"]))

    mesh, config, tx = zero.make_mesh(), zero.ZeroConfig(stage=2), optax.sgd(0.1)
    state = zero.abstract_state(init_fn, tx, mesh=mesh, config=config)
    step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
    tokens = jax.ShapeDtypeStruct((batch_size, length), jnp.int32)
    text = step.lower(state, {"tokens": tokens}).compile().as_text()
    looked_up = [
        math.prod(map(int, dims.split(",")))
        for dims, name in re.findall(r"= f32\[([\d,]+)\]\S* gather\(.*op_name=\"([^\"]*)\"", text)
        if "transpose(" not in name
    ]
    assert looked_up and max(looked_up) == batch_size * length * features // mesh.size

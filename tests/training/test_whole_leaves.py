"""Whole leaves of a sharded state are read and written by path, and a step goes on from what was written."""

import dataclasses
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from processes import results_of

import zero_jax as zero

WORKER = pathlib.Path(__file__).with_name("whole_leaves_worker.py")


def init_fn(key):
    up, down = (jax.random.normal(k, (64, 64)) / 8 for k in jax.random.split(key))
    return {"blocks": {"up": up, "down": down}, "bias": jnp.zeros(64), "count": jnp.int32(3)}


def loss_fn(params, batch):
    blocks = params["blocks"]
    out = jax.nn.relu(batch["x"] @ blocks["up"]) @ blocks["down"] + params["bias"]
    return jnp.square(out - batch["y"]).mean()


def make(**settings):
    mesh, tx = zero.make_mesh(), optax.adam(0.1)
    config = zero.ZeroConfig(min_shard_size=1, **settings)
    state = zero.init_state(init_fn, tx, jax.random.key(0), mesh=mesh, config=config)
    batch = {"x": np.eye(64, dtype=np.float32), "y": np.zeros((64, 64), np.float32)}
    return state, zero.make_train_step(loss_fn, tx, mesh=mesh, config=config), batch


@pytest.mark.parametrize(
    ("stage", "precision", "offload"), [(3, "bf16", "state"), (2, "bf16", None), (0, "fp32", None)]
)
def test_what_is_written_is_read_and_trained_on(stage, precision, offload):
    state, step, batch = make(stage=stage, precision=precision, offload=offload)
    state, _ = step(state, batch)
    for path, leaf in zero.read_leaves(state):
        assert isinstance(leaf, np.ndarray)
        if path != "key":
            np.testing.assert_array_equal(leaf, dict(zip(paths(state), jax.tree.leaves(state), strict=True))[path])
    value = np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)
    written = zero.write_leaf(state, "params/blocks/up", value)
    written = zero.write_leaves(
        written,
        {
            "opt_state/0/mu/blocks/up": value,
            "opt_state/0/nu/blocks/up": np.ones_like(value),
            "opt_state/0/count": 7,
        },
    )
    np.testing.assert_array_equal(zero.read_leaf(written, "opt_state/0/mu/blocks/up"), value)
    masters = "params" if state.master is None else "master"
    np.testing.assert_array_equal(zero.read_leaf(written, f"{masters}/blocks/up"), value)
    low = zero.read_leaf(written, "params/blocks/up")
    np.testing.assert_array_equal(low, value.astype(low.dtype))
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(written), strict=True):
        assert old.dtype == new.dtype and old.sharding == new.sharding
    assert zero.read_leaf(state, "params/blocks/up")[0, 0] != low[0, 0]  # the old state stays
    stepped, _ = step(written, batch)
    assert step._cache_size() == 1
    assert int(zero.read_leaf(stepped, "opt_state/0/count")) == 8
    kept = zero.read_leaf(stepped, f"{masters}/blocks/up")
    assert np.abs(kept - value).max() < 1 and (kept != value).any()


def test_master_and_copy_stay_one():
    state, *_ = make(stage=1, precision="bf16")
    value = np.full((64, 64), 1 / 3, np.float32)
    for path in ("master/blocks/down", "params/blocks/down"):
        written = zero.write_leaf(state, path, value)
        np.testing.assert_array_equal(zero.read_leaf(written, "master/blocks/down"), value)
        np.testing.assert_array_equal(zero.read_leaf(written, "params/blocks/down"), value.astype(jnp.bfloat16))


def test_other_params_beside_the_old_masters_are_warned_of(tmp_path, recwarn):
    state, step, batch = make(stage=2, precision="bf16")
    replaced = lambda state: dataclasses.replace(state, params=jax.tree.map(lambda x: x + 1, state.params))  # noqa: E731
    message = r"leaf 'bias' of state.params and 3 more were replaced, and state.master was not: a step updates"
    with pytest.warns(UserWarning, match=message):
        state, _ = step(replaced(state), batch)
    for _ in range(2):
        state, _ = step(state, batch)  # the second call for this state's arrays is a short one
    with zero.Checkpointer(tmp_path) as checkpoints:
        with pytest.warns(UserWarning, match="a checkpoint has the master params alone"):
            checkpoints.save(1, replaced(state))
        checkpoints.save(3, state)
    with pytest.warns(UserWarning, match=message):
        step(replaced(state), batch)
    config = zero.ZeroConfig(min_shard_size=1, stage=2, precision="bf16")
    state = zero.restore(tmp_path, init_fn=init_fn, tx=optax.adam(0.1), mesh=zero.make_mesh(), config=config).state
    with pytest.warns(UserWarning, match="leaf 'blocks/up' of state.params was replaced"):
        blocks = {**state.params["blocks"], "up": state.params["blocks"]["up"] + 1}
        state, _ = step(dataclasses.replace(state, params={**state.params, "blocks": blocks}), batch)
    recwarn.clear()
    state, _ = step(zero.write_leaf(state, "params/bias", np.ones(64)), batch)
    both = jax.tree.map(lambda x: x + 1, (state.params, state.master))
    state, _ = step(dataclasses.replace(state, params=both[0], master=both[1]), batch)
    step(dataclasses.replace(state, key=jax.random.clone(state.key)), batch)
    assert not recwarn.list


def paths(tree):
    return [path for path, _ in zero.read_leaves(tree)]


def test_keys_trees_and_patterns():
    state, *_ = make()
    words = zero.read_leaf(state, "key")
    written = zero.write_leaf(state, "key", words + np.uint32(1))
    np.testing.assert_array_equal(jax.random.key_data(written.key), words + 1)
    assert written.key.sharding == state.key.sharding and written.key.dtype == state.key.dtype
    assert paths(state.params) == ["bias", "blocks/down", "blocks/up", "count"]
    assert [path for path, _ in zero.read_leaves(state, "opt_state/.*/nu/blocks/.*")] == [
        "opt_state/0/nu/blocks/down",
        "opt_state/0/nu/blocks/up",
    ]
    host = zero.write_leaf({"a": np.zeros(3, np.float32)}, "a", np.arange(3))
    assert host["a"].dtype == np.float32 and host["a"].tolist() == [0, 1, 2]
    flat = zero.write_leaves({"a": {"b/c": 1.0}, "a/b": {"c": 2.0}}, iter([("a/b/c~2", np.float32(5))]))
    assert flat == {"a": {"b/c": 1.0}, "a/b": {"c": 5.0}}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("params/blocks/upp", 0, "no leaf 'params/blocks/upp': did you mean 'params/blocks/up'?"),
        ("params/blocks", 0, "it holds 2 leaves, such as 'params/blocks/down', 'params/blocks/up'"),
        ("zzz", 0, "the tree has step, params, opt_state"),
        ("params/bias", np.zeros((8, 8), np.float32), "'params/bias' has shape [64], and the value [8, 8]"),
        ("params/bias", 0.0, "has shape [64], and the value []"),
        ("params/bias", np.zeros(64, np.complex64), "is float32, and the value complex64: cast it first"),
        ("params/bias", np.full(64, 1e300), "leaf 'params/bias' has values that float32 cannot hold"),
        ("params/bias", np.array([1e300, np.inf] * 32), "leaf 'params/bias' has values that float32 cannot hold"),
        ("params/count", 2.5, "is int32, and the value float64: cast it first"),
        ("params/count", 2**40, "leaf 'params/count' has values that int32 cannot hold"),
        ("params/bias", np.array(["a"] * 64), "cast it first"),
    ],
)
def test_what_cannot_be_written_is_named(path, value, message):
    state, *_ = make()
    with pytest.raises(ValueError) as caught:
        zero.write_leaf(state, path, value)
    assert message in str(caught.value)


def test_what_cannot_be_read_is_named():
    state, step, batch = make()
    for call in (lambda: zero.read_leaf(state, "params/bais"), lambda: zero.read_leaves(state, "params/bais")):
        with pytest.raises(ValueError, match="did you mean 'params/bias'"):
            call()
    with pytest.raises(ValueError, match="is no regular expression"):
        zero.read_leaves(state, "params/(")
    step(state, batch)
    with pytest.raises(ValueError, match="was donated to a step and is gone"):
        zero.read_leaf(state, "params/bias")
    shapes = jax.eval_shape(init_fn, jax.random.key(0))
    with pytest.raises(ValueError, match="is a shape without values"):
        zero.read_leaf(shapes, "bias")


@pytest.mark.parametrize("settings", [{"stage": 3}, {"stage": 2, "num_microbatches": 2, "offload": "state"}])
def test_gradients_are_those_of_one_device(settings):
    state, step, batch = make(precision="fp32", **settings)
    loss, grads = step.grads(state, batch)
    free = {name: x for name, x in jax.device_get(state.params).items() if name != "count"}
    expected_loss, expected = jax.value_and_grad(lambda p: loss_fn(p | {"count": 3}, batch))(free)
    chex.assert_trees_all_close(float(loss), float(expected_loss), rtol=1e-6)
    np.testing.assert_allclose(zero.read_leaf(grads, "blocks/up"), expected["blocks"]["up"], atol=1e-6)
    assert grads["blocks"]["up"].sharding.spec == state.opt_state[0].mu["blocks"]["up"].sharding.spec
    assert not grads["blocks"]["up"].is_fully_replicated
    assert grads["count"] is None
    _, metrics = step(state, batch)  # which was not donated
    np.testing.assert_allclose(metrics.grad_norm, optax.tree.norm(expected), rtol=1e-5)


def test_the_loss_scale_is_taken_out_of_gradients():
    scaled = zero.Precision(loss_scale=zero.LossScaleConfig(initial=1024.0))
    state, step, batch = make(stage=3, precision=scaled)
    plain_state, plain, _ = make(stage=3, precision="fp32")
    pairs = zip(step.grads(state, batch), plain.grads(plain_state, batch), strict=True)
    for own, other in pairs:
        chex.assert_trees_all_close(reference.to_host(own), reference.to_host(other), rtol=1e-6)


@pytest.mark.slow
def test_two_processes_read_and_write_together_or_not_at_all():
    for index, result in enumerate(results_of(WORKER, [(i,) for i in range(2)])):
        assert result["read"] == result["written"] == [True, True]
        assert result["sharding"] is True and result["offloaded"] == [True, True]
        assert "give all of it" in result["shape"] if index == 1 else "process 1 could not write" in result["shape"]
        assert "the same calls" in result["value"] and "the same calls" in result["path"]

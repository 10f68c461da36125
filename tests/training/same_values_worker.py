"""One process of two that give values that differ, or are equal; see test_same_values.py. Usage: ADDRESS INDEX."""
# ruff: noqa: E402 (what JAX runs on is settled before it is imported)

import dataclasses
import os
import sys
import warnings

ADDRESS, INDEX = sys.argv[1], int(sys.argv[2])
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "2"

import jax

jax.distributed.initialize(ADDRESS, 2, INDEX, initialization_timeout=60)

import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from processes import report

import zero_jax as zero
from zero_jax.core.agreement import from_all_processes

CONFIG = zero.ZeroConfig(stage=3, min_shard_size=8)
MESH = zero.make_mesh()
LINES = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
OWN = np.random.default_rng(INDEX).standard_normal((8, 16)).astype(np.float32)
result = {}


def attempt(name, what):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            what()
            result[name] = [str(warning.message) for warning in caught]
        except Exception as error:
            result[name] = f"{type(error).__name__}: {error}"
    from_all_processes("one after the other")


def init(key):
    return {"w": jax.random.normal(key, (16, 16)), "b": jnp.zeros(16)}


def loss_fn(params, batch):
    return jnp.square(batch["x"] @ params["w"] + params["b"]).mean() * batch.get("scale", 1.0)


def make(init_fn=init, *, key=0, tx=None, mesh=MESH):
    return zero.init_state(init_fn, tx or optax.adam(1e-2), jax.random.key(key), mesh=mesh, config=CONFIG)


def train(batch, mesh=MESH, **fields):
    config = dataclasses.replace(CONFIG, **fields)
    zero.make_train_step(loss_fn, optax.adam(1e-2), mesh=mesh, config=config)(make(mesh=mesh), batch)


def evaluate(batch, **fields):
    zero.make_eval_step(loss_fn, mesh=MESH, config=dataclasses.replace(CONFIG, **fields))(make(), batch)


def shard_later(batch):
    later(lambda: zero.shard_batch(batch, mesh=MESH))


def gather(size, mesh=MESH):
    loss = zero.gather_on_use(loss_fn, {"w": P("data"), "b": P()}, mesh=mesh)
    batch = {"x": jax.ShapeDtypeStruct((size, 16), np.float32)}
    call = lambda params, batch: loss(params, batch=batch)  # noqa: E731
    trace = lambda: jax.eval_shape(call, jax.eval_shape(init, jax.random.key(0)), batch)  # noqa: E731
    later(trace) if mesh is MESH else trace()


def later(what):
    if INDEX == 1:
        from_all_processes("after process 0")
    what()
    if INDEX == 0:
        from_all_processes("before process 1")


def check_keys(keys):
    placed = zero.shard_batch({"k": keys, "one": jax.random.key(5)}, mesh=MESH)
    shards = [jax.random.key_data(shard.data) for shard in placed["k"].addressable_shards]
    np.testing.assert_array_equal(np.concatenate(shards), jax.random.key_data(keys))
    assert placed["k"].shape == (16,) and placed["one"].sharding.is_fully_replicated
    batch = {"x": OWN, "scale": jnp.float32(1), "k": keys}
    noisy = lambda p, b: loss_fn(p, b) + jax.vmap(jax.random.uniform)(b["k"]).mean()  # noqa: E731
    metrics = zero.make_eval_step(noisy, mesh=MESH, config=CONFIG)(make(), batch)
    draws = [jax.vmap(jax.random.uniform)(jax.random.split(jax.random.key(i), 8)).mean() for i in range(2)]
    plain = zero.make_eval_step(loss_fn, mesh=MESH, config=CONFIG)(make(), {"x": OWN})
    np.testing.assert_allclose(metrics.loss - plain.loss, np.mean(draws), rtol=1e-5)


attempt("equal parts of a step", lambda: train({"x": LINES}))
attempt("equal parts of an evaluation", lambda: evaluate({"x": LINES}))
attempt("equal parts that are sharded", lambda: shard_later({"x": LINES}))
attempt("sizes of one process", lambda: gather(4, zero.make_mesh(devices=jax.local_devices())) if INDEX == 0 else None)
attempt("sizes after those", lambda: gather(32))
attempt("own sizes", lambda: gather(16 + 8 * INDEX))
attempt("equal sizes", lambda: gather(16))
attempt("own parts", lambda: (train({"x": OWN}), evaluate({"x": OWN}), shard_later({"y": OWN})))
attempt("ones", lambda: (train({"x": np.ones((8, 16))}), shard_later({"z": np.ones((8, 16))})))
attempt("keys", lambda: check_keys(jax.random.split(jax.random.key(INDEX), 8)))
attempt("scalars", lambda: train({"x": OWN, "scale": np.float32(INDEX)}))
attempt("the same part", lambda: train({"x": OWN}, zero.make_mesh(data=1, model=4)))
attempt("params", lambda: make({"w": OWN.repeat(2, 0), "b": np.zeros(16, np.float32)}))
attempt("few params", lambda: make({"w": np.float32(np.arange(2**24) // (2**24 - 1 - INDEX)).reshape(2**12, 2**12)}))
attempt("constants", lambda: make(lambda key: {"w": np.ones((16, 16)) + INDEX * (np.mgrid[:16, :16].sum(0) == 30)}))
attempt("optimizer", lambda: make(tx=optax.inject_hyperparams(optax.adam)(0.01 * (1 + INDEX))))
attempt("another optimizer", lambda: make(tx=(optax.adam, optax.sgd)[INDEX](0.01)))
attempt("config", lambda: train({"x": OWN}, num_microbatches=1 + INDEX))
attempt("config of another program", lambda: evaluate({"x": OWN}, clip_norm=1.0 + INDEX, num_microbatches=1 + INDEX))
attempt("key", lambda: make(key=INDEX))
report(result)

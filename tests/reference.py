"""A small model and the plain one-device optax step that every stage must equal.

The model has no param whose gradient is zero up to rounding (a shift before a softmax, a bias before a norm): Adam
divides a gradient by its own size, and would turn the rounding noise into whole steps.
"""

import functools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

import zero_jax as zero

VOCAB, LENGTH, FEATURES, HIDDEN, LAYERS, OUTPUTS = 24, 4, 16, 32, 2, 8
BATCH_SIZE = 16

# Leaves of 8 elements and more are sharded: all of the model's.
MIN_SHARD_SIZE = 8


def init_params(key):
    """Returns float32 params: a table, stacked layers that are scanned over, and a head."""
    keys = jax.random.split(key, 6)

    def normal(key, *shape):
        return jax.random.normal(key, shape) / np.sqrt(shape[-2])

    return {
        "embed": jax.random.normal(keys[0], (VOCAB, FEATURES)),
        "layers": {
            "w_in": normal(keys[1], LAYERS, FEATURES, HIDDEN),
            "bias": 0.1 * jax.random.normal(keys[2], (LAYERS, HIDDEN)),
            "w_out": normal(keys[3], LAYERS, HIDDEN, FEATURES),
        },
        "head": {"kernel": normal(keys[4], FEATURES, OUTPUTS), "bias": 0.1 * jax.random.normal(keys[5], (OUTPUTS,))},
    }


def predict(params, tokens):
    """Returns the outputs `[batch, outputs]` for tokens `[batch, length]`."""
    x_BLD = params["embed"][tokens]

    def layer(x_BLD, layer):
        return x_BLD + jnp.tanh(x_BLD @ layer["w_in"] + layer["bias"]) @ layer["w_out"], None

    x_BLD, _ = jax.lax.scan(layer, x_BLD, params["layers"])
    return jnp.tanh(x_BLD).mean(1) @ params["head"]["kernel"] + params["head"]["bias"]


def loss_fn(params, batch):
    """Returns the mean squared error of a batch."""
    error = predict(params, batch["tokens"]) - batch["targets"].astype(params["head"]["bias"].dtype)
    return jnp.square(error).mean()


@functools.cache
def host_params():
    """Returns the params of a fixed key as host arrays."""
    return jax.tree.map(np.asarray, jax.jit(init_params)(jax.random.key(0)))


def make_batch(seed, size=BATCH_SIZE):
    """Returns a batch of host arrays."""
    rng = np.random.default_rng(seed)
    return {
        "tokens": rng.integers(0, VOCAB, (size, LENGTH), dtype=np.int32),
        "targets": rng.standard_normal((size, OUTPUTS), dtype=np.float32),
    }


def make_batches(num_steps, size=BATCH_SIZE):
    """Returns a batch for each step."""
    return [make_batch(seed, size) for seed in range(num_steps)]


MESHES = {
    "1": {"data": 1},
    "2": {"data": 2},
    "3": {"data": 3},
    "4": {"data": 4},
    "8": {"data": 8},
    "replica": {"replica": 2, "data": 4},
    "staged222": {"data": 8, "data_layout": (2, 2, 2)},
    "staged24": {"data": 8, "data_layout": (2, 4)},
    "model2": {"data": 4, "model": 2},
    "model4": {"data": 2, "model": 4},
}

# The model's own sharding, for the meshes that have a model axis.
PARAM_SPECS = {
    "embed": PartitionSpec("model", None),
    "layers/w_in": PartitionSpec(None, None, "model"),
    "layers/bias": PartitionSpec(None, "model"),
    "layers/w_out": PartitionSpec(None, "model", None),
}


@functools.cache
def mesh_of(name):
    """Returns a mesh of simulated CPU devices."""
    sizes = MESHES[name]
    num_devices = sizes["data"] * sizes.get("replica", 1) * sizes.get("model", 1)
    return zero.make_mesh(devices=jax.devices()[:num_devices], **sizes)


def torus_mesh(coords, shape, names, kind="TPU v5"):
    """Returns what has the coordinates and the kind of a mesh of TPUs, in the order given, and nothing else of it."""
    devices = np.array([types.SimpleNamespace(coords=c, device_kind=kind) for c in coords]).reshape(shape)
    return types.SimpleNamespace(devices=devices, axis_names=names, shape=dict(zip(names, shape, strict=True)))


def make_config(**fields):
    """Returns a config that shards small leaves too."""
    return zero.ZeroConfig(**{"min_shard_size": MIN_SHARD_SIZE, **fields})


def make_trainer(loss_fn, tx, *, mesh, params=None, key=None, **fields):
    """Returns the first state and the step of zero_jax, from the params given (by default those of `host_params`)."""
    config = make_config(**fields)
    key = jax.random.PRNGKey(0) if key is None else key
    state = zero.init_state(host_params() if params is None else params, tx, key, mesh=mesh, config=config)
    return state, zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)


def run_zero(loss_fn, tx, batches, **fields):
    """Trains with zero_jax; returns the last state and the metrics of each step."""
    state, step = make_trainer(loss_fn, tx, **fields)
    history = []
    for batch in batches:
        state, metrics = step(state, batch)
        history.append(metrics)
    return state, history


def run_plain(loss_fn, tx, batches, *, params=None, compute_dtype=None):
    """Trains with plain optax on one device; returns the params, the optimizer's state and the loss of each step.

    Args:
      loss_fn: `loss_fn(params, batch)` returns a scalar.
      tx: the optimizer.
      batches: a batch for each step.
      params: the params to start from.
      compute_dtype: dtype that the params are cast to for the loss; their gradients come in it too.
    """

    update = optax.with_extra_args_support(tx).update

    @jax.jit
    def step(params, opt_state, batch):
        compute = params if compute_dtype is None else jax.tree.map(lambda x: x.astype(compute_dtype), params)
        loss, grads = jax.value_and_grad(loss_fn)(compute, batch)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        updates, opt_state = update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss

    params = host_params() if params is None else params
    opt_state = jax.jit(tx.init)(params)
    losses = []
    for batch in batches:
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(loss)
    return params, opt_state, losses


def keep_grads():
    """Returns an optax transformation that changes nothing and keeps the gradients it was given as its state."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), lambda updates, state, params=None: (updates, updates)
    )


def to_host(tree):
    """Returns a tree of host arrays, of PRNG keys their data, after checking that copies of a shard are bit-equal."""

    def fetch(x):
        x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        copies = {}
        for shard in x.addressable_shards if isinstance(x, jax.Array) else ():
            copy = np.asarray(shard.data)
            np.testing.assert_array_equal(copies.setdefault(str(shard.index), copy), copy)
        return np.asarray(x)

    return jax.tree.map(fetch, tree)


def norm(tree):
    """Returns the global norm of a tree of host or device arrays."""
    return np.sqrt(sum(np.square(np.asarray(x, np.float64)).sum() for x in jax.tree.leaves(tree)))


def assert_close(actual, expected, *, tolerance):
    """Asserts that trees of the same structure agree to `tolerance`, absolute for values below 1, else relative."""
    actual, expected = to_host(actual), to_host(expected)
    wide = lambda x: x.astype(np.float32) if x.dtype == jnp.bfloat16 else x  # noqa: E731
    chex.assert_trees_all_equal_shapes(actual, expected)
    chex.assert_trees_all_close(
        jax.tree.map(wide, actual), jax.tree.map(wide, expected), atol=tolerance, rtol=tolerance
    )


def assert_placed_alike(actual, expected):
    """Asserts that every leaf of a tree is sharded as the same leaf of another."""
    chex.assert_trees_all_equal_structs(actual, expected)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim), f"{path}: {x.sharding} is not {y.sharding}"


def num_shards(x):
    """Returns the number of different shards that an array is cut into."""
    return len({str(shard.index) for shard in x.addressable_shards})

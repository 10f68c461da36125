"""Models with state that is neither param nor example, and the plain one-device step that each must equal."""

import functools
import inspect

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from reference import mesh_of

import zero_jax as zero

BATCH_SIZE, SIZE, CHANNELS, CLASSES, FEATURES = 32, 4, 16, 4, 32


class ConvNet(nn.Module):
    """Convolution, batch norm, dropout; no bias before the norm, whose gradient would be rounding noise."""

    @nn.compact
    def __call__(self, x, *, train):
        x = nn.Conv(CHANNELS, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = nn.Dropout(0.25, deterministic=not train)(x.mean((1, 2)))
        return nn.Dense(CLASSES)(x)


def split_collections(variables):
    params = variables.pop("params")
    return zero.Variables(params=params, model_state=variables)


def linen_init(key):
    return split_collections(dict(ConvNet().init(key, jnp.zeros((1, SIZE, SIZE, 3)), train=False)))


def linen_loss(params, batch, key, *, model_state):
    x = batch["x"].astype(jax.tree.leaves(params)[0].dtype)
    logits, model_state = ConvNet().apply(
        {"params": params, **model_state}, x, train=True, mutable=["batch_stats"], rngs={"dropout": key}
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["y"])
    return losses.mean(), {"logits": logits.astype(jnp.float32)}, model_state


def linen_eval(params, batch, *, model_state):
    logits = ConvNet().apply({"params": params, **model_state}, batch["x"], train=False)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), None, model_state


class Mlp(nnx.Module):
    """Batch norm, and dropout whose keys and counters are part of the model."""

    def __init__(self, rngs):
        self.up = nnx.Linear(FEATURES, FEATURES, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(FEATURES, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.down = nnx.Linear(FEATURES, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))


class Deep(nnx.Module):
    """Repeated blocks, which can be rematerialized."""

    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(3)])
        self.down = nnx.Linear(FEATURES, CLASSES, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.down(x)


class Block(nnx.Module):
    """A residual block with batch norm and dropout."""

    def __init__(self, rngs):
        self.up = nnx.Linear(FEATURES, FEATURES, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(FEATURES, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(nnx.relu(self.norm(self.up(x))))


def plain_nnx(module):
    """Returns the functions of a module as its user would write them."""
    graphdef = nnx.split(nnx.eval_shape(lambda: module(nnx.Rngs(0))), nnx.Param, ...)[0]

    def init_fn(key):
        _, params, model_state = nnx.split(module(nnx.Rngs(key)), nnx.Param, ...)
        return zero.Variables(params=params, model_state=model_state)

    def loss_fn(params, batch, *, model_state):
        model = nnx.merge(graphdef, params, model_state)
        return loss_of_logits(model, batch), None, nnx.state(model, nnx.Not(nnx.Param))

    return init_fn, loss_fn


def loss_of_logits(model, batch):
    dtype = jax.tree.leaves(nnx.state(model, nnx.Param))[0].dtype
    logits = model(batch["x"].reshape(len(batch["x"]), -1)[:, :FEATURES].astype(dtype))
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["y"]).mean()


class EqxMlp(eqx.Module):
    """Batch norm with a `State`, dropout by keys, a count that is no param, and a function."""

    up: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    down: eqx.nn.Linear
    order: jax.Array
    activation: object

    def __init__(self, key):
        up, down = jax.random.split(key)
        self.up = eqx.nn.Linear(FEATURES, FEATURES, use_bias=False, key=up)
        self.norm = eqx.nn.BatchNorm(FEATURES, "batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.25)
        self.down = eqx.nn.Linear(FEATURES, CLASSES, key=down)
        self.order, self.activation = jnp.arange(FEATURES)[::-1], jax.nn.relu

    def __call__(self, x, state, key):
        x, state = self.norm(self.up(x[self.order]), state)
        return self.down(self.dropout(self.activation(x), key=key)), state


def eqx_loss(model, batch, key, *, model_state):
    keys, x = jax.random.split(key, len(batch["x"])), batch["x"].reshape(len(batch["x"]), -1)[:, :FEATURES]
    apply = jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
    logits, model_state = apply(x, model_state, keys)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), None, model_state


EQX_MODEL, _ = eqx.nn.make_with_state(EqxMlp)(jax.random.key(0))


def plain_eqx_init(key):
    model, state = eqx.nn.make_with_state(EqxMlp)(key)
    params, others = eqx.partition(eqx.filter(model, eqx.is_array), eqx.is_inexact_array)
    return zero.Variables(params=params, model_state=(others, state))


def plain_eqx_loss(params, batch, key, *, model_state):
    others, state = model_state
    model = eqx.combine(params, others, eqx.filter(EQX_MODEL, eqx.is_array, inverse=True))
    loss, aux, state = eqx_loss(model, batch, key, model_state=state)
    return loss, aux, (others, state)


def q_init(key):
    keys = jax.random.split(key)
    params = {"up": jax.random.normal(keys[0], (FEATURES, 64)) / 6, "down": jax.random.normal(keys[1], (64, 8)) / 8}
    return zero.Variables(params=params, model_state={"target": params, "updates": jnp.int32(0)})


def q_values(params, x):
    return jax.nn.relu(x @ params["up"]) @ params["down"]


def q_loss(params, batch, *, model_state):
    """A step of deep Q-learning; the target network follows the params by Polyak averaging."""
    target, dtype = model_state["target"], params["up"].dtype
    x = batch["x"].reshape(len(batch["x"]), -1).astype(dtype)
    aim = x[:, 0] + 0.9 * q_values(jax.tree.map(lambda t: t.astype(dtype), target), x[:, -FEATURES:]).max(-1)
    taken = jnp.take_along_axis(q_values(params, x[:, :FEATURES]), batch["y"][:, None], axis=1)[:, 0]
    error = taken - jax.lax.stop_gradient(aim)
    target = jax.tree.map(lambda t, p: 0.9 * t + 0.1 * p, target, params)
    return jnp.square(error.astype(jnp.float32)).mean(), None, {"target": target, "updates": model_state["updates"] + 1}


MODELS = {"linen": (linen_init, linen_loss), "q": (q_init, q_loss)}
PLAIN = MODELS | {"nnx": plain_nnx(Mlp), "deep": plain_nnx(Deep), "equinox": (plain_eqx_init, plain_eqx_loss)}
FUNCTIONS = {
    "nnx": zero.from_nnx(Mlp, loss_of_logits),
    "deep": zero.from_nnx(Deep, loss_of_logits),
    "equinox": zero.from_equinox(eqx.nn.make_with_state(EqxMlp), eqx_loss),
}
MODELS |= {name: (functions.init_fn, functions.loss_fn) for name, functions in FUNCTIONS.items()}


def optimizer():
    return optax.sgd(0.05, momentum=0.9)


def make_batches(num_steps):
    rng = np.random.default_rng(0)
    images = rng.standard_normal((num_steps, BATCH_SIZE, SIZE, SIZE, 3), dtype=np.float32)
    labels = rng.integers(0, CLASSES, (num_steps, BATCH_SIZE), dtype=np.int32)
    return [{"x": x, "y": y} for x, y in zip(images, labels, strict=True)]


def make(model, mesh, **fields):
    """Returns the first state, the step and the config of a model: its name, or `(init_fn, loss_fn)`."""
    init_fn, loss_fn = MODELS[model] if isinstance(model, str) else model
    config = zero.ZeroConfig(**{"min_shard_size": 8, **fields})
    state = zero.init_state(init_fn, optimizer(), jax.random.key(1), mesh=mesh_of(mesh), config=config)
    return state, zero.make_train_step(loss_fn, optimizer(), mesh=mesh_of(mesh), config=config), config


@functools.cache
def plain_run(model, num_steps, num_shards, num_microbatches, compute_dtype=None):
    """Trains on one device with plain optax; returns params, model state and the loss of each step.

    A microbatch takes a part of the examples of each of `num_shards` devices, as those of the library do.
    """
    init_fn, loss_fn = PLAIN[model]
    takes_key = "key" in inspect.signature(loss_fn).parameters

    @jax.jit
    def step(params, model_state, opt_state, batch, key):
        def loss_of(params, model_state, batch, key):
            if compute_dtype is not None:
                params = jax.tree.map(lambda x: x.astype(compute_dtype), params)
            keys, model_state = (key,) if takes_key else (), jax.tree.map(lambda x: x, model_state)
            loss, _, model_state = loss_fn(params, batch, *keys, model_state=model_state)
            return loss, model_state

        losses, sums = [], jax.tree.map(jnp.zeros_like, params)
        for i in range(num_microbatches):
            part = jax.tree.map(functools.partial(part_of, i), batch)
            part_key = key if num_microbatches == 1 else jax.random.fold_in(key, i)
            (loss, model_state), grads = jax.value_and_grad(loss_of, has_aux=True)(params, model_state, part, part_key)
            sums = jax.tree.map(lambda s, g: s + g.astype(s.dtype) / num_microbatches, sums, grads)
            losses.append(loss)
        updates, opt_state = optimizer().update(sums, opt_state, params)
        return optax.apply_updates(params, updates), model_state, opt_state, jnp.stack(losses).mean()

    def part_of(i, x):
        return x.reshape(num_shards, num_microbatches, -1, *x.shape[1:])[:, i].reshape(-1, *x.shape[1:])

    key = jax.random.key(1)
    variables = jax.jit(init_fn)(key)
    params, model_state, opt_state = variables.params, variables.model_state, optimizer().init(variables.params)
    losses = []
    for i, batch in enumerate(make_batches(num_steps)):
        step_key = jax.random.fold_in(jax.random.fold_in(key, 0x2E60), i)
        params, model_state, opt_state, loss = step(params, model_state, opt_state, batch, step_key)
        losses.append(loss)
    return params, model_state, losses

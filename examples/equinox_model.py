"""An Equinox model at ZeRO stage 3: the params are its arrays, everything else is static.

Run it anywhere: JAX_NUM_CPU_DEVICES=8 python examples/equinox_model.py   (needs `pip install equinox`)
"""

import equinox as eqx
import jax
import numpy as np
import optax

import zero_jax as zero


def make_model(key):
    return eqx.nn.MLP(in_size=64, out_size=10, width_size=256, depth=3, activation=jax.nn.gelu, key=key)


# Leaves that are not arrays (activation functions, sizes) are static, not params.
shapes = eqx.filter_eval_shape(make_model, jax.random.key(0))
static = eqx.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))[1]


def init_fn(key):
    return eqx.filter(make_model(key), eqx.is_array)


def loss_fn(params, batch):
    model = eqx.combine(params, static)
    logits = jax.vmap(model)(batch["x"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
    return loss, {"accuracy": (logits.argmax(-1) == batch["y"]).mean()}


mesh = zero.make_mesh()
config = zero.ZeroConfig(stage=3, precision="bf16", clip_norm=1.0)
tx = optax.adamw(1e-3)
state = zero.init_state(init_fn, tx, jax.random.key(0), mesh=mesh, config=config)
step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)

rng = np.random.default_rng(0)
x = rng.normal(size=(32 * mesh.size, 64)).astype(np.float32)
batch = zero.shard_batch({"x": x, "y": (x @ rng.normal(size=(64, 10))).argmax(-1).astype(np.int32)}, mesh=mesh)
for i in range(60):
    state, metrics = step(state, batch)
    if i % 20 == 0 or i == 59:
        print(f"step {i:>3}  loss {metrics.loss:.4f}  accuracy {metrics.aux['accuracy']:.2f}")
print(zero.sharding_report(state, mesh=mesh, config=config))

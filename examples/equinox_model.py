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


def loss(model, batch):
    logits = jax.vmap(model)(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean(), {"accuracy": (logits.argmax(-1) == batch["y"]).mean()}


model = zero.from_equinox(make_model, loss)
mesh = zero.make_mesh()
config = zero.ZeroConfig(stage=3, precision="bf16", clip_norm=1.0)
tx = optax.adamw(1e-3)
state = zero.init_state(model.init_fn, tx, jax.random.key(0), mesh=mesh, config=config)
step = zero.make_train_step(model.loss_fn, tx, mesh=mesh, config=config)

rng = np.random.default_rng(0)
x = rng.normal(size=(32 * mesh.size, 64)).astype(np.float32)
batch = zero.shard_batch({"x": x, "y": (x @ rng.normal(size=(64, 10))).argmax(-1).astype(np.int32)}, mesh=mesh)
for i in range(60):
    state, metrics = step(state, batch)
    if i % 20 == 0 or i == 59:
        print(f"step {i:>3}  loss {metrics.loss:.4f}  accuracy {metrics.aux['accuracy']:.2f}")
print(zero.sharding_report(state, mesh=mesh, config=config))

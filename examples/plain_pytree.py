"""A model without a library, a dict of arrays, at ZeRO stage 3: four calls.

Run it anywhere: JAX_NUM_CPU_DEVICES=8 python examples/plain_pytree.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zero_jax as zero


def init_fn(key):
    params = {}
    for i, (n, m) in enumerate([(64, 256), (256, 256), (256, 10)]):
        weight = jax.random.normal(jax.random.fold_in(key, i), (n, m)) * (2 / n) ** 0.5
        params[f"layer_{i}"] = {"w": weight, "b": jnp.zeros(m)}
    return params


def loss_fn(params, batch):
    x = batch["x"]
    for i in range(3):
        x = x @ params[f"layer_{i}"]["w"] + params[f"layer_{i}"]["b"]
        x = jax.nn.relu(x) if i < 2 else x
    return optax.softmax_cross_entropy_with_integer_labels(x, batch["y"]).mean()


mesh = zero.make_mesh()
config = zero.ZeroConfig(stage=3, precision="bf16")
tx = optax.adamw(2e-3)
state = zero.init_state(init_fn, tx, jax.random.key(0), mesh=mesh, config=config)
step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)

rng = np.random.default_rng(0)
x = rng.normal(size=(32 * mesh.size, 64)).astype(np.float32)
batch = zero.shard_batch({"x": x, "y": (x @ rng.normal(size=(64, 10))).argmax(-1).astype(np.int32)}, mesh=mesh)
losses = []
for _ in range(30):
    state, metrics = step(state, batch)
    losses.append(float(metrics.loss))

held = zero.memory.measure_arrays(state).device_bytes
whole = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
print(f"{held / 1e3:.0f} KB a device, where data parallelism has {whole / 1e3:.0f} KB (data={mesh.shape['data']})")

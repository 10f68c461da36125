"""Two networks, a GAN, at ZeRO stage 3: each has a state and a step, and the other's params as its model state.

Run it anywhere: JAX_NUM_CPU_DEVICES=8 python examples/gan.py
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zero_jax as zero


def init_mlp(key, num_inputs, num_outputs):
    sizes = [num_inputs, 128, 128, num_outputs]
    keys = jax.random.split(key, 3)
    shapes = zip(keys, sizes[:-1], sizes[1:], strict=True)
    return [{"w": jax.random.normal(k, (n, m)) * (2 / n) ** 0.5, "b": jnp.zeros(m)} for k, n, m in shapes]


def apply(layers, x):
    for layer in layers[:-1]:
        x = jax.nn.leaky_relu(x @ layer["w"] + layer["b"], 0.2)
    return x @ layers[-1]["w"] + layers[-1]["b"]


def d_loss(discriminator, batch, *, model_state):  # the model state is the generator
    real, fake = apply(discriminator, batch["x"]), apply(discriminator, apply(model_state, batch["noise"]))
    return (jax.nn.softplus(-real) + jax.nn.softplus(fake)).mean(), None, model_state


def g_loss(generator, batch, *, model_state):  # the model state is the discriminator
    fake = apply(generator, batch["noise"])
    aux = {"distance": jnp.linalg.norm(fake.mean(0) - batch["x"].mean(0))}
    return jax.nn.softplus(-apply(model_state, fake)).mean(), aux, model_state


mesh, config, tx = zero.make_mesh(), zero.ZeroConfig(stage=3), optax.adam(1e-3, b1=0.5)
make = lambda seed, n, m: zero.init_state(  # noqa: E731
    lambda key: init_mlp(key, n, m), tx, jax.random.key(seed), mesh=mesh, config=config
)
d_state, g_state = make(0, 2, 1), make(1, 8, 2)
d_step, g_step = (zero.make_train_step(loss_fn, tx, mesh=mesh, config=config) for loss_fn in (d_loss, g_loss))

rng = np.random.default_rng(0)
distances = []
for _ in range(60):
    x = rng.normal(size=(32 * mesh.size, 2)) * 0.3 + [2.0, -1.0]
    batch = {"x": x.astype(np.float32), "noise": rng.normal(size=(len(x), 8)).astype(np.float32)}
    # A step donates all that it gets: the other player's params come back as its model state.
    d_state, _ = d_step(dataclasses.replace(d_state, model_state=g_state.params), batch)
    g_state = dataclasses.replace(g_state, params=d_state.model_state, model_state=d_state.params)
    g_state, metrics = g_step(g_state, batch)
    d_state = dataclasses.replace(d_state, params=g_state.model_state, model_state=None)
    distances.append(float(metrics.aux["distance"]))

states = [(s.params, s.opt_state) for s in (d_state, g_state)]
held, whole = zero.memory.measure_arrays(states).device_bytes, sum(x.nbytes for x in jax.tree.leaves(states))
print(f"distance to the data {distances[0]:.3f} -> {distances[-1]:.3f}")
print(f"{held / 1e3:.0f} KB a device, where data parallelism has {whole / 1e3:.0f} KB (data={mesh.shape['data']})")

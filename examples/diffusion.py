"""A diffusion model (Ho et al. 2020) at ZeRO stage 3: the loss draws its own noise from the step's key.

Run it anywhere: JAX_NUM_CPU_DEVICES=8 python examples/diffusion.py
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import zero_jax as zero

NUM_TIMES = 100
signal = jnp.cumprod(1 - jnp.linspace(1e-4, 0.1, NUM_TIMES))  # the share of a picture's variance that is left


class Denoiser(nn.Module):
    """Predicts the noise in a noisy picture of 8 x 8 pixels."""

    @nn.compact
    def __call__(self, x, time):
        angles = time[:, None] / NUM_TIMES * 2.0 ** jnp.arange(8)
        x = nn.Dense(256)(jnp.concatenate([x, jnp.sin(angles), jnp.cos(angles)], axis=-1))
        for _ in range(2):
            x = x + nn.Dense(256)(nn.silu(nn.LayerNorm()(x)))
        return nn.Dense(64)(x)


model = Denoiser()


def init_fn(key):
    return model.init(key, jnp.zeros((1, 64)), jnp.zeros(1))


def loss_fn(params, batch, key):
    time_key, noise_key = jax.random.split(key)
    pictures = batch["pictures"]
    time = jax.random.randint(time_key, pictures.shape[:1], 0, NUM_TIMES)
    noise = jax.random.normal(noise_key, pictures.shape)
    share = signal[time][:, None]
    noisy = jnp.sqrt(share) * pictures + jnp.sqrt(1 - share) * noise
    return jnp.square(model.apply(params, noisy, time) - noise).mean()


mesh = zero.make_mesh()
config = zero.ZeroConfig(stage=3, clip_norm=1.0)
tx = optax.adam(3e-3)
state = zero.init_state(init_fn, tx, jax.random.key(0), mesh=mesh, config=config)
step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)

rng = np.random.default_rng(0)
bars = np.eye(8)[rng.integers(0, 8, 64 * mesh.size)][:, :, None] * np.ones((1, 1, 8))  # a bright row each
batch = zero.shard_batch({"pictures": (2 * bars - 1).reshape(-1, 64).astype(np.float32)}, mesh=mesh)
losses = []
for _ in range(80):
    state, metrics = step(state, batch)
    losses.append(float(metrics.loss))

held = zero.memory.measure_arrays(state).device_bytes
whole = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
print(f"{held / 1e3:.0f} KB a device, where data parallelism has {whole / 1e3:.0f} KB (data={mesh.shape['data']})")

"""An encoder-decoder in the manner of T5 (Raffel et al. 2020) at ZeRO stage 3, which learns to reverse text.

Run it anywhere: JAX_NUM_CPU_DEVICES=8 python examples/t5.py
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import zero_jax as zero

VOCAB, LENGTH, WIDTH = 16, 6, 64


class Block(nn.Module):
    """Attention with biases by relative position, attention to the encoder where there is one, and an MLP."""

    is_causal: bool = False

    @nn.compact
    def __call__(self, x, encoded=None):
        h = nn.RMSNorm()(x)
        heads, places = 4, jnp.arange(x.shape[1])
        distances = jnp.clip(places[:, None] - places[None], -16, 16) + 16
        bias = nn.Embed(33, heads, name="relative_position")(distances).transpose(2, 0, 1)
        bias = jnp.where(places[:, None] >= places[None], bias, -1e9) if self.is_causal else bias
        q, k, v = (nn.DenseGeneral((heads, WIDTH // heads), use_bias=False)(h) for _ in range(3))
        mixed = jax.nn.dot_product_attention(q, k, v, bias=bias[None].astype(q.dtype), scale=1.0 / 4)
        x = x + nn.DenseGeneral(WIDTH, axis=(-2, -1), use_bias=False)(mixed)
        if encoded is not None:
            x = x + nn.MultiHeadDotProductAttention(heads, use_bias=False)(nn.RMSNorm()(x), encoded)
        return x + nn.Dense(WIDTH, use_bias=False)(nn.relu(nn.Dense(4 * WIDTH, use_bias=False)(nn.RMSNorm()(x))))


class T5(nn.Module):
    """A block on either side, and one table of embeddings for both."""

    @nn.compact
    def __call__(self, inputs, decoder_inputs):
        embed = nn.Embed(VOCAB, WIDTH)
        encoded, x = embed(inputs), embed(decoder_inputs)
        encoded = nn.RMSNorm()(Block()(encoded))
        x = Block(is_causal=True)(x, encoded)
        return nn.Dense(VOCAB)(nn.RMSNorm()(x))


def init_fn(key):
    return T5().init(key, *np.zeros((2, 1, LENGTH), np.int32))


def loss_fn(params, batch):
    begun = jnp.pad(batch["targets"][:, :-1], ((0, 0), (1, 0)))  # 0 begins
    logits = T5().apply(params, batch["inputs"], begun)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


mesh = zero.make_mesh()
config = zero.ZeroConfig(stage=3, clip_norm=1.0)
tx = optax.adamw(optax.warmup_cosine_decay_schedule(0, 1e-2, 10, 80))
state = zero.init_state(init_fn, tx, jax.random.key(0), mesh=mesh, config=config)
step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
rng = np.random.default_rng(0)
losses = []
for _ in range(80):
    inputs = rng.integers(1, VOCAB, (16 * mesh.size, LENGTH), dtype=np.int32)
    state, metrics = step(state, {"inputs": inputs, "targets": inputs[:, ::-1].copy()})
    losses.append(float(metrics.loss))

held = zero.memory.measure_arrays(state).device_bytes
whole = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
print(f"{held / 1e3:.0f} KB a device, where data parallelism has {whole / 1e3:.0f} KB (data={mesh.shape['data']})")

"""Models of kinds that the other tests lack, as small as they can be, with the forms that make each of them one.

Each of `MODELS` is `(init_fn, loss_fn, make_batch)`. No param's gradient is zero up to rounding.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

BATCH_SIZE, LENGTH, VOCAB, FEATURES, LAYERS = 16, 8, 32, 16, 2


def normal(key, *shape):
    return jax.random.normal(key, shape) / np.sqrt(shape[-2])


def rms_norm(x, scale):
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * scale


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def random_tokens(seed, length=LENGTH):
    return np.random.default_rng(seed).integers(0, VOCAB, (BATCH_SIZE, length), dtype=np.int32)


def random_floats(seed, *shape):
    return np.random.default_rng(seed).standard_normal((BATCH_SIZE, *shape), dtype=np.float32)


# --- a U-Net that predicts the noise of a diffusion model: strided and transposed convolutions, skip connections ------


class UNetBlock(nn.Module):
    channels: int

    @nn.compact
    def __call__(self, x, time):
        y = nn.Conv(self.channels, (3, 3), use_bias=False)(nn.silu(nn.GroupNorm(num_groups=2)(x)))
        y += nn.Dense(self.channels)(nn.silu(time))[:, None, None]
        y = nn.Conv(self.channels, (3, 3), use_bias=False)(nn.silu(nn.GroupNorm(num_groups=2)(y)))
        return y + nn.Conv(self.channels, (1, 1), use_bias=False)(x)


class UNet(nn.Module):
    widths: tuple[int, ...] = (8, 16)

    @nn.compact
    def __call__(self, x, time):
        angles = time[:, None] * jnp.exp(-jnp.arange(8) / 2)
        time = nn.Dense(FEATURES)(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1))
        x, skips = nn.Conv(self.widths[0], (3, 3))(x), []
        for width in self.widths:
            x = UNetBlock(width)(x, time)
            skips.append(x)
            x = nn.Conv(width, (3, 3), strides=2)(x)
        x = UNetBlock(self.widths[-1])(x, time)
        for width in reversed(self.widths):
            x = nn.ConvTranspose(width, (4, 4), strides=(2, 2))(x)
            x = UNetBlock(width)(jnp.concatenate([x, skips.pop()], -1), time)
        return nn.Conv(3, (3, 3))(nn.silu(x))


def unet_init(key):
    return UNet().init(key, jnp.zeros((1, 8, 8, 3)), jnp.zeros(1))["params"]


def unet_loss(params, batch):
    level = jnp.cos(batch["time"])[:, None, None, None]
    noisy = level * batch["image"] + jnp.sqrt(1 - level**2) * batch["noise"]
    return jnp.square(UNet().apply({"params": params}, noisy, batch["time"]) - batch["noise"]).mean()


def unet_batch(seed):
    images = {name: random_floats(seed + i, 8, 8, 3) for i, name in enumerate(("image", "noise"))}
    return images | {"time": np.linspace(0.1, 1.5, BATCH_SIZE, dtype=np.float32)}


# --- T5: encoder and decoder, biases by distance that layers share, cross-attention, one table in three places --------

HEADS, HEAD_SIZE, BUCKETS = 4, 8, 8


def t5_init(key):
    keys = iter(jax.random.split(key, 64))

    def attention():
        inner = HEADS * HEAD_SIZE
        qkv = {name: normal(next(keys), FEATURES, inner).reshape(FEATURES, HEADS, HEAD_SIZE) for name in "qkv"}
        out = normal(next(keys), inner, FEATURES).reshape(HEADS, HEAD_SIZE, FEATURES)
        return qkv | {"out": out, "norm": jnp.ones(FEATURES)}

    def mlp():
        shapes = {"gate": (FEATURES, 32), "up": (FEATURES, 32), "down": (32, FEATURES)}
        return {name: normal(next(keys), *shape) for name, shape in shapes.items()} | {"norm": jnp.ones(FEATURES)}

    def stack(*names):
        layers = [{name: attention() for name in names} | {"mlp": mlp()} for _ in range(LAYERS)]
        return {"layers": layers, "distance": normal(next(keys), BUCKETS, HEADS), "norm": jnp.ones(FEATURES)}

    table = jax.random.normal(next(keys), (VOCAB, FEATURES))
    return {"table": table, "encoder": stack("self"), "decoder": stack("self", "cross")}


def bucket_of(distance, causal):
    """T5's buckets: half of them exact, the others logarithmic; both signs where not causal."""
    if causal:
        num, sign, distance = BUCKETS, 0, jnp.maximum(-distance, 0)
    else:
        num, sign, distance = BUCKETS // 2, BUCKETS // 2 * (distance > 0), jnp.abs(distance)
    exact = num // 2
    far = exact + jnp.log(jnp.maximum(distance, 1) / exact) / np.log(16 / exact) * (num - exact)
    return sign + jnp.where(distance < exact, distance, jnp.minimum(far, num - 1).astype(int))


def t5_attend(params, x_BTD, y_BSD, bias_HTS):
    x_BTD = rms_norm(x_BTD, params["norm"])
    q_BTHK, k_BSHK, v_BSHK = (
        jnp.einsum("btd,dhk->bthk", x, params[name]) for name, x in zip("qkv", (x_BTD, y_BSD, y_BSD), strict=True)
    )
    weights_BHTS = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK) + bias_HTS)
    return jnp.einsum("bhts,bshk,hkd->btd", weights_BHTS, v_BSHK, params["out"])


def t5_stack(params, x, encoded=None):
    causal = encoded is not None
    places = jnp.arange(x.shape[1])
    distance = places[None, :] - places[:, None]
    bias = jnp.moveaxis(params["distance"][bucket_of(distance, causal)], -1, 0)
    bias += jnp.where(causal & (distance > 0), -1e9, 0.0)
    for layer in params["layers"]:
        x += t5_attend(layer["self"], x, rms_norm(x, layer["self"]["norm"]), bias)
        if causal:
            x += t5_attend(layer["cross"], x, encoded, 0.0)
        y, mlp = rms_norm(x, layer["mlp"]["norm"]), layer["mlp"]
        x += (jax.nn.gelu(y @ mlp["gate"]) * (y @ mlp["up"])) @ mlp["down"]
    return rms_norm(x, params["norm"])


def t5_loss(params, batch):
    table = params["table"]
    encoded = t5_stack(params["encoder"], table[batch["source"]])
    decoded = t5_stack(params["decoder"], table[batch["target"][:, :-1]], encoded)
    return cross_entropy(decoded @ table.T / np.sqrt(FEATURES), batch["target"][:, 1:])


def t5_batch(seed):
    return {"source": random_tokens(seed, LENGTH + 4), "target": random_tokens(seed + 1, LENGTH + 1)}


# --- Mamba: a state-space model whose transitions depend on the input, by an associative scan over time ---------------

INNER, STATES, RANK, WIDTH = 32, 4, 2, 3


def mamba_layer(key):
    keys = jax.random.split(key, 6)
    return {
        "norm": jnp.ones(FEATURES),
        "in": normal(keys[0], FEATURES, 2 * INNER),
        "conv": normal(keys[1], WIDTH, INNER),
        "conv_bias": 0.1 * jax.random.normal(keys[5], (INNER,)),
        "select": normal(keys[2], INNER, RANK + 2 * STATES),
        "delta": normal(keys[3], RANK, INNER),
        "delta_bias": jnp.linspace(-3.0, -1.0, INNER),
        "log_decay": jnp.log(jnp.broadcast_to(jnp.arange(1.0, STATES + 1), (INNER, STATES))),
        "skip": jnp.ones(INNER),
        "out": normal(keys[4], INNER, FEATURES),
    }


def mamba_init(key):
    keys = jax.random.split(key)
    layers = jax.vmap(mamba_layer)(jax.random.split(keys[0], LAYERS))
    return {"table": jax.random.normal(keys[1], (VOCAB, FEATURES)), "layers": layers, "norm": jnp.ones(FEATURES)}


def selective_scan(params, x_BTI):
    delta, b_BTN, c_BTN = jnp.split(x_BTI @ params["select"], [RANK, RANK + STATES], axis=-1)
    delta_BTI = jax.nn.softplus(delta @ params["delta"] + params["delta_bias"])
    decay_BTIN = jnp.exp(delta_BTI[..., None] * -jnp.exp(params["log_decay"]))
    input_BTIN = (delta_BTI * x_BTI)[..., None] * b_BTN[:, :, None]

    def compose(first, second):
        return first[0] * second[0], second[0] * first[1] + second[1]

    _, h_BTIN = lax.associative_scan(compose, (decay_BTIN, input_BTIN), axis=1)
    return jnp.einsum("btin,btn->bti", h_BTIN, c_BTN) + x_BTI * params["skip"]


def mamba_block(x_BTD, params):
    x, gate = jnp.split(rms_norm(x_BTD, params["norm"]) @ params["in"], 2, axis=-1)
    x = lax.conv_general_dilated(  # depthwise and causal
        x,
        params["conv"][:, None],
        (1,),
        [(WIDTH - 1, 0)],
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=INNER,
    )
    x = selective_scan(params, jax.nn.silu(x + params["conv_bias"]))
    return x_BTD + (x * jax.nn.silu(gate)) @ params["out"]


def mamba_loss(params, batch):
    x = params["table"][batch["tokens"][:, :-1]]
    x, _ = lax.scan(lambda x, layer: (jax.checkpoint(mamba_block)(x, layer), None), x, params["layers"])
    logits = rms_norm(x, params["norm"]) @ params["table"].T / np.sqrt(FEATURES)
    return cross_entropy(logits, batch["tokens"][:, 1:])


def mamba_batch(seed):
    return {"tokens": random_tokens(seed, LENGTH + 1)}


# --- MAML: each task's own params by gradient descent within the loss, with rates that are learned --------------------


def maml_init(key):
    keys = jax.random.split(key, 3)
    params = {
        "in": 2 * jax.random.normal(keys[0], (2, 32)),
        "mid": normal(keys[1], 32, 32),
        "out": normal(keys[2], 32, 8),
    }
    return {"params": params, "rates": jax.tree.map(lambda x: jnp.full(x.shape, 0.1), params)}


def maml_error(params, x, y):
    x = jnp.stack([x, jnp.ones_like(x)], -1) @ params["in"]
    return jnp.square(jnp.tanh(jnp.tanh(x) @ params["mid"]) @ params["out"] - y[:, None]).mean()


def maml_loss(meta, batch):
    def of_task(task):
        params = meta["params"]
        for _ in range(2):
            grads = jax.grad(maml_error)(params, *task["support"])
            params = jax.tree.map(lambda p, rate, g: p - rate * g, params, meta["rates"], grads)
        return maml_error(params, *task["query"])

    return jax.vmap(of_task)(batch).mean()


def maml_batch(seed):
    phase = 3 * random_floats(seed, 1)
    points = {name: random_floats(seed + i, 5) for i, name in enumerate(("support", "query"), 1)}
    return {name: (x, np.sin(x + phase)) for name, x in points.items()}


MODELS = {
    "unet": (unet_init, unet_loss, unet_batch),
    "t5": (t5_init, t5_loss, t5_batch),
    "mamba": (mamba_init, mamba_loss, mamba_batch),
    "maml": (maml_init, maml_loss, maml_batch),
}

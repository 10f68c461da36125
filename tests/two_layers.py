"""The smallest model: two matrices, and batches that divide over any mesh of the tests."""

import jax.numpy as jnp
import numpy as np


def host_params():
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32) / 4  # noqa: E731
    return {"in": normal(8, 16), "out": normal(16, 8)}


def make_batch(size=16):
    return {"inputs": np.random.default_rng(1).standard_normal((size, 8), dtype=np.float32)}


def loss_fn(params, batch):
    return jnp.square(jnp.tanh(batch["inputs"] @ params["in"]) @ params["out"]).mean()

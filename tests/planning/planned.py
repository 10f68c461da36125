"""A model small enough that the compilers take seconds, and functions that make a compiler's process end badly."""

import os
import signal
import time

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

WIDTH, DEPTH = 256, 2


def init_fn(key):
    return {"layers": [jax.random.normal(k, (WIDTH, WIDTH)) / 16 for k in jax.random.split(key, DEPTH)]}


def loss_fn(params, batch):
    x = batch["x"]
    for weight in params["layers"]:
        x = jax.nn.relu(x @ weight)
    return jnp.mean((x - batch["y"]) ** 2)


def batch(num_examples=8):
    x = jax.ShapeDtypeStruct((num_examples, WIDTH), jnp.float32)
    return {"x": x, "y": x}


def none():
    return None


def words():
    return {"x": ["one", "two"]}


def wrong_loss(params, batch):
    return loss_fn(params, batch) + batch["z"]


def killed(params, batch):
    os.kill(os.getpid(), signal.SIGKILL)


def crashed(params, batch):
    print("the compiler's last words", file=__import__("sys").stderr, flush=True)
    os.abort()


def endless(params, batch):
    time.sleep(600)
    return loss_fn(params, batch)


SPECS = {"layers/0": PartitionSpec(None, "model"), "layers/1": PartitionSpec("model", None)}


def specs():
    return SPECS


def specs_of(params):
    return {"layers": [SPECS[f"layers/{i}"] for i, _ in enumerate(params["layers"])]}


def batches(step):
    return batch()

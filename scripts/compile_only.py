"""Imported before JAX by scripts that compile for TPUs: this machine's own devices are not looked for.

Without these variables libtpu queries the machine for its TPU, and locks it for one process.
"""

from __future__ import annotations

import functools
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-16")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import optax

import zero_jax as zero
from zero_jax.models import gpt


def batch(num_examples: int, seq_len: int, sharding: Any = None) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a batch of tokens."""
    tokens = jax.ShapeDtypeStruct((num_examples, seq_len), jnp.int32, sharding=sharding)
    return {"inputs": tokens, "targets": tokens}


def lower_step(
    model: gpt.GPTConfig,
    num_examples: int,
    *,
    mesh: Any,
    config: zero.ZeroConfig,
    init_fn: Any = None,
    loss_fn: Any = None,
) -> tuple[zero.TrainState, Any]:
    """Lowers the step of a GPT, or of other functions of its batch, with adamw; returns its state's shapes, too."""
    tx = optax.adamw(3e-4)
    state = zero.abstract_state(init_fn or functools.partial(gpt.init, model), tx, mesh=mesh, config=config)
    step = zero.make_train_step(loss_fn or gpt.loss_fn(model), tx, mesh=mesh, config=config)
    return state, step.lower(state, batch(num_examples, model.seq_len))

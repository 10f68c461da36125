"""The paper's C_B: buffers of collectives do not grow with the model's depth; stacked layers make no difference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest

pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'jax[tpu]'")

import zero_jax as zero
from zero_jax.models import gpt

pytestmark = [pytest.mark.tpu_compiler, pytest.mark.slow]
SHALLOW = gpt.GPTConfig(vocab_size=512, seq_len=128, num_layers=2, d_model=1024, num_heads=8)


def largest_buffer_bytes(num_layers, stage):
    config = dataclasses.replace(SHALLOW, num_layers=num_layers)
    report = zero.plan(
        gpt.loss_fn(config),
        functools.partial(gpt.init, config),
        optax.adamw(1e-3),
        batch={name: jax.ShapeDtypeStruct((4, 128), jnp.int32) for name in ("inputs", "targets")},
        topology="v5e:2x2",
        config=zero.ZeroConfig(stage=stage, precision="bf16"),
        cache=None,
        own_process=False,
    )
    return report.comms.largest_buffer_bytes


def test_gathers_on_use_do_not_grow_with_depth():
    assert largest_buffer_bytes(8, stage=3) == largest_buffer_bytes(2, stage=3)


def test_gathers_after_the_update_do_not_grow_past_a_bound():
    """At stage 2 stacks are gathered at once up to 64 MiB, above that layer by layer: 8 MiB of 36 layers are 288."""
    assert largest_buffer_bytes(36, stage=2) <= 2**26

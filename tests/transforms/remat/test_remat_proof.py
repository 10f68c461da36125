"""What residuals hold and what they cost, read from programs of the TPU compiler, which needs no TPU."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import zero_jax as zero

pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'jax[tpu]'")

from measure_remat import BATCH_SIZE, GPT, compile_grads

pytestmark = [pytest.mark.tpu_compiler, pytest.mark.full_effort, pytest.mark.slow]
MODEL, LAYERS = 4, 4
SMALL = dataclasses.replace(GPT, num_layers=LAYERS, seq_len=256)
# Shorter, the peak of a loop is at no residual.
LOOP = dataclasses.replace(SMALL, num_layers=3, seq_len=512, scan=False)


def stream_bytes(config):
    """Returns the bytes of the residual stream that enters a block, on one of 4 shards of the batch, in bfloat16."""
    return BATCH_SIZE // 4 * config.seq_len * config.d_model * 2


def blocks_bytes(config):
    """Returns the paper's 12 x seq x hidden a block and sample (section 8), as bytes that a device sends."""
    return 12 * config.num_layers * stream_bytes(config) * (MODEL - 1) / MODEL


@pytest.mark.parametrize("config", [SMALL, LOOP], ids=["scan", "loop"])
def test_sharded_residuals_fall_to_a_share_for_a_twelfth_more_traffic(config):
    whole, sharded = (compile_grads(policy, config=config, model=MODEL) for policy in ("full", "full_sharded"))
    fell = config.num_layers * stream_bytes(config) * (MODEL - 1) / MODEL
    # In a loop the last block's residual does not wait, and the peak comes at another moment.
    share = 0.95 if config.scan else 0.95 * (config.num_layers - 2) / config.num_layers
    assert whole.temp_bytes - sharded.temp_bytes >= share * fell
    # Each residual is gathered once, in the backward pass, and not in the forward pass too.
    assert sharded.model_bytes - whole.model_bytes <= blocks_bytes(config) * (1 / 12 + 0.02)
    assert sharded.data_bytes <= 1.02 * whole.data_bytes


@pytest.mark.parametrize("form", ["python", "fori"])
def test_residuals_of_layers_that_share_their_weights_fall(form):
    mesh, width, num_examples = zero.make_mesh(topology="v5p:2x2x1"), 256, 1 << 15

    def layer(x, p):
        return x + jnp.tanh(x @ p["up"]) @ p["down"]

    def loss_fn(params, x):
        if form == "fori":
            return jnp.mean(jax.lax.fori_loop(0, 4, lambda _, x: layer(x, params), x) ** 2)
        for _ in range(4):
            x = layer(x, params)
        return jnp.mean(x**2)

    def shape(dims, spec):
        return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(mesh, spec))

    params = {"up": shape((width, 4 * width), PartitionSpec()), "down": shape((4 * width, width), PartitionSpec())}
    examples = shape((num_examples, width), PartitionSpec("data"))
    own, full = (
        jax.jit(jax.value_and_grad(zero.rematerialize(loss_fn, remat, mesh=mesh))).lower(params, examples).compile()
        for remat in ("own", "full")
    )
    own_bytes, full_bytes = (compiled.memory_analysis().temp_size_in_bytes for compiled in (own, full))
    # Beside the streams that enter the layers, one hidden layer instead of four.
    assert full_bytes < 0.6 * own_bytes, (own_bytes, full_bytes)


def test_offloaded_residuals_leave_the_device():
    whole, offloaded = (compile_grads(policy, config=SMALL, model=MODEL) for policy in ("full", "full_offloaded"))
    assert offloaded.host_bytes == LAYERS * stream_bytes(SMALL) // MODEL
    # Two shards wait for their transfer, in and out.
    assert whole.temp_bytes - offloaded.temp_bytes >= (LAYERS - 2 / MODEL) * stream_bytes(SMALL)
    assert offloaded.model_bytes - whole.model_bytes <= blocks_bytes(SMALL) * (1 / 12 + 0.02)


def test_transfers_overlap_with_computation():
    """Out while the block computes, and in while the block before it (in the backward pass) does."""
    text = compile_grads("full_offloaded", config=SMALL, model=MODEL).text
    for kind in ("dynamic-update-slice", "dynamic-slice"):
        overlapped = [_cycles_within(body, kind) for body in re.split(r"\n}\n", text) if "/while/body" in body]
        assert max(overlapped) > 10_000, kind


def _cycles_within(body, kind):
    """Returns the estimated cycles of what runs between the start and the end of a transfer from or to the host."""
    span = re.search(rf"%{kind}-start[.\d]* = [^\n]*S\(5\)(.*?)%{kind}-done", body, re.DOTALL)
    return sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', span[1]))) if span else 0

"""What the gradient noise scale adds to programs of the TPU compiler: a scalar sent, and no memory to speak of.

Each step is compiled twice, once without the two metrics, so that the compiler drops all that only they need.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest

pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'jax[tpu]'")

import zero_jax as zero
from zero_jax import hlo
from zero_jax.models import gpt

pytestmark = [pytest.mark.tpu_compiler, pytest.mark.slow]
MODEL = gpt.GPTConfig(vocab_size=1024, seq_len=256, num_layers=3, d_model=256, num_heads=2)
NUM_MICROBATCHES = 4


def lower(step, state, batch, *, mesh, config, is_measured):
    """Lowers the step with or without the metrics of the noise scale."""
    if is_measured:
        return step.lower(state, batch)

    def without(state, batch):
        state, metrics = step.program.step(state, batch)
        return state, dataclasses.replace(metrics, small_grad_norm_sq=None, num_small_grads=None)

    shardings = zero.state_shardings(state, mesh=mesh, config=config)
    sharding = zero.batch_sharding(mesh)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), batch)
    return jax.jit(without, donate_argnums=0, out_shardings=(shardings, None)).lower(state, batch)


@functools.cache
def programs(topology, stage, scan):
    tx = optax.adamw(1e-3)
    mesh = zero.make_mesh(topology=topology)
    fields = {"num_microbatches": NUM_MICROBATCHES, "noise_scale": True, "overlap": False}
    config = zero.ZeroConfig(stage=stage, precision="bf16", **fields)
    model = dataclasses.replace(MODEL, scan=scan)
    state = zero.abstract_state(functools.partial(gpt.init, model), tx, mesh=mesh, config=config)
    step = zero.make_train_step(gpt.loss_fn(model), tx, mesh=mesh, config=config)
    tokens = jax.ShapeDtypeStruct((2 * mesh.size * NUM_MICROBATCHES, MODEL.seq_len), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}
    return [
        lower(step, state, batch, mesh=mesh, config=config, is_measured=is_measured).compile()
        for is_measured in (False, True)
    ]


@pytest.mark.parametrize(
    ("topology", "stage", "scan"),
    [
        # Partial gradients for each device (stages 0 and 1), and gradients of microbatches, on one axis and on two.
        ("v5p:2x2x4", 1, True),
        ("v5p:4x4x4", 3, True),
    ],
)
def test_it_costs_a_scalar(topology, stage, scan):
    before, after = programs(topology, stage, scan)
    sent = [hlo.collectives(program.as_text()) for program in (before, after)]
    # 4 bytes are all-reduced, for under 8 sent: the sum of squares; at stages 0 and 1 the number of parts beside it;
    # on a torus one more sum for each other way in which arrays are cut over its dims.
    assert 0 <= hlo.sent_bytes(sent[1]) - hlo.sent_bytes(sent[0]) <= 32
    # None of them in the loop over microbatches.
    in_loops = [sum(c.num_executions for c in cs if c.num_executions > 1) for cs in sent]
    assert in_loops[0] == in_loops[1]
    # The peak, of which the arguments are a part. Sums of shards are tiles of 4 KiB at most.
    peaks = [program.memory_analysis().peak_memory_in_bytes for program in (before, after)]
    assert peaks[0] > before.memory_analysis().argument_size_in_bytes > 0
    assert peaks[1] <= peaks[0] + (1 << 16)

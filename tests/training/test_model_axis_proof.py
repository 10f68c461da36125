"""What programs of the TPU compiler send over `model` and over `data` beside tensor parallelism; it needs no TPU.

The paper (section 8) counts two all-reduces forward, two recomputed and two backward in a block: 12 x seq x hidden
elements a sample. The embedding and the head, split over the vocabulary, add one all-reduce each. A unit here is one of
those 12: what a reduce-scatter of the tokens of a device sends.

A windowed reduce-scatter of XLA:TPU sends (n + 1) / n for the (n - 1) / n of a plain one, which for the 4 devices of
`data` here is 5/3; it is counted as a plain one.
"""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'jax[tpu]'")

import zero_jax as zero
from zero_jax.models import gpt
from zero_jax.training.sequence_sharding import sequence_parallel

pytestmark = [pytest.mark.tpu_compiler, pytest.mark.slow]
CONFIG = gpt.GPTConfig(vocab_size=16384, seq_len=512, num_layers=2, d_model=1024, num_heads=8, position="learned")
MODEL, DATA, NUM_EXAMPLES = 4, 4, 16
EMBEDDING_AND_HEAD = 4  # units: an all-reduce each


@functools.cache
def report(stage, num_microbatches=1, by_sequence=False):
    mesh = zero.make_mesh(topology="v5p:2x2x4", model=MODEL)
    config = zero.ZeroConfig(
        overlap=False,
        stage=stage,
        precision="bf16",
        num_microbatches=num_microbatches,
        param_specs=gpt.param_specs(CONFIG),
    )
    tx = optax.adamw(3e-4)
    state = zero.abstract_state(functools.partial(gpt.init, CONFIG), tx, mesh=mesh, config=config)
    loss_fn = gpt.loss_fn(CONFIG, place=sequence_parallel(mesh)) if by_sequence else gpt.loss_fn(CONFIG)
    step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
    tokens = jax.ShapeDtypeStruct((num_microbatches * NUM_EXAMPLES, CONFIG.seq_len), jnp.int32)
    compiled = step.lower(state, {"inputs": tokens, "targets": tokens}).compile()
    return zero.comms.measure(compiled, mesh=mesh), compiled.memory_analysis().temp_size_in_bytes


def units_of_model(rows, num_microbatches=1):
    """Returns what a device sends over `model` in one microbatch, in elements, over tokens x hidden x (m - 1) / m."""
    tokens = num_microbatches * NUM_EXAMPLES // DATA * CONFIG.seq_len
    sent = sum(row.total_sent_bytes for row in rows if set(row.axes) == {"model"})
    return sent / (2 * tokens * CONFIG.d_model * (MODEL - 1) / MODEL)


def psi_of_data(rows):
    """Returns what a device sends over `data`, in multiples of its share of the params' elements x (n - 1) / n."""
    windowed = (DATA - 1) / (DATA + 1)
    sent = sum(row.total_sent_bytes * (windowed if "windowed" in row.kind else 1) for row in rows if "data" in row.axes)
    return sent / (2 * CONFIG.num_params / MODEL * (DATA - 1) / DATA)


def large_all_reduces(rows):
    limit = 0.01 * 2 * CONFIG.num_params / MODEL
    return [r for r in rows if r.kind == "all-reduce" and "data" in r.axes and r.total_sent_bytes > 2 * limit]


@pytest.mark.parametrize(("stage", "num_microbatches", "psi"), [(1, 2, 2), (3, 1, 3)])
def test_traffic_by_axis(stage, num_microbatches, psi):
    """Stage 2 reduces gradients as stage 3 does, and gathers params as stage 1 does."""
    rows = report(stage, num_microbatches)[0].rows
    assert units_of_model(rows, num_microbatches) <= 12 * CONFIG.num_layers + EMBEDDING_AND_HEAD
    # A lookup moves its rows there and back beside the params: 8192 x 1024 elements, 0.2 psi of this small model.
    rows_of_a_lookup = 2 * NUM_EXAMPLES // DATA * CONFIG.seq_len * CONFIG.d_model / (CONFIG.num_params / MODEL)
    assert psi_of_data(rows) <= 1.08 * psi + (rows_of_a_lookup if psi == 3 else rows_of_a_lookup / 2)
    assert not large_all_reduces(rows)


def test_stage_0_reduces_gradients_once_for_each_use():
    """XLA sums the gradients of the table's two uses apart: 2 psi and a table more."""
    rows = report(0)[0].rows
    assert units_of_model(rows) <= 12 * CONFIG.num_layers + EMBEDDING_AND_HEAD
    table = 2 * CONFIG.vocab_size * CONFIG.d_model / CONFIG.num_params
    assert psi_of_data(rows) <= 1.08 * (2 + table)


def test_sequence_parallelism_sends_reduce_scatters_and_gathers_over_model():
    split, split_bytes = report(3, by_sequence=True)
    whole, whole_bytes = report(3)
    assert units_of_model(split.rows) <= 12 * CONFIG.num_layers + EMBEDDING_AND_HEAD
    kinds = {r.kind for r in split.rows if set(r.axes) == {"model"} and r.total_sent_bytes > 1e5 and r.param != "embed"}
    assert kinds == {"all-gather", "reduce-scatter"}
    assert psi_of_data(split.rows) <= 1.01 * psi_of_data(whole.rows)
    assert split_bytes < 0.9 * whole_bytes

"""The paper's C_B on programs of the TPU compiler: buffers do not grow with depth, and logits are never whole."""

import dataclasses

import pytest

pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'jax[tpu]'")

import measure_buffers
from measure_buffers import NUM_EXAMPLES, SHALLOW, compile_buffers

pytestmark = [pytest.mark.tpu_compiler, pytest.mark.slow]
TOPOLOGY = "v5e:2x2"
# A head of more params than the rest, and logits that are most of the temporaries.
WIDE = dataclasses.replace(SHALLOW, vocab_size=16384, seq_len=512, num_layers=1)
CHUNK_SIZE = 2048
ON_CHIP_BYTES = 128 * 2**20


def of_depth(num_layers, stage):
    return compile_buffers(stage, dataclasses.replace(SHALLOW, num_layers=num_layers), topology=TOPOLOGY)


def test_stage_3_does_not_grow_with_depth():
    shallow, deep = of_depth(4, 3), of_depth(64, 3)
    assert deep.largest_collective_bytes == shallow.largest_collective_bytes
    # What lies on the chip in a shallow model may lie in HBM in a deep one; what is stacked is many times that.
    assert deep.rest_bytes <= shallow.rest_bytes + ON_CHIP_BYTES
    assert deep.stacked_bytes > 10 * ON_CHIP_BYTES


def test_gathers_after_the_update_do_not_grow_past_a_bound():
    """At stage 2 stacks are gathered at once up to 64 MiB, above that layer by layer: 8 MiB of 36 layers are 288."""
    model = dataclasses.replace(SHALLOW, num_layers=36, seq_len=128)
    assert compile_buffers(2, model, topology=TOPOLOGY, num_examples=1).largest_collective_bytes <= 2**26


@pytest.mark.parametrize(
    ("topology", "stage", "options"),
    [
        ("v5e:4x4", 3, {}),
        # With the least effort 1.14: the compiler sends other bytes then beside `model`.
        pytest.param("v5p:2x2x4", 3, {"model": 4, "num_examples": 4}, marks=pytest.mark.full_effort),
        ("v5p:2x2x4", 2, {"num_microbatches": 2}),
    ],
)
def test_gradients_of_chunks_move_as_shards_to_those_of_the_head(topology, stage, options):
    """Once they were gathered on the way, in steps of the torus; beside `model` hidden states' were summed apart."""
    options = {"topology": topology, "num_examples": 2} | options
    whole, chunked = (compile_buffers(stage, measure_buffers.WIDE, chunk_size=size, **options) for size in (None, 4096))
    # Seen: 1.02, 1.07 and 1.02; before 1.47, 2.18 and 1.55.
    assert chunked.sent_bytes <= 1.08 * whole.sent_bytes
    assert chunked.heap_bytes <= whole.heap_bytes


def test_chunked_logits_take_a_part_of_the_memory_and_no_more_traffic():
    whole, chunked = (compile_buffers(3, WIDE, topology=TOPOLOGY, chunk_size=size) for size in (None, CHUNK_SIZE))
    logits_bytes = 2 * NUM_EXAMPLES * WIDE.seq_len * WIDE.vocab_size  # bfloat16
    assert whole.heap_bytes >= logits_bytes
    # Seen: 0.37 of them.
    assert chunked.heap_bytes <= whole.heap_bytes - 0.3 * logits_bytes
    # What is over: gradients of the head that are summed by feature and kept by token, a shard to move.
    assert chunked.sent_bytes <= 1.05 * whole.sent_bytes

"""Measures how the buffers of a compiled GPT step grow with depth.

It needs the TPU compiler (`pip install "jax[tpu]"`), not a TPU. The ZeRO paper's constant-size buffers (C_B, section
6.2) are the temporaries without those that have an entry for each layer by design: the inputs of the blocks, saved for
the backward pass, and shards of gradients and of cast params. `--loss` compares full and chunked logits instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from typing import Any

import compile_only  # before JAX

import zero_jax as zero
from zero_jax import comms
from zero_jax.hlo import arrays, parse_shape, peak
from zero_jax.models import gpt
from zero_jax.training import losses

TOPOLOGY = "v5p:2x2x4"
SHALLOW = gpt.GPTConfig(vocab_size=1024, seq_len=1024, num_layers=4, d_model=1024, num_heads=8)
WIDE = gpt.GPTConfig(vocab_size=32768, seq_len=512, num_layers=1, d_model=512, num_heads=8)
# Enough that not all temporaries fit on the chip, whose memory the figures leave out.
NUM_EXAMPLES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffers:
    """Memory and traffic of a compiled step, bytes per device.

    Attributes:
      heap_bytes: The temporaries at their peak, without those on the chip.
      stacked_bytes: Those of them that have an entry for each layer.
      largest_collective_bytes: The largest buffer of a collective.
      sent_bytes: Bytes that a device sends in a step.
    """

    heap_bytes: int
    stacked_bytes: int
    largest_collective_bytes: int
    sent_bytes: float

    @property
    def rest_bytes(self) -> int:
        """The temporaries that are not stacked."""
        return self.heap_bytes - self.stacked_bytes


@functools.cache
def compile_buffers(
    stage: int,
    config: gpt.GPTConfig,
    *,
    topology: str = TOPOLOGY,
    chunk_size: int | None = None,
    model: int = 1,
    num_examples: int = NUM_EXAMPLES,
    num_microbatches: int = 1,
) -> Buffers:
    """Compiles a bf16 train step with adamw; `chunk_size` None computes the full logits."""
    mesh = zero.make_mesh(topology=topology, model=model)
    specs = gpt.param_specs(config, model_size=model) if model > 1 else None
    zero_config = zero.ZeroConfig(
        stage=stage, precision="bf16", param_specs=specs, num_microbatches=num_microbatches, overlap=False
    )
    token_losses: Any = gpt.whole_logits
    if chunk_size is not None:
        token_losses = functools.partial(
            losses.softmax_cross_entropy_with_integer_labels, mesh=mesh, chunk_size=chunk_size
        )
    batch_size = num_examples * num_microbatches * mesh.size // model
    loss_fn = gpt.loss_fn(config, token_losses=token_losses)
    compiled = compile_only.lower_step(config, batch_size, mesh=mesh, config=zero_config, loss_fn=loss_fn)[1].compile()
    heap, traffic = peak(compiled), comms.measure(compiled, mesh=mesh)
    stacked = [x for x in heap.live if next(arrays(parse_shape(x.shape))).dims[:1] == (config.num_layers,)]
    return Buffers(
        heap_bytes=heap.peak_bytes,
        stacked_bytes=sum(buffer.num_bytes for buffer in stacked),
        largest_collective_bytes=int(traffic.largest_buffer_bytes),
        sent_bytes=traffic.sent_bytes,
    )


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--layers", type=int, nargs="+", help="depths; by default 4, 16 and 64, with --loss 1")
    parser.add_argument("--loss", action="store_true", help="full and chunked logits of a model with a large head")
    parser.add_argument("--vocab-size", type=int)
    parser.add_argument("--d-model", type=int)
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--model", type=int, default=1)
    parser.add_argument("--topology", default=TOPOLOGY)
    parser.add_argument("--examples", type=int, default=NUM_EXAMPLES, help="of a device and microbatch")
    parser.add_argument("--microbatches", type=int, default=1)
    args = parser.parse_args()
    sizes = {name: getattr(args, name) for name in ("vocab_size", "d_model", "seq_len") if getattr(args, name)}
    base, depths = (WIDE, [1]) if args.loss else (SHALLOW, [4, 16, 64])
    configs = [dataclasses.replace(base, num_layers=n, **sizes) for n in args.layers or depths]
    options = {
        "topology": args.topology,
        "model": args.model,
        "num_examples": args.examples,
        "num_microbatches": args.microbatches,
    }
    print("stage layers chunk  temporaries  stacked  rest  largest collective  sent (MB)")
    for stage, config in itertools.product(args.stages, configs):
        for chunk_size in (None, losses.CHUNK_SIZE) if args.loss else (None,):
            found = compile_buffers(stage, config, chunk_size=chunk_size, **options)
            row = [found.heap_bytes, found.stacked_bytes, found.rest_bytes]
            row += [found.largest_collective_bytes, found.sent_bytes]
            print(stage, config.num_layers, chunk_size, *(f"{size / 1e6:.1f}" for size in row), flush=True)


if __name__ == "__main__":
    main()

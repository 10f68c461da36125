"""Measures what a GPT's step sends with its layers as stages of a pipeline, and what it needs, compiled for TPU.

python scripts/measure_pipeline.py --topology v5p:2x2x4 --pipe 4 --microbatches 8 32 --stage 1
python scripts/measure_pipeline.py --topology 2xv5e:4x4 --pipe 2 --microbatches 8 --stage 3 --pipeline 1f1b

It needs the TPU compiler (`pip install "jax[tpu]"`), not a TPU.
"""

import argparse
import functools
import itertools
from typing import Any

import compile_only  # noqa: F401 - before JAX
import jax
import jax.numpy as jnp
import optax

import zero_jax as zero
from zero_jax.models import gpt

# 109M params: 8 layers, and a vocabulary that is a thirteenth of them.
CONFIG = gpt.GPTConfig(
    vocab_size=8192, seq_len=1024, num_layers=8, d_model=1024, num_heads=8, position="rotary", scan=True, remat=False
)


def measure(topology: str, *, pipe: int, batch_size: int, **fields: Any) -> dict[str, Any]:
    """Compiles a step; returns the bytes that a device sends by kind and axes, and its temporaries."""
    mesh, tx = zero.make_mesh(topology=topology, pipe=pipe), optax.adamw(3e-4)
    config = zero.ZeroConfig(precision="bf16", **fields)
    state = zero.abstract_state(functools.partial(gpt.init, CONFIG), tx, mesh=mesh, config=config)
    step = zero.make_train_step(gpt.loss_fn(CONFIG), tx, mesh=mesh, config=config)
    tokens = jax.ShapeDtypeStruct((batch_size, CONFIG.seq_len), jnp.int32)
    compiled = step.lower(state, {"inputs": tokens, "targets": tokens}).compile()
    data, k = mesh.size // pipe, config.num_microbatches
    layers, others = (sum(x.size for x in jax.tree.leaves(part)) for part in (
        state.params["blocks"], {name: x for name, x in state.params.items() if name != "blocks"}
    ))  # fmt: skip
    shapes = zero.pipeline_report(gpt.loss_fn(CONFIG), state.params, {"inputs": tokens, "targets": tokens}, mesh=mesh,
                                  config=config)  # fmt: skip
    num_ticks = shapes.num_ticks
    microbatch_bytes = 2 * batch_size // (data * k) * CONFIG.seq_len * CONFIG.d_model
    return {
        "report": zero.comms.measure(compiled, mesh=mesh),
        "microbatch_bytes": microbatch_bytes,
        "least_activation_bytes": 2 * num_ticks * microbatch_bytes if pipe > 1 else 0,
        "layer_bytes": 4 * layers // pipe * (data - 1) / data,
        "other_bytes": 4 * others * (mesh.size - 1) / mesh.size,
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "peak_bytes": compiled.memory_analysis().peak_memory_in_bytes,
    }


def main() -> None:
    """Prints the traffic of each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5p:2x2x4")
    parser.add_argument("--pipe", type=int, default=4)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8])
    parser.add_argument("--stage", type=int, nargs="+", default=[1])
    parser.add_argument("--remat", default="own")
    parser.add_argument("--pipeline", nargs="+", default=["gpipe", "1f1b"])
    parser.add_argument("--batch-size", type=int, help="examples of a step; else --microbatch-size of each microbatch")
    parser.add_argument("--microbatch-size", type=int, default=16)
    args = parser.parse_args()
    for stage, k, schedule in itertools.product(args.stage, args.microbatches, args.pipeline):
        fields = {"stage": stage, "num_microbatches": k, "remat": args.remat, "pipeline": schedule}
        batch_size = args.batch_size or args.microbatch_size * k
        found = measure(args.topology, pipe=args.pipe, batch_size=batch_size, **fields)
        print(f"{schedule}, stage {stage}, pipe {args.pipe}, {k} microbatches of {batch_size}, MB a device and step")
        sent: dict[str, float] = {}
        for row in found["report"].rows:
            what = "params of layers and their gradients, " if row.param and row.axes == ("pipe",) else ""
            name = f"{what}{row.kind} over {'+'.join(row.axes)}, {row.dtype}"
            sent[name] = sent.get(name, 0.0) + row.total_sent_bytes
        for name, num_bytes in sorted(sent.items(), key=lambda item: -item[1]):
            print(f"  {name}: {num_bytes / 1e6:.1f}")
        for name in ("microbatch", "least_activation", "layer", "other", "temp", "peak"):
            print(f"  {name.replace('_', ' ')}: {found[f'{name}_bytes'] / 1e6:.1f}", flush=True)


if __name__ == "__main__":
    main()

"""Measures what a GPT's step sends with its layers as stages of a pipeline, and what it needs, compiled for TPU.

python scripts/measure_pipeline.py --topology v5p:2x2x4 --pipe 4 --microbatches 8 32 --stage 1
python scripts/measure_pipeline.py --topology 2xv5e:4x4 --pipe 2 --microbatches 8 --stage 3 --pipeline 1f1b --quick

It needs the TPU compiler (`pip install "jax[tpu]"`), not a TPU.
"""

import argparse
import dataclasses
import functools
import itertools
from typing import Any

import compile_only  # before JAX
import optax

import zero_jax as zero
from zero_jax.models import gpt
from zero_jax.transforms import resolve_schedule

# 109M params: 8 layers, and a vocabulary that is a thirteenth of them.
CONFIG = gpt.GPTConfig(
    vocab_size=8192, seq_len=1024, num_layers=8, d_model=1024, num_heads=8, position="rotary", scan=True, remat=False
)


def measure(topology: str, model: gpt.GPTConfig, *, pipe: int, batch_size: int, quick: bool, **fields: Any) -> Any:
    """Compiles a step, and returns its plan."""
    return zero.plan(
        gpt.loss_fn(model),
        functools.partial(gpt.init, model),
        optax.adamw(3e-4),
        batch=compile_only.batch(batch_size, model.seq_len),
        topology=topology,
        config=zero.ZeroConfig(precision="bf16", **fields),
        pipe=pipe,
        quick=quick,
        log=lambda _: None,
    )


def name_of(row: Any) -> str:
    """Returns what a row of the traffic is summed by."""
    what = "params of layers and their gradients, " if row.param and row.axes == ("pipe",) else ""
    return f"{what}{row.kind} over {'+'.join(row.axes)}, {row.dtype}"


def main() -> None:
    """Prints the traffic and the memory of each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5p:2x2x4")
    parser.add_argument("--pipe", type=int, default=4)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8])
    parser.add_argument("--stage", type=int, nargs="+", default=[1])
    parser.add_argument("--layers", type=int, default=CONFIG.num_layers)
    parser.add_argument("--remat", default="own")
    parser.add_argument("--checkpointed", action="store_true", help="layers of the model are in jax.checkpoint")
    parser.add_argument("--pipeline", nargs="+", default=["gpipe", "1f1b"])
    parser.add_argument("--batch-size", type=int, help="examples of a step; else --microbatch-size of each microbatch")
    parser.add_argument("--microbatch-size", type=int, default=16)
    parser.add_argument("--quick", action="store_true", help="stop the compiler before it generates code")
    args = parser.parse_args()
    model = dataclasses.replace(CONFIG, remat=args.checkpointed, num_layers=args.layers)
    for stage, k, schedule in itertools.product(args.stage, args.microbatches, args.pipeline):
        fields = {"stage": stage, "num_microbatches": k, "remat": args.remat, "pipeline": schedule}
        batch_size = args.batch_size or args.microbatch_size * k
        plan = measure(args.topology, model, pipe=args.pipe, batch_size=batch_size, quick=args.quick, **fields)
        print(f"{schedule}, stage {stage}, {plan.mesh}, {k} microbatches of {batch_size}, MB a device and step")
        if plan.refusal:
            print(f"  refused: {plan.refusal}")
            continue
        for name, num_bytes in plan.comms.sent_by(name_of).items():
            print(f"  {name}: {num_bytes / 1e6:.1f}")
        # Of all ticks forward and backward, if each device sent a microbatch in each.
        microbatch_bytes = 2 * batch_size // k * model.seq_len * model.d_model * args.pipe // plan.num_devices
        all_ticks = 2 * resolve_schedule(schedule).num_ticks(args.pipe, k) * microbatch_bytes
        print(f"  microbatch: {microbatch_bytes / 1e6:.1f}, all ticks: {all_ticks / 1e6:.1f}")
        memory = f"heap {plan.memory.heap_bytes / 1e6:.1f}, needed {plan.needed_bytes / 1e6:.1f}"
        print(f"  {memory}; estimated step {plan.time.step_seconds if plan.time else 0:.4f} s", flush=True)


if __name__ == "__main__":
    main()

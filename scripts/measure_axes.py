"""Measures traffic by mesh axis and memory of a GPT step with tensor parallelism, compiled for TPU.

python scripts/measure_axes.py --stage 0 1 2 3
python scripts/measure_axes.py --stage 3 --sequence
"""

import argparse
import json

import compile_only  # before JAX

import zero_jax as zero
from zero_jax.models import gpt
from zero_jax.training.sequence_sharding import sequence_parallel

CONFIG = gpt.GPTConfig(vocab_size=16384, seq_len=512, num_layers=2, d_model=1024, num_heads=8, position="learned")
PSI_MOVED = {0: 2, 1: 2, 2: 2, 3: 3}


def measure(args: argparse.Namespace, stage: int) -> dict:
    """Compiles a step with 4 examples a device and microbatch; returns figures in bytes per device."""
    mesh = zero.make_mesh(topology=args.topology, model=args.model, replica=args.replica)
    num_batch = mesh.size // args.model
    num_data = num_batch // args.replica
    config = zero.ZeroConfig(
        overlap=False,
        stage=stage,
        precision="bf16",
        num_microbatches=args.microbatches,
        param_specs=gpt.param_specs(CONFIG),
    )
    loss_fn = gpt.loss_fn(CONFIG, place=sequence_parallel(mesh)) if args.sequence else None
    num_examples = 4 * num_batch * args.microbatches
    compiled = compile_only.lower_step(CONFIG, num_examples, mesh=mesh, config=config, loss_fn=loss_fn)[1].compile()
    report = zero.comms.measure(compiled, mesh=mesh)
    memory = compiled.memory_analysis()
    windowed = sum(row.total_sent_bytes for row in report.rows if "windowed" in row.kind)
    unit = 2 * 4 * args.microbatches * CONFIG.seq_len * CONFIG.d_model * (args.model - 1) / args.model
    return {
        "stage": stage,
        "sequence": args.sequence,
        "num_microbatches": args.microbatches,
        "sent_bytes_by_axes": dict(report.by_axes),
        "windowed_bytes": windowed,
        "ideal_data_bytes": PSI_MOVED[stage] * 2 * CONFIG.num_params / args.model * (num_data - 1) / num_data,
        "model_units": report.by_axes.get("model", 0) / unit if unit else 0,
        "paper_model_units": 12 * CONFIG.num_layers,
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
    }


def main() -> None:
    """Prints a line for each stage, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5p:2x2x4")
    parser.add_argument("--stage", type=int, nargs="+", default=[3], choices=sorted(PSI_MOVED))
    parser.add_argument("--model", type=int, default=4, help="size of the model axis")
    parser.add_argument("--replica", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--sequence", action="store_true", help="shard the residual stream over the sequence")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for stage in args.stage:
        row = measure(args, stage)
        if args.json:
            print(json.dumps(row), flush=True)
            continue
        sent = ", ".join(f"{axes} {num / 1e6:.1f}" for axes, num in row["sent_bytes_by_axes"].items() if num > 1e4)
        print(
            f"stage {stage}: MB sent over {sent} ({row['windowed_bytes'] / 1e6:.1f} windowed; "
            f"data's ideal {row['ideal_data_bytes'] / 1e6:.1f}); {row['model_units']:.1f} units over model (the "
            f"paper: {row['paper_model_units']}); MB: arguments {row['argument_bytes'] / 1e6:.1f}, "
            f"temp {row['temp_bytes'] / 1e6:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()

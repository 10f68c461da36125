"""Compares adapters with training all params: what a device holds and sends, from programs compiled for TPUs.

python scripts/measure_adapters.py --topology v5p:2x2x4 --stage 0 3 --base none nf4
"""

import argparse

import compile_only  # before JAX
import jax

import zero_jax as zero
from zero_jax.models import gpt

ROW = "{:>5} {:>9} {:>10} {:>14} {:>11} {:>13} {:>12}"


def row(config, base, *, stage, mesh, rank):
    """Returns the figures of a step: of all params if `base` is none, else of adapters."""
    settings = {"mesh": mesh, "config": zero.ZeroConfig(stage=stage, precision="bf16", overlap=False)}
    if base != "none":
        lora = zero.Lora(rules={"blocks/*": "sio"}, rank=rank, base=base)
        settings["init_fn"] = lambda key: lora.init(gpt.init(config, key), key)
        settings["loss_fn"] = lora.loss_fn(gpt.loss_fn(config))
    state, lowered = compile_only.lower_step(config, mesh.size, **settings)
    compiled = lowered.compile()
    analysis = compiled.memory_analysis()
    num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.opt_state))
    held = (num_bytes, analysis.argument_size_in_bytes, analysis.temp_size_in_bytes)
    sent = zero.comms.measure(compiled).sent_bytes
    return sum(x.size for x in jax.tree.leaves(state.params)), *(f"{x / 1e6:.2f} MB" for x in (*held, sent))


def main():
    """Prints a row for each stage and base."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="v5p:2x2x4")
    parser.add_argument("--stage", type=int, nargs="+", default=[0, 3])
    parser.add_argument(
        "--base", nargs="+", default=["none", "nf4"], choices=["none", "own", "bfloat16", "int8", "nf4", "nf4_double"]
    )
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--num-layers", type=int, default=6)
    parser.add_argument("--d-model", type=int, default=512)
    options = parser.parse_args()
    sizes = {"num_layers": options.num_layers, "d_model": options.d_model, "num_heads": options.d_model // 64}
    config = gpt.GPTConfig(vocab_size=512, seq_len=256, **sizes)
    mesh = zero.make_mesh(topology=options.topology)
    print(ROW.format("stage", "base", "trained", "opt_state", "arguments", "temporaries", "sent"))
    for stage in options.stage:
        for base in options.base:
            num_params, *figures = row(config, base, stage=stage, mesh=mesh, rank=options.rank)
            print(ROW.format(stage, base, f"{num_params:,}", *figures), flush=True)


if __name__ == "__main__":
    main()

"""Measures what a GPT step sends inside TPU slices or GPU hosts and between them, with replicas or a secondary shard.

python scripts/measure_replicas.py --topology 2xv5p:4x4x4 --replica 2
python scripts/measure_replicas.py --topology h100:4x8 --secondary --microbatches 4
python scripts/measure_replicas.py --topology 2xv5e:4x4 --replica 2 --quantize-grads int8 --quantize-grads-over replica
"""

import argparse
import dataclasses
import functools
from typing import Any

import compile_only  # before JAX
import optax

import zero_jax as zero
from zero_jax.models import gpt

CONFIG = gpt.GPTConfig(vocab_size=4096, seq_len=128, num_layers=2, d_model=1024, num_heads=16, position="learned")


def measure(
    topology: str, *, replica: int = 1, model: int = 1, microbatches: int = 1, compiles: bool = True, **fields: Any
) -> dict:
    """Compiles a step; returns bytes by network, `(measured, formula)`, and the memory estimate.

    Without what moves over `model`, which the formula does not have; unless it compiles, nothing is measured.
    """
    mesh = zero.make_mesh(topology=topology, replica=replica, model=model)
    fields |= {"param_specs": gpt.param_specs(CONFIG)} if model > 1 else {}
    config = zero.ZeroConfig(precision="bf16", num_microbatches=microbatches, overlap=False, **fields)
    tx, measured = optax.adamw(3e-4), {}
    state = zero.abstract_state(functools.partial(gpt.init, CONFIG), tx, mesh=mesh, config=config)
    if compiles:
        compiled = compile_only.lower_step(CONFIG, mesh.size * microbatches, mesh=mesh, config=config)[1].compile()
        report = zero.comms.measure(compiled, mesh=mesh)
        rows = tuple(row for row in report.rows if "model" not in row.axes)
        measured = dataclasses.replace(report, rows=rows).by_network
    formula = zero.comms.estimate(state, mesh=mesh, config=config, tx=tx).by_network
    networks = {name: (measured.get(name, 0.0), formula.get(name, 0.0)) for name in {**measured, **formula}}
    return {"networks": networks, "memory": zero.memory.estimate(state, mesh=mesh, config=config, tx=tx)}


def main() -> None:
    """Prints bytes by network, measured and by formula."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="2xv5p:4x4x4")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--replica", type=int, default=1)
    parser.add_argument("--model", type=int, default=1)
    parser.add_argument("--secondary", action="store_true")
    parser.add_argument("--quantize-grads")
    parser.add_argument("--quantize-grads-over")
    parser.add_argument("--quantize-error-feedback", action="store_true")
    parser.add_argument("--microbatches", type=int, default=1)
    found = measure(**vars(parser.parse_args()))
    for network, (sent, ideal) in found["networks"].items():
        ratio = f", {sent / ideal:.3f} x" if ideal else ""
        print(f"{network}: {sent / 1e6:.3f} MB a device and step, formula {ideal / 1e6:.3f} MB{ratio}")
    memory = found["memory"]
    parts = {"secondary shard": memory.secondary_bytes, "errors of gradients": memory.by_group.get("grad_errors", 0)}
    shown = ", ".join(f"{name} {size / 1e6:.2f} MB" for name, size in parts.items())
    print(f"state {memory.state_bytes / 1e6:.2f} MB a device, {shown}")


if __name__ == "__main__":
    main()

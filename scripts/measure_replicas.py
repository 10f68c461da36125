"""Measures what a GPT step sends inside TPU slices or GPU hosts and between them, with replicas or a secondary shard.

python scripts/measure_replicas.py --topology 2xv5p:4x4x4 --replica 2
python scripts/measure_replicas.py --topology h100:4x8 --secondary --microbatches 4
"""

import argparse
import functools
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-16")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import optax

import zero_jax as zero
from zero_jax.models import gpt

CONFIG = gpt.GPTConfig(vocab_size=4096, seq_len=128, num_layers=2, d_model=1024, num_heads=16, position="learned")


def main() -> None:
    """Prints bytes by network, measured and by formula."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="2xv5p:4x4x4")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--replica", type=int, default=1)
    parser.add_argument("--secondary", action="store_true")
    parser.add_argument("--microbatches", type=int, default=1)
    args = parser.parse_args()
    mesh = zero.make_mesh(topology=args.topology, replica=args.replica)
    config = zero.ZeroConfig(
        stage=args.stage,
        precision="bf16",
        num_microbatches=args.microbatches,
        secondary=args.secondary,
        overlap=False,
    )
    tx = optax.adamw(3e-4)
    state = zero.abstract_state(functools.partial(gpt.init, CONFIG), tx, mesh=mesh, config=config)
    step = zero.make_train_step(gpt.loss_fn(CONFIG), tx, mesh=mesh, config=config)
    tokens = jax.ShapeDtypeStruct((mesh.size * args.microbatches, CONFIG.seq_len), jnp.int32)
    compiled = step.lower(state, {"inputs": tokens, "targets": tokens}).compile()
    measured = zero.comms.measure(compiled, mesh=mesh).by_network
    formula = zero.comms.estimate(state, mesh=mesh, config=config, tx=tx).by_network
    for network, ideal in formula.items():
        sent = measured.get(network, 0.0)
        print(f"{network}: {sent / 1e6:.3f} MB a device and step, formula {ideal / 1e6:.3f} MB, {sent / ideal:.3f} x")
    estimate = zero.memory.estimate(state, mesh=mesh, config=config, tx=tx)
    print(
        f"state {estimate.state_bytes / 1e6:.2f} MB a device, secondary shard {estimate.secondary_bytes / 1e6:.2f} MB"
    )


if __name__ == "__main__":
    main()

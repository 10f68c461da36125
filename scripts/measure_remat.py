"""Measures memory and traffic of a GPT's gradients with each remat policy, compiled for TPU.

It needs the TPU compiler (`pip install "jax[tpu]"`), not a TPU. The model has no `jax.checkpoint` of its own without
`--own`, and is sharded over `model` as Megatron shards it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools

import compile_only  # before JAX
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

import zero_jax as zero
from zero_jax.models import gpt
from zero_jax.transforms.remat.transform import POLICIES, rematerialize

GPT = gpt.GPTConfig(vocab_size=512, seq_len=1024, num_layers=6, d_model=512, num_heads=8, remat=False)
BATCH_SIZE = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledGrads:
    """Figures of a compiled train step, bytes per device."""

    temp_bytes: int
    host_bytes: int
    model_bytes: int  # sent over `model`
    data_bytes: int
    text: str


@functools.cache
def compile_grads(policy: str, *, config: gpt.GPTConfig = GPT, model: int = 4, gathered: bool = False) -> CompiledGrads:
    """Compiles the gradients of a GPT's loss in bfloat16; `gathered` if the params are sharded over `data` too."""
    mesh = zero.make_mesh(topology="v5p:2x2x4", model=model)
    specs = gpt.param_specs(config)
    loss_fn = rematerialize(gpt.loss_fn(config), policy, mesh=mesh, specs=specs)
    params = jax.eval_shape(functools.partial(gpt.init, config), jax.random.key(0))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    if gathered:
        zero_config = zero.ZeroConfig(stage=3, param_specs=specs)
        shardings = zero.state_shardings({"params": params}, mesh=mesh, config=zero_config)["params"]
        loss_fn = zero.gather_on_use(loss_fn, shardings, mesh=mesh)
    params = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=s), params, shardings)
    batch = compile_only.batch(BATCH_SIZE, config.seq_len, zero.batch_sharding(mesh))
    grads = jax.jit(jax.grad(lambda params, batch: loss_fn(params, batch)[0]), out_shardings=shardings)
    compiled = grads.lower(params, batch).compile()
    memory = compiled.memory_analysis()
    sent = zero.comms.measure(compiled, mesh=mesh).by_axes
    return CompiledGrads(
        temp_bytes=memory.temp_size_in_bytes,
        host_bytes=memory.host_temp_size_in_bytes,
        model_bytes=int(sent.get("model", 0)),
        data_bytes=int(sent.get("data", 0)),
        text=compiled.as_text(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", nargs="*", default=[name for name in POLICIES if not name.startswith("own")])
    parser.add_argument("--model", type=int, default=4)
    parser.add_argument("--gathered", action="store_true", help="shard the params over data too, and gather on use")
    parser.add_argument("--loop", action="store_true", help="run the layers by a Python loop rather than a scan")
    parser.add_argument("--own", action="store_true", help="let the model have its own jax.checkpoint")
    parser.add_argument("--text", help="a file to write the last program's text to")
    args = parser.parse_args()
    config = dataclasses.replace(GPT, scan=not args.loop, remat=args.own)
    print(f"{'policy':<22}{'temp MB':>10}{'host MB':>10}{'model MB':>10}{'data MB':>10}", flush=True)
    for policy in args.policies:
        program = compile_grads(policy, config=config, model=args.model, gathered=args.gathered)
        sizes = (program.temp_bytes, program.host_bytes, program.model_bytes, program.data_bytes)
        print(f"{policy:<22}" + "".join(f"{size / 1e6:10.1f}" for size in sizes), flush=True)
        if args.text:
            with open(args.text, "w", encoding="utf-8") as file:
                file.write(program.text)


if __name__ == "__main__":
    main()

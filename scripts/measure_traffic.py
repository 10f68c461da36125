"""Measures traffic and memory of a 271M-parameter GPT's train steps, compiled for TPU.

It needs the TPU compiler (`pip install "jax[tpu]"`), not a TPU. Ideal traffic is 2 psi elements at stages 1 and 2 and
3 psi at stage 3, in bf16, times (n - 1) / n for n devices.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from typing import Any

import compile_only  # before JAX
import gpt_linen
import gpt_nnx
import jax
import jax.numpy as jnp
import optax
from hand_written import loss_with_gathers, make_step

import zero_jax as zero
from zero_jax import hlo
from zero_jax.core.text_tables import format_bytes
from zero_jax.models import gpt

GPT_271M = gpt.PRESETS["gpt-271m"]
# A smaller model of the same form, which compiles in a third of the time.
GPT_15M = dataclasses.replace(GPT_271M, vocab_size=4096, seq_len=128, d_model=512, num_heads=4)
PSI_MOVED = {1: 2, 2: 2, 3: 3}


def _make_dict(config: gpt.GPTConfig) -> Any:
    return functools.partial(gpt.init, config), gpt.loss_fn(config)


MODELS = {
    "scanned": _make_dict,
    "loop": lambda config: _make_dict(dataclasses.replace(config, scan=False)),
    "linen scanned": gpt_linen.make,
    "linen loop": lambda config: gpt_linen.make(dataclasses.replace(config, scan=False)),
    "nnx scanned": gpt_nnx.make,
    "nnx loop": lambda config: gpt_nnx.make(dataclasses.replace(config, scan=False)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """Figures of a compiled train step, bytes per device."""

    num_params: int
    num_devices: int
    compile_seconds: float
    collectives: tuple[hlo.Collective, ...]
    argument_bytes: int
    alias_bytes: int
    temp_bytes: int

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends in a step."""
        return hlo.sent_bytes(self.collectives)

    def ratio_to_ideal(self, psi_moved: int) -> float:
        """Bytes sent over `psi_moved` x 2 bytes x params x (n - 1) / n."""
        return self.sent_bytes / (psi_moved * 2 * self.num_params * (self.num_devices - 1) / self.num_devices)


def _read(state: zero.TrainState, lowered: Any, num_devices: int) -> CompiledStep:
    start = time.perf_counter()
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    return CompiledStep(
        num_params=sum(x.size for x in jax.tree.leaves(state.params)),
        num_devices=num_devices,
        compile_seconds=time.perf_counter() - start,
        collectives=hlo.collectives(compiled),
        argument_bytes=memory.argument_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
    )


@functools.cache
def compile_step(
    topology: str,
    stage: int,
    num_microbatches: int = 1,
    model: str = "scanned",
    *,
    gpt_config: gpt.GPTConfig = GPT_271M,
) -> CompiledStep:
    """Compiles zero_jax's step for two examples a device and microbatch, in bf16 with adamw."""
    mesh = zero.make_mesh(topology=topology)
    config = zero.ZeroConfig(stage=stage, precision="bf16", num_microbatches=num_microbatches, overlap=False)
    functions = dict(zip(("init_fn", "loss_fn"), MODELS[model](gpt_config), strict=True))
    num_examples = 2 * mesh.size * num_microbatches
    return _read(*compile_only.lower_step(gpt_config, num_examples, mesh=mesh, config=config, **functions), mesh.size)


@functools.cache
def compile_by_hand(topology: str) -> CompiledStep:
    """Compiles stage 3 of the scanned model with hand-written gathers."""
    tx = optax.adamw(3e-4)
    mesh = zero.make_mesh(topology=topology)
    config = zero.ZeroConfig(stage=3, precision="bf16")
    state = zero.abstract_state(functools.partial(gpt.init, GPT_271M), tx, mesh=mesh, config=config)
    shardings, opt_shardings = (jax.tree.map(lambda x: x.sharding, t) for t in (state.params, state.opt_state))
    loss_fn = loss_with_gathers(GPT_271M, mesh, jax.tree.map(lambda s: s.spec, shardings))
    step = make_step(
        loss_fn, tx, params=shardings, sharded=shardings, opt_state=opt_shardings, pin=True, dtype=jnp.bfloat16
    )
    batch = compile_only.batch(2 * mesh.size, GPT_271M.seq_len, zero.batch_sharding(mesh))
    return _read(state, step.lower(state.params, state.opt_state, batch), mesh.size)


def main() -> None:
    """Prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", nargs="+", default=["v5p:2x2x4"], help="such as v5p:2x2x4 v5p:4x4x4")
    parser.add_argument("--stage", type=int, nargs="+", default=[1, 2, 3], choices=sorted(PSI_MOVED))
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--model", nargs="+", default=["scanned"], choices=list(MODELS))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    if not args.json:
        heads = f"{'sent / psi':>12}{'of ideal':>10}{'arguments':>12}{'temp':>12}"
        print(f"{'topology':<12}{'stage':>6}  {'model':<14}{heads}")
    for topology in args.topology:
        for model in args.model:
            for stage in args.stage:
                print(f"compiling stage {stage}, {model}, for {topology} ...", file=sys.stderr, flush=True)
                program = compile_step(topology, stage, args.microbatches, model)
                row = {
                    "topology": topology,
                    "stage": stage,
                    "num_microbatches": args.microbatches,
                    "model": model,
                    "num_params": program.num_params,
                    "sent_bytes": program.sent_bytes,
                    "ratio_to_ideal": program.ratio_to_ideal(PSI_MOVED[stage]),
                    "argument_bytes": program.argument_bytes,
                    "temp_bytes": program.temp_bytes,
                    "compile_seconds": program.compile_seconds,
                }
                rows.append(row)
                if not args.json:
                    print(
                        f"{topology:<12}{stage:>6}  {model:<14}{program.sent_bytes / program.num_params:>12.3f}"
                        f"{row['ratio_to_ideal']:>10.3f}{format_bytes(program.argument_bytes):>12}"
                        f"{format_bytes(program.temp_bytes):>12}",
                        flush=True,
                    )
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()

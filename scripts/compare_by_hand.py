"""Compares zero_jax's stage 3 with a train step whose shardings are written by hand, for the same loss.

    python scripts/compare_by_hand.py scripts/stranger_models.py --topology v5p:2x2x4 --models gan resnet

The file has a dict `MODELS`: by name the loss function, the function that makes params of a key, and the shapes of a
batch. By hand, params and optimizer state are sharded over `data` along their largest dim that it divides, the batch
and each product's activations along their examples; params are cast to bf16 as shards, gradients and results are
constrained to theirs, and XLA partitions the rest. Both steps have the same optimizer, skip gradients that are not
finite, and are compiled with zero_jax's compiler options, by the compiler of the topology; no devices are needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import compile_only  # noqa: F401  before JAX
import jax
import jax.numpy as jnp
import optax
from hand_written import make_step
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import zero_jax as zero
from zero_jax import hlo
from zero_jax.core.text_tables import format_bytes
from zero_jax.planning.job import CompiledText, Job, compile_lowered
from zero_jax.planning.process import CompileOptions, call_for
from zero_jax.planning.step_time import ModelWork, estimate_time
from zero_jax.planning.user_modules import resolve
from zero_jax.program.jaxprs import bind
from zero_jax.program.loss import with_pass
from zero_jax.program.walk import Rewriting
from zero_jax.sharding.topology import parse

CONFIG = zero.ZeroConfig(stage=3, precision="bf16")
TX = optax.adamw(1e-3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFigures:
    """Figures of a program, for a device and step."""

    sent_bytes: float
    memory_bytes: int  # arguments and temporaries
    seconds: float


class _Pinned(Rewriting):
    """Constrains the results of products with the batch's examples in front to these."""

    def __init__(self, sharding: NamedSharding, size: int):
        super().__init__()
        self.sharding, self.size = sharding, size

    def changes(self, eqn: Any) -> bool:
        is_product = eqn.primitive.name in ("dot_general", "conv_general_dilated")
        return is_product and eqn.outvars[0].aval.shape[:1] == (self.size,)

    def changed(self, eqn: Any, values: list[Any]) -> list[Any]:
        return [lax.with_sharding_constraint(x, self.sharding) for x in bind(eqn, values)]


def by_hand(job: Job, *, on_phase: Callable[[str], None]) -> StepFigures:
    """Compiles the step by hand in this process."""
    mesh = job.mesh()
    examples = NamedSharding(mesh, PartitionSpec("data"))

    def sharding(x: Any) -> NamedSharding:
        dims = [i for i, size in enumerate(x.shape) if size % mesh.size == 0]
        largest = max(dims, key=lambda i: x.shape[i], default=None)
        return NamedSharding(mesh, PartitionSpec(*("data" if i == largest else None for i in range(len(x.shape)))))

    shaped = functools.partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x)))
    params = shaped(jax.eval_shape(job.init_fn, jax.random.key(0)))
    opt_state = shaped(jax.eval_shape(job.tx.init, params))
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=examples), job.batch)
    shardings, opt_shardings = (jax.tree.map(lambda x: x.sharding, tree) for tree in (params, opt_state))
    pinned = lambda traced: traced.evaluated(  # noqa: E731
        lambda leaves, _: _Pinned(examples, job.batch_size).run(traced.closed, leaves, None)
    )
    loss_fn = with_pass(job.loss_fn, pinned)

    def cast_loss(compute: Any, batch: Any) -> tuple[jax.Array, None]:
        compute = jax.tree.map(lax.with_sharding_constraint, compute, shardings)
        narrow = lambda x: x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
        batch = jax.tree.map(lambda x: lax.with_sharding_constraint(narrow(x), examples), batch)
        return loss_fn(compute, batch), None

    step = make_step(
        cast_loss,
        job.tx,
        params=shardings,
        sharded=shardings,
        opt_state=opt_shardings,
        pin=True,
        dtype=jnp.bfloat16,
        skip_nonfinite=True,
    )
    on_phase("lowering")
    lowered = step.lower(params, opt_state, batch)
    on_phase("compiling")
    saved, has_code = compile_lowered(lowered, zero.compiler_options(mesh=mesh, config=job.config), quick=True)
    program = CompiledText(**saved, args_info=lowered.args_info, compile_seconds=0, from_cache=False, has_code=has_code)
    work = ModelWork(model_flops=0, num_tokens=job.batch_size)
    memory = zero.memory.measure(program, layout=program.layout)
    time = estimate_time(program.program, work, mesh=mesh, topology=parse(job.topology), has_code=has_code)
    return StepFigures(
        sent_bytes=hlo.sent_bytes(hlo.collectives(program)),
        memory_bytes=memory.total_bytes,
        seconds=time.step_seconds,
    )


def by_zero(job: Job) -> StepFigures:
    """Compiles zero_jax's step in another process."""
    batch, config, topology = job.batch, job.config, job.topology
    report = zero.plan(
        job.loss_fn, job.init_fn, job.tx, batch=batch, config=config, topology=topology, quick=True, cache=None
    )
    assert report.comms is not None and report.memory is not None and report.time is not None
    return StepFigures(
        sent_bytes=report.comms.sent_bytes,
        memory_bytes=report.memory.total_bytes,
        seconds=report.time.step_seconds,
    )


def main() -> None:
    """Prints a table: zero_jax's figures, and after each how many times those by hand it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="a Python file with a dict MODELS")
    parser.add_argument("--topology", default="v5p:2x2x4")
    parser.add_argument("--models", nargs="+", help="their names; all by default")
    args = parser.parse_args()
    models = resolve("file", f"{args.file}:MODELS")
    print(f"| model |{' | '.join(f' {head} | by hand | ratio' for head in ('sent', 'memory', 'step'))} |")
    print("| --- " * 10 + "|")
    for name in args.models or models:
        loss_fn, init_fn, batch = models[name]
        job = Job(loss_fn=loss_fn, init_fn=init_fn, tx=TX, batch=batch, config=CONFIG, topology=args.topology)
        pair = by_zero(job), call_for(by_hand, job, {}, CompileOptions(cache=None))
        cells = [name]
        for figure, shown in (
            ("sent_bytes", format_bytes),
            ("memory_bytes", format_bytes),
            ("seconds", lambda x: f"{1e3 * x:.2f} ms"),
        ):
            ours, hand = (getattr(figures, figure) for figures in pair)
            cells += [shown(ours), shown(hand), f"{ours / hand:.2f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

"""Plans: a train step compiled for hardware that is not there, and what the compiled program tells of it."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

from zero_jax.core.signatures import check_arguments
from zero_jax.core.tree import PyTree
from zero_jax.core.user_cache import cache_folder
from zero_jax.planning.job import Job, batch_shapes
from zero_jax.planning.process import compile_apart
from zero_jax.planning.report import PlanReport, make_report
from zero_jax.sharding.topology import parse
from zero_jax.training import MeshLoss, ZeroConfig


def plan(
    loss_fn: Callable[..., Any] | MeshLoss,
    init_fn: Callable[[jax.Array], PyTree],
    tx: optax.GradientTransformation,
    *,
    batch: PyTree,
    topology: str,
    config: ZeroConfig,
    replica: int = 1,
    model: int = 1,
    data_layout: Sequence[int] | None = None,
    name: str = "plan",
    compiler_options: Mapping[str, Any] | None = None,
    cache: str | pathlib.Path | None = "",
    own_process: bool = True,
    timeout_seconds: float | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> PlanReport:
    """Compiles the train step for a topology and tells whether it fits, what it holds and sends, and how long it takes.

    Nothing is run and no accelerator is needed: only the compiler of the hardware, which `pip install "jax[tpu]"` or
    `pip install "zero-jax[gpu-compiler]"` brings.

    Args:
      loss_fn: as for `make_train_step`.
      init_fn: as for `init_state`.
      tx: the optimizer.
      batch: the global batch of a step: arrays or `ShapeDtypeStruct`s.
      topology: such as `v5p:8x8x16` (a TPU slice in chips), `2xv5e:16x16` (two slices) or `h100:2x8` (hosts x GPUs).
      config: stage, precision, microbatches.
      replica: size of the mesh axis `replica`.
      model: size of the mesh axis `model`.
      data_layout: sizes of the mesh axes that carry `data`; None takes what `make_mesh` chooses for the hardware.
      name: what to call the plan.
      compiler_options: passed to the compiler.
      cache: folder of compiled programs; '' is the user's cache folder, None keeps nothing.
      own_process: whether to compile in a process of its own, which a crash of the compiler does not leave.
      timeout_seconds: ends that process after that time.
      log: takes lines that tell how it goes.

    Raises:
      ValueError: an unknown topology, a compiler that is not installed, a mesh or batch that does not divide.
      ModelError: a function of the model raised in the compiler's process; the message names its lines.
      CompilerCrash: the compiler's process ended without a result.
    """
    check_arguments(init_fn=init_fn, tx=tx, config=config, compiler_options=compiler_options, name=name, cache=cache)
    check_arguments(own_process=own_process, timeout_seconds=timeout_seconds, log=log, loss_fn=loss_fn)
    check_arguments(replica=replica, model=model, data_layout=data_layout)
    parse(topology)
    job = Job(
        loss_fn=loss_fn,
        init_fn=init_fn,
        tx=tx,
        batch=batch_shapes(batch),
        config=config,
        topology=topology,
        replica=replica,
        model=model,
        data_layout=data_layout,
        compiler_options=compiler_options,
    )
    folder = cache_folder("programs") if cache == "" else None if cache is None else pathlib.Path(cache)
    if own_process:
        return compile_apart(job, name=name, cache=folder, timeout_seconds=timeout_seconds, log=log)
    return make_report(job, name=name, cache=folder, on_phase=lambda phase: log(f"{name} on {topology}: {phase}"))

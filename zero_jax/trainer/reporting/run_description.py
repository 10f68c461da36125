"""What a run begins with: devices, mesh, model, data, dtypes, and the bytes of each group on a device."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from zero_jax.sharding.mesh import axes_of
from zero_jax.sharding.precision import resolve_precision
from zero_jax.sharding.spec import carries
from zero_jax.sharding.stages import sharded_groups
from zero_jax.trainer.reporting.console import header
from zero_jax.trainer.reporting.metrics import format_bytes, per_device_bytes
from zero_jax.training import TrainState, ZeroConfig, sharding_report


def groups(state: TrainState) -> dict[str, Any]:
    """Returns the groups of a state by name."""
    return {name: getattr(state, name) for name in ("params", "master", "opt_state", "model_state")}


def num_params(state: TrainState) -> int:
    """Returns the number of params."""
    return sum(x.size for x in jax.tree.leaves(state.params))


def describe_run(state: TrainState, *, mesh: Mesh, zero: ZeroConfig, rows: dict[str, str]) -> str:
    """Returns lines that say what a run is made of.

    Args:
      state: the state that it begins with.
      mesh: its mesh.
      zero: stage and precision.
      rows: further lines by their titles; they come after the mesh's.
    """
    precision = resolve_precision(zero.precision)
    dtypes = {name: getattr(precision, name) or "as initialized" for name in ("param", "compute", "reduce", "master")}
    floating = {x.dtype.name for x in jax.tree.leaves(state.opt_state) if np.issubdtype(x.dtype, np.inexact)}
    dtypes["optimizer"] = "+".join(sorted(floating)) or "none"
    group_bytes = [
        f"{name} {format_bytes(per_device_bytes(tree))} of {format_bytes(sum(x.nbytes for x in jax.tree.leaves(tree)))}"
        for name, tree in groups(state).items()
        if jax.tree.leaves(tree)
    ]
    processes = f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
    table = {
        "devices": f"{mesh.size} x {mesh.devices.flat[0].device_kind} ({jax.__name__} {jax.__version__}{processes})",
        "mesh": " x ".join(f"{name}={size}" for name, size in mesh.shape.items()),
        "stage": str(zero.stage),
        **rows,
        "dtypes": ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items()),
        "a device holds": ", ".join(group_bytes),
        "left whole": _left_whole(state, mesh=mesh, zero=zero),
    }
    return header(table)


def _left_whole(state: TrainState, *, mesh: Mesh, zero: ZeroConfig) -> str:
    """Returns which leaves the rules do not shard, although the stage would."""
    report = sharding_report(state, mesh=mesh, config=zero)
    paths = [p.path for p in report.placements if not carries(p.dims, axes_of(mesh).data)]
    if not paths or not sharded_groups(zero.stage):
        return "none"
    shown = ", ".join(paths[:4]) + (", ..." if len(paths) > 4 else "")
    return f"{len(paths)} of {len(report.placements)} leaves, {format_bytes(report.whole_bytes)}: {shown}"

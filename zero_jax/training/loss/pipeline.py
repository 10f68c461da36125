"""The report of the stages that a train step cuts a loss into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from zero_jax.core.signatures import check_arguments
from zero_jax.core.tree import PyTree, check_arrays
from zero_jax.sharding.mesh import on_mesh
from zero_jax.training.loss.function import MeshLoss
from zero_jax.training.loss.program import StepLoss
from zero_jax.training.zero_config import ZeroConfig
from zero_jax.transforms import PipelinedProgram, PipelineReport


def pipeline_report(
    loss_fn: Callable[..., Any] | MeshLoss, params: PyTree, batch: PyTree, *, mesh: Mesh, config: ZeroConfig
) -> PipelineReport:
    """Reports the stages that a train step cuts a loss into: their layers, what moves between them, and the bubble.

    Of a loss that cannot be cut it says why, with the line, and what to do. Nothing is compiled.

    Args:
      loss_fn: as for `make_train_step`.
      params: the params, or `Variables`; arrays or `ShapeDtypeStruct`s.
      batch: the global batch of a step, likewise.
      mesh: the mesh, with an axis `pipe`.
      config: the config of the step, with its microbatches.

    Raises:
      ValueError: the config has other microbatches than the stages of the mesh can have.

    Example:
      >>> def layers(params, batch):
      ...     return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params)[0].mean()
      >>> staged, config = zero.make_mesh(data=2, pipe=4), zero.ZeroConfig(stage=1, num_microbatches=4)
      >>> report = zero.pipeline_report(layers, jnp.ones((4, 64, 64)), batch, mesh=staged, config=config)
      >>> report.num_stages, report.num_microbatches
      (4, 4)
    """
    check_arguments(loss_fn=loss_fn, mesh=mesh, config=config)
    check_arrays("batch", batch, remedy="give arrays or jax.ShapeDtypeStructs [examples, ...]")
    loss = StepLoss.of(loss_fn, params, mesh=mesh, config=config)
    if loss.placement.num_stages == 1:
        why = f"the mesh {dict(mesh.shape)} has no axis `pipe`: make it with zero.make_mesh(pipe=...)"
        return PipelineReport(num_stages=1, num_microbatches=config.num_microbatches, why_none=why)
    with on_mesh(mesh):
        return pipeline_report_of(loss, *loss.shapes(params, batch))


def pipeline_report_of(loss: StepLoss, variables: PyTree, batch: PyTree, key: Any) -> PipelineReport:
    """Returns the report of a loss on a mesh with stages, for the shapes of the arguments of its program."""
    stages = loss.stages(loss.placement.axes)
    assert stages is not None
    return PipelinedProgram(loss.unsharded(loss.recomputed(loss.fused)), stages).report(variables, batch, key)

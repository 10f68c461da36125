"""The evaluation step: the loss and aux of a batch, and no update."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zero_jax.core.device_put import is_explicit, put_global, to_device, wait_on_cpu
from zero_jax.core.signatures import check_arguments
from zero_jax.core.tracebacks import SHORT_TRACEBACK
from zero_jax.core.tree import PyTree
from zero_jax.core.variables import Variables, as_variables
from zero_jax.program.jaxprs import is_traced
from zero_jax.program.loss import LossProgram
from zero_jax.sharding.mesh import Axes, axis_size, on_mesh
from zero_jax.sharding.precision import wide
from zero_jax.training.batch import check_batch, place_batch
from zero_jax.training.compiled_step import Metrics, replicated, shown_step
from zero_jax.training.loss.function import LossFunction, MeshLoss, user_loss
from zero_jax.training.loss.program import StepLoss
from zero_jax.training.same_program import SameProgram
from zero_jax.training.state.checks import check_devices, check_not_donated
from zero_jax.training.state.placement import Placement, make_placement
from zero_jax.training.state.train_state import TrainState
from zero_jax.training.xla_options import step_options
from zero_jax.training.zero_config import ZeroConfig, check_config
from zero_jax.transforms import with_weight


def make_eval_step(
    loss_fn: Callable[..., Any] | MeshLoss, *, mesh: Mesh, config: ZeroConfig, weighted: bool = False
) -> Callable[..., Metrics]:
    """Makes the jitted `metrics = evaluate(state, batch)`, with the loss and aux of a batch and no update.

    Args:
      loss_fn: as for `make_train_step`; a key it asks for is `jax.random.key(0)`.
      mesh: the mesh.
      config: stage and precision.
      weighted: return `metrics.weight` too, by the config's `loss_weight`, so that batches can be averaged as the
        microbatches of a step are.

    Returns:
      A function of a `TrainState`, of `Variables` or of bare params (no optimizer needed), and a batch. A model state
      that the loss function returns is dropped.

    Example:
      >>> evaluate = zero.make_eval_step(loss_fn, mesh=mesh, config=config)
      >>> evaluate(state, batch).loss.shape
      ()
    """
    check_arguments(weighted=weighted)
    axes = check_config(config).axes_of(mesh)
    return EvalStep(loss_fn, user_loss(loss_fn, mesh, axes), mesh, axes, config, weighted)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class EvalStep:
    """The evaluation step that `make_eval_step` returns: called with a state and a batch, it returns `Metrics`."""

    loss_fn: Callable[..., Any] | MeshLoss
    function: LossFunction
    mesh: Mesh
    axes: Axes
    config: ZeroConfig
    weighted: bool

    def __repr__(self) -> str:
        return shown_step("EvalStep", self.loss_fn, self.mesh, self.config)

    def __call__(self, state: PyTree, batch: PyTree) -> Metrics:
        """Returns loss and aux of a batch; `state` is a `TrainState`, `Variables`, or bare params."""
        mesh, axes, config = self.mesh, self.axes, self.config
        variables = as_variables(state.variables if isinstance(state, TrainState) else state)
        if self.function.model_state is None:  # one of the params alone, such as another one than in training
            variables = Variables(params=variables.params)
        check_not_donated(variables)  # running with a deleted buffer may end the process
        is_nested = any(map(is_traced, jax.tree.leaves((variables, batch))))
        with on_mesh(mesh, in_shard_map=False), SHORT_TRACEBACK:
            check_devices(variables, mesh)
            given, batch = batch, place_batch(batch, mesh=mesh, axes=axes)
            if any(map(is_explicit, jax.tree.leaves(variables))):
                placement = make_placement(variables, mesh=mesh, config=config)
                params, others = placement.param_shardings("params"), placement.model_state_shardings()
                put = lambda x, sharding: put_global(x, sharding) if is_explicit(x) else x  # noqa: E731
                variables = jax.tree.map(put, variables, Variables(params=params, model_state=others))
            jitted = self._nested if is_nested else self._jitted
            if not is_nested:
                self._same.check(jitted, variables, batch, given=given, axes=axes)
            return wait_on_cpu(jitted(variables, batch), mesh)

    @functools.cached_property
    def _same(self) -> SameProgram:
        return SameProgram("evaluation step", self.mesh, self.config)

    @functools.cached_property
    def _jitted(self) -> Any:
        options = step_options(self.mesh, self.config).values
        return jax.jit(functools.partial(eval_step, self, is_nested=False), compiler_options=options or None)

    @functools.cached_property
    def _nested(self) -> Any:
        """The jitted function within others; JAX takes the compiler's options of the outermost one."""
        return jax.jit(functools.partial(eval_step, self, is_nested=True))


def eval_step(step: EvalStep, variables: Variables, batch: PyTree, *, is_nested: bool) -> Metrics:
    """Returns loss and aux of a batch; profiles have its name."""
    config, mesh = step.config, step.mesh
    placement = make_placement(variables, mesh=mesh, config=config)
    check_batch(batch, mesh=mesh, axes=step.axes)
    # An average of params may be on the host, as part of the optimizer's state.
    if "params" not in placement.groups:
        variables = jax.tree.map(to_device, variables)
    fields: dict[str, Any] = {"num_microbatches": _num_microbatches(batch, placement, config), "pipeline": "gpipe"}
    of_batch = dataclasses.replace(config, **fields)
    loss = StepLoss(LossProgram(step.function.named()), placement, of_batch, is_nested)
    key, loss_weight = jax.random.key(0), config.loss_weight
    cast, batch = loss.cast(variables, batch, key)
    program = loss.fused if loss_weight is None or not step.weighted else with_weight(loss.fused, loss_weight)
    value, (aux, _, *weights) = loss.placed(loss.unsharded(program))(cast, batch, key)
    weight = jax.tree.map(lambda x: jnp.asarray(x, wide(x.dtype)), weights[0]) if weights else None
    return replicated(Metrics(loss=value.astype(wide(value.dtype)), aux=aux, weight=weight), mesh)


def _num_microbatches(batch: PyTree, placement: Placement, config: ZeroConfig) -> int:
    """Returns the most microbatches of an evaluation's batch, up to those of a step, that a pipeline can have."""
    num_stages, shards = placement.num_stages, axis_size(placement.mesh, placement.axes.of_stage.batch)
    sizes = [x.shape[0] for x in jax.tree.leaves(batch) if x.ndim]
    # Multiples of the stages: `1f1b` may have others, and `gpipe`, which an evaluation takes, would lose some of these.
    most = config.num_microbatches // num_stages * num_stages
    counts = range(most, num_stages, -num_stages)
    return next((k for k in counts if all(size % (k * shards) == 0 for size in sizes)), num_stages)

"""The evaluation step, and the metrics that it shares with the train step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax.core.device_put import to_device, wait_on_cpu
from zero_jax.core.signatures import check_arguments, place_of
from zero_jax.core.text_tables import Report, aligned
from zero_jax.core.tree import PyTree, leaf_names
from zero_jax.core.variables import Variables, as_variables
from zero_jax.program.jaxprs import is_traced
from zero_jax.program.loss import LossProgram
from zero_jax.sharding.mesh import axis_size, on_mesh
from zero_jax.sharding.precision import wide
from zero_jax.training.batch import check_batch, place_batch
from zero_jax.training.loss.function import MeshLoss, user_loss
from zero_jax.training.loss.program import StepLoss
from zero_jax.training.same_program import SameProgram
from zero_jax.training.state.checks import check_not_donated
from zero_jax.training.state.placement import Placement, make_placement
from zero_jax.training.state.train_state import TrainState
from zero_jax.training.xla_options import step_options
from zero_jax.training.zero_config import ZeroConfig, check_config
from zero_jax.transforms import PartWeight, divided_by_nonzero, used_shapes, weight_alone, with_weight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Metrics(Report):
    """What a step reports, replicated on every device. `metrics["loss"]` works as `metrics.loss` does.

    Attributes:
      loss: the mean loss of the batch, unscaled, `float32[]`, or of a wider dtype that the model computes in.
      aux: what the loss function returned beside the loss.
      grad_norm: the global norm of the gradients before clipping, in such a dtype; infinite, though each gradient is
        finite, where that dtype has no number as large.
      skipped: whether the update was skipped because a gradient was not finite, `bool[]`.
      nonfinite_leaf: index (in the order of `jax.tree.leaves(state.params)`) of the first param whose gradient is not
        finite, -1 if there is none, `int32[]`; `TrainStep.leaf_name` turns it into a path.
      loss_scale: the loss scale that the step used, 1 without scaling, `float32[]`.
      num_skipped_steps: steps skipped so far, `int32[]`.
      small_grad_norm_sq: mean by weight of the squared norms of the gradients of the batch's parts, unscaled and before
        clipping, `float32[]`; infinite from norms of 1.8e19 on; None without microbatches. `NoiseScale` makes the
        gradient noise scale of it. A part is a microbatch at stages 2 and 3, a device's share of one at stages 0 and 1.
      num_small_grads: parts with a weight above 0, `int32[]`; None without microbatches.
      weight: what the loss of a weighted evaluation is a mean over, such as a number of tokens; None where that is the
        same for all batches of one size, and elsewhere.

    Example:
      >>> _, metrics = step(state, batch)
      >>> float(metrics["loss"]) == float(metrics.loss)
      True
    """

    loss: jax.Array
    aux: PyTree = None
    grad_norm: jax.Array | None = None
    skipped: jax.Array | None = None
    nonfinite_leaf: jax.Array | None = None
    loss_scale: jax.Array | None = None
    num_skipped_steps: jax.Array | None = None
    small_grad_norm_sq: jax.Array | None = None
    num_small_grads: jax.Array | None = None
    weight: PartWeight | None = None

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __str__(self) -> str:
        leaves = zip(leaf_names(self), jax.tree.leaves(self), strict=True)
        return aligned((name, str(x) if np.ndim(x) == 0 else f"{x.dtype}{list(x.shape)}") for name, x in leaves)


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
    function = user_loss(loss_fn, mesh, axes)

    def eval_step(variables: Variables, batch: PyTree) -> Metrics:
        placement = make_placement(variables, mesh=mesh, config=config)
        check_batch(batch, mesh=mesh, axes=axes)
        # An average of params may be on the host, as part of the optimizer's state.
        if "params" not in placement.groups:
            variables = jax.tree.map(to_device, variables)
        fields: dict[str, Any] = {"num_microbatches": _num_microbatches(batch, placement, config), "pipeline": "gpipe"}
        of_batch = dataclasses.replace(config, **fields)
        loss = StepLoss(LossProgram(function.named()), placement, of_batch)
        return replicated(_metrics_of(loss, variables, batch, weighted=weighted), mesh)

    same = SameProgram("evaluation step", mesh, config)

    @functools.cache
    def jitted(is_nested: bool) -> Any:
        options = {} if is_nested else step_options(mesh, config).values  # JAX takes those of the outermost function
        return jax.jit(eval_step, compiler_options=options or None)

    def evaluate(state: PyTree, batch: PyTree) -> Metrics:
        variables = as_variables(state.variables if isinstance(state, TrainState) else state)
        if function.model_state is None:  # a loss function of the params alone, such as another one than in training
            variables = Variables(params=variables.params)
        check_not_donated(variables)  # running with a deleted buffer may end the process
        is_nested = any(map(is_traced, jax.tree.leaves((variables, batch))))
        with on_mesh(mesh):
            batch = place_batch(batch, mesh=mesh, axes=axes)
            if same.processes and not is_nested:
                leaves, tree = jax.tree.flatten(variables)
                same.check(jitted(is_nested), variables, batch, of=(tree, tuple((x.shape, x.dtype) for x in leaves)))
            return wait_on_cpu(jitted(is_nested)(variables, batch), mesh)

    return EvalStep(evaluate, shown_step("EvalStep", loss_fn, mesh, config))


@dataclasses.dataclass(frozen=True, eq=False)
class EvalStep:
    """The evaluation step that `make_eval_step` returns: called with a state and a batch, it returns `Metrics`."""

    function: Callable[[PyTree, PyTree], Metrics]
    text: str

    def __call__(self, state: PyTree, batch: PyTree) -> Metrics:
        """Returns loss and aux of a batch; `state` is a `TrainState`, `Variables`, or bare params."""
        return self.function(state, batch)

    def __repr__(self) -> str:
        return self.text


def shown_step(name: str, loss_fn: Any, mesh: Mesh, config: ZeroConfig) -> str:
    """Returns what a step is of: the place of its loss function, the mesh, and the config."""
    return f"{name} of {place_of(getattr(loss_fn, 'make', loss_fn))} on {dict(mesh.shape)}, {config!r}"


def _metrics_of(loss: StepLoss, variables: Variables, batch: PyTree, *, weighted: bool) -> Metrics:
    """Returns the loss and aux of a batch, with its weight by the config's `loss_weight` if `weighted`."""
    key, loss_weight = jax.random.key(0), loss.config.loss_weight
    cast, batch = loss.cast(variables, batch, key)
    program, weighs = loss.fused, False
    if weighted and loss_weight is not None:
        program = with_weight(program, loss_weight)
        weighs = loss_weight != "auto" or weight_alone(program, used_shapes(cast), batch, key) is not None
        program = divided_by_nonzero(program)
    value, (aux, _, *weights) = loss.placed(loss.unsharded(program))(cast, batch, key)
    weight = jax.tree.map(lambda x: jnp.asarray(x, wide(x.dtype)), weights[0]) if weighs else None
    return Metrics(loss=value.astype(wide(value.dtype)), aux=aux, weight=weight)


def _num_microbatches(batch: PyTree, placement: Placement, config: ZeroConfig) -> int:
    """Returns the most microbatches of an evaluation's batch, up to those of a step, that a pipeline can have."""
    num_stages, shards = placement.num_stages, axis_size(placement.mesh, placement.axes.of_stage.batch)
    sizes = [x.shape[0] for x in jax.tree.leaves(batch) if x.ndim]
    counts = range(config.num_microbatches, num_stages, -num_stages)
    return next((k for k in counts if all(size % (k * shards) == 0 for size in sizes)), num_stages)


def replicated(metrics: Metrics, mesh: Mesh) -> Metrics:
    """Replicates the scalars of the metrics; larger aux keeps its sharding."""
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: x if x.ndim else lax.with_sharding_constraint(x, sharding), metrics)

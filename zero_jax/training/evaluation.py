"""The evaluation step, and what it shares with the train step: the placed loss function, the batch, the metrics."""

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

from zero_jax.core.device_put import check_has_devices, to_device, wait_on_cpu
from zero_jax.core.evaluation import TracedFunction
from zero_jax.core.jaxprs import is_traced
from zero_jax.core.signatures import check_arguments
from zero_jax.core.tree import PyTree, check_arrays
from zero_jax.core.variables import Variables, as_variables
from zero_jax.sharding.mesh import Axes, axes_of, on_mesh
from zero_jax.sharding.precision import wide
from zero_jax.training.grads.accumulator import MeshLoss, check_batch, user_loss
from zero_jax.training.model_inputs import cast_batch
from zero_jax.training.same_program import SameProgram, check_sizes
from zero_jax.training.state.checks import check_not_donated
from zero_jax.training.state.placement import Placement, make_placement
from zero_jax.training.state.train_state import TrainState
from zero_jax.training.xla_options import step_options
from zero_jax.training.zero_config import ZeroConfig, check_config
from zero_jax.transforms import (
    PartWeight,
    divided_by_nonzero,
    fuse_attention,
    gather_on_use,
    scatter_grads,
    summed_on_use,
    unsharded_windows,
    used_shapes,
    weight_alone,
    with_weight,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Metrics:
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
    """
    check_arguments(weighted=weighted)
    axes = check_config(config).axes_of(mesh)
    function = user_loss(loss_fn, mesh, axes)
    normalized = function.named()

    def eval_step(variables: Variables, batch: PyTree) -> Metrics:
        placement = make_placement(variables, mesh=mesh, config=config)
        check_batch(batch, mesh=mesh, axes=axes)
        # An average of params may be on the host, as part of the optimizer's state.
        if "params" not in placement.groups:
            variables = jax.tree.map(to_device, variables)
        cast, key = placement.cast(variables), jax.random.key(0)
        batch = cast_batch(normalized, used_shapes(cast), batch, key, config=config)
        fused = fuse_attention(normalized, config.attention, mesh=mesh, axes=axes)
        weighs = False
        if weighted and config.loss_weight is not None:
            fused = with_weight(TracedFunction(fused), config.loss_weight)
            weighs = config.loss_weight != "auto" or weight_alone(fused, used_shapes(cast), batch, key) is not None
            fused = divided_by_nonzero(fused)
        fused = unsharded_windows(fused, mesh=mesh, axes=axes)
        loss, (aux, _, *weights) = placed_loss(fused, placement, config)(cast, batch, key)
        weight = jax.tree.map(lambda x: jnp.asarray(x, wide(x.dtype)), weights[0]) if weighs else None
        return replicated(Metrics(loss=loss.astype(wide(loss.dtype)), aux=aux, weight=weight), mesh)

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

    return evaluate


def shard_batch(batch: PyTree, *, mesh: Mesh, axes: Axes | None = None) -> PyTree:
    """Shards a batch over the batch axes by its leading dim; leaves that are sharded so already are not copied.

    Args:
      batch: a pytree of host arrays `[batch, ...]`. With several processes each gives its own share of the examples, as
        many for each of its devices as the others.
      mesh: the mesh.
      axes: the roles of its axes, if not by their names.

    Raises:
      ValueError: a leaf whose leading dim does not divide over the batch axes, or that is no array; an abstract mesh; a
        batch of other sizes than that of another process.
    """
    placed = place_batch(batch, mesh=mesh, axes=axes)
    if jax.process_count() > 1 and not any(map(is_traced, jax.tree.leaves(placed))):
        check_sizes(placed, mesh)
    return placed


def place_batch(batch: PyTree, *, mesh: Mesh, axes: Axes | None = None) -> PyTree:
    """Shards a batch as `shard_batch` does, for functions that compare the sizes with other processes themselves."""
    check_arguments(axes=axes)
    axes = axes or axes_of(mesh)
    over_batch, replicated = NamedSharding(mesh, PartitionSpec(axes.batch)), NamedSharding(mesh, PartitionSpec())

    def place(x: Any) -> jax.Array:
        sharding = over_batch if np.ndim(x) else replicated
        if is_traced(x):  # the step is called within another jitted function, or scanned over
            return lax.with_sharding_constraint(x, sharding)
        if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
            return x
        check_has_devices(mesh)
        if jax.process_count() > 1 and not (isinstance(x, jax.Array) and not x.is_fully_addressable):
            return jax.make_array_from_process_local_data(sharding, np.asarray(x))
        return jax.device_put(x, sharding)

    check_arrays("batch", batch, remedy="leave it out of the batch, or make an array of it")
    if jax.process_count() == 1:
        check_batch(jax.tree.map(lambda x: x if hasattr(x, "ndim") else np.asarray(x), batch), mesh=mesh, axes=axes)
    return jax.tree.map(place, batch)


def placed_loss(
    loss_fn: Callable[..., Any],
    placement: Placement,
    config: ZeroConfig,
    *,
    with_copies: bool = True,
    mapped: bool = False,
) -> Callable[..., Any]:
    """Returns the loss function with params gathered on use, or gradients reduce-scattered, by the stage.

    Args:
      loss_fn: a function of variables, a batch and a key.
      placement: how its params are sharded.
      config: the config of the step.
      with_copies: whether it is called on the batch of all copies of the params (`Axes.copies`), or of one copy.
      mapped: whether it is mapped over devices, whose gradients are summed at each use of a param.
    """
    common = {"mesh": placement.mesh, "reduce_dtype": placement.precision.reduce}
    axes, specs = placement.axes.of_params(with_copies=with_copies), placement.loss_shardings()
    if mapped:
        common |= {"axes": axes, "quantize": placement.quantize, "keep_gathered": config.keep_gathered}
        return summed_on_use(loss_fn, specs, stored_whole="params" not in placement.groups, **common)
    if "params" in placement.groups:
        gathering = gather_on_use(
            loss_fn,
            specs,
            keep_gathered=config.keep_gathered,
            data_axes=axes.data,
            replica_axes=axes.replica,
            quantize=placement.quantize,
            **common,
        )
        if not with_copies or axes.batch == placement.axes.batch:
            return gathering
        return _by_copies(gathering, NamedSharding(placement.mesh, PartitionSpec(axes.batch)))
    # On such a mesh XLA partitions some convolutions wrongly, at every stage.
    has_other_axes = placement.axes.size_beside_batch(placement.mesh) > 1
    if "master" in placement.groups or placement.precision.reduce is not None or has_other_axes:
        return scatter_grads(loss_fn, specs, axes=axes, **common)
    return loss_fn


def _by_copies(loss_fn: Callable[..., Any], sharding: NamedSharding) -> Callable[..., Any]:
    """Returns a loss function that reorders its batch: the examples of each copy of the params become contiguous."""

    @functools.wraps(loss_fn)
    def call(variables: PyTree, batch: PyTree, key: jax.Array) -> Any:
        batch = jax.tree.map(lambda x: lax.with_sharding_constraint(x, sharding) if jnp.ndim(x) else x, batch)
        return loss_fn(variables, batch, key)

    return call


def replicated(metrics: Metrics, mesh: Mesh) -> Metrics:
    """Replicates the scalars of the metrics; larger aux keeps its sharding."""
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: x if x.ndim else lax.with_sharding_constraint(x, sharding), metrics)

"""How the groups of a train state are sharded: the placement that a config and the shapes of variables make."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax.core.device_put import is_on_host, platform_of
from zero_jax.core.tree import PathPatterns, PyTree, leaf_names, with_shapes
from zero_jax.core.variables import MODEL_STATE, as_variables, joined, variable_names
from zero_jax.sharding.chains import UPDATE, gather_scope
from zero_jax.sharding.mesh import Axes, axis_size
from zero_jax.sharding.precision import Precision, cast_floating, resolve_precision
from zero_jax.sharding.quantized import Quantize, blocks_of_leaf, check_leaves
from zero_jax.sharding.rules import LeafPlacement, place_like_params, place_model_state, place_params, to_shardings
from zero_jax.sharding.spec import Dims, dims_of, named, steps_by_dim
from zero_jax.sharding.stages import SECONDARY_GROUPS, sharded_groups
from zero_jax.training.grads.plan import GradPlan
from zero_jax.training.optimizer.offload import Offload, check_offload, host_shardings, on_host
from zero_jax.training.state.train_state import TrainState, trained_params
from zero_jax.training.zero_config import ZeroConfig, check_config
from zero_jax.transforms import LANES, DeviceSum, HostParam, laid_out

ARRAYS = "give arrays or jax.ShapeDtypeStructs"
NO_OTHERS = (
    "keep what is no array out of the {}, as zero.from_equinox and equinox.partition(model, equinox.is_array) do"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """How the groups of a train state are sharded: a function of `ZeroConfig` and the shapes of the variables."""

    mesh: Mesh
    axes: Axes
    config: ZeroConfig
    groups: frozenset[str]  # those that the stage shards
    precision: Precision
    params: PyTree  # a LeafPlacement for each param
    model_state: PyTree = None  # and for each leaf of the model state
    offload: Offload | None = None
    quantize: Quantize | None = None

    @property
    def keeps_copy(self) -> bool:
        """Whether a low-precision copy of the params is kept beside the master params."""
        return self.precision.has_master and not self.params_are_masters

    @property
    def params_are_masters(self) -> bool:
        """Whether the stage shards params as it does the master params, so that these are the params."""
        return "params" in self.groups and not self.axes.secondary

    @property
    def may_shard_layers(self) -> bool:
        """Whether master params may be sharded along layers; where these are the params, only if that is asked for."""
        wanted, may = self.config.layer_shards, "master" in self.groups
        if self.params_are_masters:  # from the host the loss function fetches shards of features
            may &= wanted is True and (self.offload is None or self.offload.what != "all")
        return may and wanted is not False and self.quantize is None and not self.axes.secondary

    @property
    def num_stages(self) -> int:
        """The stages of the pipeline that microbatches go through; 1 without one."""
        return self.axes.num_stages(self.mesh)

    @property
    def grad_axes(self) -> tuple[str, ...]:
        """The mesh axes over which gradients are sent quantized."""
        return () if self.quantize is None else self.quantize.grad_axes(self.axes)

    @property
    def grad_plan(self) -> GradPlan:
        """Where gradients are reduced, as far as the loss allows it."""
        is_per_device = self.config.num_microbatches > 1 and "grads" not in self.groups
        # Along these axes devices have copies of the params: gradients are summed over them last, in shards.
        copies = self.axes.copies if "master" in self.groups else ()
        with_own = self.axes.of_stage.batch  # not over `pipe`: its devices have gradients of other layers
        once = with_own if is_per_device else tuple(axis for axis in copies if self.mesh.shape[axis] > 1)
        return GradPlan(
            batch_axes=self.axes.batch,
            once_over=once,
            coded_over=self.grad_axes,
            # Those of a pipeline are one batch: its loop goes through all of them
            num_microbatches=1 if self.num_stages > 1 else self.config.num_microbatches,
            is_per_device=is_per_device,
            at_use=not is_per_device and not set(self.grad_axes) <= set(self.axes.copies),
            pipe=self.axes.pipe if self.num_stages > 1 else (),
        )

    def grad_sums(self, plan: GradPlan | None = None) -> list[DeviceSum]:
        """Returns how the gradients that devices have of each param are summed once a step; None is `grad_plan`."""
        plan = self.grad_plan if plan is None else plan
        shardings = jax.tree.leaves(self.param_shardings("master") if plan.sums_to_masters else self.grad_shardings())
        leaves = jax.tree.leaves(self.params)
        return [
            DeviceSum(
                mesh=self.mesh,
                axes=self.axes,
                over=plan.once_over,
                dims=dims_of(sharding, len(leaf.shape)),
                dtype=self.precision.reduce,
                coding=blocks_of_leaf(self.quantize, "grads", leaf, mesh=self.mesh),
                coded=self.grad_axes,
            )
            for leaf, sharding in zip(leaves, shardings, strict=True)
        ]

    def grad_errors(self, has_grad: Sequence[bool]) -> PyTree:
        """Returns shapes and shardings of the quantization errors of gradients; None if no param has one."""
        leaves, tree = jax.tree.flatten(self.params)
        errors = []
        for leaf, grad_sum, wanted in zip(leaves, self.grad_sums(), has_grad, strict=True):
            feeds_back = wanted and self.quantize and self.quantize.format_of("error_feedback", leaf.path)
            dims = grad_sum.error_dims(leaf.shape) if feeds_back else None
            if dims is None:
                errors.append(None)
            else:
                shape = (axis_size(self.mesh, dims[0]), *leaf.shape)  # one for each device that sends
                errors.append(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=named(self.mesh, dims)))
        return tree.unflatten(errors) if any(x is not None for x in errors) else None

    def axes_of_group(self, group: str) -> tuple[str, ...]:
        """Returns the axes of `data` that a group is sharded over."""
        if group not in self.groups:
            return ()
        return self.axes.secondary if self.axes.secondary and group in SECONDARY_GROUPS else self.axes.data

    def _shardings(self, placements: PyTree, group: str, *, of_update: bool = False) -> PyTree:
        over = self.axes_of_group(group)
        return to_shardings(placements, mesh=self.mesh, axes=self.axes, over=over, of_update=of_update)

    def param_shardings(self, group: str) -> PyTree:
        """Returns the shardings of `params`, `master` or `grads`."""
        of_update = group == "master" or (group == "params" and self.params_are_masters)
        return self._shardings(self.params, group, of_update=of_update)

    def grad_shardings(self) -> PyTree:
        """Returns the shardings that the loss function reduces gradients to: those of the master params by features."""
        return self._shardings(self.params, "master")

    def model_state_shardings(self) -> PyTree:
        """Returns the shardings of the model state."""
        return self._shardings(self.model_state, MODEL_STATE)

    def loss_shardings(self) -> PyTree:
        """Returns the shardings from which the loss function gathers params, or to which it scatters gradients."""
        params = self.param_shardings("params") if self.axes.secondary else self.grad_shardings()
        return joined(params, self.model_state_shardings())

    def by_layers(self, update_dims: Mapping[str, Dims | None]) -> Placement:
        """Returns the placement with the master params of these paths, and no others, in such shards."""
        placed = lambda leaf: dataclasses.replace(leaf, update_dims=update_dims.get(leaf.path))  # noqa: E731
        return dataclasses.replace(self, params=jax.tree.map(placed, self.params))

    def to_update(self, grads: PyTree) -> PyTree:
        """Moves gradients to the shards of the master params, in their own dtype; None stays."""
        leaves, tree = jax.tree.flatten(self.params)
        of_each = zip(leaves, tree.flatten_up_to(grads), strict=True)
        # Laid out in rows, but not at stages 1 and 2, where XLA would keep them for longer.
        in_rows = platform_of(self.mesh) == "tpu" and "params" in self.groups and self.offload is None
        moved = self._in_rows if in_rows else self._moved
        with jax.named_scope(UPDATE):
            return tree.unflatten([x if x is None else moved(leaf, x) for leaf, x in of_each])

    def _in_rows(self, leaf: LeafPlacement, grad: jax.Array) -> jax.Array:
        """Lays a matrix of gradients out in rows, as its state: else XLA:TPU copies that, in float32 and back.

        It cannot reduce-scatter along lanes. A gradient that is sharded along its last dim is reduced with that before
        the lanes, which has to be said, too: the layout of rows alone would be taken back through the sum of devices,
        which would be an all-reduce. Rows that do not fill their last tile, in either of the layouts, cost more than
        they save. A gradient that moves to other shards is moved.
        """
        if leaf.update_dims is not None or grad.ndim != 2:
            return self._moved(leaf, grad)
        sharding = self._shardings(leaf, "master")
        reduced = [not set(axes).isdisjoint(self.axes.data) for axes in dims_of(sharding, grad.ndim)]
        rows, features = sharding.shard_shape(grad.shape)
        if sum(reduced) != 1 or features % LANES or (reduced[1] and rows < LANES):
            return grad
        if reduced[1]:
            grad = laid_out(grad, sharding=sharding, order=(1, 0))
        return laid_out(grad, sharding=sharding, order=(0, 1))

    def _by_features(self, leaf: LeafPlacement, x: Any) -> Any:
        """Returns a param in the shards that the loss function gathers, where it may be sharded along its layers."""
        if isinstance(x, HostParam):
            return x
        if leaf.update_dims is not None:
            return self._moved(leaf, x, back=True)
        return lax.with_sharding_constraint(x, named(self.mesh, leaf.dims))  # an evaluation has no optimizer to ask

    def _moved(self, leaf: LeafPlacement, x: jax.Array, *, back: bool = False) -> jax.Array:
        """Moves an array from features to layers, or `back`: an all-to-all for each dim, in its own dtype."""
        if leaf.update_dims is None:
            return x
        steps = [leaf.dims, *steps_by_dim(leaf.dims, 0, leaf.update_dims[0])]
        with gather_scope(leaf.path):
            x = lax.optimization_barrier(x)  # casts before and after stay there
            for step in reversed(steps) if back else steps:
                x = lax.with_sharding_constraint(x, named(self.mesh, step))
            return lax.optimization_barrier(x)

    def cast(self, variables: PyTree) -> PyTree:
        """Returns the arguments of the placed loss function: params in the compute dtype, `HostParam`s on the host."""

        def place(x: jax.Array, dtype: Any = None) -> Any:
            return HostParam.of(x, dtype) if is_on_host(jax.typeof(x)) else cast_floating(x, dtype)

        variables, cast = as_variables(variables), functools.partial(place, dtype=self.precision.compute)
        params = jax.tree.map(cast, variables.params)
        if self.params_are_masters and self.config.layer_shards:
            params = jax.tree.map(self._by_features, self.params, params)
        return joined(params, jax.tree.map(place, variables.model_state))

    def opt_shardings(self, opt_state: PyTree) -> PyTree:
        """Returns the shardings of an optimizer state."""
        placed = place_like_params(opt_state, self.params, mesh=self.mesh, axes=self.axes, rules=self.config)
        return self._shardings(placed, "opt_state", of_update=True)

    def on_host(self, state: TrainState) -> dict[str, list[bool]]:
        """Returns which leaves of `opt_state`, `master`, `params` and `model_state` are kept in host memory."""
        groups = {name: getattr(state, name) for name in ("opt_state", "master", "params", MODEL_STATE)}
        if self.offload is None:
            return {name: [False] * len(jax.tree.leaves(tree)) for name, tree in groups.items()}
        shapes = {leaf.path: leaf.shape for leaf in jax.tree.leaves((self.params, self.model_state))}
        return on_host(self.offload, groups, shapes, min_size=self.config.min_shard_size)


def pinned(leaves: Sequence[Any], shardings: PyTree, *, but: Sequence[bool] | None = None) -> list[Any]:
    """Constrains the leaves of a tree to shardings by one call, except where `but` is true; None: where they are."""
    skips = [x is None for x in leaves] if but is None else but
    selected = [(x, s) for x, s, skip in zip(leaves, jax.tree.leaves(shardings), skips, strict=True) if not skip]
    constrained = iter(lax.with_sharding_constraint([x for x, _ in selected], [s for _, s in selected]))
    return [x if skip else next(constrained) for x, skip in zip(leaves, skips, strict=True)]


def make_placement(variables: PyTree, *, mesh: Mesh, config: ZeroConfig) -> Placement:
    """Places params, or `Variables` (arrays or `ShapeDtypeStruct`s), under a config."""
    axes = check_config(config).axes_of(mesh)
    if isinstance(variables, TrainState):
        raise ValueError("a TrainState was given for params: give those of the state, state.params")
    variables = as_variables(variables)
    params = with_shapes("params", variables.params, remedy=ARRAYS)
    model_state = with_shapes(MODEL_STATE, variables.model_state, remedy=ARRAYS)
    groups = sharded_groups(config.stage)
    if (offload := config.resolved_offload()) is not None:
        check_offload(offload, mesh, groups - ({"params"} if axes.secondary else set()))
    placed, placed_state = place_params(params, mesh=mesh, axes=axes, rules=config), None
    if model_state is not None:
        placed_state = place_model_state(model_state, placed, mesh=mesh, axes=axes, rules=config)
    if (quantize := config.resolved_quantize()) is not None:
        check_leaves(quantize, jax.tree.leaves((placed, placed_state)), mesh=mesh, axes=axes)
    placement = Placement(
        mesh=mesh,
        axes=axes,
        config=config,
        groups=groups,
        precision=resolve_precision(config.precision),
        params=placed,
        model_state=placed_state,
        offload=offload,
        quantize=quantize,
    )
    if quantize is not None and quantize.error_feedback:
        _check_error_feedback(placement)
    return placement


def _check_error_feedback(placement: Placement) -> None:
    """Raises `ValueError` where quantized gradients are not sent once a step, over one axis."""
    axes = [axis for axis in placement.grad_axes if placement.mesh.shape[axis] > 1]
    often = [axis for axis in axes if axis not in placement.grad_plan.once_over]
    if often:
        raise ValueError(
            f"quantize: error_feedback: gradients are sent over {often[0]!r} at each use of a param, and an error of "
            "each would be as large as all gradients: give grads_over='replica', over which they are sent once a step, "
            "or stage=1 with num_microbatches=2 or more; or leave error_feedback out"
        )
    if len(axes) > 1:
        raise ValueError(
            f"quantize: error_feedback: gradients are quantized over {axes}, one after another, and the error is kept "
            "of one: name it in grads_over, or leave error_feedback out"
        )


def new_grad_errors(state: TrainState, tx: optax.GradientTransformation, placement: Placement) -> PyTree:
    """Returns shapes and shardings of `grad_errors` for an optimizer; None without error feedback."""
    if placement.quantize is None or not placement.quantize.error_feedback:
        return None
    return placement.grad_errors(trained_params(tx, state, mesh=placement.mesh, config=placement.config))


def train_state_shardings(state: TrainState, placement: Placement) -> TrainState:
    """Returns the sharding of each leaf of a train state.

    Raises:
      ValueError: errors of gradients that the config does not have.
    """
    replicated: Any = NamedSharding(placement.mesh, PartitionSpec())
    if placement.config.overrides:
        names = variable_names(state.variables) + leaf_names(state.opt_state)
        PathPatterns("overrides", placement.config.overrides).check_matched(names)
    groups = {
        "params": placement.param_shardings("params"),
        "master": None if state.master is None else placement.param_shardings("master"),
        "opt_state": placement.opt_shardings(state.opt_state),
        MODEL_STATE: placement.model_state_shardings(),
    }
    if placement.offload is not None:
        flags = placement.on_host(state)
        groups = {name: host_shardings(shardings, flags[name]) for name, shardings in groups.items()}
    return TrainState(
        step=replicated,
        key=replicated,
        loss_scale=jax.tree.map(lambda _: replicated, state.loss_scale),
        num_skipped_steps=replicated,
        grad_errors=None if state.grad_errors is None else _error_shardings(state.grad_errors, placement),
        **groups,
    )


def _error_shardings(errors: PyTree, placement: Placement) -> PyTree:
    """Returns the shardings of errors of gradients, which frozen params do not have."""
    tree = jax.tree.structure(placement.params)
    expected = placement.grad_errors([x is not None for x in tree.flatten_up_to(errors)])
    if leaf_names(expected) != leaf_names(errors):
        odd = next(name for name in leaf_names(errors) if name not in leaf_names(expected))
        raise ValueError(
            f"the state has errors of the quantized gradients of {odd!r}, and the config has no error feedback for it: "
            "make both with the same config"
        )
    return jax.tree.map(lambda x: x.sharding, expected)

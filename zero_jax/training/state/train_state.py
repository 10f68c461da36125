"""The train state: what it holds, how it is placed, and how it is born sharded."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax.core.device_put import put_global, reshard_array
from zero_jax.core.gather_names import gather_scope
from zero_jax.core.jaxprs import Chain, reshard
from zero_jax.core.signatures import check_takes
from zero_jax.core.tree import PyTree, check_arrays, leaf_names, shown, with_shapes
from zero_jax.core.variables import MODEL_STATE, as_variables, joined, variable_names
from zero_jax.sharding.mesh import Axes
from zero_jax.sharding.precision import LossScale, Precision, cast_floating, init_loss_scale, resolve_precision
from zero_jax.sharding.rules import (
    LeafPlacement,
    ShardingRules,
    check_matched,
    place_like_params,
    place_model_state,
    place_params,
    to_shardings,
)
from zero_jax.sharding.stages import group_axes, sharded_groups
from zero_jax.sharding.torus import gather_shardings
from zero_jax.training.optimizer.offload import Offload, check_has_host_memory, host_shardings, on_host, resolve_offload
from zero_jax.training.optimizer.update import init_opt_state
from zero_jax.training.zero_config import ZeroConfig, check_config


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything that a step reads and writes.

    Attributes:
      step: calls of the train step so far, `int32[]`.
      params: the params; in low precision and whole at stages 1 and 2, the master params themselves at stage 3, there
        with `ZeroConfig.secondary` the secondary shard.
      master: the full-precision params that the optimizer updates, or None where `params` are those.
      opt_state: the optimizer's state.
      key: the key that each step's key is derived from.
      loss_scale: the loss scale, or None.
      num_skipped_steps: steps skipped because a gradient was not finite, `int32[]`.
      model_state: what the loss function reads and returns anew (`Variables.model_state`), or None.
    """

    step: jax.Array
    params: PyTree
    master: PyTree
    opt_state: PyTree
    key: jax.Array
    loss_scale: LossScale | None
    num_skipped_steps: jax.Array
    model_state: PyTree = None

    @property
    def variables(self) -> PyTree:
        """What the loss function sees: the params, as `Variables` where there is model state."""
        return joined(self.params, self.model_state)

    @property
    def masters(self) -> PyTree:
        """The params that the optimizer updates: `master`, or `params` where there is none."""
        return self.params if self.master is None else self.master


ARRAYS = "give arrays or jax.ShapeDtypeStructs"
# Whole params above this size are gathered after the update in parts.
_GATHERED_AT_ONCE_BYTES = 1 << 26


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """How the groups of a train state are sharded: what `ZeroConfig` and the shapes of the variables decide."""

    mesh: Mesh
    axes: Axes
    rules: ShardingRules
    groups: frozenset[str]
    precision: Precision
    params: PyTree  # a LeafPlacement for each param
    model_state: PyTree = None  # and for each leaf of the model state
    offload: Offload | None = None

    @property
    def keeps_copy(self) -> bool:
        """Whether a low-precision copy of the params is kept beside the master params."""
        return self.precision.has_master and not self.params_are_masters

    @property
    def params_are_masters(self) -> bool:
        """Whether the stage shards params as it does the master params, so that these are the params."""
        return "params" in self.groups and not self.axes.secondary

    def axes_of_group(self, group: str) -> tuple[str, ...]:
        """Returns the axes of `data` that a group is sharded over."""
        return group_axes(group, self.groups, data=self.axes.data, secondary=self.axes.secondary)

    def param_shardings(self, group: str) -> PyTree:
        """Returns the shardings of `params`, `master` or `grads`."""
        return to_shardings(self.params, mesh=self.mesh, axes=self.axes, over=self.axes_of_group(group))

    def model_state_shardings(self) -> PyTree:
        """Returns the shardings of the model state."""
        over = self.axes_of_group(MODEL_STATE)
        return to_shardings(self.model_state, mesh=self.mesh, axes=self.axes, over=over)

    def variable_shardings(self) -> PyTree:
        """Returns the shardings of `Variables` as they are given at first, of params those of the master params."""
        return joined(self.param_shardings("master"), self.model_state_shardings())

    def loss_shardings(self) -> PyTree:
        """Returns the shardings that the loss function's params are gathered from, or their gradients scattered to."""
        group = "params" if self.axes.secondary else "master"
        return joined(self.param_shardings(group), self.model_state_shardings())

    def cast(self, variables: PyTree) -> PyTree:
        """Casts params to the compute dtype, and model state to none: what the loss function is given."""
        found = as_variables(variables)
        return joined(cast_floating(found.params, self.precision.compute), found.model_state)

    def opt_shardings(self, opt_state: PyTree) -> PyTree:
        """Returns the shardings of an optimizer state."""
        placed = place_like_params(opt_state, self.params, mesh=self.mesh, axes=self.axes, rules=self.rules)
        return to_shardings(placed, mesh=self.mesh, axes=self.axes, over=self.axes_of_group("opt_state"))

    def on_host(self, opt_state: PyTree, master: PyTree) -> dict[str, list[bool]]:
        """Tells which leaves of `opt_state` and `master` are kept in host memory."""
        leaves = jax.tree.leaves(self.params, is_leaf=lambda x: isinstance(x, LeafPlacement))
        return on_host(
            self.offload,
            {"opt_state": opt_state, "master": master},
            {leaf.path: leaf.shape for leaf in leaves},
            min_size=self.rules.min_shard_size,
        )

    def params_of(self, masters: PyTree, *, into: PyTree) -> PyTree:
        """Returns the params that master params make: themselves, or gathered copies in the place of the old ones."""
        if self.params_are_masters:
            return masters
        return self.gather(masters, self.precision.param if self.keeps_copy else None, into=into)

    def gather(self, tree: PyTree, dtype: Any, *, into: PyTree) -> PyTree:
        """Casts sharded master params and gathers them, one mesh axis at a time, in the narrower dtype.

        Large stacks of layers are gathered layer by layer into the params that they replace: XLA:TPU would hold a whole
        one beside them. Those of as many layers go together, so that several gathers are under way at once.
        """
        leaves, placements = jax.tree.leaves(tree), jax.tree.leaves(self.params, is_leaf=_is_placement)
        if "master" not in self.groups:
            return cast_floating(tree, dtype)
        gathered, stacks = list(jax.tree.leaves(into)), collections.defaultdict(list)
        for i, (placement, x) in enumerate(zip(placements, leaves, strict=True)):
            is_stack = x.ndim > 2 and not placement.dims[0] and x.shape[0] > 1
            if is_stack and gathered[i].nbytes > _GATHERED_AT_ONCE_BYTES:
                stacks[x.shape[0]].append(i)
            else:
                gathered[i] = self._gather_whole(placement, cast_floating(x, dtype))
        for indices in stacks.values():
            rows = self._gather_rows(*([each[i] for i in indices] for each in (placements, leaves, gathered)))
            for i, x in zip(indices, rows, strict=True):
                gathered[i] = x
        return jax.tree.unflatten(jax.tree.structure(tree), gathered)

    def _gather_whole(self, placement: LeafPlacement, x: jax.Array) -> jax.Array:
        kept = self.axes_of_group("params")
        steps = gather_shardings(self.mesh, placement.dims, [axis for axis in self.axes.data if axis not in kept])
        with gather_scope(placement.path):
            return reshard(x, forward=Chain(steps, barrier=True), backward=Chain())

    def _gather_rows(
        self, placements: list[LeafPlacement], stacks: list[jax.Array], olds: list[jax.Array]
    ) -> list[jax.Array]:
        """Gathers stacks of the same number of rows one row at a time, each written over the old one."""

        def gather_row(i: jax.Array, wholes: list[jax.Array]) -> list[jax.Array]:
            rows = [
                self._gather_whole(placement, cast_floating(lax.dynamic_slice_in_dim(x, i, 1), whole.dtype))
                for placement, x, whole in zip(placements, stacks, wholes, strict=True)
            ]
            return [lax.dynamic_update_slice_in_dim(whole, row, i, 0) for whole, row in zip(wholes, rows, strict=True)]

        return lax.fori_loop(0, stacks[0].shape[0], gather_row, olds)


def _is_placement(x: Any) -> bool:
    return isinstance(x, LeafPlacement)


def make_placement(variables: PyTree, *, mesh: Mesh, config: ZeroConfig) -> Placement:
    """Places params, or `Variables` (arrays or `ShapeDtypeStruct`s), under a config."""
    axes = check_config(config).axes_of(mesh)
    if isinstance(variables, TrainState):
        raise ValueError("a TrainState was given for params: give those of the state, state.params")
    variables = as_variables(variables)
    params = with_shapes("params", variables.params, remedy=ARRAYS)
    model_state = with_shapes(MODEL_STATE, variables.model_state, remedy=ARRAYS)
    offload = resolve_offload(config.offload)
    if offload is not None:
        check_has_host_memory(mesh)
    rules = ShardingRules(
        min_shard_size=config.min_shard_size,
        param_specs=config.param_specs,
        axis_rules=config.axis_rules,
        overrides=config.overrides,
    )
    placed = place_params(params, mesh=mesh, axes=axes, rules=rules)
    return Placement(
        mesh=mesh,
        axes=axes,
        rules=rules,
        groups=sharded_groups(config.stage),
        precision=resolve_precision(config.precision),
        params=placed,
        offload=offload,
        model_state=None
        if model_state is None
        else place_model_state(model_state, placed, mesh=mesh, axes=axes, rules=rules),
    )


def trainable(params: PyTree) -> PyTree:
    """Returns the params that have gradients; integers and PRNG keys are replaced by None, which optax passes over."""
    return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else None, params)


def merge(params: PyTree, updated: PyTree) -> PyTree:
    """Puts the leaves of `trainable` back among the others."""
    return jax.tree.map(lambda old, new: old if new is None else new, params, updated, is_leaf=lambda x: x is None)


def strongly_typed(tree: PyTree) -> PyTree:
    """Returns arrays of fixed dtypes: with Python's numbers, which have none, a step is traced anew."""

    def fix(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        return x if jnp.issubdtype(x.dtype, jax.dtypes.extended) else lax.convert_element_type(x, x.dtype)

    return jax.tree.map(fix, tree)


def _build_state(
    variables: PyTree, tx: optax.GradientTransformation, key: jax.Array, placement: Placement
) -> TrainState:
    """Makes a train state from params, each leaf constrained to its sharding; params are not yet gathered."""
    variables = as_variables(variables)
    sharded = jax.tree.map(
        lax.with_sharding_constraint,
        cast_floating(strongly_typed(variables.params), placement.precision.master),
        placement.param_shardings("master"),
    )
    precision = placement.precision
    return TrainState(
        step=jnp.int32(0),
        params=cast_floating(sharded, precision.param) if placement.keeps_copy else sharded,
        master=sharded if placement.keeps_copy else None,
        opt_state=strongly_typed(init_opt_state(tx, trainable(sharded))),
        key=key,
        loss_scale=init_loss_scale(precision.loss_scale),
        num_skipped_steps=jnp.int32(0),
        model_state=jax.tree.map(
            lax.with_sharding_constraint, strongly_typed(variables.model_state), placement.model_state_shardings()
        ),
    )


def train_state_shardings(state: TrainState, placement: Placement) -> TrainState:
    """Returns the sharding of each leaf of a train state."""
    whole: Any = NamedSharding(placement.mesh, PartitionSpec())
    names = variable_names(state.variables) + leaf_names(state.opt_state)
    check_matched("overrides", placement.rules.overrides, names)
    flags = placement.on_host(state.opt_state, state.master)
    return TrainState(
        step=whole,
        params=placement.param_shardings("params"),
        master=None if state.master is None else host_shardings(placement.param_shardings("master"), flags["master"]),
        opt_state=host_shardings(placement.opt_shardings(state.opt_state), flags["opt_state"]),
        key=whole,
        loss_scale=jax.tree.map(lambda _: whole, state.loss_scale),
        num_skipped_steps=whole,
        model_state=placement.model_state_shardings(),
    )


def abstract_state(
    init_fn: Callable[[jax.Array], PyTree],
    tx: optax.GradientTransformation,
    key: jax.Array | None = None,
    *,
    mesh: Mesh,
    config: ZeroConfig,
) -> TrainState:
    """Returns the `ShapeDtypeStruct`s of `init_state`, with shardings, for compiling ahead of time.

    Args:
      init_fn: `init_fn(key)` returns the params, or `Variables`.
      tx: the optimizer.
      key: a key; only its type matters. None stands for `jax.random.key(0)`.
      mesh: the mesh, of real or of compile-only devices.
      config: stage, precision and rules.
    """
    key = jax.eval_shape(lambda: jax.random.key(0)) if key is None else _checked_key(key)
    check_takes("init_fn", init_fn, ["key"], remedy="give a function of a key that returns the params")
    variables = jax.eval_shape(lambda key: _checked(init_fn(key)), key)
    check_optimizer(tx)
    placement = make_placement(variables, mesh=mesh, config=config)
    state = jax.eval_shape(lambda variables, key: _build_state(variables, tx, key, placement), variables, key)
    shardings = train_state_shardings(state, placement)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)


def check_optimizer(tx: Any) -> optax.GradientTransformation:
    """Returns the optimizer; raises `ValueError` for anything that is none."""
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise ValueError(f"tx={tx!r} is no optimizer: give an optax transformation, as optax.adamw(3e-4)")
    return tx


def _checked_key(key: Any) -> Any:
    """Returns a key, old or new; raises `ValueError` for anything that is none."""
    if isinstance(key, jax.Array | jax.ShapeDtypeStruct | np.ndarray):
        is_new = jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0
        if is_new or (key.dtype == jnp.uint32 and key.ndim == 1):
            return key
    raise ValueError(f"key={shown(key)} is no key: give jax.random.key({key if isinstance(key, int) else 0})")


def _checked(variables: PyTree) -> PyTree:
    params, model_state = as_variables(variables).params, as_variables(variables).model_state
    if not jax.tree.leaves(params):
        raise ValueError(f"the params {params!r} hold no arrays: give params, or a function of a key that makes them")
    remedy = "keep what is no array out of the params, as equinox.partition(model, equinox.is_array) does"
    check_arrays("params", params, remedy=remedy)
    check_arrays(MODEL_STATE, model_state, remedy=remedy.replace("params", MODEL_STATE))
    return variables


def init_state(
    init_fn: Callable[[jax.Array], PyTree] | PyTree,
    tx: optax.GradientTransformation,
    key: jax.Array,
    *,
    mesh: Mesh,
    config: ZeroConfig,
) -> TrainState:
    """Makes a train state that is born sharded: no device and no host ever holds a whole sharded tree.

    Args:
      init_fn: `init_fn(key)` returns the params, or `Variables` of params and model state; it is compiled, so that
        each device makes its share only. The values are those of `init_fn(key)` on one device. Or what it would return
        (a pytree of host or device arrays, a pretrained model): it is placed leaf by leaf.
      tx: any optax transformation.
      key: passed to `init_fn`; the keys of the steps are derived from it.
      mesh: the mesh.
      config: stage, precision and rules.
    """
    # Params may be callable too: an Equinox module is a pytree of arrays, a function is a leaf of its own.
    has_arrays = any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(init_fn))
    is_function = callable(init_fn) and (not has_arrays or isinstance(init_fn, jax.tree_util.Partial))
    make = init_fn if is_function else None
    if not make and any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(init_fn)):
        raise ValueError("the params are shapes, without values: give arrays, or a function of a key that makes them")
    shapes = abstract_state(make or (lambda _: init_fn), tx, _checked_key(key), mesh=mesh, config=config)
    placement = make_placement(shapes.variables, mesh=mesh, config=config)
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    build, given = _init_program(make, init_fn, tx, shapes, placement)
    state = build(given, put_global(key, NamedSharding(mesh, PartitionSpec())))
    # Whole params are gathered leaf by leaf: in one program XLA would hold all of them twice.
    params = jax.tree.map(reshard_array, state.params, shardings.params)
    return dataclasses.replace(state, params=params)


def _init_program(
    make: Callable[[jax.Array], PyTree] | None,
    variables: PyTree,
    tx: optax.GradientTransformation,
    shapes: TrainState,
    placement: Placement,
) -> tuple[Any, PyTree]:
    """Returns the jitted `program(given, key)` that makes a state whose params are still sharded, and `given`.

    `make` is the function that makes the variables from a key, or None where `variables` are given.
    """

    def build(variables: PyTree, key: jax.Array) -> TrainState:
        variables = make(key) if make else variables
        return _build_state(variables, tx, jax.random.fold_in(key, 0x2E60), placement)

    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    shardings = dataclasses.replace(shardings, params=placement.param_shardings("master"))
    given, donated = None, False
    if make is None:
        variables = joined(as_variables(variables).params, as_variables(variables).model_state)
        given = jax.tree.map(put_global, variables, placement.variable_shardings())
        made = joined(shapes.masters, shapes.model_state)
        # Host arrays are donated once they are on the devices, so that params are not held twice. Device arrays may
        # share memory with the user's own, even if `device_put` is called with `may_alias=False` (JAX 0.10 and 0.12).
        donated = not any(isinstance(x, jax.Array) for x in jax.tree.leaves(variables))
        donated &= [x.dtype for x in jax.tree.leaves(given)] == [x.dtype for x in jax.tree.leaves(made)]
    return jax.jit(build, out_shardings=shardings, donate_argnums=(0,) if donated else ()), given

"""Initializes train states in shards, from a function of a key or from existing params; and their shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax.core.device_put import put_global, reshard_array, to_device, wait_on_cpu
from zero_jax.core.signatures import check_takes
from zero_jax.core.tracebacks import SHORT_TRACEBACK
from zero_jax.core.tree import (
    PyTree,
    check_arrays,
    check_structure,
    is_key,
    key_shape,
    shapes_of,
    shown,
    strongly_typed,
)
from zero_jax.core.variables import MODEL_STATE, as_variables, function_of_key, joined, of_one_structure
from zero_jax.sharding.mesh import on_mesh
from zero_jax.sharding.precision import cast_floating, init_loss_scale
from zero_jax.sharding.spec import carries
from zero_jax.training.optimizer.update import init_opt_state
from zero_jax.training.same_program import check_same_init
from zero_jax.training.state.checks import check_optimizer, check_trainable, remember_copies
from zero_jax.training.state.gathering import gathered_params
from zero_jax.training.state.matrix_updates import step_placement
from zero_jax.training.state.placement import (
    NO_OTHERS,
    Placement,
    make_placement,
    new_grad_errors,
    train_state_shardings,
)
from zero_jax.training.state.train_state import TrainState, keep_frozen, trainable, used_by_optimizer
from zero_jax.training.zero_config import ZeroConfig, check_config


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
    trained = precision.for_optimizer(trainable(sharded))
    state = TrainState(
        step=jnp.int32(0),
        params=cast_floating(sharded, precision.param) if placement.keeps_copy else sharded,
        master=sharded if placement.keeps_copy else None,
        opt_state=strongly_typed(init_opt_state(tx, trained, mesh=placement.mesh, clip=placement.config.norm_limit)),
        key=key,
        loss_scale=init_loss_scale(precision.loss_scale),
        num_skipped_steps=jnp.int32(0),
        model_state=jax.tree.map(
            lax.with_sharding_constraint, strongly_typed(variables.model_state), placement.model_state_shardings()
        ),
    )
    zeros = lambda x: lax.with_sharding_constraint(jnp.zeros(x.shape, x.dtype), x.sharding)  # noqa: E731
    return dataclasses.replace(state, grad_errors=jax.tree.map(zeros, new_grad_errors(state, tx, placement)))


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

    Example:
      >>> zero.abstract_state(init_fn, tx, mesh=mesh, config=config).params["up"].shape
      (64, 64)
    """
    # Without its sharding: an array made within `jax.set_mesh` of Explicit axes is typed for that mesh.
    key_type = key_shape() if key is None else shapes_of(_checked_key(key))
    check_takes("init_fn", init_fn, ["key"], remedy="give a function of a key that returns the params")
    check_config(config).axes_of(mesh)
    with on_mesh(mesh, in_shard_map=False), SHORT_TRACEBACK:
        variables = jax.eval_shape(lambda key: checked_variables(init_fn(key)), key_type)
        check_optimizer(tx)
        placement = make_placement(variables, mesh=mesh, config=config)
        _check_copies(placement)
        state = jax.eval_shape(lambda variables, key: _build_state(variables, tx, key, placement), variables, key_type)
        shardings = train_state_shardings(state, step_placement(state, tx, mesh=mesh, config=config))
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)


def _checked_key(key: Any) -> Any:
    """Returns a PRNG key, typed or words as of `PRNGKey(0)`; raises `ValueError` for anything else."""
    if isinstance(key, jax.Array | jax.ShapeDtypeStruct | np.ndarray):
        is_new = is_key(key) and key.ndim == 0
        # A restored state may have the words of another generator than JAX's default.
        shape = key.shape if isinstance(key, jax.ShapeDtypeStruct) else jax.eval_shape(jax.random.PRNGKey, 0).shape
        if is_new or (key.dtype == jnp.uint32 and key.ndim == 1 and key.shape == shape):
            return key
    raise ValueError(f"key={shown(key)} is no key: give jax.random.key({key if isinstance(key, int) else 0})")


def _check_copies(placement: Placement) -> None:
    """Raises `ValueError` for a leaf that is sharded over `replica`: a step runs on each copy by itself."""
    for leaf in jax.tree.leaves((placement.params, placement.model_state)):
        if over := [axis for axis in placement.axes.replica if carries(leaf.dims, (axis,))]:
            raise ValueError(
                f"leaf {leaf.path!r}: its spec names the axis {over[0]!r}, which is of full copies of the params: "
                "shard it over the axes of data, or give the axis to data (data_axes, replica_axes)"
            )


def checked_variables(variables: PyTree) -> PyTree:
    """Returns what `init_fn` returned; raises `ValueError` for leaves that are no arrays, or cannot be trained."""
    params, model_state = as_variables(variables).params, as_variables(variables).model_state
    check_arrays("params", params, remedy=NO_OTHERS.format("params"))
    check_arrays(MODEL_STATE, model_state, remedy=NO_OTHERS.format(MODEL_STATE))
    check_trainable(params)
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

    Raises:
      ValueError: what is no params, optimizer or key; processes that make different states.

    Example:
      >>> state = zero.init_state(init_fn, tx, jax.random.key(0), mesh=mesh, config=config)
      >>> state.params["up"].sharding.shard_shape((64, 64))
      (64, 8)
    """
    make = function_of_key(init_fn) and of_one_structure(init_fn)
    if not make and any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(init_fn)):
        raise ValueError("the params are shapes, without values: give arrays, or a function of a key that makes them")
    shapes = abstract_state(make or (lambda _: init_fn), tx, _checked_key(key), mesh=mesh, config=config)
    placement = step_placement(shapes, tx, mesh=mesh, config=config)
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    build, initial = _init_program(make, init_fn, tx, shapes, placement)
    with on_mesh(mesh):
        key = put_global(key, NamedSharding(mesh, PartitionSpec()))
        check_same_init(build, initial, None if make else init_fn, key, shapes.params, mesh)
        state = build(initial, key)
        # Whole params are gathered leaf by leaf: in one program XLA would hold all of them twice.
        params = jax.tree.map(reshard_array, state.params, shardings.params)
    return remember_copies(dataclasses.replace(state, params=params))


def with_gathered_params(
    state: TrainState, tx: optax.GradientTransformation, *, mesh: Mesh, config: ZeroConfig
) -> TrainState:
    """Returns a state whose copies of the master params are those of a step: gathers that are quantized change them."""
    placement = step_placement(state, tx, mesh=mesh, config=config)
    if placement.params_are_masters or placement.quantize is None or placement.quantize.gathers is None:
        return state
    _, unchanged = used_by_optimizer(tx, state, mesh=mesh, config=config)

    def gather(params: PyTree, masters: PyTree) -> PyTree:
        return keep_frozen(params, gathered_params(placement, jax.tree.map(to_device, masters), into=params), unchanged)

    shardings = jax.tree.map(lambda x: x.sharding, state.params)
    params = jax.jit(gather, out_shardings=shardings, donate_argnums=0)(state.params, state.masters)
    return dataclasses.replace(state, params=wait_on_cpu(params, mesh))


def _init_program(
    make: Callable[[jax.Array], PyTree] | None,
    variables: PyTree,
    tx: optax.GradientTransformation,
    shapes: TrainState,
    placement: Placement,
) -> tuple[Any, PyTree]:
    """Returns the jitted `program(initial, key)` that makes a state whose params are still sharded, and `initial`.

    `make` makes the variables from a key; if it is None, `initial` are the `variables` on the devices.
    """

    def build(variables: PyTree, key: jax.Array) -> TrainState:
        variables = make(key) if make else variables
        # Not the key that the params are drawn from: those of the steps are derived from the state's.
        state = _build_state(variables, tx, jax.random.fold_in(key, 0x2E60), placement)
        check_structure("opt_state", state.opt_state, jax.tree.structure(shapes.opt_state), maker="the optimizer")
        return state

    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    if not placement.params_are_masters:  # still sharded: `init_state` gathers them after
        shardings = dataclasses.replace(shardings, params=placement.param_shardings("master"))
    initial, donated = None, False
    if make is None:
        variables = joined(as_variables(variables).params, as_variables(variables).model_state)
        shards = joined(placement.param_shardings("master"), placement.model_state_shardings())
        initial = jax.tree.map(put_global, variables, shards)
        results = joined(shapes.masters, shapes.model_state)
        # Host arrays are donated once they are on the devices, so that params are not held twice. Device arrays may
        # share memory with the user's own, even if `device_put` is called with `may_alias=False` (JAX 0.10 and 0.12).
        donated = not any(isinstance(x, jax.Array) for x in jax.tree.leaves(variables))
        kind = lambda x: (x.dtype, x.sharding.memory_kind)  # noqa: E731
        donated = donated and [*map(kind, jax.tree.leaves(initial))] == [*map(kind, jax.tree.leaves(results))]
    return jax.jit(build, out_shardings=shardings, donate_argnums=(0,) if donated else ()), initial

"""Checks of a state: that a step can take it, made for the same mesh, config and optimizer, and that it is finite."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax.core.device_put import is_on_host, map_on_device, reshard_array
from zero_jax.core.tree import PyTree, has_host_leaves, leaf_names, leaves_by_name, path_name, shapes_of, shown
from zero_jax.program.jaxprs import is_array, is_traced
from zero_jax.training.optimizer.refusals import check_same_leaves
from zero_jax.training.optimizer.update import first_opt_state
from zero_jax.training.state.matrix_updates import step_placement
from zero_jax.training.state.placement import Placement, new_grad_errors
from zero_jax.training.state.train_state import TrainState, trainable
from zero_jax.training.zero_config import ZeroConfig

# Of states with copies that the library returned: by the `id` of a master param that lives, those of all, and of copies
_ids: dict[int, tuple[weakref.ref[Any], list[int]]] = {}


def check_not_donated(state: PyTree) -> None:
    """Raises `ValueError` if the memory of a state was given to a step before."""
    leaves = jax.tree.leaves(state)
    arrays = _array_types(leaves)
    if any(type(x) in arrays and x.is_deleted() for x in leaves):  # before each step: names take time
        deleted = [is_array(leaf) and leaf.is_deleted() for leaf in leaves]
        name = leaf_names(state)[deleted.index(True)]
        raise ValueError(
            f"the state was given to a step before and its memory was donated (leaf {name!r} is deleted): "
            "go on with the state that the step returned, as in `state, metrics = step(state, batch)`"
        )


def check_devices(state: PyTree, mesh: Mesh) -> None:
    """Raises `ValueError` for a state, or variables, on other devices than those of a mesh, or in another order."""
    leaves, devices = jax.tree.leaves(state), [*mesh.devices.flat]
    arrays = _array_types(leaves)
    for i, x in enumerate(leaves):
        if type(x) not in arrays or not x.committed or getattr(x.sharding, "mesh", None) is mesh:
            continue
        places = x.sharding.mesh.devices if isinstance(x.sharding, NamedSharding) else None
        is_ordered = places is None or [*places.flat] == devices
        if not is_ordered or x.sharding.device_set != {*devices}:
            raise ValueError(
                f"leaf {leaf_names(state)[i]!r} is sharded as {_shown(x.sharding)}, and the step was made for the mesh "
                f"{dict(mesh.shape)} of other devices, or in another order: move the state there with "
                "jax.device_put(state, zero.state_shardings(state, mesh=mesh, config=config)), of params alone "
                "zero.Variables(params=params)"
            )


def check_no_leaf_twice(state: PyTree) -> None:
    """Raises `ValueError` if two leaves of a state are one array, which cannot be donated twice."""
    leaves = jax.tree.leaves(state)
    if len(set(map(id, leaves))) == len(leaves):
        return
    names: dict[int, str] = {}
    for name, leaf in leaves_by_name(state).items():
        if is_array(leaf) and names.setdefault(id(leaf), name) != name:
            raise ValueError(
                f"leaf {name!r} of the state is the same array as {names[id(leaf)]!r}, and a step donates both: "
                "copy it first, as in jax.tree.map(jnp.copy, state.params)"
            )


def place_state(
    state: PyTree, shardings: Sequence[NamedSharding], dtypes: Sequence[Any], *, also: Sequence[NamedSharding]
) -> PyTree:
    """Moves host arrays, uncommitted ones, and those with equivalent shardings, to those that a step was compiled for.

    With other shardings `jax.jit` would compile a second program, which could not reuse the state's memory. Shardings
    and dtypes are in the order of `jax.tree.leaves`; arrays that are sharded as `also` says, as `state_shardings`
    without an optimizer does, are moved, too.

    Raises:
      ValueError: a leaf that is sharded otherwise, or of another dtype.
    """
    leaves, tree = jax.tree.flatten(state)
    arrays = _array_types(leaves)
    expected = zip(leaves, shardings, dtypes, strict=True)
    # By equality, which is faster than `is_equivalent_to`: as each step but the first finds them.
    if all(type(x) in arrays and x.dtype == d and x.committed and x.sharding == s for x, s, d in expected):
        return state
    return tree.unflatten(map(_placed, leaf_names(state), leaves, shardings, dtypes, also))


def _placed(name: str, leaf: Any, sharding: NamedSharding, dtype: Any, also: NamedSharding) -> Any:
    has = jnp.result_type(leaf) if has_host_leaves([leaf]) else leaf.dtype
    if has != dtype:
        raise ValueError(
            f"leaf {name!r} of the state is {has}, and the step was compiled for {dtype}: cast it back, or make "
            "another step for such states with zero.make_train_step"
        )
    if is_traced(leaf):  # of a loop over steps: XLA would carry params as the update shards them
        return leaf if is_on_host(leaf.aval) else lax.with_sharding_constraint(leaf, sharding)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if is_array(leaf) and not leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            raise ValueError(
                "jax.disable_jit is on, and only jax.jit shards arrays: make and run the step without it "
                "(jax.debug.print and jax.debug.breakpoint look into a step)"
            )
        is_elsewhere = leaf.sharding.memory_kind != sharding.memory_kind
        if leaf.sharding.is_equivalent_to(also, leaf.ndim) or not (leaf.committed or is_elsewhere):
            return reshard_array(leaf, sharding)  # not `device_put`: the step donates it, and would share its memory
        kinds = [f" in {x.memory_kind}" * is_elsewhere for x in (leaf.sharding, sharding)]
        raise ValueError(
            f"leaf {name!r} of the state is sharded as {_shown(leaf.sharding)}{kinds[0]}, "
            f"and the step was made for {_shown(sharding)}{kinds[1]}: "
            "make the state with the mesh and config that the step was made with, or move it there with "
            "jax.device_put(state, zero.state_shardings(state, mesh=mesh, config=config))"
        )
    return jax.device_put(leaf, sharding)


def _shown(sharding: Any) -> str:
    if not isinstance(sharding, NamedSharding):
        return str(sharding)
    ids = [device.id for device in sharding.mesh.devices.flat]  # type: ignore[union-attr]
    devices = ", ".join(map(str, ids)) if len(ids) <= 8 else f"{', '.join(map(str, ids[:8]))}, ..."
    return f"{sharding.spec} of the mesh {dict(sharding.mesh.shape)} of devices {devices}"


def _array_types(leaves: Sequence[Any]) -> set[type]:
    """Returns the types of leaves that are arrays on devices; `isinstance` for every leaf would take longer."""
    return {kind for kind, leaf in {type(x): x for x in leaves}.items() if is_array(leaf)}


def check_optimizer(tx: Any) -> optax.GradientTransformation:
    """Returns the optimizer; raises `ValueError` for anything that is not an optax transformation."""
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        inner = "the one in its .tx" if hasattr(tx, "tx") else "as optax.adamw(3e-4)"
        raise ValueError(f"tx={shown(tx)} is no optimizer: give an optax transformation, {inner}")
    return tx


def check_trainable(params: PyTree) -> None:
    """Raises `ValueError` for params of which none has a gradient, or which have state that a model of Flax updates."""
    dtypes = {name: getattr(x, "dtype", None) or jnp.result_type(x) for name, x in leaves_by_name(params).items()}
    if not dtypes:
        raise ValueError(f"the params {params!r} hold no arrays: give params, or a function of a key that makes them")
    if not any(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes.values()):
        name, dtype = next(iter(dtypes.items()))
        raise ValueError(
            f"the params hold no floating leaf, so that none is trained (leaf {name!r} is {dtype}): "
            "make them floating, as x.astype(jnp.float32) does"
        )
    nnx = sys.modules.get("flax.nnx")
    kinds = (nnx.BatchStat, nnx.Cache, nnx.Intermediate, nnx.RngState) if nnx else ()
    variables = jax.tree.leaves_with_path(params, is_leaf=lambda x: isinstance(x, kinds))
    state = [f"{path_name(path)} ({type(x).__name__})" for path, x in variables if isinstance(x, kinds)]
    remedy = "zero.from_nnx(Model, loss) separates them"
    if isinstance(params, Mapping) and {"params", "batch_stats"} <= params.keys():
        state, remedy = ["batch_stats"], "zero.from_linen(module, loss, *inputs) separates them"
    if state:
        more = f" and {len(state) - 2} more" if len(state) > 2 else ""
        raise ValueError(
            f"the params hold state of the model that no gradient updates: {', '.join(state[:2])}{more}. An optimizer "
            f"would change it, and what the model writes there would be lost: {remedy}, or return "
            "zero.Variables(params=..., model_state=...) from init_fn"
        )


def check_is_state(state: Any, *, who: str) -> TrainState:
    """Returns a `TrainState`; raises `ValueError` for anything else."""
    if not isinstance(state, TrainState):
        raise ValueError(
            f"{who} takes a TrainState, not a {type(state).__name__}: "
            "make its shapes with zero.abstract_state(init_fn, tx, mesh=mesh, config=config)"
        )
    return state


def checked_placement(
    state: TrainState, tx: optax.GradientTransformation, *, mesh: Mesh, config: ZeroConfig
) -> Placement:
    """Returns the placement of a step's state; raises `ValueError` if it was made with another optimizer or config."""
    if not isinstance(state, TrainState):
        raise ValueError(
            f"a step takes the TrainState that zero.init_state returns, not a {type(state).__name__}: call it as in "
            "`state, metrics = step(state, batch)`"
        )
    placement = step_placement(state, tx, mesh=mesh, config=config)
    if placement.keeps_copy != (state.master is not None):
        raise ValueError(
            "the state was made for another stage or precision "
            f"({'it has no master params' if state.master is None else 'it has master params beside its params'}): "
            "make it with zero.init_state and the config that the step was made with"
        )
    dtypes = placement.precision
    groups = {"params": dtypes.param if placement.keeps_copy else dtypes.master, "master": dtypes.master}
    for group, dtype in groups.items():
        for i, x in enumerate(jax.tree.leaves(getattr(state, group)) if dtype is not None else ()):
            if x.dtype != dtype and jnp.issubdtype(x.dtype, jnp.floating):
                name = leaf_names(getattr(state, group))[i]  # which take time
                raise ValueError(
                    f"leaf '{group}/{name}' of the state is {x.dtype}, and the precision of the step has {dtype}: cast "
                    "it, or make the state with zero.init_state and the config that the step was made with"
                )
    if (placement.precision.loss_scale is None) != (state.loss_scale is None):
        raise ValueError("the state and the step differ in loss scaling: make both with the same config")
    errors = new_grad_errors(state, tx, placement)
    check_same_leaves("grad_errors", "error feedback of the config", state.grad_errors, errors)
    params = shapes_of(trainable(state.masters))
    expected = first_opt_state(tx, placement.precision.for_optimizer(params), mesh=mesh)
    check_same_leaves("opt_state", "optimizer", state.opt_state, expected)
    return placement


def remember_copies(state: TrainState) -> TrainState:
    """Returns a state, of which `warn_of_lost_copies` knows which arrays belong together."""
    if state.master is not None and is_array((leaves := jax.tree.leaves((state.master, state.params)))[0]):
        ids = list(map(id, leaves))
        # Forgotten with the first of them: Python gives the `id` of what is gone to another object.
        _ids[ids[0]] = weakref.ref(leaves[0], lambda _: _ids.pop(ids[0], None)), ids
    return state


def warn_of_lost_copies(state: TrainState, *, who: str) -> None:
    """Warns of params that have been replaced since the library returned them, and their master params have not.

    An update starts from the master params, so other values for the copies alone would be lost without a word.

    Args:
      state: a state, whose arrays may come from anywhere.
      who: what has to do with the master params alone, such as "a step updates".

    Warns:
      UserWarning: names the first of these params.
    """
    if state.master is None:
        return
    ids = list(map(id, jax.tree.leaves((state.master, state.params))))
    _, before = _ids.get(ids[0], (None, []))
    if len(before) != len(ids):
        return
    num_params = len(ids) // 2
    is_same = [now == then for now, then in zip(ids, before, strict=True)]
    replaced = [i for i in range(num_params) if is_same[i] and not is_same[num_params + i]]
    if replaced:
        more = f" and {len(replaced) - 1} more were" if len(replaced) > 1 else " was"
        warnings.warn(
            f"leaf {leaf_names(state.params)[replaced[0]]!r} of state.params{more} replaced, and state.master was not: "
            f"{who} the master params alone, and the new values are lost. Write both: "
            "zero.write_leaves(state, {'params/...': value}), or dataclasses.replace(state, params=..., master=...)",
            stacklevel=3,
        )


class NonfiniteState(ValueError):
    """Raised for a state whose params contain NaN or infinities.

    Attributes:
      leaves: paths of the non-finite leaves, such as `params/embed`.
    """

    def __init__(self, step: int, leaves: Sequence[str]):
        """Says which leaves, and what to do."""
        self.leaves = tuple(leaves)
        others = f" and {len(leaves) - 1} other leaves" if len(leaves) > 1 else ""
        super().__init__(
            f"the state of step {step} is not saved: NaN or infinities in {leaves[0]}{others}. Go on from an earlier "
            "checkpoint, with a smaller learning rate; allow_nonfinite=True saves it all the same"
        )


def nonfinite_leaves(state: TrainState, *, mesh: Mesh) -> list[str]:
    """Returns the paths of the leaves of params and master params that contain NaN or infinities.

    Every process gets the same result. The optimizer state is not checked: optax stores infinities there on purpose,
    as the best value so far of `reduce_on_plateau`.
    """
    groups = {"params": state.params} | ({} if state.master is None else {"master": state.master})
    return [*_nonfinite(leaves_by_name(groups), mesh)]


def nonfinite_counts(params: PyTree, *, mesh: Mesh) -> dict[str, int]:
    """Returns how many elements are NaN or infinite, by the paths of the leaves that have any, in every process."""
    count = jax.jit(
        lambda x: map_on_device(lambda x: (~_isfinite(x)).sum(dtype=jnp.uint32), [x])[0],
        out_shardings=NamedSharding(mesh, PartitionSpec()),
    )
    return {name: int(count(x)) for name, x in _nonfinite(leaves_by_name(params), mesh).items()}


def _nonfinite(leaves: Mapping[str, jax.Array], mesh: Mesh) -> dict[str, jax.Array]:
    floating = {name: x for name, x in leaves.items() if jnp.issubdtype(x.dtype, jnp.inexact) and x.size}
    if not floating:
        return {}
    check = jax.jit(_are_finite, out_shardings=NamedSharding(mesh, PartitionSpec()))
    finite = np.asarray(check(list(floating.values())))
    return {name: floating[name] for name, is_finite in zip(floating, finite, strict=True) if not is_finite}


def _are_finite(leaves: Sequence[jax.Array]) -> jax.Array:
    """Returns for each array whether it is all finite: `bool[num_leaves]`, without a copy of any."""
    return jnp.stack(map_on_device(lambda x: _isfinite(x).all(), leaves))


def _isfinite(x: jax.Array) -> jax.Array:
    # One-byte types have no `isfinite`.
    return jnp.isfinite(x if x.dtype.itemsize > 1 else lax.convert_element_type(x, jnp.float32))

"""Whether a state is one that a step can take."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding

from zero_jax.jaxprs import is_array
from zero_jax.state import TrainState, make_placement, trainable
from zero_jax.tree import PyTree, leaf_names
from zero_jax.zero_config import ZeroConfig


def check_not_donated(state: PyTree) -> None:
    """Raises `ValueError` if the memory of a state was given to a step before."""
    deleted = [is_array(leaf) and leaf.is_deleted() for leaf in jax.tree.leaves(state)]
    if any(deleted):
        name = leaf_names(state)[deleted.index(True)]
        raise ValueError(
            f"the state was given to a step before and its memory was donated (leaf {name!r} is deleted): "
            "go on with the state that the step returned, as in `state, metrics = step(state, batch)`"
        )


def check_no_leaf_twice(state: PyTree) -> None:
    """Raises `ValueError` if two leaves of a state are one array, which cannot be donated twice."""
    leaves = jax.tree.leaves(state)
    if len(set(map(id, leaves))) == len(leaves):
        return
    seen: dict[int, str] = {}
    for name, leaf in zip(leaf_names(state), leaves, strict=True):
        if is_array(leaf) and seen.setdefault(id(leaf), name) != name:
            raise ValueError(
                f"leaf {name!r} of the state is the same array as {seen[id(leaf)]!r}, and a step donates both: "
                "copy it first, as in jax.tree.map(jnp.copy, state.params)"
            )


def check_placed(state: PyTree, shardings: PyTree) -> None:
    """Raises `ValueError` if a leaf of a state does not lie as the step was made for."""
    leaves = zip(leaf_names(state), jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True)
    show = lambda s: f"{s.spec} of the mesh {dict(s.mesh.shape)}" if isinstance(s, NamedSharding) else str(s)  # noqa: E731
    for name, leaf, sharding in leaves:
        if is_array(leaf) and not leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            raise ValueError(
                f"leaf {name!r} of the state lies as {show(leaf.sharding)}, "
                f"and the step was made for {show(sharding)}: "
                "make the state with the mesh and config that the step was made with, or move it there with "
                "jax.device_put(state, zero.state_shardings(state, mesh=mesh, config=config))"
            )


def check_is_state(state: Any, *, who: str) -> TrainState:
    """Returns a `TrainState`; raises `ValueError` for anything else."""
    if not isinstance(state, TrainState):
        raise ValueError(
            f"{who} takes a TrainState, not a {type(state).__name__}: "
            "make its shapes with zero.abstract_state(init_fn, tx, mesh=mesh, config=config)"
        )
    return state


def check_made_for(state: TrainState, tx: optax.GradientTransformation, *, mesh: Mesh, config: ZeroConfig) -> None:
    """Raises `ValueError` if a state was made with another optimizer or config than a step."""
    if not isinstance(state, TrainState):
        raise ValueError(f"a step takes the TrainState that zero.init_state returns, not a {type(state).__name__}")
    placement = make_placement(state.params, mesh=mesh, config=config)
    if placement.keeps_copy != (state.master is not None):
        raise ValueError(
            "the state was made for another stage or precision "
            f"({'it has no master params' if state.master is None else 'it has master params beside its params'}): "
            "make it with zero.init_state and the config that the step was made with"
        )
    if (placement.precision.loss_scale is None) != (state.loss_scale is None):
        raise ValueError("the state and the step differ in loss scaling: make both with the same config")
    expected = jax.eval_shape(tx.init, trainable(state.masters))
    names, wanted = leaf_names(state.opt_state), leaf_names(expected)
    shapes = [f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(state.opt_state)]
    wanted_shapes = [f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(expected)]
    if names != wanted or shapes != wanted_shapes:
        have, need = (list(zip(*pair, strict=True)) for pair in ((names, shapes), (wanted, wanted_shapes)))
        odd = next((f"{name} {shape}" for name, shape in have if (name, shape) not in need), "no other leaf")
        lacks = next((f"{name} {shape}" for name, shape in need if (name, shape) not in have), "no other leaf")
        raise ValueError(
            f"state.opt_state does not match the optimizer: it holds {odd}, "
            f"and the optimizer's own state has {lacks}. "
            "Make the state with the optimizer that the step was made with"
        )

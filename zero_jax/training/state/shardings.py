"""Shardings of a train state (`TrainState` or any pytree with params), and a report of them."""

from __future__ import annotations

import dataclasses

import jax
import optax
from jax.sharding import Mesh

from zero_jax.core.tree import PathPatterns, PyTree, leaves_by_name, path_name, with_shapes
from zero_jax.core.variables import MODEL_STATE, joined
from zero_jax.sharding.rules import ShardingReport, report_placements
from zero_jax.training.state.checks import check_optimizer
from zero_jax.training.state.matrix_updates import matrices_of_leaves, step_placement
from zero_jax.training.state.placement import NO_OTHERS, make_placement, train_state_shardings
from zero_jax.training.state.train_state import TrainState
from zero_jax.training.zero_config import ZeroConfig


def state_shardings(
    abstract_state: PyTree,
    *,
    mesh: Mesh,
    config: ZeroConfig,
    params: str = "params",
    model_state: str | None = None,
    tx: optax.GradientTransformation | None = None,
) -> PyTree:
    """Returns a `NamedSharding` for each leaf of a train state: a `TrainState`, or any pytree with params.

    Args:
      abstract_state: arrays or `ShapeDtypeStruct`s.
      mesh: the mesh.
      config: stage and rules.
      params: path of the params inside the state, such as `params` (a field or key of that name) or `0` (of a tuple).
        Every other leaf is optimizer state, sharded as the param whose path is the end of its own path.
      model_state: path of the model state, such as `batch_stats`; it is sharded at the stages that shard params. None
        if there is none. A `TrainState` needs neither path.
      tx: the optimizer of a `TrainState`, which shards stacks along their layers if its update needs whole matrices of
        them (docs/matrix_optimizers.md); a step moves a state without that to its shardings once.

    Returns:
      A pytree like `abstract_state`, for `jax.jit`'s `in_shardings` and `out_shardings` or `jax.device_put`.

    Raises:
      ValueError: a path without leaves.

    Example:
      >>> shardings = zero.state_shardings(jax.eval_shape(lambda: state), mesh=mesh, config=config)
      >>> shardings.params["up"].spec
      P(None, 'data')
    """
    for name, path in (("params", params), (MODEL_STATE, model_state)):
        if not isinstance(path, str) and (name, path) != (MODEL_STATE, None):
            raise ValueError(f"{name}={path!r}: give a path, such as {name!r} or '0' (of a tuple)")
    if isinstance(abstract_state, TrainState):
        tx = None if tx is None else check_optimizer(tx)
        return train_state_shardings(abstract_state, step_placement(abstract_state, tx, mesh=mesh, config=config))
    abstract_state = with_shapes("state", abstract_state, remedy=NO_OTHERS.format("state"))
    param_paths, subtree = _subtree(abstract_state, params, what="params")
    model_state_paths, model_state_tree = {}, None
    if model_state is not None:
        model_state_paths, model_state_tree = _subtree(abstract_state, model_state, what=MODEL_STATE)
    placement = make_placement(joined(subtree, model_state_tree), mesh=mesh, config=config)
    leaves, tree = leaves_by_name(abstract_state), jax.tree.structure(abstract_state)
    paths = param_paths | {name: f"{MODEL_STATE}/{path}" for name, path in model_state_paths.items()}
    PathPatterns("overrides", config.overrides or {}).check_matched([paths.get(name, name) for name in leaves])
    shardings = placement.opt_shardings({name: leaf for name, leaf in leaves.items() if name not in paths})
    shardings |= zip(param_paths, jax.tree.leaves(placement.param_shardings("params")), strict=True)
    shardings |= zip(model_state_paths, jax.tree.leaves(placement.model_state_shardings()), strict=True)
    return tree.unflatten([shardings[name] for name in leaves])


def _subtree(state: PyTree, at: str, *, what: str) -> tuple[dict[str, str], PyTree]:
    """Returns the subtree at a path, after a dict from the paths of its leaves in the state to those inside it."""
    names = leaves_by_name(state)
    paths = {n: n.removeprefix(at).removeprefix("/") for n in names if n == at or n.startswith(at + "/")}
    if not paths:
        groups = ", ".join(dict.fromkeys(name.split("/")[0] for name in names))
        raise ValueError(
            f"the state has no {what} at {at!r} (it has {groups or 'no leaves'}): say where they are with "
            f"state_shardings(..., {what}='path/of/{what}')"
        )
    # By the path of a node: it may be of any type, a dict, a field of a dataclass, an element of a tuple.
    is_root = lambda path, _: path_name(path) == at  # noqa: E731
    nodes, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_root, is_leaf_takes_path=True)
    return paths, next(node for path, node in nodes if path_name(path) == at)


def sharding_report(
    params: PyTree, *, mesh: Mesh, config: ZeroConfig, tx: optax.GradientTransformation | None = None
) -> ShardingReport:
    """Reports the sharding of params and model state, and why some leaves are replicated.

    Args:
      params: params, `Variables` or a `TrainState`; arrays or `ShapeDtypeStruct`s.
      mesh: the mesh.
      config: stage and rules.
      tx: the optimizer; with it, the reasons of params whose matrices its update needs whole say where it computes on
        them. `params` is then a `TrainState`.

    Raises:
      ValueError: an optimizer without a `TrainState`.

    Example:
      >>> print(zero.sharding_report(state.params, mesh=mesh, config=config))
      down  (64, 64)  float32  [-, data]  sharded
      up    (64, 64)  float32  [-, data]  sharded
      4.10 KB a device
    """
    if tx is not None and not isinstance(params, TrainState):
        raise ValueError("tx: what its update does depends on its state: give the TrainState, of zero.abstract_state")
    if tx is None:
        variables = params.variables if isinstance(params, TrainState) else params
        placement = make_placement(variables, mesh=mesh, config=config)
        placed = placement.params
    else:
        placement = step_placement(params, check_optimizer(tx), mesh=mesh, config=config)
        matrices = matrices_of_leaves(tx, params, placement)
        placed = jax.tree.leaves(placement.params)
        for i, leaf in enumerate(placed):
            if what := matrices.get(leaf.path):
                by_layers = "" if leaf.update_dims is None else "master params and optimizer state along the layers, "
                placed[i] = dataclasses.replace(leaf, reason=f"{leaf.reason}; update: {by_layers}{what}")
    return report_placements(
        (placed, placement.model_state), mesh=mesh, axes=placement.axes, groups=sorted(placement.groups)
    )

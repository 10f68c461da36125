"""Shardings of a train state (`TrainState` or any pytree with params), and a report of them."""

from __future__ import annotations

import collections
import dataclasses
import re

import jax
import optax
from jax.sharding import Mesh

from zero_jax.core.text_tables import Report, aligned, format_bytes
from zero_jax.core.tree import PathPatterns, PyTree, leaves_by_name, path_name, with_shapes
from zero_jax.core.variables import MODEL_STATE, joined
from zero_jax.sharding.rules import ONE_DEVICE, LeafPlacement
from zero_jax.sharding.spec import carries, num_shards, without
from zero_jax.training.state.checks import check_optimizer
from zero_jax.training.state.matrix_updates import matrices_of_leaves, step_placement
from zero_jax.training.state.placement import NO_OTHERS, make_placement, train_state_shardings
from zero_jax.training.state.train_state import TrainState
from zero_jax.training.zero_config import ZeroConfig

# As many leaves that differ in a number of their path alone are one row of a report.
_MANY_ALIKE = 3


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingReport(Report):
    """How the leaves of sharded groups are sharded, and why some are replicated; prints as a table.

    Attributes:
      placements: each leaf.
      per_device_bytes: bytes a device of the leaves, sharded like this.
      whole_bytes: of these, unsharded leaves.
      groups: the groups of a train state that the stage shards like this; the others are replicated.
      secondary: the axes of `data` that params and model state are sharded over, if not all (hpZ); these groups are
        then sharded like this but for the other axes of `data`.
      secondary_bytes: bytes a device of the leaves, sharded over these; 0 without them.

    Example:
      >>> report = zero.sharding_report(state.params, mesh=mesh, config=config)
      >>> [leaf.path for leaf in report.placements]
      ['down', 'up']
    """

    placements: tuple[LeafPlacement, ...]
    per_device_bytes: int
    whole_bytes: int
    groups: tuple[str, ...] = ()
    secondary: tuple[str, ...] = ()
    secondary_bytes: int = 0

    def __str__(self) -> str:
        rows = []
        for p in sorted(self.placements, key=lambda p: -p.num_bytes):
            spec = ", ".join("+".join(dim) or "-" for dim in p.dims) or "scalar"
            rows.append((p.path, str(p.shape), p.dtype, f"[{spec}]", p.reason))
        alike = [(re.sub(r"\d+", "*", path), *rest) for path, *rest in rows]  # in layers of a Python loop
        counts = collections.Counter(alike)
        many = {key: (key[0], f"{count} x {key[1]}", *key[2:]) for key, count in counts.items() if count >= _MANY_ALIKE}
        # The row of many stands where the first of them was.
        rows = list(dict.fromkeys(many[key] if key in many else row for key, row in zip(alike, rows, strict=True)))
        unsharded = f", {format_bytes(self.whole_bytes)} of it unsharded leaves" if self.whole_bytes else ""
        lines = [aligned(rows), f"{format_bytes(self.per_device_bytes)} a device{unsharded}"]
        if "params" not in self.groups:
            sharded = ", ".join(self.groups) or "nothing"
            lines.append(f"sharded like this at this stage: {sharded}; params are replicated over data")
        if self.secondary:
            lines.append(
                f"secondary shard: params and model state are sharded over {'+'.join(self.secondary)} alone, "
                f"{format_bytes(self.secondary_bytes)} a device"
            )
        if any(p.reason == ONE_DEVICE for p in self.placements):
            lines.append("not sharded over data: it has one device (JAX_NUM_CPU_DEVICES=8 simulates eight)")
        elif 2 * self.whole_bytes > self.per_device_bytes:
            lines.append("warning: unsharded leaves take more than half of that; the last column says why")
        return "\n".join(lines)


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
    leaves, axes = tuple(jax.tree.leaves((placed, placement.model_state))), placement.axes
    per_device = {p.path: p.num_bytes // num_shards(mesh, p.dims) for p in leaves}
    across = [axis for axis in axes.data if axis not in axes.secondary]
    inside = [p.num_bytes // num_shards(mesh, without(p.dims, across)) for p in leaves] if axes.secondary else []
    return ShardingReport(
        placements=leaves,
        per_device_bytes=sum(per_device.values()),
        whole_bytes=sum(per_device[p.path] for p in leaves if not carries(p.dims, axes.data)),
        groups=tuple(sorted(placement.groups)),
        secondary=axes.secondary,
        secondary_bytes=sum(inside),
    )

"""Reads the specs in a model's own params: Flax Linen's boxes, and the metadata of Flax NNX's variables.

Both are pytree nodes of one array, with a name for each dim: a mesh axis, or a logical axis (`embed`, `heads`) that
rules map to one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax.core.close_match import did_you_mean
from zero_jax.core.tree import PyTree, path_name
from zero_jax.core.variables import variable_names
from zero_jax.sharding.spec import Dims, checked_dims

# From a logical axis to the mesh axis, or axes, that its dims are sharded over, or None. As in Flax, pairs may name one
# twice: the first whose axes the leaf has not used yet counts.
AxisRules = Mapping[str, "str | Sequence[str] | None"] | Sequence[tuple[str, "str | Sequence[str] | None"]]


def specs_of(
    params: PyTree,
    rules: AxisRules | None = None,
    *,
    mesh: Mesh,
    batch_axes: Sequence[str] = ("replica", "data"),
) -> PyTree | None:
    """Returns the specs that the params themselves carry, as a tree like them, or None where they carry none.

    Known are the boxes of `flax.linen.with_partitioning` and `with_logical_partitioning`, the metadata of
    `flax.nnx.with_partitioning` (`out_sharding`, or `sharding` of older releases), and whatever looks like either. The
    rules, from logical names to mesh axes, go before those that a box or a variable has of its own; a name that is an
    axis of the mesh and has no rule stands for that. A mesh of `batch_axes` alone, which are not the model's, has
    nothing that logical names could stand for; without rules they then mean nothing.

    Raises:
      ValueError: a name that is neither an axis nor in the rules, although the mesh has axes of the model, or names
        that do not fit the dims.
    """
    is_named = lambda x: _names(x) is not None  # noqa: E731
    nodes = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_named)
    others = [str(axis) for axis, size in mesh.shape.items() if size > 1 and axis not in batch_axes]
    specs: list[PartitionSpec] = []
    has_names = False
    for path, node in nodes:
        leaves = jax.tree.leaves(node)
        names = _names(node)
        if names is None or len(leaves) != 1:
            specs.extend(PartitionSpec() for _ in leaves)
            continue
        has_names = True
        own = getattr(node, "rules", None) or _metadata(node).get("sharding_rules")
        pairs = [*_pairs(rules), *_pairs(own)]
        specs.append(_spec(path_name(path), leaves[0], names, pairs, mesh=mesh, others=others))
    return jax.tree.structure(params).unflatten(specs) if has_names else None


def spec_of_each(params: PyTree, specs: PyTree, *, what: str) -> list[Any]:
    """Returns a spec for each param, in the order of the leaves, from a tree of specs like the params or a prefix.

    Specs are `PartitionSpec`s, `NamedSharding`s or None for replicated; errors start with `what`.

    Raises:
      ValueError: the specs are no prefix of the params.
    """
    is_spec = lambda x: x is None or isinstance(x, (PartitionSpec, NamedSharding))  # noqa: E731
    try:
        full = jax.tree.broadcast(specs, params, is_leaf=is_spec)
    except ValueError as error:
        # Those of a whole train state, whose params are at `params`, as `zero.state_shardings` returns them.
        remedy = " (give those of the params alone: shardings.params)" if hasattr(specs, "params") else ""
        raise ValueError(f"{what} not a prefix of the params{remedy}: {error}") from error
    # flatten_up_to, because a None may be a spec or a part of the params' structure
    return jax.tree.structure(params).flatten_up_to(full)


def dims_by_name(params: PyTree, specs: PyTree, *, mesh: Mesh) -> list[tuple[str, Dims]]:
    """Returns the path of each param and the axes of its dims, as `spec_of_each` finds its spec.

    Raises:
      ValueError: a spec does not fit its param, or names an axis that the mesh does not have.
    """
    each = spec_of_each(params, specs, what="the specs are")
    leaves = zip(variable_names(params), jax.tree.leaves(params), each, strict=True)
    return [(name, checked_dims(f"param {name!r}", spec, jax.typeof(leaf).shape, mesh)) for name, leaf, spec in leaves]


def _metadata(node: Any) -> Mapping[str, Any]:
    """Returns the metadata of an NNX variable; empty for anything else."""
    get = None if isinstance(node, type) else getattr(node, "get_metadata", None)
    metadata = get() if callable(get) and hasattr(node, "get_value") else None
    return metadata if isinstance(metadata, Mapping) else {}


def _names(node: Any) -> tuple[Any, ...] | None:
    """Returns the names of the dims that a box or a variable has, or None."""
    if isinstance(node, (jax.Array, jax.ShapeDtypeStruct, dict, list, tuple)) or isinstance(node, type):
        return None
    if callable(getattr(node, "get_partition_spec", None)) and hasattr(node, "unbox"):
        names = getattr(node, "names", None)
    else:
        metadata = _metadata(node)
        names = next((metadata[key] for key in ("out_sharding", "sharding", "sharding_names") if metadata.get(key)), ())
        names = getattr(names, "spec", names)  # a NamedSharding
    return tuple(names) if isinstance(names, Sequence) and any(name is not None for name in names) else None


def _pairs(rules: Any) -> list[tuple[str, Any]]:
    if rules is None:
        return []
    pairs = list(rules.items()) if isinstance(rules, Mapping) else list(rules)
    for pair in pairs:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ValueError(f"axis_rules: {pair!r} is not a pair of a logical name and a mesh axis (or None)")
    return pairs


def _spec(
    path: str, leaf: Any, names: Sequence[Any], rules: list[tuple[str, Any]], *, mesh: Mesh, others: list[str]
) -> PartitionSpec:
    if len(names) != len(leaf.shape):
        raise ValueError(
            f"param {path!r} of shape {tuple(leaf.shape)} carries the names {tuple(names)}: name each of its "
            f"{len(leaf.shape)} dims, None where it stays whole; a stacked module's own dim is named by "
            "nn.scan(metadata_params={nn.PARTITION_NAME: None}) or nnx.vmap(transform_metadata=...)"
        )
    used: set[str] = set()
    entries: list[Any] = []
    for name in names:
        parts = () if name is None else (name,) if isinstance(name, str) else tuple(name)
        axes = [axis for part in parts for axis in _axes(path, part, used, rules, mesh=mesh, others=others)]
        used.update(axes)
        entries.append(tuple(axes) if len(axes) > 1 else axes[0] if axes else None)
    return PartitionSpec(*entries)


def _axes(
    path: str, name: str, used: set[str], rules: list[tuple[str, Any]], *, mesh: Mesh, others: list[str]
) -> tuple[str, ...]:
    known = [axes for logical, axes in rules if logical == name]
    for axes in known:
        chosen = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
        unknown = next((axis for axis in chosen if axis not in mesh.axis_names), None)
        if unknown is not None:
            raise ValueError(
                f"axis_rules turn {name!r} into the axis {unknown!r}, but the mesh has {mesh.axis_names}: "
                f"name one of them, or leave the dim whole with {{{name!r}: None}}"
            )
        if not used & set(chosen):
            return chosen
    if known:
        return ()  # as in Flax: another dim of this leaf has the axis
    if name in mesh.axis_names:
        return (name,)
    if not others:
        return ()  # there is no axis that the model could be sharded over
    near = did_you_mean(name, others, "{}") or others[0]
    raise ValueError(
        f"param {path!r} names a dim {name!r}, which is neither an axis of the mesh {mesh.axis_names} nor in "
        f"axis_rules: say what it is cut over with ZeroConfig(axis_rules={{{name!r}: {near!r}}}), "
        f"or that it stays whole with {{{name!r}: None}}"
    )

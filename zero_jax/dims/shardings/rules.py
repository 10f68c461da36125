"""Sharding propagation through single primitives, mostly as XLA decides it: for estimates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from zero_jax.dims.dim_map import DimMap
from zero_jax.dims.primitives import SCATTERS, dim_map, known_primitives
from zero_jax.dims.shardings.sharding import ValueSharding
from zero_jax.sharding.spec import Dims, dims_of, without

Rule = Callable[[Any, Any, Sequence[ValueSharding]], list[ValueSharding]]


def merge(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    """Elementwise: operands are resharded to the sharding of the largest operand, or gathered where they differ."""
    agreed = _agreed(walk, [(x, atom.aval) for x, atom in zip(inputs, eqn.invars, strict=True) if x.dims])
    partial, itemsize, results = inputs[0].partial if inputs else (), 0, []
    if partial:
        itemsize = min(x.itemsize or atom.aval.dtype.itemsize for x, atom in zip(inputs, eqn.invars, strict=True))
    for var in eqn.outvars:
        num_dims = len(getattr(var.aval, "shape", ()))  # a token has none
        dims = agreed if num_dims == len(agreed) else ((),) * num_dims
        results.append(ValueSharding(dims=dims, partial=partial, itemsize=itemsize))
    return results


def _agreed(walk: Any, operands: Sequence[tuple[ValueSharding, Any]]) -> Dims:
    """The sharding that operands of one shape are resharded to."""
    # The largest sharded operand decides, whatever the size of others that are not sharded.
    ordered = sorted(operands, key=lambda item: -walk.local_bytes(item[1], item[0]) * bool(item[0].axes))
    dims = list(ordered[0][0].dims) if ordered else []
    for sharding, aval in ordered[1:]:
        used = {axis for dim in dims for axis in dim}
        lost = []
        for i, axes in enumerate(sharding.dims):
            if not axes or axes == dims[i][: len(axes)]:
                continue
            if not dims[i] and not used & set(axes):  # what the largest leaves open
                dims[i] = axes
                used |= set(axes)
            elif not set(axes) <= set(dims[i]):  # else each device slices what it has
                lost += axes
        if lost:
            walk.gather(sharding, aval, lost)
    return tuple(dims)


def _moved(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    """The elements of the first operand along other dims; a reshape may take shards apart."""
    x, known, before, after = inputs[0], dim_map(eqn), eqn.invars[0].aval, eqn.outvars[0].aval.shape
    for i, axes in enumerate(x.dims):
        to = known.block((0, i))
        if axes and (to is None or after[to] % walk.size(axes)):
            if any(axis in walk.counted for axis in axes):
                shards = f"the {walk.size(axes)} shards of dim {i}"
                walk.give_up(f"reshaping {before.shape} to {after} takes {shards} apart")
            x = walk.gather(x, before, axes)
    return [dataclasses.replace(x, dims=known.carry([x.dims]))]


def _reduced(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    """A sum of a sharded dim is partial; of other reductions, what devices found is compared at once."""
    x, known, results = inputs[0], dim_map(eqn), []
    over = [axis for axis in known.reduced_axes([x.dims]) if axis in walk.counted and axis not in x.partial]
    for var in eqn.outvars:
        itemsize = var.aval.dtype.itemsize if over else x.itemsize
        partial = (*x.partial, *over)
        found = ValueSharding(dims=known.carry([x.dims]), partial=partial, itemsize=itemsize if partial else 0)
        results.append(found if eqn.primitive.name == "reduce_sum" else walk.settled(found, var.aval))
    return results


def _along(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    """What works along a dim, which is gathered for it; operands of one shape, as of a sort, are sharded alike."""
    known, operands = dim_map(eqn), []
    for i, (x, atom) in enumerate(zip(inputs, eqn.invars, strict=True)):
        lost = _lost(known, x.dims, i)
        operands.append((walk.gather(x, atom.aval, lost) if lost else x, atom.aval))
    dims = [_agreed(walk, operands)] * len(inputs)
    return [ValueSharding(dims=dim_map(eqn, k).carry(dims)) for k in range(len(eqn.outvars))]


def _lost(known: DimMap, dims: Dims, operand: int = 0) -> list[str]:
    """Returns the axes of those dims of an operand that are no dims of the result."""
    return [axis for i, axes in enumerate(dims) if known.to((operand, i)) is None for axis in axes]


def _reversed(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    """The shards of a dim that is reversed change places."""
    sharding, aval = inputs[0], eqn.invars[0].aval
    walk.move("collective-permute", _lost(dim_map(eqn), sharding.dims), walk.local_bytes(aval, sharding), aval)
    return [ValueSharding(dims=sharding.dims)]


def _resized(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    """Slices, pads and parts: a sharded dim of another size is sharded anew, from neighbours."""
    sharding, before, results = inputs[0], eqn.invars[0].aval.shape, []
    for var in eqn.outvars:
        sizes = list(zip(sharding.dims, before, var.aval.shape, strict=True))
        dims = tuple(dim if new == old or new % walk.size(dim) == 0 else () for dim, old, new in sizes)
        result = ValueSharding(dims=dims)
        for (dim, old, new), kept in zip(sizes, dims, strict=True):
            if dim and new != old:
                kind = "collective-permute" if kept else "all-gather"
                walk.move(kind, dim, walk.local_bytes(var.aval, result), var.aval)
        results.append(result)
    return results


def _concatenate(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    dims = list(_agreed(walk, [(x, atom.aval) for x, atom in zip(inputs, eqn.invars, strict=True)]))
    result, aval = ValueSharding(dims=tuple(dims)), eqn.outvars[0].aval
    walk.move("collective-permute", dims[eqn.params["dimension"]], walk.local_bytes(aval, result), aval)
    return [result]


def _dynamic_slice(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    x, aval, lost = inputs[0], eqn.outvars[0].aval, _lost(dim_map(eqn), inputs[0].dims)
    gathered = dataclasses.replace(x, dims=without(x.dims, lost))
    walk.move("all-gather", lost, walk.local_bytes(aval, gathered), aval)
    return [gathered]


def _written(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    """What is written to keeps its sharding, or takes that of what is written; sums of the examples are partial."""
    dims, used = list(inputs[0].dims), inputs[0].axes
    for i, sources in enumerate(dim_map(eqn).kept):
        axes = next((inputs[k].dims[dim] for k, dim in sources if k and inputs[k].dims[dim]), ())
        if not dims[i] and not used & set(axes):
            dims[i] = axes
    taken = {axis for dim in dims for axis in dim}
    summed = inputs[2].axes - taken if eqn.primitive.name in SCATTERS else ()
    return [_partial(walk, tuple(dims), [axis for axis in walk.sizes if axis in summed], eqn)]


def _dot(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    """A matrix product: a sharded contracted dim makes a partial sum; an axis in two places is gathered in one."""
    known, sides = dim_map(eqn), list(inputs[:2])
    avals = [atom.aval for atom in eqn.invars[:2]]
    for axis in sorted(sides[0].axes & sides[1].axes):
        at = tuple((s, next(i for i, dim in enumerate(sides[s].dims) if axis in dim)) for s in (0, 1))
        if at not in (*known.kept, *known.reduced):
            # XLA propagates the dims of the result first: an operand that has the axis along another dim is gathered.
            inner = [s for s in (0, 1) if known.to(at[s]) is None]
            smaller = min((0, 1), key=lambda s: walk.local_bytes(avals[s], sides[s]))
            lost = inner[0] if len(inner) == 1 else smaller
            sides[lost] = walk.gather(sides[lost], avals[lost], (axis,))
    dims = [side.dims for side in sides]
    return [_partial(walk, known.carry(dims), known.reduced_axes(dims), eqn)]


def _partial(walk: Any, dims: Dims, summed: Sequence[str], eqn: Any) -> ValueSharding:
    partial = tuple(axis for axis in summed if axis in walk.counted)
    return ValueSharding(
        dims=tuple(dims), partial=partial, itemsize=eqn.outvars[0].aval.dtype.itemsize if partial else 0
    )


def _attention(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    """Fused attention and its derivatives: examples and heads stay sharded, places and features are gathered.

    So are heads that the axes do not divide, of queries or of keys.
    """
    batch, _, heads, _ = inputs[0].dims
    if eqn.invars[1].aval.shape[2] % walk.size(heads):
        heads = ()
    for x, atom in zip(inputs, eqn.invars, strict=True):
        if atom.aval.ndim == 4 and (lost := [*x.dims[1], *x.dims[3], *(() if heads else x.dims[2])]):
            walk.gather(x, atom.aval, lost)
    dims = {4: (batch, (), heads, ()), 3: (batch, heads, ())}
    return [ValueSharding(dims=dims[var.aval.ndim]) for var in eqn.outvars]


def _convolution(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    numbers = eqn.params["dimension_numbers"]
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    dims: list[tuple[str, ...]] = [()] * len(out)
    dims[out[0]] = inputs[0].dims[lhs[0]]
    for i, j in zip(lhs[2:], out[2:], strict=True):
        dims[j] = inputs[0].dims[i]
    grouped = eqn.params["feature_group_count"] > 1
    dims[out[1]] = inputs[1].dims[rhs[0]] or (inputs[0].dims[lhs[1]] if grouped else ())
    summed = dim_map(eqn).reduced_axes([x.dims for x in inputs])
    if set(summed) & set(dims[out[1]]):
        walk.gather(inputs[0], eqn.invars[0].aval, summed)
        summed = ()
    return [_partial(walk, tuple(dims), summed, eqn)]


def _gather(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    """A lookup: in a table with sharded rows each device finds some, and the rest are zeros to be summed."""
    (table, index), known = inputs, dim_map(eqn)
    own = {axis for i in eqn.params["dimension_numbers"].operand_batching_dims for axis in table.dims[i]}
    if clash := (table.axes & index.axes) - own:
        table = walk.gather(table, eqn.invars[0].aval, sorted(clash))
    return [_partial(walk, known.carry([table.dims, index.dims]), _lost(known, table.dims), eqn)]


def _constrained(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    """A value that is resharded to each of some shardings in turn."""
    sharding, aval = inputs[0], eqn.invars[0].aval
    targets = [eqn.params["sharding"]] if "sharding" in eqn.params else eqn.params["forward"].shardings
    for target in targets:
        if not isinstance(target, NamedSharding) or not set(target.mesh.axis_names) <= set(walk.sizes):
            continue  # a mesh of the model's own, say
        entries = tuple(target.spec) + (None,) * (len(sharding.dims) - len(target.spec))
        constrained = dims_of(target.spec, len(sharding.dims))
        fixed = {axis for dim in constrained for axis in dim}
        dims = tuple(
            tuple(a for a in sharding.dims[i] if a not in fixed)
            if entry is PartitionSpec.UNCONSTRAINED
            else constrained[i]
            for i, entry in enumerate(entries)
        )
        sharding = walk.placed(sharding, aval, dims)
    return [sharding]


_OF_KIND: Mapping[str, Rule] = {
    **dict.fromkeys(("elementwise", "cast"), merge),
    **dict.fromkeys(("copy", "place"), lambda _, eqn, inputs: list(inputs[: len(eqn.outvars)])),
    **dict.fromkeys(("shape", "broadcast"), _moved),
    "reduction": _reduced,
    **dict.fromkeys(("cumulative", "sort", "order"), _along),
    "part": _resized,
    "scatter": _written,
    "update": _written,
}
RULES: Mapping[str, Rule] = {
    **{name: rule for name, known in known_primitives().items() if (rule := _OF_KIND.get(known.kind))},
    "unstack": _along,
    "rev": _reversed,
    "pad": _resized,
    "concatenate": _concatenate,
    "stack": _along,
    "dynamic_slice": _dynamic_slice,
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    **dict.fromkeys(("zero_attention", "zero_attention_tangent", "zero_attention_cotangents"), _attention),
    "gather": _gather,
    **dict.fromkeys(("sharding_constraint", "zero_reshard"), _constrained),
}

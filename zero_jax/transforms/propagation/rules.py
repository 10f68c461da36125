"""Sharding propagation through single primitives, mostly as XLA decides it: for estimates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from zero_jax.sharding.spec import Dims, dims_of, without
from zero_jax.transforms.propagation.kinds import ValueSharding

Rule = Callable[[Any, Any, Sequence[ValueSharding]], list[ValueSharding]]


def merge(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    """Elementwise: operands are resharded to the sharding of the largest operand, or gathered where they differ."""
    agreed = _agreed(walk, [(x, atom.aval) for x, atom in zip(inputs, eqn.invars, strict=True) if x.dims])
    partial = inputs[0].partial if inputs else ()
    itemsize = min((x.itemsize or a.aval.dtype.itemsize for x, a in zip(inputs, eqn.invars, strict=True)), default=0)
    results = []
    for var in eqn.outvars:
        dims = agreed if len(getattr(var.aval, "shape", ())) == len(agreed) else ((),) * len(var.aval.shape)
        results.append(ValueSharding(dims=dims, partial=partial, itemsize=itemsize if partial else 0))
    return results


def _agreed(walk: Any, operands: Sequence[tuple[ValueSharding, Any]]) -> Dims:
    """The sharding that operands of one shape are resharded to."""
    ordered = sorted(operands, key=lambda item: -walk.local_bytes(item[1], item[0]) * bool(item[0].axes))
    dims = list(ordered[0][0].dims) if ordered else []
    for sharding, aval in ordered[1:]:
        used = {axis for dim in dims for axis in dim}
        lost = []
        for i, axes in enumerate(sharding.dims):
            if not axes or axes == dims[i][: len(axes)]:
                continue
            if not dims[i] and not used & set(axes):
                dims[i] = axes
                used |= set(axes)
            elif not set(axes) <= set(dims[i]):
                lost += axes
        if lost:
            walk.gather(sharding, aval, lost)
    return tuple(dims)


def _identity(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    del walk
    return list(inputs[: len(eqn.outvars)])


def _transpose(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    del walk
    return [dataclasses.replace(inputs[0], dims=tuple(inputs[0].dims[i] for i in eqn.params["permutation"]))]


def _broadcast(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    del walk
    dims: list[tuple[str, ...]] = [()] * len(eqn.outvars[0].aval.shape)
    for i, to in enumerate(eqn.params["broadcast_dimensions"]):
        if eqn.invars[0].aval.shape[i] == eqn.outvars[0].aval.shape[to]:
            dims[to] = inputs[0].dims[i]
    return [dataclasses.replace(inputs[0], dims=tuple(dims))]


def _reshape(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    """A dim that is split gives its axes to the first part that they divide, merged dims take those of the first."""
    sharding, aval = inputs[0], eqn.invars[0].aval
    before, after = aval.shape, eqn.outvars[0].aval.shape
    dims: list[tuple[str, ...]] = [()] * len(after)
    for old, new in _factors(before, after):
        cut = [i for i in old if sharding.dims[i]]
        for i in cut:
            axes = sharding.dims[i]
            is_first = all(before[j] == 1 for j in old[: old.index(i)])
            target = next((j for j in new if after[j] != 1), None)
            if is_first and target is not None and after[target] % walk.size(axes) == 0:
                dims[target] = axes
                continue
            if any(axis in walk.counted for axis in axes):
                shards = f"the {walk.size(axes)} shards of dim {i}"
                walk.give_up(f"reshaping {before} to {after} takes {shards} apart")
                sharding = walk.gather(sharding, aval, axes)
    return [dataclasses.replace(sharding, dims=tuple(dims))]


def _factors(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Groups the dims of two shapes of one size into the smallest runs of the same product."""
    groups, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        old, new = ([i], [j]) if i < len(before) and j < len(after) else (list(range(i, len(before))), [])
        if not new:
            groups.append((old, list(range(j, len(after)))))
            break
        i, j, left, right = i + 1, j + 1, before[i], after[j]
        while left != right:
            if left < right:
                left, i = left * before[i], i + 1
                old.append(i - 1)
            else:
                right, j = right * after[j], j + 1
                new.append(j - 1)
        groups.append((old, new))
    return groups


def _drop_dims(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    del walk
    gone = {d % len(inputs[0].dims) for d in eqn.params["dimensions"]}
    return [dataclasses.replace(inputs[0], dims=tuple(d for i, d in enumerate(inputs[0].dims) if i not in gone))]


def _reduce_sum(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    sharding, axes = inputs[0], eqn.params["axes"]
    summed = [a for i in axes for a in sharding.dims[i] if a in walk.counted]
    dims = tuple(dim for i, dim in enumerate(sharding.dims) if i not in axes)
    partial = (*sharding.partial, *(axis for axis in summed if axis not in sharding.partial))
    itemsize = eqn.outvars[0].aval.dtype.itemsize if summed else sharding.itemsize
    return [dataclasses.replace(sharding, dims=dims, partial=partial, itemsize=itemsize if partial else 0)]


def _reduce(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    """Reductions that are no sums: what devices found is compared at once."""
    axes, results = eqn.params.get("axes", ()), []
    for var in eqn.outvars:
        sharding = inputs[0]
        found = ValueSharding(dims=tuple(dim for i, dim in enumerate(sharding.dims) if i not in axes))
        over = tuple(a for i in axes for a in sharding.dims[i] if a in walk.counted)
        results.append(walk.settled(dataclasses.replace(found, partial=over), var.aval))
    return results


def _along(name: str) -> Rule:
    """What works along one dim, which is gathered for it."""

    def rule(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
        sharding = inputs[0]
        dim = eqn.params.get(name, len(sharding.dims) - 1)
        if sharding.dims and sharding.dims[dim]:
            sharding = walk.gather(sharding, eqn.invars[0].aval, sharding.dims[dim])
        return [ValueSharding(dims=sharding.dims)] * len(eqn.outvars)

    return rule


def _reversed(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    """The shards of a dim that is reversed change places."""
    sharding, aval = inputs[0], eqn.invars[0].aval
    moved = [axis for i in eqn.params["dimensions"] for axis in sharding.dims[i]]
    walk.move("collective-permute", moved, walk.local_bytes(aval, sharding), aval)
    return [ValueSharding(dims=sharding.dims)]


def _resized(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    """Slices, pads and parts: a sharded dim of another size is sharded anew, from neighbours."""
    sharding, before, results = inputs[0], eqn.invars[0].aval.shape, []
    for var in eqn.outvars:
        dims = []
        for i, dim in enumerate(sharding.dims):
            size = var.aval.shape[i]
            dims.append(dim if size == before[i] or size % walk.size(dim) == 0 else ())
        result = ValueSharding(dims=tuple(dims))
        for i, dim in enumerate(sharding.dims):
            if dim and var.aval.shape[i] != before[i]:
                kind = "collective-permute" if dims[i] else "all-gather"
                walk.move(kind, dim, walk.local_bytes(var.aval, result), var.aval)
        results.append(result)
    return results


def _concatenate(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    dims = list(_agreed(walk, [(x, atom.aval) for x, atom in zip(inputs, eqn.invars, strict=True)]))
    result, along = ValueSharding(dims=tuple(dims)), eqn.params["dimension"]
    if dims[along]:
        walk.move("collective-permute", dims[along], walk.local_bytes(eqn.outvars[0].aval, result), eqn.outvars[0].aval)
    return [result]


def _stack(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    dims = _agreed(walk, [(x, atom.aval) for x, atom in zip(inputs, eqn.invars, strict=True)])
    axis = eqn.params["axis"]
    return [ValueSharding(dims=(*dims[:axis], (), *dims[axis:]))]


def _unstack(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    (sharding,), axis = inputs, eqn.params["axis"]
    if sharding.dims[axis]:
        sharding = walk.gather(sharding, eqn.invars[0].aval, sharding.dims[axis])
    return [ValueSharding(dims=(*sharding.dims[:axis], *sharding.dims[axis + 1 :]))] * len(eqn.outvars)


def _dynamic_slice(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    sharding, aval, size = inputs[0], eqn.invars[0].aval, eqn.outvars[0].aval.shape
    lost = [a for i, dim in enumerate(sharding.dims) for a in dim if size[i] != aval.shape[i]]
    gathered = dataclasses.replace(sharding, dims=without(sharding.dims, lost))
    if lost:
        walk.move("all-gather", lost, walk.local_bytes(eqn.outvars[0].aval, gathered), eqn.outvars[0].aval)
    return [gathered]


def _dynamic_update_slice(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    del walk
    old, new = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    dims, used = list(inputs[0].dims), inputs[0].axes
    for i, axes in enumerate(inputs[1].dims):
        if axes and not dims[i] and old[i] == new[i] and not used & set(axes):
            dims[i] = axes
    return [ValueSharding(dims=tuple(dims))]


def _dot(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    """A matrix product: a sharded contracted dim makes a partial sum; an axis in two places is gathered in one."""
    (contract, batch) = eqn.params["dimension_numbers"]
    sides = list(inputs[:2])
    avals = [atom.aval for atom in eqn.invars[:2]]
    free = [[i for i in range(len(sides[s].dims)) if i not in (*contract[s], *batch[s])] for s in (0, 1)]
    for axis in sorted(sides[0].axes & sides[1].axes):
        at = [next(i for i, dim in enumerate(sides[s].dims) if axis in dim) for s in (0, 1)]
        is_pair = any(tuple(at) == pair for pair in (*zip(*contract, strict=True), *zip(*batch, strict=True)))
        if not is_pair:
            smaller = min((0, 1), key=lambda s: walk.local_bytes(avals[s], sides[s]))
            sides[smaller] = walk.gather(sides[smaller], avals[smaller], (axis,))
    shard = lambda pairs: [_union(sides[0].dims[i], sides[1].dims[j]) for i, j in zip(*pairs, strict=True)]  # noqa: E731
    summed = tuple(dict.fromkeys(a for dim in shard(contract) for a in dim))
    dims = (*shard(batch), *(sides[0].dims[i] for i in free[0]), *(sides[1].dims[i] for i in free[1]))
    return [_partial(walk, dims, summed, eqn)]


def _union(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    return one if len(one) >= len(other) else other


def _partial(walk: Any, dims: Dims, summed: Sequence[str], eqn: Any) -> ValueSharding:
    partial = tuple(axis for axis in summed if axis in walk.counted)
    return ValueSharding(
        dims=tuple(dims), partial=partial, itemsize=eqn.outvars[0].aval.dtype.itemsize if partial else 0
    )


def _attention(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    """Fused attention: places and features are gathered, examples and heads stay sharded."""
    for x, atom in zip(inputs[:3], eqn.invars, strict=False):
        if lost := [*x.dims[1], *x.dims[3]]:
            walk.gather(x, atom.aval, lost)
    batch, _, heads, _ = inputs[0].dims
    return [ValueSharding(dims=(batch, (), heads, ())), ValueSharding(dims=(batch, heads, ()))]


def _convolution(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    numbers = eqn.params["dimension_numbers"]
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    dims: list[tuple[str, ...]] = [()] * len(out)
    dims[out[0]] = inputs[0].dims[lhs[0]]
    for i, j in zip(lhs[2:], out[2:], strict=True):
        dims[j] = inputs[0].dims[i]
    grouped = eqn.params["feature_group_count"] > 1
    dims[out[1]] = inputs[1].dims[rhs[0]] or (inputs[0].dims[lhs[1]] if grouped else ())
    summed = () if grouped else _union(inputs[0].dims[lhs[1]], inputs[1].dims[rhs[1]])
    if set(summed) & set(dims[out[1]]):
        walk.gather(inputs[0], eqn.invars[0].aval, summed)
        summed = ()
    return [_partial(walk, tuple(dims), summed, eqn)]


def _gather(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    """A lookup: in a table with sharded rows each device finds some, and the rest are zeros to be summed."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    table, index = inputs[0], inputs[1]
    aval = eqn.invars[0].aval
    pairs = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    if clash := (table.axes & index.axes) - {a for i in pairs for a in table.dims[i]}:
        table = walk.gather(table, aval, sorted(clash))
    rows = [i for i in range(len(sizes)) if sizes[i] != aval.shape[i] and i not in pairs]
    summed = [a for i in rows for a in table.dims[i]]
    kept = [i for i in range(len(sizes)) if i not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)]
    batch = list(index.dims[:-1])
    for i, j in pairs.items():
        batch[j] = _union(batch[j], table.dims[i])
    dims, windows, places = [], iter(kept), iter(batch)
    for i in range(len(eqn.outvars[0].aval.shape)):
        if i in numbers.offset_dims:
            d = next(windows)
            dims.append(() if d in rows else table.dims[d])
        else:
            dims.append(next(places))
    return [_partial(walk, tuple(dims), summed, eqn)]


def _scatter(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    """A table that is written to keeps its sharding, or takes that of the rows that come in."""
    numbers = eqn.params["dimension_numbers"]
    dims, used, updates = list(inputs[0].dims), set(inputs[0].axes), inputs[2]
    inserted = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windows = [i for i in range(len(dims)) if i not in inserted]
    for i, j in zip(windows, numbers.update_window_dims, strict=True):
        same = eqn.invars[0].aval.shape[i] == eqn.invars[2].aval.shape[j]
        if same and not dims[i] and not used & set(updates.dims[j]):
            dims[i] = updates.dims[j]
    for i, j in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        if not dims[i]:
            dims[i] = inputs[1].dims[j]
    summed = updates.axes - {a for dim in dims for a in dim}
    return [_partial(walk, tuple(dims), [a for a in walk.sizes if a in summed], eqn)]


def _constrained(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    return [_through(walk, inputs[0], eqn.invars[0].aval, [eqn.params["sharding"]])]


def _reshard(walk: Any, eqn: Any, inputs: Sequence[ValueSharding]) -> list[ValueSharding]:
    return [_through(walk, inputs[0], eqn.invars[0].aval, eqn.params["forward"].shardings)]


def _through(walk: Any, sharding: ValueSharding, aval: Any, targets: Sequence[Any]) -> ValueSharding:
    """Reshards a value to each of some shardings in turn."""
    for target in targets:
        if not isinstance(target, NamedSharding):
            continue
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
    return sharding


RULES: Mapping[str, Rule] = {
    **{
        name: _identity
        for name in ("name", "copy", "optimization_barrier", "zero_order", "device_put", "zero_join", "pvary")
    },
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _drop_dims,
    "reduce_sum": _reduce_sum,
    **dict.fromkeys(
        ("reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"), _reduce
    ),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")),
    "sort": _along("dimension"),
    "rev": _reversed,
    "top_k": _along("axis"),
    **dict.fromkeys(("slice", "pad", "split"), _resized),
    "concatenate": _concatenate,
    "stack": _stack,
    "unstack": _unstack,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "zero_attention": _attention,
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"), _scatter),
    "sharding_constraint": _constrained,
    "zero_reshard": _reshard,
}

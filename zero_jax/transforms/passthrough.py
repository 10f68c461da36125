"""Rules for operations that need no gather: they give a shard of the result from the shard of a param."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from zero_jax.core.jaxprs import open_jaxpr
from zero_jax.core.subcalls import subcall
from zero_jax.sharding.spec import Dims

# `log2` and `one_minus_square` are primitives of JAX 0.12 and not of 0.10.
ELEMENTWISE = frozenset(
    "abs acos acosh add and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj copy "
    "cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag "
    "integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi name ne neg nextafter "
    "not one_minus_square or polygamma population_count pow real reduce_precision regularized_incomplete_beta rem "
    "round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square "
    "stop_gradient sub tan tanh xor zeta".split()
)
_MOVES = frozenset(
    "broadcast_in_dim convert_element_type dynamic_slice gather reshape rev slice split squeeze transpose "
    "unstack".split()
)
REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin".split())


def passthrough(eqn: Any, dims_in: Sequence[Dims | None], shards: Callable[[Dims, int], int]) -> Dims | None:
    """Returns how the results of an equation are sharded when it runs on the shards, or None if it needs a gather.

    Args:
      eqn: an equation without inner jaxprs.
      dims_in: for each input, the axes of its dims if it is a sharded param, else None.
      shards: `shards(dims, i)` is the number of shards that dim `i` is cut into.
    """
    rule = _RULES.get(eqn.primitive.name)
    if eqn.primitive.name in ELEMENTWISE:
        rule = _elementwise
    return None if rule is None else rule(eqn, dims_in, shards)


def is_local_reduction(eqn: Any) -> bool:
    """Tells whether a result is so much smaller than its input that it is better reduced on the shard."""
    return eqn.primitive.name in REDUCTIONS


def is_contraction(eqn: Any) -> bool:
    """Tells whether an equation multiplies matrices."""
    return eqn.primitive.name in ("dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot")


def _elementwise(eqn: Any, dims_in: Sequence[Dims | None], shards: Any) -> Dims | None:
    del shards
    shape = eqn.outvars[0].aval.shape
    sharded = {dims for dims in dims_in if dims is not None}
    fits = all(var.aval.shape in (shape, ()) for var in eqn.invars)
    return sharded.pop() if len(sharded) == 1 and fits else None


def _cast(eqn: Any, dims_in: Sequence[Dims | None], shards: Any) -> Dims | None:
    del shards
    narrows = eqn.outvars[0].aval.dtype.itemsize <= eqn.invars[0].aval.dtype.itemsize
    return dims_in[0] if narrows else None  # a wider type is cheaper to gather before the cast


def _transpose(eqn: Any, dims_in: Sequence[Dims | None], shards: Any) -> Dims | None:
    del shards
    dims = dims_in[0]
    return None if dims is None else tuple(dims[i] for i in eqn.params["permutation"])


def _squeeze(eqn: Any, dims_in: Sequence[Dims | None], shards: Any) -> Dims | None:
    del shards
    dims = dims_in[0]
    return None if dims is None else tuple(d for i, d in enumerate(dims) if i not in eqn.params["dimensions"])


def _broadcast(eqn: Any, dims_in: Sequence[Dims | None], shards: Any) -> Dims | None:
    del shards
    dims, out = dims_in[0], eqn.outvars[0].aval
    if dims is None or out.size != eqn.invars[0].aval.size:
        return None
    placed = dict(zip(eqn.params["broadcast_dimensions"], dims, strict=True))
    return tuple(placed.get(i, ()) for i in range(out.ndim))


def _reshape(eqn: Any, dims_in: Sequence[Dims | None], shards: Any) -> Dims | None:
    dims, old, new = dims_in[0], eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if dims is None or eqn.params.get("dimensions") is not None or 0 in old:
        return None
    result: list[tuple[str, ...]] = [()] * len(new)
    for group_old, group_new in reshape_groups(old, new):
        sharded = [i for i in group_old if dims[i]]
        if not sharded:
            continue
        # A block of the major dim of a group is a block of the group: only there does sharding survive.
        major_old = next((i for i in group_old if old[i] > 1), None)
        major_new = next((i for i in group_new if new[i] > 1), None)
        if sharded != [major_old] or major_new is None or new[major_new] % shards(dims, sharded[0]):
            return None
        result[major_new] = dims[sharded[0]]
    return tuple(result)


def reshape_groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Splits the dims of both shapes into the shortest runs with equal products."""
    groups = []
    i = j = 0
    while i < len(old) or j < len(new):
        group_old, group_new = (
            ([i], [j]) if i < len(old) and j < len(new) else ([*range(i, len(old))], [*range(j, len(new))])
        )
        if i >= len(old) or j >= len(new):
            groups.append((group_old, group_new))
            break
        i, j = i + 1, j + 1
        while math.prod(old[k] for k in group_old) != math.prod(new[k] for k in group_new):
            if math.prod(old[k] for k in group_old) < math.prod(new[k] for k in group_new):
                group_old.append(i)
                i += 1
            else:
                group_new.append(j)
                j += 1
        groups.append((group_old, group_new))
    return groups


def _slice(eqn: Any, dims_in: Sequence[Dims | None], shards: Any) -> Dims | None:
    del shards
    return _kept_whole(dims_in[0], eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape)


def _split(eqn: Any, dims_in: Sequence[Dims | None], shards: Any) -> Dims | None:
    del shards
    dims = dims_in[0]
    return dims if dims is not None and not dims[eqn.params["axis"]] else None


def _concatenate(eqn: Any, dims_in: Sequence[Dims | None], shards: Any) -> Dims | None:
    del shards
    first = dims_in[0]
    if first is None or any(dims != first for dims in dims_in) or first[eqn.params["dimension"]]:
        return None
    return first


def _stack(eqn: Any, dims_in: Sequence[Dims | None], shards: Any) -> Dims | None:
    del shards
    first, axis = dims_in[0], eqn.params["axis"]
    if first is None or any(dims != first for dims in dims_in):
        return None
    return (*first[:axis], (), *first[axis:])


def _unstack(eqn: Any, dims_in: Sequence[Dims | None], shards: Any) -> Dims | None:
    del shards
    dims, axis = dims_in[0], eqn.params["axis"]
    return None if dims is None or dims[axis] else (*dims[:axis], *dims[axis + 1 :])


def _reverse(eqn: Any, dims_in: Sequence[Dims | None], shards: Any) -> Dims | None:
    del shards
    dims = dims_in[0]
    return None if dims is None or any(dims[i] for i in eqn.params["dimensions"]) else dims


def _index(eqn: Any, dims_in: Sequence[Dims | None], shards: Any) -> Dims | None:
    """One slice taken at one index (`w[i]`), as a `gather`; lookups of many indices are `gather_on_use`'s."""
    del shards
    dims, operand, indices = dims_in[0], eqn.invars[0].aval, eqn.invars[1].aval
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    if dims is None or indices.ndim != 1 or numbers.operand_batching_dims:
        return None
    if _kept_whole(dims, operand.shape, sizes) is None:
        return None
    return tuple(d for i, d in enumerate(dims) if i not in numbers.collapsed_slice_dims)


def _reduce(eqn: Any, dims_in: Sequence[Dims | None], shards: Any) -> Dims | None:
    del shards
    dims, axes = dims_in[0], eqn.params["axes"]
    if dims is None or any(dims[i] for i in axes):
        return None
    return tuple(d for i, d in enumerate(dims) if i not in axes)


def _kept_whole(dims: Dims | None, shape: Sequence[int], sizes: Sequence[int]) -> Dims | None:
    if dims is None:
        return None
    return dims if all(not d or size == kept for d, size, kept in zip(dims, shape, sizes, strict=True)) else None


_RULES: dict[str, Callable[..., Dims | None]] = {
    "convert_element_type": _cast,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "slice": _slice,
    "dynamic_slice": _slice,
    "split": _split,
    "concatenate": _concatenate,
    "stack": _stack,
    "unstack": _unstack,
    "rev": _reverse,
    "gather": _index,
    **dict.fromkeys(REDUCTIONS, _reduce),
}


def narrows(eqn: Any) -> bool:
    """Tells whether an equation takes a part of its first input, as indexing a stacked param by layer does."""
    taken = eqn.primitive.name in ("dynamic_slice", "gather", "slice")
    return taken and eqn.outvars[0].aval.size < eqn.invars[0].aval.size


def has_wrong_gradient(eqn: Any) -> bool:
    """Tells whether XLA shards the transpose of an equation wrongly, as of writes and pools (docs/xla_faults.md)."""
    return eqn.primitive.name.startswith(("slice", "pad", "scatter", "reduce_window"))


def is_float(aval: Any) -> bool:
    """Tells whether an abstract value can have a gradient; a token has no dtype."""
    return hasattr(aval, "dtype") and jax.numpy.issubdtype(aval.dtype, jax.numpy.inexact)


def moves_elements(eqn: Any) -> bool:
    """Tells whether an equation only casts, takes or moves the elements of its first input: next to no work."""
    sub = subcall(eqn)
    if sub is not None and sub.kind == "call":
        return all(map(moves_elements, open_jaxpr(sub.jaxpr)[0].eqns))
    return eqn.primitive.name in _MOVES

"""Rules for operations that need no gather: they give a shard of the result from the shard of a param."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from zero_jax.core.jaxprs import open_jaxpr
from zero_jax.core.subcalls import subcall
from zero_jax.sharding.spec import Dims
from zero_jax.transforms.dim_map import ELEMENTWISE, REDUCTIONS, dim_map, reshape_blocks

_MOVES = frozenset(
    "broadcast_in_dim convert_element_type dynamic_slice gather reshape rev slice split squeeze transpose "
    "unstack".split()
)
_TOGETHER = frozenset({"concatenate", "stack"})
_OF_ALL = ELEMENTWISE | _TOGETHER
_PASSES = _OF_ALL | _MOVES | REDUCTIONS


def passthrough(eqn: Any, dims_in: Sequence[Dims | None], shards: Callable[[Dims, int], int]) -> Dims | None:
    """Returns how the results of an equation are sharded when it runs on the shards, or None if it needs a gather.

    Args:
      eqn: an equation without inner jaxprs.
      dims_in: for each input, the axes of its dims if it is a sharded param, else None.
      shards: `shards(dims, i)` is the number of shards that dim `i` is cut into.
    """
    name = eqn.primitive.name
    dims_in = dims_in if name in _OF_ALL else dims_in[:1]
    sharded = {dims for dims in dims_in if dims is not None or name not in ELEMENTWISE}
    if name not in _PASSES or len(sharded) != 1 or None in sharded or not _is_of_shards(eqn):
        return None
    if name == "reshape":
        return _reshape(eqn, dims_in[0] or (), shards)
    known = dim_map(eqn)
    cut = [(i, dim) for i, dims in enumerate(dims_in) for dim, axes in enumerate(dims or ()) if axes]
    return None if any(known.to(dim) is None for dim in cut) else known.carry(dims_in)


def _is_of_shards(eqn: Any) -> bool:
    """Tells whether an operation is to run on shards, if it can: not on wider or more elements than are gathered."""
    name, before, after = eqn.primitive.name, eqn.invars[0].aval, eqn.outvars[0].aval
    if name in ELEMENTWISE:
        return all(x.aval.shape in (after.shape, ()) for x in eqn.invars)
    if name == "convert_element_type":
        return after.dtype.itemsize <= before.dtype.itemsize
    if name == "broadcast_in_dim":
        return after.size == before.size
    if name == "gather":  # one slice at one index (`w[i]`); lookups of many indices are `gather_on_use`'s
        return eqn.invars[1].aval.ndim == 1 and not eqn.params["dimension_numbers"].operand_batching_dims
    return True


def is_local_reduction(eqn: Any) -> bool:
    """Tells whether a result is so much smaller than its input that it is better reduced on the shard."""
    return eqn.primitive.name in REDUCTIONS


def is_contraction(eqn: Any) -> bool:
    """Tells whether an equation multiplies matrices."""
    return eqn.primitive.name in ("dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot")


def _reshape(eqn: Any, dims: Dims, shards: Any) -> Dims | None:
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if eqn.params.get("dimensions") is not None or 0 in old:
        return None
    blocks = reshape_blocks(old, new)
    placed = {blocks.get(i): axes for i, axes in enumerate(dims) if axes}
    if None in placed or any(new[blocks[i]] % shards(dims, i) for i, axes in enumerate(dims) if axes):
        return None
    return tuple(placed.get(i, ()) for i in range(len(new)))


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

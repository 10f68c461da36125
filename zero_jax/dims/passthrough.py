"""Which operations run on the shards of a param as they are, and which ones XLA shards wrongly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zero_jax.dims.primitives import CASTS, ELEMENTWISE, JOINS, MOVES, REDUCTIONS, dim_map
from zero_jax.sharding.spec import Dims

_OF_ALL = ELEMENTWISE | JOINS
# What XLA computes whole on every device, though each place along leading dims is by itself: TPUs have loops for
# factorizations, and elsewhere a Fourier transform is a call of a library.
_WHOLE_ON_TPU, _WHOLE_ELSEWHERE = frozenset({"eigh", "lu", "svd"}), frozenset({"fft"})


def passthrough(eqn: Any, dims_in: Sequence[Dims | None], shards: Callable[[Dims, int], int]) -> Dims | None:
    """Returns how the results of an equation are sharded when it runs on the shards, or None if it needs a gather.

    It has no inner jaxprs. `dims_in` are the axes of the dims of each input that is a sharded param, else None;
    `shards(dims, i)` is the number of shards of dim `i`.
    """
    name = eqn.primitive.name
    dims_in = dims_in if name in _OF_ALL else dims_in[:1]
    # An elementwise operation may have scalars beside shards; what is joined has to be sharded alike.
    sharded = {dims for dims in dims_in if dims is not None or name not in ELEMENTWISE}
    if name not in _OF_ALL | MOVES | REDUCTIONS or len(sharded) != 1 or None in sharded or not _is_of_shards(eqn):
        return None
    known, shape = dim_map(eqn), eqn.outvars[0].aval.shape
    for i, dims in enumerate(dims_in):
        for dim, axes in enumerate(dims or ()):
            if not axes:
                continue
            to = known.block((i, dim))
            is_reshaped = to is not None and known.to((i, dim)) is None  # the dim is split, or merged with others
            if to is None or (is_reshaped and shape[to] % shards(dims or (), dim)):
                return None
    return known.carry(dims_in)


def _is_of_shards(eqn: Any) -> bool:
    """Tells whether an operation is to run on shards, if it can: not on wider or more elements than are gathered."""
    name, before, after = eqn.primitive.name, eqn.invars[0].aval, eqn.outvars[0].aval
    if name in CASTS:
        return after.dtype.itemsize <= before.dtype.itemsize
    if name in ELEMENTWISE:
        return all(x.aval.shape in (after.shape, ()) for x in eqn.invars)
    if name == "gather":  # one slice at one index (`w[i]`); lookups of many indices are `gather_on_use`'s
        return eqn.invars[1].aval.ndim == 1 and not eqn.params["dimension_numbers"].operand_batching_dims
    return name in JOINS or after.size <= before.size  # no broadcast


def has_wrong_gradient(eqn: Any) -> bool:
    """Tells whether XLA shards the transpose of an equation wrongly, as of writes and pools (docs/xla_faults.md)."""
    return eqn.primitive.name.startswith(("slice", "pad", "scatter", "reduce_window"))


def computed_whole(platform: str | None) -> frozenset[str]:
    """Returns the primitives of which XLA gathers the operand, along whichever dim it is sharded; None for anywhere."""
    if platform is None:
        return _WHOLE_ON_TPU | _WHOLE_ELSEWHERE
    return _WHOLE_ON_TPU if platform == "tpu" else _WHOLE_ELSEWHERE

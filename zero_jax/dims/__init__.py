"""Which dim of a value is which: the only tables of primitives, and what is derived from them.

`primitives` has a record of each primitive: what it does with the dims of its operands (`dim_map`), in what it is
linear, and what kind of operation it is. A new primitive is entered there. `passthrough` says which operations
run on shards.
"""

from zero_jax.dims.maps import DimMap, reshape_groups
from zero_jax.dims.passthrough import passthrough
from zero_jax.dims.primitives import (
    BY_INDEX,
    CASTS,
    COPIES,
    CUMULATIVE,
    ELEMENTWISE,
    JOINS,
    MOVES,
    PARTS,
    PLACES,
    REDUCTIONS,
    SAME_ELEMENTS,
    SCATTERS,
    SHAPES,
    dim_map,
    has_wrong_gradient,
    is_contraction,
    is_float,
    is_local_reduction,
    known_primitives,
    moves_elements,
    narrows,
    primitive,
)

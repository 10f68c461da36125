"""Which dim of a value is which: the only tables of primitives, and what is derived from them.

`primitives` has a record of each primitive: what it does with the dims of its operands (`DimMap`), in what it is
linear, and what kind of operation it is. A new primitive is entered there. From these records follow exact answers and
estimates: `parts/`, whether a value of a batch is made of those of parts of it; `mixing`, where the examples of a batch
are in each value; `shardings/`, the sharding of each value.
"""

from zero_jax.dims.dim_map import reshape_groups
from zero_jax.dims.mixing import FREE, LOOPS, RANDOM, UNKNOWN, Examples, MixedSharding, State
from zero_jax.dims.parts.comparison import TraceComparison, dim_of_examples, sizes_of
from zero_jax.dims.parts.relations import EXTREMA, SAME, Kind, Pair, Relation, rows, unknown
from zero_jax.dims.passthrough import computed_whole, has_wrong_gradient, passthrough
from zero_jax.dims.primitives import (
    ALIASES,
    BY_INDEX,
    CASTS,
    COPIES,
    CUMULATIVE,
    ELEMENTWISE,
    FACTORIZATIONS,
    JOINS,
    MOVES,
    PARTS,
    PLACES,
    REDUCTIONS,
    SAME_ELEMENTS,
    SCATTERS,
    SHAPES,
    dim_map,
    is_activation,
    is_contraction,
    is_float,
    is_made_of,
    known_primitives,
    moves_elements,
    narrows,
)
from zero_jax.dims.shardings.propagate import Move, Propagation, propagate_shardings
from zero_jax.dims.shardings.sharding import HEAVY, ValueSharding, sources

"""Whether a program writes its new state over the old one: which leaves it takes and returns without donating them."""

import collections
from collections.abc import Sequence

from zero_jax.analysis.memory.leaves import STATE_GROUPS, ArgumentLeaf
from zero_jax.hlo import Program, arrays, parse_shape


def not_donated(program: Program, leaves: Sequence[ArgumentLeaf], donated: Sequence[bool]) -> tuple[ArgumentLeaf, ...]:
    """Returns the leaves of the state whose new values take memory beside the old ones, largest first.

    An argument counts if it is params, master params, optimizer state or model state, no result is written over it, and
    the program returns another array of its shape and dtype.

    Args:
      program: The program's text, read.
      leaves: Its arguments, in order.
      donated: Whether a result is written over each, `hlo_memory.Heap.donated`.
    """
    root = next(one for one in program.computations[program.entry].values() if one.line.lstrip().startswith("ROOT "))
    returned = collections.Counter((array.dtype, array.dims) for array in arrays(parse_shape(root.shape)))
    returned -= collections.Counter((leaf.dtype, leaf.dims) for leaf, kept in zip(leaves, donated, strict=True) if kept)
    found = []
    for leaf, is_donated in zip(leaves, donated, strict=True):
        if leaf.group in STATE_GROUPS and not is_donated and returned[leaf.dtype, leaf.dims] > 0:
            returned[leaf.dtype, leaf.dims] -= 1
            found.append(leaf)
    return tuple(sorted(found, key=lambda leaf: -leaf.num_bytes))

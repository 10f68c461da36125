"""Kernels (`pallas_call`) that compute each example by itself: an axis of their grid counts blocks of one example.

Such an axis is that of a `jax.vmap`, or one of which a program knows nothing: neither its place along it, nor what a
program of another place left behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zero_jax.dims.parts.relations import Pair, Refused, check
from zero_jax.program import jaxprs
from zero_jax.program.subcalls import equations

_PLACES = ("program_id", "num_programs")


def example_dims(pair: Pair, examples: Mapping[int, int]) -> list[int | None]:
    """Returns the dims of examples of the results of a kernel; None for each if no operand has examples.

    `examples` are the numbers of the operands that have them, and the dims of these. Raises `Refused` where a program
    may see several examples, and where the kernel of the part differs.
    """
    for eqn in (pair.whole, pair.part):  # of sizes that are operands nothing is known
        check(not eqn.params["input_output_aliases"] and not eqn.effects)
        check(all(isinstance(size, int) for size in eqn.params["grid_mapping"].grid))
    if not examples:
        check(_description(pair.whole, None) == _description(pair.part, None), "sized")
        return [None] * len(pair.whole.outvars)
    for axis in _own_axes(pair.whole):
        dims, num_operands = _counted(pair.whole, axis), len(pair.whole.invars)
        if dims is None or {i: dim for i, dim in enumerate(dims[:num_operands]) if dim is not None} != examples:
            continue
        check(None not in dims[num_operands:] and dims == _counted(pair.part, axis) and axis in _own_axes(pair.part))
        check(_description(pair.whole, axis) == _description(pair.part, axis), "sized")
        return dims[num_operands:]
    raise Refused("a kernel that may mix examples of a batch (it does not if jax.vmap maps it over them)")


def _own_axes(eqn: Any) -> Iterator[int]:
    """Yields the axes of the grid of a kernel along which each program is by itself."""
    grid, found = eqn.params["grid_mapping"], equations(eqn.params["jaxpr"])
    read = {inner.params["axis"] for inner in found if inner.primitive.name in _PLACES}
    kinds = getattr(eqn.params.get("compiler_params"), "dimension_semantics", None) or ()
    others = [axis for axis in range(len(grid.grid)) if axis not in grid.vmapped_dims]  # as the kernel counts them
    for axis in range(len(grid.grid)):
        if axis in grid.vmapped_dims:
            yield axis
        elif (place := others.index(axis)) not in read:
            kind = kinds[place] if place < len(kinds) else ""
            if not grid.scratch_avals or str(getattr(kind, "name", kind)).lower() == "parallel":
                yield axis


def _counted(eqn: Any, axis: int) -> list[int | None] | None:
    """Returns of each operand and result the dim whose elements an axis counts, if any; None if it does otherwise."""
    grid = eqn.params["grid_mapping"]
    found: list[int | None] = [None] * (len(eqn.invars) - grid.num_inputs)  # sizes of the grid, and prefetched scalars
    for block in grid.block_mappings:
        index, _ = jaxprs.open_jaxpr(block.index_map_jaxpr)
        place, sizes = index.invars[axis], block.array_aval.shape
        dims = [dim for dim, var in enumerate(index.outvars) if var is place]
        is_used = any(atom is place for inner in index.eqns for atom in inner.invars)
        counts = all(_size(block.block_shape[i]) == 1 and sizes[i] == grid.grid[axis] for i in dims)
        if is_used or len(dims) > 1 or not counts:
            return None
        found.append(dims[0] if dims else None)
    return found


def _size(dim: Any) -> int:
    """Returns the elements of a block along a dim."""
    return dim if isinstance(dim, int) else getattr(dim, "block_size", 1)


def _description(eqn: Any, axis: int | None) -> Any:
    """Returns what a kernel is, whatever the size of its grid along an axis."""
    grid = eqn.params["grid_mapping"]
    sizes = [size for i, size in enumerate(grid.grid) if i != axis]
    blocks = [(str(block.block_shape), str(block.index_map_jaxpr)) for block in grid.block_mappings]
    numbers = grid.vmapped_dims, grid.num_index_operands, [*map(str, grid.scratch_avals)]
    others = {name: str(eqn.params.get(name)) for name in ("interpret", "mesh", "compiler_params")}
    return sizes, blocks, numbers, others

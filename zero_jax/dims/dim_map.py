"""How an operation maps the dims of its operands to those of its results: exact, or nothing is said.

An operand dim *maps to* a result dim if the operation is a `jax.vmap` over it. Other operands are used whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from zero_jax.sharding.spec import Dims

Dim = tuple[int, int]  # the number of an operand, and of its dim


@dataclasses.dataclass(frozen=True)
class DimMap:
    """The dims of a result and those of the operands."""

    kept: tuple[tuple[Dim, ...], ...]  # for each dim of the result, the operand dims that map to it
    # Operand dims that the result is a sum over (or another reduction, as the primitive is), those that are summed over
    # together in one tuple
    reduced: tuple[tuple[Dim, ...], ...] = ()
    # For each dim of the result of a reshape, the operand dims of which an equal block (a shard) is a block of it;
    # empty where these are the dims of `kept`
    blocks: tuple[tuple[Dim, ...], ...] = ()

    def to(self, dim: Dim) -> int | None:
        """Returns the dim of the result that a dim of an operand maps to; None if it maps to none."""
        return next((i for i, dims in enumerate(self.kept) if dim in dims), None)

    def block(self, dim: Dim) -> int | None:
        """Returns the dim of the result that equal blocks of a dim of an operand are blocks of; None if of none."""
        return next((i for i, dims in enumerate(self.blocks or self.kept) if dim in dims), None)

    def carry(self, dims_in: Sequence[Dims | None]) -> Dims:
        """Returns the mesh axes of the dims of the result: those of the operand that has most."""
        return tuple(_axes(dims, dims_in) for dims in self.blocks or self.kept)

    def reduced_axes(self, dims_in: Sequence[Dims | None]) -> tuple[str, ...]:
        """Returns the mesh axes of the dims that are reduced."""
        return tuple(dict.fromkeys(axis for dims in self.reduced for axis in _axes(dims, dims_in)))


def reshape_groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Splits the dims of both shapes of a reshape into the shortest runs with equal products."""
    groups, i, j = [], 0, 0
    while i < len(old) and j < len(new):
        start, (left, right) = (i, j), (old[i], new[j])
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left, i = left * old[i], i + 1
            else:
                right, j = right * new[j], j + 1
        groups.append(([*range(start[0], i)], [*range(start[1], j)]))
    rest = [*range(i, len(old))], [*range(j, len(new))]  # dims of size 1
    return [*groups, rest] if any(rest) else groups


def _axes(dims: Sequence[Dim], dims_in: Sequence[Dims | None]) -> tuple[str, ...]:
    known = ((dims_in[i], dim) for i, dim in dims)
    return max((axes[dim] for axes, dim in known if axes is not None), key=len, default=())

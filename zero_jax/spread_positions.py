"""Indices that are an array's own positions, such as the `arange` of `logits[arange(batch), labels]`.

A dim that is looked up at its own positions is no more mixed by the lookup than a batching dim is.
"""

from __future__ import annotations

from typing import Any

from zero_jax.jaxprs import is_literal

_NEVER = -1  # instead of a dim: a comparison that holds nowhere


class Positions:
    """Knows the values of a walk that count along one of their dims, from 0 on."""

    def __init__(self) -> None:
        """Knows none yet."""
        self._dims: dict[Any, int] = {}
        self._columns: dict[Any, tuple[int | None, ...]] = {}

    def follow(self, eqn: Any) -> None:
        """Notes what an equation makes of positions."""
        name = eqn.primitive.name
        if name == "concatenate" and eqn.params["dimension"] == len(eqn.outvars[0].aval.shape) - 1:
            self._columns[eqn.outvars[0]] = tuple(self._dim(x) for x in eqn.invars)
        elif name in _RULES:
            self._set(eqn.outvars[0], _RULES[name](self, eqn))

    def rename(self, atoms: Any, variables: Any) -> None:
        """Takes variables for other ones, as a call does its arguments."""
        for atom, var in zip(atoms, variables, strict=True):
            self._set(var, self._dim(atom))

    def looked_up(self, eqn: Any) -> list[tuple[int, int]]:
        """Returns the dims of a gather's table that are looked up at their own positions, with those of the indices."""
        numbers, table, index = eqn.params["dimension_numbers"], eqn.invars[0].aval, eqn.invars[1]
        if is_literal(index):
            return []
        columns = (self._dim(index),) if index.aval.shape[-1] == 1 else self._columns.get(index, ())
        if len(columns) != len(numbers.start_index_map):
            return []
        found = []
        for i, dim in zip(numbers.start_index_map, columns, strict=True):
            counts = dim is not None and 0 <= dim < len(index.aval.shape) - 1
            if counts and i in numbers.collapsed_slice_dims and table.shape[i] == index.aval.shape[dim]:
                found.append((i, dim))
        return found

    def _dim(self, atom: Any) -> int | None:
        return None if is_literal(atom) else self._dims.get(atom)

    def _set(self, var: Any, dim: int | None) -> None:
        self._dims.pop(var, None)
        if dim is not None:
            self._dims[var] = dim

    def _iota(self, eqn: Any) -> int | None:
        return eqn.params["dimension"]

    def _same(self, eqn: Any) -> int | None:
        return self._dim(eqn.invars[0])

    def _less(self, eqn: Any) -> int | None:
        x, limit = eqn.invars
        return _NEVER if self._dim(x) is not None and is_literal(limit) and limit.val == 0 else None

    def _select(self, eqn: Any) -> int | None:  # a negative index counts from the end, which a position never does
        return self._dim(eqn.invars[1]) if self._dim(eqn.invars[0]) == _NEVER else None

    def _broadcast(self, eqn: Any) -> int | None:
        dim, after = self._dim(eqn.invars[0]), eqn.outvars[0].aval.shape
        if dim is None or dim == _NEVER:
            return dim
        to = eqn.params["broadcast_dimensions"][dim]
        return to if after[to] == eqn.invars[0].aval.shape[dim] else None


_RULES = {
    "iota": Positions._iota,
    "convert_element_type": Positions._same,
    "lt": Positions._less,
    "select_n": Positions._select,
    "broadcast_in_dim": Positions._broadcast,
}

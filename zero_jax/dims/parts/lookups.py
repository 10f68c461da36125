"""Relations of lookups and of writes to tables: of rows for examples, or of examples at their own places."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from zero_jax.dims.parts.pair import Pair, Rule, check
from zero_jax.dims.parts.relations import Kind, Relation, applied, joined
from zero_jax.dims.primitives import SCATTERS


def _at_own_places(pair: Pair, table: Relation, index: Relation, *, to: Sequence[int], alone: Sequence[int]) -> bool:
    """Tells whether the dim of examples of a table is looked up at its own positions, each of them."""
    if table.dim not in to or table.dim not in alone:
        return False
    column = index.columns[list(to).index(table.dim)] if index.columns else index
    if column.kind is not Kind.POSITIONS or (len(to) > 1 and not index.columns):
        return False
    sizes = zip(pair.shapes(0), pair.shapes(1), strict=True)
    return all(rows[table.dim] == places[column.dim] for rows, places in sizes)


def _places(
    pair: Pair, table: Relation, index: Relation, *, to: Sequence[int], batching: Any, alone: Sequence[int]
) -> tuple[Any, bool]:
    """Returns the dim of examples of the indices, and whether the examples of the table go along with them."""
    if _at_own_places(pair, table, index, to=to, alone=alone):
        columns = index.columns or (index,)
        place = columns[list(to).index(table.dim)].dim
        others = [x for x, dim in zip(columns, to, strict=True) if dim != table.dim]
        check(not others or applied(others).dim in (None, place))
        return place, True
    plain = applied(index.columns or (index,))
    if table.dim is not None and table.dim in batching[0]:
        check(plain.dim == batching[1][list(batching[0]).index(table.dim)])
        return plain.dim, True
    return plain.dim, False


def _gather(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    table, index = inputs
    numbers, sizes = pair.params["dimension_numbers"], pair.params["slice_sizes"]
    check(table.kind in (Kind.SAME, Kind.ROWS, Kind.SUM))
    batching = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    place, together = _places(
        pair, table, index, to=numbers.start_index_map, batching=batching, alone=numbers.collapsed_slice_dims
    )
    lead = [i for i in range(len(pair.results()[0])) if i not in numbers.offset_dims]
    if table.kind is Kind.ROWS and not together:
        dim: int = table.dim
        check(
            place is None
            and (sizes[dim], pair.part.params["slice_sizes"][dim]) == tuple(s[dim] for s in pair.shapes(0))
        )
        gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
        kept = [i for i in range(len(sizes)) if i not in gone]
        return [table.of_elements().at(sorted(numbers.offset_dims)[kept.index(dim)])]
    if place is None:
        return [table.of_elements()]
    check(table.kind is not Kind.SUM)
    return [dataclasses.replace(table.of_elements(), kind=Kind.ROWS, dim=lead[place])]


def _scatter(pair: Pair, inputs: Sequence[Relation]) -> list[Relation]:
    table, index, updates = inputs
    name, numbers = pair.whole.primitive.name, pair.params["dimension_numbers"]
    is_sum = name in ("scatter-add", "scatter-sub")
    check(is_sum or name == "scatter" or (table.is_plain and updates.is_plain))
    batching = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    place, together = _places(
        pair,
        table,
        index,
        to=numbers.scatter_dims_to_operand_dims,
        batching=batching,
        alone=numbers.inserted_window_dims,
    )
    lead = [i for i in range(len(pair.shapes(2)[0])) if i not in numbers.update_window_dims]
    if table.kind is Kind.ROWS and together:
        check(updates.dim == lead[place])
        return [dataclasses.replace(joined(table.at(0), updates.at(0)), dim=table.dim)]
    if table.kind is Kind.ROWS:
        gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        windows = [i for i in range(len(pair.shapes(0)[0])) if i not in gone]
        check(place is None and table.dim in windows and table.dim not in numbers.scatter_dims_to_operand_dims)
        check(updates.dim == sorted(numbers.update_window_dims)[windows.index(table.dim)])
        sizes = [(a[table.dim], b[updates.dim]) for a, b in zip(pair.shapes(0), pair.shapes(2), strict=True)]
        check(all(a == b for a, b in sizes))
        return [dataclasses.replace(joined(table.at(0), updates.at(0)), dim=table.dim)]
    if place is None and updates.kind in (Kind.SAME, Kind.SUM):
        return [joined(table, updates)]
    # Examples that are added to a table of zeros.
    check(is_sum and table.number == 0 and updates.kind is Kind.ROWS and updates.dim in lead)
    check(place is None or lead[place] == updates.dim)
    return [dataclasses.replace(updates.of_elements(), kind=Kind.SUM, dim=None)]


RULES: dict[str, Rule] = {"gather": _gather, **dict.fromkeys(SCATTERS, _scatter)}

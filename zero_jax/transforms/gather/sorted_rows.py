"""Sorts of the rows of all examples, as of a mixture of experts, become a sort of each device's own rows.

`order = argsort(expert)` brings the tokens of all examples in the order of their experts, `lax.ragged_dot` multiplies
groups of them, and a scatter or a lookup by the inverse order brings them home. XLA gathers all tokens for that, and
all-reduces what comes back, though each result depends on its own token alone: any order is right in which the rows of
a group are together. So where all that is done with sorted rows is done row by row until they are home, each device
sorts its own rows. Values keep their shapes: the rows of one device follow those of another.

Whether that holds is found by evaluating the program so: a sort whose rows are used in another way is left as it is in
the next try.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from zero_jax.dims import CASTS, COPIES, ELEMENTWISE, PLACES, SHAPES, Examples, dim_map, is_activation, known_primitives
from zero_jax.program.evaluation import evaluate, trace_flat
from zero_jax.program.jaxprs import bind, bind_mapped, is_traced, open_jaxpr, source_context
from zero_jax.program.subcalls import MANUAL, Subcall, equations, equations_of, kind_of
from zero_jax.program.walk import Deferred, Walk
from zero_jax.sharding.chains import Chain, reshard
from zero_jax.sharding.mesh import Axes, axis_size
from zero_jax.sharding.spec import named_along
from zero_jax.transforms.gather.per_device import split_dim
from zero_jax.transforms.gather.products import is_of_rows, product_of_blocks


@dataclasses.dataclass(frozen=True)
class _Constant(Deferred):
    """An array that is the same at all places of some dims, or the number of each place."""

    array: Any
    same_along: frozenset[int] = frozenset()
    is_count: bool = False

    @property
    def key(self) -> Hashable:
        return self.same_along, self.is_count


@dataclasses.dataclass(frozen=True)
class _Sorted(Deferred):
    """Rows in the order of a sort; or where in that order each row is, as `argsort(order)` says."""

    array: Any
    number: int  # of the sort
    dim: int | None  # the dim of the sorted rows; None for places of rows that are not sorted
    # What it is, as known when the program is traced: for each row before the sort; of places, for each place in order
    known: Any = None
    rows: Any = None  # of places, the numbers of the rows that they are of

    @property
    def key(self) -> Hashable:
        return self.number, self.dim, *(None if x is None else x.tobytes() for x in (self.known, self.rows))


@dataclasses.dataclass(frozen=True)
class _Keys:
    """What rows are sorted by, `[devices, rows of a device]`, before the sort."""

    array: Any

    def group_sizes(self, sizes: Any) -> Any:
        """Returns `[devices, groups]`, how many rows of each device are in a group of sorted rows of these sizes.

        Sizes are mostly how often each number is a key. Else the rows' places in the order of all are needed.
        """
        is_float = jnp.issubdtype(self.array.dtype, jnp.floating)
        dtype = jnp.promote_types(self.array.dtype, jnp.float32 if is_float else jnp.int32)  # that has all numbers
        sizes, numbers = sizes.astype(jnp.int32), jnp.arange(len(sizes), dtype=dtype)
        counts = (self.array.astype(dtype)[..., None] == numbers).sum(1, dtype=jnp.int32)

        def by_place() -> Any:
            places = jnp.argsort(jnp.argsort(self.array.reshape(-1))).reshape(self.array.shape)
            before = (places[..., None] < jnp.cumsum(sizes)).sum(1, dtype=jnp.int32)
            return jnp.diff(before, axis=1, prepend=jnp.zeros((len(before), 1), jnp.int32))

        is_counted = (counts.sum(0) == sizes).all() & (sizes.sum() == self.array.size)
        return lax.cond(is_counted, lambda: counts, by_place)


def sorted_by_device(closed: Any, states: Sequence[Any], *, mesh: Mesh, axes: Axes) -> Any:
    """Returns a closed jaxpr whose devices sort their own rows where that is the same; itself if they do nowhere."""
    is_alone = axes.size_beside_batch(mesh) == 1 < axis_size(mesh, axes.batch)
    if not is_alone or not any(map(_is_of_rows, equations(closed, skip=MANUAL))):
        return closed
    examples = Examples(mesh, axes)
    examples.run(closed, states)
    refused = set[int]()
    while True:
        walk = _Blocks(mesh, axes, examples, refused)
        changed = walk.rewritten(closed)
        if not walk.lost:
            return changed if walk.num_sorts > len(refused) else closed
        refused |= walk.lost


def _is_of_rows(eqn: Any) -> bool:
    """Tells whether an equation sorts one row of numbers."""
    is_sort = eqn.primitive.name == "sort" and eqn.params["num_keys"] == 1
    return is_sort and all(var.aval.ndim == 1 for var in eqn.invars)


# Of these what they make of numbers of rows can be known when the program is traced.
_KNOWN = ELEMENTWISE | SHAPES | CASTS | {"broadcast_in_dim"}
_AS_THEY_ARE = PLACES | COPIES
_SUMS = ("scatter-add", "scatter-mul", "scatter-min", "scatter-max")  # in any order


class _Blocks(Walk[None]):
    """Evaluates a program with sorts of each device's rows; `lost` has the numbers of those that it cannot have."""

    def __init__(self, mesh: Mesh, axes: Axes, examples: Examples, refused: set[int]):
        super().__init__()
        self.mesh, self.axes, self.examples, self.refused = mesh, axes, examples, refused
        self.num_sorts, self.lost, self.keys = 0, set[int](), dict[int, _Keys]()
        self.leaving: list[Any] = []  # what leaves the last region that was evaluated, without arrays

    def rewritten(self, closed: Any) -> Any:
        """Returns the closed jaxpr of the program so evaluated."""
        opened, consts = open_jaxpr(closed)
        equation = lambda eqn, values: self.equation(eqn, values, None)  # noqa: E731
        run = lambda *xs: [self.plain(x) for x in evaluate(opened, consts, xs, equation)]  # noqa: E731
        return trace_flat(run, [var.aval for var in opened.invars])

    def enters(self, eqn: Any, sub: Subcall, values: list[Any], frame: None) -> bool:
        is_sorted = sub.kind != "while" and any(isinstance(value, _Sorted) for value in values)
        return is_sorted or any(map(_is_of_rows, equations_of(eqn, skip=MANUAL)))

    def materialize(self, value: Any, eqn: Any, frame: None) -> Any:
        return self.plain(value)

    def plain(self, value: Any) -> Any:
        """Returns the array of a value that is used in a way that may depend on the order of rows."""
        if isinstance(value, _Sorted):
            self.lost.add(value.number)
        return _array(value)

    def stack(self, value: Any, aval: Any, eqn: Any, frame: None) -> Any:
        return self.plain(value)

    def inner(self, eqn: Any, jaxpr: Any, values: Sequence[Any], frame: None) -> list[Any]:
        keys = {**self.keys}
        outs, self.keys = self.run(jaxpr, values, frame), keys  # those of a region are not there outside of it
        if kind_of(eqn) != "remat":
            return [self.plain(value) for value in outs]
        self.leaving = [value.with_arrays([None]) if isinstance(value, _Sorted) else None for value in outs]
        return [_array(value) for value in outs]

    def results(self, eqn: Any, values: list[Any], arrays: Sequence[Any]) -> Sequence[Any]:
        if kind_of(eqn) != "remat":
            return arrays
        pairs = zip(self.leaving, arrays, strict=True)
        return [array if value is None else value.with_arrays([array]) for value, array in pairs]

    def operation(self, eqn: Any, values: list[Any], frame: None) -> Sequence[Any]:
        if eqn.params.get("indices_are_sorted"):  # as those of all are, and of each device may not be
            values = [*map(self.plain, values)]
        special = _SPECIAL.get(eqn.primitive.name)
        if special is not None and (made := special(self, eqn, *values)) is not None:
            return made
        if any(isinstance(value, _Sorted) for value in values):
            return self.by_row(eqn, values)
        if eqn.primitive.name in _KNOWN and all(map(_is_scalar, values)) and eqn.outvars[0].aval.shape == ():
            return [_known(eqn, values)]
        outs, name = bind(eqn, [*map(_array, values)]), eqn.primitive.name
        if name == "iota":
            return [_Constant(outs[0], is_count=eqn.params["shape"] == eqn.outvars[0].aval.shape[:1])]
        if name == "broadcast_in_dim":
            kept = [i for i, dims in enumerate(dim_map(eqn).kept) if dims and outs[0].shape[i] > 1]
            return [_Constant(outs[0], same_along=frozenset(range(outs[0].ndim)) - {*kept})]
        return outs

    def by_row(self, eqn: Any, values: list[Any]) -> list[Any]:
        """Evaluates what may be done row by row, in any order of the rows."""
        results, dims = [], [self.sorted_dim(eqn, i, values) for i in range(len(eqn.outvars))]
        known, rows = self.known_rows(eqn, values) if len(dims) == 1 else (None, None)
        is_places = all(x.dim is None for x in values if isinstance(x, _Sorted))
        if "lost" in dims and not (is_places and known is not None):
            return bind(eqn, [self.plain(value) for value in values])
        (number,) = {x.number for x in values if isinstance(x, _Sorted)}
        for out, dim in zip(bind(eqn, [*map(_array, values)]), dims, strict=True):
            if is_places or isinstance(dim, int):
                out = _Sorted(out, number, None if is_places else dim, known, rows)
            results.append(out)
        return results

    def sorted_dim(self, eqn: Any, result: int, values: list[Any]) -> Any:
        """Returns the dim of the sorted rows in a result, None where that does not depend on their order, or "lost"."""
        found = [(i, x) for i, x in enumerate(values) if isinstance(x, _Sorted)]
        dims = [(i, x.dim) for i, x in found if x.dim is not None]
        name, known = eqn.primitive.name, known_primitives().get(eqn.primitive.name)
        if len({x.number for _, x in found}) > 1 or len(dims) < len(found):
            return "lost"
        if name in _AS_THEY_ARE and len(eqn.invars) == len(eqn.outvars):
            return dict(dims).get(result)
        if is_activation(eqn):
            return dims[0][1]
        if known is None:
            return "lost"
        maps, to = dim_map(eqn, result), {dim_map(eqn, result).to(dim) for dim in dims}
        if known.reduces and any({*dims} == {*each} for each in maps.reduced):
            return None
        if name in _SUMS and not isinstance(values[0], _Sorted) and self.is_sum(eqn, values):
            return None
        dim = to.pop()
        if to or dim is None:
            return "lost"
        others = [(values[i], at) for i, at in maps.kept[dim] if (i, at) not in dims]
        return dim if all(isinstance(x, _Constant) and at in x.same_along for x, at in others) else "lost"

    def is_sum(self, eqn: Any, values: list[Any]) -> bool:
        """Tells whether all rows are added somewhere, each where its own number says."""
        (_, index, updates), numbers = values, eqn.params["dimension_numbers"]
        places = _places(numbers.update_window_dims, eqn.invars[2].aval.ndim)
        if numbers.operand_batching_dims or not isinstance(index, _Sorted) or index.dim is None:
            return False
        if index.dim >= len(places):  # the numbers of one place
            return False
        at = places[index.dim]
        if isinstance(updates, _Constant):
            return at in updates.same_along
        return isinstance(updates, _Sorted) and updates.dim == at

    def known_rows(self, eqn: Any, values: list[Any]) -> tuple[Any, Any]:
        """Returns what a result is for each row, or place, where that is known when the program is traced, and `rows`.

        Only scalars are the same for all of them.
        """
        found, name = [x for x in values if isinstance(x, _Sorted)], eqn.primitive.name
        is_known = all(x.known is not None for x in found) and name in _KNOWN
        if not is_known or not all(isinstance(x, _Sorted) or _is_scalar(x) for x in values):
            return None, None
        rows, size = found[0].rows, (found[0].known if found[0].rows is None else found[0].rows).size
        if eqn.outvars[0].aval.size != size:
            return None, None
        if rows is not None and name not in ELEMENTWISE:  # moved as they are
            return found[0].known, _known(eqn, [rows])
        if len({None if x.rows is None else x.rows.tobytes() for x in found}) > 1:
            return None, None  # of one row the place of another
        return _known(eqn, [x.known if isinstance(x, _Sorted) else x for x in values]), rows

    def sort(self, eqn: Any, *values: Any) -> list[Any] | None:
        """Sorts rows of all examples; or brings what is sorted home, by the numbers of its rows."""
        keys, *others = values
        size = eqn.invars[0].aval.size
        if not _is_of_rows(eqn) or size % self.examples.num_shards:
            return None
        if isinstance(keys, _Sorted):
            is_order = keys.dim == 0 and _is_numbered(keys.known, size)
            if not is_order or not all(isinstance(x, _Constant) and x.is_count for x in others):
                return None
            made = self.sorted_blocks(eqn, values)
            return [made[0], *(_places_of(x, keys.number) for x in made[1:])]
        if self.examples.operands.get(id(eqn), [None])[0] != 0 or any(isinstance(x, _Sorted) for x in others):
            return None
        number, self.num_sorts = self.num_sorts, self.num_sorts + 1
        if number in self.refused:
            return None
        self.keys[number] = _Keys(self.split(_array(keys)))
        of_rows = [isinstance(x, _Constant) and x.is_count for x in values]
        pairs = zip(self.sorted_blocks(eqn, values), of_rows, strict=True)
        return [_Sorted(x, number, 0, _numbers(x) if is_order else None) for x, is_order in pairs]

    def sorted_blocks(self, eqn: Any, values: Sequence[Any]) -> list[Any]:
        blocks = [self.split(_array(x)) for x in values]
        made = jax.vmap(lambda *xs: bind(eqn, xs))(*blocks)
        return [self.of_devices(x).reshape(-1) for x in made]

    def lookup(self, eqn: Any, table: Any, index: Any) -> list[Any] | None:
        """Looks rows up in the order of a sort, or brings them home."""
        numbers, out = eqn.params["dimension_numbers"], eqn.outvars[0].aval
        at, gone, kept = numbers.start_index_map, numbers.collapsed_slice_dims, numbers.offset_dims
        is_whole = _is_of_whole_rows(eqn, at, gone, kept, out.shape)
        if not is_whole or not isinstance(index, _Sorted):
            return None
        goes = index.dim == 0 and not isinstance(table, _Sorted)
        comes = index.dim is None and isinstance(table, _Sorted) and (table.number, table.dim) == (index.number, 0)
        if not (goes or comes) or not self.is_local(eqn, index):
            return None
        blocks = [self.split(_array(table)), self.local(eqn, index)]
        made = self.of_devices(bind_mapped(eqn, blocks, (0, 0))).reshape(out.shape)
        return [_Sorted(made, index.number, 0) if goes else made]

    def write(self, eqn: Any, whole: Any, index: Any, updates: Any) -> list[Any] | None:
        """Adds sorted rows to those that they are of, or writes where they are."""
        numbers, out = eqn.params["dimension_numbers"], eqn.outvars[0].aval
        at, gone, kept = numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims, numbers.update_window_dims
        is_sorted = isinstance(index, _Sorted) and index.dim == 0 and not isinstance(whole, _Sorted)
        added = eqn.invars[2].aval.shape
        if not is_sorted or not _is_of_whole_rows(eqn, at, gone, kept, added) or not self.is_local(eqn, index):
            return None
        is_each = added[0] == out.shape[0]  # each is written once
        comes = isinstance(updates, _Sorted) and (updates.number, updates.dim) == (index.number, 0)
        is_places = eqn.primitive.name == "scatter" and isinstance(updates, _Constant) and updates.is_count and is_each
        if not is_places and not (comes and (is_each or eqn.primitive.name in _SUMS)):
            return None
        blocks = [self.split(_array(whole)), self.local(eqn, index), self.split(_array(updates))]
        made = self.of_devices(bind_mapped(eqn, blocks, (0, 0, 0))).reshape(out.shape)
        return [_places_of(made, index.number) if is_places else made]

    def product(self, eqn: Any, rows: Any, weight: Any, *sizes: Any) -> list[Any] | None:
        """Multiplies groups of sorted rows, each device its own."""
        is_sorted = isinstance(rows, _Sorted) and rows.dim == 0 and len(sizes) == 1
        is_known = is_sorted and rows.number in self.keys and is_of_rows(eqn)
        if not is_known or any(isinstance(x, _Sorted) for x in (weight, *sizes)):
            return None
        with source_context(eqn):
            own = self.keys[rows.number].group_sizes(_array(sizes[0]))
            operands = rows.array, _array(weight), self.of_devices(own)
            made = product_of_blocks(eqn, operands, mesh=self.mesh, axes=self.axes)
        return [_Sorted(self.of_devices(made), rows.number, 0)]

    def split(self, x: Any) -> jax.Array:
        """Returns rows as `[devices, rows of a device, ...]`."""
        return self.of_devices(split_dim(x, 0, self.examples.num_shards))

    def of_devices(self, x: jax.Array) -> jax.Array:
        """Returns a value, and takes its cotangent, sharded along its first dim as the batch is."""
        chain = Chain((named_along(self.mesh, x.ndim, {0: self.axes.batch}),))
        return reshard(x, forward=chain, backward=chain)

    def is_local(self, eqn: Any, index: _Sorted) -> bool:
        """Tells whether indices are the numbers of rows, or of equal runs of them, so that each device has its own."""
        num_rows, size = eqn.invars[0].aval.shape[0], eqn.invars[1].aval.size
        is_even = index.array.shape[0] % self.examples.num_shards == num_rows % self.examples.num_shards == 0
        if not is_even or size % num_rows:
            return False
        if index.dim is None:
            return _is_numbered(index.known, num_rows) and _is_numbered(index.rows, size)
        return _is_numbered(index.known, size, size // num_rows)

    def local(self, eqn: Any, index: _Sorted) -> jax.Array:
        """Returns indices in the rows of each device, `[devices, indices of a device, ...]`."""
        blocks, num_rows = self.split(index.array), eqn.invars[0].aval.shape[0]
        first = np.arange(len(blocks), dtype=blocks.dtype) * (num_rows // len(blocks))
        return blocks - first.reshape(-1, *[1] * (blocks.ndim - 1))


_SPECIAL = {
    "sort": _Blocks.sort,
    "gather": _Blocks.lookup,
    **dict.fromkeys(("scatter", *_SUMS), _Blocks.write),
    "ragged_dot_general": _Blocks.product,
}


def _array(value: Any) -> Any:
    return value.array if isinstance(value, Deferred) else value


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, Deferred | jax.Array) and not is_traced(value) and np.ndim(value) == 0


def _known(eqn: Any, operands: Sequence[Any]) -> np.ndarray:
    """Returns the result of an equation of what is known when the program is traced."""
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
        return np.asarray(bind(eqn, operands)[0])


def _numbers(rows: jax.Array) -> np.ndarray:
    """Returns the numbers of rows, in their dtype, which may be too narrow for them."""
    return np.arange(len(rows)).astype(rows.dtype)


def _places_of(array: jax.Array, number: int) -> _Sorted:
    """Returns where in the order of a sort each row is."""
    return _Sorted(array, number, None, _numbers(array), np.arange(len(array), dtype=np.int32))


def _is_numbered(known: Any, size: int, run: int = 1) -> bool:
    return known is not None and known.size == size and np.array_equal(known.reshape(-1), np.arange(size) // run)


def _places(windows: Sequence[int], num_dims: int) -> list[int]:
    """Returns the dims of a result, or of updates, that are those of the indices."""
    return [dim for dim in range(num_dims) if dim not in windows]


def _is_of_whole_rows(
    eqn: Any, at: Sequence[int], gone: Sequence[int], kept: Sequence[int], part: Sequence[int]
) -> bool:
    """Tells whether entire rows of the first operand are looked up or written, at places that come first in `part`."""
    numbers, shape = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
    places = _places(kept, len(part))
    is_first = places == [*range(len(places))] and tuple(part[len(places) :]) == tuple(shape[1:])
    return tuple(at) == tuple(gone) == (0,) and not numbers.operand_batching_dims and is_first

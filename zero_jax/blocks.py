"""The repeated blocks of a Python loop over layers, found in the jaxpr that such a loop leaves behind.

A loop over equal layers writes the same equations again and again. Found are tandem repeats in the sequence of the
equations' signatures: what is computed and on which shapes, not on which values. Equations on params alone (casts,
transposes, slices of stacked params) are not part of the sequence, because a model may have them anywhere.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from zero_jax import jaxprs

# Of all the distances at which an equation comes again, as many are tried as periods.
MAX_PERIODS = 256
_WINDOWS = (1, 8)
_MULTIPLES = (1, 2, 3, 4)
_TAKES_A_PART = frozenset("slice dynamic_slice gather split unstack squeeze".split())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """One of the repeated blocks of a jaxpr: the equations of one turn of a Python loop.

    Attributes:
      start: The index of its first equation.
      stop: The index after its last equation.
      reads: The variables that it takes from before, params among them, in the order of their use.
      writes: The variables that it makes and that are used after it, or that the jaxpr returns.
      repeat: Which run of equal blocks it belongs to, counted from 0: an encoder's or a decoder's, say.
    """

    start: int
    stop: int
    reads: tuple[Any, ...]
    writes: tuple[Any, ...]
    repeat: int


def find_blocks(jaxpr: Any, is_param: Sequence[bool]) -> tuple[Block, ...]:
    """Finds the repeated blocks of a jaxpr that each use params of their own.

    Where several ways to cut the equations into blocks cover equally many of them, the fewest bytes of activations go
    from block to block: the blocks of a transformer are cut where only the residual stream passes.

    Args:
      jaxpr: An open jaxpr.
      is_param: For each of its inputs whether it is a param.

    Returns:
      The blocks in order and disjoint; none where nothing repeats.
    """
    if sum(is_param) == 0 or len(jaxpr.eqns) < 2:
        return ()
    sequence = _Sequence(jaxpr, is_param)
    runs = sorted(_runs(sequence, 0, len(sequence.eqns)))
    return tuple(block for number, run in enumerate(runs) for block in sequence.blocks(*run, number))


class _Sequence:
    """The equations of a jaxpr that are not on params alone, by their place among each other."""

    def __init__(self, jaxpr: Any, is_param: Sequence[bool]):
        self.jaxpr = jaxpr
        self.origins: dict[Any, _Origin] = {}  # of what is made of params and constants alone
        for i, (var, mark) in enumerate(zip(jaxpr.invars, is_param, strict=True)):
            if mark:
                self.origins[var] = _Origin(frozenset((i,)), i)
        signatures = _Signatures()
        self.eqns: list[int] = []
        numbers: list[int] = []
        for i, eqn in enumerate(jaxpr.eqns):
            inputs = [self.origin(atom) for atom in eqn.invars]
            known = [origin for origin in inputs if origin is not None]
            if len(known) == len(inputs) and not eqn.effects:
                self.origins.update(dict.fromkeys(eqn.outvars, _derived(eqn, known)))
            else:
                self.eqns.append(i)
                numbers.append(signatures.number((signatures.of(eqn), tuple(origin is None for origin in inputs))))
        self.signatures = np.asarray(numbers, np.int64)
        size = [1 + signatures.num_inner(jaxpr.eqns[i]) for i in self.eqns]
        self.sizes = np.concatenate([[0], np.cumsum(size)]).astype(np.int64)
        self.measure()

    def origin(self, atom: Any) -> _Origin | None:
        """Returns what params an input is made of; None for what is made of anything else."""
        return _Origin(frozenset(), str(atom)) if jaxprs.is_literal(atom) else self.origins.get(atom)

    def measure(self) -> None:
        """Works out how many bytes are made up to each place, and how many of them cross it."""
        num = len(self.eqns)
        made, made_at, last_use = np.zeros(num + 1), {}, {}
        for place, i in enumerate(self.eqns):
            eqn = self.jaxpr.eqns[i]
            made_at.update((var, place) for var in eqn.outvars)
            made[place + 1] = sum(_num_bytes(var.aval) for var in eqn.outvars)
            last_use.update((atom, place) for atom in eqn.invars if not jaxprs.is_literal(atom))
        last_use.update((atom, num) for atom in self.jaxpr.outvars if not jaxprs.is_literal(atom))
        changes = np.zeros(num + 2)
        for var, place in made_at.items():
            if var in last_use:
                changes[place + 1] += _num_bytes(var.aval)
                changes[last_use[var] + 1] -= _num_bytes(var.aval)
        self.made, self.crossing = np.cumsum(made), np.cumsum(changes)[: num + 1]

    @functools.cached_property
    def last_read(self) -> dict[Any, int]:
        """For each variable the index of the last equation that reads it, past the end for results."""
        last = {}
        for i, eqn in enumerate(self.jaxpr.eqns):
            last.update((atom, i) for atom in eqn.invars if not jaxprs.is_literal(atom))
        last.update((atom, len(self.jaxpr.eqns)) for atom in self.jaxpr.outvars if not jaxprs.is_literal(atom))
        return last

    def begin(self, start: int, stop: int) -> int:
        """Returns the index of a block's first equation: what is made of its params just before it is its own."""
        eqns, last = self.jaxpr.eqns, self.last_read
        index, end = self.eqns[start], self.eqns[stop - 1]
        while index and self.only_params(eqns[index - 1]):
            if any(last.get(var, -1) > end for var in eqns[index - 1].outvars):
                break
            index -= 1
        return index

    def blocks(self, first: int, period: int, count: int, repeat: int) -> Iterator[Block]:
        """Yields the blocks of a run."""
        eqns, last = self.jaxpr.eqns, self.last_read
        places = [first + period * turn for turn in range(count)]
        bounds = [self.begin(place, place + period) for place in places]
        bounds.append(self.eqns[places[-1] + period - 1] + 1)
        for start, stop in itertools.pairwise(bounds):
            inside = eqns[start:stop]
            made = {var for eqn in inside for var in eqn.outvars}
            read = dict.fromkeys(atom for eqn in inside for atom in eqn.invars if not jaxprs.is_literal(atom))
            yield Block(
                start=start,
                stop=stop,
                reads=tuple(var for var in read if var not in made),
                writes=tuple(var for eqn in inside for var in eqn.outvars if last.get(var, -1) >= stop),
                repeat=repeat,
            )

    def only_params(self, eqn: Any) -> bool:
        """Tells whether an equation is on params alone."""
        return all(var in self.origins for var in eqn.outvars)

    def are_blocks(self, first: int, period: int, count: int) -> bool:
        """Tells whether each turn takes something of the turn before and has params that no other turn has."""
        made: set[Any] = set()
        params: list[set[Hashable]] = []
        for start in range(first, first + period * count, period):
            eqns = [self.jaxpr.eqns[i] for i in self.eqns[start : start + period]]
            read = [atom for eqn in eqns for atom in eqn.invars if not jaxprs.is_literal(atom)]
            if made and made.isdisjoint(read):
                return False
            made = {var for eqn in eqns for var in eqn.outvars if _is_float(var.aval)}
            params.append(
                {self.origins[atom].part for atom in read if atom in self.origins and self.origins[atom].params}
            )
        uses = collections.Counter(key for keys in params for key in keys)
        return bool(made) and all(any(uses[key] == 1 for key in keys) for keys in params)

    def phase(self, start: int, stop: int, period: int) -> tuple[int, int, int]:
        """Returns the best cut of a run of repeats, as first place, period and number of blocks."""
        phases = np.arange(min(period, stop - start - 2 * period + 1))
        counts = (stop - start - phases) // period
        ends = start + phases + counts * period
        outside = self.made[start + phases] - self.made[start] + self.made[stop] - self.made[ends]
        cuts = np.zeros(len(phases))
        for turn in range(int(counts.max()) + 1):
            places = start + phases + turn * period
            cuts += np.where(turn <= counts, self.crossing[np.minimum(places, len(self.eqns))], 0)
        best = int(np.argmin(outside + cuts))
        return int(start + phases[best]), period, int(counts[best])


class _Signatures:
    """What equations compute and on which shapes, as numbers: equal for the equations of equal layers."""

    def __init__(self):
        self.numbers: dict[Hashable, int] = {}
        self.inner: dict[int, tuple[Any, int, int]] = {}

    def number(self, key: Hashable) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def of(self, eqn: Any) -> int:
        inner = tuple(self.of_jaxpr(jaxpr)[1] for jaxpr in jaxprs.inner_jaxprs(eqn))
        avals = [tuple(_kind(var.aval) for var in variables) for variables in (eqn.invars, eqn.outvars)]
        return self.number((eqn.primitive.name, *avals, inner))

    def of_jaxpr(self, jaxpr: Any) -> tuple[Any, int, int]:
        """Returns the jaxpr (so that its id stays its own), its number, and how many equations it has."""
        if id(jaxpr) not in self.inner:
            opened, _ = jaxprs.open_jaxpr(jaxpr)
            number = self.number(tuple(self.of(eqn) for eqn in opened.eqns))
            self.inner[id(jaxpr)] = jaxpr, number, sum(1 + self.num_inner(eqn) for eqn in opened.eqns)
        return self.inner[id(jaxpr)]

    def num_inner(self, eqn: Any) -> int:
        return sum(self.of_jaxpr(jaxpr)[2] for jaxpr in jaxprs.inner_jaxprs(eqn))


def _runs(sequence: _Sequence, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yields the runs of blocks between two places: the one that covers most, then those on either side of it."""
    pending = [(start, stop)]
    while pending:
        start, stop = pending.pop()
        for first, last, period in _repeats(sequence, start, stop):
            cut, period, count = sequence.phase(first, last, period)
            if count >= 2 and sequence.are_blocks(cut, period, count):
                yield cut, period, count
                pending += [(start, cut), (cut + period * count, stop)]
                break


def _repeats(sequence: _Sequence, start: int, stop: int) -> list[tuple[int, int, int]]:
    """Returns the tandem repeats between two places as start, stop and period, those that cover most first."""
    numbers = sequence.signatures[start:stop]
    found = []
    for period in _periods(numbers):
        equal = np.concatenate([[False], numbers[:-period] == numbers[period:], [False]])
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        for first, last in zip(edges[::2], edges[1::2], strict=True):
            if last - first >= period:
                count = (last - first) // period + 1
                covered = sequence.sizes[start + first + count * period] - sequence.sizes[start + first]
                found.append((-int(covered), period, start + int(first), start + int(last) + period))
    return [(first, last, period) for _, period, first, last in sorted(found)]


def _periods(numbers: np.ndarray) -> list[int]:
    """Returns distances at which a signature, or a row of some, comes again; the most frequent first."""
    distances = []
    for width in _WINDOWS:
        if len(numbers) < 2 * width:
            continue
        windows = np.lib.stride_tricks.sliding_window_view(numbers, width)
        _, kinds = np.unique(windows, axis=0, return_inverse=True)
        kinds = kinds.reshape(-1)
        order = np.argsort(kinds, kind="stable")
        again = kinds[order][1:] == kinds[order][:-1]
        distances.append(np.diff(order)[again])
    if not distances:
        return []
    near = np.concatenate(distances)
    # Where every second layer is alike, say, it is a multiple at which the params are others too.
    found, counts = np.unique(np.concatenate([near * times for times in _MULTIPLES]), return_counts=True)
    often = np.argsort(-counts * found, kind="stable")[:MAX_PERIODS]
    return [int(period) for period in found[often] if 2 * period <= len(numbers)]


@dataclasses.dataclass(frozen=True)
class _Origin:
    """Which params a value is made of, and which parts of them: equal whatever else was done to these parts."""

    params: frozenset[int]
    part: Hashable


def _derived(eqn: Any, inputs: Sequence[_Origin]) -> _Origin:
    """Returns the origin of what is made of params and constants alone."""
    params = frozenset().union(*(origin.params for origin in inputs))
    of_params = [origin.part for origin in inputs if origin.params]
    inner = jaxprs.inner_jaxprs(eqn)
    if params and not inner and eqn.primitive.name not in _TAKES_A_PART:
        return _Origin(params, of_params[0] if len(set(of_params)) == 1 else hash(tuple(of_params)))
    settings = "" if inner else str(eqn.params)
    return _Origin(params, hash((eqn.primitive.name, settings, tuple(origin.part for origin in inputs))))


def _kind(aval: Any) -> Hashable:
    return (aval.shape, aval.dtype) if hasattr(aval, "shape") and hasattr(aval, "dtype") else str(aval)


def _num_bytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize if hasattr(aval, "shape") and hasattr(aval, "dtype") else 0


def _is_float(aval: Any) -> bool:
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact)

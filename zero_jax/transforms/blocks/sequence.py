"""The equations of a jaxpr as a sequence of numbers: what each computes, on which params, and what passes between."""

from __future__ import annotations

import bisect
import collections
import functools
import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from zero_jax.dims import is_float
from zero_jax.program import jaxprs
from zero_jax.transforms.facts import Facts


class EqnSequence:
    """The equations of a jaxpr that are not on params alone, by their place among each other.

    Args:
      facts: what is known of its values.
      tied: whether blocks may have the params of other blocks, as layers that share their weights do.
    """

    def __init__(self, facts: Facts, *, tied: bool = False):
        self.facts, self.jaxpr, self.last_read, self.tied = facts, facts.jaxpr, facts.last_read, tied
        signatures = _Signatures()
        self.eqns: list[int] = []
        numbers: list[int] = []
        users: list[int] = []
        for i, eqn in enumerate(self.jaxpr.eqns):
            if facts.only_params(eqn):
                continue
            if facts.params_in(eqn):
                users.append(len(self.eqns))
            self.eqns.append(i)
            numbers.append(signatures.of(eqn))
        self.numbers = np.asarray(numbers, np.int64)
        self.users = np.asarray(users, np.int64)  # places of what takes params and activations
        self.sizes = np.asarray([1 + signatures.num_inner(self.jaxpr.eqns[i]) for i in self.eqns], np.int64)
        self.measure()

    def measure(self) -> None:
        """Works out how many bytes are made up to each place, and how many of them cross it."""
        made, changes = np.zeros(len(self.eqns) + 1), np.zeros(len(self.eqns) + 2)
        for place, i in enumerate(self.eqns):
            for var in self.jaxpr.eqns[i].outvars:
                num_bytes = _num_bytes(var.aval)
                made[place + 1] += num_bytes
                if var in self.last_read:
                    changes[place + 1] += num_bytes
                    changes[bisect.bisect_left(self.eqns, self.last_read[var]) + 1] -= num_bytes
        self.cheapest: dict[tuple[int, int], int] = {}
        self.made, self.crossing = np.cumsum(made), np.cumsum(changes)[:-1]

    def cheapest_cut(self, before: int, after: int) -> int:
        """Returns the place between two where the fewest bytes cross, the first one past `before` and up to `after`."""
        if (before, after) not in self.cheapest:
            crossing = self.crossing[before + 1 : after + 1]
            self.cheapest[before, after] = before + 1 + int(np.argmin(crossing))
        return self.cheapest[before, after]

    def begin(self, start: int, stop: int) -> int:
        """Returns the index of a block's first equation: what is made of its params just before it is its own."""
        eqns, last = self.jaxpr.eqns, self.last_read
        index, end = self.eqns[start], self.eqns[stop - 1]
        while index and self.facts.only_params(eqns[index - 1]):
            if any(last.get(var, -1) > end for var in eqns[index - 1].outvars):
                break
            index -= 1
        return index

    def are_blocks(self, run: Sequence[int]) -> bool:
        """Tells whether each turn takes something of the turn before and has params that no other turn has.

        If turns may be `tied`, they may also have all params of another one. What passes between such turns is no
        scalar: that may be a sum of losses, of the same params on parts of a batch.
        """
        parts = self.param_parts
        bounds = [slice(*np.searchsorted(parts[0], pair)) for pair in itertools.pairwise(run)]
        turns = [frozenset(parts[1, turn].tolist()) for turn in bounds]
        params = {*turns} if self.tied else turns
        reads, is_tied = self.float_reads, len(params) < len(turns)
        for before, start, stop in zip(run[:-2], run[1:-1], run[2:], strict=True):
            maker, _, is_array = reads[:, slice(*np.searchsorted(reads[1], (start, stop)))]
            taken = (before <= maker) & (maker < start) & (is_array >= is_tied)
            if not taken.any() and (is_tied or self.makes_floats(before, start)):
                return False
        uses = collections.Counter(itertools.chain(*params))
        own = {key for key, count in uses.items() if count == 1}
        return self.makes_floats(*run[-2:]) and not any(map(own.isdisjoint, params))

    def makes_floats(self, start: int, stop: int) -> bool:
        """Tells whether the equations between two places make floating values."""
        return bool(self.num_floats[start] < self.num_floats[stop])

    @functools.cached_property
    def num_floats(self) -> np.ndarray:
        """How many floating values are made up to each place."""
        made = [sum(is_float(var.aval) for var in self.jaxpr.eqns[i].outvars) for i in self.eqns]
        return np.cumsum([0, *made])

    @functools.cached_property
    def float_reads(self) -> np.ndarray:
        """The places where floating values are made and read, by where they are read, and which are no scalars."""
        made_at: dict[Any, int] = {}
        rows: list[tuple[int, int, bool]] = []
        for place, i in enumerate(self.eqns):
            eqn = self.jaxpr.eqns[i]
            rows += [(made_at[x], place, x.aval.ndim > 0) for x in {*jaxprs.variables(eqn)} if x in made_at]
            made_at.update((var, place) for var in eqn.outvars if is_float(var.aval))
        return np.asarray(rows, np.int64).reshape(-1, 3).T

    @functools.cached_property
    def param_parts(self) -> np.ndarray:
        """The places where params are used (first row) and the numbers of the parts of them that are (second row)."""
        numbers: dict[Hashable, int] = {}
        pairs: list[tuple[int, int]] = []
        for place in self.users.tolist():
            read = jaxprs.variables(self.jaxpr.eqns[self.eqns[place]])
            used = [self.facts.origins[var] for var in read if self.facts.kind(var) == "param"]
            pairs += [(place, numbers.setdefault(x.part, len(numbers))) for x in used]
        return np.asarray(pairs, np.int64).reshape(-1, 2).T

    def weights(self, start: int, stop: int) -> collections.Counter[int]:
        """Returns how often each equation is there between two places, times how many equations are in it."""
        weights: collections.Counter[int] = collections.Counter()
        for number, size in zip(self.numbers[start:stop].tolist(), self.sizes[start:stop].tolist(), strict=True):
            weights[number] += size
        return weights

    def uses(self, start: int, stop: int) -> np.ndarray:
        """Returns the places between two where params are used."""
        return self.users[np.searchsorted(self.users, start) : np.searchsorted(self.users, stop)]


class _Signatures:
    """What equations compute and on which shapes, as numbers: equal for the equations of equal layers.

    The order of an array's dims is left out, and so is its dtype: the first of some layers may have them otherwise.
    """

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


def _kind(aval: Any) -> Hashable:
    return tuple(sorted(aval.shape)) if hasattr(aval, "shape") else str(aval)


def _num_bytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize if hasattr(aval, "shape") and hasattr(aval, "dtype") else 0

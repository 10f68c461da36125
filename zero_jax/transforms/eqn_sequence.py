"""The equations of a jaxpr that take activations as a sequence: as numbers that are equal for those of equal layers.

Equations on params alone (casts, transposes, slices of stacked params) are not part of it, because a model may have
them anywhere.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from zero_jax.dims import is_float
from zero_jax.program import jaxprs
from zero_jax.transforms.facts import Facts


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepeatedBlock:
    """One of the repeated blocks of a jaxpr, as one equation: the equations of one turn of a Python loop."""

    start: int  # the index of its first equation
    stop: int  # the index after its last equation
    invars: tuple[Any, ...]  # the variables that it takes from before, params among them, in the order of their use
    outvars: tuple[Any, ...]  # the variables that it makes and that are used after it, or that the jaxpr returns
    repeat: int  # which run of blocks it belongs to, counted from 0: an encoder's or a decoder's, say


class EqnSequence:
    """The equations of a jaxpr that are not on params alone, by their place among each other.

    If they are `tied`, blocks may have the params of other blocks, as layers that share their weights do.
    """

    def __init__(self, facts: Facts, *, tied: bool = False):
        self.facts, self.jaxpr, self.last_read, self.tied = facts, facts.jaxpr, facts.last_read, tied
        signatures = _Signatures()
        self.eqns: list[int] = []
        numbers, sizes, users = list[int](), list[int](), list[int]()
        for i, eqn in enumerate(self.jaxpr.eqns):
            if facts.only_params(eqn):
                continue
            if i in facts.uses:
                users.append(len(self.eqns))
            self.eqns.append(i)
            number, size = signatures.of(eqn)
            numbers.append(number)
            sizes.append(size)
        self.numbers = np.asarray(numbers, np.int64)
        self.users = np.asarray(users, np.int64)  # places of what takes params and activations
        self.sizes = np.asarray(sizes, np.int64)  # in equations, those within counted
        # How many bytes are made up to each place, and how many of them cross it
        made, changes = np.zeros(len(self.eqns) + 1), np.zeros(len(self.eqns) + 2)
        inputs = [var for var in self.jaxpr.invars if self.facts.kind(var) == "value"]
        for place, variables in enumerate([inputs, *(self.jaxpr.eqns[i].outvars for i in self.eqns)]):
            for var in variables:
                size = num_bytes(var.aval)
                made[place] += size
                if var in self.last_read:  # it is there from where it is made to behind its last reader
                    changes[place] += size
                    changes[bisect.bisect_left(self.eqns, self.last_read[var]) + 1] -= size
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
        turns = list(itertools.starmap(self.params_of, itertools.pairwise(run)))
        params = {*turns} if self.tied else turns
        (_, reads), is_tied = self.floats, len(params) < len(turns)
        for before, start, stop in zip(run[:-2], run[1:-1], run[2:], strict=True):
            maker, _, is_array = reads[:, slice(*np.searchsorted(reads[1], (start, stop)))]
            taken = (before <= maker) & (maker < start) & (is_array >= is_tied)
            if not taken.any() and (is_tied or self.makes_floats(before, start)):
                return False
        uses = collections.Counter(itertools.chain(*params))
        own = {key for key, count in uses.items() if count == 1}
        return self.makes_floats(*run[-2:]) and not any(map(own.isdisjoint, params))

    def are_most(self, blocks: Sequence[RepeatedBlock]) -> bool:
        """Tells whether blocks are most of the equations, and not what a layer itself repeats, such as its norms."""
        bounds = np.searchsorted(self.eqns, [(block.start, block.stop) for block in blocks] or [(0, 0)])
        return bool(2 * sum(self.sizes[start:stop].sum() for start, stop in bounds) > self.sizes.sum())

    def makes_floats(self, start: int, stop: int) -> bool:
        """Tells whether the equations between two places make floating values."""
        num_made, _ = self.floats
        return bool(num_made[start] < num_made[stop])

    @functools.cached_property
    def floats(self) -> tuple[np.ndarray, np.ndarray]:
        """How many floating values are made up to each place; where they are made and read, and which are no scalars.

        The latter in the order of the places where they are read, a column for each.
        """
        made_at, num_made = dict[Any, int](), [0]
        rows: list[tuple[int, int, bool]] = []
        for place, i in enumerate(self.eqns):
            rows += [(made_at[x], place, x.aval.ndim > 0) for x in {*self.facts.reads[i]} if x in made_at]
            made_at |= {var: place for var in self.jaxpr.eqns[i].outvars if is_float(var.aval)}
            num_made.append(len(made_at))
        return np.asarray(num_made), np.asarray(rows, np.int64).reshape(-1, 3).T

    @functools.cached_property
    def param_parts(self) -> np.ndarray:
        """The places where params are used (first row) and the numbers of the parts of them that are (second row)."""
        numbers: dict[Hashable, int] = {}
        pairs: list[tuple[int, int]] = []
        for place in self.users.tolist():
            read = self.facts.reads[self.eqns[place]]
            used = [self.facts.origins[var] for var in read if self.facts.kind(var) == "param"]
            pairs += [(place, numbers.setdefault(x.part, len(numbers))) for x in used]
        return np.asarray(pairs, np.int64).reshape(-1, 2).T

    def params_of(self, start: int, stop: int) -> frozenset[int]:
        """Returns the numbers of the parts of params that are used between two places."""
        places, numbers = self.param_parts
        return frozenset(numbers[slice(*np.searchsorted(places, (start, stop)))].tolist())

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
        self.as_shaped: dict[Hashable, int] = {}  # the numbers by shapes as they are: of equal layers one is described
        self.inner: dict[int, tuple[Any, int, int]] = {}

    def number(self, key: Hashable) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def of(self, eqn: Any) -> tuple[int, int]:
        """Returns the number of an equation, and how many equations it is with those in it."""
        inner = [self.of_jaxpr(jaxpr) for jaxpr in jaxprs.inner_jaxprs(eqn)]
        shapes = [getattr(var.aval, "shape", var.aval) for var in (*eqn.invars, *eqn.outvars)]  # a token has none
        key = eqn.primitive.name, len(eqn.invars), *shapes, None, *[number for _, number, _ in inner]
        if key not in self.as_shaped:
            kinds = [tuple(sorted(x)) if isinstance(x, tuple) else str(x) for x in shapes]
            self.as_shaped[key] = self.number((*key[:2], *kinds, *key[len(shapes) + 2 :]))
        return self.as_shaped[key], 1 + sum([size for *_, size in inner])

    def of_jaxpr(self, jaxpr: Any) -> tuple[Any, int, int]:
        """Returns the jaxpr (so that its id stays its own), its number, and how many equations it has."""
        if id(jaxpr) not in self.inner:
            each = [self.of(eqn) for eqn in jaxprs.open_jaxpr(jaxpr)[0].eqns]
            number = self.number(tuple(number for number, _ in each))
            self.inner[id(jaxpr)] = jaxpr, number, sum(size for _, size in each)
        return self.inner[id(jaxpr)]


def num_bytes(aval: Any) -> int:
    """Returns the bytes of an array, 0 for what is none."""
    return _num_bytes(aval.shape, aval.dtype) if hasattr(aval, "dtype") else 0


@functools.cache
def _num_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    return math.prod(shape) * dtype.itemsize

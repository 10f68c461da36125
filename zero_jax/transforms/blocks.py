"""The repeated blocks of a Python loop over layers, found in the jaxpr that such a loop leaves behind.

A loop over equal layers uses params of equal shapes in the same order, again and again: tandem repeats in the sequence
of the equations that take params and activations (`EqnSequence`). What is between these may differ a little from layer
to layer: the first layer starts a running sum, say, or has its dims in another order. Equations on params alone (casts,
transposes, slices of stacked params) are not part of the sequence, because a model may have them anywhere.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np

from zero_jax.dims import is_float
from zero_jax.program import jaxprs
from zero_jax.transforms.facts import Facts

# As many repeats are looked at closely, those that cover most.
_MAX_REPEATS = 64
# Of places where equally few bytes pass, as many are compared.
_MAX_TIES = 8
# Neighbours among blocks have this share of their equations in common.
_MIN_OVERLAP = 2 / 3
# Of repeats that cover nearly as much as the best, the one of the smallest blocks is taken.
_NEARLY = 0.6
# Numbers that are rarer than others are left out at as many thresholds.
_MAX_THRESHOLDS = 6
# What is next to blocks is one, too, if it is as much like them and has more than this share of their uses of params.
_MIN_ALIKE = 1 / 2
_MIN_USES = 1 / 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepeatedBlock:
    """One of the repeated blocks of a jaxpr, as one equation: the equations of one turn of a Python loop."""

    start: int  # the index of its first equation
    stop: int  # the index after its last equation
    invars: tuple[Any, ...]  # the variables that it takes from before, params among them, in the order of their use
    outvars: tuple[Any, ...]  # the variables that it makes and that are used after it, or that the jaxpr returns
    repeat: int  # which run of blocks it belongs to, counted from 0: an encoder's or a decoder's, say


def find_blocks(sequence: EqnSequence) -> tuple[RepeatedBlock, ...]:
    """Finds the repeated blocks of a jaxpr that each use params of their own, or share them if the sequence says so.

    Where several ways to cut the equations into blocks cover equally many of them, the fewest bytes of activations go
    from block to block: the blocks of a transformer are cut where only the residual stream passes. They are in order
    and disjoint.
    """
    runs = sorted(_runs(sequence, 0, len(sequence.eqns)))
    return tuple(block for number, run in enumerate(runs) for block in _blocks(sequence, run, number))


def find_left_out(sequence: EqnSequence, blocks: Sequence[RepeatedBlock]) -> tuple[int, ...]:
    """Finds what is like the blocks of a jaxpr, as `find_blocks` returns them, and yet not among them.

    Of each stretch before, between and after the blocks that has more than a third of the uses of params that some
    block has, it is the index of the equation that is the first of these uses.
    """
    bounds = np.searchsorted(sequence.eqns, [(block.start, block.stop) for block in blocks])
    of_blocks = [sequence.uses(*pair) for pair in bounds]
    edges = [0, *bounds.reshape(-1).tolist(), len(sequence.eqns)]
    between = [sequence.uses(*pair) for pair in zip(edges[::2], edges[1::2], strict=True)]
    like = [uses for uses in between if any(_share(sequence, uses, block) > _MIN_USES for block in of_blocks)]
    return tuple(sequence.eqns[uses[0]] for uses in like)


def _share(sequence: EqnSequence, uses: np.ndarray, of_block: np.ndarray) -> float:
    """Returns which share of a block's uses of params some others are like."""
    counts = [collections.Counter(sequence.numbers[places].tolist()) for places in (uses, of_block)]
    return (counts[0] & counts[1]).total() / max(len(of_block), 1)


def _blocks(sequence: EqnSequence, run: Sequence[int], repeat: int) -> Iterator[RepeatedBlock]:
    """Yields the blocks of a run, which is the places where they begin and the place where the last ends."""
    eqns, last = sequence.jaxpr.eqns, sequence.last_read
    bounds = [sequence.begin(start, stop) for start, stop in itertools.pairwise(run)]
    bounds.append(sequence.eqns[run[-1] - 1] + 1)
    for start, stop in itertools.pairwise(bounds):
        inside = eqns[start:stop]
        made = {var for eqn in inside for var in eqn.outvars}
        read = dict.fromkeys(itertools.chain(*sequence.facts.reads[start:stop]))
        yield RepeatedBlock(
            start=start,
            stop=stop,
            invars=tuple(var for var in read if var not in made),
            outvars=tuple(var for eqn in inside for var in eqn.outvars if last.get(var, -1) >= stop),
            repeat=repeat,
        )


def _runs(sequence: EqnSequence, start: int, stop: int) -> Iterator[tuple[int, ...]]:
    """Yields the runs of blocks between two places: the one that covers most, then those on either side of it."""
    pending = [(start, stop)]
    while pending:
        start, stop = pending.pop()
        if run := _best_run(sequence, start, stop):
            # With what is next to it and like its blocks, though not in all
            while longer := _with_another(sequence, run, np.arange(run[0], start - 1, -1)):
                run = longer
            while longer := _with_another(sequence, run, np.arange(run[-1], stop + 1)):
                run = longer
            yield run
            pending += [(start, run[0]), (run[-1], stop)]


def _best_run(sequence: EqnSequence, start: int, stop: int) -> tuple[int, ...]:
    """Returns the run between two places whose blocks cover most and are most alike; the empty one if there is none."""
    users = sequence.uses(start, stop)

    def covered(repeat: tuple[np.ndarray, int]) -> tuple[int, int]:
        first, last = users[repeat[0][[0, -1]]]
        return int(sequence.sizes[first : last + 1].sum()), -repeat[1]

    scores: dict[tuple[int, ...], float] = {}
    equal: tuple[int, ...] = ()  # a run of equal blocks
    for numbers, period in heapq.nlargest(_MAX_REPEATS, tandem_repeats(sequence.numbers[users]), key=covered):
        places = users[numbers]
        is_within = bool(equal) and equal[0] <= places[0] and places[-1] < equal[-1]
        if is_within and len(places) // period < len(equal):
            continue  # it has no more blocks than these: of twice the period, say
        run, alike = _alike(sequence, _cut(sequence, places, period, start, stop))
        if run and sequence.are_blocks(run):
            scores[run] = alike**3 * float(sequence.sizes[run[0] : run[-1]].sum())
            equal = run if alike == 1 and len(run) > len(equal) else equal
    enough = _NEARLY * max(scores.values(), default=0)
    good = [run for run, score in scores.items() if score >= enough]
    best = max(good, key=lambda run: (len(run), scores[run]), default=())
    # Calls of one model are alike, too: its layers are the blocks, if they are more and most of a call.
    are_layers = len(equal) > len(best) and scores[equal] * (len(best) - 1) >= _NEARLY * scores[best]
    return equal if are_layers else best


def _alike(sequence: EqnSequence, run: tuple[int, ...]) -> tuple[tuple[int, ...], float]:
    """Returns the longest part of a run in which neighbours are alike, if any are, and how alike the least are."""
    turns = [sequence.weights(*pair) for pair in itertools.pairwise(run)]
    links = [overlap(*pair) for pair in itertools.pairwise(turns)]
    weak = [-1, *(i for i, link in enumerate(links) if link < _MIN_OVERLAP), len(links)]
    before, after = max(itertools.pairwise(weak), key=lambda pair: pair[1] - pair[0])
    strong = links[before + 1 : after]
    return (run[before + 1 : after + 2], min(strong)) if strong else ((), 0.0)


def _cut(sequence: EqnSequence, users: np.ndarray, period: int, start: int, stop: int) -> tuple[int, ...]:
    """Returns the best cut of a tandem repeat of uses of params into blocks, between two places.

    In the middle it is cut where the fewest bytes pass, and everywhere else where it is most like there.
    """
    # Before each use but the first, the cheapest place to cut since the use before it.
    least = [0, *(sequence.cheapest_cut(*pair) for pair in itertools.pairwise(users.tolist()))]
    phase, lowest = 0, np.inf
    for offset in range(min(period, len(users) - 2 * period + 1)):  # the number of the use that a block begins with
        count = (len(users) - offset) // period
        inner = range(offset + period, offset + count * period, period)
        cuts = np.asarray([least[i] for i in inner])
        # The ends are as far from the first and last use as the cuts next to them are from theirs.
        first = users[offset] - (users[inner[0]] - cuts[0])
        last = users[inner[-1] + period - 1] + (cuts[-1] - users[inner[-1] - 1])
        inside = sequence.made[min(last, stop)] - sequence.made[max(first, start)]
        cost = (count + 1) * sequence.crossing[cuts].mean() - inside  # what passes between blocks, less what they make
        if cost < lowest:
            phase, lowest = offset, cost
    turns = users[phase : phase + (len(users) - phase) // period * period].reshape(-1, period)
    return _cut_alike(sequence, turns, start, stop)


def _cut_alike(sequence: EqnSequence, turns: np.ndarray, start: int, stop: int) -> tuple[int, ...]:
    """Returns the cuts between some turns, and at their ends, that are most like one in the middle."""
    middle = len(turns) // 2
    gaps = [np.arange(*pair) for pair in zip(turns[:-1, -1] + 1, turns[1:, 0] + 1, strict=True)]
    before, after = np.arange(turns[0, 0], start - 1, -1), np.arange(turns[-1, -1] + 1, stop + 1)
    passing = sequence.crossing[gaps[middle - 1]]
    found = []
    for model in gaps[middle - 1][passing == passing.min()][:_MAX_TIES]:
        begin, end = sequence.numbers[model : turns[middle, 0]], sequence.numbers[turns[middle - 1, -1] + 1 : model]
        (first, edits), (last, more) = _most_alike(sequence, begin, before), _most_alike(sequence, end, after)
        found.append((edits + more, int(model), first, last, end))
    _, _, first, last, end = min(found, key=lambda cuts: cuts[:2])
    return first, *(_most_alike(sequence, end, gap)[0] for gap in gaps), last


def _most_alike(sequence: EqnSequence, pattern: np.ndarray, places: np.ndarray) -> tuple[int, int]:
    """Returns that of some adjacent places to which it is most like a pattern from the first of them, and the edits."""
    edits = _edits(sequence, pattern, places)
    best = np.lexsort((sequence.crossing[places[: len(edits)]], edits))[0]
    return int(places[best]), int(edits[best])


def _edits(sequence: EqnSequence, pattern: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Returns how many edits make a pattern of the equations between the first of adjacent places and each near it."""
    places = places[: 2 * len(pattern) + 1]
    if places[0] <= places[-1]:
        return num_edits(pattern, sequence.numbers[places[0] : places[-1]])
    return num_edits(pattern[::-1], sequence.numbers[places[-1] : places[0]][::-1])


def _with_another(sequence: EqnSequence, run: tuple[int, ...], places: np.ndarray) -> tuple[int, ...]:
    """Returns a run with a block more, from the first of some adjacent places to another; the empty run if none is.

    About as many bytes have to pass its other end as pass between blocks.
    """
    start, stop = run[-2:] if places[0] == run[-1] else run[:2]
    edits = _edits(sequence, sequence.numbers[start:stop], places)
    places = places[: len(edits)]
    alike = 1 - edits / (stop - start + np.arange(len(places)))
    passing = sequence.crossing[places] / max(sequence.crossing[list(run[1:-1])].mean(), 1)
    alike[(passing > 1) | (passing < 1 / 2)] = 0
    best = int(np.argmax(alike))
    longer = tuple(sorted({*run, int(places[best])}))
    uses = sequence.uses(*sorted((int(places[0]), int(places[best]))))
    is_alike = alike[best] >= _MIN_ALIKE and _share(sequence, uses, sequence.uses(start, stop)) > _MIN_USES
    return longer if is_alike and sequence.are_blocks(longer) else ()


def tandem_repeats(numbers: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
    """Yields the longest tandem repeats of each period: of the sequence, and of its numbers that occur often.

    A stretch equals itself at the distance `period`. Yielded are the indices of its numbers (those between them are
    left out), and the period, counted in these. What only some of the turns have is rarer than what all have, so
    without it they are equal.
    """
    _, kinds, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    often = counts[kinds.reshape(-1)]
    seen: set[int] = set()
    for threshold in [1, *np.unique(counts[counts > 1])[:_MAX_THRESHOLDS]]:
        places = np.flatnonzero(often >= threshold)
        if len(places) in seen:
            continue
        seen.add(len(places))
        row = numbers[places]
        for period in range(1, len(row) // 2 + 1):
            for each in repeats_of(row, period):
                yield places[each[0] : each[-1] + 1], period


def repeats_of(numbers: np.ndarray, period: int) -> Iterator[range]:
    """Yields the longest stretches of a sequence that equal themselves at a distance, of two turns or more."""
    equal = np.concatenate([[False], numbers[:-period] == numbers[period:], [False]])
    edges = np.flatnonzero(equal[1:] != equal[:-1])
    for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        if last - first >= period:
            yield range(first, last + period)


def num_edits(pattern: np.ndarray, text: np.ndarray) -> np.ndarray:
    """Returns how many insertions and deletions make `pattern` of each beginning of `text`, the empty one first."""
    steps = np.arange(len(text) + 1)
    edits = steps  # of no pattern yet: all of the text is inserted
    for number in pattern:
        matched = np.where(text == number, edits[:-1], len(pattern) + len(text))
        deleted_or_matched = np.append(edits[0] + 1, np.minimum(edits[1:] + 1, matched))
        # An insertion is a step along the text: the least of `x[j] + (i - j)` for all `j <= i`, without a loop.
        edits = np.minimum.accumulate(deleted_or_matched - steps) + steps
    return edits


def overlap(first: collections.Counter[int], second: collections.Counter[int]) -> float:
    """Returns which share of two counts of numbers both have: 1 if they are the same."""
    return 2 * (first & second).total() / max(first.total() + second.total(), 1)


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
            made_at.update((var, place) for var in self.jaxpr.eqns[i].outvars if is_float(var.aval))
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

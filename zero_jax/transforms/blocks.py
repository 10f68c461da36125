"""The repeated blocks of a Python loop over layers, found in the jaxpr that such a loop leaves behind.

A loop over equal layers uses params of equal shapes in the same order, again and again: tandem repeats in the sequence
of the equations that take params and activations (`EqnSequence`). What is between these may differ a little from layer
to layer: the first layer starts a running sum, say, or has its dims in another order.
"""

from __future__ import annotations

import collections
import heapq
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from zero_jax.transforms.eqn_sequence import EqnSequence, RepeatedBlock

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

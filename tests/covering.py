"""Covering arrays: few rows that contain every pair of values of any two factors."""

import itertools
import random

import pytest


def pairs_of(row):
    """Returns the pairs of `(factor, value)` that a row covers."""
    return set(itertools.combinations(sorted(row.items(), key=lambda item: item[0]), 2))


def covering_array(factors, *, seed=0, num_tries=30):
    """Returns rows `{factor: value}` such that every pair of values of every two factors is in at least one of them.

    Greedy, as in AETG (Cohen et al. 1997): of some random rows that start from a pair that is still open, the one that
    covers the most goes in.

    Args:
      factors: for each factor, its values.
      seed: chooses the rows; the same one gives the same rows.
      num_tries: random rows to choose each one from.
    """
    rng = random.Random(seed)
    names = sorted(factors)
    open_pairs = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]}
    rows = []
    while open_pairs:
        first = min(open_pairs, key=str)
        best, most = {}, -1
        for _ in range(num_tries):
            row = dict(first)
            for name in rng.sample(names, len(names)):
                if name not in row:
                    gains = [len(pairs_of(row | {name: value}) & open_pairs) for value in factors[name]]
                    best_gain = max(gains)
                    choices = [v for v, gain in zip(factors[name], gains, strict=True) if gain == best_gain]
                    row[name] = rng.choice(choices)
            num_covered = len(pairs_of(row) & open_pairs)
            if num_covered > most:
                best, most = row, num_covered
        rows.append({name: best[name] for name in factors})
        open_pairs -= pairs_of(best)
    return rows


def quick_by_turns(first, second):
    """Returns all pairs as parameters, slow but for one of each value of `first`, with those of `second` by turns."""
    pairs = itertools.product(enumerate(first), enumerate(second))
    marks = {True: (), False: pytest.mark.slow}
    return [pytest.param(x, y, marks=marks[i % len(second) == j]) for (i, x), (j, y) in pairs]

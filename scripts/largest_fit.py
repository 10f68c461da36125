"""Searches for the largest size that fits in memory with few attempts: memory is nearly linear in the size."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zero_jax.planning.report import PlanReport


@dataclasses.dataclass(frozen=True, kw_only=True)
class LargestFit:
    """The result of a search.

    Attributes:
      largest: the largest size that fits, or None.
      too_large: the smallest size that does not fit, or None.
      is_settled: whether the two are within the tolerance.
      outcomes: the plan of each size, in the order of the attempts.
    """

    largest: int | None
    too_large: int | None
    is_settled: bool
    outcomes: Mapping[int, Any]


def largest_fit(
    attempt: Callable[[int], PlanReport],
    *,
    sizes: Sequence[int],
    first: float,
    capacity_bytes: float,
    tolerance: float = 0.05,
    max_attempts: int = 12,
) -> LargestFit:
    """Searches for the largest size that fits, until a size at most `tolerance` larger, or the next one, does not.

    Args:
      attempt: returns the plan of a size.
      sizes: the candidate sizes, ascending.
      first: the first size to try; rather too large than too small where a refusal is cheap.
      capacity_bytes: available memory.
      tolerance: how much larger, as a fraction, the size that does not fit may be.
      max_attempts: maximum number of attempts.
    """
    outcomes: dict[int, PlanReport] = {}
    size = _at_most(sizes, first)
    while True:
        outcomes[size] = attempt(size)
        largest, too_large = _bounds(outcomes)
        settled = _is_settled(sizes, largest, too_large, tolerance)
        if settled or len(outcomes) == max_attempts:
            return LargestFit(largest=largest, too_large=too_large, is_settled=settled, outcomes=outcomes)
        size = _next(sizes, largest, too_large, _crossing(outcomes, capacity_bytes), tolerance)


def _bounds(outcomes: Mapping[int, PlanReport]) -> tuple[int | None, int | None]:
    """Returns the largest size that fits, and the smallest above it that does not."""
    largest = max((size for size, one in outcomes.items() if one.fits), default=None)
    above = (size for size, one in outcomes.items() if not one.fits and (largest is None or size > largest))
    return largest, min(above, default=None)


def _is_settled(sizes: Sequence[int], largest: int | None, too_large: int | None, tolerance: float) -> bool:
    if largest is None:
        return too_large == sizes[0]
    if too_large is None:
        return largest == sizes[-1]
    return too_large <= largest * (1 + tolerance) or sizes.index(too_large) == sizes.index(largest) + 1


def _next(
    sizes: Sequence[int], largest: int | None, too_large: int | None, crossing: float | None, tolerance: float
) -> int:
    """Returns the next size to try: near the crossing, so that one attempt may settle the search."""
    step = 1 + tolerance
    if largest is None:
        assert too_large is not None
        highest = sizes[bisect.bisect_left(sizes, too_large / step)]  # a size rounded down would not settle the search
        return _below(sizes, too_large, min(highest, crossing if crossing is not None else too_large / 2))
    if too_large is None:
        aim = largest * step if crossing is None or crossing < largest * step**2 else crossing
        return max(_at_most(sizes, aim), sizes[sizes.index(largest) + 1])
    aim = (largest + too_large) / 2 if crossing is None else min(max(crossing, largest * step), too_large / step)
    return max(_below(sizes, too_large, aim), sizes[sizes.index(largest) + 1])


def _crossing(outcomes: Mapping[int, PlanReport], capacity_bytes: float) -> float | None:
    """Returns where a line through the two outcomes nearest to the capacity (or zero) crosses the capacity."""
    known = [(size, one.needed_bytes) for size, one in outcomes.items() if one.needed_bytes]
    nearest = sorted(sorted(known, key=lambda point: abs(point[1] - capacity_bytes))[:2])
    if not nearest:
        return None
    (x0, y0), (x1, y1) = nearest if len(nearest) == 2 else ((0, 0), nearest[0])
    if x1 == x0 or y1 <= y0:
        return None
    return max(x0 + (capacity_bytes - y0) * (x1 - x0) / (y1 - y0), 0)


def _at_most(sizes: Sequence[int], limit: float) -> int:
    """Returns the largest size up to a limit, or the smallest size."""
    return sizes[max(bisect.bisect_right(sizes, limit) - 1, 0)]


def _below(sizes: Sequence[int], bound: int, limit: float) -> int:
    """Returns the largest size up to a limit that is below a bound."""
    return min(_at_most(sizes, limit), sizes[max(bisect.bisect_left(sizes, bound) - 1, 0)])

"""Learning-rate schedules: pure functions of the step, the same in a resumed run."""

from __future__ import annotations

from typing import Literal, get_args

import optax

from zero_jax.core.field_checks import check_value

ScheduleName = Literal["cosine", "wsd", "linear", "constant"]
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)

# Defaults of the learning rate at the last step, as a share of the peak.
_USUAL_FINAL_SHARE = {"cosine": 0.1, "wsd": 0.0, "linear": 0.0}
_USUAL_DECAY_FRACTION = 0.1


def check_schedule(schedule: str, *, final_share: float | None, decay_fraction: float | None) -> None:
    """Raises `ValueError` for options that a schedule does not have, and for invalid shares."""
    for name, value in {"final_learning_rate": final_share, "decay_fraction": decay_fraction}.items():
        if value is not None:
            check_value(name, value, float, is_optional=True)
    if final_share is not None and schedule == "constant":
        raise ValueError(
            f"final_learning_rate={final_share}: the schedule 'constant' does not fall; leave it out, or take another "
            "schedule, such as 'linear'"
        )
    if final_share is not None and not 0 <= final_share <= 1:
        raise ValueError(f"final_learning_rate={final_share}: give a share of the highest, at least 0 and at most 1")
    if decay_fraction is not None and schedule != "wsd":
        raise ValueError(
            f"decay_fraction={decay_fraction} is for the schedule 'wsd'; {schedule!r} has no such phase: leave it out"
        )
    if decay_fraction is not None and not 0 < decay_fraction <= 1:
        raise ValueError(f"decay_fraction={decay_fraction}: give a share of the steps, above 0 and at most 1")


def make_schedule(
    schedule: ScheduleName,
    *,
    peak: float,
    num_steps: int,
    warmup_steps: int = 0,
    final_share: float | None = None,
    decay_fraction: float | None = None,
) -> optax.Schedule:
    """Makes a schedule, which rises linearly to `peak` and then falls by its kind.

    Warmup-stable-decay (Hu et al. 2024, "MiniCPM", section 4) stays at `peak` until the last part of the run, in which
    it falls, here along a line. What comes before does not depend on `num_steps`: a run can go on from there for
    longer.

    Args:
      schedule: `cosine` or `linear` (falls from the warm-up on), `wsd` (falls at the end), or `constant`.
      peak: learning rate after the warm-up.
      num_steps: steps of the run.
      warmup_steps: steps over which the learning rate rises from near 0.
      final_share: learning rate after the last step, as a share of `peak`; None takes 0.1 for `cosine`, else 0.
      decay_fraction: share of the steps in which `wsd` falls; None takes 0.1.

    Returns:
      A function from the number of updates so far to the learning rate of the next one.

    Raises:
      ValueError: phases that are longer than the run, or options that the schedule does not have.
    """
    check_value("peak", peak, float)
    check_value("num_steps", num_steps, int)
    check_value("warmup_steps", warmup_steps, int)
    check_schedule(schedule, final_share=final_share, decay_fraction=decay_fraction)
    if peak <= 0 or warmup_steps < 0 or num_steps < 1:
        raise ValueError(
            f"peak={peak}, warmup_steps={warmup_steps}, num_steps={num_steps}: give a positive learning "
            "rate, and steps that are not negative"
        )
    if warmup_steps >= num_steps:
        raise ValueError(
            f"warmup_steps={warmup_steps} leaves nothing of a run of {num_steps} steps: make it smaller, "
            f"{num_steps // 10} for example, or train for longer"
        )
    share = _USUAL_FINAL_SHARE.get(schedule, 1.0) if final_share is None else final_share
    # A rate of exactly 0 would waste the first step.
    start, end = peak / (warmup_steps + 1), peak * share
    if schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(start, peak, warmup_steps, num_steps, end)
    parts = [optax.linear_schedule(start, peak, warmup_steps)] if warmup_steps else []
    boundaries = [warmup_steps] if warmup_steps else []
    if schedule == "linear":
        parts.append(optax.linear_schedule(peak, end, num_steps - warmup_steps))
    else:
        parts.append(optax.constant_schedule(peak))
    if schedule == "wsd":
        decay_steps = _decay_steps(num_steps, warmup_steps, decay_fraction)
        parts.append(optax.linear_schedule(peak, end, decay_steps))
        boundaries.append(num_steps - decay_steps)
    return optax.join_schedules(parts, boundaries)


def _decay_steps(num_steps: int, warmup_steps: int, fraction: float | None) -> int:
    fraction = _USUAL_DECAY_FRACTION if fraction is None else fraction
    decay_steps = max(1, round(num_steps * fraction))
    if warmup_steps + decay_steps > num_steps:
        raise ValueError(
            f"decay_fraction={fraction} of {num_steps} steps are {decay_steps}, which leaves no room for "
            f"warmup_steps={warmup_steps}: give at most {(num_steps - warmup_steps) / num_steps:.3g}"
        )
    return decay_steps

"""Plans a step that chooses what its blocks keep: what the compiler needs corrects what was estimated to be left."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Sequence

from zero_jax.planning.job import Job
from zero_jax.planning.report import PlanReport, make_report
from zero_jax.training import StepLoss, chosen_values
from zero_jax.transforms import Remat, ValueChoice, resolve_remat

# How often the compiled memory corrects a budget that was not given, and the share of the memory that is left free.
_MORE_COMPILES, _LEAST_ROOM = 2, 0.03
# The share of what is left over that a further value may take: the compiler needs some of it to place the value.
_USED_SLACK = 0.8


def report_on(
    job: Job,
    *,
    name: str,
    cache: pathlib.Path | None = None,
    on_phase: Callable[[str], None] = lambda phase: None,
    quick: bool = False,
    known: Sequence[Remat] = (),
) -> PlanReport | None:
    """Compiles a job in this process and reads the program, as `make_report` does.

    What its blocks keep by a budget (`remat="auto"`) is chosen first; None is returned for a choice that is `known`.
    """
    remat = resolve_remat(job.config.remat)
    if remat.policy != "auto":
        return make_report(job, name=name, cache=cache, on_phase=on_phase, quick=quick)
    on_phase("choosing what blocks keep")
    choice = _choice(job, remat)
    if choice.remat in known:
        return None
    report = make_report(_with_remat(job, choice.remat), name=name, cache=cache, on_phase=on_phase, quick=quick)
    return dataclasses.replace(report, values=choice, remat=str(resolve_remat(choice.policy_name)))


def corrected(
    job: Job, report_of: Callable[[Job, Sequence[Remat]], PlanReport | None], *, fills: bool = True
) -> PlanReport:
    """Returns the report on a job, with the budget of its blocks corrected by what the compiler needs.

    `report_of` is called for a job and what was chosen before, as `report_on` is. Where blocks keep what a budget
    chooses, and that is not given, it is called up to three times, with the budget that the program before has left;
    the fastest that fits is returned. Unless `fills`, the first that fits is.
    """
    remat, reports = resolve_remat(job.config.remat), list[PlanReport]()
    is_open = remat.policy == "auto" and remat.budget_gb is None
    for _ in range(1 + _MORE_COMPILES if is_open else 1):
        report = report_of(job, tuple(x.values.remat for x in reports if x.values))
        if report is None:
            break
        reports.append(report)
        if report.values is None or (report.fits and not fills):
            break
        slack = _slack(report, report.values)
        budget_bytes = report.values.kept_bytes + slack
        if not slack or budget_bytes < 0:
            break
        policy = resolve_remat(report.values.policy_name)
        job = _with_remat(job, dataclasses.replace(policy, budget_gb=int(budget_bytes / 1e6) / 1e3))
    seconds = lambda report: report.time.step_seconds if report.time else math.inf  # noqa: E731
    return min(reports, key=lambda report: (not report.fits, seconds(report)))


def _with_remat(job: Job, remat: Remat) -> Job:
    return dataclasses.replace(job, config=dataclasses.replace(job.config, remat=remat))


def _choice(job: Job, remat: Remat) -> ValueChoice:
    mesh, config = job.mesh(), _with_remat(job, remat).config
    state = job.state(mesh)
    choice = chosen_values(StepLoss.of(job.loss_fn, state.variables, mesh=mesh, config=config), state, job.batch)
    assert choice is not None
    return choice


def _slack(report: PlanReport, choice: ValueChoice) -> float:
    """Returns the bytes by which the budget of a compiled program may be larger, below 0 if it has to be smaller."""
    limit = (1 - _LEAST_ROOM) * report.usable_bytes
    needed = 1.1 * limit if report.needed_bytes is None else report.needed_bytes
    slack = limit - needed
    waiting = (row.num_bytes for row in choice.rows if not row.place)
    return slack if slack < 0 or any(size <= _USED_SLACK * slack for size in waiting) else 0.0

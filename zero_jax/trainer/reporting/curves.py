"""Reads the curves of runs from their `metrics.jsonl`, and plots them over one another."""

from __future__ import annotations

import dataclasses
import difflib
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from zero_jax.analysis import figures
from zero_jax.core.close_match import did_you_mean
from zero_jax.core.extras import extra
from zero_jax.core.files.json_lines import read_records
from zero_jax.core.signatures import check_is
from zero_jax.core.text_tables import printable

RECORDS = "metrics.jsonl"
X_LABELS = {"step": "step", "tokens": "tokens", "seconds": "seconds spent in training steps"}

# Okabe and Ito's colour-blind-safe palette, and further colours for many runs.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8B4513", "#7F7F7F", "#6A3D9A")
_VALIDATION_STYLE = {"linewidth": 1, "linestyle": "--", "marker": "o", "markersize": 3.5}
_LABELS = {"loss": "loss (nats per token)", "grad_norm": "gradient norm", "mfu": "model FLOPs utilization"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecords:
    """The records of a run, each kind in the order of its steps.

    Attributes:
      name: name of the run.
      train: records of kind `train`, one a step.
      validation: records of kind `validation`.
      is_text: whether the losses are of text, in nats per token.
    """

    name: str
    train: tuple[dict[str, Any], ...]
    validation: tuple[dict[str, Any], ...]
    is_text: bool = True

    def curve(self, metric: str, *, x: str = "step") -> Curve:
        """Returns the curve of a metric of the records, such as `loss`, against `step`, `tokens` or `seconds`.

        Raises:
          ValueError: no such metric in the records.
        """
        if x not in X_LABELS:
            raise ValueError(f"x={x!r}: {did_you_mean(x, X_LABELS, cutoff=0)}Choose one of {', '.join(X_LABELS)}")
        if not any(metric in record for record in (*self.train, *self.validation)):
            records = [*self.train, *self.validation]
            names = {printable(name) for record in records for name in record if _is_number(record[name])} - {"step"}
            hint = did_you_mean(metric, names)
            raise ValueError(
                f"the records of {self.name} have no {metric!r}: {hint}There are {', '.join(sorted(names))}"
            )
        steps = np.array([record["step"] for record in self.train], float)
        xs = self._along(x, steps)
        evaluations = [record for record in self.validation if _is_number(record.get(metric))]
        evaluation_steps = np.array([record["step"] for record in evaluations], float)
        return Curve(
            name=self.name,
            x=xs,
            y=values_of(self.train, metric),
            # Records of validations have a step, but neither tokens nor seconds; one may be before the first step.
            validation_x=np.interp(evaluation_steps, [0, *steps], [0, *xs]) if len(steps) else evaluation_steps,
            validation_y=values_of(evaluations, metric),
        )

    def _along(self, x: str, steps: np.ndarray) -> np.ndarray:
        if x == "step":
            return steps
        name = {"tokens": "tokens", "seconds": "step_seconds"}[x]
        values = values_of(self.train, name)
        if np.isnan(values).all():
            raise ValueError(f"the records of {self.name} have no {name}: draw them against the step")
        # The first step of a process, which compiles, has no seconds.
        return np.cumsum(np.nan_to_num(values)) if x == "seconds" else values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """A metric of a run, at each training step (`x`, `y`) and at each evaluation; NaN where a step has none."""

    name: str
    x: np.ndarray
    y: np.ndarray
    validation_x: np.ndarray
    validation_y: np.ndarray


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def values_of(records: Sequence[dict[str, Any]], name: str) -> np.ndarray:
    """Returns a metric of each record, NaN for those without that number."""
    values = [record.get(name) for record in records]
    return np.array([value if _is_number(value) else np.nan for value in values], float)


def read_run(path: str | pathlib.Path) -> RunRecords:
    """Reads the records of a run: the last record of each step, without incomplete lines.

    Args:
      path: folder of the run, or its `metrics.jsonl`.

    Raises:
      ValueError: no such run, or one that has no records.

    Example:
      >>> config = zero.TrainConfig(steps=2, out=folder, name="a", log_every=1)
      >>> _ = zero.Trainer(loss_fn, init_fn, lambda step: batch, config=config, tx=tx).train(log=str)
      >>> zero.trainer.read_run(folder / "a").name
      'a'
    """
    path = pathlib.Path(path)
    file = path / RECORDS if path.is_dir() else path
    if not file.is_file():
        raise ValueError(_no_run(path))
    kinds: dict[str, dict[int, dict[str, Any]]] = {"train": {}, "validation": {}}
    for record in read_records(file):
        kinds.setdefault(str(record.get("kind", "train")), {})[record["step"]] = record  # any JSON may be in the file
    train, validation = (tuple(kinds[kind][step] for step in sorted(kinds[kind])) for kind in ("train", "validation"))
    if not train and not validation:
        raise ValueError(f"{file} has no records: the run has not taken a step yet, or this is no run")
    is_text = not any("examples" in record for record in train)
    return RunRecords(name=printable(file.resolve().parent.name), train=train, validation=validation, is_text=is_text)


def _no_run(path: pathlib.Path) -> str:
    problem = f"{path} is no run: it has no {RECORDS}" if path.is_dir() else f"there is no run {path}"
    folders = [path, path.parent, pathlib.Path("runs")]
    runs = [file.parent for folder in folders if folder.is_dir() for file in sorted(folder.glob(f"*/{RECORDS}"))]
    by_name = {run.name: str(run) for run in reversed(runs)}  # of one name, the one of the first place
    nearest = [by_name[name] for name in difflib.get_close_matches(path.name, by_name, n=3, cutoff=0)]
    return f"{problem}; the nearest are {', '.join(nearest)}" if nearest else f"{problem}, and there is none beside it"


def plot_runs(
    path: str | pathlib.Path, runs: Sequence[RunRecords], *, metric: str = "loss", x: str = "step", title: str = ""
) -> None:
    """Plots a metric of several runs: each step pale, the smoothed curve, and evaluations.

    Args:
      path: the file, `.png`, `.svg` or `.pdf`.
      runs: the runs.
      metric: name of the metric.
      x: the x-axis: `step`, `tokens` or `seconds`.
      title: title of the figure.

    Raises:
      ValueError: no runs, another suffix, no such folder, or a metric that a run does not have.
    """
    runs = list(runs)  # a generator would be drawn as no runs: it is read several times
    if not runs:
        raise ValueError("plot_runs: there are no runs to draw")
    for i, run in enumerate(runs):
        check_is(f"runs[{i}]", run, RunRecords, remedy="give what zero.trainer.read_run returns")
    curves = [run.curve(metric, x=x) for run in runs]
    figure = figures.new_figure(path, width=8, height=4.8)
    axes = figure.add_subplot()
    for i, curve in enumerate(curves):
        color = _COLORS[i % len(_COLORS)]
        axes.plot(curve.x, curve.y, color=color, linewidth=0.6, alpha=0.25)
        mean = smoothed(curve.y, max(1, len(curve.y) // 40))
        marker = "." if np.isfinite(mean).sum() == 1 else None  # a line through one point is invisible
        axes.plot(curve.x, mean, color=color, linewidth=1.5, label=_label(curve), marker=marker)
        axes.plot(curve.validation_x, curve.validation_y, color=color, **_VALIDATION_STYLE)
    if x == "tokens":
        with extra("plot"):
            from matplotlib.ticker import EngFormatter

        axes.xaxis.set_major_formatter(EngFormatter())
    if x == "step":
        axes.xaxis.get_major_locator().set_params(integer=True)
    label = _LABELS.get(metric, metric.replace("_", " "))
    if metric == "loss" and not all(run.is_text for run in runs):
        label = "loss"
    axes.set_xlabel(X_LABELS[x])
    axes.set_ylabel(label, parse_math=False)
    axes.set_title(title, parse_math=False)
    figures.tidy(axes)
    handles = axes.get_legend_handles_labels()[0] + _styles(curves)
    # Below the curves, so that long names and many runs do not cover them.
    style = {"ncols": min(3, len(handles)), "frameon": False, "fontsize": 8}
    for text in figure.legend(handles=handles, loc="outside lower center", **style).get_texts():
        text.set_parse_math(False)  # a name with dollars is no formula
    figures.save_figure(figure, path)


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """Returns the moving average over `window` values, or as many as there are at the end.

    At the start it takes as many before as after: the mean of a loss that falls fast would begin far below it.
    Values that are not finite are left out of the means, and are NaN in the result.
    """
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    middle = np.arange(len(values))
    starts = np.maximum(middle - window // 2, 0)
    ends = np.minimum(middle + np.minimum(middle - starts + 1, window - window // 2), len(values))
    means = (sums[ends] - sums[starts]) / np.maximum(counts[ends] - counts[starts], 1)
    return np.where(finite, means, np.nan)


def _label(curve: Curve) -> str:
    last = curve.validation_y if len(curve.validation_y) else curve.y[np.isfinite(curve.y)]
    return f"{curve.name}: {last[-1]:.4g} at the end" if len(last) else curve.name


def _styles(curves: Sequence[Curve]) -> list[Any]:
    """Returns the legend entries of the line styles, where there is more than one."""
    from matplotlib.lines import Line2D

    styles = [Line2D([], [], color="#666666", linewidth=1.5, label="training, smoothed")]
    if any(len(curve.validation_y) for curve in curves):
        styles.append(Line2D([], [], color="#666666", label="validation", **_VALIDATION_STYLE))
    return styles if len(styles) > 1 else []

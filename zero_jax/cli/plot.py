"""The command `zero-jax plot`: the curves of several runs in a figure."""

import argparse
import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from zero_jax.cli.options import one_line_errors, reader
from zero_jax.trainer import X_LABELS, RunRecords, plot_runs, read_run


def add_commands(commands: Any) -> None:
    """Adds the command to a parser's subparsers."""
    parser = commands.add_parser(
        "plot",
        usage="zero-jax plot RUN ... [OPTION ...]",
        help="draw runs over one another",
        description="Draws a figure of one or several runs, finished or not, from the metrics.jsonl in their folders: "
        "each training step pale, the mean over some steps, and evaluations as dots.",
    )
    parser.add_argument("runs", type=reader(str, place="local"), nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--out",
        type=reader(str, place="local"),
        default="curves.png",
        metavar="FILE",
        help="the picture: .png, .svg or .pdf (default: curves.png)",
    )
    parser.add_argument(
        "--metric",
        type=reader(str),
        default="loss",
        metavar="NAME",
        help="name of a figure in the records, such as grad_norm, learning_rate or mfu (default: loss)",
    )
    parser.add_argument("--x", choices=tuple(X_LABELS), default="step", help="what it is drawn against (default: step)")
    parser.add_argument("--title", type=reader(str), default="", metavar="TEXT", help="what stands above the picture")
    parser.set_defaults(run=_plot, parser=parser)


def _named_apart(paths: Sequence[str], runs: Sequence[RunRecords]) -> list[RunRecords]:
    """Returns the runs, those with the same name under their paths."""
    counts = collections.Counter(run.name for run in runs)
    pairs = zip(paths, runs, strict=True)
    return [dataclasses.replace(run, name=path) if counts[run.name] > 1 else run for path, run in pairs]


@one_line_errors
def _plot(options: argparse.Namespace) -> int:
    try:
        runs = _named_apart(options.runs, [read_run(run) for run in options.runs])
        plot_runs(options.out, runs, metric=options.metric, x=options.x, title=options.title)
    except OSError as error:
        raise ValueError(f"cannot draw {options.out!r} ({error.strerror})") from error
    print(f"drew {options.out}")
    return 0

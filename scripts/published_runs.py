"""Estimates published training runs: the nearest program that zero_jax makes, its time beside the measured one.

    python scripts/published_runs.py                          # before compiling: the best setting by estimate
    python scripts/published_runs.py --quick v6e v5p tpu7x    # and compiles runs on TPUs, without their code
    python scripts/published_runs.py --compile v6e-16 7b      # and to the end

`published_runs.json` has the runs with their sources. Each answer is kept in the results file by its command and the
JAX release, so that the script goes on where it was stopped; `--again` asks for all anew. It prints the tables of
docs/published.md. `--quick` and `--compile` take parts of the names of runs. Runs on GPUs take the package with the
extra `gpu-compiler`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from zero_jax.core.files.user_cache import cache_folder

RUNS = pathlib.Path(__file__).with_name("published_runs.json")
# What `--auto` answers a setting with, what it is without an option, and the option that asks for it.
OPTIONS = {
    "replica": (1, "--replica"),
    "model": (1, "--model-axis"),
    "pipe": (1, "--pipe"),
    "num_microbatches": (1, "--num-microbatches"),
    "attention": ("own", "--attention"),
    "remat": (None, "--remat"),
    "offload": (None, "--offload"),
}
SWITCHES = {
    "secondary": (True, "--secondary"),
    "keep_gathered": (True, "--keep-gathered"),
    "overlap": (False, "--no-overlap"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A measured run, and the nearest program.

    Attributes:
      name: chips, and the model.
      topology: the hardware.
      arguments: model, batch and sequence, as options of `zero-jax plan`.
      seconds: of a measured step.
      settings: how it was sharded, and what it kept.
      source: where it was published.
      note: what the seconds follow from, and what the program lacks.
      replica: copies of the state.
      model_axis: devices of tensor parallelism.
    """

    name: str
    topology: str
    arguments: str
    seconds: float
    settings: str
    source: str
    note: str = ""
    replica: int = 1
    model_axis: int = 1

    @property
    def plan(self) -> str:
        """The command, without the options that a search chooses."""
        return f"plan --topology {self.topology} {self.arguments} --stage 3"

    def search(self, *, quick: bool = False) -> str:
        """Returns the command that estimates every setting, and compiles none, or a few without their code."""
        compiles = "--max-compiles 2 --quick" if quick else "--max-compiles 0"
        return f"{self.plan} --replica {self.replica} --model-axis {self.model_axis} --auto {compiles}"

    def chosen(self, setting: dict[str, Any]) -> str:
        """Returns the command that compiles a setting."""
        return " ".join([self.plan, *options_of(setting)])


def options_of(setting: Mapping[str, Any]) -> list[str]:
    """Returns the options of `zero-jax plan` for a setting that `--auto` answers with."""
    asked = {name: setting.get(name, plain) for name, (plain, _) in OPTIONS.items()}
    options = [f"{option} {asked[name]}" for name, (plain, option) in OPTIONS.items() if asked[name] != plain]
    options += [option for name, (at, option) in SWITCHES.items() if setting.get(name) is at]
    # Of another loss: `loss_chunk=8192 sequence_parallel`.
    return options + ["--" + x.replace("_", "-").replace("=", " ") for x in setting.get("loss", "").split()]


class Results:
    """Answers of `zero-jax` by command, kept in a file after each."""

    def __init__(self, path: pathlib.Path, *, again: bool):
        self.path = path
        self.known = json.loads(path.read_text()) if path.exists() and not again else {}

    def key(self, command: str) -> str:
        """Returns what an answer is kept by."""
        return f"{jax.__version__}: {command}"

    def of(self, command: str, *, ask: bool = True) -> dict[str, Any] | None:
        """Returns what a command answers; None if it is not known and not asked.

        Raises:
          RuntimeError: the command failed, with its last words.
        """
        key = self.key(command)
        if key not in self.known and ask:
            print(f"zero-jax {command}", file=sys.stderr, flush=True)
            done = subprocess.run(
                [sys.executable, "-m", "zero_jax", *shlex.split(command), "--json"], capture_output=True, text=True
            )
            answer = _answer(done.stdout)
            if answer is None:
                words = " ".join(f"{done.stderr}\n{done.stdout}".split())[-500:]
                raise RuntimeError(f"zero-jax {command}\nended with status {done.returncode}: ... {words}")
            self.known[key] = answer
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.known, indent=1))
        return self.known.get(key)


def _answer(text: str) -> dict[str, Any] | None:
    """Returns what the table needs of an answer: the best setting of a search, or the time of a program."""
    try:
        read = json.loads(text)
    except ValueError:
        return None
    if "ranking" not in read:
        time = read["time"] or {}
        figures = ("step_seconds", "exposed_seconds", "collective_seconds", "mfu", "mfu_causal")
        return {"fits": read["fits"], **{name: time.get(name) for name in figures}}
    ranked = read["ranking"]["ranked"]
    if not ranked:
        return {"setting": None, "seconds": None, "quick_seconds": None}
    best, outcome = ranked[0], ranked[0]["outcome"] or {}
    seconds = {"seconds": best["estimated"]["seconds"], "quick_seconds": outcome.get("seconds")}
    return {"setting": best["setting"], **seconds}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What is known of a run: seconds before compiling and compiled, or why there are none, and the command.

    Compiled seconds are of the whole program, or `is_quick`: of one without code.
    """

    run: Run
    setting: str
    estimated: float | None = None
    compiled: float | None = None
    is_quick: bool = False
    why: str = ""
    command: str = ""

    @classmethod
    def of(cls, run: Run, results: Results, *, compiles: bool, quick: bool = False) -> Row:
        """Asks for the figures of a run that are not known yet; compiles only if told to."""
        quickly = results.of(run.search(quick=True), ask=quick)
        before = quickly or results.of(run.search())
        assert before is not None
        if before["setting"] is None:
            return cls(run=run, setting="nothing fits by estimate", command=run.search())
        command, known = run.chosen(before["setting"]), {"run": run, "estimated": before["seconds"]}
        known |= {"setting": _named(before["setting"]), "command": command}
        compiled = results.of(command, ask=compiles)
        if compiled is None and before["quick_seconds"]:
            return cls(**known, compiled=before["quick_seconds"], is_quick=True)
        if compiled is None or compiled["step_seconds"] is None:
            return cls(**known, why="not compiled" if compiled is None else "does not fit")
        return cls(**known, compiled=compiled["step_seconds"])

    @property
    def figures(self) -> tuple[str, ...]:
        """The cells of the first table."""
        measured = self.run.seconds
        pairs = [
            cell
            for seconds, otherwise in ((self.estimated, ""), (self.compiled, self.why))
            for cell in ((f"{seconds:.4g}", f"{seconds / measured:.2f}") if seconds else (otherwise, ""))
        ]
        pairs[2] += " (quick)" if self.is_quick else ""
        return self.run.name, self.run.settings, f"{measured:.4g}", self.setting, *pairs

    @property
    def origin(self) -> tuple[str, ...]:
        """The cells of the second table."""
        return self.run.name, "; ".join(filter(None, (self.run.source, self.run.note))), f"`zero-jax {self.command}`"


def _named(setting: dict[str, Any]) -> str:
    """Returns a setting in a few words."""
    parts = [setting["remat"]]
    parts += [f"{setting['num_microbatches']} microbatches"] if setting["num_microbatches"] > 1 else []
    parts += [f"offload {setting['offload']}"] if setting["offload"] else []
    parts += [setting["loss"]] if setting.get("loss") else []
    return ", ".join([*parts, *(option for name, (at, option) in SWITCHES.items() if setting.get(name) is at)])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table of Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables; returns 1 if a command failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", nargs="*", default=[], metavar="TEXT", help="compile runs without their code")
    parser.add_argument("--compile", nargs="*", default=[], metavar="TEXT", help="compile runs whose names have it")
    parser.add_argument("--only", nargs="*", default=[""], metavar="TEXT", help="only runs whose names have it")
    parser.add_argument("--results", type=pathlib.Path, default=cache_folder("published") / "results.json")
    parser.add_argument("--again", action="store_true", help="ask for all anew")
    options = parser.parse_args(arguments)
    runs = [Run(**run) for run in json.loads(RUNS.read_text(encoding="utf-8"))["runs"]]
    results = Results(options.results, again=options.again)
    rows, has_failed = [], False
    for run in runs:
        if not any(text in run.name for text in options.only):
            continue
        try:
            quick, compiles = (any(x in run.name for x in texts) for texts in (options.quick, options.compile))
            rows.append(Row.of(run, results, compiles=compiles, quick=quick))
        except RuntimeError as error:
            print(error, file=sys.stderr)
            has_failed = True
            rows.append(Row(run=run, setting="failed", command=run.search()))
    head = "run", "as measured", "measured s", "remat of zero_jax", "before compiling s", "ratio", "compiled s", "ratio"
    print(table(head, [row.figures for row in rows]), end="\n\n")
    print(table(("run", "source", "command"), [row.origin for row in rows]))
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())

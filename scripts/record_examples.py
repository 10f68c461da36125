"""Runs the examples and records what they print and the losses of their steps, for the pages of the site.

    python scripts/record_examples.py [NAME ...] [--out docs/recorded]

Each runs on 8 simulated devices in a process and a folder of its own. `tests/test_examples.py` compares what an example
prints with its record, numbers apart.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys
import sysconfig
import tempfile
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent


class RecordedStep:
    """A train step that notes the loss of each call."""

    def __init__(self, step: Any, losses: list[Any]):
        self.step, self.losses = step, losses

    def __call__(self, *args: Any) -> Any:
        """Takes a step."""
        state, metrics = self.step(*args)
        self.losses.append(metrics.loss)
        return state, metrics

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)


def losses_of(
    names: dict[str, Any], printed: str, steps: list[list[Any]], folder: pathlib.Path
) -> list[list[list[float]]]:
    """Returns curves of `[step, loss]`: of train steps and the trainer, else of what a loop kept or printed."""
    curves = [[[i, float(loss)] for i, loss in enumerate(losses)] for losses in steps if losses]
    for path in sorted(folder.glob("runs/*/metrics.jsonl")):
        records = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        curves.append([[record["step"], record["loss"]] for record in records if record["kind"] == "train"])
    if not curves and "losses" in names:
        curves = [[[i, float(loss)] for i, loss in enumerate(names["losses"])]]
    elif not curves:
        curves = [[[int(i), float(loss)] for i, loss in re.findall(r"step +(\d+) +loss (\S+)", printed)]]
    return [[[step, float(f"{loss:.4g}")] for step, loss in curve] for curve in curves if curve]


def record(name: str) -> dict[str, Any]:
    """Runs an example in this process and the working directory."""
    import zero_jax as zero

    steps: list[list[Any]] = []
    make_train_step = zero.make_train_step

    def make(*args: Any, **options: Any) -> RecordedStep:
        steps.append([])
        return RecordedStep(make_train_step(*args, **options), steps[-1])

    zero.make_train_step = make
    sys.argv = [name]
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        names = runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    printed = stream.getvalue()
    # Paths of this machine.
    printed = printed.replace(str(pathlib.Path(sysconfig.get_path("stdlib")).parent.parent) + "/", "")
    printed = re.sub(rf"{re.escape(tempfile.gettempdir())}/\w+/", "", printed)
    return {"printed": printed.splitlines(), "losses": losses_of(names, printed, steps, pathlib.Path())}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="files of examples/ (default: all)")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs" / "recorded")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        found = record(*options.names)
        lines = [f'"{key}": [\n' + ",\n".join(map(json.dumps, found[key])) + "\n]" for key in found]
        path = options.out / f"{pathlib.Path(options.names[0]).stem}.json"
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        return
    options.out.mkdir(exist_ok=True)
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": str(ROOT)}
    for name in options.names or sorted(path.name for path in (ROOT / "examples").glob("*.py")):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, name, "--here", "--out", str(options.out.resolve())]
            subprocess.run(command, env=env, cwd=folder, check=True)
        print(f"{name} -> {options.out}")


if __name__ == "__main__":
    main()

"""Writes a page for each file of `examples/`: what it is, its code, what it printed and the losses of its steps.

What was printed is from `docs/recorded/`, which `scripts/record_examples.py` writes.
"""

import ast
import json
import pathlib
import re

from zero_jax.analysis.figures import new_figure, save_figure, tidy

ROOT = pathlib.Path(__file__).parent.parent
COLORS = ("#0072B2", "#E69F00", "#009E73")


def parts_of(path: pathlib.Path) -> tuple[str, str, str]:
    """Returns the title of an example, the first line of its docstring, and the commands that run it."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = docstring.partition("\n")[0]
    title = re.split(r"[:;] |, (?=with |made |which )| [(]", first.rstrip("."))[0]
    commands = re.findall(r"pip install [\w-]+|JAX_NUM_CPU_DEVICES=8 python \S+", docstring)
    return title, first, "\n".join(sorted(commands, reverse=True))


def draw(curves: list[list[list[float]]], path: pathlib.Path) -> None:
    """Draws the losses of an example as an SVG."""
    figure = new_figure(path, width=6, height=2.6)
    panel = figure.add_subplot()
    for i, curve in enumerate(curves):
        steps, losses = zip(*curve, strict=True)
        marker = "o" if len(curve) < 8 else None
        panel.plot(steps, losses, color=COLORS[i % 3], marker=marker, label=f"step function {i + 1}")
    panel.set_xlabel("step")
    panel.set_ylabel("loss")
    if len(curves) > 1:
        panel.legend(frameon=False)
    tidy(panel)
    save_figure(figure, path)


def page(path: pathlib.Path, folder: pathlib.Path) -> str:
    """Returns the page of an example; draws its picture into the folder of the pages."""
    title, first, commands = parts_of(path)
    lines = [f"# {title}", "", *([] if first.rstrip(".") == title else [first, ""]), "```", commands, "```", ""]
    record = folder.parent / "recorded" / f"{path.stem}.json"
    recorded = json.loads(record.read_text(encoding="utf-8"))
    draw(recorded["losses"], folder / f"{path.stem}.svg")
    lines += [f"![The losses of the steps]({path.stem}.svg)", ""]
    lines += [f"`examples/{path.name}`:", "", "```python", path.read_text(encoding="utf-8").rstrip("\n"), "```", ""]
    lines += ["It prints, on 8 simulated devices:", "", "```", *recorded["printed"], "```", ""]
    return "\n".join(lines)


def index(paths: list[pathlib.Path]) -> str:
    """Returns the page that lists the examples."""
    rows = [f"| [{parts_of(path)[0]}]({path.stem}.md) | `examples/{path.name}` |" for path in paths]
    lines = ["# Examples", "", "Each is one file of at most 80 lines that runs anywhere, and a test runs it.", ""]
    lines += ["| example | file |", "| --- | --- |", *rows, ""]
    return "\n".join([*lines, "```{toctree}", ":hidden:", "", *(path.stem for path in paths), "```", ""])


def pages(folder: pathlib.Path) -> dict[str, str]:
    """Returns the text of each page by its name; their pictures are drawn into the folder of the pages."""
    folder.mkdir(exist_ok=True)
    paths = sorted((ROOT / "examples").glob("*.py"))
    return {path.stem: page(path, folder) for path in paths} | {"index": index(paths)}

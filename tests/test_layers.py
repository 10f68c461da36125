"""Imports go down the table of docs/architecture.md."""

import ast
import pathlib
import re

import zero_jax

PACKAGE = pathlib.Path(zero_jax.__file__).parent
TABLE = PACKAGE.parent / "docs" / "architecture.md"


def layers():
    """Returns the layer of each module, as the table has it."""
    rows = re.findall(r"^\| (\d+) \| ([^|]*) \|", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: int(layer) for layer, names in rows for name in re.findall(r"`(\w+)\.py`", names)}


def imported(path):
    """Returns the modules of zero_jax that a file imports, anywhere in it, as paths below the package."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports {node.module} by a relative path: write the whole one"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in found if name.startswith("zero_jax.")}


def modules():
    return {path.stem: path for path in PACKAGE.glob("*.py") if path.stem != "__init__"}


def test_every_module_has_a_layer():
    assert set(layers()) == set(modules())


def test_imports_go_down():
    table = layers()
    for name, path in modules().items():
        for other in imported(path) - {"models"}:
            assert table[other] < table[name], f"{name} (layer {table[name]}) imports {other} (layer {table[other]})"


def test_models_are_on_their_own():
    for path in PACKAGE.glob("models/*.py"):
        assert imported(path) <= {"models"}, f"{path} imports more of zero_jax than a user's model could"


def test_only_the_command_line_imports_models():
    importers = {name for name, path in modules().items() if "models" in imported(path)}
    assert all(name.split("_")[0] == "cli" for name in importers), importers


def test_no_module_is_a_drawer_of_odds_and_ends():
    assert not {"utils", "util", "common", "helpers", "config", "engine", "misc"} & set(modules())

"""Packages import those above them in the table of docs/architecture.md, by their interfaces, without cycles."""

import ast
import functools
import graphlib
import pathlib
import re

import zero_jax

PACKAGE = pathlib.Path(zero_jax.__file__).parent
TABLE = PACKAGE.parent / "docs" / "architecture.md"
# The root: `__main__.py` runs the command line, `__init__.py` imports the public names of its stub when they are used.
ROOT_FILES = {"__init__.py", "__init__.pyi", "__main__.py", "py.typed"}
# Other packages import from the modules of these.
OPEN_PACKAGES = {"core", "program", "sharding", "models"}
MAX_ENTRIES = 16


@functools.cache
def packages():
    """Returns the packages as the table has them, from the top."""
    return re.findall(r"^\| `(\w+)/` \|", TABLE.read_text(encoding="utf-8"), re.MULTILINE)


@functools.cache
def files():
    """Returns the files below the root by dotted name."""
    paths = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE]
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in paths}


@functools.cache
def nodes(path):
    """Returns the imports and the classes of a file, anywhere in it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom, ast.ClassDef))]


@functools.cache
def imports(path):
    """Returns (module, names) for the imports of zero_jax in a file, anywhere in it."""
    found = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [(alias.name.partition(".")[2], []) for alias in node.names if alias.name.startswith("zero_jax.")]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports {node.module} by a relative path: write the whole one"
            if node.module == "zero_jax":
                found += [(alias.name, []) for alias in node.names]
            elif node.module and node.module.startswith("zero_jax."):
                found.append((node.module.partition(".")[2], [alias.name for alias in node.names]))
    return found


def test_the_table_has_every_package():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == {*packages()} and len(packages()) == len(folders)
    assert {path.name for path in PACKAGE.iterdir() if path.is_file()} == ROOT_FILES


def test_packages_import_those_above_them():
    rank = {name: place for place, name in enumerate(packages())}
    for name, path in files().items():
        own = name.split(".")[0]
        for module, _ in imports(path):
            other = module.split(".")[0]
            allowed = (rank[other] <= rank[own] and other != "models") or own in ("cli", other)
            allowed = allowed or (own, other) == ("pretrained", "models")
            assert allowed, f"zero_jax/{own}/ imports {module}, which is below it: {path}"


def test_other_packages_are_imported_by_their_interface():
    for name, path in files().items():
        own = name.split(".")[0]
        for module, _ in imports(path):
            other, _, inside = module.partition(".")
            assert other in {own} | OPEN_PACKAGES or not inside, (
                f"{path} imports the inside {module}: take {other}'s name"
            )


def test_no_module_imports_itself_through_others():
    graph, modules = {}, {*files(), *(name.removesuffix(".__init__") for name in files())}
    for name, path in files().items():
        found = graph[name.removesuffix(".__init__")] = set()
        for module, names in imports(path):
            inner = {f"{module}.{x}" for x in names} & modules
            found |= inner or {module}
        found.discard(name.removesuffix(".__init__"))
    graphlib.TopologicalSorter(graph).prepare()


def test_models_hlo_and_the_interpreter_stand_alone():
    for path in PACKAGE.glob("models/*.py"):
        assert all(module.split(".")[0] == "models" for module, _ in imports(path)), path
    for path in PACKAGE.glob("hlo/*.py"):
        assert all(module.split(".")[0] == "hlo" for module, _ in imports(path)), path
    for path in PACKAGE.glob("interpreter/*.py"):
        assert all(module.split(".")[0] in ("hlo", "interpreter") for module, _ in imports(path)), path
    for path in (*PACKAGE.glob("hlo/*.py"), *PACKAGE.glob("interpreter/*.py")):
        assert not re.search(r"^\s*(import|from) jax", path.read_text(encoding="utf-8"), re.MULTILINE), path


def test_folders_are_small_and_say_what_they_are():
    for folder in {path.parent for path in files().values()}:
        entries = [path for path in folder.iterdir() if path.name not in ("__pycache__", "__init__.py")]
        assert len(entries) <= MAX_ENTRIES, f"{folder} has {len(entries)} files and folders: find its second topic"
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))), folder


def test_no_module_is_a_drawer_of_odds_and_ends():
    names = {part for name in files() for part in name.split(".")}
    assert not {"utils", "util", "common", "helpers", "config", "engine", "misc"} & names


def test_no_two_classes_share_a_name():
    modules = {}
    for module, path in files().items():
        for name in {node.name for node in nodes(path) if isinstance(node, ast.ClassDef)}:
            assert modules.setdefault(name, module) == module, f"class {name} is in {modules[name]} and in {module}"


def test_a_module_of_tests_sets_its_marks_once():
    """The second `pytestmark` replaces the first, and what was slow is run by all."""
    for path in pathlib.Path(__file__).parent.rglob("*.py"):
        assert len(re.findall(r"^pytestmark\b", path.read_text(encoding="utf-8"), re.MULTILINE)) <= 1, path

"""What importing zero_jax costs, and what it does without the packages of its extras."""

import ast
import importlib.util
import pathlib
import re
import subprocess
import sys
import tomllib

import jax
import pytest

import zero_jax
from zero_jax.core.extras import pip_install
from zero_jax.program.jaxprs import NEWEST_JAX, OLDEST_JAX

PACKAGE = pathlib.Path(zero_jax.__file__).parent
PROJECT = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Packages whose distribution has another name, or comes with another one.
DISTRIBUTIONS = {"orbax": "orbax-checkpoint", "jaxlib": "jax", "array_record": "grain"}
# Refused by messages of their own: a Parquet file is named, and a process is started by who has its packages.
OTHERWISE = {("data/documents.py", "pyarrow"), ("data/rendering.py", "jinja2"), ("planning/worker.py", "cloudpickle")}
OTHERWISE |= {("libraries/models.py", "equinox")}  # which the user's model is of
OTHERWISE |= {("data/stream.py", "datasets")}  # which the table that it is given is of
HEAVY = {"orbax", "tensorstore", "grain", "matplotlib", "tensorboardX", "rich", "tokenizers", "cloudpickle"}


def names(requirements):
    return {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}


def third_party_imports(tree):
    """Yields (package, the extra that its import is surrounded with, or None)."""
    extra_of = {}
    for block in (node for node in ast.walk(tree) if isinstance(node, ast.With)):
        call = block.items[0].context_expr
        if isinstance(call, ast.Call) and getattr(call.func, "id", None) == "extra":
            extra_of.update((node, call.args[0].value) for node in block.body)
    for node in ast.walk(tree):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module] if isinstance(node, ast.ImportFrom) else []
        for root in {module.partition(".")[0] for module in modules} - sys.stdlib_module_names - {"zero_jax"}:
            yield root, extra_of.get(node)


@pytest.mark.slow
def test_every_package_is_required_or_imported_as_that_of_an_extra():
    for path in PACKAGE.rglob("*.py"):
        imports = [*third_party_imports(ast.parse(path.read_text(encoding="utf-8")))]
        extra_of = {package: extra for package, extra in imports if extra is not None}  # one import of it says so
        for package in {package for package, _ in imports}:
            if (str(path.relative_to(PACKAGE)), package) not in OTHERWISE:
                listed = EXTRAS[extra_of[package]] if package in extra_of else PROJECT["dependencies"]
                assert DISTRIBUTIONS.get(package, package) in names(listed), f"{path} imports {package}"


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_heavy_packages_are_imported_by_who_uses_them():
    """Apart from what JAX imports itself, where it is installed."""
    [at_import, with_step, with_checkpoints] = run(
        f"""if True:
        import sys
        import jax, optax
        before = {{*sys.modules}}
        loaded = lambda: print(*sorted({HEAVY} & ({{*sys.modules}} - before)))
        import zero_jax as zero
        loaded()
        zero.init_state, zero.make_train_step, zero.make_eval_step, zero.memory.measure, zero.comms.measure
        loaded()
        zero.Checkpointer, zero.restore
        loaded()"""
    )
    assert at_import == with_step == ""
    assert with_checkpoints == "orbax tensorstore"


def test_help_and_completion_import_no_jax():
    [*shown, loaded] = run(
        """if True:
        import contextlib, sys
        from zero_jax.cli import main
        for words in ("--help", "train --help", "plan --help", "launch --help", "completion bash"):
            with contextlib.suppress(SystemExit):
                main(words.split())
        print(*sorted({"jax", "numpy", "zero_jax.training", "zero_jax.cli.train"} & {*sys.modules}))"""
    )
    assert any(line.split()[:1] == ["--num-microbatches"] for line in shown) and loaded == ""


@pytest.mark.slow
def test_the_library_does_without_extras_and_names_the_missing_one(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 2.0}\n')
    (tmp_path / "text.txt").write_text("some text\n")
    hidden = ["grain", "array_record", "tensorboardX", "tokenizers", "cloudpickle", "matplotlib", "chex", "pyarrow"]
    told = run(
        f"""if True:
        import sys, types
        sys.modules.update(dict.fromkeys({hidden}))  # importing them fails
        import zero_jax as zero
        for name in zero.__all__:
            getattr(zero, name)
        zero.BatchBuffers()
        from zero_jax.cli import main
        from zero_jax.planning.process import CompileOptions, compile_plan
        def ending(call):
            try:
                call()
            except (SystemExit, ImportError) as error:
                print(type(error).__name__, error)
        sys.stderr = sys.stdout
        ending(lambda: main(["train", "--out", "{tmp_path}/runs"]))
        ending(lambda: main(["plot", "{tmp_path}"]))
        text = ["--data", "{tmp_path}/text.txt"]
        ending(lambda: main(["tokenize", *text, "--vocab-size", "300", "--out", "{tmp_path}/new"]))
        job = types.SimpleNamespace(topology="v5e:2x2", config=zero.ZeroConfig())
        ending(lambda: compile_plan(job, CompileOptions(cache=None)))
        ending(lambda: zero.data.train_batches(None, batch_size=1, seq_len=1, seed=0, sharding=None))
        ending(lambda: zero.trainer.plot_runs("{tmp_path}/loss.png", [zero.trainer.read_run("{tmp_path}")]))"""
    )
    train, plan, plot = (pip_install(f"zero-jax[{name}]") for name in ("train", "plan", "plot"))
    assert told == [
        f"zero-jax train: error: needs grain: {train}",
        "SystemExit 2",
        f"zero-jax plot: error: needs matplotlib: {plot}",
        "SystemExit 2",
        f"zero-jax tokenize: error: needs tokenizers: {train}",
        "SystemExit 2",
        f"MissingPackage needs cloudpickle: {plan}",
        f"MissingPackage needs grain: {train}",
        f"MissingPackage needs matplotlib: {plot}",
    ]
    assert not (tmp_path / "runs").exists()


def test_a_command_that_installs_names_the_python_that_is_not_activated(monkeypatch, tmp_path):
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    (folder / "pip").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(folder))
    assert pip_install("zero-jax[train]") == 'pip install "zero-jax[train]"'
    monkeypatch.setenv("PATH", "")
    assert pip_install("mpi4py") == ".venv/bin/python -m pip install mpi4py"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert pip_install("zero-jax[train]") == 'uv pip install --python .venv/bin/python "zero-jax[train]"'


@pytest.mark.slow
def test_the_command_takes_the_zero_jax_that_is_installed():
    """A checkout too: without an index it finds all that is there already."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "zero-jax[train,plan,plot]"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "Would install" not in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_a_jax_that_is_newer_than_tested_is_warned_of_once():
    assert jax.__version_info__[:2] <= NEWEST_JAX, "run all tests on this JAX, then raise NEWEST_JAX"
    told = run(
        """if True:
        import warnings
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            import jax
            jax.__version__, jax.__version_info__ = "0.99.1", (0, 99, 1)
            import zero_jax as zero
            for name in zero.__all__:
                getattr(zero, name)
        print(*(warning.message for warning in told if "zero_jax" in str(warning.message)), sep=" | ")"""
    )
    newest = ".".join(map(str, NEWEST_JAX))
    assert told[0].startswith(f"JAX 0.99.1 is newer than tested: this zero_jax is tested up to JAX {newest}.")
    assert " | " not in told[0] and f'"jax=={newest}.*"' in told[0]


def test_the_page_of_versions_has_the_bounds():
    page = (PACKAGE.parent / "docs" / "versions.md").read_text(encoding="utf-8")
    oldest, newest = (".".join(map(str, release)) for release in (OLDEST_JAX, NEWEST_JAX))
    assert f"JAX {oldest} is the oldest" in page and f"newer than JAX {newest}" in page
    assert f"| {zero_jax.__version__} | 3.11 |" in page and f"jax>={oldest}" in PROJECT["dependencies"]
    for required in ("flax", "optax", "orbax-checkpoint", "numpy"):
        (minimum,) = re.findall(rf"{required}>=([\d.]+)", " ".join(PROJECT["dependencies"]))
        assert re.search(rf"(?i){required} {re.escape(minimum)}\b", " ".join(page.split()))


def test_completion_offers_the_public_names_alone():
    assert [name for name in dir(zero_jax) if not name.startswith("__")] == zero_jax.__all__

"""A file of the user's is the one that was named, whatever else has its name: files, packages, the standard library."""

import copy
import os
import pathlib
import subprocess
import sys

import cloudpickle
import pytest

from zero_jax.planning import user_modules
from zero_jax.planning import worker as plan_worker
from zero_jax.planning.user_modules import resolve


def write(folder, **files):
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/', 1) if '__' in name[1:-2] else name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def function(path, name="f"):
    return resolve("--loss", f"{path}:{name}")


@pytest.fixture
def unchanged():
    """What the process as a whole imports from stays as it was."""
    before, modules = list(sys.path), {name: sys.modules[name] for name in ("copy", "types", "json")}
    yield
    assert sys.path == before
    assert all(sys.modules[name] is module for name, module in modules.items())
    assert sys.modules["copy"] is copy


pytestmark = pytest.mark.usefixtures("unchanged")


def test_two_files_of_one_name(tmp_path):
    for name in "ab":
        write(
            tmp_path / name,
            model=f"import layers\ndef f(): return {name!r} + layers.NAME\n",
            layers=f"NAME = {name!r}\n",
        )
    a, b = function(tmp_path / "a/model.py"), function(tmp_path / "b/model.py")
    assert (a(), b()) == ("aa", "bb")
    assert "model" not in sys.modules and "layers" not in sys.modules


def test_a_file_called_as_the_standard_library(tmp_path):
    write(tmp_path, copy="import json\ndef f(): return json.dumps('own')\n", json="raise RuntimeError('shadowed')\n")
    assert function(tmp_path / "copy.py")() == '"own"'


def test_a_file_is_run_once(tmp_path, monkeypatch):
    write(
        tmp_path,
        model="import pathlib\nwith open(__file__ + '.log', 'a') as log: log.write('run ')\ndef f(): pass\ng = f\n",
    )
    (tmp_path / "link.py").symlink_to(tmp_path / "model.py")
    monkeypatch.chdir(tmp_path)
    one, two, three = function(tmp_path / "model.py"), function("model.py", "g"), function("link.py")
    assert one is two is three is resolve("--loss", "model:f")
    assert (tmp_path / "model.py.log").read_text() == "run "


def test_what_a_file_imports_is_beside_it(tmp_path, monkeypatch):
    """Also while its functions run, by any form of import, with names that are installed elsewhere too."""
    model = (
        "import layers.dense as dense, layers.norm\nfrom layers import dense as again, norm\n"
        "from planned import f as p\n"
        "import numpy as np, jax\n"
        "def f():\n  import late\n  from late import value\n"
        "  return dense.D, again.D, layers.norm.N, p(), late.value, value\n"
    )
    write(tmp_path, model=model, layers____init__="", planned="def f(): return 'own'\n", late="value = 3\n")
    write(tmp_path / "layers", dense="from . import norm\nfrom layers.norm import N\nD = norm.N\n", norm="N = 1\n")
    (tmp_path / "layers/__init__.py").write_text("")
    (tmp_path / "jax").mkdir()  # a folder of notes, say
    import planned

    f = function(tmp_path / "model.py")
    assert f() == (1, 1, 1, "own", 3, 3)
    assert planned is sys.modules["planned"] and hasattr(planned, "loss_fn")


def test_files_of_packages(tmp_path, monkeypatch):
    write(
        tmp_path / "pkg/sub",
        model="from . import near\nfrom ..far import F\nimport pkg.far\nimport script_style\n"
        "def f(): return near.N, F, pkg.far.F, script_style.S\n",
        near="N = 1\n",
        script_style="S = 3\n",
        numpy="raise RuntimeError('inside a package, numpy is the installed one')\n",
        other="import numpy\ndef f(): return numpy.ones(1)[0]\n",
    )
    write(tmp_path / "pkg", far="F = 2\n")
    for folder in ("pkg", "pkg/sub"):
        (tmp_path / folder / "__init__.py").write_text("")
    assert function(tmp_path / "pkg/sub/model.py")() == (1, 2, 2, 3)
    assert function(tmp_path / "pkg/sub/other.py")() == 1
    monkeypatch.chdir(tmp_path)
    assert resolve("--loss", "pkg.sub.model:f") is function("pkg/sub/model.py")
    assert resolve("--loss", "planned:loss_fn").__module__ == "planned"
    write(tmp_path, copy="def f(): return 'own'\n")
    assert resolve("--loss", "copy:f")() == "own"


def test_names_that_are_no_python_names(tmp_path):
    folder = tmp_path / "my models.v2"
    write(folder, **{"gpt-2.large": "import layers\ndef f(): return layers.L\n", "layers": "L = 1\n"})
    assert function(folder / "gpt-2.large.py")() == 1


@pytest.mark.slow
def test_a_name_with_dots_is_an_attribute(tmp_path):
    """As of `model = zero.from_equinox(...)`."""
    write(tmp_path, mine="class model:\n  class inner:\n    loss_fn = len\n")
    assert resolve("--loss", f"{tmp_path}/mine.py:model.inner.loss_fn") is len


def test_it_reaches_another_process(tmp_path):
    model = (
        "import dataclasses, layers\n@dataclasses.dataclass\nclass Config:\n  n: int = layers.L\n"
        "def make(config):\n  def loss():\n    return config, layers.L\n  return loss\n"
        "f = make(Config())\ndef g():\n  import late\n  return late.V\n"
    )
    write(tmp_path, model=model, layers="L = 5\n", late="V = 7\n")
    (tmp_path / "job").write_bytes(cloudpickle.dumps([function(tmp_path / "model.py", name) for name in "fg"]))
    program = (
        "import sys, cloudpickle\nfrom zero_jax.planning import user_modules; user_modules.install()\n"
        "f, g = cloudpickle.loads(open(sys.argv[1], 'rb').read())\nconfig, l = f()\nprint(config.n, l, g())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "job")], capture_output=True, text=True, cwd="/"
    )
    assert done.stdout == "5 5 7\n", done.stderr
    assert plan_worker.install is user_modules.install  # which the compiler's process calls


WRONG = {
    "none.py:f": r"cannot import '.*none.py': it does not exist; did you mean '.*one.py'\?",
    "folder.py:f": "is a folder: name a Python file in it",
    "folder:f": "no function 'f'|is a folder",
    "fifo.py:f": "it is no regular file: name a Python file$",
    "one.py:loss": "has no function 'loss'; did you mean 'loss_fn'",
    "one.py:mdl.loss_fn": "has no function 'mdl.loss_fn'; did you mean 'model'",
    "one.py:model.los_fn": "has no function 'model.los_fn'; did you mean 'model.loss_fn'",
    "one.py": "write module:function, such as my_model:loss_fn",
    ":f": "write module:function",
    "./notes.txt:f": "is no Python file: its name has to end in .py",
    "syntax.py:f": r"cannot import .*syntax.py' \(.*syntax.py, line 2\)",
    "raises.py:f": r"\(KeyError: 'z'\) at .*raises.py:2 in <module>: {}\['z'\]",
    "lacks.py:f": r"\(No module named 'nowhere'\) at .*lacks.py:1 in <module>: import nowhere",
    "nested.py:f": r"\(KeyError: 'z'\) at .*raises.py:2 in <module>: {}\['z'\]",
    "above.py:f": r"\(attempted relative import beyond top-level package\) at .*above.py:1",
    "script.py:f": r"ends the program when it is imported at .*script.py:1 in <module>: raise SystemExit\(3\)",
    "binary.py:f": "cannot import",
    "a\0b.py:f": "cannot import",
    f"{'x' * 300}.py:f": "cannot read|cannot import",
    "..one:f": "cannot import",
    "no/such/folder.py:f": "it does not exist",
}


@pytest.mark.parametrize("reference", WRONG)
def test_what_leads_nowhere_is_told_in_a_line(reference, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = "def loss_fn(): pass\nclass model: loss_fn = loss_fn\n"
    write(tmp_path, one=one, syntax="x = 1\ndef f(:\n", raises="x = 1\n{}['z']\n")
    write(
        tmp_path,
        lacks="import nowhere\n",
        nested="import raises\n",
        above="from ..x import y\n",
        script="raise SystemExit(3)\n",
    )
    (tmp_path / "notes.txt").write_text("notes")
    (tmp_path / "binary.py").write_bytes(b"\x00\xff\xfe")
    for name in ("folder.py", "folder"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "fifo.py")
    with pytest.raises(ValueError, match=WRONG[reference]) as caught:
        resolve("--loss", reference)
    assert str(caught.value).startswith("--loss ") and "zero_jax_user_" not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert pathlib.Path.cwd() == tmp_path

"""Runs the examples on 8 simulated devices and on one, and checks that their loss falls."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
TRAINER = "train_own_model.py"
NEEDS = {"equinox_model.py": "equinox"}


def run(name, *, num_devices, folder=None):
    """Runs an example with warnings as errors and returns what it prints."""
    flags = os.environ.get("XLA_FLAGS", "")
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": str(num_devices), "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / name)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_examples_are_short():
    assert {"pjit_loop.py", "flax_linen.py", "flax_nnx.py", "equinox_model.py"} <= set(EXAMPLES)
    for name in EXAMPLES:
        text = (ROOT / "examples" / name).read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 80, name
        assert f"python examples/{name}" in text, name


@pytest.mark.parametrize(
    ("name", "num_devices"),
    [
        ("pjit_loop.py", 8),
        # Each takes some ten seconds where all cores are busy.
        *(pytest.param(name, 8, marks=pytest.mark.slow) for name in EXAMPLES if name not in ("pjit_loop.py", TRAINER)),
        pytest.param("pjit_loop.py", 1, marks=pytest.mark.slow),
        pytest.param("flax_linen.py", 3, marks=pytest.mark.slow),
    ],
)
def test_example(name, num_devices):
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    printed = run(name, num_devices=num_devices)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
    assert len(losses) >= 3 and losses[-1] < 0.1 * losses[0], printed
    # Each example prints how its params are sharded.
    assert re.search(r"sharded as|[KMG]?B a device", printed), printed
    if num_devices > 1:
        assert "data" in printed, printed


def test_the_jit_loop_changes_three_lines():
    text = (ROOT / "examples" / "pjit_loop.py").read_text(encoding="utf-8")
    assert len(re.findall(r"# zero$", text, re.MULTILINE)) == 3


@pytest.mark.slow
def test_trainer_with_own_model_resumes(tmp_path):
    first = run(TRAINER, num_devices=8, folder=tmp_path)
    begun, ended = map(float, re.search(r"validation loss +(\S+) -> (\S+)", first).groups())
    assert ended < 0.6 * begun, first
    again = run(TRAINER, num_devices=4, folder=tmp_path)
    assert "resuming after step 60" in again
    assert f"{begun:.3f} -> {ended:.3f}" in again, again

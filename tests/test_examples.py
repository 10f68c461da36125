"""Runs the examples on 8 simulated devices and on one, and checks that their loss falls."""

import importlib.util
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
TRAINER = "train_own_model.py"
VISION = "vit_digits.py"
FINETUNING = "finetune_docstrings.py"
NEEDS = {"equinox_model.py": "equinox", "haiku_model.py": "haiku", VISION: "sklearn"}
# The figure that an example prints first and last falls at least to this share; the slow ones are marked.
SHARES = {
    "plain_pytree.py": 0.1,
    "flax_train_state.py": 0.1,
    "nnx_optimizer.py": 0.1,
    "haiku_model.py": 0.1,
    "diffusion.py": 0.3,
    "gan.py": 0.3,
    "ppo.py": 0.5,
    "t5.py": 0.3,
}
QUICK = ("plain_pytree.py", "flax_train_state.py")
IN_PROCESSES = [name for name in EXAMPLES if name not in (*SHARES, TRAINER, VISION, FINETUNING)]


def run(name, *options, num_devices, folder=None):
    """Runs an example with warnings as errors and returns what it prints."""
    flags = os.environ.get("XLA_FLAGS", "")
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": str(num_devices), "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / name), *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def skip_without_library(name):
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")


def assert_recorded(name, printed):
    """Compares with what the site shows of an example, but for the numbers."""
    recorded = json.loads((ROOT / "docs" / "recorded" / f"{name.removesuffix('.py')}.json").read_text(encoding="utf-8"))
    shown, seen = ([re.sub(r"[\d.]+", "#", line) for line in lines] for lines in (recorded["printed"], printed))
    assert shown == seen, "run scripts/record_examples.py"


@pytest.mark.slow
def test_the_report_of_an_accelerator_compares_with_the_cpu():
    command = [sys.executable, str(ROOT / "scripts" / "accelerator_report.py"), "--only-cases", "fp16"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.split()[-1] for line in done.stdout.splitlines()[2:]] == ["ok"]


def test_each_example_has_a_record_with_a_curve():
    records = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "docs/recorded").iterdir()}
    assert sorted(records) == [name.removesuffix(".py") for name in EXAMPLES]
    assert all(len(curve) >= 3 for record in records.values() for curve in record["losses"] or [[]])
    assert not [name for name, record in records.items() if re.search(r"(?<!\w)/(tmp|root|home)\b", str(record))]


def test_examples_are_short():
    assert {"pjit_loop.py", "flax_linen.py", "flax_nnx.py", "equinox_model.py"} <= set(EXAMPLES)
    for name in EXAMPLES:
        text = (ROOT / "examples" / name).read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 80, name
        assert f"python examples/{name}" in text, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_devices"),
    [
        # Each takes some ten seconds where all cores are busy.
        *((name, 8) for name in IN_PROCESSES),
        ("pjit_loop.py", 1),
        ("flax_linen.py", 3),
    ],
)
def test_example(name, num_devices):
    skip_without_library(name)
    printed = run(name, num_devices=num_devices)
    if num_devices == 8:
        assert_recorded(name, printed.splitlines())
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
    assert len(losses) >= 3 and losses[-1] < 0.1 * losses[0], printed
    # Each example prints how its params are sharded.
    assert re.search(r"sharded as|[KMG]?B a device", printed), printed
    if num_devices > 1:
        assert "data" in printed, printed


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in SHARES]
)
def test_example_in_this_process(name, capsys):
    """Which saves the start of another one for each."""
    skip_without_library(name)
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    printed = capsys.readouterr().out
    assert_recorded(name, printed.splitlines())
    first, last = map(abs, map(float, re.search(r"(-?[\d.]+) -> (-?[\d.]+)", printed).groups()))
    assert last < SHARES[name] * first, printed
    held, whole = map(int, re.search(r"(\d+) KB a device\D* (\d+) KB.*data=8", printed).groups())
    assert whole / 8 <= held < whole / 4, printed


@pytest.mark.slow
def test_the_vision_transformer_learns_the_digits_and_resumes(capsys, tmp_path, monkeypatch):
    skip_without_library(VISION)
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(ROOT / "examples" / VISION))["main"]
    main.__globals__["STEPS"] = 100
    main()
    printed = capsys.readouterr().out
    *_, accuracy = re.findall(r"validation accuracy ([\d.]+)", printed)
    assert float(accuracy) > 0.75, printed
    held, whole = map(float, re.search(r"a device holds +params ([\d.]+) KB of ([\d.]+) KB", printed).groups())
    assert held < whole / 4
    main()
    assert "resuming after step 100" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["pjit_loop.py", "nnx_optimizer.py", "flax_train_state.py"])
def test_a_loop_of_ones_own_changes_three_lines(name):
    text = (ROOT / "examples" / name).read_text(encoding="utf-8")
    assert len(re.findall(r"# zero$", text, re.MULTILINE)) == 3


@pytest.mark.slow
def test_trainer_with_own_model_resumes(tmp_path):
    first = run(TRAINER, num_devices=8, folder=tmp_path)
    begun, ended = map(float, re.search(r"validation loss +(\S+) -> (\S+)", first).groups())
    assert ended < 0.6 * begun, first
    again = run(TRAINER, num_devices=4, folder=tmp_path)
    assert "resuming after step 60" in again
    assert f"{begun:.3f} -> {ended:.3f}" in again, again


@pytest.mark.slow
def test_adapters_learn_to_answer():
    printed = run(FINETUNING, "--steps", "5", num_devices=8)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
    base, adapters = losses[:5], losses[5:]
    assert len(adapters) == 5 and base[-1] < 0.8 * base[0] and adapters[-1] < adapters[0], printed
    assert "tokens of answers to learn" in printed and "model_state/base/blocks/up/codes" in printed

"""Every example runs as it stands, in a process of its own."""

import os
import pathlib
import subprocess
import sys

import pytest

EXAMPLES = sorted((pathlib.Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_learns(path):
    result = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=300, env={**os.environ})
    assert result.returncode == 0, result.stderr
    losses = [float(line.split("loss")[1].split()[0]) for line in result.stdout.splitlines() if "loss" in line]
    assert len(losses) >= 2
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_fits_on_a_page(path):
    assert len(path.read_text().splitlines()) <= 80

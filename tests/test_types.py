"""A type checker finds misspelt names, fields and words of a user's program, and nothing in one that is right."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

import zero_jax
from zero_jax.core.field_checks import field_kinds
from zero_jax.trainer import optimizers

PACKAGE = pathlib.Path(zero_jax.__file__).parent
RIGHT = """
import zero_jax as zero

config = zero.ZeroConfig(stage=3, precision="bf16", clip_norm=1.0, offload="state", quantize_gathers="int8")
mesh = zero.make_mesh(data=8)
print(zero.memory.measure_arrays({}), zero.trainer.OptimizerConfig(optimizer="muon"))
zero.ZeroConfig(precision=zero.Precision(), clip_norm=None, num_microbatches=len(mesh.axis_names))
"""
WRONG = """zero.ZeroConfig(precision="bf17")
zero.ZeroConfig(stagee=3)
zero.ZeroConfig(offload="states")
zero.ZeroConfig(quantize_grads="int5")
zero.make_messh()
zero.memory.mesure
zero.trainer.OptimizerConfig(optimizer="moun")
zero.TrainConfig(zero=config, resume="allways")
"""


@pytest.mark.slow
def test_what_is_misspelt_is_found(tmp_path):
    pytest.importorskip("pyright")
    (tmp_path / "program.py").write_text(RIGHT + WRONG)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(PACKAGE.parent)]}))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "program.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    found = {int(line) for line in re.findall(r"program\.py:(\d+):\d+ - error", done.stdout)}
    first = RIGHT.count("\n") + 1
    assert found == {*range(first, first + WRONG.count("\n"))}, done.stdout


def test_the_words_of_a_type_are_those_that_are_taken():
    auto, *words = field_kinds(zero_jax.ZeroConfig)["precision"].words
    with pytest.raises(ValueError, match=f"choose one of {', '.join(words)} or a zero.Precision"):
        zero_jax.ZeroConfig(precision="bf17")
    for word in (auto, *words):
        zero_jax.ZeroConfig(precision=word)
    for word in field_kinds(optimizers.OptimizerConfig)["optimizer"].words:
        optimizers.make_optimizer(optimizers.OptimizerConfig(optimizer=word), num_steps=10)

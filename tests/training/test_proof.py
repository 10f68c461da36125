"""What the README claims of traffic and memory, read from programs of the TPU compiler, which needs no TPU.

The bounds are those that the project sets itself. 1.08 leaves room for XLA:TPU's windowed reduce-scatters, which cost
(n + 1) / n; stage 3 stays under 1 because a lookup moves rows instead of the table, and because the last use is not
gathered twice. Stages 1 and 2, 64 chips, microbatches and frameworks are held to the same bounds with a small model,
which takes a third of the time to compile; the rest with the large one, of which the README tells.
"""

import math

import jax
import pytest

pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'jax[tpu]'")

from measure_traffic import GPT_15M, GPT_271M, PSI_MOVED, compile_by_hand, compile_step

pytestmark = [pytest.mark.tpu_compiler, pytest.mark.slow]
V5P_16, V5P_64 = "v5p:2x2x4", "v5p:4x4x4"


def assert_moves_params_well(program):
    """No large all-reduce, and whatever is large enough to be a param or its gradient moves in 2-byte types."""
    large = [c for c in program.collectives if c.kind == "all-reduce" and c.full_bytes > 0.01 * 2 * program.num_params]
    assert not large, large
    large = [c for c in program.collectives if c.full_bytes > 1e-3 * program.num_params]
    wide = [c for c in large if {"f32", "f64"} & set(c.dtypes)]  # the indices of a lookup are integers
    assert not wide, wide


@pytest.mark.parametrize(
    ("topology", "stage", "bound"), [(V5P_16, 1, 1.08), (V5P_16, 2, 1.08), (V5P_16, 3, 1.00), (V5P_64, 2, 1.08)]
)
def test_traffic_is_at_the_ideal(topology, stage, bound):
    program = compile_step(topology, stage, gpt_config=GPT_271M if (topology, stage) == (V5P_16, 3) else GPT_15M)
    assert program.ratio_to_ideal(PSI_MOVED[stage]) <= bound
    assert_moves_params_well(program)


def test_a_program_compiled_as_for_a_run_sends_the_same():
    """The other programs of this file are compiled with less effort (`conftest.py`)."""
    program = compile_step(V5P_16, 3, gpt_config=GPT_15M)
    jax.config.update("jax_optimization_level", "UNKNOWN")
    assert compile_step.__wrapped__(V5P_16, 3, gpt_config=GPT_15M).sent_bytes == program.sent_bytes


def test_stage_1_communicates_once_for_four_microbatches():
    program = compile_step(V5P_64, 1, num_microbatches=4, gpt_config=GPT_15M)
    assert program.ratio_to_ideal(2) <= 1.02
    assert_moves_params_well(program)


@pytest.mark.parametrize(("stage", "bytes_whole", "bytes_sharded"), [(0, 14, 0), (1, 2, 12), (2, 2, 12), (3, 0, 12)])
def test_arguments_equal_the_formula(stage, bytes_whole, bytes_sharded):
    """Adam in bf16: 2 bytes of params and 12 of master params and moments a param (paper section 3.1)."""
    # At stages 1 to 3 these are the programs of the traffic above; that of stage 0 is compiled for this alone.
    program = compile_step(V5P_16, stage, gpt_config=GPT_271M if stage == 3 else GPT_15M)
    formula = program.num_params * (bytes_whole + bytes_sharded / program.num_devices)
    assert math.isclose(program.argument_bytes, formula, rel_tol=0.01)
    assert program.alias_bytes > 0.99 * formula  # all of it donated


@pytest.mark.parametrize("model", ["loop", "linen scanned", "nnx loop"])
def test_frameworks_send_what_the_scanned_dict_model_sends(model):
    program = compile_step(V5P_16, 3, model=model, gpt_config=GPT_15M)
    assert program.sent_bytes <= 1.05 * compile_step(V5P_16, 3, gpt_config=GPT_15M).sent_bytes
    assert_moves_params_well(program)


def test_temporaries_are_no_larger_than_with_gathers_written_by_hand():
    assert compile_step(V5P_16, 3, gpt_config=GPT_271M).temp_bytes <= compile_by_hand(V5P_16).temp_bytes

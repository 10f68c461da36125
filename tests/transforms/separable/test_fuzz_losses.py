"""Random loss functions, transformed, compute what they do as they are; `scripts/fuzz_losses.py` goes on for longer."""

import collections

import fuzzing
import pytest

pytestmark = pytest.mark.slow
# Fixed seeds of each mode, as many as take a quarter of a minute or so.
SEEDS = {"gather": 6, "scatter": 5, "remat": 6, "microbatches": 3, "separable": 3}


@pytest.mark.parametrize("mode", SEEDS)
def test_transformed_programs_compute_the_same(mode):
    outcomes = collections.Counter()
    for seed in range(1000, 1000 + SEEDS[mode]):
        found = fuzzing.compare(seed, mode)
        outcomes[found.outcome] += 1
        assert found.outcome != "differs", f"{mode}, seed {seed}, by {found.apart:.1e}:\n{found.program.source}"
    # Layers that differ too much are refused, and XLA gets some shardings wrong: docs/xla_faults.md.
    assert outcomes["same"] >= SEEDS[mode] / 2, outcomes


def test_a_program_is_the_same_each_time():
    assert fuzzing.program(3, "loop").source == fuzzing.program(3, "loop").source
    assert fuzzing.program(3).source != fuzzing.program(4).source

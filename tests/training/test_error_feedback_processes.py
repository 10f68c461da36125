"""Errors of quantized gradients, saved by some processes and restored by others."""

import pathlib

import pytest
from processes import results_of

WORKER = pathlib.Path(__file__).with_name("error_feedback_worker.py")
pytestmark = pytest.mark.slow


def start(num_processes, replicas, folder, action):
    """Returns what each process reports, by number of replicas."""
    words = (8 // num_processes, replicas, folder, action)
    return results_of(WORKER, [(num_processes, index, *words) for index in range(num_processes)])


def test_errors_of_two_processes_are_restored_by_two_and_by_one_and_shared_among_other_replicas(tmp_path):
    """Nothing of a gradient is lost, before the next step or after it."""
    saved, _ = (result["2"] for result in start(2, "2", tmp_path, "save"))
    assert max(saved["lost"]) < 3e-6 and all(float.fromhex(x) > 0 for sums in saved["sums"].values() for x in sums)
    by_two = start(2, "2,4", tmp_path, "load")
    for result in (*by_two, *start(1, "2", tmp_path, "load")):
        assert result["2"]["sums"] == saved["sums"] and not result["2"]["warnings"]
        assert max(result["2"]["lost"]) < 3e-6
    for result in by_two:
        assert result["4"]["warnings"] == [
            "errors of 2 quantized gradients are those of 2 devices, not 4: each has an equal share of their sum"
        ]
        assert max(result["4"]["lost"]) < 3e-6 and len(result["4"]["sums"]["up"]) == 4

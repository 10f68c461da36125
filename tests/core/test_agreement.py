"""Two real processes: what one learns or fails at is learned, or failed at, by both."""

import pathlib

import jax
import pytest
from processes import results_of

from zero_jax.core.agreement import Agreement, OtherProcessFailed, Turns, from_first_process

WORKER = pathlib.Path(__file__).with_name("agreement_worker.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each of two processes has reported."""
    folder = tmp_path_factory.mktemp("agreement")
    return results_of(WORKER, [(i, folder) for i in range(2)])


@pytest.mark.slow
def test_a_text_of_any_length_and_kind_comes_from_the_first_process(results):
    for result in results:
        assert all(result[name] is True for name in ("megabyte", "empty", "zeros", "path")), result
        assert result["called"] == "made"
        assert result["all"] == ["é" * 3, "a\0"]


@pytest.mark.slow
def test_an_error_of_the_first_process_is_one_of_all(results):
    first, second = results
    message = f"no such name: {'x' * 5000}"
    assert first["raised"] == f"ValueError: {message}"
    assert second["raised"] == f"ValueError: process 0 failed: {message}"
    assert first["agreement"] == "OSError: the disk is on fire"
    assert second["agreement"] == "RuntimeError: process 0 failed"


@pytest.mark.slow
def test_a_save_is_whole_in_both_or_in_none_whatever_else_each_has_made(results):
    for index, result in enumerate(results):
        steps, num_failed, steps_then, names, lines = result["saves"]
        assert (steps, num_failed, steps_then) == ([1], 1, [1, 3])
        assert set(names) <= {"step_00000001", "step_00000003", "zero_jax.lock"}
        reason = "process 1 failed: ValueError: " if index == 0 else "File too large"
        (line,) = (line for line in lines if "cut off" not in line)  # a process may see what the other had begun
        assert "checkpoint of step 2 NOT saved" in line and reason in line


@pytest.mark.slow
def test_a_folder_that_another_run_has_is_refused_in_both(results):
    first, second = results
    assert first["taken"].startswith("FolderInUse: ") and "run other" in first["taken"]
    assert second["taken"].startswith("FolderInUse: ") and "see process 0's log" in second["taken"]


@pytest.mark.parametrize(("other", "raised"), [("MemoryError: no room", OtherProcessFailed), ("KeyError: 2", KeyError)])
def test_no_process_goes_on_from_an_error_where_another_one_ends(other, raised, monkeypatch):
    class Both(Turns):
        def take(self, text=None, *, error="", **_):
            self.errors = {0: error, 1: other}
            return {}

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(raised) as caught, Agreement(KeyError, of=(KeyError,), turns=Both("test")):
        raise KeyError(1)
    assert str(caught.value) == ("1" if raised is KeyError else f"process 1 failed: {other}")


def test_one_process_agrees_with_itself():
    assert from_first_process("a") == from_first_process(lambda: "a") == "a"

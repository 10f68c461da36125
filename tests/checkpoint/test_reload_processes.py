"""Checkpoints of several processes: each writes its own shards, and any number of processes reads them."""

import pathlib
import shutil

import pytest
from processes import results_of

WORKER = pathlib.Path(__file__).with_name("reload_worker.py")
pytestmark = pytest.mark.slow


def start(num_processes, num_devices, stage, folder, action):
    """Runs processes of so many devices each; returns what each of them reports."""
    return results_of(WORKER, [(num_processes, i, num_devices, stage, folder, action) for i in range(num_processes)])


def assert_close(actual, expected, tolerance):
    actual, expected = ([float.fromhex(x) for x in losses] for losses in (actual, expected))
    assert actual == pytest.approx(expected, rel=tolerance)


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory):
    """A folder that two processes have saved to, and what they report."""
    folder = tmp_path_factory.mktemp("saved-by-two")
    return folder, start(2, 4, 3, folder, "save")


def test_two_processes_save_and_one_reloads(saved_by_two):
    folder, (first, second) = saved_by_two
    assert first["losses"] == second["losses"] and first["steps"] == second["steps"] == [2]
    assert first["failed"] == second["failed"] == 0
    written = {path.name for path in (folder / "step_00000002" / "state").glob("ocdbt.process_*")}
    assert written == {"ocdbt.process_0", "ocdbt.process_1"}
    (one,) = start(1, 8, 3, folder, "load")
    assert_close(one["losses"], first["losses"], 1e-6)  # processes sum in another order
    (four,) = start(1, 4, 3, folder, "load")
    assert_close(four["losses"], first["losses"], 2e-5)


def test_one_process_saves_and_two_reload(tmp_path):
    (saved,) = start(1, 8, 2, tmp_path, "save")
    loaded = start(2, 4, 2, tmp_path, "load")
    assert loaded[0] == loaded[1] and not loaded[0]["told"]
    assert_close(loaded[0]["losses"], saved["losses"], 1e-6)  # processes sum in another order


def test_a_damaged_checkpoint_is_one_for_all_processes(saved_by_two, tmp_path):
    shutil.copytree(saved_by_two[0], tmp_path, dirs_exist_ok=True)
    record = tmp_path / "step_00000002" / "record" / "metadata"
    record.write_text(record.read_text()[:-9])
    for result in start(2, 4, 3, tmp_path, "load"):
        assert "no undamaged checkpoint" in result["error"]


def test_a_full_disk_of_one_process_stops_none(tmp_path):
    results = start(2, 4, 3, tmp_path, "fail")
    assert [x["failed"] for x in results] == [1, 1], results
    assert [x["steps"] for x in results] == [[], []]
    assert "File too large" in results[1]["told"][0] and "process 1" in results[0]["told"][0]
    assert results[0]["losses"] == results[1]["losses"] and not list(tmp_path.iterdir())

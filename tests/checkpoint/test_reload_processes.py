"""Checkpoints of several processes: each writes its own shards, and any number of processes reads them."""

import pathlib
import shutil

import pytest
from processes import results_of
from reload_worker import loaded, saved

WORKER = pathlib.Path(__file__).with_name("reload_worker.py")
pytestmark = pytest.mark.slow


def start(folder, *actions):
    """Runs actions in two processes of four devices each; returns what each of them reports."""
    return results_of(WORKER, [(index, folder, *actions) for index in range(2)])


def assert_close(actual, expected, tolerance):
    actual, expected = ([float.fromhex(x) for x in losses] for losses in (actual, expected))
    assert actual == pytest.approx(expected, rel=tolerance)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder of folders that two processes have saved to, and what they report."""
    folder = tmp_path_factory.mktemp("written")
    return folder, start(folder, "save", "fail", "apart", "late")


@pytest.fixture(scope="module")
def read(written, tmp_path_factory):
    """What one process has saved, and two report that load it and a damaged checkpoint of two."""
    folder = tmp_path_factory.mktemp("read")
    by_one = saved(folder / "load", 2)
    shutil.copytree(written[0] / "save", folder / "damaged")
    record = folder / "damaged" / "step_00000002" / "record" / "metadata"
    record.write_text(record.read_text()[:-9])
    return by_one, start(folder, "broken", "damaged", "load")


def test_two_processes_save_and_one_reloads(written):
    folder, results = written
    first, second = (result["save"] for result in results)
    assert first["losses"] == second["losses"] and first["steps"] == second["steps"] == [2]
    assert first["failed"] == second["failed"] == 0
    names = {path.name for path in (folder / "save" / "step_00000002" / "state").glob("ocdbt.process_*")}
    assert names == {"ocdbt.process_0", "ocdbt.process_1"}
    assert_close(loaded(folder / "save", 3)["losses"], first["losses"], 1e-6)  # processes sum in another order
    assert_close(loaded(folder / "save", 3, num_devices=4)["losses"], first["losses"], 2e-5)


def test_processes_with_folders_of_their_own_are_refused(written):
    """Each saved its own shards, and said so; there was no checkpoint."""
    folder, results = written
    for error in (result[action]["error"] for result in results for action in ("apart", "late")):
        assert "process 1 does not see what process 0 wrote there: all processes save into one folder" in error
        assert "bucket" in error
    assert not [*folder.glob("apart*/step*")]


def test_one_process_saves_and_two_reload(read):
    by_one, results = read
    first, second = (result["load"] for result in results)
    assert first == second and not first["told"]
    assert_close(first["losses"], by_one["losses"], 1e-6)  # processes sum in another order


def test_a_damaged_checkpoint_is_one_for_all_processes(read):
    for result in read[1]:
        assert "no undamaged checkpoint" in result["damaged"]["error"]


def test_memory_that_ends_in_one_process_is_no_damage_for_the_other(read):
    """Which went on to the next checkpoint alone, until it was told that the first had ended."""
    first, second = (result["broken"] for result in read[1])
    assert second == "MemoryError: no room"
    assert first == "OtherProcessFailed: process 1 failed: MemoryError: no room"


def test_a_full_disk_of_one_process_stops_none(written):
    folder, results = written
    first, second = (result["fail"] for result in results)
    assert first["failed"] == second["failed"] == 1, results
    assert first["steps"] == second["steps"] == []
    assert "File too large" in second["told"][0] and "process 1" in first["told"][0]
    assert first["losses"] == second["losses"] and not list((folder / "fail").iterdir())

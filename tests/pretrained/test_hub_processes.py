"""Folders of the hub with several processes: each reads its own shards, and together they write one folder."""

import pathlib

import pytest
from hub_folders import FOLDERS, assert_same_bits, read, tensors_of, write
from processes import results_of

WORKER = pathlib.Path(__file__).with_name("hub_worker.py")
pytestmark = pytest.mark.slow


def start(folders, out):
    """Runs two processes, each with a folder of its own to read from; returns what each of them reports."""
    return results_of(WORKER, [(2, i, folder, out) for i, folder in enumerate(folders)])


def test_two_processes_read_their_shards_and_write_one_folder(tmp_path):
    tensors = tensors_of(FOLDERS["mixtral"], "bfloat16")
    folder = write(tmp_path / "in", FOLDERS["mixtral"], tensors, num_files=2)
    (tmp_path / "out").mkdir()  # as a mount is: the files of all processes are in it for a time
    results = start([folder, folder], tmp_path / "out")
    assert not any("error" in result for result in results), results
    for result in results:
        assert result["num_read"] < 0.6 * result["num_params"]
    assert results[0]["saved"] == results[1]["saved"]
    for saved in ("out", "out-own"):  # of arrays of all processes, and of arrays that each has
        assert_same_bits(read(tmp_path / saved), tensors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out", "out-own"]
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


def test_a_folder_that_one_process_cannot_read_is_loaded_by_none(tmp_path):
    folder = write(tmp_path / "in", FOLDERS["llama"], tensors_of(FOLDERS["llama"]))
    results = start([folder, tmp_path / "none"], tmp_path / "out")
    assert "process 1 cannot read" in results[0]["error"] and "is no folder" in results[1]["error"]
    assert not (tmp_path / "out").exists()

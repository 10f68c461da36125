"""Files that others wrote are read up to a limit, with memory for what they hold."""

import pathlib
import tracemalloc

import pytest
from etils import epath

from zero_jax.cli.commands import parse
from zero_jax.core.files.untrusted import read_file, user_path


def test_memory_is_that_of_the_file_and_not_of_the_limit(tmp_path):
    path = epath.Path(tmp_path / "small")
    path.write_bytes(b"x" * 1000)
    tracemalloc.start()
    try:
        assert read_file(path, limit_bytes=1 << 28) == b"x" * 1000
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [0, 9, 10])
def test_up_to_the_limit_all_is_read(tmp_path, size):
    path = epath.Path(tmp_path / "file")
    path.write_bytes(b"x" * size)
    assert read_file(path, limit_bytes=10) == b"x" * size


def test_a_larger_file_is_refused(tmp_path):
    path = epath.Path(tmp_path / "file")
    path.write_bytes(b"x" * 11)
    with pytest.raises(ValueError, match="more than the 10 bytes"):
        read_file(path, limit_bytes=10)


def test_a_file_whose_size_the_system_does_not_say_is_read():
    assert b"processor" in read_file(epath.Path("/proc/cpuinfo"), limit_bytes=1 << 20)
    with pytest.raises(ValueError, match="more than the 10 bytes"):
        read_file(epath.Path("/proc/cpuinfo"), limit_bytes=10)


def test_the_home_folder_is_that_of_the_user_and_an_unknown_user_is_a_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/a b") == tmp_path / "a b" and user_path("a/~") == pathlib.Path("a/~")
    assert user_path("~no-such-user/a") == pathlib.Path("~no-such-user/a")
    options = vars(parse(["train", "--out=~/runs", "--data", "~no-such-user/text"]))
    assert options["TrainConfig.out"] == f"{tmp_path}/runs" and options["DataConfig.data"] == "~no-such-user/text"

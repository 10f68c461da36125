"""Caches: an entry proves its content, the size is bounded, and nothing else is touched."""

import os
import pathlib
import subprocess
import sys
import threading
import time

import pytest

from zero_jax.core.files import user_cache
from zero_jax.core.files.user_cache import evict_oldest, has_mark, in_use, read_entry, write_entry

MARK = b"test entry 1\n"


def is_own(path):
    return has_mark(path / "mark" if path.is_dir() else path, MARK)


def file_entry(folder, name, *, age, num_bytes=100_000):
    write_entry(folder / name, os.urandom(num_bytes), mark=MARK)
    os.utime(folder / name, (time.time() - age,) * 2)
    return folder / name


def folder_entry(folder, name, *, age, num_bytes=100_000):
    write_entry(folder / name / "mark", os.urandom(num_bytes), mark=MARK)
    os.utime(folder / name, (time.time() - age,) * 2)
    return folder / name


def test_an_entry_proves_its_content(tmp_path):
    path = tmp_path / "a.program"
    write_entry(path, b"content", mark=MARK)
    assert read_entry(path, mark=MARK) == b"content"
    whole = path.read_bytes()
    other = tmp_path / "b.program"
    for name, damaged in {"cut": whole[:-1], "changed": whole[:-1] + b"x", "short": MARK + b"1"}.items():
        path.write_bytes(damaged)
        assert read_entry(path, mark=MARK) is None, name
        assert not path.exists(), name
    other.write_bytes(whole)  # a good entry under another's name
    assert read_entry(other, mark=MARK) is None and not other.exists()
    path.write_bytes(b"test entry 2\n" + whole[len(MARK) :])  # of another version: unknown, and left for that one
    assert read_entry(path, mark=MARK) is None and path.exists()
    assert read_entry(tmp_path, mark=MARK) is None


def test_a_pipe_and_a_link_are_no_entries_and_are_not_waited_for(tmp_path):
    entry, pipe, link = file_entry(tmp_path, "entry", age=0), tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(entry)
    for path in (pipe, link):
        assert read_entry(path, mark=MARK) is None and not is_own(path)
        assert os.path.lexists(path)
    with in_use(pipe):
        pass


def test_the_oldest_go_first_and_strangers_stay(tmp_path):
    old, new = file_entry(tmp_path, "old", age=300), folder_entry(tmp_path, "new", age=10)
    middle, kept = folder_entry(tmp_path, "middle", age=200), file_entry(tmp_path, "kept", age=900)
    (tmp_path / "thesis.tex").write_bytes(os.urandom(500_000))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "mark").write_bytes(b"their own")
    (tmp_path / "link").symlink_to(kept)
    assert evict_oldest(tmp_path, is_own=is_own, max_bytes=10**9) == []
    assert evict_oldest(tmp_path, is_own=is_own, max_bytes=250_000, keep=kept) == [old, middle]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "link", "new", "photos", "thesis.tex"]
    assert evict_oldest(tmp_path, is_own=is_own, max_bytes=0, keep=kept) == [new]
    assert kept.exists() and (tmp_path / "photos" / "mark").exists()
    assert evict_oldest(tmp_path / "none", is_own=is_own) == []


def test_a_read_counts_as_use(tmp_path):
    one, two = file_entry(tmp_path, "one", age=300), file_entry(tmp_path, "two", age=200)
    assert read_entry(one, mark=MARK)
    assert evict_oldest(tmp_path, is_own=is_own, max_bytes=150_000) == [two]


def test_entries_in_use_stay(tmp_path):
    entry = folder_entry(tmp_path, "entry", age=300)
    with in_use(entry), in_use(entry):
        assert evict_oldest(tmp_path, is_own=is_own, max_bytes=0) == []
    assert evict_oldest(tmp_path, is_own=is_own, max_bytes=0) == [entry]
    with pytest.raises(FileNotFoundError), in_use(entry):
        pass


def test_an_entry_in_use_by_another_process_stays(tmp_path):
    entry = folder_entry(tmp_path, "entry", age=300)
    program = (
        "import pathlib, sys\nfrom zero_jax.core.files.user_cache import in_use\n"
        "with in_use(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    # The module alone: zero_jax takes seconds to import.
    program = program.replace(
        "from zero_jax.core.files.user_cache import in_use", f"exec(open({user_cache.__file__!r}).read())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(entry)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout and process.stdout.readline() == b"held\n"
    assert evict_oldest(tmp_path, is_own=is_own, max_bytes=0) == []
    process.communicate(timeout=60)
    assert evict_oldest(tmp_path, is_own=is_own, max_bytes=0) == [entry]


def test_several_evict_and_write_at_once(tmp_path):
    failures = []

    def work(index):
        try:
            for count in range(30):
                name, content = tmp_path / f"{count % 9}", os.urandom(20_000)
                write_entry(name, content, mark=MARK)
                evict_oldest(tmp_path, is_own=is_own, max_bytes=100_000, keep=name)
                assert len(read_entry(name, mark=MARK) or content) == 20_000
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    evict_oldest(tmp_path, is_own=is_own, max_bytes=100_000)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 100_000


def test_what_is_left_half_done_goes_with_time(tmp_path):
    old, new = tmp_path / f"{user_cache.PARTIAL}old", tmp_path / f"{user_cache.PARTIAL}new"
    written = tmp_path / f"{user_cache.PARTIAL}written"  # as after the clock was set forward
    for path in (old, new, written):
        path.write_bytes(b"half")
    two_days_ago = time.time() - 2 * 24 * 3600
    (tmp_path / f"{user_cache._DISCARDED}1").mkdir()
    with in_use(written):
        for path in (old, written):
            os.utime(path, (two_days_ago, two_days_ago))
        evict_oldest(tmp_path, is_own=is_own)
    assert {*tmp_path.iterdir()} == {new, written}


def test_without_a_home_folder(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(pathlib.Path, "home", home)
    with pytest.raises(ValueError, match=r"no folder for the cache of tokens .*: set HOME or XDG_CACHE_HOME"):
        user_cache.cache_folder("tokens")

"""Tokens that are not what was written: noticed before anything is trained on them, wherever the damage is."""

import gc
import json
import os
import re
import shutil

import numpy as np
import pytest
from test_data import STREAM, in_order, load, write_text, write_token_folder  # noqa: F401

from zero_jax.core.files.untrusted import json_checksum
from zero_jax.data.tokenizer import ByteTokenizer
from zero_jax.data.tokens import cache as token_cache
from zero_jax.data.tokens.store import CHUNK_BYTES, Chunk, TokenFile, make_tokens, open_folder


def flip(path, place):
    """Changes one bit; size and time of change stay what they were."""
    status, raw = path.stat(), bytearray(path.read_bytes())
    raw[place] ^= 0x10
    path.write_bytes(raw)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


FILES = ["tokens.bin", "documents.npy", "hashes.npy", "sums.npy", "meta.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_in_a_cache_is_told_and_the_cache_made_anew(name, load, tmp_path):  # noqa: F811
    source = tmp_path / "text"
    source.mkdir()
    first = load(write_text(source))
    expected = in_order(first)
    (folder,) = (tmp_path / "cache").iterdir()
    size = (folder / name).stat().st_size
    for place in range(0, size, max(1, size // 40)):
        flip(folder / name, place)
        lines = []
        again = load(source, log=lines.append)
        assert "making it anew" in lines[0] and str(folder) in lines[0], place
        assert again.fingerprint == first.fingerprint and in_order(again) == expected
        assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_in_a_token_folder_is_an_error(name, load, tmp_path):  # noqa: F811
    """It is the user's own, and there may be no text to make it of."""
    folder = write_token_folder(tmp_path)
    whole = (folder / name).read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 40)):
        flip(folder / name, place)
        with pytest.raises(ValueError, match=r"(write the folder again|there is no|holds no text|another --val)"):
            load(folder)
        assert set(os.listdir(folder)) == set(FILES)
        (folder / name).write_bytes(whole)
    assert in_order(load(folder)) == STREAM


def test_a_large_file_is_checked_as_it_is_read_and_given_up_for_the_next_run(load, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(token_cache, "_AT_ONCE_BYTES", 0)
    text = tmp_path / "x.txt"
    text.write_text("abcdefg " * 40_000)
    first = load(text)
    (tokens,) = (tmp_path / "cache").glob("*/tokens.bin")
    whole = tokens.read_bytes()
    assert len(whole) > 4 * CHUNK_BYTES
    flip(tokens, 2 * CHUNK_BYTES + 17)
    again = load(text)
    np.testing.assert_equal(*(x.train.cut_rows(np.array([0]), seq_len=1000) for x in (again, first)))
    with pytest.raises(ValueError, match=r"tokens.bin is damaged: bytes 131,072 to 196,608 .*run again.*made anew"):
        again.train.cut_rows(np.array([CHUNK_BYTES // 8]), seq_len=8)  # of two bytes each
    lines = []
    assert load(text, log=lines.append).fingerprint == first.fingerprint
    assert "making it anew" in lines[0] and tokens.read_bytes() == whole


def test_a_token_file_that_stays_in_its_place_is_checked_too(load, tmp_path):  # noqa: F811
    path = tmp_path / "a.bin"
    path.write_bytes(np.array(STREAM, "<u2").tobytes())
    first = load(path)
    assert load(path).fingerprint == first.fingerprint
    flip(path, 20)
    lines = []
    assert load(path, log=lines.append).fingerprint != first.fingerprint  # which a run that is resumed does not take
    assert "a.bin is damaged" in lines[0] and "changed on purpose" in lines[0]


def test_a_process_that_is_late_does_not_remove_what_another_has_made_anew(load, tmp_path):  # noqa: F811
    text = tmp_path / "x.txt"
    text.write_text("a" * 100)
    load(text)
    (folder,) = (tmp_path / "cache").iterdir()
    damaged = folder.stat()
    shutil.copytree(folder, tmp_path / "new")
    shutil.rmtree(folder)
    (tmp_path / "spare").mkdir()  # takes the number of the file that is gone
    shutil.move(tmp_path / "new", folder)
    if folder.stat().st_ino != damaged.st_ino:
        token_cache._remove(folder, damaged)
        assert open_folder(folder).tokens.size == 101
    token_cache._remove(folder, folder.stat())
    assert not folder.exists()


def test_tokens_of_any_byte_order_come_out_of_the_cache_as_they_went_in(load, tmp_path):  # noqa: F811
    np.save(tmp_path / "a.npy", np.array(STREAM, ">u2"))
    for _ in range(2):
        assert in_order(load(tmp_path / "a.npy")) == STREAM


def test_sums_do_not_depend_on_the_pieces(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 256, 3 * CHUNK_BYTES // 2 + 5)
    sums = []
    for size in (7_001, CHUNK_BYTES // 2, len(tokens)):
        starts = range(0, len(tokens), size)
        chunks = [Chunk(tokens=tokens[i : i + size], document_hash=1 if i == starts[-1] else None) for i in starts]
        made = make_tokens(chunks, "x", ByteTokenizer(), folder=tmp_path / str(size)).tokens
        assert isinstance(made, TokenFile) and made.checksums is not None
        made.verify()
        np.testing.assert_array_equal(made.read([(0, len(tokens))]), tokens)
        sums.append(made.checksums.tolist())
    assert sums[0] == sums[1] == sums[2] and len(sums[0]) == 4


@pytest.mark.slow
def test_the_cache_has_a_bound_and_what_is_in_use_stays(load, tmp_path, monkeypatch):  # noqa: F811
    """Of three sources, with room for none: the one that is open stays, the one that nobody reads goes."""
    cache, foreign = tmp_path / "cache", tmp_path / "cache" / "notes-0123456789abcdef"
    monkeypatch.setattr(token_cache, "MAX_BYTES", 0)
    sources = []
    for name in ("one", "two", "three"):
        sources.append(tmp_path / name)
        sources[-1].mkdir()
        write_text(sources[-1])
    opened = load(sources[0])
    foreign.mkdir()
    (foreign / "notes.txt").write_text("not a cache's")
    load(sources[1])
    gc.collect()
    load(sources[2])
    assert sorted(path.name.split("-")[0] for path in cache.iterdir()) == ["notes", "one", "three"]
    assert len(in_order(opened))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": 1}, "meta.json is of version 1, not 2"),
        ({"sums": []}, "[] is not an object"),
        ({"sums": {"/dev/zero": 1}}, "it lacks 'documents.npy'"),
        ({"num_documents": "x"}, "'x' is not a whole number"),
        ({"vocab_size": None}, "None is not a whole number"),
        ({"tokens_start_bytes": -8}, "-8 is not a whole number"),
        ({"dtype": "O"}, "has tokens of object, no integers"),
        ({"dtype": "(" * 3000}, "cannot read the token folder"),
        ({"tokens_file": 3}, "3 is not a text"),
    ],
)
def test_a_record_that_somebody_else_wrote_is_an_error(fields, message, load, tmp_path):  # noqa: F811
    folder = write_token_folder(tmp_path)
    record = json.loads((folder / "meta.json").read_text()) | fields
    record["sum"] = json_checksum({name: value for name, value in record.items() if name != "sum"})
    (folder / "meta.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=re.escape(message)):
        load(folder)


def test_what_is_no_array_is_an_error_where_it_is_called_one(load, tmp_path):  # noqa: F811
    np.savez(tmp_path / "a.npz", np.array(STREAM))
    (tmp_path / "a.npz").rename(tmp_path / "a.npy")
    with pytest.raises(ValueError, match=r"a\.npy is no array of numpy \(the magic string is not correct"):
        load(tmp_path / "a.npy")
    header = b"{'descr': '<u2', 'fortran_order': False, 'shape': (1000000000000,), }\n"
    (tmp_path / "b.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(ValueError, match=r"b\.npy is no array of numpy"):
        load(tmp_path / "b.npy")
    folder = write_token_folder(tmp_path)
    (folder / "hashes.npy").unlink()
    os.mkfifo(folder / "hashes.npy")
    with pytest.raises(ValueError, match="it is a named pipe, not a file"):
        load(folder)

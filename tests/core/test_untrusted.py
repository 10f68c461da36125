"""Files that others wrote are read up to a limit, with memory for what they hold."""

import json
import pathlib
import tracemalloc

import numpy as np
import pytest
from etils import epath

import zero_jax as zero
from zero_jax.checkpoint import describe
from zero_jax.checkpoint.record import SavedLeaf, record_to_json
from zero_jax.cli.commands import main, parse
from zero_jax.core.files.safetensors import Tensor, create, read_header
from zero_jax.core.files.untrusted import read_file, user_path
from zero_jax.data import DataConfig, load_dataset
from zero_jax.trainer.reporting.console import Console


def test_memory_is_that_of_the_file_and_not_of_the_limit(tmp_path):
    path = epath.Path(tmp_path / "small")
    path.write_bytes(b"x" * 1000)
    tracemalloc.start()
    try:
        assert read_file(path, limit_bytes=1 << 28) == b"x" * 1000
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "a.npy", "a.bin", "tokenizer.json", "a.safetensors"])
def test_a_pointer_of_git_lfs_is_named_as_one(name, tmp_path):
    """As a clone without Git LFS has in the place of large files: of text and tokens it would be the data."""
    path = tmp_path / name
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456\n")
    (tmp_path / "text").write_text("some words and more of them")
    with pytest.raises(ValueError, match=f"{name}.* pointers? of Git LFS.* `git lfs pull`"):
        if name == "a.safetensors":
            read_header(path)
        elif name == "tokenizer.json":
            load_dataset(DataConfig(data=str(tmp_path / "text"), tokenizer=str(path), token_cache=None), seq_len=4)
        else:
            load_dataset(DataConfig(data=str(path), token_cache=None), seq_len=4)


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


FOREIGN = "\x1b[2J\r\n\u202e" + "a" * 10**5
NAME = FOREIGN[:100]  # of a file


def _error(call, *args, **kwargs):
    with pytest.raises(ValueError) as error:
        call(*args, **kwargs)
    return str(error.value)


def _data(folder, **config):
    return _error(load_dataset, DataConfig(data=str(folder), token_cache=None, **config), seq_len=4)


def _field_of_a_line(folder):
    (folder / "a.jsonl").write_text(json.dumps({FOREIGN: "x"}))
    return _data(folder / "a.jsonl")


def _name_of_a_file(folder):
    (folder / f"{NAME}.jsonl").write_text("[]")
    return _data(folder)


def _names_of_formats(folder):
    (folder / f"{NAME}.jsonl").write_text("{}")
    (folder / f"{NAME}.txt").write_text("text")
    return _data(folder)


def _field_of_a_message(folder):
    (folder / "a.jsonl").write_text(json.dumps({"messages": [{"role": "assistant", "content": "x", FOREIGN: FOREIGN}]}))
    return _data(folder / "a.jsonl", format="chat")


def _role_of_a_message(folder):
    (folder / "a.jsonl").write_text(json.dumps({"messages": [{"role": FOREIGN}]}))
    return _data(folder / "a.jsonl", format="chat")


def _tensor(folder):
    create(folder / "model.safetensors", [Tensor(name=FOREIGN, dtype="float32", shape=(1,))], metadata={})
    raw = (folder / "model.safetensors").read_bytes().replace(b"[1]", b"[2]")
    (folder / "model.safetensors").write_bytes(raw)
    return _error(zero.pretrained.load_tensors, folder, {}, {}, mesh=zero.make_mesh(), config=zero.ZeroConfig())


def _checkpoint(folder, leaf):
    record = record_to_json(
        step=1, loss=None, leaves={FOREIGN: leaf}, classes={FOREIGN: FOREIGN}, extra={FOREIGN: {FOREIGN: FOREIGN}}
    )
    (folder / "step_00000001" / "record").mkdir(parents=True)
    (folder / "step_00000001" / "record" / "metadata").write_bytes(record)


def _leaf_of_a_checkpoint(folder):
    leaf = SavedLeaf(shape=(), dtype="float32", stored_shape=(), stored_dtype="float32", fingerprint=0)
    _checkpoint(folder, leaf)
    return str(describe(folder))


def _wrong_leaf_of_a_checkpoint(folder):
    leaf = SavedLeaf(shape=(), dtype=FOREIGN, stored_shape=(), stored_dtype="x", fingerprint=0)
    _checkpoint(folder, leaf)
    return _error(describe, folder)


def _key_of_a_config(folder):
    (folder / "c.toml").write_text(f"[run]\n{json.dumps(FOREIGN[:5000])} = 1\n")
    return ["train", "--config", str(folder / "c.toml")]


def _key_of_deepspeed(folder):
    (folder / "c.json").write_text(json.dumps({FOREIGN: FOREIGN, "fp16": {FOREIGN: [FOREIGN]}}))
    return ["from-deepspeed", str(folder / "c.json")]


def _line_of_a_run(folder):
    lines = []
    Console(1, 1, log=lines.append).line(f"a sample: {FOREIGN[:100]}")
    return "".join(lines).replace("\n", r"\n")


def _page(folder):
    return zero.summary({"params": {FOREIGN: np.ones(3)}}).to_html()


PLACES = [
    _field_of_a_line, _name_of_a_file, _names_of_formats, _field_of_a_message, _role_of_a_message, _tensor,
    _leaf_of_a_checkpoint, _wrong_leaf_of_a_checkpoint, _key_of_a_config, _key_of_deepspeed, _line_of_a_run, _page,
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_foreign_names_are_shown_without_what_moves_a_cursor(place, tmp_path, capsys):
    shown = place(tmp_path)
    if isinstance(shown, list):  # a command
        try:
            main(shown)
        except SystemExit as error:
            assert error.code == 2
        shown = "".join(capsys.readouterr())
    assert all(c.isprintable() or c == "\n" for c in shown)
    assert r"\x1b[2J\r\n\u202e" in shown.replace(r"\\", "\\") and "a" * 3000 not in shown

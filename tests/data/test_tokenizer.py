"""Text becomes tokens and comes back, with bytes, with any JSON file, and with what is trained here."""

import json
import pathlib

import numpy as np
import pytest

from zero_jax.cli import build_parser
from zero_jax.data import dataset as data
from zero_jax.data.documents import read_text
from zero_jax.data.sources import find_source
from zero_jax.data.tokenizer import ByteTokenizer, load_tokenizer, train_bpe

STRANGE = "def f(x):\r\n\treturn 'ü€😀'\n\n\n  \u0000<|endoftext|> \ufffd 漢字 don't  "


@pytest.fixture
def bpe(tmp_path):
    return train_bpe(["hello world, hello words\n"] * 50, vocab_size=300, path=tmp_path / "bpe.json")


def test_bytes_survive_a_round_trip():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(STRANGE)) == STRANGE
    assert tokenizer.encode(STRANGE).max() < tokenizer.vocab_size
    assert tokenizer.decode(np.array([0x64, 0xFF])) == "d\ufffd"


def test_a_trained_tokenizer_takes_any_text_and_shortens_its_own(bpe):
    assert bpe.decode(bpe.encode(STRANGE)) == STRANGE
    assert bpe.end_of_document not in bpe.encode(STRANGE), "text that looks like a special token is text"
    assert len(bpe.encode("hello world, hello words\n")) <= 8
    assert bpe.vocab_size <= 300
    assert [one.tolist() for one in bpe.encode_all(["hello", "x"])] == [
        bpe.encode("hello").tolist(),
        bpe.encode("x").tolist(),
    ]
    assert bpe.encode("").size == 0
    assert bpe.decode(np.array([bpe.end_of_document])) == "<|endoftext|>"


def test_tokenizing_a_long_document_in_pieces_changes_nothing(bpe, tmp_path):
    text = "".join(f"hello world{i % 7}, hello\n\n  words ({i}).\n" for i in range(6_000))
    (tmp_path / "x.txt").write_text(text)
    assert len(list(read_text(find_source(str(tmp_path / "x.txt"))))) > 2
    config = data.DataConfig(data=str(tmp_path / "x.txt"), tokenizer=str(tmp_path / "bpe.json"), token_cache=None)
    dataset = data.load_dataset(config, seq_len=8)
    whole = [*bpe.encode(text).tolist(), bpe.end_of_document]
    parts = (dataset.train, dataset.validation)
    assert [x for part in parts for x in part.cut_rows(np.array([0]), seq_len=part.size)["inputs"][0].tolist()] == whole


def test_training_is_deterministic_and_fingerprints_tell_tokenizers_apart(bpe, tmp_path):
    again = train_bpe(["hello world, hello words\n"] * 50, vocab_size=300, path=tmp_path / "again.json")
    other = train_bpe(["something else\n"] * 50, vocab_size=300, path=tmp_path / "other.json")
    assert again.fingerprint == bpe.fingerprint
    assert other.fingerprint != bpe.fingerprint
    assert load_tokenizer(tmp_path / "bpe.json") == bpe


def test_what_a_file_says_of_truncation_and_padding_does_not_cut_text(bpe, tmp_path):
    path = tmp_path / "cuts.json"
    content = json.loads((tmp_path / "bpe.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(content))
    assert load_tokenizer(path).encode(STRANGE).tolist() == bpe.encode(STRANGE).tolist()


def test_the_end_of_a_document_is_the_first_known_token(bpe, tmp_path):
    content = json.loads((tmp_path / "bpe.json").read_text())
    content["added_tokens"][0]["content"] = "</s>"
    content["model"]["vocab"]["</s>"] = content["model"]["vocab"].pop("<|endoftext|>")
    (tmp_path / "llama.json").write_text(json.dumps(content))
    assert load_tokenizer(tmp_path / "llama.json").end_of_document == bpe.end_of_document
    content["added_tokens"] = []
    content["model"]["vocab"]["<other>"] = content["model"]["vocab"].pop("</s>")
    (tmp_path / "none.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"none.json has no token that ends a document .*zero-jax tokenize"):
        load_tokenizer(tmp_path / "none.json")


def test_errors_name_the_file(bpe, tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the tokenizer nope.json .*'bytes'"):
        load_tokenizer("nope.json")
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no.json is no tokenizer of the tokenizers library"):
        load_tokenizer(tmp_path / "no.json")
    with pytest.raises(ValueError, match="vocab_size=256: give at least 257"):
        train_bpe(["x"], vocab_size=256, path=tmp_path / "x.json")
    with pytest.raises(ValueError, match=r"bpe.json exists already"):
        train_bpe(["x"], vocab_size=300, path=tmp_path / "bpe.json")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot write"):
        train_bpe(["x"], vocab_size=300, path=tmp_path / "file" / "x.json")


def test_a_vocabulary_that_the_disk_does_not_take_leaves_nothing(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_text", full)
    with pytest.raises(ValueError, match=r"cannot write .*x.json: No space left on device .the disk is full"):
        train_bpe(["x"], vocab_size=300, path=tmp_path / "x.json")
    assert not list(tmp_path.iterdir())


def _regex(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _twice(times):
    twice = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    return {"type": "Sequence", "normalizers": [twice] * times}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": {"type": "WordLevel", "vocab": {"</s>": 0, "a": 2**32 - 1}, "unk_token": "a"}}, "4,294,967,295"),
        ({"normalizer": _twice(40)}, "may make text more than 1,000 times longer"),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 2000}}, "may make text more than 1,000 times longer"),
        ({"pre_tokenizer": _regex("(a+)+$")}, "the tokenizer t.json cannot encode or decode this .Onig: Regex search"),
        ({"normalizer": None}, "has a lone surrogate|cannot encode or decode this"),
    ],
)
def test_what_a_file_may_do_to_a_text_has_bounds(fields, message, tmp_path):
    pytest.importorskip("tokenizers")
    model = {"type": "WordLevel", "vocab": {"</s>": 0, "a": 1}, "unk_token": "a"}
    content = {"version": "1.0", "added_tokens": [], "model": model} | fields
    (tmp_path / "t.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path / "t.json").encode("a" * 40 + ("\ud800" if None in fields.values() else "b"))
    with pytest.raises(ValueError, match="the text has a lone surrogate, which is no character: replace it"):
        load_tokenizer("bytes").encode("\ud800")


def test_text_that_cannot_be_read_ends_the_training(tmp_path):
    def texts():
        yield "some"
        raise ValueError("line 2 of x.jsonl is no JSON")

    with pytest.raises(ValueError, match="line 2"):
        train_bpe(texts(), vocab_size=300, path=tmp_path / "x.json")
    assert not list(tmp_path.iterdir())


def run(arguments, capsys):
    """Returns the exit status of the command, and what it printed."""
    try:
        options = build_parser().parse_args(["tokenize", *map(str, arguments)])
        status = options.run(options)
    except SystemExit as error:
        status = error.code
    printed = capsys.readouterr()
    return status, printed.out, printed.err


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"body": f"hello number {i}, hello again"}) for i in range(40)]
    path.write_text("\n".join(lines))
    return path


def test_the_command_trains_writes_tokens_and_says_what_is_next(corpus, tmp_path, capsys):
    made = ["--out", tmp_path / "t.json", "--tokens", tmp_path / "folder"]
    status, out, _ = run(["--data", corpus, "--text-field", "body", "--vocab-size", 290, *made], capsys)
    assert status == 0
    assert f"next       zero-jax train --data {tmp_path / 'folder'} --vocab-size" in out
    assert "1 token a byte before, 0." in out
    dataset = data.load_dataset(data.DataConfig(data=str(tmp_path / "folder"), token_cache=None), seq_len=4)
    assert dataset.num_documents == 40
    assert dataset.tokenizer == load_tokenizer(tmp_path / "t.json")
    direct = {"data": str(corpus), "text_field": "body", "tokenizer": str(tmp_path / "t.json"), "token_cache": None}
    assert data.load_dataset(data.DataConfig(**direct), seq_len=4).fingerprint == dataset.fingerprint


def test_the_command_prints_json_and_takes_a_tokenizer_that_is_there(corpus, tmp_path, capsys):
    status, out, _ = run(["--data", corpus, "--text-field", "body", "--tokens", tmp_path / "f", "--json"], capsys)
    record = json.loads(out)
    assert status == 0
    assert (record["tokenizer"], record["vocab_size"], record["tokens_per_byte"]) == ("bytes", 256, 1.0)
    assert record["num_tokens"] == sum(len(f"hello number {i}, hello again") + 1 for i in range(40))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to make: give --vocab-size N"),
        (["--out", "x.json", "--tokens", "f"], "--out x.json is for a tokenizer that is trained"),
        (["--vocab-size", "300", "--tokenizer", "x.json"], "give one of them"),
        (["--vocab-size", "300"], "line 1 of"),
        (["--vocab-size", "300", "--text-field", "body", "--out", "OLD"], "exists already"),
        (["--text-field", "body", "--tokens", "OLD"], "exists already: give another --tokens FOLDER"),
        (["--text-field", "body", "--tokens", "OLD/x"], "cannot write"),
        (["--vocab", "300"], "did you mean --vocab-size?"),
    ],
)
def test_the_command_refuses_readably(arguments, message, corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "OLD").touch()
    status, out, err = run(["--data", corpus, *arguments], capsys)
    assert status == 2
    assert not out
    assert message in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["OLD", "corpus.jsonl"]

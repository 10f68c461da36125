"""Documents in, the same tokens and the same split out, whatever they came as."""

import dataclasses
import gzip
import json
import os
import pathlib
import sys

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from zero_jax.core.files.user_cache import PARTIAL
from zero_jax.data import dataset as data
from zero_jax.data import sources
from zero_jax.data.documents import read_text
from zero_jax.data.sources import find_source, source_file
from zero_jax.data.tokenizer import ByteTokenizer, train_bpe
from zero_jax.data.tokens import cache as token_cache
from zero_jax.data.tokens import chunks as token_chunks
from zero_jax.data.tokens.store import Chunk, TokenFile, make_tokens, open_folder, open_tokens

DOCUMENTS = ["first text\n", "zweiter Text: ü€😀", "a third,\n\nlonger one " * 3, "x"]
ENDED = [[*document.encode(), 0] for document in DOCUMENTS]
STREAM = [token for document in ENDED for token in document]


@pytest.fixture
def load(tmp_path):
    """Loads with a cache of the test's own."""

    def load(path, seq_len=1, log=lambda line: None, own_tokenizer=None, **changes):
        config = data.DataConfig(**{"data": str(path), "token_cache": str(tmp_path / "cache"), **changes})
        return data.load_dataset(config, seq_len=seq_len, log=log, tokenizer=own_tokenizer)

    return load


def tokens_of(part):
    """Returns the tokens of a part, which are one row of that length."""
    return part.cut_rows(np.array([0]), seq_len=part.size)["inputs"][0]


def in_order(dataset):
    """Returns the tokens of both parts in the order of the files."""
    documents = {}
    for part in (dataset.train, dataset.validation):
        for start, first, last in zip(part.starts, part.offsets[:-1], part.offsets[1:], strict=True):
            documents[int(start)] = tokens_of(part)[first:last].tolist()
    return [token for start in sorted(documents) for token in documents[start]]


def write_text(folder, **how):
    folder.mkdir(exist_ok=True, **how)
    for index, text in enumerate(DOCUMENTS):
        (folder / f"{index}.txt").write_text(text, encoding="utf-8")
    return folder


def write_json_lines(folder):
    lines = [json.dumps({"id": 1, "text": text}, ensure_ascii=False) for text in DOCUMENTS]
    (folder / "a.jsonl").write_text("\n".join(lines[:2]) + "\n\n", encoding="utf-8")
    with gzip.open(folder / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("\ufeff" + "\n".join(lines[2:]))
    return folder


def write_parquet(folder):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": DOCUMENTS, "id": [1, 2, 3, 4]}), folder / "a.parquet")
    return folder / "a.parquet"


def write_npy(folder):
    np.save(folder / "a.npy", np.array(STREAM, np.int64))
    return folder / "a.npy"


def write_raw(folder):
    (folder / "a.bin").write_bytes(np.array(STREAM, "<u2").tobytes())
    return folder / "a.bin"


def write_raw_with_offsets(folder):
    # Nothing between the documents but the file beside it that says where they begin.
    offsets = np.cumsum([0, *map(len, ENDED[:-1])])
    np.save(folder / "a.documents.npy", offsets)
    return write_raw(folder)


def write_raw_shards(folder):
    for name, documents in (("a.bin", ENDED[:2]), ("b.bin", ENDED[2:])):
        (folder / name).write_bytes(np.array([t for d in documents for t in d], "<u2").tobytes())
    return folder


def write_array_record(folder, name="a.arrayrecord"):
    writer = ArrayRecordWriter(str(folder / name), "group_size:1")
    for index, document in enumerate(ENDED):
        # Whether a record has the end itself makes no difference.
        writer.write(np.array(document[: len(document) - index % 2], "<u2").tobytes())
    writer.close()
    return folder


def write_token_folder(folder):
    chunks = [Chunk(tokens=np.array(tokens), document_hash=i) for i, tokens in enumerate(ENDED)]
    make_tokens(chunks, "test", ByteTokenizer(), folder=folder / "tokens")
    return folder / "tokens"


FORMATS = [
    write_text,
    write_json_lines,
    write_parquet,
    write_npy,
    write_raw,
    write_raw_with_offsets,
    write_raw_shards,
    write_array_record,
    write_token_folder,
]


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("write", FORMATS)
def test_every_format_gives_the_same_tokens(write, cached, load, tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    path = write(folder)
    changes = {"validation_fraction": 0.4} | ({} if cached else {"token_cache": None})
    for _ in range(2):  # the second time from the cache
        dataset = load(path, **changes)
        assert in_order(dataset) == STREAM
        assert dataset.num_documents == 4
        assert len(dataset.train.starts) + len(dataset.validation.starts) == 4
    assert isinstance(dataset.train.tokens, TokenFile) == (cached or write in (write_token_folder,))


@pytest.mark.parametrize(("dtype", "start_bytes"), [("<u2", 0), (">u4", 6), ("u1", 3)])
def test_tokens_are_read_from_their_file_at_any_places(dtype, start_bytes, tmp_path):
    path, vector = tmp_path / "tokens.bin", np.arange(100, 200).astype(dtype)
    path.write_bytes(b"\0" * start_bytes + vector.tobytes())
    tokens = open_tokens(source_file(path), dtype=np.dtype(dtype), start_bytes=start_bytes)
    tokens.verify()  # it has no checksums
    assert (len(tokens), tokens.size) == (100, 100)
    for runs in ([], [(0, 0)], [(7, 8)], [(99, 100), (0, 2), (1, 1), (50, 52), (49, 50)]):
        expected = [vector[:0], *(vector[first:last] for first, last in runs)]
        np.testing.assert_array_equal(tokens.read(runs), np.concatenate(expected))


def test_a_file_that_is_cut_while_it_is_read_is_told_with_offset_and_sizes(load, tmp_path, monkeypatch):
    path = write_raw(tmp_path)
    dataset = load(path, validation_fraction=0.4)
    monkeypatch.setattr(sources.SourceFile, "check", lambda self: os.truncate(path, 5))  # right after the look at it
    with pytest.raises(
        ValueError, match=r"a.bin was cut .*: \d+ bytes are missing at offset 72; it has 5 bytes now and had 204"
    ):
        tokens_of(dataset.train)


@pytest.mark.parametrize("block_tokens", [1, 5, 1000])
def test_token_files_are_read_in_blocks_and_the_last_document_needs_no_end(block_tokens, load, tmp_path, monkeypatch):
    whole = load(write_raw(tmp_path), validation_fraction=0.4)
    monkeypatch.setattr(token_chunks, "_BLOCK_TOKENS", block_tokens)
    np.save(tmp_path / "b.npy", np.array(STREAM[:-1], np.uint8))
    dataset = load(tmp_path / "b.npy", validation_fraction=0.4)
    assert dataset.num_documents == 4
    assert in_order(dataset) == STREAM[:-1]
    assert dataset.validation.starts.tolist() == whole.validation.starts.tolist()


def test_text_formats_split_alike_and_token_formats_too(load, tmp_path):
    prints = {}
    for write in FORMATS[:-1]:
        folder = tmp_path / write.__name__
        folder.mkdir()
        prints[write.__name__] = load(write(folder), validation_fraction=0.4).fingerprint
    text = {prints[write.__name__] for write in FORMATS[:3]}
    tokens = {prints[write.__name__] for write in FORMATS[3:-1]}
    assert len(text) == len(tokens) == 1


@pytest.mark.slow
def test_standard_library_has_megabytes_of_python(load):
    dataset = load("stdlib", seq_len=128)
    assert dataset.train.size > 2_000_000
    assert 0.08 < dataset.validation.size / (dataset.train.size + dataset.validation.size) < 0.1001
    for part in (dataset.train, dataset.validation):
        assert "def __init__(self" in dataset.tokenizer.decode(tokens_of(part))
    assert "documents" in str(dataset)


def write_many(folder, sizes):
    """Makes files of the given numbers of characters, each of its own letter."""
    for index, size in enumerate(sizes):
        path = folder / f"part{index % 3}" / f"file{index}.txt"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(chr(ord("a") + index) * size)
    return folder


def letters(dataset):
    return [set(dataset.tokenizer.decode(tokens_of(part))) - {"\0"} for part in (dataset.train, dataset.validation)]


def test_documents_are_on_one_side_and_the_share_is_kept(load, tmp_path):
    dataset = load(write_many(tmp_path / "x", [100] * 20), validation_fraction=0.2)
    train, validation = letters(dataset)
    assert train.isdisjoint(validation)
    assert len(train | validation) == 20
    assert len(validation) == 4


def test_the_split_depends_on_neither_names_nor_order_nor_tokenizer(load, tmp_path):
    texts = [chr(ord("a") + index) * (20 + 3 * index) for index in range(26)]
    made = {}
    for name, order in (("here", texts), ("there", texts[::-1])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in order))
        made[name] = load(tmp_path / f"{name}.jsonl", validation_fraction=0.4)
    assert letters(made["here"])[1] == letters(made["there"])[1]
    assert made["here"].fingerprint != made["there"].fingerprint  # the rows are others
    # A BPE that merges nothing: as many tokens, but other ones.
    train_bpe(["a b"], vocab_size=257, path=tmp_path / "bpe.json")
    other = load(tmp_path / "here.jsonl", validation_fraction=0.4, tokenizer=str(tmp_path / "bpe.json"))
    assert other.validation.starts.tolist() == made["here"].validation.starts.tolist()
    assert tokens_of(other.validation)[:20].tolist() != tokens_of(made["here"].validation)[:20].tolist()


def test_a_document_that_occurs_twice_is_on_one_side(load, tmp_path):
    texts = [chr(ord("a") + index % 13) * 30 for index in range(26)]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    for fraction in (0.1, 0.25, 0.37, 0.5):
        train, validation = letters(load(tmp_path / "x.jsonl", validation_fraction=fraction))
        assert train.isdisjoint(validation)
        assert abs(len(validation) - 13 * fraction) < 1


def test_the_end_of_a_single_document_is_for_validation(load, tmp_path):
    (tmp_path / "text.txt").write_text("a" * 90 + "b" * 10)
    dataset = load(tmp_path / "text.txt")
    assert tokens_of(dataset.train).tolist() == [ord("a")] * 90 + [ord("b")]
    assert tokens_of(dataset.validation).tolist() == [ord("b")] * 9 + [0]


def test_of_documents_too_large_for_validation_the_longest_is_cut(load, tmp_path):
    dataset = load(write_many(tmp_path / "x", [100, 120]))
    assert (dataset.train.size, dataset.validation.size) == (200, 22)
    assert letters(dataset)[1] == {"b"}
    assert "longer than" not in str(dataset)


def test_a_small_part_for_validation_is_told(load, tmp_path):
    dataset = load(write_many(tmp_path / "x", [100, 120, 8]))
    assert dataset.validation.size < 22 / 2
    assert str(dataset).endswith("other documents are longer than the 23 tokens that are asked for to validate on")


def test_binary_empty_and_hidden_files_do_not_count(load, tmp_path):
    folder = tmp_path / "x"
    (folder / ".git").mkdir(parents=True)
    (folder / "image.bin").write_bytes(b"\x00\x01" * 100)
    (folder / "empty.txt").touch()
    (folder / ".hidden").write_text("no" * 100)
    (folder / ".git" / "config").write_text("no" * 100)
    (folder / "text.txt").write_bytes(b"\xef\xbb\xbfcaf\xe9 " + "\ufffd".encode() + b" caf\xe9" * 99)
    dataset = load(folder)
    assert dataset.num_documents == 1
    assert letters(dataset)[0] == set("caf\ufffd ")
    assert "2 empty, binary or other files left out" in str(dataset)
    assert "100 places that were no valid Unicode replaced" in str(dataset)


def test_empty_rows_are_told_and_lone_surrogates_replaced(load, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "some"}\n{"text": ""}\n{"text": "a\\ud800b"}\n')
    dataset = load(tmp_path / "x.jsonl", validation_fraction=0.5)
    assert dataset.num_documents == 2
    assert "1 empty documents left out; 1 places" in str(dataset)


def test_text_is_read_in_pieces_that_end_between_words(tmp_path):
    path = tmp_path / "x.txt"
    text = "".join(f"word{i} ü{i}\n" for i in range(30_000))
    path.write_text(text, encoding="utf-8")
    pieces = list(read_text(find_source(str(path))))
    assert len(pieces) > 3
    assert max(len(piece.text) for piece in pieces) < 140_000
    assert "".join(piece.text for piece in pieces) == text
    assert all(piece.text[-1].isalnum() for piece in pieces[:-1])
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]


@pytest.mark.parametrize("character", ["é", "€", "😀"])
def test_text_without_any_space_is_cut_between_characters(character, tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("a" + character * 150_000, encoding="utf-8")
    pieces = list(read_text(find_source(str(path))))
    assert "".join(piece.text for piece in pieces) == "a" + character * 150_000
    assert not any(piece.num_replaced for piece in pieces)
    assert len(pieces) > 1


def test_patterns_name_files(load, tmp_path):
    write_text(tmp_path)
    (tmp_path / "other.md").write_text("no")
    assert in_order(load(tmp_path / "*.txt", validation_fraction=0.4)) == STREAM


def test_the_cache_is_used_and_follows_the_files(load, tmp_path):
    def entries():
        return {path.stat().st_ino for path in (tmp_path / "cache").iterdir()}

    path = tmp_path / "x.txt"
    path.write_text("a" * 100)
    first = load(path)
    made = entries()
    assert load(path).fingerprint == first.fingerprint
    assert entries() == made
    path.write_text("b" * 100)
    assert tokens_of(load(path).train)[0] == ord("b")
    assert len(entries()) == 2


def test_the_cache_follows_the_offsets_beside_a_token_file(load, tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", np.arange(1, 101, dtype=np.uint16))
    counts = [load(tmp_path / "x.npy").num_documents]
    for offsets in ([0, 50], [0, 20, 40, 60, 80], [0]):
        np.save(tmp_path / "x.documents.npy", np.array(offsets))
        counts.append(load(tmp_path / "x.npy").num_documents)
    monkeypatch.chdir(tmp_path)  # from another folder they are the same files
    assert find_source("x.npy").fingerprint() == find_source(str(tmp_path / "x.npy")).fingerprint()
    (tmp_path / "x.documents.npy").unlink()
    assert [*counts, load(tmp_path / "x.npy").num_documents] == [1, 2, 5, 1, 1]


def test_linked_folders_are_read_once_each(load, tmp_path):
    write_text((tmp_path / "elsewhere" / ".hidden" / "corpus").absolute(), parents=True)
    (tmp_path / "x" / "a").mkdir(parents=True)
    (tmp_path / "x" / "texts").symlink_to(tmp_path / "elsewhere" / ".hidden" / "corpus")
    (tmp_path / "x" / "a" / "again").symlink_to(tmp_path / "x" / "texts")
    (tmp_path / "x" / "a" / "up").symlink_to(tmp_path / "x")
    assert in_order(load(tmp_path / "x", validation_fraction=0.4)) == STREAM


@pytest.mark.parametrize("pattern", ["", "*.txt"])
def test_a_link_to_nothing_is_named(pattern, load, tmp_path):
    (tmp_path / "x").mkdir()
    (write_text(tmp_path / "x") / "b.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"cannot read .*x/b.txt \(No such file or directory\): make it readable, or"):
        load(tmp_path / "x" / pattern)


def test_a_folder_that_cannot_be_listed_is_named_but_that_of_the_file_system(load, tmp_path, monkeypatch):
    (write_text(tmp_path) / "locked").mkdir()
    (tmp_path / "lost+found").mkdir()
    scan = os.scandir

    def locked(path):
        if pathlib.Path(path).name in ("locked", "lost+found"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", locked)
    with pytest.raises(ValueError, match=r"cannot read .*locked \(Permission denied\): make it readable, or move it"):
        load(tmp_path)
    (tmp_path / "locked").rmdir()
    assert in_order(load(tmp_path, validation_fraction=0.4)) == STREAM


def test_a_damaged_cache_is_made_anew(load, tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("a" * 100)
    first = load(path)
    (tokens,) = (tmp_path / "cache").glob("*/tokens.bin")
    tokens.write_bytes(tokens.read_bytes()[:-20])
    lines = []
    assert load(path, log=lines.append).fingerprint == first.fingerprint
    assert "cut off" in lines[0]
    assert not list((tmp_path / "cache").glob(".*"))


def test_what_a_killed_process_left_goes_a_day_later(load, tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("a" * 100)
    old, new = (tmp_path / "cache" / f"{PARTIAL}{name}" for name in ("old", "new"))
    for folder in (old, new):
        folder.mkdir(parents=True)
    written = tmp_path / "cache" / f"{PARTIAL}written"  # by a process that began days ago
    written.mkdir()
    (written / "tokens.bin").touch()
    for folder in (old, written):
        os.utime(folder, (0, 0))
    load(path)
    assert new.exists() and written.exists()
    assert not old.exists()


def test_how_far_it_is_is_told(load, tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache, "_LOG_SECONDS", -1)
    lines = []
    load(write_many(tmp_path / "x", [100, 100]), log=lines.append)
    assert "101 tokens of 0 MB of text" in lines[0]
    assert "202 tokens" in lines[1]


def test_where_there_is_no_cache_the_tokens_stay_in_memory(load, tmp_path):
    path, lines = tmp_path / "x.txt", []
    path.write_text("a" * 100)
    (tmp_path / "file").touch()
    dataset = load(path, token_cache=str(tmp_path / "file"), log=lines.append)
    assert dataset.train.size == 91
    assert "stay in memory" in lines[0]
    assert dataset.fingerprint == load(path).fingerprint == load(path, token_cache=None).fingerprint


def test_tokens_take_the_place_of_an_empty_folder(tmp_path):
    (tmp_path / "tokens").mkdir()
    chunks = [Chunk(tokens=np.arange(9), document_hash=1, num_text_bytes=9)]
    made = make_tokens(chunks, "x", ByteTokenizer(), folder=tmp_path / "tokens")
    assert made.tokens.size == 9 and not [*tmp_path.rglob(".*")]


def test_who_writes_the_same_folder_second_takes_the_first(tmp_path, load):
    folder = write_token_folder(tmp_path)
    before = (folder / "meta.json").stat().st_mtime_ns
    write_token_folder(tmp_path)
    assert (folder / "meta.json").stat().st_mtime_ns == before
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]
    assert open_folder(folder).offsets[-1] == len(STREAM)


def test_a_token_folder_of_release_0_2_0_is_read_and_written_alike(load, tmp_path):
    stored = pathlib.Path(__file__).parents[1] / "fixtures" / "tokens_0.2.0"
    assert in_order(load(stored, validation_fraction=0.4)) == STREAM
    written = write_token_folder(tmp_path)
    assert {p.name: p.read_bytes() for p in stored.iterdir()} == {p.name: p.read_bytes() for p in written.iterdir()}


def test_a_token_folder_brings_its_tokenizer(load, tmp_path):
    tokenizer = train_bpe(["some words and some others"] * 9, vocab_size=280, path=tmp_path / "bpe.json")
    (tmp_path / "x.txt").write_text("some words and some others " * 20)
    source = find_source(str(tmp_path / "x.txt"))
    chunks = token_chunks.source_chunks(source, tokenizer, text_field="text", token_dtype="uint16")
    make_tokens(chunks, "x", tokenizer, folder=tmp_path / "folder")
    dataset = load(tmp_path / "folder")
    assert dataset.tokenizer.fingerprint == tokenizer.fingerprint
    assert dataset.fingerprint == load(tmp_path / "x.txt", tokenizer=str(tmp_path / "bpe.json")).fingerprint
    assert dataset.tokenizer.decode(tokens_of(dataset.train)).startswith("some words and some others some")
    with pytest.raises(ValueError, match=r"was made with the tokenizer bpe.json .* leave out --tokenizer"):
        load(tmp_path / "folder", tokenizer="bytes")


class Words:
    """A tokenizer of another kind."""

    name = fingerprint = "words"
    vocab_size = 100_000
    end_of_document = 99_999

    def encode(self, text):
        return np.array([len(word) for word in text.split()], np.uint8)

    def encode_all(self, texts):
        return [self.encode(text) for text in texts]

    def decode(self, tokens):
        return " ".join("x" * token for token in tokens)


def test_any_tokenizer_serves_and_large_vocabularies_take_four_bytes(load, tmp_path):
    dataset = load(write_many(tmp_path / "x", [3, 4, 5, 6]), validation_fraction=0.5, own_tokenizer=Words())
    found = sorted([*tokens_of(dataset.train), *tokens_of(dataset.validation)])
    assert found == [3, 4, 5, 6, 99_999, 99_999, 99_999, 99_999]
    assert dataset.train.tokens.dtype == np.uint32


def bad_array_record(folder):
    write_array_record(folder)
    path = folder / "a.arrayrecord"
    path.write_bytes(path.read_bytes()[:100])


def damaged_array_record(folder):
    writer = ArrayRecordWriter(str(folder / "a.arrayrecord"), "group_size:1")
    for record in np.random.default_rng(0).integers(1, 256, (600, 500)):
        writer.write(record.astype("<u2").tobytes())
    writer.close()
    path = folder / "a.arrayrecord"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty_array_record(folder):
    ArrayRecordWriter(str(folder / "a.arrayrecord"), "group_size:1").close()


def odd_array_record(folder):
    writer = ArrayRecordWriter(str(folder / "a.arrayrecord"), "group_size:1")
    writer.write(b"abc")
    writer.close()


def bad_parquet(folder):
    path = write_parquet(folder)
    path.write_bytes(path.read_bytes()[:-30])


def encoded_parquet(column):
    """Returns a function that writes the column `text` with repeated documents as a dictionary, as pandas does."""

    def write(folder):
        import pyarrow
        from pyarrow import parquet

        columns = [pyarrow.array(values).dictionary_encode() for values in column]
        parquet.write_table(pyarrow.table(columns, names=["text"] * len(column)), folder / "a.parquet")
        return folder / "a.parquet"

    return write


@pytest.mark.parametrize("as_bytes", [False, True])
def test_a_dictionary_of_strings_is_read_as_strings(as_bytes, load, tmp_path):
    documents = [DOCUMENTS[index] for index in (0, 1, 0, 2, 3)]
    path = encoded_parquet([[text.encode() if as_bytes else text for text in documents]])(tmp_path)
    tokens = [token for text in documents for token in [*text.encode(), 0]]
    assert in_order(load(path, validation_fraction=0.4)) == tokens


def null_parquet(folder):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["some", None]}), folder / "a.parquet")


def bad_gzip(folder):
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "some"}\n' * 99)[:-12])


def file(name, content):
    return lambda folder: (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("write", "changes", "message"),
    [
        (file("t.txt", b""), {}, "holds no text"),
        (file("t.txt", b"a\0b"), {}, "NUL byte"),
        (file("t.json", b'{"text": "a"}'), {}, "ends in .json may hold .* --format jsonl .* --format text"),
        (file("t.txt", b"a" * 50), {"seq_len": 60}, r"46 tokens for training, .* seq_len \+ 1 = 61: give more text"),
        (file("t.txt", b"a" * 50), {"seq_len": 5}, "5 tokens for validation"),
        (file("t.txt", b"a" * 50), {"tokenizer": "nope.json"}, "cannot read the tokenizer nope.json"),
        (file("t.jsonl", b'{"text": "a"}\n{"txt": 1, "id": 2}'), {}, "line 2 of .*t.jsonl has no field 'text' .*'txt'"),
        (file("t.jsonl", b'{"messages": []}'), {}, "line 1 of .*: read conversations with --format chat, or name the"),
        (file("t.jsonl", b'{"prompt": "", "completion": ""}'), {}, "line 1 of .*: read conversations with --format"),
        (file("t.jsonl", b'{"text": "a"}\n{"text": "b"'), {}, "line 2 of .*t.jsonl is no JSON"),
        (file("t.jsonl", b'{"text": 3}'), {}, "line 1 of .*holds int, not a string"),
        (file("t.jsonl", b'["text"]'), {}, "line 1 of .*is a JSON list, not an object: write an object a line, as `jq"),
        (file("t.jsonl", b'[\n {"text": "a"}\n]'), {}, "line 1 of .*is no JSON .*: write an object a line, as `jq"),
        (file("t.jsonl", b'{"text": ""}\n'), {}, "all of its documents are empty"),
        (bad_gzip, {}, "a.jsonl.gz .*cut off"),
        (bad_parquet, {}, "a.parquet as Parquet"),
        (null_parquet, {}, "row 2 of .*a.parquet: column 'text' is null"),
        (write_parquet, {"text_field": "body"}, "a.parquet has no column 'body' .*'text', 'id'"),
        (write_parquet, {"text_field": "id"}, "column 'id' holds int64"),
        (encoded_parquet([["some", None]]), {}, "row 2 of .*a.parquet: column 'text' is null"),
        (encoded_parquet([["some"], ["other"]]), {}, "a.parquet has several columns 'text'"),
        (bad_array_record, {}, "a.arrayrecord is no ArrayRecord file, is empty or was cut off"),
        (damaged_array_record, {}, r"a.arrayrecord is damaged at record 256 or soon after \(.*\): write it again"),
        (empty_array_record, {}, "a.arrayrecord is no ArrayRecord file, is empty or was cut off .*no records"),
        (write_array_record, {"token_dtype": "int64"}, r"has the token \d+, .*--token-dtype"),
        (odd_array_record, {"token_dtype": "int64"}, "record 0 of .*no multiple of the 8 .*--token-dtype"),
        (file("t.bin", b"abc"), {}, "3 bytes of tokens, no multiple of the 2"),
        (
            file("t.bin", np.array([1, 300], "<u2").tobytes()),
            {},
            "token 300, but the tokenizer bytes has tokens 0 to 255",
        ),
        (file("t.npy", b"nothing"), {}, "t.npy is no array of numpy"),
        (lambda folder: np.save(folder / "t.npy", np.ones((2, 2))), {}, r"t.npy holds float64 \[2, 2\]: give a vector"),
        (
            lambda folder: np.save(write_raw(folder).with_name("a.documents.npy"), np.array([0, 5, 5])),
            {},
            "a.documents.npy must hold where each document",
        ),
        (lambda folder: (write_raw(folder), write_array_record(folder)), {}, "several formats: .* --format"),
    ],
)
def test_errors_name_the_file_and_the_remedy(write, changes, message, load, tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    write(folder)
    with pytest.raises(ValueError, match=message):
        load(folder, **changes)
    assert not list((tmp_path / "cache").glob(".*")), "half-written tokens were left"


def test_a_line_of_brackets_alone_is_named(load, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "some words"}\n' + "[" * 100_000 + "\n")
    with pytest.raises(ValueError, match=r"^line 2 of .*x.jsonl is no JSON .*mend or remove the line$"):
        load(tmp_path / "x.jsonl")


def test_nothing_there_names_the_choices(load, tmp_path):
    with pytest.raises(ValueError, match=r"there is no .*'stdlib' for the source code"):
        load(tmp_path / "nope")
    with pytest.raises(ValueError, match=r"seq_len=0: give a number of tokens, at least 1"):
        load(write_text(tmp_path / "texts"), seq_len=0)
    with pytest.raises(ValueError, match=r"cannot read .* \(File name too long\)"):
        load("x" * 5000)


def test_without_pyarrow_the_error_says_what_to_install(load, tmp_path, monkeypatch):
    path = write_parquet(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"pip install .zero-jax\[parquet\]"):
        load(path)


@pytest.mark.parametrize("change", [lambda path: path.unlink(), lambda path: path.write_text("b" * 99)])
def test_a_file_that_changes_while_it_is_read_is_named(change, tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("a" * 100)
    pieces = read_text(find_source(str(path)))
    next(pieces)
    change(path)
    with pytest.raises(ValueError, match=r"x.txt (vanished|changed) while it was read"):
        list(pieces)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"validation_fraction": 0.0}, "between 0 and 1"),
        ({"validation_fraction": 1.0}, "between 0 and 1"),
        ({"prefetch_batches": -1}, "prefetch_batches=-1"),
        ({"format": "json"}, "format='json': did you mean 'jsonl'\\? give one of auto, text, jsonl"),
        ({"token_dtype": "float32"}, "give one of uint8"),
        ({"text_field": ""}, "leave it out for 'text'"),
    ],
)
def test_configs_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        data.DataConfig(**changes)


def test_the_fingerprint_tells_tokens_and_splits_apart(load, tmp_path):
    path = write_many(tmp_path / "x", [30] * 10)
    one = load(path, validation_fraction=0.2)
    assert load(path, validation_fraction=0.4).fingerprint != one.fingerprint
    assert load(path, validation_fraction=0.2, own_tokenizer=Words()).fingerprint != one.fingerprint
    copied = tmp_path / "y"
    write_many(copied, [30] * 10)
    assert load(copied, validation_fraction=0.2).fingerprint == one.fingerprint
    (copied / "part0" / "file0.txt").write_text("A" * 30)
    assert load(copied, validation_fraction=0.2).fingerprint != one.fingerprint


@pytest.mark.parametrize("format", ["text", "chat"])
def test_documents_to_validate_on_may_be_of_their_own(format, tmp_path):
    def written(name, words):
        as_line = lambda word: json.dumps({"prompt": word, "completion": word * 9})  # noqa: E731
        (tmp_path / name).write_text("".join(f"{as_line(w) if format == 'chat' else w * 9}\n" for w in words))
        return str(tmp_path / name)

    seq_len, files = 8 if format == "text" else 16, (written("train", "abc"), written("valid", "de"))
    config = data.DataConfig(data=files[0], validation_data=files[1], format=format, token_cache=None)
    dataset = data.load_dataset(config, seq_len=seq_len)
    for part, words in [(dataset.train, "abc"), (dataset.validation, "de")]:
        tokens = part.cut_rows(np.arange(part.num_rows(seq_len=seq_len)), seq_len=seq_len)["targets"]
        assert {chr(token) for token in tokens[tokens > 10]} == {*words}
    assert f"; validation on {tmp_path}/valid: " in str(dataset)
    assert "trained on too" not in str(dataset)
    written("valid", "dfc")
    again = data.load_dataset(config, seq_len=seq_len)
    assert again.fingerprint != dataset.fingerprint
    # Of text a file is a document.
    assert ("; 1 of these documents are trained on too" in str(again)) == (format == "chat")
    both = data.load_dataset(dataclasses.replace(config, validation_data=files[0]), seq_len=seq_len)
    assert str(both).endswith(f"; {both.num_documents} of these documents are trained on too")
    if format == "text":
        written("valid", "d")
        with pytest.raises(ValueError, match=r"11 tokens for .* = 12: give more text, or a shorter --seq-len$"):
            data.load_dataset(config, seq_len=11)
    with pytest.raises(ValueError, match="both say what to validate on: leave out one of them"):
        dataclasses.replace(config, validation_fraction=0.2)

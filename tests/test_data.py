"""Text in, the same windows out, every time."""

import chex
import numpy as np
import pytest

from zero_jax import data


def write_files(folder, sizes):
    """Makes files of the given numbers of characters, each of its own letter."""
    for index, size in enumerate(sizes):
        path = folder / f"part{index % 3}" / f"file{index}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(chr(ord("a") + index) * size)


# Each character is one more than the one before.
ASCENDING = "".join(chr(code) for code in range(32, 127))


def load(path, seq_len=8, **changes):
    return data.load(data.DataConfig(data=str(path), **changes), seq_len=seq_len)


def test_bytes_survive_a_round_trip():
    tokenizer = data.ByteTokenizer()
    text = "def f(x):\n    return 'ü€😀'\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text).max() < tokenizer.vocab_size
    assert tokenizer.decode(np.array([0x64, 0xFF])) == "d\ufffd"


def test_standard_library_has_megabytes_of_python():
    dataset = data.load(data.DataConfig(), seq_len=128)
    assert dataset.train.size > 2_000_000
    assert 0.08 < dataset.validation.size / (dataset.train.size + dataset.validation.size) < 0.1
    for part in (dataset.train, dataset.validation):
        assert "def __init__(self" in dataset.tokenizer.decode(part)
    assert "files" in str(dataset)


def test_a_folder_is_split_by_file(tmp_path):
    write_files(tmp_path, [100] * 20)
    dataset = load(tmp_path, validation_fraction=0.2)
    letters = [set(dataset.tokenizer.decode(part)) - {"\0"} for part in (dataset.train, dataset.validation)]
    assert letters[0].isdisjoint(letters[1])
    assert len(letters[0] | letters[1]) == 20
    assert len(letters[1]) == 4
    assert dataset.num_files == 20


def test_the_split_depends_on_names_alone(tmp_path):
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
        write_files(tmp_path / name, [50, 60, 70, 80, 90, 100])
    chex.assert_trees_all_equal(
        *(load(tmp_path / name, validation_fraction=0.4).validation for name in ("here", "elsewhere"))
    )


def test_the_end_of_a_single_file_is_for_validation(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("a" * 90 + "b" * 10)
    dataset = load(path)
    assert set(dataset.train) == {ord("a")}
    assert dataset.validation.tolist() == [ord("b")] * 10


def test_files_too_large_for_validation_are_cut(tmp_path):
    write_files(tmp_path, [100, 100])
    dataset = load(tmp_path)
    assert (dataset.train.size, dataset.validation.size) == (182, 20)


def test_binary_empty_and_hidden_files_do_not_count(tmp_path):
    (tmp_path / "image.bin").write_bytes(b"\x00\x01" * 100)
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".hidden").write_text("no" * 100)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("no" * 100)
    (tmp_path / "text.txt").write_bytes(b"caf\xe9 " * 100)
    dataset = load(tmp_path)
    assert dataset.num_files == 1
    assert set(dataset.tokenizer.decode(dataset.train)) == set("caf\ufffd ")


def test_batches_are_windows_that_seed_and_step_decide(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(ASCENDING)
    dataset = load(path)
    sizes = {"batch_size": 4, "seq_len": 8}
    batch = data.train_batch(dataset, 3, seed=1, **sizes)
    chex.assert_trees_all_equal(batch, data.train_batch(dataset, 3, seed=1, **sizes))
    for other in (data.train_batch(dataset, 4, seed=1, **sizes), data.train_batch(dataset, 3, seed=2, **sizes)):
        assert (other["inputs"] != batch["inputs"]).any()
    assert batch["inputs"].dtype == np.int32
    chex.assert_shape(list(batch.values()), (4, 8))
    chex.assert_trees_all_equal(batch["inputs"] + 1, batch["targets"])


def test_every_window_is_drawn_and_none_beyond_the_end(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(ASCENDING[:20])
    dataset = load(path, seq_len=4, validation_fraction=0.5)
    drawn = data.train_batch(dataset, 0, seed=0, batch_size=500, seq_len=4)["inputs"][:, 0]
    assert set(drawn) == set(range(32, 38))


def test_validation_batches_span_the_part_and_never_change(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(ASCENDING)
    dataset = load(path, validation_fraction=0.5)
    batches = data.validation_batches(dataset, num_batches=3, batch_size=2, seq_len=8)
    chex.assert_trees_all_equal(batches, data.validation_batches(dataset, num_batches=3, batch_size=2, seq_len=8))
    assert batches[0]["inputs"][0, 0] == dataset.validation[0]
    assert batches[-1]["targets"][-1, -1] == dataset.validation[-1]


class Words:
    """A tokenizer of another kind: the seam that real ones will use."""

    vocab_size = 1000
    end_of_document = 999

    def encode(self, text):
        return np.array([len(word) for word in text.split()], np.uint16)

    def decode(self, tokens):
        return " ".join("x" * token for token in tokens)


def test_any_tokenizer_serves(tmp_path):
    write_files(tmp_path, [3, 4, 5, 6])
    dataset = data.load(data.DataConfig(data=str(tmp_path), validation_fraction=0.5), seq_len=1, tokenizer=Words())
    assert sorted([*dataset.train, *dataset.validation]) == [3, 4, 5, 6, 999, 999, 999, 999]


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        (None, {}, "there is no .*'stdlib' for the source code"),
        ("", {}, "holds no text"),
        (
            "a" * 50,
            {"seq_len": 60},
            r"45 tokens for training, .* seq_len \+ 1 = 61: give more text, a shorter",
        ),
        ("a" * 50, {"seq_len": 5}, "5 tokens for validation"),
    ],
)
def test_errors_name_the_remedy(tmp_path, content, changes, message):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load(path, **changes)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1])
def test_a_fraction_leaves_something_on_both_sides(fraction):
    with pytest.raises(ValueError, match="between 0 and 1"):
        data.DataConfig(validation_fraction=fraction)

"""Data sets of the package `datasets`: as a source, and streamed by lanes, whose positions are exact."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest

import zero_jax as zero
from zero_jax.data import DataConfig, find_source, load_dataset, read_text, stream_batches
from zero_jax.data import stream as stream_module
from zero_jax.data.stream import LaneRows
from zero_jax.sharding.mesh import batch_sharding

datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
SEQ_LEN, BATCH = 16, 4
pytestmark = pytest.mark.filterwarnings("ignore")  # of the package


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch, tmp_path):
    monkeypatch.setattr(stream_module, "_MOST_BLOCK_ROWS", 5)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


@pytest.fixture
def folder(tmp_path):
    """A folder of 4 files of 30 documents each."""
    path = tmp_path / "folder"
    path.mkdir()
    for i in range(4):
        texts = [f"document {30 * i + j}: " + "word " * ((7 * j) % 23) for j in range(30)]
        datasets.Dataset.from_dict({"text": texts, "other": list(range(30))}).to_parquet(path / f"part-{i}.parquet")
    return path


def stream_of(data, **changes):
    config = dataclasses.replace(DataConfig(data=data), **changes)
    return load_dataset(config, seq_len=SEQ_LEN)


def documents_of(rows):
    """Returns the texts that rows hold, in any order, by their lines of bytes."""
    return b"".join(np.asarray(row["inputs"]).astype(np.uint8).tobytes() for row in rows)


def reader(stream, rows=range(BATCH), num_lanes=1, states=None):
    return LaneRows(stream, np.array(rows), (BATCH, SEQ_LEN), num_lanes=num_lanes, seed=3, states=states)


def test_a_stream_that_is_validated_on_other_documents_says_so(folder, tmp_path):
    (tmp_path / "valid.txt").write_text("other " * 9)
    data = f"hf:{folder}"
    shown = str(stream_of(data, validation_data=str(tmp_path / "valid.txt")))
    assert shown == f"{data}: a stream; validation on {tmp_path}/valid.txt: 1 document, 55 tokens"
    assert str(stream_of(data)).startswith(f"{data}: a stream, ")


def test_a_data_set_is_a_source_with_a_place_for_each_row(folder, tmp_path):
    source = find_source(f"hf:{folder}")
    texts = [piece.text for piece in read_text(source)]
    assert len(texts) == 120 and texts[31].startswith("document 31: ")
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "saved")
    assert [piece.text for piece in read_text(find_source(f"hf:{tmp_path / 'saved'}"))] == texts
    config = DataConfig(data=f"hf:{folder}", streaming=False, token_cache=str(tmp_path / "tokens"))
    first, again = (load_dataset(config, seq_len=SEQ_LEN) for _ in range(2))
    assert first.fingerprint == again.fingerprint and first.num_documents == 120
    plain = tmp_path / "plain.jsonl"
    plain.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert load_dataset(DataConfig(data=str(plain)), seq_len=SEQ_LEN).fingerprint == first.fingerprint
    with pytest.raises(ValueError, match=r"row 1 of hf:.* has no field 'content' \(it has 'text', 'other'\)"):
        list(read_text(source, text_field="content"))


def test_conversations_are_read_from_a_data_set(tmp_path):
    turns = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}!"}] for i in range(40)]
    datasets.Dataset.from_dict({"messages": turns}).save_to_disk(tmp_path / "chat")
    dataset = load_dataset(DataConfig(data=f"hf:{tmp_path / 'chat'}", format="chat"), seq_len=64)
    assert dataset.num_documents == 40 and "tokens of answers to learn" in str(dataset)


def test_each_document_is_trained_on_once_in_a_pass_or_validated_on(folder):
    stream = stream_of(f"hf:{folder}", validation_fraction=0.2)
    texts = {piece.text for piece in read_text(find_source(f"hf:{folder}"))}
    validation = stream.validation.cut_rows(np.array([0]), seq_len=stream.validation.size)["inputs"]
    held_out = set(validation.astype(np.uint8).tobytes().decode().split("\0")[:-1])
    assert 5 < len(held_out) < 50 and held_out < texts
    lanes = [stream_module.Lane(stream, (i, 3), seq_len=SEQ_LEN, seed=0) for i in range(3)]
    read = []
    for lane in lanes:
        documents = lane._read_documents(0, None)
        one_pass = itertools.takewhile(lambda place: place.epoch == 0, documents)
        read += [place.tokens[:-1].astype(np.uint8).tobytes().decode() for place in one_pass]
    assert len(read) == len(texts) - len(held_out) and set(read) == texts - held_out


@pytest.mark.parametrize(
    ("kind", "num_lanes"),
    [
        ("files", 1),
        ("saved", 2),
        ("files", 3),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("saved", 1), ("files", 2), ("saved", 3))),
    ],
)
def test_rows_are_cut_like_those_of_files_and_go_on_from_any_state(kind, num_lanes, folder, tmp_path):
    if kind == "saved":
        texts = [piece.text for piece in read_text(find_source(f"hf:{folder}"))]
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "saved")
        folder = tmp_path / "saved"
    stream = stream_of(f"hf:{folder}")
    whole = reader(stream, num_lanes=num_lanes)
    states, batches = [whole.state()], []
    for _ in range(300):  # some passes
        batches.append(whole.read())
        states.append(json.loads(json.dumps(whole.state())))
    for row in range(BATCH):  # every target is the next input of its document
        x = batches[7]
        same = x["weights"][row].astype(bool)
        assert (x["inputs"][row][1:][same[:-1]] == x["targets"][row][:-1][same[:-1]]).all()
    assert any(state["epoch"] > 1 for state in states[-1].values())
    for at in (0, 1, 2, 13, 150, 299):
        again = reader(stream, num_lanes=num_lanes, states=states[at])
        np.testing.assert_equal(again.read(), batches[at])
    # Processes that read some of the rows read the same ones; the lanes are those of the run before.
    parts = [reader(stream, rows=rows, num_lanes=num_lanes, states=states[13]) for rows in ([0, 1], [2], [3])]
    read = [part.read() for part in parts]
    for name, expected in batches[13].items():
        np.testing.assert_array_equal(np.concatenate([x[name] for x in read]), expected)


def test_batches_of_a_stream_go_on_from_the_states_at_a_position(folder):
    stream = stream_of(f"hf:{folder}")
    mesh = zero.make_mesh(devices=jax.devices()[:2])
    options = {"batch_size": BATCH, "seq_len": SEQ_LEN, "seed": 3, "sharding": batch_sharding(mesh)}
    with stream_batches(stream, **options) as batches:
        read = [jax.device_get(next(batches)) for _ in range(4)]
        assert batches.position == 16 and list(batches.states) == [12, 16]
    for position, expected in ((12, read[3]), (16, None)):
        with stream_batches(stream, **options, position=position, states=batches.states[position]) as again:
            batch = jax.device_get(next(again))
        assert expected is None or all((batch[name] == x).all() for name, x in expected.items())
    with pytest.raises(ValueError, match="it lacks 'row'"):
        stream_batches(stream, **options, states={"0": {"epoch": 0, "before": None, "skip": 0, "block": 0}})


def test_what_cannot_be_read_is_refused(folder, tmp_path):
    for data, message in (
        (f"hf:{tmp_path / 'none'}", r"cannot be read by `datasets` \(.*give hf:NAME"),
        (f"hf:{folder}@test", r"cannot be read by `datasets` \(.*: give hf:NAME"),
    ):
        with pytest.raises(ValueError, match=message):
            stream_of(data)
    with pytest.raises(ValueError, match=r"row 1 of hf:.* has no field 'body' \(it has 'text', 'other'\)"):
        stream_of(f"hf:{folder}", text_field="body")
    with pytest.raises(ValueError, match="tokens for validation, but one sequence takes"):
        stream_of(f"hf:{folder}", validation_fraction=1e-9)
    with pytest.raises(ValueError, match="has no documents to train on in part 1 of 1"):
        reader(stream_of(f"hf:{folder}", validation_fraction=1 - 1e-12)).read()
    with pytest.raises(ValueError, match=r"format='parquet': hf:.* has rows"):
        stream_of(f"hf:{folder}", format="parquet")


@pytest.mark.parametrize("place", ["validation", "training", "source"])
def test_rows_that_the_library_cannot_read_are_named(place, folder, monkeypatch):
    """As where the connection ends, or a file is damaged in its middle."""
    passed, rows = [10], datasets.IterableDataset.__iter__ if place != "source" else datasets.Dataset.__iter__

    def failing(table):
        for i, row in enumerate(rows(table)):
            if i == passed[0]:
                raise ConnectionError("peer is gone\nand more")
            yield row

    monkeypatch.setattr(datasets.Dataset if place == "source" else datasets.IterableDataset, "__iter__", failing)
    passed[0] = 10 if place != "training" else 10**9
    with pytest.raises(ValueError, match=r"hf:.* cannot be read .*\(ConnectionError: peer is gone\): "):
        if place == "source":
            list(read_text(find_source(f"hf:{folder}")))
        lanes = reader(stream_of(f"hf:{folder}"))
        passed[0] = 10
        for _ in range(100):
            lanes.read()


@pytest.mark.slow
@pytest.mark.usefixtures("no_picture")
def test_a_run_on_a_stream_that_is_stopped_goes_on_as_if_it_had_not_been(folder, tmp_path, capsys):
    from command_line import run

    small = "--vocab-size 256 --seq-len 16 --num-layers 1 --d-model 32 --num-heads 2 --warmup-steps 0 --sample-tokens 0"
    data = [*small.split(), "--data", f"hf:{folder}", "--eval-batches", "1", "--out", str(tmp_path), "--resume", "auto"]
    losses = {}
    for name, steps in (("a", [6]), ("b", [3, 6])):
        for last in steps:
            schedule = ["--schedule", "constant", "--save-every", "2"]
            status, _, err = run(["train", *data, *schedule, "--steps", str(last), "--name", name], capsys)
            assert status == 0, err
        losses[name] = [record["loss"] for record in zero.trainer.read_run(tmp_path / name).train]
    assert losses["a"] == losses["b"] and len(losses["a"]) == 6

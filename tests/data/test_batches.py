"""Rows worked by hand, epochs, exact resumption, and every row on its device."""

import chex
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from zero_jax.data import batches, tokenizer
from zero_jax.data import dataset as data
from zero_jax.data.parts import TokenPart
from zero_jax.sharding.mesh import make_mesh

# Three documents, each ended by 0, that are not next to each other in the file.
PART = TokenPart(
    tokens=np.array([11, 12, 0, 91, 92, 0, 21, 22, 23, 0, 31, 0, 99], np.uint16),
    starts=np.array([0, 6, 10]),
    offsets=np.array([0, 3, 7, 9]),
)


def part_of(num_tokens, document=7):
    """Returns a part whose tokens number its places, in documents of the given length."""
    offsets = np.append(np.arange(0, num_tokens, document), num_tokens)
    return TokenPart(tokens=np.arange(num_tokens, dtype=np.uint16), starts=offsets[:-1], offsets=offsets)


def dataset_of(num_tokens, num_validation=9):
    parts = {"train": part_of(num_tokens), "validation": part_of(num_validation)}
    return data.Dataset(name="test", tokenizer=tokenizer.ByteTokenizer(), num_documents=1, fingerprint="", **parts)


def sharding(spec=("data",), **axes):
    return NamedSharding(make_mesh(**(axes or {"data": 8})), PartitionSpec(*spec))


def train(dataset, *, batch_size=8, seq_len=4, seed=3, on=None, **options):
    return batches.train_batches(
        dataset, batch_size=batch_size, seq_len=seq_len, seed=seed, sharding=on or sharding(), **options
    )


def take_rows(made, num_batches, seq_len=4):
    """Returns which rows some batches consist of."""
    return [int(place) // seq_len for _ in range(num_batches) for place in np.asarray(next(made)["inputs"])[:, 0]]


@pytest.mark.parametrize(
    "wrong",
    [
        {"seq_len": 0},
        {"seq_len": 1.5},
        {"batch_size": 8.0},
        {"batch_size": True},
        {"seed": -1},
        {"position": 2.5},
        {"prefetch_batches": -1},
        {"on": PartitionSpec("data")},
    ],
)
def test_numbers_that_are_none_are_refused_and_change_nothing(wrong):
    """JAX keeps the slices of a sharding by shape, and 8.0 is 8: those of the next batches had fractions."""
    dataset, (name,) = dataset_of(200), wrong
    with pytest.raises(ValueError, match=f"{'sharding' if name == 'on' else name}=.*: give "):
        train(dataset, **wrong)
    with train(dataset) as made:
        assert next(made)["inputs"].shape == (8, 4)
    for batch_size, num_batches in ((8.0, 1), (8, -1)):
        with pytest.raises(ValueError, match=r"=(8.0|-1): give "):
            batches.validation_batches(
                dataset, num_batches=num_batches, batch_size=batch_size, seq_len=4, sharding=sharding()
            )


def test_batches_may_be_on_one_device():
    on = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    with train(dataset_of(200), on=on) as made:
        assert next(made)["inputs"].sharding == on


def test_rows_are_packed_as_by_hand():
    rows = PART.cut_rows(np.array([0, 1, -1]), seq_len=4)
    assert PART.num_rows(seq_len=4) == 2
    chex.assert_trees_all_equal(
        rows,
        {
            "inputs": np.int32([[11, 12, 0, 21], [22, 23, 0, 31], [0, 0, 0, 0]]),
            "targets": np.int32([[12, 0, 21, 22], [23, 0, 31, 0], [0, 0, 0, 0]]),
            # 21 and 31 begin documents: nothing before them tells what they are.
            "weights": np.float32([[1, 1, 0, 1], [1, 1, 0, 1], [0, 0, 0, 0]]),
            "segments": np.int32([[0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0]]),
        },
        strict=True,
    )


def test_the_last_row_is_filled_up_with_nothing():
    rows = PART.cut_rows(np.array([0, 1]), seq_len=6)
    chex.assert_trees_all_equal(
        {name: array[1] for name, array in rows.items()},
        {
            "inputs": np.int32([0, 31, 0, 0, 0, 0]),
            "targets": np.int32([31, 0, 0, 0, 0, 0]),
            "weights": np.float32([0, 1, 0, 0, 0, 0]),
            "segments": np.int32([0, 1, 1, 2, 2, 2]),
        },
    )


@pytest.mark.parametrize("seed", range(12))
def test_rows_are_those_of_each_position(seed):
    """Documents of any length, 0 included, apart from each other in the tokens or not."""
    rng, seq_len = np.random.default_rng(seed), 1 + seed % 7
    lengths, gaps = rng.integers(9, size=12), rng.integers(1 + seed % 3, size=12)
    starts, offsets = np.cumsum(lengths + gaps) - lengths, np.append(0, np.cumsum(lengths))
    stream = [(start + i, k) for k, start in enumerate(starts) for i in range(lengths[k])]
    part = TokenPart(tokens=np.arange(200, dtype=np.uint16), starts=starts, offsets=offsets)
    rows = np.append(rng.permutation(part.num_rows(seq_len=seq_len)), -1)
    made = part.cut_rows(rows, seq_len=seq_len)
    for i, row in enumerate(rows):
        here = [] if row < 0 else stream[row * seq_len : (row + 1) * seq_len + 1]
        beyond = here[-1][1] + 1 if here else 0
        here += [(0, beyond)] * (seq_len + 1 - len(here))
        tokens, documents = np.array(here).T
        np.testing.assert_array_equal(made["inputs"][i], tokens[:-1])
        np.testing.assert_array_equal(made["targets"][i], tokens[1:])
        np.testing.assert_array_equal(made["segments"][i], documents[:-1] - documents[0])
        exists = row >= 0 and np.arange(row * seq_len + 1, (row + 1) * seq_len + 1) < len(stream)
        np.testing.assert_array_equal(made["weights"][i], exists & (documents[1:] == documents[:-1]))


@pytest.mark.parametrize(("num_tokens", "seq_len", "document"), [(50, 4, 7), (49, 4, 5), (49, 8, 100), (10, 9, 1)])
def test_every_token_is_a_target_once(num_tokens, seq_len, document):
    part = part_of(num_tokens, document)
    rows = part.cut_rows(np.arange(part.num_rows(seq_len=seq_len)), seq_len=seq_len)
    targets = rows["targets"][rows["weights"] > 0].tolist()
    assert targets == [place for place in range(1, num_tokens) if place % document]


def test_each_epoch_has_every_row_once_in_an_order_of_its_own():
    with train(dataset_of(4 * 24 + 1)) as made:
        epochs = [tuple(take_rows(made, 3)) for _ in range(4)]
    assert all(sorted(epoch) == list(range(24)) for epoch in epochs)
    assert len(set(epochs)) == 4
    assert list(range(24)) not in [list(epoch) for epoch in epochs]


def test_seeds_make_other_orders_however_large():
    dataset = dataset_of(4 * 24 + 1)
    orders = set()
    for seed in (0, 1, 2**32, 2**70):
        with train(dataset, seed=seed) as made, train(dataset, seed=seed) as again:
            order = take_rows(made, 6)
            assert order == take_rows(again, 6)
            # A seed's second epoch is not its neighbour's first.
            orders |= {tuple(order[:24]), tuple(order[24:])}
    assert len(orders) == 8


@pytest.mark.parametrize("prefetch_batches", [0, 1, 3])
def test_going_on_from_a_position_is_exact_also_with_another_batch_size(prefetch_batches):
    dataset = dataset_of(4 * 21 + 1)  # epochs end inside batches
    with train(dataset) as made:
        whole = take_rows(made, 16)
        assert made.position == 128
    with train(dataset, prefetch_batches=prefetch_batches) as made:
        start = take_rows(made, 3)
        position = made.position
    assert position == 24, "what was read ahead does not count"
    for batch_size, num_batches in ((8, 13), (16, 6), (24, 4)):
        options = {"batch_size": batch_size, "position": position, "prefetch_batches": prefetch_batches}
        with train(dataset, **options) as made:
            rest = take_rows(made, num_batches)
        assert start + rest == whole[: 24 + len(rest)]


def test_rows_go_to_their_devices_and_the_guard_against_transfers_holds():
    dataset = dataset_of(400)
    with train(dataset, batch_size=16) as made, jax.transfer_guard("disallow"):
        batch = next(made)
    expected = dataset.train.cut_rows(np.asarray(batch["inputs"])[:, 0] // 4, seq_len=4)
    for name, array in batch.items():
        assert array.sharding.is_equivalent_to(sharding(), 2)
        np.testing.assert_array_equal(array, expected[name], strict=True)
        for place, shard in enumerate(sorted(array.addressable_shards, key=lambda shard: shard.device.id)):
            np.testing.assert_array_equal(shard.data, expected[name][2 * place : 2 * place + 2])


@pytest.mark.parametrize(
    ("spec", "axes"),
    [
        ((("replica", "data"),), {"replica": 2, "data": 4}),
        ((("replica", "data"),), {"data": 4, "model": 2}),
        ((("replica", "data"), "model"), {"data": 2, "model": 4}),
        ((), {"data": 8}),
    ],
)
def test_any_mesh_gets_the_same_batch(spec, axes):
    dataset = dataset_of(400)
    on = sharding(spec, **axes)
    with train(dataset) as one, train(dataset, on=on) as other:
        plain, sharded = next(one), next(other)
    for name, array in sharded.items():
        assert array.sharding.is_equivalent_to(on, 2)
        np.testing.assert_array_equal(array, plain[name])


class OneOfSeveral:
    """A sharding as one of several processes sees it: only some of the devices are its own."""

    def __init__(self, whole, devices):
        self.whole, self.devices = whole, devices
        self.mesh, self.spec = whole.mesh, whole.spec

    def addressable_devices_indices_map(self, shape):
        return {device: self.whole.devices_indices_map(shape)[device] for device in self.devices}


@pytest.mark.parametrize(
    ("axes", "own", "rows"),
    [
        ({"data": 8}, [4, 5, 6, 7], range(8, 16)),
        ({"data": 8}, [1, 6], [2, 3, 12, 13]),
        # Both devices of `model` hold the same rows, which are read once.
        ({"data": 4, "model": 2}, [2, 3], range(4, 8)),
        ({"replica": 2, "data": 2, "model": 2}, [0, 1, 2, 3], range(8)),
    ],
)
def test_a_process_reads_only_the_rows_of_its_devices(axes, own, rows):
    whole = sharding((("replica", "data"),), **axes)
    share = batches._share(
        OneOfSeveral(whole, [whole.mesh.devices.flat[i] for i in own]),
        batch_size=16,
        seq_len=4,
        separate_documents=True,
    )
    assert share.rows.tolist() == list(rows)
    for index in share.sharding.addressable_devices_indices_map((16, 4)).values():
        assert share.shard(share.rows[:, None], index).tolist() == [[row] for row in range(16)[index[0]]]


def test_validation_rows_are_evenly_spaced_and_never_change():
    dataset = dataset_of(100, num_validation=4 * 33 + 1)
    options = {"num_batches": 2, "batch_size": 8, "seq_len": 4, "sharding": sharding()}
    held_out = batches.validation_batches(dataset, **options)
    rows = [take_rows(iter(held_out), 2) for _ in range(2)]
    assert rows[0] == rows[1] == take_rows(iter(batches.validation_batches(dataset, **options)), 2)
    assert (rows[0][0], rows[0][-1]) == (0, 32)
    assert set(np.diff(rows[0])) == {2, 3}
    assert len(held_out) == 2
    assert len(held_out[:1]) == 1
    with pytest.raises(IndexError):
        held_out[2]


def test_a_short_validation_part_counts_every_row_once():
    dataset = dataset_of(100, num_validation=4 * 11)  # the last of 11 rows is short, the second batch too
    held_out = batches.validation_batches(dataset, num_batches=5, batch_size=8, seq_len=4, sharding=sharding())
    assert len(held_out) == 2
    targets = [int(t) for b in held_out for t in np.asarray(b["targets"])[np.asarray(b["weights"]) > 0]]
    assert targets == [place for place in range(1, 44) if place % 7]
    assert all(batch["inputs"].shape == (8, 4) for batch in held_out)


def test_errors_of_the_reading_thread_arrive_and_nothing_is_skipped(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("some words " * 100)
    config = data.DataConfig(data=str(path), token_cache=str(tmp_path / "cache"))
    made = train(data.load_dataset(config, seq_len=4))
    next(made)
    (tokens,) = (tmp_path / "cache").glob("*/tokens.bin")
    with tokens.open("ab") as file:
        file.write(b"more")
    with pytest.raises(ValueError, match=r"tokens.bin changed while it was read"):
        for _ in range(4):
            next(made)
    with pytest.raises(ValueError, match="make new ones from their position"):
        next(made)
    assert made.position in (8, 16, 24)


def test_misfits_are_told():
    dataset = dataset_of(100)
    with pytest.raises(ValueError, match="batch_size=12 does not divide over"):
        train(dataset, batch_size=12)
    with pytest.raises(ValueError, match="position=-1"):
        train(dataset, position=-1)
    made = train(dataset)
    made.close()
    made.close()
    with pytest.raises(ValueError, match="closed"):
        next(made)


@pytest.mark.parametrize("separate", [True, False])
def test_batches_have_segments_where_documents_are_kept_apart(separate):
    names = {"inputs", "targets", "weights"} | ({"segments"} if separate else set())
    with train(dataset_of(100), separate_documents=separate) as made:
        assert set(next(made)) == names
    validation = batches.validation_batches(
        dataset_of(100), num_batches=1, batch_size=8, seq_len=4, sharding=sharding(), separate_documents=separate
    )
    assert set(validation[0]) == names

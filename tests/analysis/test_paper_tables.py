"""The script that measures the paper's tables: its search, its choice of models and its rows, with made-up plans."""

import argparse
import dataclasses
import json
import re

import paper_tables
import paper_views
import pytest
from largest_fit import largest_fit
from paper_formulas import PAPER_CASES


@dataclasses.dataclass
class Made:
    """Stands for a plan's report."""

    fits: bool
    needed_bytes: int | None


def line(each, rest=0, capacity=1000, attempts=None):
    """Returns what a size comes to where each unit needs the same, beside a rest."""

    def attempt(size):
        if attempts is not None:
            attempts.append(size)
        return Made(rest + each * size <= capacity, rest + each * size)

    return attempt


def search(attempt, **options):
    settings = {"sizes": range(1, 1001), "first": 150, "capacity_bytes": 1000, **options}
    return largest_fit(attempt, **settings)


def test_the_search_reads_the_size_off_two_refusals():
    attempts = []
    # 10 a unit beside 190: 81 is the largest. 150 needs 1690, and a line through zero says 88; that needs 1070, and the
    # line through both meets 1000 at 81, but 83 (88 less 5%) settles as much if it fits.
    found = search(line(10, 190, attempts=attempts))
    assert (found.largest, found.too_large, found.is_settled) == (81, 83, True)
    assert attempts == [150, 88, 81, 83]


def test_the_search_needs_no_third_attempt_where_the_second_is_just_within_the_tolerance():
    # 322 needs 1001.4; 322 / 1.05 is 306.7, and 306 would leave 322 more than 5% away.
    found = search(line(3.11), first=322)
    assert list(found.outcomes) == [322, 307]
    assert (found.largest, found.too_large, found.is_settled) == (307, 322, True)


def test_the_search_climbs_from_a_size_that_fits():
    found = search(line(10, 190), first=20)
    assert found.largest <= 81 < found.too_large
    assert found.too_large <= max(1.05 * found.largest, found.largest + 1)
    assert len(found.outcomes) <= 5


@pytest.mark.parametrize("each", [3, 7, 11, 29, 60, 130, 499])
@pytest.mark.parametrize("first", [1, 40, 900])
def test_the_search_ends_with_a_pair_that_brackets_the_largest(each, first):
    found = search(line(each, 120), first=first)
    largest = (1000 - 120) // each
    assert found.is_settled
    assert found.largest <= largest < found.too_large
    assert found.too_large <= max(1.05 * found.largest, found.largest + 1)
    assert len(found.outcomes) <= 10


def test_the_search_works_where_a_refusal_does_not_tell_how_much():
    attempt = lambda size: Made(size <= 81, None if size > 81 else 10 * size)  # noqa: E731
    found = search(attempt)
    assert found.is_settled
    assert found.largest <= 81 < found.too_large <= 1.05 * found.largest


def test_the_search_works_where_refusals_tell_too_little():
    # Refused at once, a program is said to need less than it does: 10 a unit, where it takes 12.
    attempt = lambda size: Made(12 * size <= 1000, (12 if size <= 90 else 10) * size)  # noqa: E731
    found = search(attempt)
    assert found.is_settled
    assert found.largest <= 83 < found.too_large <= 1.05 * found.largest


def test_the_search_takes_only_the_sizes_there_are():
    found = search(line(10, 190), sizes=(1, 2, 4, 8, 16, 32, 64, 96, 128), first=20)
    assert (found.largest, found.too_large, found.is_settled) == (64, 96, True)


def test_the_search_says_that_nothing_fits_and_that_everything_does():
    found = search(line(2000))
    assert (found.largest, found.too_large, found.is_settled) == (None, 1, True)
    found = search(line(1), sizes=range(1, 11))
    assert (found.largest, found.too_large, found.is_settled) == (10, None, True)


def test_a_search_that_was_cut_short_says_so():
    found = search(line(10, 190), max_attempts=2)
    assert (found.largest, found.too_large, found.is_settled) == (None, 88, False)


def test_models_have_the_width_of_their_size_and_layers_to_match():
    assert [paper_tables.width_for(psi) for psi in (7.5e9, 10e9, 128e9, 200e9, 1e12)] == [
        4096,
        8192,
        8192,
        25600,
        25600,
    ]
    for psi in (7.5e9, 128e9, 1e12):
        width = paper_tables.width_for(psi)
        model = paper_tables.model_of(round(paper_tables.layers_for(psi, width)), width)
        # Half a layer of 12 x width^2 parameters at most.
        assert abs(model.num_params - psi) <= 6.1 * width**2
    # The paper's own trillion has 128 layers of 25,600.
    assert round(paper_tables.layers_for(1.008e12, 25600)) == 128


class FakePlan:
    """Reports by formula, as if a device held nothing but the model states and 5 GB."""

    def __init__(self):
        self.calls = []

    def __call__(self, model, *, hardware, num_devices, stage, per_device_batch_size=1):
        self.calls.append((model.num_layers, per_device_batch_size))
        sharded = PAPER_CASES[paper_views._CASES[stage]]
        state = paper_views.model_state_bytes(model.num_params, sharded=sharded, num_devices=num_devices)
        needed = int(sum(state.values()) + 5e9 + 2e9 * (per_device_batch_size - 1))
        usable = int(95.74 * 2**30)
        memory = argparse.Namespace(
            arguments={"params": int(state["params"]), "opt_state": int(state["opt_state"])},
            temporaries={"grads": int(state["grads"])}, argument_bytes=0, temp_bytes=0, live_peak_bytes=0,
            heap_bytes=0, left_whole=(),
        )  # fmt: skip
        return argparse.Namespace(
            fits=needed <= usable, needed_bytes=needed, usable_bytes=usable, num_params=model.num_params, stage=stage,
            traffic_ratio=1.0, num_devices=num_devices, compile_seconds=1.0, time=None,
            memory=memory if needed <= usable else None,
        )  # fmt: skip


def test_a_cell_of_table_2_is_the_largest_model():
    plan = FakePlan()
    row = paper_tables.table_2_cell(stage=0, num_devices=64, hardware="v5p", compile=plan)
    # 16 bytes a parameter: (102.8 - 5) / 16 = 6.11e9 of them; a layer of width 4096 has 0.2013e9, and the rest 0.21e9.
    assert row["num_layers"] == 29
    assert row["too_large"]["num_layers"] == 30
    assert row["theory_params"] == pytest.approx(102.8e9 / 16, rel=1e-3)
    assert row["theory_32gb_params"] == 2e9
    assert row["is_settled"]
    assert len(plan.calls) <= 4


def test_a_cell_of_the_scaling_is_the_largest_batch():
    row = paper_tables.scaling_cell(num_devices=64, hardware="v5p", compile=FakePlan())
    # 60.9e9 x 16 / 64 = 15.2 GB and 5 and 2 for each example but the first: 42 fit, 48 do not.
    assert (row["per_device_batch_size"], row["too_large"]["per_device_batch_size"]) == (32, 48)


def test_results_are_kept_one_by_one_and_printed(tmp_path, capsys):
    out = tmp_path / "results.jsonl"
    args = argparse.Namespace(table=2, scaling=False, devices=[64], stage=[0, 1], hardware="v5p", out=out)
    plan = FakePlan()
    seen = []

    def interrupted(model, **options):
        if options["stage"] == 1:
            raise KeyboardInterrupt
        seen.append(model.num_layers)
        return plan(model, **options)

    with pytest.raises(KeyboardInterrupt):
        paper_tables.run(args, interrupted)
    assert [json.loads(text)["stage"] for text in out.read_text().splitlines()] == [0]
    paper_tables.run(args, plan)
    rows = paper_tables.load(out)
    assert [row["stage"] for row in rows] == [0, 1]
    table = str(paper_views.table_2(rows))
    assert "29 x 4096" in table
    assert "30: " in table
    capsys.readouterr()


def test_a_compiler_that_fails_costs_one_cell(tmp_path, capsys):
    out = tmp_path / "results.jsonl"
    args = argparse.Namespace(table=1, scaling=False, devices=[64], stage=[1, 3], hardware="v5p", out=out)
    plan = FakePlan()

    def failing(model, **options):
        if options["stage"] == 1:
            raise RuntimeError("broken")
        return plan(model, **options)

    paper_tables.run(args, failing)
    rows = paper_tables.load(out)
    assert len(rows) == 6
    assert [row["error"] for row in rows if row["stage"] == 1] == ["RuntimeError: broken"] * 3
    assert str(paper_views.table_1(rows)).count("failed") == 3
    assert "broken" in capsys.readouterr().err


def test_the_scaling_as_svg_has_labels_and_values(tmp_path):
    def row(num_devices, batch, tokens_per_second):
        time = {"tokens_per_second": tokens_per_second * num_devices}
        return {"kind": "scaling", "num_devices": num_devices, "per_device_batch_size": batch, "time": time}

    path = tmp_path / "scaling.svg"
    rows = [row(400, 24, 950.4), row(64, 4, 310.2), row(128, 12.5, 610.0)]
    paper_views.plot_scaling(path, rows, title="60B params")
    found = set(re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text(encoding="utf-8")))
    assert {"64", "128", "400", "4", "12.5", "24", "310", "610", "950", "linear scaling", "60B params"} <= found
    assert {"largest batch per device (examples)", "estimated throughput per device (tokens/s)"} <= found
    with pytest.raises(ValueError, match="no rows"):
        paper_views.plot_scaling(path, [], title="")


@pytest.mark.tpu_compiler
@pytest.mark.slow
def test_the_figures_of_a_cell_are_those_of_the_compiled_step(tmp_path, monkeypatch, capsys):
    pytest.importorskip("libtpu", reason="the TPU compiler is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(paper_tables.SHAPES, 4, "2x2x1")
    model = dataclasses.replace(paper_tables.model_of(2, 1024), seq_len=128, vocab_size=4096)
    row = paper_tables.figures(paper_tables.plan_step(model, hardware="v5p", num_devices=4, stage=3))
    # 12 bytes a parameter over four devices: 2 x 12 x 1024^2 and 4096 + 128 + 1 + 2 x 2 rows; padding aside.
    num_params = 2 * 12 * 1024**2 + (4096 + 128 + 1 + 4) * 1024
    assert (row["num_params"], row["stage"], row["num_devices"]) == (num_params, 3, 4)
    assert row["state_bytes"] == pytest.approx(12 * num_params / 4, rel=0.01)
    assert row["state_bytes"] + row["live_peak_bytes"] < row["needed_bytes"] <= row["usable_bytes"]
    assert capsys.readouterr().err.count("fits, needs") == 1

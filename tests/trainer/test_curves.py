"""Curves of runs, of broken and unfinished ones too."""

import json

import numpy as np
import pytest

from zero_jax.cli import build_parser
from zero_jax.trainer.reporting import curves
from zero_jax.trainer.result import draw_losses, run_losses

PNG = b"\x89PNG"


def write_run(folder, num_steps, *, level=1.0, every=10, gap=(), **figures):
    """Writes a run as the trainer does."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(num_steps)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            loss = None if step in gap else level + 3 / step**0.3 + 0.1 * float(rng.standard_normal())
            record = {"kind": "train", "step": step, "loss": loss, "grad_norm": 1 / step, "nonfinite_leaf": None}
            record |= {"tokens": step * 1000, "step_seconds": 0.5, **figures}
            file.write(json.dumps(record) + "\n")
            if step % every == 0:
                file.write(json.dumps({"kind": "validation", "step": step, "loss": level + 3 / step**0.3}) + "\n")
    return folder


def plot(*arguments):
    options = build_parser().parse_args(["plot", *map(str, arguments)])
    return options.run(options)


def test_smoothing_leaves_gaps_and_takes_no_notice_of_them():
    values = np.array([1.0, 3, np.nan, 5, np.inf, 7])
    np.testing.assert_array_equal(curves.smoothed(values, 2), [1, 2, np.nan, 5, np.nan, 7])
    np.testing.assert_array_equal(curves.smoothed(values, 3), [1, 2, np.nan, 5, np.nan, 7])
    np.testing.assert_array_equal(curves.smoothed(np.arange(4.0), 1), np.arange(4.0))
    assert curves.smoothed(np.zeros(0), 3).shape == (0,)


def test_half_a_line_gaps_and_repeated_steps(tmp_path):
    folder = write_run(tmp_path / "run", 20, gap=(7,))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f'\n[]\n{{"kind": "train", "step": {10**400}}}\n{{"kind": "train", "step": 3, "tokens": {10**400}}}')
        file.write('\n{"kind": "train", "step": 20, "loss": 9.0}\n{"kind": "train", "step": 21, "lo')
    run = curves.read_run(folder)
    curve = run.curve("loss")
    assert run.name == "run"
    np.testing.assert_array_equal(curve.x, np.arange(1, 21))
    assert np.flatnonzero(np.isnan(curve.y)).tolist() == [2, 6]
    assert np.isnan(run.curve("tokens").y[2])
    assert curve.y[-1] == 9
    np.testing.assert_array_equal(curve.validation_x, [10, 20])
    assert curves.read_run(folder / "metrics.jsonl").name == "run"


@pytest.mark.parametrize(("x", "last"), [("step", 30), ("tokens", 30_000), ("seconds", 15)])
def test_what_curves_are_drawn_against(tmp_path, x, last):
    curve = curves.read_run(write_run(tmp_path / "run", 30)).curve("loss", x=x)
    assert curve.x[-1] == curve.validation_x[-1] == last
    assert curve.validation_x[0] == pytest.approx(last / 3)


def test_only_validation_has_some_figures(tmp_path):
    folder = write_run(tmp_path / "run", 10)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "validation", "step": 5, "ema_loss": 2.0}\n')
    curve = curves.read_run(folder).curve("ema_loss")
    assert np.isnan(curve.y).all() and curve.validation_y.tolist() == [2.0]


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_runs_over_one_another(tmp_path, suffix, capsys):
    runs = [write_run(tmp_path / "long", 200, gap=range(50, 60)), write_run(tmp_path / "short", 1, level=2)]
    out = tmp_path / f"curves.{suffix}"
    assert plot(*runs, "--out", out, "--title", "two runs") == 0
    assert capsys.readouterr().out == f"drew {out}\n"
    assert out.read_bytes().startswith({"png": PNG, "svg": b"<?xml", "pdf": b"%PDF"}[suffix])


def test_runs_of_one_name_are_told_apart(tmp_path):
    runs = [write_run(tmp_path / place / "run", 5) for place in ("a", "b")]
    out = tmp_path / "curves.svg"
    plot(*runs, "--out", out)
    drawn = out.read_text()
    assert all(f"{run}: " in drawn for run in runs)
    assert "<!-- 2.5 -->" not in drawn  # between two steps


@pytest.mark.parametrize("metric", ["grad_norm", "mfu"])
def test_other_figures_and_those_that_are_always_none(tmp_path, metric):
    runs = [write_run(tmp_path / f"run{i}", 5, mfu=None) for i in range(12)]
    assert plot(*runs, "--metric", metric, "--x", "tokens", "--out", tmp_path / "a.png") == 0


def test_the_losses_of_one_run(tmp_path):
    losses = [(step, float("nan") if step == 4 else 1 / step) for step in range(1, 100)]
    for i, (train, validation) in enumerate(
        [(losses, [(0, 5.0), (99, 0.1)]), (losses[:1], []), ([], [(0, 5.0)]), ([], [])]
    ):
        run = run_losses(tmp_path, train=train, validation=validation)
        assert [record["step"] for record in run.train] == [step for step, _ in train]
        path = tmp_path / f"{i}.png"
        failure = draw_losses(path, run, title="run", is_hurried=lambda: False)
        assert failure is None if train or validation else "have no 'loss'" in failure
        assert path.exists() == bool(train or validation)


def test_records_that_are_not_as_a_run_writes_them(tmp_path):
    """A run that is resumed reads its folder's records at the end, after the last save: no line may end it."""
    records = [{"kind": ["train"]}, {"loss": 2.0}, {}, {"loss": None}, {"loss": "2"}, {"loss": {}}, {"loss": 10**400}]
    lines = [json.dumps({"step": step, **record}) for step, record in enumerate(records)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    losses = {record["step"]: record["loss"] for record in run_losses(tmp_path, train=[(9, 1.0)], validation=[]).train}
    assert losses.keys() == {*range(1, len(records)), 9}
    assert {step for step, loss in losses.items() if np.isfinite(loss)} == {1, 9}


def test_names_and_titles_with_dollars_are_no_formulas(tmp_path):
    run, out = write_run(tmp_path / "$\\frac{$\x1b[2J", 5), tmp_path / "a.svg"
    assert plot(run, "--out", out, "--title", "$\\frac{$ 5%") == 0
    assert "\x1b" not in out.read_text()


def error_of(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        plot(*arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_errors_name_the_nearest(tmp_path, capsys, monkeypatch):
    write_run(tmp_path / "elsewhere" / "runs" / "gpt-tiny-stage3", 5)
    monkeypatch.chdir(tmp_path / "elsewhere")
    run = write_run(tmp_path / "runs" / "gpt-tiny-stage3", 5)
    write_run(tmp_path / "runs" / "other", 5)
    wrong = tmp_path / "runs" / "gpt-tiny-stag3"
    message = error_of(capsys, run, wrong)
    assert f"there is no run {wrong}; the nearest are {run}" in message
    assert f"{tmp_path / 'runs'} is no run: it has no metrics.jsonl" in error_of(capsys, tmp_path / "runs")
    assert "the nearest are runs/gpt-tiny-stage3" in error_of(capsys, tmp_path / "nowhere" / "run")
    monkeypatch.chdir(tmp_path / "runs")  # in which there are no `runs`
    assert "and there is none beside it" in error_of(capsys, tmp_path / "nowhere" / "run")
    assert "have no 'los': did you mean 'loss'? There are grad_norm, loss" in error_of(capsys, run, "--metric", "los")
    assert "name that ends in .png, .svg, .pdf" in error_of(capsys, run, "--out", tmp_path / "a.gif")
    assert "cannot draw" in error_of(capsys, run, "--out", tmp_path / "none" / "a.png")
    assert "invalid choice: 'time'" in error_of(capsys, run, "--x", "time")


def test_a_run_that_has_not_begun(tmp_path, capsys):
    folder = write_run(tmp_path / "run", 0)
    assert "has no records" in error_of(capsys, folder)
    folder = write_run(tmp_path / "run", 3, tokens=None)
    assert "have no tokens: draw them against the step" in error_of(capsys, folder, "--x", "tokens")
    with pytest.raises(ValueError, match="no runs"):
        curves.plot_runs(tmp_path / "a.png", [])
    with pytest.raises(ValueError, match="there are no runs to draw"):
        curves.plot_runs(tmp_path / "a.png", (run for run in ()))

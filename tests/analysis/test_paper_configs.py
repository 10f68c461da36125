"""The paper's configurations: what they switch on, that each trains as the plain step does, and the script's tables."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import paper_config_views
import paper_configs
import pytest
import reference

import zero_jax as zero
from zero_jax.analysis.paper import PAPER_CONFIGS
from zero_jax.models import gpt

PAPER = json.loads((pathlib.Path(__file__).parents[1] / "fixtures" / "zero_paper.json").read_text(encoding="utf-8"))
# Saved inputs of a block are 2 x 64 x 64 elements on a device: enough for a policy to place them.
GPT = gpt.GPTConfig(vocab_size=64, seq_len=64, num_layers=2, d_model=64, num_heads=2, position="learned")


def test_the_presets_are_those_of_table_3():
    assert {name: set(words) for name, words in PAPER["table3_configs"].items()} == {
        name: {
            {1: "P_os", 2: "P_os+g"}[config.stage],
            "M_D",
            *(["C_B"] if config.combine_bytes else []),
            *{"full": [], "full_sharded": ["P_a"], "full_offloaded": ["P_a+cpu"]}[config.remat],
        }
        for name, config in PAPER_CONFIGS.items()
    }
    assert {config.precision for config in PAPER_CONFIGS.values()} == {"bf16"}
    with pytest.raises(TypeError):
        PAPER_CONFIGS["C6"] = PAPER_CONFIGS["C5"]  # pyright: ignore[reportIndexIssue]


def make_batch(seed):
    tokens = np.random.default_rng(seed).integers(0, GPT.vocab_size, (8, GPT.seq_len + 1), dtype=np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


@functools.cache
def params_of_gpt():
    return jax.tree.map(np.asarray, jax.jit(functools.partial(gpt.init, GPT))(jax.random.key(0)))


def check_against_the_plain_step(name, precision, tolerance):
    """Trains two steps on data=4 x model=2, and on one device without rematerialization, sharding or ZeRO."""
    batches, tx = [make_batch(seed) for seed in (1, 2)], optax.sgd(0.1, momentum=0.9)
    mesh = reference.mesh_of("model2")
    specs = gpt.param_specs(GPT, model_size=2)
    config = dataclasses.replace(PAPER_CONFIGS[name], precision=precision, param_specs=specs, min_shard_size=8)
    state = zero.init_state(params_of_gpt(), tx, jax.random.key(1), mesh=mesh, config=config)
    step = zero.make_train_step(gpt.loss_fn(GPT), tx, mesh=mesh, config=config)
    trace = str(step.jitted(state).trace(state, batches[0]).jaxpr)
    assert ("zero_residual" in trace) == (config.remat != "full")
    assert ("Host" in trace) == (config.remat == "full_offloaded")
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics.loss)
    plain_loss = gpt.loss_fn(dataclasses.replace(GPT, remat=False))
    params, _, plain_losses = reference.run_plain(
        lambda params, batch: plain_loss(params, batch)[0],
        tx,
        batches,
        params=params_of_gpt(),
        compute_dtype=None if precision == "fp32" else jnp.bfloat16,
    )
    reference.assert_close(losses, [x.astype(jnp.float32) for x in plain_losses], tolerance=tolerance)
    masters = state.params if state.master is None else state.master
    reference.assert_close(masters, params, tolerance=tolerance)


@pytest.mark.slow
# Sums in another order: 1e-5 in float32; bfloat16 has 8 bits, and its gradients are scaled by a rate of 0.1.
@pytest.mark.parametrize(
    ("name", "precision", "tolerance"), [*((name, "fp32", 1e-5) for name in PAPER_CONFIGS), ("C5", "bf16", 4e-3)]
)
def test_each_trains_as_the_plain_step_does(name, precision, tolerance):
    check_against_the_plain_step(name, precision, tolerance)


@dataclasses.dataclass
class Made:
    """Stands for a plan's report."""

    fits: bool
    needed_bytes: int
    num_params: int
    compile_seconds: float = 1.0
    memory: None = None
    comms: None = None
    time: None = None


def cell(name, num_microbatches=2):
    return paper_configs.Cell(name=name, hardware="v4", num_microbatches=num_microbatches)


def made_plans(base, each, attempts=None):
    """Returns a compiler for which a model needs a base and the same for each layer, in GB."""

    def compile(cell, num_layers):
        if attempts is not None:
            attempts.append(num_layers)
        needed = int((base + each * num_layers) * 1e9)
        return Made(needed <= cell.usable_bytes, needed, num_layers * 10**9)

    return compile


def test_a_layer_weighs_what_the_formulas_say():
    params, saved = 12 * 8192**2 / 16, 16 * 1024 * 8192 * 2
    expected = {
        "C1": params * (4 + 12 / 32) + saved,
        "C2": params * (4 + 12 / 32) + saved / 16,
        "C3": params * (2 + 14 / 32) + saved,
        "C4": params * (2 + 14 / 32) + saved / 16,
        "C5": params * (2 + 14 / 32),
    }
    assert {name: paper_configs.layer_bytes(cell(name)) for name in PAPER_CONFIGS} == pytest.approx(expected)
    # Without microbatches no gradients are whole at stage 1 either.
    expected |= {"C1": expected["C3"], "C2": expected["C4"]}
    assert {name: paper_configs.layer_bytes(cell(name, 1)) for name in PAPER_CONFIGS} == pytest.approx(expected)


def test_the_search_begins_where_a_line_through_what_is_known_meets_the_memory():
    usable = cell("C1").usable_bytes
    assert paper_configs.first_layers(cell("C1"), []) == usable / paper_configs.layer_bytes(cell("C1"))
    known = [(125, 2e9 + 125 * 0.4e9), (50, 2e9 + 50 * 0.4e9)]
    assert paper_configs.first_layers(cell("C1"), known) == pytest.approx((usable - 2e9) / 0.4e9)
    expected = 50 + (usable - 22e9) / paper_configs.layer_bytes(cell("C1"))
    assert paper_configs.first_layers(cell("C1"), known[1:]) == pytest.approx(expected)


def test_figure_6_is_found_in_two_attempts_where_figure_7_points_the_way():
    attempts, compile = [], made_plans(2, 0.4)
    rows = []
    for size, num_layers in paper_configs.SIZES.items():
        needed = compile(cell("C2"), num_layers).needed_bytes
        rows.append({
            **paper_configs.key(7, cell("C2"), size),
            "hardware": "v5p",
            "num_layers": num_layers,
            "needed_bytes": needed,
            "by_group": {"params": 1},
        })  # fmt: skip
    row = paper_configs.figure_6(cell("C2"), rows, made_plans(2, 0.4, attempts))
    assert (row["num_layers"], row["is_settled"]) == (77, True)  # (33.02 - 2) / 0.4 is 77.5
    assert row["too_large"]["num_layers"] <= 77 * 1.05
    assert len(attempts) == 2
    # Rows of another configuration or number of microbatches tell nothing.
    for other in (cell("C1"), cell("C2", 1)):
        attempts.clear()
        paper_configs.figure_6(other, rows, made_plans(2, 0.4, attempts))
        assert attempts[0] == int(paper_configs.first_layers(other, []))


def figure_6_row(name, num_layers, num_microbatches=2, **fields):
    made = {"num_layers": num_layers, "num_params": num_layers * 8 * 10**8, "needed_bytes": 32_900_000_000}
    more = {"is_settled": True, "formula_layers": 60.4}
    return {**paper_configs.key(6, cell(name, num_microbatches)), **made, **more, **fields}


def figure_7_row(name, size, **fields):
    groups = {"params": 5e9, "master": 1e9, "opt_state": 2e9, "grads": 3e9, "residuals": 4e9, "copied params": 1e9}
    made = {"by_group": groups, "needed_bytes": 18_500_000_000, "host_bytes": 250_000_000}
    return {**paper_configs.key(7, cell(name), size), "num_layers": 50, **made, **fields}


def test_the_tables_put_the_paper_beside_what_was_measured():
    over = {"num_layers": 52, "needed_bytes": 34_000_000_000}
    rows = [figure_6_row("C1", 50, too_large=over), figure_6_row("C3", 60), figure_6_row("C4", 150)]
    lines = str(paper_config_views.figure_6(rows, "v4", 2)).splitlines()
    assert lines[4].split() == ["C1", "40B", "1.00", "40B", "1.00", "50", "32.9", "52:", "34", "60"]
    assert lines[5].split() == ["C3", "-", "-", "48B", "1.20", "60", "32.9", "-", "60"]
    assert lines[6].split() == ["C4", "140B", "3.50", "120B", "3.00", "150", "32.9", "-", "60"]
    rows = [figure_7_row("C5", "40B"), {**paper_configs.key(7, cell("C1"), "40B"), "error": "CompilerCrash: gone"}]
    lines = str(paper_config_views.figure_7(rows, "v4", 2)).splitlines()
    assert lines[4].split()[:3] == ["40B", "C1", "CompilerCrash"]
    # State 5 + 1 + 2; other is what the total has beside the three.
    assert lines[5].split() == ["40B", "C5", "8", "3", "4", "3.5", "18.5", "0.25"]
    assert paper_config_views.views([]) == "nothing was measured yet"


def test_paper_figure_6_is_the_papers():
    assert paper_config_views.PAPER_FIGURE_6 == PAPER["figure6_max_params_mp16"]


def test_results_are_kept_and_those_of_a_cell_replaced(tmp_path, monkeypatch, capsys):
    out = tmp_path / "rows.jsonl"
    options = ["paper_configs.py", "--figure", "6", "--config", "C1", "C4", "--out", str(out), "--json"]
    for base in (2, 3):
        monkeypatch.setattr("sys.argv", options)
        monkeypatch.setattr(paper_configs, "compile_step", made_plans(base, 0.4))
        paper_configs.main()
        rows = json.loads(capsys.readouterr().out)
    assert [row["config"] for row in rows] == ["C1", "C4"]
    assert all(row["needed_bytes"] == int((3 + 0.4 * row["num_layers"]) * 1e9) for row in rows)
    assert all(row["num_layers"] <= 75 < row["too_large"]["num_layers"] for row in rows)  # 30.02 / 0.4 is 75.05
    assert len(out.read_text().splitlines()) == 4


def test_the_picture_is_drawn(tmp_path):
    rows = [figure_6_row("C1", 50), figure_6_row("C5", 150), figure_6_row("C1", 70, 1)]
    rows += [figure_7_row(name, size) for name in ("C1", "C5") for size in ("40B", "100B")]
    paper_config_views.plot(tmp_path / "a.png", rows)
    assert (tmp_path / "a.png").stat().st_size > 10_000

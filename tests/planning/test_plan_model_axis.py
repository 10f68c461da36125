"""Plans with a model axis and remat policies: of presets, and of models that bring specs of their own."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import planned
import pytest

import zero_jax as zero
from zero_jax.cli import commands as cli
from zero_jax.program.subcalls import equations
from zero_jax.training import StepLoss

pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'jax[tpu]'")
pytestmark = pytest.mark.tpu_compiler
OWN = ["--loss", "planned:loss_fn", "--init", "planned:init_fn", "--batch", "planned:batch", "--batch-size", "16"]
SMALL = "--model gpt-tiny --num-layers 1 --seq-len 16 --d-model 32 --num-heads 2 --batch-size 8".split()
# A sum of [16 / 2, 256] numbers in float32, which the loss computes in.
SUM = 2 * 8 * planned.WIDTH * 2 / 2  # in bfloat16, which the batch is cast to


def run(command, capsys, *arguments):
    status = cli.main([command, "--topology", "v5e:2x2", "--cache", "none", *arguments])
    return status, *capsys.readouterr()


@pytest.mark.parametrize("name", ["SPECS", "specs", "specs_of"])
def test_a_model_of_ones_own_brings_its_specs(name, capsys):
    own = [*OWN, "--param-specs", f"planned:{name}", "--model-axis", "2", "--estimate", "--json"]
    status, out, _ = run("comms", capsys, *own)
    found = json.loads(out)
    assert status == 0
    assert found["num_params"] == planned.DEPTH * planned.WIDTH**2 / 2
    assert found["by_axes"]["model"] == SUM
    assert not found["not_counted"]


def test_without_specs_the_model_axis_repeats_the_work(capsys):
    _, out, _ = run("comms", capsys, *OWN, "--model-axis", "2", "--estimate", "--json")
    found = json.loads(out)
    assert found["num_params"] == planned.DEPTH * planned.WIDTH**2
    assert "model" not in found["by_axes"]


@pytest.mark.slow
def test_the_report_tells_policy_and_traffic_by_axis(capsys):
    own = [*OWN, "--param-specs", "planned:SPECS", "--model-axis", "2"]
    status, out, _ = run("plan", capsys, *own)
    assert status == 0
    lines = dict(line.split(maxsplit=1) for line in out.splitlines()[:12] if " " in line)
    assert lines["remat"].startswith("own: keeps what the model's own jax.checkpoint keeps; residuals as they are")
    assert "data=2 x model=2" in lines["hardware"]
    assert "x the ideal (" in lines["traffic"] and "model 1.000 x" in lines["traffic"]
    assert any(line.split()[:2] == ["model", "all"] and line.endswith("1.000") for line in out.splitlines())


def test_presets_know_their_specs(capsys):
    status, out, _ = run("memory", capsys, *SMALL, "--model-axis", "2", "--estimate", "--json")
    found = json.loads(out)
    assert status == 0
    assert (found["model"], found["num_devices"]) == (2, 2)
    groups = {group["name"]: group for group in found["groups"]}
    assert groups["residuals"]["formula_bytes"] == 8 // 2 * 16 * 32 * 2
    _, whole, _ = run("memory", capsys, *SMALL, "--estimate", "--json")
    assert found["num_params"] == json.loads(whole)["num_params"]


PIPE = [*SMALL, "--num-layers", "2", "--pipe", "2", "--num-microbatches", "4", "--stage", "1"]


def test_stages_of_a_pipeline_are_estimated(capsys):
    status, out, _ = run("memory", capsys, *PIPE, "--estimate", "--json")
    report = json.loads(out)
    groups = {group["name"]: group for group in report["groups"]}
    assert status == 0
    less = [
        each for each in report["differences"] if each["group"] == "params" and "layers over pipe" in each["reason"]
    ]
    assert [x["device_bytes"] < 0 for x in less] == [True]
    assert groups["residuals"]["formula_bytes"] == 8 // 4 * 2 * 16 * 32 * 2  # as of all layers, on all devices
    status, out, _ = run("comms", capsys, *PIPE, "--estimate", "--json")
    found = json.loads(out)
    assert status == 0
    assert found["by_axes"].keys() <= {"data", "pipe", "data+pipe"}
    assert found["by_axes"]["pipe"] > 0 and not found["not_counted"]


@pytest.mark.parametrize("pipe", [1, 2])
def test_the_attentions_of_a_plan_are_those_that_its_step_fuses(pipe):
    """Stages are of a scan, where a mask of each layer's own would be data: layers are fused before they become one."""
    places = np.arange(128)
    causal = places[:, None] >= places
    masks = causal, causal & (places[:, None] - places < 16)

    def loss_fn(params, batch):
        x = batch["x"]
        for number, weights in enumerate(params["layers"]):
            query, key, value = jnp.einsum("bsd,xdhk->xbshk", x, weights)
            mask = masks[number % 2][None, None]
            x += jax.nn.dot_product_attention(query, key, value, mask=mask).reshape(x.shape)
        return (x @ params["head"]).mean()

    params = {
        "layers": [jax.ShapeDtypeStruct((3, 64, 4, 16), jnp.float32)] * 4,
        "head": jax.ShapeDtypeStruct((64, 8), jnp.float32),
    }
    batch = {"x": jax.ShapeDtypeStruct((8, 128, 64), jnp.float32)}
    mesh = zero.make_mesh(topology="v5e:2x2", pipe=pipe)
    config = zero.ZeroConfig(stage=3, attention="fused", num_microbatches=pipe)
    loss = StepLoss.of(loss_fn, params, mesh=mesh, config=config)
    closed = loss.fused.trace(*loss.shapes(params, batch)).closed
    fused = [eqn for eqn in equations(closed) if eqn.primitive.name == "zero_attention"]
    assert loss.attentions(params, batch).num_fused == 4
    assert len(fused) * pipe == 4  # of a stage, which has as many layers in turn


@pytest.mark.slow
def test_a_batch_that_only_a_size_of_the_model_axis_divides_is_searched(capsys):
    fixed = ("--batch-size", "6", "--num-layers", "1", "--remat", "full", "--stage", "3", "--max-compiles", "0")
    status, out, _ = run("plan", capsys, "--auto", "--model", "gpt-tiny", "--topology", "v5e:2x2", *fixed, "--json")
    assert status == 0
    assert {x["setting"]["model"] for x in json.loads(out)["ranking"]["ranked"]} == {2, 4}


@pytest.mark.slow
def test_the_settings_beside_a_pipeline_are_searched(capsys):
    fixed = ("--num-layers", "2", "--pipe", "2", "--auto", "--max-compiles", "0", "--remat", "full")
    status, out, _ = run("plan", capsys, *SMALL, *fixed, "--json")
    entries = json.loads(out)["ranking"]["ranked"]
    settings = [x["setting"] for x in entries]
    assert status == 0
    assert {x["pipe"] for x in settings} == {2} and len({x["stage"] for x in settings}) == 4
    assert {x["pipeline"] for x in settings} == {"gpipe", "1f1b"}
    status, out, _ = run("plan", capsys, *SMALL, *fixed, "--pipeline", "1f1b", "--stage", "1", "--json")
    assert {x["setting"]["pipeline"] for x in json.loads(out)["ranking"]["ranked"]} == {"1f1b"}
    with pytest.raises(SystemExit):
        run("plan", capsys, *SMALL, "--num-layers", "1", *fixed[2:])
    assert "its 1 layers are fewer than 2 stages" in capsys.readouterr().err


@pytest.mark.slow
def test_a_pipeline_is_planned(capsys):
    status, out, _ = run("plan", capsys, *PIPE, "--json")
    found = json.loads(out)
    assert status == 0
    assert found["mesh"]["pipe"] == 2
    assert found["comms"]["by_axes"]["pipe"] > 0


def test_the_remat_option_places_residuals(capsys):
    options = [*SMALL, "--model-axis", "2", "--remat", "full_offloaded", "--estimate", "--json"]
    _, out, _ = run("memory", capsys, *options)
    assert json.loads(out)["host_bytes"] == 8 // 2 * 16 * 32 * 2 / 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*SMALL, "--num-heads", "1", "--model-axis", "2"], "num_heads=1 does not split over the 2 devices"),
        ([*SMALL, "--model-axis", "3"], "does not divide the 4 devices"),
        ([*SMALL, "--auto", "--model-axis", "3"], "does not divide the 4 devices"),
        ([*SMALL, "--auto", "--replica", "3"], "does not divide the 4 devices"),
        ([*SMALL, "--param-specs", "planned:SPECS"], "is of a model of your own"),
        ([*OWN, "--param-specs", "planned:SPEC", "--model-axis", "2"], "did you mean 'SPECS'?"),
        ([*OWN[:1], "planned:SPECS", *OWN[2:]], "is of type dict: name a function"),
        ([*SMALL, "--remat", "ful"], "did you mean 'full'"),
        pytest.param(
            [*SMALL, "--remat", "full_sharded", "--model-axis", "1"],
            "choose 'full' or 'full_offloaded'",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_bad_input(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        run("plan", capsys, *arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]

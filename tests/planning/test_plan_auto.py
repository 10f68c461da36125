"""The search for settings: what the formulas say of each, and that the compiler has the last word."""

import dataclasses
import functools
import importlib
import json
import math
import types

import jax
import jax.numpy as jnp
import optax
import planned
import pytest
from jax.sharding import PartitionSpec as P

import zero_jax as zero
from zero_jax.cli import commands as cli
from zero_jax.cli import run_config
from zero_jax.cli.models import planned as activations
from zero_jax.cli.models import presets
from zero_jax.cli.options import explicit
from zero_jax.models import gpt
from zero_jax.planning import estimates, links, plans, process, ranking, traces

pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'jax[tpu]'")
pytestmark = pytest.mark.tpu_compiler
TOPOLOGY = "v5e:2x2"
CONFIG = zero.ZeroConfig(precision="bf16")
PSI = planned.DEPTH * planned.WIDTH**2


def estimator(config=CONFIG, tx=None, topology=TOPOLOGY):
    policies = {"own": traces.Policy(loss_fn=planned.loss_fn, remat="own")}
    job = plans.make_job(
        loss_fn=planned.loss_fn, init_fn=planned.init_fn, tx=tx or optax.adamw(1e-3), batch=planned.batch(16),
        topology=topology, config=config,
    )  # fmt: skip
    return estimates.Estimator(job, policies)


def setting(stage, data=4, **fields):
    return ranking.Candidate(**{"stage": stage, "data": data, "batch_size": 16, "remat": "own", **fields})


@pytest.mark.parametrize(("stage", "per_param"), [(0, 14), (1, 2 + 12 / 4), (2, 2 + 12 / 4), (3, 12 / 4)])
def test_state_bytes_are_those_of_the_state(stage, per_param):
    assert estimator().step(setting(stage)).state_bytes == pytest.approx(per_param * PSI, rel=0.001)
    mesh = zero.make_mesh(topology=TOPOLOGY)
    config = dataclasses.replace(CONFIG, stage=stage)
    state = zero.abstract_state(planned.init_fn, optax.adamw(1e-3), mesh=mesh, config=config)
    held = sum(
        x.size // (4 if not x.sharding.is_fully_replicated else 1) * x.dtype.itemsize
        for x in jax.tree.leaves((state.params, state.master, state.opt_state))
    )
    assert estimator().step(setting(stage)).state_bytes == pytest.approx(held, rel=0.001)


@pytest.mark.parametrize(
    ("stage", "num_microbatches", "num_whole", "cast"),
    [(0, 1, 0, 0), (1, 1, 1, 0), (1, 2, 0, 0), (2, 1, 1, 0), (2, 2, 1, 0), (3, 1, 2, 0), (3, 2, 2, 2 / 4)],
)
def test_params_and_gradients_that_are_whole_count(stage, num_microbatches, num_whole, cast):
    """At stages 1 and 2 a gradient until it is reduced, at stage 3 the param, too.

    Of layers in a Python loop there are all shards that are cast beside those of gradients with microbatches alone.
    """
    step = estimator().step(setting(stage, num_microbatches=num_microbatches))
    whole = step.other_bytes() - step.activation_bytes(step.traced) - cast * PSI
    assert whole == pytest.approx(num_whole * step.traced.param_bytes) and step.traced.param_bytes > 0


@pytest.mark.full_effort
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    "precision", ["bf16", "fp32", zero.Precision(compute=jnp.bfloat16)], ids=["bf16", "fp32", "own"]
)
def test_the_memory_of_many_layers_on_few_devices_is_that_of_the_program(stage, precision):
    """The shards of 64 layers, which a step casts at once, are 16 gathered layers, of params stored whole 64.

    Where these are float32, XLA:TPU rounds them before the loop for all of its products.
    """
    init = lambda key: jnp.zeros((64, 4096, 4096))  # noqa: E731
    layer = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
    last = lambda params, batch: jax.lax.scan(layer, batch.astype(params.dtype), params)[0]  # noqa: E731
    loss = lambda params, batch: jnp.square(last(params, batch)).mean()  # noqa: E731
    config = dataclasses.replace(CONFIG, stage=stage, remat="full", precision=precision)
    batch = jax.ShapeDtypeStruct((1024, 4096), jnp.bfloat16)
    job = plans.make_job(loss_fn=loss, init_fn=init, tx=optax.sgd(1e-3), batch=batch, topology=TOPOLOGY, config=config)
    found = estimates.Estimator(job, {"full": traces.Policy(loss_fn=loss, remat="full")})
    estimated = found.estimate(setting(stage, remat="full", batch_size=1024)).bytes
    program = process.compile_plan(job, process.CompileOptions(quick=True))
    assert program.needed_bytes == pytest.approx(estimated, rel=0.1)


def test_state_bytes_without_master_params():
    """float32 with momentum: 4 bytes of params and 4 of momentum."""
    found = estimator(config=zero.ZeroConfig(), tx=optax.sgd(0.1, momentum=0.9))
    assert [found.step(setting(stage)).state_bytes / PSI for stage in (0, 1, 3)] == pytest.approx([8, 5, 2], rel=0.001)


@pytest.mark.parametrize(
    ("what", "stage", "per_param"),
    [("optimizer", 0, 14 - 8), ("state", 0, 2), ("state", 2, 2), ("optimizer", 3, 12 / 4 - 8 / 4), ("all", 3, 0)],
)
def test_what_is_in_host_memory_is_on_no_device(what, stage, per_param):
    found = estimator(config=dataclasses.replace(CONFIG, offload=what, offload_window_bytes=1))
    held = setting(stage, offload=what)
    assert found.step(held).state_bytes == pytest.approx(per_param * PSI, rel=0.001, abs=100)
    assert found.step(held).seconds > found.step(setting(stage)).seconds + 0.9 * found.step(held).host_bytes / 1.2e10
    if what == "all":
        with pytest.raises(ValueError, match="give stage=3"):
            found.estimate(setting(2, offload=what))


def test_quantized_gathers_send_less_and_take_work():
    config = dataclasses.replace(CONFIG, stage=3, quantize_gathers="int8")
    found, held = estimator(config=config), setting(3, quantize=True)
    plain = dataclasses.replace(held, quantize=False)
    gathers, *reduced = found.step(held).sent_shares
    assert gathers == pytest.approx((1 + 2 / 128) / 2, rel=0.02) and reduced == [1, 1]
    assert found.step(held).data_seconds < 0.75 * found.step(plain).data_seconds
    assert found.step(held).coded_bytes == pytest.approx((1 + gathers) * 2 * 2 * PSI, rel=0.01)
    assert found.step(plain).sent_shares == (1, 1, 1) and found.step(plain).coded_bytes == 0
    assert found.estimate(plain) == estimator().estimate(setting(3))
    with pytest.raises(ValueError, match="stage=0 gathers no params"):
        found.estimate(setting(0, quantize=True))


def test_experts_that_stay_send_activations_in_the_place_of_params():
    def loss_fn(params, batch):
        def layer(x, w):
            return jnp.einsum("becf,efd->becd", jax.nn.silu(jnp.einsum("becd,edf->becf", x, w)), w.mT), None

        return jax.lax.scan(layer, batch, params["up"])[0].astype(jnp.float32).mean()

    job = plans.make_job(
        loss_fn=loss_fn, init_fn=lambda key: {"up": jnp.zeros((2, 4, 128, 1024))}, tx=optax.sgd(0.1),
        batch=jnp.zeros((16, 4, 8, 128)), topology=TOPOLOGY, config=dataclasses.replace(CONFIG, experts="up"),
    )  # fmt: skip
    found = estimates.Estimator(job, {"own": traces.Policy(loss_fn=loss_fn, remat="own")})
    held, plain = (found.step(setting(3, experts=x)) for x in (True, False))
    assert held.staying_share == 3 / 4 and plain.staying_share == plain.expert_seconds == 0
    assert held.moved_bytes[0] == plain.moved_bytes[0] / 4 and 0 < held.expert_seconds < plain.data_seconds
    assert found.estimate(setting(3, experts=True)).seconds < found.estimate(setting(3)).seconds


def test_gradients_that_are_quantized_between_copies_alone():
    config = dataclasses.replace(CONFIG, stage=3, quantize_grads="int8", quantize_grads_over="replica")
    found, held = estimator(config=config), setting(3, data=2, replica=2, quantize=True)
    gathers, reduced, copies = found.step(held).sent_shares
    assert (gathers, reduced) == (1, 1) and 0.4 < copies < 0.7
    assert found.step(held).data_seconds < found.step(dataclasses.replace(held, quantize=False)).data_seconds


@pytest.mark.slow
def test_quantization_is_searched_where_the_config_has_formats():
    assert tried(by_estimate(stages=(0, 3)), "quantize") == {False}
    config = dataclasses.replace(CONFIG, quantize_gathers="int8", quantize_grads="int8")
    found = by_estimate(stages=(0, 3), config=config)
    assert tried(found, "quantize") == {False, True} and "quantize" in str(found)
    assert {x.reason[:9] for x in found.rejected if x.setting.stage == 0 and x.setting.quantize} == {"quantize:"}
    assert tried(by_estimate(stages=(3,), config=config, quantizes=(True,)), "quantize") == {True}


def staged_init(key):
    stack = jax.random.normal(key, (4, planned.WIDTH, planned.WIDTH)) / 16
    return {"layers": stack, "head": stack[0]}


def staged_loss(params, batch):
    x = jax.lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), batch["x"], params["layers"])[0]
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


def staged_estimator(topology=TOPOLOGY, config=CONFIG, loss_fn=staged_loss):
    policies = {name: traces.Policy(loss_fn=loss_fn, remat=name) for name in ("own", "full", "auto")}
    fields = {"tx": optax.adamw(1e-3), "batch": planned.batch(16), "topology": topology, "config": config}
    return estimates.Estimator(plans.make_job(loss_fn=loss_fn, init_fn=staged_init, **fields), policies)


def staged_setting(stage, **fields):
    return setting(stage, data=2, pipe=2, **{"num_microbatches": 4, **fields})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_state_of_a_pipeline_is_that_of_a_stage(stage):
    mesh, config = zero.make_mesh(topology=TOPOLOGY, pipe=2), dataclasses.replace(CONFIG, stage=stage)
    config = dataclasses.replace(config, num_microbatches=4)
    state = zero.abstract_state(staged_init, optax.adamw(1e-3), mesh=mesh, config=config)
    leaves = jax.tree.leaves((state.params, state.master, state.opt_state))
    held = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
    assert staged_estimator().step(staged_setting(stage)).state_bytes == pytest.approx(held, rel=0.001)


def test_a_pipeline_waits_and_sends_activations():
    found = staged_estimator()
    step = lambda **fields: found.step(staged_setting(1, **fields))  # noqa: E731
    config = zero.ZeroConfig(precision="bf16", stage=1, num_microbatches=4)
    params, mesh = jax.eval_shape(staged_init, jax.random.key(0)), zero.make_mesh(topology=TOPOLOGY, pipe=2)
    report = zero.pipeline_report(staged_loss, params, planned.batch(16), mesh=mesh, config=config)
    assert step().sent_per_run == report.loops[0].bytes_per_tick
    assert step().pipe_seconds > 0 and found.step(setting(1)).pipe_seconds == 0
    # 5 runs of half of the layers on a quarter of the examples, again for the backward pass, on two devices; or 4 runs.
    roofline = found.rooflines[True]
    assert step().loss_seconds(roofline) > found.step(setting(1)).loss_seconds(roofline)
    assert step(remat="full").loss_seconds(roofline) == pytest.approx(step().loss_seconds(roofline), rel=0.1)
    # 9 runs of half of these layers, in which stages wait less.
    assert 0.7 < step(pipeline="circular:2").loss_seconds(roofline) / step().loss_seconds(roofline) < 1
    # 3 microbatches wait in a stage; all of them do.
    assert step(pipeline="1f1b").activation_bytes(step().traced) < step().activation_bytes(step().traced)
    with pytest.raises(ValueError, match="what stages of a pipeline keep is not chosen"):
        found.estimate(staged_setting(1, remat="auto"))
    with pytest.raises(ValueError, match="num_microbatches=3 with 2 stages"):
        found.estimate(staged_setting(1, num_microbatches=3))


def test_groups_of_layers_that_are_recomputed_one_by_one_do_not_run_once_more():
    def loss_fn(params, batch):
        layer = jax.checkpoint(lambda x, w: (jax.nn.relu(x @ w), None))
        return jnp.mean((jax.lax.scan(layer, batch["x"], params["layers"])[0] @ params["head"] - batch["y"]) ** 2)

    found = staged_estimator(loss_fn=loss_fn)
    step = lambda pipeline: found.step(staged_setting(1, pipeline=pipeline))  # noqa: E731
    seconds = lambda pipeline: step(pipeline).loss_seconds(found.rooflines[True])  # noqa: E731
    for pipeline, of_one_group in (("circular:2", "gpipe"), ("1f1b:2", "1f1b")):
        assert not step(pipeline).recomputes and seconds(pipeline) < seconds(of_one_group)
        # What each layer of the groups that wait begins with, and not that of each group alone.
        kept = step(pipeline).activation_bytes(step(pipeline).traced)
        assert kept > step(pipeline).schedule.num_kept(2, 4) * step(pipeline).sent_per_run


SCHEDULES = {"gpipe", "1f1b", "1f1b:2", "circular:2"}


def test_a_pipeline_is_searched_on_several_slices():
    options = {"remats": ("own",), "stages": (1,), "overlaps": (True,), "max_num_microbatches": 4}
    search = functools.partial(by_estimate, staged_loss, staged_init, **options)
    found = search(topology="2xv5e:2x2")
    assert tried(found, "pipe") == {1, 2, 4} and tried(found, "pipeline") == SCHEDULES  # 8 are more than layers
    assert tried(search(), "pipe") == {1}
    assert tried(search(pipes=(2,), pipelines=("1f1b",)), "pipeline") == {"1f1b"}
    with pytest.raises(ValueError, match=r"pipe=8: .*its 4 layers are fewer than 8 stages"):
        search(pipes=(8,), topology="v5e:2x4")


def large(key):
    """1.6 billion params: 22 GB of state in mixed precision."""
    return {"layers": [jnp.zeros((40_000, 40_000))]}


def test_offload_is_searched_where_nothing_fits():
    large_loss = lambda params, batch: jnp.mean((batch["x"] @ params["layers"][0]) ** 2)  # noqa: E731
    options = {"batch": {"x": jax.ShapeDtypeStruct((4, 40_000), jnp.bfloat16)}, "topology": "v5e:1x1"}
    options |= {"remats": ("own",), "max_num_microbatches": 1}
    found = by_estimate(large_loss, large, **options)
    assert tried(found, "offload") == {None, "optimizer", "state", "all"}
    assert found.best.offload == "optimizer" and json.loads(json.dumps(found.to_json()))["best"]["offload"]
    by_offload = {x.setting.offload: x for x in found.ranked}
    assert by_offload["optimizer"].figures.host_bytes == pytest.approx(8 * 1.6e9, rel=0.001)
    assert "host GB" in str(found) and "12.8" in str(found)
    assert tried(by_estimate(large_loss, large, **options, offloads=()), "offload") == {None}
    assert tried(by_estimate(large_loss, large, **options, offloads=("state",)), "offload") == {None, "state"}
    config = dataclasses.replace(CONFIG, offload="state")
    assert tried(by_estimate(large_loss, large, **options, config=config), "offload") == {"state"}
    assert tried(by_estimate(stages=(3,)), "offload") == {None}  # all fit without


def test_a_trace_serves_all_batch_sizes():
    def of(batch_size, traced):
        job = dataclasses.replace(estimator().job, batch=planned.batch(traced))
        policies = {"own": traces.Policy(loss_fn=planned.loss_fn, remat="own")}
        return estimates.Estimator(job, policies).estimate(setting(3, batch_size=batch_size, num_microbatches=2))

    one, other = of(64, 16), of(64, 64)
    assert one.seconds == pytest.approx(other.seconds) and one.bytes == pytest.approx(other.bytes)
    assert one.seconds > of(16, 16).seconds and one.bytes > of(16, 16).bytes


@pytest.mark.parametrize(
    ("stage", "microbatches", "per_param"), [(0, 1, 2), (1, 1, 0.5), (2, 1, 0.5), (1, 2, 4), (2, 2, 1.5), (3, 2, 1.5)]
)
def test_gradients_and_their_sums(stage, microbatches, per_param):
    assert estimator().step(setting(stage, num_microbatches=microbatches)).grad_bytes == per_param * PSI


def test_more_traffic_takes_longer():
    estimated = estimator()
    seconds = lambda setting: estimated.step(setting).seconds  # noqa: E731
    data_seconds = lambda setting: estimated.step(setting).data_seconds  # noqa: E731
    assert seconds(setting(3)) > seconds(setting(2))
    assert seconds(setting(3, num_microbatches=4)) > seconds(setting(3))
    assert seconds(setting(3, keep_gathered=True)) < seconds(setting(3))
    # Stage 1 sums its microbatches before it sends them.
    assert data_seconds(setting(1, num_microbatches=4)) == data_seconds(setting(1)) == data_seconds(setting(2))
    assert data_seconds(setting(2, num_microbatches=4)) == pytest.approx(2.5 * data_seconds(setting(2)))


def auto(**options):
    settings = {"batch": planned.batch(16), "topology": TOPOLOGY, "config": CONFIG, "own_process": False, "cache": None}
    model = {"loss_fn": planned.loss_fn, "init_fn": planned.init_fn, "tx": optax.adamw(1e-3)}
    return zero.plan_auto(**{**model, **settings, **options})


@pytest.mark.slow
def test_the_best_setting_is_one_that_compiled():
    found = auto(max_compiles=2, stages=(2, 3), max_num_microbatches=1)
    assert found.best is not None and found.best.fits
    assert found.config.stage == found.best.stage == found.ranking.best.stage
    assert found.config.precision == "bf16"
    assert len(found.reports) == 2
    assert "best: stage" in str(found) and "fits: needs" in str(found)
    json.dumps(found.to_json())


@pytest.mark.slow
def test_nothing_fits_but_the_nearest_miss_is_told():
    """64 GB of activations a device of 15.75 GiB."""
    found = auto(batch=planned.batch(4 * 2**26), stages=(3,), max_num_microbatches=1, max_compiles=1, offloads=())
    assert found.best is None and found.config is None
    text = str(found)
    assert "nothing fits; nearest: stage 3" in text
    assert "devices with at least" in text
    assert "short of" in text


SPECS = {"layers/0": P(None, "model"), "layers/1": P("model", None)}


@pytest.mark.parametrize(
    ("topology", "sizes"),
    [
        ("v5p:2x2x4", (1, 2, 4, 8)),
        ("v5e:4x8", (1, 2, 4, 8)),
        ("v5e:16x16", (1, 2, 4, 8, 16)),
        ("h100:2x8", (1, 2, 4, 8)),
    ],
)
def test_the_model_axis_stays_within_a_host_or_dims_of_the_torus(topology, sizes):
    assert links.model_sizes(topology) == sizes


def test_a_share_of_the_model_holds_and_moves_less():
    found = estimator(config=dataclasses.replace(CONFIG, param_specs=SPECS))
    share, whole = found.step(setting(0, data=2, model=2)), found.step(setting(0))
    assert share.state_bytes == pytest.approx(whole.state_bytes / 2)
    assert share.grad_bytes == pytest.approx(whole.grad_bytes / 2)
    (forward,) = found.trace("own", 2, "own").moves  # the products' sum; the batch has no gradient
    assert forward.sent_bytes == 2 * 16 * planned.WIDTH * 2 / 2  # in bfloat16, as the batch is cast
    assert found.step(setting(3, data=2, model=2)).seconds > 0


def by_estimate(loss_fn=planned.loss_fn, init_fn=planned.init_fn, **options):
    settings = {"batch": planned.batch(16), "topology": TOPOLOGY, "config": CONFIG, "max_compiles": 0}
    return zero.plan_auto(loss_fn, init_fn, optax.adamw(1e-3), **{**settings, **options}).ranking


def tried(ranking, field):
    return {getattr(entry.setting, field) for entry in (*ranking.ranked, *ranking.rejected)}


def attend(q, k, v):
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 8
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)


def attention_loss(params, batch):
    """A plain attention of 4 heads of 64."""
    heads = lambda x: x.reshape(*x.shape[:-1], 4, 64)  # noqa: E731
    q, k, v = (heads(batch["x"] @ params[name]) for name in "qkv")
    return (attend(q, k, v).astype(jnp.float32) ** 2).mean()


ATTENTION = {
    "loss_fn": attention_loss,
    "init_fn": lambda key: {name: jax.random.normal(key, (256, 256)) for name in "qkv"},
    "batch": {"x": jax.ShapeDtypeStruct((16, 1024, 256), jnp.bfloat16)},
    "stages": (3,),
    "remats": ("own",),
    "max_num_microbatches": 1,
}


def test_fused_attention_and_overlap_are_searched_where_they_matter():
    """The model's own attention is plain; v5p has options of `overlap`, and v5e has none."""
    found = by_estimate(**ATTENTION, topology="v5p:2x2x1")
    assert tried(found, "attention") == {"own", "fused"} and tried(found, "overlap") == {True, False}
    assert found.best.attention == "fused" and found.best.overlap  # no scores are written, and collectives are hidden
    seconds = {entry.setting: entry.seconds for entry in found.ranked}
    own = dataclasses.replace(found.best, attention="own")
    assert seconds[found.best] < 0.8 * seconds[own] and "attention=fused" in str(found.best)
    assert seconds[found.best] <= seconds[dataclasses.replace(found.best, overlap=False)]
    found = by_estimate(**ATTENTION)
    assert tried(found, "attention") == {"own", "fused"} and tried(found, "overlap") == {True}
    fixed = by_estimate(**ATTENTION, topology="v5p:2x2x1", attentions=("own",), overlaps=(False,))
    assert (tried(fixed, "attention"), tried(fixed, "overlap")) == ({"own"}, {False})
    config = dataclasses.replace(CONFIG, attention="fused", overlap=False)
    fixed = by_estimate(**ATTENTION, topology="v5p:2x2x1", config=config)
    assert (tried(fixed, "attention"), tried(fixed, "overlap")) == ({"fused"}, {False})
    assert tried(by_estimate(stages=(3,)), "attention") == {"own"}  # there is none


@pytest.mark.slow
def test_the_control_has_the_models_own_attention():
    found = auto(**ATTENTION, topology="v5p:2x2x1", max_compiles=2)
    control, other = found.reports
    assert (control.attention, control.overlap) == ("own", True) and other.attention == "fused"
    assert found.reports[other].attention.num_fused == 1 and found.reports[control].attention is None
    assert found.config.attention == found.ranking.best.attention
    times = {setting: report.time.step_seconds for setting, report in found.reports.items()}
    assert times[found.ranking.best] == min(times.values())


@pytest.mark.slow
def test_the_model_axis_is_searched_where_params_have_specs():
    assert tried(by_estimate(stages=(3,)), "model") == {1}
    config = dataclasses.replace(CONFIG, param_specs=SPECS)
    assert tried(by_estimate(stages=(3,), config=config), "model") == {1, 2, 4}
    assert tried(by_estimate(stages=(3,), config=config, models=(2,)), "model") == {2}


@pytest.mark.slow
def test_sizes_that_the_specs_do_not_admit_are_left_out_with_the_reason():
    def init_fn(key):
        return {"layers": [jnp.zeros((planned.WIDTH, 6)), jnp.zeros((6, planned.WIDTH))]}

    said = []
    config = dataclasses.replace(CONFIG, param_specs=SPECS)
    found = by_estimate(init_fn=init_fn, config=config, stages=(3,), log=said.append)
    assert tried(found, "model") == {1, 2}
    assert any("model=4 is left out" in line and "layers/0" in line and "not divisible" in line for line in said)


def scanned(params, batch):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w["up"]) @ w["down"], None), batch["x"], params)
    return jnp.mean((x - batch["y"]) ** 2)


def stack(key):
    return {name: jnp.zeros((8, planned.WIDTH, planned.WIDTH)) for name in ("up", "down")}


@pytest.mark.slow
def test_remat_policies_are_searched_for_a_model_that_knows_of_none():
    said = []
    found = by_estimate(scanned, stack, stages=(3,), max_num_microbatches=1, log=said.append)
    assert {x.setting.remat for x in found.ranked if x.figures.host_bytes} == {"dots_offloaded", "full_offloaded"}
    assert tried(found, "remat") == {"none", "auto", "dots", "full", "dots_offloaded", "full_offloaded"}
    assert "remat=own is left out: it is none for this model" in said
    specs = {"up": P(None, None, "model"), "down": P(None, "model", None)}
    config = dataclasses.replace(CONFIG, param_specs=specs)
    x = jax.ShapeDtypeStruct((16, 64, planned.WIDTH), jnp.float32)
    cut = by_estimate(scanned, stack, stages=(3,), config=config, batch={"x": x, "y": x})
    remats = {(entry.setting.model, entry.setting.remat) for entry in (*cut.ranked, *cut.rejected)}
    assert (2, "full_sharded") in remats and (1, "full_sharded") not in remats


@pytest.mark.slow
def test_batch_sizes_are_searched_where_they_are_given():
    assert tried(by_estimate(stages=(3,)), "batch_size") == {16}
    found = by_estimate(stages=(3,), batch_sizes=(16, 64))
    assert tried(found, "batch_size") == {16, 64} and found.best.batch_size == 64


def test_remat_policies_can_be_given_or_kept():
    assert tried(by_estimate(scanned, stack, stages=(3,), remats=("dots", "full")), "remat") == {"dots", "full"}
    config = dataclasses.replace(CONFIG, remat="full")
    assert tried(by_estimate(scanned, stack, stages=(3,), config=config), "remat") == {"full"}
    with pytest.raises(ValueError, match="leave one out"):
        by_estimate({"a": scanned}, stack, remats=("full",))
    with pytest.raises(ValueError, match="did you mean 'full'"):
        by_estimate(scanned, stack, remats=("ful",))


def test_other_losses_are_tried_where_they_differ():
    """One recomputes the inner activations by itself, the other is the plain one by another name."""

    def recomputed(params, batch):
        inner = jax.checkpoint(lambda x, w: jnp.tanh(x @ w["up"]) @ w["down"])
        x, _ = jax.lax.scan(lambda x, w: (inner(x, w), None), batch["x"], params)
        return jnp.mean((x - batch["y"]) ** 2)

    same = lambda params, batch: scanned(params, batch)  # noqa: E731
    others = {"less": recomputed, "same": same}
    options = {"stages": (3,), "remats": ("own",), "max_num_microbatches": 1}
    found = by_estimate(scanned, stack, **options, other_losses=others)
    assert tried(found, "loss") == {"", "less"}
    sizes = {entry.setting.loss: entry.bytes for entry in found.ranked}
    assert sizes["less"] < sizes[""] and " less" in str(found)
    assert found.best.loss == ""  # the one that computes nothing twice
    with pytest.raises(ValueError, match="leave one out"):
        by_estimate({"a": scanned}, stack, other_losses=others)
    with pytest.raises(ValueError, match=r"other_losses=.*give a dict"):
        by_estimate(scanned, stack, other_losses=recomputed)


def test_nothing_is_hidden_where_memory_is_full():
    found = estimator(topology="v5p:2x2x1")
    usable = found.hardware.usable_bytes
    roomy, full = (
        estimates.Estimator(found.job, found.policies, temporaries=lambda _, share=share: share * usable).step(
            setting(3)
        )
        for share in (0.9, 0.98)
    )
    assert roomy.seconds < full.seconds <= roomy.seconds + full.data_seconds


@pytest.mark.slow
def test_keep_gathered_of_the_config_is_kept():
    config = dataclasses.replace(CONFIG, keep_gathered=True)
    assert tried(by_estimate(stages=(3,), config=config), "keep_gathered") == {True}
    assert tried(by_estimate(stages=(2,), config=config), "keep_gathered") == {False}


def test_a_crash_of_the_compiler_is_a_reason(monkeypatch):
    def crash(*arguments, **options):
        raise zero.CompilerCrash("the compiler's process was ended by SIGSEGV")

    monkeypatch.setattr(importlib.import_module("zero_jax.planning.auto"), "compile_plan", crash)
    found = auto(stages=(3,), max_compiles=1)
    assert found.best is None
    assert "SIGSEGV" in str(found)


def test_the_losses_are_those_of_the_remat_policies():
    calls = []

    def remat(params, batch):
        calls.append("full")
        return jax.checkpoint(planned.loss_fn)(params, batch)

    found = zero.plan_auto(
        {"full": remat, "none": planned.loss_fn}, planned.init_fn, optax.adamw(1e-3), batch=planned.batch(16),
        topology=TOPOLOGY, config=CONFIG, stages=(3,), max_num_microbatches=1, max_compiles=4, own_process=False,
        cache=None,
        temporaries=lambda setting: 1e9 if setting.remat == "none" else jnp.inf,
    )  # fmt: skip
    assert found.ranking.best.remat == "none"
    assert any(entry.setting.remat == "full" for entry in found.ranking.rejected)


@pytest.mark.slow
def test_the_command_writes_a_config_that_train_takes(tmp_path, capsys):
    written = tmp_path / "auto.toml"
    model = "--model gpt-tiny --num-layers 1 --seq-len 16 --d-model 32 --num-heads 2 --remat full".split()
    status = cli.main(
        ["plan", "--auto", *model, "--topology", TOPOLOGY, "--batch-size", "8", "--max-compiles", "1",
         "--cache", "none", "--write-config", str(written), "--json"]
    )  # fmt: skip
    assert status == 0
    best = json.loads(capsys.readouterr().out)["best"]
    train = ["train", "--config", str(written), "--devices", "4", "--steps", "2", "--warmup-steps", "1"]
    run = ["--eval-batches", "1", "--sample-tokens", "0", "--out", str(tmp_path / "runs"), "--name", "a", "--json"]
    assert cli.main([*train, *run]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["stage"], result["num_params"]) == (best["stage"], best["num_params"])


def test_the_command_tries_activations_that_keep_less(tmp_path):
    """Those of the options that are left open: a small vocabulary has no chunks; capped logits have them."""

    def others(*options):
        parsed = cli.parse(["plan", *options])
        return activations.other_activations(activations.planned_model(parsed), explicit(parsed))

    llama = ("--model", "llama-3.2-1b")
    assert list(others(*llama)) == ["sequence_parallel", "loss_chunk=8192", "sequence_parallel loss_chunk=8192"]
    (both,) = (others(*llama)[name] for name in ["sequence_parallel loss_chunk=8192"])
    assert (both.sequence_parallel, both.loss_chunk) == (True, 8192)
    assert list(others(*llama, "--loss-chunk", "4096")) == ["sequence_parallel"]
    assert others(*llama, "--loss-chunk", "4096")["sequence_parallel"].loss_chunk == 4096
    assert list(others(*llama, "--no-sequence-parallel")) == ["loss_chunk=8192"]
    assert list(others("--model", "gemma-2-2b")) == list(others(*llama))
    assert list(others("--model", "gpt-tiny")) == ["sequence_parallel"]


def test_a_written_config_keeps_every_setting_of_the_plan(tmp_path):
    written = tmp_path / "plan.toml"
    (tmp_path / "run.toml").write_text('[data]\ndata = "texts"\n[run]\ndevices = 8\nbatch_size = 64\n')
    words = ["--model", "gpt-tiny", "--topology", TOPOLOGY, "--write-config", str(written)]
    options = cli.parse(["plan", "--config", str(tmp_path / "run.toml"), *words])
    chosen = zero.ZeroConfig(stage=3, precision="bf16", offload="state", offload_fraction=0.5, quantize_gathers="fp8")
    report = types.SimpleNamespace(batch_size=8, topology=TOPOLOGY, mesh={"data": 4})
    activations = presets.ActivationConfig(loss_chunk=64)
    run_config.write_plan(options, report, gpt.PRESETS["gpt-tiny"], zero=chosen, activations=activations)
    read = cli.parse(["train", "--config", str(written)])
    assert getattr(read, "ActivationConfig.loss_chunk") == 64
    run = {name: getattr(read, name) for name in ("DataConfig.data", "TrainConfig.devices", "TrainConfig.batch_size")}
    assert list(run.values()) == ["texts", None, 8]  # of the file, of none, of the plan
    fields = ("stage", "precision", "offload", "offload_fraction", "quantize_gathers")
    assert {name: getattr(read, f"ZeroConfig.{name}") for name in fields} == {n: getattr(chosen, n) for n in fields}

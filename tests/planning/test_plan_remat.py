"""Plans of steps that choose what their blocks keep: the budget that is left, and what the compiler corrects."""

import dataclasses
import functools
import json
import types

import jax
import jax.numpy as jnp
import optax
import pytest

import zero_jax as zero
from zero_jax.models import gpt
from zero_jax.planning import estimates, plans, process, ranking, traces
from zero_jax.planning import report as plan_report
from zero_jax.sharding.topology import HARDWARE
from zero_jax.training import MEMORY_ROOM
from zero_jax.transforms import resolve_remat
from zero_jax.transforms.remat.choice import ValueBudget, ValueChoice, ValueRow

pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'jax[tpu]'")
pytestmark = pytest.mark.tpu_compiler
GPT = gpt.GPTConfig(vocab_size=512, seq_len=1024, num_layers=4, d_model=1024, num_heads=8, scan=True, remat=False)
USABLE = HARDWARE["v5e"].usable_bytes


def init_fn(key):
    return {name: jax.random.normal(key, (4, 4096, 4096)) for name in "abcdef"}


def loss_fn(params, batch):
    def block(x, layer):
        for name in "abcdef":
            x = x + jnp.tanh(x @ layer[name])
        return x, None

    return jnp.square(jax.lax.scan(block, batch, params)[0]).mean()


def make_job(num_examples=256, loss_fn=loss_fn, init_fn=init_fn, batch=None, **config):
    return plans.make_job(
        loss_fn=loss_fn,
        init_fn=init_fn,
        tx=optax.adamw(1e-3),
        batch=batch or jax.ShapeDtypeStruct((num_examples, 256, 4096), jnp.bfloat16),
        topology="v5e:2x2",
        config=zero.ZeroConfig(**{"precision": "bf16", "remat": "auto", **config}),
    )


@dataclasses.dataclass
class Compiled:
    """What stands for the report on a program."""

    config: zero.ZeroConfig
    needed_bytes: float
    usable_bytes: float = USABLE
    values: object = None
    remat: str = ""

    @property
    def fits(self):
        return self.needed_bytes <= self.usable_bytes

    @property
    def time(self):  # what is kept saves time
        return types.SimpleNamespace(step_seconds=10 - self.needed_bytes / USABLE)


def reported(monkeypatch, job, beside, **options):
    """Returns the report on a job, and all that were compiled, of programs that need so much beside what they keep."""
    compiled, kept, choose = [], [], process._choice

    def choice(job, remat):
        chosen = choose(job, remat)
        kept.append(chosen.kept_bytes)
        return chosen

    def make_report(job, **_):
        compiled.append(Compiled(job.config, kept[-1] + beside))
        return compiled[-1]

    monkeypatch.setattr(process, "make_report", make_report)
    monkeypatch.setattr(process, "_choice", choice)
    here = process.CompileOptions(name="test", cache=None, own_process=False)
    return process.compile_plan(job, here, **options), compiled


def test_the_budget_is_what_the_step_leaves_and_the_compiler_corrects_it(monkeypatch):
    report, compiled = reported(monkeypatch, make_job(), 14e9)
    assert not compiled[0].fits and report.fits and len(compiled) <= 3
    assert report.values.kept_bytes + 14e9 <= USABLE
    assert report.remat.startswith("auto:")
    # Its name leads to the same values again, which is what a config file has.
    again = process._choice(make_job(), resolve_remat(report.values.policy_name))
    assert again.remat == report.values.remat


def test_what_the_first_program_leaves_is_filled_on_demand(monkeypatch):
    job = make_job(num_examples=1024)
    with monkeypatch.context() as patched:
        first, compiled = reported(patched, job, 1e9, fills=False)
    assert first.fits and len(compiled) == 1
    with monkeypatch.context() as patched:
        filled, compiled = reported(patched, job, 1e9)
    assert filled.fits and filled.needed_bytes > first.needed_bytes and len(compiled) == 2
    smaller, compiled = reported(monkeypatch, make_job(), 14e9, fills=False)  # too large at first
    assert smaller.fits and len(compiled) == 2


@pytest.mark.parametrize(
    ("place", "host_seconds", "is_filled"),
    [("", 0.0, True), ("offloaded", 1.0, True), ("offloaded", 0.0, False), ("device", 1.0, False)],
)
def test_what_gains_by_more_memory_is_recomputed_or_waits_for_the_host(place, host_seconds, is_filled):
    row = ValueRow(value="input", num_bytes=1e9, host_seconds=host_seconds, place=place)
    values = ValueChoice(budget=ValueBudget(device_bytes=1e9), rows=(row,))
    assert (process._slack(Compiled(zero.ZeroConfig(), 5e9), values) > 0) == is_filled


def test_a_budget_that_is_given_is_not_corrected(monkeypatch):
    report, compiled = reported(monkeypatch, make_job(remat="auto:3"), 0.0)
    assert len(compiled) == 1 and report.values.budget.device_bytes == 3e9
    policy = resolve_remat(compiled[0].config.remat)
    assert policy.save and policy.policy == "values"
    json.dumps(report.values.to_json())


def test_what_does_not_fit_beside_the_blocks_is_refused():
    with pytest.raises(ValueError, match="GB a device beside what blocks keep, by estimate"):
        process._choice(make_job(num_examples=2**16), resolve_remat("auto"))


@pytest.mark.parametrize("stage", [1, 2])
def test_of_one_device_no_gradient_is_whole_beside_its_shard(stage):
    def budget(stage):
        job = dataclasses.replace(make_job(num_examples=4, stage=stage), topology="v5e:1x1")
        return process._choice(job, resolve_remat("auto")).budget

    assert budget(stage) == budget(0)


def test_experts_that_activations_go_to_leave_more_to_the_blocks():
    """They are not gathered: three of four devices' experts of a layer."""

    def loss_fn(params, batch):
        def layer(x, w):
            return jnp.einsum("becf,efd->becd", jnp.tanh(jnp.einsum("becd,edf->becf", x, w)), w.mT), None

        return jax.lax.scan(layer, batch, params["up"])[0].astype(jnp.float32).mean()

    batch, init = (
        jax.ShapeDtypeStruct((16, 4, 8, 4096), jnp.bfloat16),
        lambda key: {"up": jnp.zeros((2, 4, 4096, 4096))},
    )
    budgets = [
        process._choice(make_job(loss_fn=loss_fn, init_fn=init, batch=batch, experts=x), resolve_remat("auto")).budget
        for x in ("up", None)
    ]
    more = budgets[0].device_bytes - budgets[1].device_bytes
    assert more == pytest.approx(3 / 4 * (4 * 4096 * 4096 * 2), abs=2e6)


def test_a_pipeline_is_refused():
    job = dataclasses.replace(make_job(num_microbatches=4), pipe=2)
    with pytest.raises(ValueError, match="stages of a pipeline keep"):
        process._choice(job, resolve_remat("auto"))


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["own", "fused"])
def test_a_search_estimates_each_setting_with_the_values_that_it_has_memory_for(attention):
    """Less memory than all, less time than none: it is between the policies that keep nothing and everything."""
    policies = {name: traces.Policy(loss_fn=gpt.loss_fn(GPT), remat=name) for name in ("full", "auto", "none", "dots")}
    batch = dict.fromkeys(("inputs", "targets"), jax.ShapeDtypeStruct((256, GPT.seq_len), jnp.int32))
    job = make_job(loss_fn=gpt.loss_fn(GPT), init_fn=functools.partial(gpt.init, GPT), batch=batch)
    found = estimates.Estimator(job, policies)
    setting = ranking.Candidate(stage=3, data=4, batch_size=256, remat="auto", num_microbatches=4, attention=attention)
    of = lambda name: found.estimate(dataclasses.replace(setting, remat=name))  # noqa: E731
    full, auto, none = map(of, ("full", "auto", "none"))
    assert full.bytes < auto.bytes <= (1 - MEMORY_ROOM) * USABLE * 1.02
    assert auto.bytes < none.bytes or none.seconds >= auto.seconds
    assert auto.seconds < full.seconds
    dots = of("dots")
    assert auto.seconds <= dots.seconds or dots.bytes > auto.bytes


def test_a_plan_says_where_nothing_is_hidden_for_want_of_memory():
    waiting = types.SimpleNamespace(collective_seconds=1.0, exposed_seconds=0.99, host_seconds=0.0)
    of_host = types.SimpleNamespace(collective_seconds=1.0, exposed_seconds=0.99, host_seconds=0.5)
    (note,) = plan_report._too_full(0.995, waiting)
    assert note.startswith("collectives are not overlapped: the program is at 99.5% of memory")
    assert not plan_report._too_full(0.995, of_host) and not plan_report._too_full(0.9, waiting)

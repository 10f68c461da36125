"""What programs of the TPU compiler send, beside what the formula says; it needs no TPU.

The bound is 8%: XLA:TPU's windowed reduce-scatters send (n + 1) / n for (n - 1) / n, lookups move a few rows.
"""

import functools
import json
import re

import jax
import jax.numpy as jnp
import optax
import pytest

pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'jax[tpu]'")

import zero_jax as zero
from zero_jax import comms
from zero_jax.models import gpt

pytestmark = [pytest.mark.tpu_compiler, pytest.mark.slow]
V5P, V5E, TORUS = "v5p:2x4x4", "v5e:4x8", "v5p:4x4x4"
TX = optax.adamw(1e-3)


def model(scan):
    return gpt.GPTConfig(vocab_size=512, seq_len=256, num_layers=2, d_model=512, num_heads=4, scan=scan)


@functools.cache
def compiled(topology, stage, scan, replica=1, num_examples=2, naive=False, overlap=False):
    """Returns the estimate and the report of a step with some examples of 256 tokens for each device."""
    mesh = zero.make_mesh(topology=topology, replica=replica)
    config = zero.ZeroConfig(stage=stage, precision="bf16", overlap=overlap)
    state = zero.abstract_state(functools.partial(gpt.init, model(scan)), TX, mesh=mesh, config=config)
    tokens = jax.ShapeDtypeStruct(
        (num_examples * mesh.size, 256), jnp.int32, sharding=zero.batch_sharding(mesh) if naive else None
    )
    batch = {"inputs": tokens, "targets": tokens}
    if naive:
        loss_fn = gpt.loss_fn(model(scan))
        shardings = jax.tree.map(lambda x: x.sharding, (state.params, state.opt_state))

        def step(params, opt_state, batch):
            grads = jax.grad(lambda p: loss_fn(jax.tree.map(lambda x: x.astype(jnp.bfloat16), p), batch)[0])(params)
            updates, opt_state = TX.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        program = jax.jit(step, out_shardings=shardings).lower(state.params, state.opt_state, batch).compile()
    else:
        program = zero.make_train_step(gpt.loss_fn(model(scan)), TX, mesh=mesh, config=config)
        program = program.lower(state, batch).compile()
    return comms.estimate(state, mesh=mesh, config=config), comms.measure(program)


CONFIGS = [(V5E, 1, False), (V5E, 2, True), (V5P, 3, True), (V5E, 3, False)]


@pytest.mark.parametrize(("topology", "stage", "scan"), CONFIGS)
def test_a_step_sends_what_the_formula_says(topology, stage, scan):
    estimate, report = compiled(topology, stage, scan)
    comparison = comms.compare(estimate, report)
    assert comparison.total.ratio == pytest.approx(1, abs=0.08), f"{comparison}\n{report}"
    assert set(report.by_axes) == {"data"}
    for row in comparison.rows:
        share = abs(row.measured_bytes - row.estimated_bytes) / estimate.sent_bytes
        assert share < 0.08, f"{comparison}\n{report}"
    assert not report.findings, report
    json.dumps(report.to_json())


def test_gathers_are_named_after_their_params():
    _, report = compiled(V5P, 3, True)
    gathers = [row for row in report.rows if row.kind == "all-gather" and row.dtype == "bf16"]
    assert gathers
    assert all(row.is_named for row in gathers)
    assert {"blocks/up", "blocks/query", "embed"} <= {row.param for row in gathers}
    # Twice per layer, once in the forward and once in the backward pass.
    assert {row.phase for row in gathers if row.param == "blocks/up"} == {"forward", "backward"}
    assert sum(row.num_executions for row in gathers if row.param == "blocks/up") == 4


def test_the_largest_buffer_does_not_grow_with_depth():
    _, report = compiled(V5P, 3, True)
    # The gradients of one layer in bf16, in one reduce-scatter.
    assert report.largest_buffer_bytes <= 2 * 12 * 512**2
    assert report.largest_buffer.kind == "reduce-scatter"


def test_replicas_are_summed_over_their_own_axis():
    estimate, report = compiled(V5P, 3, True, replica=2)
    assert set(estimate.by_axes) == {"data", "replica"}  # leaves too small to be cut: first the one, then the other
    assert report.by_axes["replica"] == pytest.approx(estimate.by_axes["replica"], rel=0.08)
    assert report.sent_bytes == pytest.approx(estimate.sent_bytes, rel=0.08), comms.compare(estimate, report)
    assert not report.findings


def test_each_torus_dim_carries_its_part():
    estimate, report = compiled(TORUS, 3, True)
    assert {"data_2", "data_0+data_1"} <= set(estimate.by_axes)
    for axes, sent in estimate.by_axes.items():
        share = abs(report.by_axes.get(axes, 0) - sent) / estimate.sent_bytes
        assert share < 0.02, comms.compare(estimate, report)


def test_few_tokens_are_enough_for_reduce_scatters():
    """One short example a device: left alone, XLA:TPU combines the gradients and all-reduces them, twice the bytes."""
    estimate, report = compiled("v5p:2x2x4", 2, True, num_examples=1)
    assert report.by_phase["backward"] == pytest.approx(estimate.by_phase["backward"], rel=0.05)
    assert not report.findings


def test_collectives_on_the_sparse_cores_are_counted_as_others():
    without, report = (compiled("v5p:2x2x2", 3, True, overlap=overlap)[1] for overlap in (False, True))
    assert report.by_axes == pytest.approx(without.by_axes, rel=0.02)
    for phase, sent in without.by_phase.items():
        assert report.by_phase[phase] == pytest.approx(sent, abs=0.02 * without.sent_bytes)
    assert not report.findings
    scattered, without_options = (
        {row.is_async for row in each.rows if row.kind == "reduce-scatter" and row.full_bytes > 1e5}
        for each in (report, without)
    )
    assert scattered == {True} and without_options == {False}  # gathers over several torus dims stay as they are


def test_what_is_off_with_naive_sharding_is_named():
    estimate, report = compiled(V5P, 3, True, naive=True)
    assert report.sent_bytes > 1.5 * estimate.sent_bytes
    assert report.findings
    assert all(re.search(r"[\d.]+ [KMG]B", str(finding)) for finding in report.findings), report


def test_a_table_that_is_turned_for_its_lookup_is_named():
    """Rows of a few examples move less than a table of which each device has other rows: these become columns first."""

    def loss(params, tokens):
        x = jnp.tanh(params["table"][tokens] @ params["weight"])
        return jnp.mean(jnp.square((x @ params["table"].T).astype(jnp.float32)))

    mesh, config = zero.make_mesh(topology="v5p:2x2x4"), zero.ZeroConfig(stage=3, precision="bf16", overlap=False)
    init = {"table": (4096, 256), "weight": (256, 256)}
    state = zero.abstract_state(
        lambda _: {name: jnp.zeros(shape) for name, shape in init.items()}, TX, mesh=mesh, config=config
    )
    assert state.params["table"].sharding.spec[0] == "data"
    step = zero.make_train_step(loss, TX, mesh=mesh, config=config)
    report = comms.measure(step.lower(state, jax.ShapeDtypeStruct((mesh.size, 64), jnp.int32)).compile())
    turned = [row for row in report.rows if row.kind == "all-to-all" and row.phase == "forward"]
    assert turned
    assert all(row.is_named and row.param == "table" for row in turned), report
    assert not report.findings, report

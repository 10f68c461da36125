"""Estimated bytes are those of live arrays, for every stage, precision and optimizer."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from covering import covering_array
from jax.sharding import PartitionSpec
from paper_formulas import PAPER_CASES, model_state_bytes
from reference import MIN_SHARD_SIZE, host_params, init_params, make_config, mesh_of

import zero_jax as zero
from zero_jax.analysis.memory import TransformerResiduals, estimate, transformer_residuals
from zero_jax.models import gpt

PSI = sum(x.size for x in jax.tree.leaves(host_params()))
STAGES = dict(enumerate(PAPER_CASES.values()))

OPTIMIZERS = {
    "adamw": (lambda: optax.adamw(1e-2), 8),
    "adamw_bf16_momentum": (lambda: optax.adamw(1e-2, mu_dtype=jnp.bfloat16), 6),
    "sgd": (lambda: optax.sgd(1e-2), 0),
    "momentum": (lambda: optax.sgd(1e-2, momentum=0.9), 4),
    "lion": (lambda: optax.lion(1e-3), 4),
    "clipped": (lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), 8),
    "ema": (lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9)), 12),
    "multi_steps": (lambda: optax.MultiSteps(optax.adamw(1e-2), every_k_schedule=2), 12),
    "adafactor": (lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8), None),
    "muon": (lambda: optax.contrib.muon(1e-2), None),
    "masked": (lambda: optax.masked(optax.trace(0.9), {"embed": True, "layers": False, "head": False}), None),
    "galore": (lambda: optax.contrib.galore(1e-2, rank=4), None),
    "add_noise": (lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.sgd(1e-2)), 0),
}


def make_abstract(tx, *, mesh="8", init_fn=init_params, **fields):
    config = make_config(**fields)
    return zero.abstract_state(init_fn, tx, mesh=mesh_of(mesh), config=config), config


def live_bytes(tree):
    """Returns the bytes of live arrays on each device that holds any."""
    held = {}
    for x in jax.tree.leaves(tree):
        x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for shard in x.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return set(held.values()) or {0}


def assert_explained(got):
    """Asserts that the differences of each group add up to what the group has over the formula."""
    for group in got.groups:
        reasons = sum(d.device_bytes for d in got.differences if d.group == group.name)
        assert group.device_bytes - group.formula_bytes == pytest.approx(reasons, abs=1e-6), group.name


STATES = covering_array({"stage": STAGES, "precision": ["fp32", "bf16", "fp16"], "mesh": ["8", "3", "replica"]})


@pytest.mark.parametrize(("stage", "precision", "mesh"), [tuple(row.values()) for row in STATES])
def test_state_bytes_are_those_of_live_arrays(stage, precision, mesh):
    tx, config = optax.adamw(1e-2), make_config(stage=stage, precision=precision)
    state = zero.init_state(host_params(), tx, jax.random.key(0), mesh=mesh_of(mesh), config=config)
    got = estimate(state, mesh=mesh_of(mesh), config=config)
    for name in ("params", "master", "opt_state"):
        assert live_bytes(getattr(state, name)) == {got.by_group[name]}, name
    assert live_bytes(state) == {got.state_bytes}
    assert got.optimizer_bytes == (8 if precision == "fp32" else 12)
    assert got.num_params == PSI
    assert_explained(got)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_k_comes_from_the_state(name, stage):
    make, expected = OPTIMIZERS[name]
    state, config = make_abstract(make(), stage=stage, precision="bf16")
    got = estimate(state, mesh=mesh_of("8"), config=config)
    if expected is None:  # what the optimizer keeps beside its scalars
        expected = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.opt_state) if x.ndim) / PSI
    assert got.optimizer_bytes == pytest.approx(4 + expected)
    local = sum(
        np.prod(x.sharding.shard_shape(x.shape), dtype=int) * x.dtype.itemsize for x in jax.tree.leaves(state.opt_state)
    )
    assert got.by_group["opt_state"] == local
    assert_explained(got)


def test_k_of_factored_moments_is_close_to_that_of_the_master_alone():
    state, config = make_abstract(optax.adafactor(1e-2, min_dim_size_to_factor=8), stage=1, precision="bf16")
    assert 4 < estimate(state, mesh=mesh_of("8"), config=config).optimizer_bytes < 8
    state, config = make_abstract(OPTIMIZERS["masked"][0](), stage=1, precision="bf16")
    table = 24 * 16  # the only moments kept
    assert estimate(state, mesh=mesh_of("8"), config=config).optimizer_bytes == pytest.approx(4 + 4 * table / PSI)


def big_params(key):
    del key
    return {"a": jnp.zeros((64, 128)), "b": jnp.zeros((128, 32))}


@pytest.mark.parametrize("stage", STAGES)
def test_formula_is_the_papers(stage):
    state, config = make_abstract(optax.adamw(1e-2), init_fn=big_params, stage=stage, precision="bf16")
    got = estimate(state, mesh=mesh_of("8"), config=config)
    num_params = 64 * 128 + 128 * 32
    expected = sum(model_state_bytes(num_params, sharded=STAGES[stage], num_devices=8).values())
    assert (got.param_bytes, got.grad_bytes, got.optimizer_bytes) == (2, 2, 12)
    assert got.formula_bytes == expected
    assert not got.whole
    # Beside counters, the state differs where it keeps less than the paper: at stage 3 the low-precision copy,
    # and at stage 1 whole gradients, which are scattered as they are made.
    less = {0: 0, 1: 2 * num_params * 7 / 8, 2: 0, 3: 2 * num_params / 8}[stage]
    counters = got.by_group["other"] + 4  # and the optimizer's count
    assert got.total_bytes == expected - less + counters
    assert_explained(got)


@pytest.mark.parametrize(
    ("stage", "num_microbatches", "bytes_each"),
    # bf16 gradients of one microbatch, float32 sums of several; shards of an eighth.
    [(0, 1, 2), (1, 1, 2 / 8), (2, 1, 2 / 8), (3, 1, 2 / 8), (0, 2, 4), (1, 2, 4), (2, 2, 4 / 8), (3, 2, 4 / 8)],
)
def test_gradients(stage, num_microbatches, bytes_each):
    state, config = make_abstract(
        optax.adamw(1e-2), init_fn=big_params, stage=stage, precision="bf16", num_microbatches=num_microbatches
    )
    got = estimate(state, mesh=mesh_of("8"), config=config)
    assert got.by_group["grads"] == bytes_each * (64 * 128 + 128 * 32)
    assert_explained(got)


def test_leaves_left_whole_are_counted_whole_and_named():
    state, config = make_abstract(optax.adamw(1e-2), mesh="3", stage=3, precision="bf16")
    got = estimate(state, mesh=mesh_of("3"), config=config)
    # Of 3 devices: the table [24, 16] divides, layers' [2, 16, 32], the head [16, 8] and the biases do not.
    whole = {leaf.path for leaf in got.whole if leaf.group == "params"}
    assert whole == {"layers/w_in", "layers/w_out", "layers/bias", "head/kernel", "head/bias"}
    assert got.by_group["params"] == 4 * (24 * 16 // 3 + 2 * 16 * 32 * 2 + 2 * 32 + 16 * 8 + 8)
    assert "layers/w_in" in str(got) and "warning: unsharded leaves" in str(got)
    sizes = [leaf.device_bytes for leaf in got.whole]
    assert sizes == sorted(sizes, reverse=True)


def test_leaves_over_another_axis_count_as_they_lie():
    mesh = zero.make_mesh(data=4, model=2)
    specs = {"a": PartitionSpec(None, "model"), "b": PartitionSpec()}
    config = zero.ZeroConfig(stage=1, precision="bf16", param_specs=specs)
    state = zero.abstract_state(big_params, optax.adamw(1e-2), mesh=mesh, config=config)
    got = estimate(state, mesh=mesh, config=config)
    a, b = 64 * 128, 128 * 32
    assert got.by_group["params"] == 2 * (a // 2 + b)
    assert got.by_group["master"] == 4 * (a // 8 + b // 4)
    assert (got.num_devices, got.model) == (4, 2)
    assert {leaf.path for leaf in got.whole if leaf.group == "params"} == {"b"}
    assert_explained(got)
    # Each device sums its own gradients of several microbatches, whole over `data`, cut as the model's specs have it.
    config = dataclasses.replace(config, num_microbatches=2)
    got = estimate(state, mesh=mesh, config=config)
    assert got.by_group["grads"] == 4 * (a // 2 + b)
    assert_explained(got)


def test_integers_and_frozen_params_have_no_gradients():
    def init_fn(key):
        return {**big_params(key), "ids": jnp.zeros((16, 64), jnp.int32)}

    freeze = {"a": "free", "b": "frozen", "ids": "frozen"}
    tx = optax.multi_transform({"free": optax.adamw(1e-2), "frozen": optax.set_to_zero()}, freeze)
    state, config = make_abstract(tx, init_fn=init_fn, stage=2, precision="bf16")
    got = estimate(state, mesh=mesh_of("8"), config=config)
    assert got.num_params == 64 * 128 + 128 * 32
    assert got.by_group["grads"] == 2 * (64 * 128 + 128 * 32) // 8
    assert got.by_group["params"] == 2 * (64 * 128 + 128 * 32) + 4 * 16 * 64
    assert_explained(got)
    told = estimate(state, mesh=mesh_of("8"), config=config, tx=tx)
    assert told.by_group["grads"] == 2 * 64 * 128 // 8
    assert any("freezes" in difference.reason for difference in told.differences)
    assert_explained(told)


def test_frozen_params_are_found_among_keys_and_counters():
    tx = OPTIMIZERS["add_noise"][0]()
    state, config = make_abstract(tx, stage=2)
    assert estimate(state, mesh=mesh_of("8"), config=config, tx=tx).by_group["grads"] == 4 * PSI // 8


def test_residuals():
    kept = TransformerResiduals(num_layers=3, batch_size=2, seq_len=5, d_model=8)
    assert (kept.device_bytes, kept.host_bytes) == (3 * 2 * 5 * 8 * 2, 0)
    state, config = make_abstract(optax.adamw(1e-2), stage=3, precision="bf16")
    plain = estimate(state, mesh=mesh_of("8"), config=config)
    got = estimate(state, mesh=mesh_of("8"), config=config, residuals=kept)
    assert got.total_bytes - plain.total_bytes == kept.device_bytes
    assert "residuals" not in plain.by_group and got.by_group["residuals"] == kept.device_bytes
    offloaded = TransformerResiduals(num_layers=3, batch_size=2, seq_len=5, d_model=8, offload=True)
    got = estimate(state, mesh=mesh_of("8"), config=config, residuals=offloaded)
    assert (got.by_group["residuals"], got.host_bytes) == (0, kept.device_bytes)
    assert "in host memory" in str(got)


def test_residuals_of_a_transformer_in_a_step():
    config = make_config(stage=3, precision="bf16", num_microbatches=2)
    model = gpt.GPTConfig(num_layers=3, d_model=8, num_heads=2, seq_len=5)
    kept = transformer_residuals(model, batch_size=64, mesh=mesh_of("replica"), config=config)
    # 64 examples over 2 replicas x 4 devices x 2 microbatches, in bf16, rematerialized as the model says.
    assert kept == TransformerResiduals(
        num_layers=3, batch_size=4, seq_len=5, d_model=8, bytes_per_element=2, remat=True
    )
    wide = transformer_residuals(model, batch_size=64, mesh=mesh_of("8"), config=make_config(remat="none"))
    assert (wide.bytes_per_element, wide.batch_size, wide.remat) == (4, 8, False)
    with pytest.raises(ValueError, match="multiple of 16"):
        transformer_residuals(model, batch_size=24, mesh=mesh_of("8"), config=config)


def test_prints_and_goes_to_json():
    state, config = make_abstract(optax.adamw(1e-2), stage=2, precision="bf16")
    got = estimate(state, mesh=mesh_of("8"), config=config)
    text = str(got)
    assert "K = 12" in text and "sharded over 8 devices: master, grads, opt_state" in text
    assert all(name in text for name in ("estimate", "formula", "difference", "opt_state", "total", "bytes"))
    data = json.loads(json.dumps(got.to_json()))
    assert data["total_bytes"] == got.total_bytes and data["groups"][0]["name"] == "params"


def test_refuses_what_is_no_train_state():
    with pytest.raises(ValueError, match="abstract_state"):
        estimate(host_params(), mesh=mesh_of("8"), config=make_config())
    assert MIN_SHARD_SIZE == 8  # the tests above count on the biases being sharded

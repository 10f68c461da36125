"""Stochastic rounding: right on average, repeatable, the same on every mesh, and of a device's own shard alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import mesh_of

import zero_jax as zero
from zero_jax import hlo
from zero_jax.training import rounding_key
from zero_jax.training.optimizer.rounding import round_array

KEY = rounding_key(jax.random.key(0))
rounded = jax.jit(round_array, static_argnames=("number", "dtype"))
SMALL = (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2)
NAME = "bf16-stochastic"
# Computed in float32, so that what differs by mesh is the order of sums alone.
EXACT = zero.Precision(param=jnp.bfloat16, compute=jnp.float32, master=jnp.bfloat16, rounding="stochastic")


def as_float64(x):
    return np.asarray(x).astype(np.float64)


@pytest.mark.parametrize("dtype", SMALL)
def test_the_mean_is_the_number(dtype):
    """Of the two neighbors alone; the mean of a million is within five standard errors."""
    for value in (1.001, -1.003, 0.02, 250.3, -3e-5):  # the last one is below all normal numbers of some dtypes
        results = as_float64(rounded(jnp.full((1024, 1024), value, jnp.float32), KEY, number=1, dtype=dtype))
        neighbors = np.unique(results)
        assert len(neighbors) == 2 and neighbors[0] < value < neighbors[1]
        assert abs(results.mean() - np.float32(value)) < 5 * np.diff(neighbors)[0] / 2 / 1024


@pytest.mark.parametrize("dtype", SMALL)
def test_numbers_of_the_dtype_stay(dtype):
    """All of them, NaN and infinities too; and nothing becomes infinite that rounding to nearest keeps finite."""
    bits = np.arange(2 ** (8 * jnp.dtype(dtype).itemsize), dtype=f"uint{8 * jnp.dtype(dtype).itemsize}")
    numbers = bits.view(jnp.dtype(dtype))
    results = np.asarray(rounded(jnp.asarray(numbers.astype(np.float32)), KEY, number=1, dtype=dtype))
    finite = np.isfinite(numbers.astype(np.float32))
    np.testing.assert_array_equal(results[finite].view(bits.dtype), bits[finite])
    np.testing.assert_array_equal(results[~finite].astype(np.float32), numbers[~finite].astype(np.float32))
    largest = np.float32(jnp.finfo(dtype).max)
    above = jnp.linspace(largest, largest * (1 + float(jnp.finfo(dtype).eps) / 4), 1000, dtype=jnp.float32)[:-1]
    assert np.isfinite(as_float64(rounded(above, KEY, number=1, dtype=dtype))).all()


def test_elements_arrays_and_steps_are_independent():
    x = jnp.full((1 << 16,), 1 + 2**-9, jnp.float32)
    steps = [rounding_key(jax.random.fold_in(jax.random.key(0), i)) for i in range(2)]
    up = [as_float64(rounded(x, key, number=i, dtype=jnp.bfloat16)) > 1 for key in steps for i in range(2)]
    pairs = np.corrcoef([*up, np.roll(up[0], 1)]) - np.eye(5)
    assert np.abs(pairs).max() < 5 / 256


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg", "threefry2x32"])
def test_keys_of_all_kinds(impl):
    assert rounding_key(jax.random.key(0, impl=impl)).shape == (2,)
    assert rounding_key(jax.random.PRNGKey(0)).tolist() == KEY.tolist()


# --- in a step -------------------------------------------------------------------------------------------------------


def init(key):
    first, second = jax.random.split(key)
    params = {"in": jax.random.normal(first, (64, 48)), "out": jax.random.normal(second, (3, 48, 8))}
    return {"bias": jnp.zeros(48), "count": jnp.arange(8), **jax.tree.map(lambda x: x / 8, params)}


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"].astype(params["in"].dtype) @ params["in"] + params["bias"])
    return jnp.square(hidden @ params["out"].sum(0) - 1).mean()


BATCH = {"x": np.random.default_rng(0).standard_normal((8, 64), dtype=np.float32)}


def adamw(nu_dtype=None):
    tx = optax.adamw(1e-3, mu_dtype=nu_dtype)
    return tx if nu_dtype is None else zero.round_state(tx, "nu", nu_dtype)


def trained(mesh, tx, num_steps=4, state=None, **fields):
    config = zero.ZeroConfig(min_shard_size=1, **{"precision": NAME} | fields)
    step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
    if state is None:
        state = zero.init_state(init, tx, jax.random.key(0), mesh=mesh, config=config)
    for _ in range(num_steps):
        state, metrics = step(state, BATCH)
    return state, metrics


@functools.cache
def on_one_device():
    return trained(mesh_of("1"), adamw(jnp.bfloat16), stage=0, precision=EXACT)[0]


@pytest.mark.parametrize(
    ("mesh", "fields"),
    [
        pytest.param("4", {"stage": 1}, marks=pytest.mark.slow),
        ("staged222", {"stage": 3}),
        pytest.param("replica", {"stage": 3}, marks=pytest.mark.slow),
        pytest.param(
            "4", {"stage": 1, "offload": zero.Offload(what="optimizer", window_bytes=2000)}, marks=pytest.mark.slow
        ),
        pytest.param("4", {"stage": 3, "offload": zero.Offload(what="all", window_bytes=2000)}, marks=pytest.mark.slow),
    ],
)
def test_params_and_moments_are_those_of_one_device(mesh, fields):
    """All but the few elements that a sum in another order moves over the bound to the neighbor."""
    state, _ = trained(mesh_of(mesh), adamw(jnp.bfloat16), precision=EXACT, **fields)
    expected = on_one_device()
    for group in ("params", "opt_state"):
        got, want = (jax.tree.map(as_float64, getattr(x, group)) for x in (state, expected))
        different = jax.tree.map(lambda a, b: np.mean(a != b), got, want)
        assert max(jax.tree.leaves(different)) < 0.03
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2**-6, atol=1e-6), got, want)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.int32)}
    assert {x.dtype for x in jax.tree.leaves(state.opt_state) if x.ndim} == {jnp.dtype(jnp.bfloat16)}


def test_small_updates_are_lost_to_nearest_alone():
    """Of 2^-11 of a param, in each of 64 steps; to nearest all of them are lost."""
    tx = optax.sgd(1.0)
    params = {"w": jnp.full((64, 64), 1.5)}
    loss = lambda params, batch: -(params["w"].astype(jnp.float32) * batch["x"][0, 0] * 1.5 * 2**-11).sum()  # noqa: E731
    nearest = zero.Precision(param=jnp.bfloat16, master=jnp.bfloat16)
    moved = {}
    for name, precision in {"nearest": nearest, "stochastic": NAME}.items():
        config = zero.ZeroConfig(stage=3, precision=precision)
        state = zero.init_state(params, tx, jax.random.key(0), mesh=mesh_of("4"), config=config)
        step = zero.make_train_step(loss, tx, mesh=mesh_of("4"), config=config)
        for _ in range(64):
            state, _ = step(state, {"x": np.ones((4, 1), np.float32)})
        moved[name] = as_float64(state.params["w"]).mean() - 1.5
    assert moved["nearest"] == 0
    np.testing.assert_allclose(moved["stochastic"], 64 * 1.5 * 2**-11, rtol=0.05)


def test_a_moment_rounded_to_nearest_stands_still():
    """With a decay of 0.999, which changes a moment by less than half a unit of bfloat16."""
    decay, params = 0.999, {"w": jnp.zeros((64, 64))}
    tx = optax.scale_by_adam(b2=decay)
    tx = zero.round_state(tx, "nu", jnp.bfloat16)
    state, update = tx.init(params), jax.jit(tx.update)
    state = state._replace(nu={"w": jnp.ones((64, 64), jnp.bfloat16)})
    nearest = jnp.ones((), jnp.bfloat16)
    for _ in range(200):
        _, state = update({"w": jnp.zeros((64, 64))}, state)
        nearest = (decay * nearest.astype(jnp.float32)).astype(jnp.bfloat16)
    assert nearest == 1
    np.testing.assert_allclose(as_float64(state.nu["w"]).mean(), decay**200, rtol=1e-2)


def test_a_skipped_step_and_frozen_params_stay_bit_for_bit():
    mesh = mesh_of("4")
    tx = optax.multi_transform({"a": optax.adam(1e-3), "b": optax.set_to_zero()}, {"in": "a", "bias": "a", "out": "b"})
    config = zero.ZeroConfig(stage=3, precision=NAME)
    make = lambda key: {name: x for name, x in init(key).items() if name != "count"}  # noqa: E731
    state = zero.init_state(make, tx, jax.random.key(0), mesh=mesh, config=config)
    step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
    before = jax.tree.map(np.asarray, state.params)
    state, metrics = step(state, {"x": np.full_like(BATCH["x"], np.nan)})
    assert metrics.skipped
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state.params), before)
    state, _ = step(state, BATCH)
    after = jax.tree.map(np.asarray, state.params)
    np.testing.assert_array_equal(after["out"], before["out"])
    assert (after["in"] != before["in"]).any()


@pytest.mark.slow
def test_a_resumed_run_repeats_bit_for_bit(tmp_path):
    mesh, tx = mesh_of("4"), adamw(jnp.bfloat16)
    config = zero.ZeroConfig(stage=3, precision=NAME, min_shard_size=1)
    state, _ = trained(mesh, tx, num_steps=2, stage=3)
    with zero.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(int(state.step), state)
    expected, _ = trained(mesh, tx, num_steps=2, state=state, stage=3)
    restored = zero.restore(tmp_path, init_fn=init, tx=tx, mesh=mesh, config=config).state
    found, _ = trained(mesh, tx, num_steps=2, state=restored, stage=3)
    for a, b in zip(
        jax.tree.leaves((found.params, found.opt_state)),
        jax.tree.leaves((expected.params, expected.opt_state)),
        strict=True,
    ):
        np.testing.assert_array_equal(as_float64(a), as_float64(b))


@pytest.mark.slow
def test_a_checkpoint_of_float32_masters_goes_on_and_back(tmp_path):
    mesh, tx = mesh_of("4"), optax.adamw(1e-3)
    state, _ = trained(mesh, tx, num_steps=2, stage=2, precision="bf16")
    with zero.Checkpointer(tmp_path / "a") as checkpointer:
        checkpointer.save(int(state.step), state)
    config = zero.ZeroConfig(stage=3, precision=NAME, min_shard_size=1)
    with pytest.warns(UserWarning, match="saved as float32 and are bfloat16"):
        restored = zero.restore(tmp_path / "a", init_fn=init, tx=adamw(jnp.bfloat16), mesh=mesh, config=config)
    assert "saved as float32 and are bfloat16" in str(restored)
    state, _ = trained(mesh, adamw(jnp.bfloat16), num_steps=1, state=restored.state, stage=3)
    with zero.Checkpointer(tmp_path / "b") as checkpointer:
        checkpointer.save(int(state.step), state)
    config = zero.ZeroConfig(stage=1, precision="bf16", min_shard_size=1)
    state = zero.restore(tmp_path / "b", init_fn=init, tx=tx, mesh=mesh, config=config, log=str).state
    assert {x.dtype for x in jax.tree.leaves((state.master, state.opt_state)) if x.ndim > 1} == {jnp.dtype("float32")}


def test_the_average_of_params_is_of_values_before_they_are_rounded():
    tx = optax.chain(optax.sgd(1e-2), zero.params_ema(0.5))
    state, _ = trained(mesh_of("4"), tx, num_steps=1, stage=3)
    average = as_float64(zero.ema_params(state.opt_state)["in"])
    params = as_float64(state.params["in"])
    assert (average != params).mean() > 0.5
    np.testing.assert_allclose(average, params, rtol=2**-7)


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_each_device_makes_the_bits_of_its_shard(stage):
    """On TPUs: nothing more is sent, and no array of numbers is as large as a param."""
    mesh, sent = zero.make_mesh(topology="v5p:2x2x1"), {}
    make = lambda key: {"w": jax.random.normal(key, (512, 384))}  # noqa: E731
    loss = lambda params, batch: jnp.square(batch["x"] @ params["w"]).mean()  # noqa: E731
    for precision, nu_dtype in (("bf16", None), (NAME, jnp.bfloat16)):
        tx, config = adamw(nu_dtype), zero.ZeroConfig(stage=stage, precision=precision, overlap=False)
        state = zero.abstract_state(make, tx, mesh=mesh, config=config)
        step = zero.make_train_step(loss, tx, mesh=mesh, config=config)
        text = step.lower(state, {"x": jax.ShapeDtypeStruct((16, 512), jnp.bfloat16)}).compile().as_text()
        sent[precision] = hlo.sent_bytes(hlo.collectives(text))
    assert sent[NAME] == sent["bf16"]
    assert "u32[512,384]" not in text and "u32[128,384]" in text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"master": jnp.float32, "rounding": "stochastic"}, r"master=float32.*give a smaller master.*bfloat16"),
        ({"rounding": "stochastic"}, r"master=as initialized.*give a smaller master"),
        ({"master": jnp.bfloat16, "rounding": "stochstic"}, r"rounding='stochstic'.*did you mean 'stochastic'"),
    ],
)
def test_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        zero.Precision(**fields)


@pytest.mark.parametrize(
    ("tx", "dtype", "message"),
    [
        (optax.adam(1e-3), "int8", "dtype='int8': give a floating dtype"),
        (optax.adam(1e-3), "bf17", "dtype='bf17': give a floating dtype"),
        (optax.adam(1e-3), jnp.float16, "dtype=float16 is without the range of float32, and loses values"),
        (optax.adam(1e-3), "float8_e4m3fn", "dtype=float8_e4m3fn is without the range of float32"),
        (optax.adam(1e-3), "float64", "dtype=float64 is wider than float32"),
        (optax.sgd(1e-3), jnp.bfloat16, "the fields 'nu' and 'count'"),
    ],
)
def test_what_no_state_is_kept_in(tx, dtype, message):
    with pytest.raises(ValueError, match=message):
        zero.round_state(tx, "nu", dtype).init({"w": jnp.ones(4)})

"""Optimizer state and master params in host memory: the same numbers, and a window of them on the device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero_jax as zero
from zero_jax import hlo
from zero_jax.sharding.mesh import axes_of
from zero_jax.training.offloaded import Argument, stream
from zero_jax.training.optimizer import chunks

OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    # The whole of it on the host, and norms over all of it: nothing can be cut.
    "norm of updates": optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(0.5), optax.scale(-0.01)),
    "norms of leaves": optax.lamb(1e-2),
    "factored": optax.adafactor(1e-2),
    "frozen": optax.multi_transform(
        {"a": optax.adam(1e-2), "b": optax.set_to_zero()}, {"emb": "a", "layers": {"w": "b", "b": "a"}, "odd": "a"}
    ),
}
BATCH = {"x": np.arange(16) % 64, "y": np.arange(16) * 7 % 64}


def init(key):
    first, second, third = jax.random.split(key, 3)
    return {
        "emb": jax.random.normal(first, (64, 32)) * 0.1,
        "layers": {"w": jax.random.normal(second, (4, 32, 32)) * 0.1, "b": jnp.zeros((4, 32))},
        "odd": jax.random.normal(third, (7, 5)),
    }


def loss_fn(params, batch):
    x, _ = jax.lax.scan(lambda x, p: (jnp.tanh(x @ p["w"] + p["b"]), None), params["emb"][batch["x"]], params["layers"])
    logits = (x @ params["emb"].T).astype(jnp.float32)
    odd = jnp.square(params["odd"].astype(jnp.float32)).mean()
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean() + odd


def trained(tx, num_steps=3, **fields):
    mesh, config = zero.make_mesh(), zero.ZeroConfig(min_shard_size=64, clip_norm=1.0, **fields)
    state = zero.init_state(init, tx, jax.random.key(0), mesh=mesh, config=config)
    before = [x.sharding for x in jax.tree.leaves(state)]
    step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
    for _ in range(num_steps):
        state, metrics = step(state, BATCH)
    assert [x.sharding for x in jax.tree.leaves(state)] == before
    return state, metrics


def numbers(state):
    return jax.tree.map(np.asarray, (state.params, state.master, state.opt_state, state.step))


def assert_same(a, b, *, atol):
    """Compares arrays; those of 16 bits may be rounded to a neighbor."""
    rtol = 1e-5 if a.dtype.itemsize > 2 else 1 / 128
    np.testing.assert_allclose(a.astype(np.float64), b.astype(np.float64), rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("name", "stage", "precision"),
    [
        pytest.param("adamw", 0, "fp32", marks=pytest.mark.slow),
        pytest.param("adamw", 1, "fp16", marks=pytest.mark.slow),
        ("adamw", 2, "bf16"),
        pytest.param("adamw", 3, "bf16", marks=pytest.mark.slow),
        *(pytest.param(name, 2, "bf16", marks=pytest.mark.slow) for name in list(OPTIMIZERS)[1:]),
    ],
)
def test_the_numbers_are_those_of_a_state_on_the_devices(name, stage, precision):
    offload = zero.Offload(what="state", window_bytes=2000)
    there, there_metrics = trained(OPTIMIZERS[name], stage=stage, precision=precision, offload=offload)
    here, here_metrics = trained(OPTIMIZERS[name], stage=stage, precision=precision)
    # Where gradients are of 16 bits, XLA may leave out their rounding on one of the two ways; updates are of 0.01.
    atol = 1e-6 if precision == "fp32" else 1e-4
    jax.tree.map(functools.partial(assert_same, atol=atol), numbers(there), numbers(here))
    np.testing.assert_allclose(there_metrics.loss, here_metrics.loss, rtol=1e-5)
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(there.opt_state) if x.ndim and x.shape == (4, 32, 32)}
    assert kinds <= {"pinned_host"}
    if there.master is not None:
        assert {x.sharding.memory_kind for x in jax.tree.leaves(there.master) if x.size >= 64} == {"pinned_host"}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["optimizer", "all"])
def test_the_chunks_of_gpus_give_the_same_numbers(monkeypatch, what):
    """Their order, on CPU devices."""
    offload = zero.Offload(what=what, window_bytes=2000)
    fields = {"stage": 3, "precision": "fp32", "offload": offload}
    expected, _ = trained(OPTIMIZERS["adamw"], **fields)
    monkeypatch.setattr(chunks, "GPUS", frozenset({"cpu"}))
    found, _ = trained(OPTIMIZERS["adamw"], **fields)
    jax.tree.map(functools.partial(assert_same, atol=1e-6), numbers(found), numbers(expected))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "fields"),
    [
        ("bf16", {}),
        ("fp32", {}),
        ("bf16", {"num_microbatches": 2, "remat": "full"}),
        ("bf16-stochastic", {}),
        ("fp16", {"keep_gathered": True}),
    ],
)
def test_params_are_fetched_where_they_are_used(precision, fields):
    offload = zero.Offload(what="all", window_bytes=2000)
    there, there_metrics = trained(OPTIMIZERS["adamw"], stage=3, precision=precision, offload=offload, **fields)
    here, here_metrics = trained(OPTIMIZERS["adamw"], stage=3, precision=precision, **fields)
    atol = 1e-6 if precision == "fp32" else 1e-4
    jax.tree.map(functools.partial(assert_same, atol=atol), numbers(there), numbers(here))
    np.testing.assert_allclose(there_metrics.loss, here_metrics.loss, rtol=1e-5)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(there.params) if x.size >= 64} == {"pinned_host"}
    config = zero.ZeroConfig(min_shard_size=64, stage=3, precision=precision, offload=offload)
    evaluate = zero.make_eval_step(loss_fn, mesh=zero.make_mesh(), config=config)
    loss = evaluate(there, BATCH).loss
    np.testing.assert_allclose(
        loss, evaluate(jax.device_put(there.params, here_shardings(here)), BATCH).loss, rtol=1e-6
    )


def here_shardings(state):
    return jax.tree.map(lambda x: x.sharding, state.params)


def test_a_state_of_host_arrays_is_made_without_a_warning():
    """Their copies on the devices cannot be donated to params in host memory."""
    params = jax.tree.map(np.asarray, init(jax.random.key(0)))
    config = zero.ZeroConfig(stage=3, min_shard_size=64, offload="all")
    state = zero.init_state(params, optax.adam(1e-2), jax.random.key(0), mesh=zero.make_mesh(), config=config)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state.params), params)


def test_whole_params_stay_on_the_devices():
    with pytest.raises(
        ValueError, match=r"offload='all' keeps the params on the host, which are whole .*give stage=3 without"
    ):
        trained(optax.adam(1e-2), stage=2, precision="bf16", offload="all")


@pytest.mark.slow
def test_a_step_that_is_skipped_leaves_the_host_as_it_is():
    config = {"stage": 2, "precision": "bf16", "offload": "state"}
    state, _ = trained(optax.adam(1e-2), **config)
    before = numbers(state)
    mesh, zero_config = zero.make_mesh(), zero.ZeroConfig(min_shard_size=64, clip_norm=1.0, **config)
    step = zero.make_train_step(
        lambda p, batch: loss_fn(p, batch) * batch["scale"], optax.adam(1e-2), mesh=mesh, config=zero_config
    )
    after, metrics = step(state, BATCH | {"scale": np.float32(np.inf)})
    assert metrics.skipped
    jax.tree.map(np.testing.assert_array_equal, before[:3], numbers(after)[:3])


def test_paths_and_fraction_choose_what_is_on_the_host():
    def on_host(**fields):
        config = zero.ZeroConfig(stage=2, precision="bf16", min_shard_size=64, offload=zero.Offload(**fields))
        state = zero.abstract_state(init, optax.adam(1e-2), mesh=zero.make_mesh(), config=config)
        flagged = jax.tree_util.tree_leaves_with_path((state.master, state.opt_state))
        return {
            jax.tree_util.keystr(path[-1:], simple=True)
            for path, x in flagged
            if x.sharding.memory_kind == "pinned_host"
        }

    assert on_host(what="state") == {"emb", "w", "b"}
    assert on_host(paths=["layers/.*"]) == {"w", "b"}
    assert on_host(paths=["layers/w"], what="state") == {"w"}
    assert on_host(fraction=0.0) == set()
    assert on_host(fraction=0.4) == {"emb", "b"}  # of 6,272 elements w has 4,096


def test_params_that_are_one_array_have_their_moments_on_the_host():
    config = zero.ZeroConfig(stage=2, precision="bf16", min_shard_size=64, offload="state")
    make = lambda key: jax.random.normal(key, (64, 32))  # noqa: E731
    state = zero.abstract_state(make, optax.adam(1e-2), mesh=zero.make_mesh(), config=config)
    kinds = [x.sharding.memory_kind for x in (state.master, state.opt_state[0].mu, state.opt_state[0].nu)]
    assert kinds == ["pinned_host"] * 3


def test_the_estimate_counts_host_bytes_apart():
    mesh = zero.make_mesh()
    sizes = {}
    for offload in (None, "optimizer", "state"):
        config = zero.ZeroConfig(stage=2, precision="bf16", min_shard_size=64, offload=offload)
        state = zero.abstract_state(init, optax.adam(1e-2), mesh=mesh, config=config)
        sizes[offload] = zero.memory.estimate(state, mesh=mesh, config=config)
    large = (64 * 32 + 4 * 32 * 32 + 4 * 32) * 4 // 8
    assert [x.host_bytes for x in sizes.values()] == [0, 2 * large, 3 * large]
    assert sizes[None].total_bytes - sizes["state"].total_bytes == 3 * large
    assert "in host memory" in str(sizes["state"])


@pytest.mark.slow
def test_an_average_of_params_on_the_host_can_be_evaluated():
    tx = optax.chain(optax.adam(1e-2), zero.params_ema(0.9))
    losses = []
    for offload in (None, "optimizer"):
        state, _ = trained(tx, stage=2, precision="bf16", offload=offload)
        config = zero.ZeroConfig(stage=2, precision="bf16", min_shard_size=64, offload=offload)
        evaluate = zero.make_eval_step(loss_fn, mesh=zero.make_mesh(), config=config)
        losses.append(float(evaluate(zero.ema_params(state.opt_state), BATCH).loss))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_only_what_is_elementwise_is_cut():
    sharding = jax.sharding.NamedSharding(zero.make_mesh(), jax.sharding.PartitionSpec())
    host = sharding.with_memory_kind("pinned_host")
    x, y = (jax.device_put(jnp.arange(24.0).reshape(8, 3) + i, host) for i in range(2))
    g = jax.device_put(jnp.ones((8, 3)), sharding)
    forms = {
        "elementwise": lambda x, y, g: [x + g * jnp.square(g).sum(), y * 2],
        "cumulative": lambda x, y, g: [jnp.cumsum(x, axis=0), y + g],
        "reversed": lambda x, y, g: [x[::-1] + g, y],
        "across": lambda x, y, g: [x + y.sum(), y - x.mean()],
        "constant": lambda x, y, g: [jnp.zeros((8, 3)), y.at[0].set(0)],
        "swapped": lambda x, y, g: [y, x],
    }
    for name, form in forms.items():

        @jax.jit
        def run(x, y, g, form=form):
            arguments = [Argument(array=a, sharding=sharding, on_host=True) for a in (x, y)]
            arguments.append(Argument(array=g, sharding=sharding))
            return stream(form, arguments, [0, 1], window_bytes=24, unchanged=(), axes=axes_of(sharding.mesh))

        found = run(x, y, g)
        assert [a.sharding.memory_kind for a in found] == ["pinned_host"] * 2, name
        expected = form(*(jnp.asarray(np.asarray(a)) for a in (x, y, g)))
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("offload", "error"),
    [
        ("opt", "offload='opt': give 'optimizer', 'state', 'all', 'model_state', a zero.Offload, or None"),
        (3, "offload=3: give 'optimizer', 'state', 'all', 'model_state', a zero.Offload, or None"),
    ],
)
def test_what_is_no_offload(offload, error):
    with pytest.raises(ValueError, match=error):
        zero.ZeroConfig(offload=offload)


def test_the_settings_of_an_offload_are_fields_of_the_config_too():
    config = zero.ZeroConfig(offload="state", offload_fraction=0.5, offload_paths="a|b", offload_window_bytes=4096)
    assert config.resolved_offload() == zero.Offload(what="state", fraction=0.5, paths=["a|b"], window_bytes=4096)
    with pytest.raises(ValueError, match=r"offload_fraction=0\.5 without offload: say what is kept in host memory"):
        zero.ZeroConfig(offload_fraction=0.5)
    with pytest.raises(ValueError, match="fraction=2"):
        zero.ZeroConfig(offload="state", offload_fraction=2)


def test_wrong_fields():
    with pytest.raises(ValueError, match=r"offload: fraction=2\.0: give at most 1"):
        zero.Offload(fraction=2.0)
    with pytest.raises(ValueError, match=r"paths='emb': give a list of regular expressions"):
        zero.Offload(paths="emb")
    with pytest.raises(ValueError, match="'emv' matches the path of no leaf; some are emb"):
        trained(optax.adam(1e-2), offload=zero.Offload(paths=["emv"]))


def test_a_line_search_is_refused():
    with pytest.raises(ValueError, match="offload: the optimizer computes losses at other params"):
        trained(optax.lbfgs(), stage=2, offload="optimizer")


# XLA:TPU keeps another dim of these in lanes than the last, or another than the last but one in sublanes.
ODD_LAYOUTS = [(50257, 160), (257, 640), (96, 12, 64), (40, 5120, 2), (3, 5025, 100), (40, 12, 256), (9, 40000)]


@pytest.mark.tpu_compiler
@pytest.mark.full_effort
@pytest.mark.slow
def test_xla_tpu_copies_chunks_both_ways_at_once_whatever_the_layout():
    pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'jax[tpu]'")
    mesh = zero.make_mesh(topology="v5p:1x1x1")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    host = sharding.with_memory_kind("pinned_host")

    def run(ms, vs, gs):
        arguments = [Argument(array=x, sharding=sharding, on_host=True) for x in (*ms, *vs)]
        arguments += [Argument(array=g) for g in gs]

        def update(*arrays):
            m_s, v_s, g_s = (arrays[i * len(gs) : (i + 1) * len(gs)] for i in range(3))
            new = [m - v * g for m, v, g in zip(m_s, v_s, g_s, strict=True)]
            return [*new, *(v + g for v, g in zip(v_s, g_s, strict=True))]

        into, axes = range(2 * len(gs)), axes_of(sharding.mesh)
        return stream(update, arguments, into, window_bytes=1 << 20, unchanged=(), axes=axes)

    kept, grads = (
        [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=s) for shape in ODD_LAYOUTS] for s in (host, sharding)
    )
    compiled = jax.jit(run, donate_argnums=(0, 1), out_shardings=host).lower(kept, kept, grads).compile()
    program = hlo.parse(compiled)
    copies = hlo.host_transfers(program)
    costs = hlo.Costs(instruction=lambda *_: 0.0, collective=lambda _: 0.0, copy=lambda copy: copy.sent_bytes / 1e9)
    timeline = hlo.play(program, (), costs, copies=copies)
    there, back = (sum(c.total_sent_bytes for c in copies if c.to_host is to_host) for to_host in (False, True))
    num_bytes = sum(np.prod(shape) * 8 for shape in ODD_LAYOUTS)
    assert num_bytes <= back <= 1.1 * num_bytes  # with tiles filled up
    assert there <= 1.2 * back  # the last chunk of each loop is fetched twice
    assert timeline.total_seconds <= 1.1 * there / 1e9


def lora_run(base, num_steps=3, **fields):
    """Trains adapters of `loss_fn`; returns the state and the metrics."""
    lora = zero.Lora(rules={"layers/w": "sio", "emb": "io"}, rank=4, base=base, block_size=16)
    mesh, config = zero.make_mesh(), zero.ZeroConfig(stage=3, precision="bf16", min_shard_size=64, **fields)
    tx = optax.adamw(1e-2)
    state = zero.init_state(lambda key: lora.init(init(key), key), tx, jax.random.key(0), mesh=mesh, config=config)
    before = [x.sharding for x in jax.tree.leaves(state)]
    base_before = jax.tree.map(np.asarray, state.model_state)
    step = zero.make_train_step(lora.loss_fn(loss_fn), tx, mesh=mesh, config=config)
    for _ in range(num_steps):
        state, metrics = step(state, BATCH)
    assert [x.sharding for x in jax.tree.leaves(state)] == before
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state.model_state), base_before)
    evaluate = zero.make_eval_step(lora.loss_fn(loss_fn), mesh=mesh, config=config)
    return state, metrics, evaluate(state, BATCH).loss, lora


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "fields"),
    [
        ("own", {}),
        ("int8", {"skip_nonfinite": False}),
        ("nf4", {"num_microbatches": 2, "remat": "full"}),
        ("nf4_double", {}),
        ("bfloat16", {"keep_gathered": True}),
    ],
)
def test_a_frozen_base_on_the_host_gives_the_same_numbers(base, fields):
    there, *metrics, lora = lora_run(base, offload="model_state", **fields)
    here, *expected, _ = lora_run(base, **fields)
    jax.tree.map(np.testing.assert_array_equal, numbers(there), numbers(here))
    assert [float(x) for x in (metrics[0].loss, metrics[1])] == [float(x) for x in (expected[0].loss, expected[1])]
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(there.model_state) if x.ndim > 1 and x.size >= 64}
    assert kinds == {"pinned_host"}
    assert {x.sharding.memory_kind for x in jax.tree.leaves((there.params, there.opt_state))} == {"device"}
    jax.tree.map(np.testing.assert_array_equal, *(jax.tree.map(np.asarray, lora.merge(x)) for x in (there, here)))


@pytest.mark.slow
def test_the_frozen_base_counts_as_host_memory():
    offload = zero.Offload(what="model_state", paths=["model_state/base/emb"])
    state, *_ = lora_run("bfloat16", num_steps=1, offload=offload)
    config = zero.ZeroConfig(stage=3, precision="bf16", min_shard_size=64, offload=offload)
    found = zero.memory.estimate(state, mesh=zero.make_mesh(), config=config)
    assert found.host_bytes == 64 * 32 * 2 / jax.device_count()
    assert state.model_state["base"]["layers"]["w"].sharding.memory_kind == "device"
    with pytest.raises(ValueError, match=r"keeps the model state on the host, which are whole .*give stage=3"):
        zero.abstract_state(
            init, optax.adam(1e-2), mesh=zero.make_mesh(), config=zero.ZeroConfig(stage=2, offload="model_state")
        )


@pytest.mark.slow
def test_model_state_that_changes_stays_on_the_devices():
    mesh, config = zero.make_mesh(), zero.ZeroConfig(stage=3, min_shard_size=64, offload="model_state")
    make = lambda key: zero.Variables(params=init(key), model_state={"target": init(key), "base": init(key)})  # noqa: E731

    def loss(params, batch, *, model_state):
        target = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, model_state["target"], params)
        return loss_fn(params, batch) + loss_fn(model_state["base"], batch), None, {**model_state, "target": target}

    tx = optax.adam(1e-2)
    state = zero.init_state(make, tx, jax.random.key(0), mesh=mesh, config=config)
    with pytest.raises(ValueError, match="the loss function changes 'model_state/target/emb', which is in host memory"):
        zero.make_train_step(loss, tx, mesh=mesh, config=config)(state, BATCH)
    chosen = dataclasses.replace(config, offload_paths="model_state/base/.*")
    state = zero.init_state(make, tx, jax.random.key(0), mesh=mesh, config=chosen)
    state, _ = zero.make_train_step(loss, tx, mesh=mesh, config=chosen)(state, BATCH)
    plain = dataclasses.replace(config, offload=None)
    expected = zero.init_state(make, tx, jax.random.key(0), mesh=mesh, config=plain)
    expected, _ = zero.make_train_step(loss, tx, mesh=mesh, config=plain)(expected, BATCH)
    jax.tree.map(np.testing.assert_array_equal, *(jax.tree.map(np.asarray, x.model_state) for x in (state, expected)))


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "what"), [(3, "all"), (2, "state")])
def test_frozen_params_are_not_streamed(stage, what):
    """What the optimizer leaves as it is stays on the host: the update copies nothing of it."""
    fields = {"stage": stage, "precision": "bf16", "offload": zero.Offload(what=what, window_bytes=2000)}
    there, _ = trained(OPTIMIZERS["frozen"], **fields)
    here, _ = trained(OPTIMIZERS["frozen"], **{**fields, "offload": None})
    jax.tree.map(functools.partial(assert_same, atol=1e-4), numbers(there), numbers(here))
    frozen = lambda state: jax.tree.map(np.asarray, state.masters["layers"]["w"])  # noqa: E731
    np.testing.assert_array_equal(frozen(there), frozen(here))

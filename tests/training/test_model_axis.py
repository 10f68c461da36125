"""The axis `model`: every stage beside tensor parallelism trains as one device does, wherever the specs come from."""

import functools
import itertools
import sys

import flax.linen as nn
import gpt_linen
import gpt_nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from flax import nnx
from jax.sharding import PartitionSpec as P
from reference import assert_close, assert_placed_alike, make_batches, num_shards

import zero_jax as zero
from zero_jax import hlo
from zero_jax.models import gpt
from zero_jax.sharding.model_specs import specs_of
from zero_jax.training.sequence_sharding import sequence_parallel

# As in test_parity.py: sums in another order, magnified by Adam's division.
FLOAT32 = 1e-5
MESHES = {
    "2x4": {"data": 2, "model": 4},
    "4x2": {"data": 4, "model": 2},
    "2x2x2": {"replica": 2, "data": 2, "model": 2},
    "staged": {"data": 4, "data_layout": (2, 2), "model": 2},
}
OPTIMIZERS = {
    "adamw": optax.adamw(1e-2, eps=1e-3),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "muon": optax.contrib.muon(1e-2, adam_eps_root=1e-6),
}
BY_ROWS = {
    "embed": P("model"),
    "layers/w_in": P(None, None, "model"),
    "layers/(bias|w_out)": P(None, "model"),
    "head/kernel": P(None, "model"),
}
BY_FEATURES = {**BY_ROWS, "embed": P(None, "model")}
SPECS = {"rows": BY_ROWS, "features": BY_FEATURES}


@functools.cache
def mesh_of(name):
    return zero.make_mesh(**MESHES[name])


@functools.cache
def plain_run(optimizer):
    return reference.run_plain(reference.loss_fn, OPTIMIZERS[optimizer], make_batches(2))


# --- parity ----------------------------------------------------------------------------------------------------------

COVERING = [(3, "2x2x2", 2, "adafactor", "rows")]
REST = [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in (
        (0, "2x4", 1, "adamw", "rows"),
        (1, "4x2", 2, "adamw", "features"),
        (0, "2x2x2", 2, "adafactor", "features"),
        (1, "2x2x2", 1, "muon", "rows"),
        (2, "staged", 2, "adamw", "rows"),
        (2, "4x2", 1, "adafactor", "features"),
        (3, "2x4", 1, "muon", "features"),
        (3, "4x2", 2, "adamw", "features"),
        (3, "staged", 1, "adamw", "features"),
    )
]


@pytest.mark.parametrize(("stage", "mesh", "num_microbatches", "optimizer", "specs"), COVERING + REST)
def test_every_stage_equals_one_device(stage, mesh, num_microbatches, optimizer, specs):
    state, step = reference.make_trainer(
        reference.loss_fn,
        OPTIMIZERS[optimizer],
        mesh=mesh_of(mesh),
        stage=stage,
        num_microbatches=num_microbatches,
        param_specs=SPECS[specs],
    )
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    for batch in make_batches(2):
        state, metrics = step(state, batch)
    params, _, losses = plain_run(optimizer)
    assert_close(state.params, params, tolerance=FLOAT32)
    assert_close(metrics.loss, losses[-1], tolerance=FLOAT32)
    assert_placed_alike(state, placed)
    for w in (state.params["embed"], state.params["layers"]["w_out"]):
        size = mesh_of(mesh).shape["model"] * (
            4 if stage == 3 and mesh in ("4x2", "staged") else 2 if stage == 3 else 1
        )
        assert num_shards(w) == size


def test_factored_state_keeps_the_models_axis():
    """Adafactor's rows and columns lack a dim of the param; on those that they have they are cut as it is."""
    params = {"w": np.ones((64, 128), np.float32)}
    config = zero.ZeroConfig(stage=1, min_shard_size=8, param_specs={"w": P(None, "model")})
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=8)
    state = zero.init_state(params, tx, jax.random.key(0), mesh=mesh_of("2x4"), config=config)
    specs = {x.shape: x.sharding.spec for x in jax.tree.leaves(state.opt_state) if x.ndim == 1 and x.size > 1}
    assert specs == {(64,): P("data"), (128,): P(("model", "data"))}


# --- lookups ---------------------------------------------------------------------------------------------------------


FEW, MANY = 2, 64  # of few tokens the rows move; of many the table does
LOOKUPS = [(P("model", "data"), FEW), (P("model", "data"), MANY), (P("data", "model"), FEW)]


@pytest.mark.parametrize(
    ("spec", "num_tokens"),
    [
        *LOOKUPS,
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in itertools.product(
                (P("data", "model"), P(("model", "data")), P(None, ("model", "data"))), (FEW, MANY)
            )
            if case not in LOOKUPS
        ),
    ],
)
def test_lookups_in_tables_of_the_model(spec, num_tokens):
    mesh = mesh_of("2x4")
    table = np.random.default_rng(0).standard_normal((16, 8), np.float32)
    tokens = np.random.default_rng(1).integers(0, 16, (8, num_tokens), np.int32)

    def loss(params, tokens):
        x = params["table"][tokens]
        return jnp.square(jnp.tanh(x) @ params["table"].T).mean()

    gathered = jax.jit(jax.value_and_grad(zero.gather_on_use(loss, {"table": spec}, mesh=mesh)))
    placed = {"table": jax.device_put(table, jax.NamedSharding(mesh, spec))}
    value, grads = gathered(placed, jax.device_put(tokens, zero.batch_sharding(mesh)))
    want, want_grads = jax.value_and_grad(loss)({"table": table}, tokens)
    assert_close(value, want, tolerance=1e-6)
    assert_close(grads, want_grads, tolerance=1e-6)
    assert grads["table"].sharding.is_equivalent_to(placed["table"].sharding, 2)


# --- where specs come from -------------------------------------------------------------------------------------------


class LinenMLP(nn.Module):
    names: tuple = (None, "model")

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        x = nn.Dense(32, kernel_init=nn.with_partitioning(init, self.names))(x)
        return nn.Dense(4, kernel_init=nn.with_partitioning(init, self.names[::-1]))(jnp.tanh(x))


class NNXMLP(nnx.Module):
    def __init__(self, rngs, names=(None, "model"), key="out_sharding"):
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Linear(16, 32, kernel_init=nnx.with_metadata(init, **{key: names}), rngs=rngs)
        self.down = nnx.Linear(32, 4, kernel_init=nnx.with_metadata(init, **{key: names[::-1]}), rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def linen(names):
    model = LinenMLP(names)
    init_fn = lambda key: model.init(key, jnp.zeros((1, 16)))["params"]  # noqa: E731
    return init_fn, lambda params, batch: jnp.square(model.apply({"params": params}, batch["x"])).mean()


def nnx_model(names):
    with nnx.use_eager_sharding(False):
        graphdef = nnx.graphdef(nnx.eval_shape(lambda: NNXMLP(nnx.Rngs(0), names)))

    def init_fn(key):
        with nnx.use_eager_sharding(False):
            return nnx.state(NNXMLP(nnx.Rngs(key), names), nnx.Param)

    return init_fn, lambda params, batch: jnp.square(nnx.merge(graphdef, params)(batch["x"])).mean()


@pytest.mark.parametrize(
    ("model", "stage", "names"),
    [
        (linen, 3, "axes"),
        (nnx_model, 1, "logical"),
        *(pytest.param(linen, s, n, marks=pytest.mark.slow) for s, n in ((1, "axes"), (0, "logical"), (2, "logical"))),
        *(pytest.param(nnx_model, s, n, marks=pytest.mark.slow) for s, n in ((3, "axes"), (2, "axes"), (0, "logical"))),
    ],
)
def test_specs_that_params_carry(model, stage, names):
    logical = names == "logical"
    init_fn, loss_fn = model(("embed", "hidden") if logical else (None, "model"))
    rules = {"axis_rules": {"embed": None, "hidden": "model"}} if logical else {}
    config = zero.ZeroConfig(stage=stage, min_shard_size=8, **rules)
    tx = optax.adamw(1e-2, eps=1e-3)
    batch = {"x": np.random.default_rng(0).standard_normal((16, 16), np.float32)}
    params = jax.jit(init_fn)(jax.random.key(0))
    state = zero.init_state(init_fn, tx, jax.random.key(0), mesh=mesh_of("2x4"), config=config)
    kernels = [x for x in jax.tree.leaves(state.params) if x.ndim == 2]
    assert [num_shards(x) for x in kernels] == [8 if stage == 3 else 4] * 2
    step = zero.make_train_step(loss_fn, tx, mesh=mesh_of("2x4"), config=config)
    evaluate = zero.make_eval_step(loss_fn, mesh=mesh_of("2x4"), config=config)
    assert_close(evaluate(state, batch).loss, loss_fn(params, batch), tolerance=FLOAT32)
    for _ in range(2):
        state, _ = step(state, batch)
    expected, _, _ = reference.run_plain(loss_fn, tx, [batch] * 2, params=params)
    leaves = [np.asarray(x) for x in jax.tree.leaves(state.params)]
    assert_close(leaves, jax.tree.leaves(expected), tolerance=FLOAT32)


def test_the_names_of_older_flax():
    for key in ("sharding", "sharding_names"):
        with nnx.use_eager_sharding(False), pytest.warns(DeprecationWarning):
            params = nnx.state(NNXMLP(nnx.Rngs(0), key=key), nnx.Param)
        specs = jax.tree.leaves(specs_of(params, mesh=mesh_of("2x4")))
        assert P(None, "model") in specs and P("model", None) in specs


def box(names, shape=(4, 4), rules=None):
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    return {"w": nn.LogicallyPartitioned(x, names, rules=rules) if rules else nn.Partitioned(x, names)}


def spec_of(params, rules=None, mesh="2x4"):
    return specs_of(params, rules, mesh=mesh_of(mesh))["w"].value


def test_logical_names():
    assert spec_of(box(("embed", "mlp")), {"embed": None, "mlp": "model"}) == P(None, "model")
    assert spec_of(box(("embed", "mlp")), [("embed", "model"), ("mlp", "model")]) == P("model", None)
    in_turn = [("mlp", "data"), ("embed", "data"), ("mlp", "model")]
    assert spec_of(box(("embed", "mlp")), in_turn) == P("data", "model")
    assert spec_of(box(("embed", "mlp")), {"embed": ("model", "data"), "mlp": None}) == P(("model", "data"), None)
    assert spec_of(box(("embed", "mlp"), rules=(("mlp", "model"), ("embed", None)))) == P(None, "model")
    assert spec_of(box((None, ("data", "model")))) == P(None, ("data", "model"))
    assert specs_of({"w": jnp.ones(2)}, mesh=mesh_of("2x4")) is None


def test_logical_names_mean_nothing_without_an_axis_for_them():
    specs = specs_of(box(("embed", "mlp")), mesh=zero.make_mesh(data=8))
    assert specs["w"].value == P(None, None)
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    config = zero.ZeroConfig(data_axes="fsdp", min_shard_size=1)
    report = zero.sharding_report(box(("embed", "mlp"), (8, 8)), mesh=mesh, config=config)
    assert report.placements[0].dims == ((), ("fsdp",))


@pytest.mark.parametrize(
    ("params", "rules", "message"),
    [
        (box(("embed", "mlp")), None, r"'w' names a dim 'embed'.*axis_rules=\{'embed': 'model'\}"),
        (box(("embed", "mlp")), {"embed": "tensor"}, r"'embed' into the axis 'tensor'.*\{'embed': None\}"),
        (box(("model",)), None, r"\(4, 4\) carries the names \('model',\): name each of its 2 dims"),
        (box(("a", "b")), [("a", "b", "c")], "not a pair"),
    ],
)
def test_names_that_do_not_fit(params, rules, message):
    with pytest.raises(ValueError, match=message):
        specs_of(params, rules, mesh=mesh_of("2x4"))


def test_rules_that_nothing_reads():
    config = zero.ZeroConfig(axis_rules={"embed": "model"})
    with pytest.raises(ValueError, match="no param carries names"):
        zero.sharding_report({"w": jnp.ones((4, 4))}, mesh=mesh_of("2x4"), config=config)


# --- the reference GPT -----------------------------------------------------------------------------------------------

SMALL = {"vocab_size": 64, "seq_len": 16, "num_layers": 2, "d_model": 32, "num_heads": 4}


def tokens(seed=0):
    return {k: np.random.default_rng(seed).integers(0, 64, (8, 16), dtype=np.int32) for k in ("inputs", "targets")}


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("vocab", [True, False])
def test_the_frameworks_specs_are_those_of_the_dict(scan, vocab):
    config = gpt.GPTConfig(**SMALL, scan=scan)
    mesh, shards = mesh_of("2x4"), {}
    for module in (gpt, gpt_linen, gpt_nnx):
        init_fn = functools.partial(gpt.init, config) if module is gpt else module.make(config)[0]
        zero_config = zero.ZeroConfig(param_specs=module.param_specs(config, vocab=vocab))
        report = zero.sharding_report(jax.eval_shape(init_fn, jax.random.key(0)), mesh=mesh, config=zero_config)
        cut = {p.path: p.dims for p in report.placements if any("model" in dim for dim in p.dims)}
        shards[module] = sorted((dims, p) for p, dims in cut.items())
    assert len({len(found) for found in shards.values()}) == 1
    assert [[dims for dims, _ in found] for found in shards.values()] == [[d for d, _ in shards[gpt]]] * 3
    assert len(shards[gpt]) == (6 if scan else 12) + vocab


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"num_heads": 2}, "num_heads=2 .*4 devices of the model axis"),
        ({"vocab_size": 62}, "vocab_size=62 .*vocab=False"),
        ({"d_model": 2, "num_heads": 1, "mlp_ratio": 1}, "num_heads=1 .*a multiple of 4"),
    ],
)
@pytest.mark.parametrize("module", [gpt, gpt_linen, gpt_nnx])
def test_shapes_that_do_not_split(module, fields, what):
    with pytest.raises(ValueError, match=what):
        module.param_specs(gpt.GPTConfig(**{**SMALL, **fields}), model_size=4)


@functools.cache
def plain_gpt():
    config = gpt.GPTConfig(**SMALL)
    params = jax.tree.map(lambda x: np.asarray(3 * x), jax.jit(functools.partial(gpt.init, config))(jax.random.key(0)))
    run = reference.run_plain(
        lambda p, b: gpt.loss_fn(config)(p, b)[0], OPTIMIZERS["adamw"], [tokens()] * 2, params=params
    )
    return params, run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "mesh", "num_microbatches"),
    [(0, "2x4", 1), (1, "2x4", 2), (2, "4x2", 2), (3, "2x4", 1), (3, "2x2x2", 2), (3, "staged", 1)],
)
def test_sequence_parallelism_equals_one_device(stage, mesh, num_microbatches):
    config = gpt.GPTConfig(**SMALL)
    params, (expected, _, losses) = plain_gpt()
    state, step = reference.make_trainer(
        gpt.loss_fn(config, place=sequence_parallel(mesh_of(mesh))),
        OPTIMIZERS["adamw"],
        mesh=mesh_of(mesh),
        params=params,
        stage=stage,
        num_microbatches=num_microbatches,
        param_specs=gpt.param_specs(config),
    )
    for _ in range(2):
        state, metrics = step(state, tokens())
    assert_close(metrics.loss, losses[-1], tolerance=FLOAT32)
    assert_close(state.params, expected, tolerance=FLOAT32)


@pytest.mark.parametrize("num_examples", [4, 2])
def test_the_residual_stream_is_sharded_over_the_sequence(num_examples):
    mesh = mesh_of("2x4")
    place = jax.jit(sequence_parallel(mesh), static_argnums=1)
    back = jax.jit(lambda x, kind: jax.vjp(lambda x: place(x, kind), x)[1](x)[0], static_argnums=1)
    x = jax.device_put(np.arange(num_examples * 128.0).reshape(-1, 16, 8), zero.batch_sharding(mesh))

    def lies(x, *entries):
        return x.sharding.is_equivalent_to(jax.NamedSharding(mesh, P(*entries)), 3)

    assert lies(place(x, "residual"), "data", "model")
    assert lies(place(place(x, "residual"), "gathered"), "data")
    assert lies(back(x, "gathered"), "data", "model")
    assert lies(back(x, "residual"), "data")
    for moved in (place(x, "residual"), place(x, "gathered"), back(x, "residual"), back(x, "gathered")):
        np.testing.assert_array_equal(moved, x)


@pytest.mark.parametrize(("gpus", "num_steps"), [(frozenset(), 2), (frozenset({"cpu"}), 1)])
def test_one_sequence_a_device_goes_by_its_features_but_on_gpus(gpus, num_steps, monkeypatch):
    monkeypatch.setattr(sys.modules["zero_jax.training.sequence_sharding"], "GPUS", gpus)
    place = sequence_parallel(mesh_of("2x4"))
    (eqn,) = jax.make_jaxpr(lambda x: place(x, "residual"))(jnp.ones((2, 16, 8))).eqns
    assert len(eqn.params["forward"].shardings) == num_steps


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("num_examples", [4, 8])
def test_sums_over_model_are_scattered_to_tokens(num_examples):
    """Of one sequence a device XLA:TPU makes an all-reduce if it is told the tokens at once: 1.5 times the bytes."""
    pytest.importorskip("libtpu")
    mesh = zero.make_mesh(topology="v5p:2x2x4", model=4)
    place, tokens, features = sequence_parallel(mesh), 512, 1024

    def shape(sizes, *entries):
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=jax.NamedSharding(mesh, P(*entries)))

    x = shape((num_examples, tokens, features), "data", None, "model")
    w = shape((features, features), "model")
    found = hlo.collectives(jax.jit(lambda x, w: place(x @ w, "residual")).lower(x, w).compile().as_text())
    assert {c.kind for c in found} == ({"reduce-scatter", "all-to-all"} if num_examples == 4 else {"reduce-scatter"})
    scattered = 3 / 4 * 2 * (num_examples // 4) * tokens * features
    assert sum(c.total_sent_bytes for c in found) <= 1.26 * scattered


def test_one_device_of_the_model_axis_changes_nothing():
    place = sequence_parallel(zero.make_mesh(data=8))
    x = jnp.ones((4, 3, 8))
    assert place(x, "residual") is x


@pytest.mark.parametrize(
    ("shape", "kind", "message"),
    [((2, 6, 8), "residual", "multiple of 4"), ((2, 8, 8), "heads", "unknown kind of place 'heads'")],
)
def test_places_that_do_not_fit(shape, kind, message):
    with pytest.raises(ValueError, match=message):
        sequence_parallel(mesh_of("2x4"))(jnp.ones(shape), kind)


def shuffled_loss(params, batch):
    """Features over `model` change places, as in a channel shuffle."""
    x = batch["x"] @ params["up"]
    x = x.reshape(len(x), 2, -1).swapaxes(1, 2).reshape(x.shape)
    return jnp.square(jnp.tanh(x) @ params["down"] - batch["y"]).mean()


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1, 2))])
def test_features_that_change_places(stage):
    """XLA takes the shards of one place for those of another where a gradient goes to them at once."""
    up, down, x, y = jax.random.normal(jax.random.key(0), (4, 16, 8))
    params, batch = {"up": up.T, "down": down}, {"x": x, "y": y}
    mesh, tx, specs = mesh_of("2x4"), optax.sgd(0.1), {"up": P(None, "model"), "down": P("model")}
    config = zero.ZeroConfig(stage=stage, precision="fp32", min_shard_size=0, param_specs=specs)
    state = zero.init_state(lambda _: params, tx, jax.random.key(0), mesh=mesh, config=config)
    state, _ = zero.make_train_step(shuffled_loss, tx, mesh=mesh, config=config)(state, batch)
    wanted = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(shuffled_loss)(params, batch))
    assert_close(state.params, wanted, tolerance=FLOAT32)

"""The reduce dtype is kept whatever a model computes in, and batches come in the compute dtype.

Numerics on simulated devices; what is sent is read from programs of the TPU compiler, since XLA:CPU sums bfloat16 in
float32.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covering import quick_by_turns
from gathering import normal, place_batch, specs_of
from jax import lax
from reference import mesh_of

import zero_jax as zero
from zero_jax import comms
from zero_jax.transforms.weight_grads import product

F32, BF16 = jnp.float32, jnp.bfloat16
ROWS, WIDTH, LENGTH = 64, 32, 4


def widened(params):
    return jax.tree.map(lambda x: x.astype(F32), params)


def mean_square(x):
    return jnp.square(x.astype(F32)).mean()


def mixed_product(params, batch):
    return mean_square(jnp.tanh(batch["x"] @ params["up"]) @ params["down"])


def cast_up(params, batch):
    return mixed_product(widened(params), batch)


def table_cast_up(params, batch):
    table = params["table"].astype(F32)  # as Flax NNX's Embed does, twice: the lookup and the head
    x = jnp.take(table, batch["tokens"], axis=0) @ params["up"].astype(F32) @ params["down"].astype(F32)
    return mean_square(jax.nn.log_softmax(x @ table.T))


def stack_cast_up(params, batch):
    def layer(x, w):
        return x + jnp.tanh(x @ w), None

    return mean_square(lax.scan(layer, batch["x"], params["stack"].astype(F32))[0])


def heads(params, batch):
    x = jnp.einsum("bd,dhk->bhk", batch["x"] * params["scale"].astype(F32), params["heads"])
    return mean_square(jnp.einsum("bhk,dhk->bd", x, params["heads"].astype(F32)))


def images(params, batch):
    x = batch["x"].reshape(-1, 4, 4, WIDTH // 16)
    dims = ("NHWC", "HWIO", "NHWC")
    return mean_square(
        lax.conv_general_dilated(x, params["kernel"].astype(F32), (1, 1), "SAME", dimension_numbers=dims)
    )


def vectors(params, batch):
    """Params that are broadcast over examples: in an operation, by one, in a scan, as numbers; and a lookup of rows."""
    x = batch["x"].astype(params["scale"].dtype) * (1 + params["scale"]) + params["table"][batch["tokens"][:, 0]]
    x, _ = lax.scan(lambda x, w: (x + jnp.tanh(w.astype(x.dtype) * x), None), x, params["stack"][:, 0])
    first = jnp.broadcast_to(params["scale"], (len(x), 1, WIDTH))
    return mean_square(params["number"] * jnp.concatenate([first, x[:, None]], 1))


def recurrent(params, batch):
    w = params["square"].astype(F32)

    def step(h, x):
        return jnp.tanh(h @ w + x), None

    return mean_square(lax.scan(step, jnp.zeros_like(batch["x"]), jnp.stack([batch["x"]] * 3))[0])


def host_params():
    shapes = {
        "up": (WIDTH, ROWS),
        "down": (ROWS, WIDTH),
        "square": (WIDTH, WIDTH),
        "stack": (2, WIDTH, WIDTH),
        "table": (ROWS, WIDTH),
        "heads": (WIDTH, 4, 8),
        "scale": (WIDTH,),
        "number": (),
        "kernel": (3, 3, WIDTH // 16, 16),
    }
    return {name: jnp.asarray(normal(*shape), BF16) for name, shape in shapes.items()}


def host_batch():
    tokens = np.random.default_rng(0).integers(0, ROWS, (16, LENGTH), dtype=np.int32)
    return {"x": normal(16, WIDTH, scale=1.0), "tokens": tokens}


LOSSES = [mixed_product, cast_up, table_cast_up, stack_cast_up, heads, images, vectors, recurrent]


@pytest.mark.parametrize(
    ("fn", "reduce_dtype"), quick_by_turns(LOSSES, [BF16, F32]), ids=lambda x: getattr(x, "__name__", None)
)
def test_gradients_of_uses_in_other_dtypes(fn, reduce_dtype):
    """They are those of the plain function, up to the roundings of the sum over devices."""
    mesh, batch = mesh_of("8"), host_batch()
    used = jax.eval_shape(jax.grad(fn), host_params(), batch)
    params = {name: x for name, x in host_params().items() if name in used}
    specs = specs_of(params, mesh)
    gathered = zero.gather_on_use(fn, specs, mesh=mesh, reduce_dtype=reduce_dtype)
    grads = jax.jit(jax.grad(gathered))(jax.device_put(params, specs), place_batch(batch, mesh))
    want = jax.jit(jax.grad(fn))(widened(params), batch)
    for name, grad in grads.items():
        exact = np.asarray(want[name])
        assert grad.dtype == BF16
        # 8 bits of mantissa; eight devices' parts, and two uses of one param.
        np.testing.assert_allclose(np.asarray(grad, np.float32), exact, rtol=0, atol=0.03 * np.abs(exact).max())


def scaled(params, batch):
    return mean_square(jnp.tanh(batch["x"].astype(BF16) * params["scale"]))


@pytest.mark.parametrize(
    ("transform", "fn"),
    quick_by_turns(["jvp", "hvp", "grad of grad", "vmap", "remat"], [mixed_product, images, scaled]),
    ids=lambda x: getattr(x, "__name__", None),
)
def test_derivatives_of_every_kind(transform, fn):
    mesh = mesh_of("4")
    names = {mixed_product: ("up", "down"), images: ("kernel",), scaled: ("scale",)}[fn]
    params = {name: host_params()[name] for name in names}
    batch = {"x": host_batch()["x"]}
    specs = specs_of(params, mesh)
    gathered = zero.gather_on_use(fn, specs, mesh=mesh, reduce_dtype=F32 if fn is scaled else BF16)
    dots = jax.checkpoint_policies.dots_saveable

    def apply(loss):
        of_x = lambda x: loss(params, {"x": x})  # noqa: E731
        if transform == "jvp":
            return jax.jvp(loss, (params, batch), (params, batch))[1]
        if transform == "hvp":
            return jax.jvp(jax.grad(loss, (0, 1)), (params, batch), (params, batch))[1]
        if transform == "grad of grad":
            return jax.grad(lambda p: mean_square(jax.grad(loss, 1)(p, batch)["x"]))(params)
        if transform == "remat":
            return jax.grad(jax.checkpoint(loss, policy=dots), (0, 1))(params, batch)
        return jax.vmap(jax.grad(of_x))(jnp.stack([batch["x"], 2 * batch["x"]]))

    both = jax.jit(lambda: (apply(gathered), apply(fn)))()  # one by one, each operation is a program of its own
    for got, want in zip(*map(jax.tree.leaves, both), strict=True):
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
        np.testing.assert_allclose(got, want, rtol=0, atol=0.02 * np.abs(want).max())


def test_report_lists_uses_in_a_wider_dtype():
    mesh, params, batch = mesh_of("8"), host_params(), host_batch()
    specs = specs_of(params, mesh)
    report = zero.gather_report(table_cast_up, specs, params, batch, mesh=mesh)
    wide = {(use.path, use.operation, use.dtype, use.param_dtype) for use in report.wide}
    f32 = ("float32", "bfloat16")
    assert wide == {("table", "gather", *f32), ("table", "dot_general", *f32)} | {
        (name, "dot_general", *f32) for name in ("up", "down")
    }
    assert all("test_reduce_dtype.py" in use.where for use in report.wide if use.operation == "dot_general")
    assert "WIDE  up: dot_general in float32, param in bfloat16, at" in str(report)
    assert not report.early
    narrow = {"x": batch["x"].astype(BF16)}
    assert not zero.gather_report(lambda p, b: (b["x"] @ p["up"]).sum(), specs, params, narrow, mesh=mesh).wide
    replicated = jax.tree.map(lambda _: jax.sharding.PartitionSpec(), specs)
    report = zero.gather_report(mixed_product, replicated, params, batch, mesh=mesh, reduce_dtype=BF16)
    assert {use.path for use in report.wide} == {"up", "down"} and not report.events


# --- the batch -------------------------------------------------------------------------------------------------------


def run(loss_fn, params, batch, *, tx=None, **fields):
    mesh = mesh_of("4")
    config = zero.ZeroConfig(precision="bf16", min_shard_size=8, **fields)
    tx = tx or optax.sgd(0.1)
    state = zero.init_state(params, tx, jax.random.key(0), mesh=mesh, config=config)
    evaluated = zero.make_eval_step(loss_fn, mesh=mesh, config=config)(state, batch)
    state, metrics = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)(state, batch)
    np.testing.assert_allclose(metrics.loss, evaluated.loss, rtol=1e-2)
    return metrics


def test_floating_inputs_of_the_model_are_cast():
    """What a param is applied to, now or later; not a mask of the loss, whose sum would have 8 bits."""
    seen = []

    def loss_fn(params, batch):
        seen.append({name: x.dtype for name, x in batch.items()})
        time = jnp.sin(batch["time"][:, None] * jnp.arange(WIDTH))
        x = lax.scan(lambda x, w: (jnp.tanh(x @ w) + batch["bias"], None), batch["x"] + time, params["w"])[0]
        loss = (jnp.square(x).sum(1) * batch["mask"]).sum() / batch["mask"].sum()
        return loss + 1e-4 * mean_square(params["w"])

    batch = {"x": normal(8, WIDTH), "time": np.arange(8, dtype=np.float32), "bias": normal(8, WIDTH)}
    batch |= {"mask": np.ones(8, np.float32), "label": np.arange(8), "on": np.ones(8, bool)}
    params = {"w": normal(2, WIDTH, WIDTH)}
    fixed = {"mask": jnp.dtype(F32), "label": jnp.dtype(np.int32), "on": jnp.dtype(bool)}
    for keep, dtypes in {(): (BF16, BF16), ("time",): (BF16, F32), (".*",): (F32, F32)}.items():
        seen.clear()
        run(loss_fn, params, batch, stage=1, num_microbatches=2, keep_batch_dtype=keep)
        assert seen[-1] == {"x": dtypes[0], "bias": dtypes[0], "time": dtypes[1], **fixed}
    seen.clear()
    zero.make_eval_step(loss_fn, mesh=mesh_of("4"), config=zero.ZeroConfig())(params, batch)
    assert seen[0]["x"] == F32


@pytest.mark.parametrize(
    ("keep", "match"),
    [(("y",), r"'y' matches the path of no leaf; some are x"), (("(",), "not a regular"), ("x", "a list")],
)
def test_what_is_kept_is_checked(keep, match):
    with pytest.raises(ValueError, match=match):
        run(lambda p, b: mean_square(b["x"] @ p["w"]), {"w": normal(8, 8)}, {"x": normal(8, 8)}, keep_batch_dtype=keep)


def test_a_convolution_takes_a_float32_batch():
    model = nn.Conv(features=8, kernel_size=(3, 3), param_dtype=BF16, dtype=BF16)
    images = normal(8, 6, 6, 4)
    params = model.init(jax.random.key(0), images)
    plain = lambda p, b: mean_square(  # noqa: E731
        lax.conv_general_dilated(b["x"], p["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    )
    assert np.isfinite(run(lambda p, b: mean_square(model.apply(p, b["x"])), params, {"x": images}).loss)
    for stage in (0, 3):
        assert np.isfinite(run(plain, {"w": normal(3, 3, 4, 8)}, {"x": images}, stage=stage).loss)


# --- what is sent ----------------------------------------------------------------------------------------------------

DIM = 512


def readme_init(key):
    return [jax.random.normal(k, (DIM, DIM)) / 32 for k in jax.random.split(key, 5)]


def readme_loss(params, batch):
    x = batch["x"]
    for weight in params[:-1]:
        x = jax.nn.relu(x @ weight)
    return jnp.mean((x @ params[-1] - batch["y"]) ** 2)


def readme_batch(size):
    return {"x": jax.ShapeDtypeStruct((size, DIM), F32), "y": jax.ShapeDtypeStruct((size, DIM), F32)}


def lm_init(key):
    keys = iter(jax.random.split(key, 4))
    make = lambda *shape: jax.random.normal(next(keys), shape) / 32  # noqa: E731
    return {"table": make(4096, DIM), "stack": make(2, DIM, DIM), "heads": make(DIM, 8, 64), "out": make(8, 64, DIM)}


def lm_loss(params, batch):
    """A model that casts its params up: once before the loop, once after it, and logits in float32."""
    params = widened(params)
    x = jnp.take(params["table"], batch["t"], axis=0)
    x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["stack"])
    x = jnp.einsum("bshk,hkd->bsd", jnp.einsum("bsd,dhk->bshk", x, params["heads"]), params["out"])
    logits = jax.nn.log_softmax(x @ params["table"].T)
    return -jnp.mean(jnp.take_along_axis(logits, batch["t"][..., None], -1))


def lm_batch(size):
    return {"t": jax.ShapeDtypeStruct((size // 16, 16), jnp.int32)}


@functools.cache
def sent(init_fn, loss_fn, make_batch, stage, *, keep=False, num_microbatches=1, **dtypes):
    """Returns the report of a step on 16 chips, over the ideal in 2-byte types."""
    mesh, tx = zero.make_mesh(topology="v5p:2x2x4"), optax.adamw(1e-3)
    policy = {"param": BF16, "compute": BF16, "reduce": BF16, "master": F32} | dtypes
    config = zero.ZeroConfig(
        overlap=False,
        stage=stage,
        precision=zero.Precision(**policy),
        keep_batch_dtype=(".*",) if keep else (),
        num_microbatches=num_microbatches,
    )
    state = zero.abstract_state(init_fn, tx, mesh=mesh, config=config)
    batch = make_batch(64 * mesh.size * num_microbatches)
    report = comms.measure(zero.make_train_step(loss_fn, tx, mesh=mesh, config=config).lower(state, batch).compile())
    psi = sum(x.size for x in jax.tree.leaves(state.params))
    ideal = (3 if stage == 3 else 2) * 2 * psi * (mesh.size - 1) / mesh.size
    return report.sent_bytes / ideal, report.by_dtype.get("f32", 0) / ideal


README = (readme_init, readme_loss, readme_batch)
LM = (lm_init, lm_loss, lm_batch)
slow = pytest.mark.slow


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("model", "stage", "keep", "num_microbatches", "bound"),
    [
        (README, 3, False, 1, 1.0),
        pytest.param(README, 3, True, 1, 1.05, marks=slow),
        (README, 2, True, 1, 1.05),
        pytest.param(LM, 3, False, 1, 1.0, marks=slow),
        pytest.param(README, 2, False, 1, 1.001, marks=slow),
        pytest.param(README, 1, True, 1, 1.05, marks=slow),
        pytest.param(README, 1, True, 2, 1.05, marks=slow),
        pytest.param(README, 0, True, 1, 1.05, marks=slow),
        pytest.param(README, 0, True, 2, 1.05, marks=slow),
        pytest.param(LM, 2, False, 1, 1.08, marks=slow),
    ],
)
def test_gradients_are_summed_in_the_reduce_dtype(model, stage, keep, num_microbatches, bound):
    """The bounds are those of a batch in bfloat16; the language model's lookup moves rows both ways beside."""
    pytest.importorskip("libtpu")
    ratio, in_float32 = sent(*model, stage, keep=keep, num_microbatches=num_microbatches)
    assert ratio <= bound and in_float32 < 1e-3  # metrics are float32


@slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("stage", [2, 3])
def test_a_reduce_dtype_wider_than_the_compute_dtype_is_kept(stage):
    pytest.importorskip("libtpu")
    _, in_float32 = sent(*README, stage, reduce=F32)
    assert in_float32 == pytest.approx(2 / (3 if stage == 3 else 2), rel=0.02)


def all_kinds_init(key):
    shapes = {"table": (512, DIM), "stack": (2, DIM, DIM), "biases": (2, DIM), "scale": (DIM,), "temperature": ()}
    return {name: jax.random.normal(key, shape) / 32 for name, shape in shapes.items()}


def all_kinds_loss(params, batch):
    x = jnp.take(params["table"], batch["t"], axis=0)
    layers = params["stack"], params["biases"]
    x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w[0] + w[1]) * params["temperature"], None), x, layers)
    return mean_square((x * (1 + params["scale"])) @ params["table"].T)


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=slow) for stage in (1, 2, 3))])
def test_nothing_is_summed_in_a_compute_dtype_narrower_than_the_reduce_dtype(stage):
    pytest.importorskip("libtpu")
    mesh, tx = zero.make_mesh(topology="v5p:2x2x1"), optax.sgd(0.1)
    precision = zero.Precision(compute=BF16, reduce=F32)
    config = zero.ZeroConfig(stage=stage, precision=precision, min_shard_size=256, overlap=False)
    state = zero.abstract_state(all_kinds_init, tx, mesh=mesh, config=config)
    step = zero.make_train_step(all_kinds_loss, tx, mesh=mesh, config=config)
    rows = comms.measure(step.lower(state, lm_batch(1024)).compile(), mesh=mesh).rows
    summed = [row for row in rows if row.kind in ("all-reduce", "reduce-scatter") and row.phase == "backward"]
    assert summed and {dtype for row in summed for dtype in row.dtypes} == {"f32"}


def test_a_product_gives_its_gradient_in_the_dtype_asked_for():
    """Rounded once, from a sum in float32."""
    x, w = normal(64, 16, scale=1.0), jnp.asarray(normal(16, 8), BF16)
    (eqn,) = jax.make_jaxpr(lambda x, w: x @ w)(x, w).eqns
    for dtype in (BF16, F32):
        got = jax.grad(lambda weight, dtype=dtype: jnp.sin(product(eqn, [x, w], 1, weight)).sum())(w.astype(dtype))
        exact = x.T @ np.cos(x @ np.asarray(w, np.float32))
        assert got.dtype == dtype
        rounding = 2.0**-8 if dtype == BF16 else 1e-5
        np.testing.assert_allclose(np.asarray(got, np.float32), exact, rtol=rounding, atol=1e-5)


@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_complex_gradients_are_summed_in_their_own_dtype(stage):
    """A narrow reduce dtype would leave their imaginary parts out."""

    def loss_fn(params, batch):
        return jnp.square(jnp.real((1 + 2j) * (batch["x"].astype(F32) @ params["w"]))).mean()

    params = {"w": normal(16, 16) + 1j * normal(16, 16, seed=1)}
    batch = {"x": normal(32, 16)}
    config = zero.ZeroConfig(stage=stage, precision="bf16", num_microbatches=2, min_shard_size=8)
    tx = optax.sgd(1.0)
    state = zero.init_state(params, tx, jax.random.key(0), mesh=mesh_of("8"), config=config)
    grads = zero.make_train_step(loss_fn, tx, mesh=mesh_of("8"), config=config).grads(state, batch)[1]["w"]
    expected = np.asarray(jax.grad(loss_fn)(params, batch)["w"])
    assert np.abs(np.asarray(grads) - expected).max() < 2e-2 * np.abs(expected.imag).max()


@pytest.mark.parametrize(
    ("num_rows", "stage"), [(16, 1), (16, 3), (4096, 3), pytest.param(4096, 1, marks=pytest.mark.slow)]
)
def test_gradients_of_a_row_that_is_looked_up_often_are_summed_wide(num_rows, stage):
    """Of few rows the table moves, of many the rows; in bfloat16 a sum of 512 is off by two thirds and more."""

    def loss(params, batch):
        places = jnp.abs(jnp.arange(64)[:, None] - jnp.arange(64)[None])  # looked up without examples, in either way
        bias = jnp.tanh(params["bias"][jnp.minimum(places, 3)]).mean((0, 1))
        return mean_square(params["table"][batch["tokens"]] + params["bias"][0] * bias - 1)

    rng = np.random.default_rng(0)
    batch = {"tokens": rng.integers(0, 2, (16, 256)).astype(np.int32)}
    params = {"table": rng.standard_normal((num_rows, 8), np.float32), "bias": np.ones((4, 8), np.float32)}
    wanted = jax.grad(loss)(params, batch)
    precision = zero.Precision(compute=BF16, reduce=F32)
    config = zero.ZeroConfig(stage=stage, precision=precision, min_shard_size=1)
    tx, mesh = optax.sgd(0.1), zero.make_mesh(data=8)
    state = zero.init_state(params, tx, jax.random.key(0), mesh=mesh, config=config)
    grads = zero.make_train_step(loss, tx, mesh=mesh, config=config).grads(state, batch)[1]
    for name in params:
        off = np.linalg.norm(np.asarray(grads[name], np.float32) - wanted[name]) / np.linalg.norm(wanted[name])
        assert off < 0.02, (name, off)

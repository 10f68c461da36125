"""Operations that XLA computes for all examples on every device: each device computes its own (docs/xla_faults.md)."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from gathering import compiled_traffic, normal
from jax import lax
from reference import mesh_of

import zero_jax as zero
from zero_jax.program.loss import LossProgram
from zero_jax.sharding.mesh import axes_of
from zero_jax.transforms import own_examples

SLOW = pytest.mark.slow
SHAPES = {"w": (16, 16), "layers": (2, 16, 16)}


def transformed(params, batch):
    """Fourier transforms within layers."""

    def layer(h, weight):
        spectrum = jnp.fft.rfft(h, axis=1) * jnp.fft.rfft(weight[:8], axis=0)
        h += jnp.tanh(jnp.fft.irfft(spectrum, h.shape[1], axis=1) @ weight) + 0.01 * jnp.fft.fftn(h, axes=(1, 2)).real
        return h, None

    h, _ = lax.scan(layer, batch["x"] @ params["w"], params["layers"])
    return jnp.square(h - 1).mean()


def looped(params, batch):
    """Loops over examples and over chunks of them, with Fourier transforms, noise and a sum over the batch in them."""
    mean = batch["x"].mean(0)

    def of_one(x_and_key):
        x, key = x_and_key
        h, _ = lax.scan(lambda h, weight: (jnp.tanh(h @ weight), None), x @ params["w"] + mean, params["layers"])
        h = jnp.abs(jnp.fft.rfft(h * (1 + 0.1 * jax.random.normal(key, h.shape)), axis=0))
        return {"loss": jnp.square(h - 1).mean(), "h": h}

    keys = jax.random.split(jax.random.key(0), len(batch["x"]))
    made = lax.map(of_one, (batch["x"], keys))
    chunks = lax.map(lambda h: jnp.square(h).mean(), made["h"], batch_size=2)
    (total, squares, count), _ = lax.scan(jax.checkpoint(counted), (1.0, jnp.ones(16), 0), made["h"])
    others = total / count + jnp.sin(squares).sum()
    return made["loss"].mean() + (chunks * jnp.arange(len(chunks))).mean() + others


def counted(sums, h):
    total, squares, count = sums
    return (total + jnp.sin(h).sum(), jnp.square(h).mean(0) + squares, count + 1), None


def branching(params, batch):
    """A loop over examples, finite in the branch alone that each takes, with as many steps as each needs."""

    def of_one(x):
        h = (x @ params["w"]).sum()
        h = lax.cond(h > 0, jnp.log, lambda h: h, jnp.maximum(h, 0))
        return h * lax.stop_gradient(lax.while_loop(lambda n: n < jnp.abs(h), lambda n: 2 * n, 1.0))

    made = lax.map(of_one, batch["x"])
    _, others = lax.scan(lambda last, h: (h, last * h), 1.0, made)  # what a step carries is no sum
    return made.mean() + others.mean()


def arrays():
    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal(shape, dtype=np.float32) / 4 for name, shape in SHAPES.items()}
    return params, {"x": rng.standard_normal((16, 8, 16), dtype=np.float32)}


@pytest.mark.parametrize(
    ("loss", "mesh", "fields"),
    [
        (transformed, "8", {"stage": 3}),
        (looped, "8", {"stage": 3}),
        (branching, "8", {"stage": 0}),
        *(
            pytest.param(*case, marks=SLOW)
            for case in [
                (transformed, "8", {"stage": 1, "num_microbatches": 2}),
                (transformed, "model2", {"stage": 3}),
                (transformed, "8", {"stage": 0}),
                (looped, "replica", {"stage": 3}),
                (looped, "model2", {"stage": 2, "remat": "full"}),
            ]
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_each_device_computes_its_own_examples(loss, mesh, fields):
    params, batch = arrays()
    state, step = reference.make_trainer(loss, optax.sgd(0.1), mesh=mesh_of(mesh), params=params, **fields)
    value, grads = step.grads(state, batch)
    wanted, wanted_grads = jax.jit(jax.value_and_grad(loss))(params, batch)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    for name in params:
        assert reference.norm(grads[name] - wanted_grads[name]) <= 1e-5 * reference.norm(wanted_grads[name]), name
    gathered = re.findall(r"= (\S+) all-gather", step.lower(state, batch).compile().as_text())
    of_examples = [x for x in gathered if re.match(r"c64\[\d+,\d+,\d+|f32\[(\d+,)+8,16\]|f32\[\d+,5,16", x)]
    assert not of_examples, of_examples


def test_residuals_of_loops_are_estimated_as_those_of_own_examples():
    def residual_bytes(mesh):
        loss = lambda params, batch: lax.map(lambda x: jnp.tanh(x @ params["w"]).mean(), batch["x"]).mean()  # noqa: E731
        return zero.trace_loss(loss, *arrays(), mesh=mesh_of(mesh), config=zero.ZeroConfig()).residuals.device_bytes

    assert residual_bytes("8") == residual_bytes("1") / 8


def test_examples_that_do_not_divide_over_devices_are_estimated():
    loss = lambda params, batch: params["w"].sum() * jnp.abs(jnp.fft.rfft(batch["x"])).mean()  # noqa: E731
    params, batch = arrays()
    assert zero.trace_loss(loss, params, {"x": batch["x"][:3]}, mesh=mesh_of("8"), config=zero.ZeroConfig()).peak_bytes


def drawn(params, batch):
    """Noise from keys of which `jax.vmap` takes the first for all."""
    keys = jax.random.split(jax.random.key(0, impl="rbg"), len(batch["x"]))
    return lax.map(lambda each: (each[0] @ params["w"] * jax.random.normal(each[1], (8, 16))).sum(), (batch["x"], keys))


def ended(params, batch):
    """A branch that ends for the examples alone that take it."""

    def steps(number):
        return lax.cond(
            number < 0, lambda n: lax.while_loop(lambda n: n != 0, lambda n: n + 1, n), jnp.negative, number
        )

    return lax.map(lambda x: steps(x.sum().astype(int)) * (x @ params["w"]).sum(), batch["x"])


def shown(params, batch):
    """A carry that is no sum, and read for an effect alone."""

    def step(last, x):
        jax.debug.callback(lambda _: None, last)
        return (x @ params["w"]).sum(), None

    return lax.scan(step, 0.0, batch["x"])


def paired(params, batch):
    """Sums over pairs, of which each device has those of its own examples with every other."""
    h = (batch["x"] @ params["w"]).mean(1)
    sums, _ = lax.scan(lambda sums, other: (sums + jax.nn.sigmoid(h @ other)[:, None] * other, None), 0 * h, h)
    return sums


@pytest.mark.parametrize("loss", [drawn, ended, shown, paired])
def test_loops_stay_that_would_compute_something_else_or_send_more(loss):
    params, batch = arrays()
    program, mesh = LossProgram.of(loss), mesh_of("8")
    own = own_examples(program, mesh=mesh, axes=axes_of(mesh))
    assert own.trace(params, batch) is program.trace(params, batch)


def test_loops_run_with_operations_that_cannot_be_mapped_and_slices_of_no_elements():
    def loss(params, batch):
        h = batch["x"] @ params["w"]
        shape = jax.ShapeDtypeStruct((), h.dtype)
        called = lax.map(lambda h: jax.pure_callback(np.mean, shape, h), h)
        sums, made = lax.scan(lambda t, each: (t + each[0].sum() + each[1].sum(), 2.0), 1.0, (h, h[..., :0]), unroll=4)
        return called, sums, made

    params, batch = arrays()
    own = own_examples(loss, mesh=mesh_of("8"), axes=axes_of(mesh_of("8")))
    for value, wanted in zip(jax.jit(own)(params, batch), loss(params, batch), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5)


@pytest.mark.tpu_compiler
def test_factorizations_of_each_example_move_nothing_on_tpus():
    pytest.importorskip("libtpu")

    def loss(params, x):
        squares = jax.vmap(lambda x: x @ x.T + jnp.eye(8))(x @ params["w"])
        return jnp.linalg.solve(squares, x).mean() + jnp.linalg.eigvalsh(squares).max(-1).mean()

    report = compiled_traffic(loss, lambda: {"w": normal(16, 16)}, (32, 8, 16), 3)
    assert report.sent_bytes < 32 * 8 * 8  # a fraction of the matrices

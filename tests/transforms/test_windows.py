"""Pools and convolutions along sharded dims, and writes to them, which XLA partitions wrongly: docs/xla_faults.md."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from gathering import activations, compiled_traffic, normal
from jax import lax
from jax.sharding import PartitionSpec
from reference import mesh_of

import zero_jax as zero
from zero_jax.transforms import complex_sums_by_part

SLOW = pytest.mark.slow
DIMS = ("NWC", "WIO", "NWC")
SHAPES = {"w": (16, 16), "kernel": (3, 16, 16), "layers": (2, 16, 16), "depthwise": (3, 1, 16)}


def largest(x, *window):
    return lax.reduce_window(x, -jnp.inf, lax.max, window, (1,) * x.ndim, "SAME")


def smallest(x, *window):
    return lax.reduce_window(x, jnp.inf, lax.min, window, (1,) * x.ndim, "SAME")


def along_examples(params, batch, place):
    """Pools and convolutions of one series, whose steps are the examples: in loops, branches and derivatives, too."""
    del place

    @jax.checkpoint
    def layer(h, weight):
        return h + jnp.tanh(largest(h @ weight, 3, 1)), None

    h, _ = lax.scan(layer, jnp.tanh(batch["x"].mean(1) @ params["w"]), params["layers"])
    h = lax.conv_general_dilated(h[None], params["kernel"], (1,), "SAME", dimension_numbers=DIMS)[0]
    h = lax.cond(batch["x"][0, 0, 0] > 9, jnp.sin, lambda h: smallest(jnp.sin(h), 2, 1), h)
    h += jax.jit(jax.grad(lambda h: jnp.square(largest(h, 3, 1)).mean()))(h)
    return jnp.square(lax.reduce_window(h, -jnp.inf, lax.max, (2, 1), (2, 1), "VALID") - 1).mean()


def along_a_sequence(params, batch, place):
    h = place(batch["x"] @ params["w"], "residual")
    return jnp.square(largest(h, 1, 3, 1) @ params["layers"][0] - 1).mean()


def along_a_param(params, batch, place):
    del place
    return jnp.square(batch["x"] @ largest(params["w"], 3, 1) @ smallest(params["layers"], 1, 2, 3)[1] - 1).mean()


def to_features(params, batch, place):
    """Writes to one of the features, which are sharded over the model."""
    del place
    h = jnp.tanh(batch["x"] @ params["w"]).at[..., 3].set(0.0)
    h, _ = lax.scan(lambda h, weight: (jnp.tanh(h @ weight).at[:, :, 9].max(h[:, :, 2]), None), h, params["layers"])
    h = h.at[..., 1].multiply(2.0).at[..., 7].min(0.1)
    return jnp.square(h @ params["layers"][0] - 1).mean()


def with_kernels_of_examples(params, batch, place):
    """Gradients of each example by kernels, steps along them, and kernels that an example makes."""
    del place

    def of_one(x):
        def loss(kernels):
            h = x[None]
            for kernel, groups in zip(kernels, (1, 1, 16), strict=True):
                h = lax.conv_general_dilated(
                    h, kernel, (1,), "SAME", dimension_numbers=DIMS, feature_group_count=groups
                )
                h = jnp.tanh(h)
            return jnp.square(h @ params["w"] - 1).mean()

        kernels = params["kernel"], params["layers"][:1] * (1 + x.mean()), params["depthwise"]
        grads = jax.grad(loss)(kernels)
        return loss([k - 0.5 * g for k, g in zip(kernels, grads, strict=True)]) + jnp.square(grads[0]).sum()

    return jax.vmap(of_one)(batch["x"]).mean()


def arrays():
    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal(shape, dtype=np.float32) / 4 for name, shape in SHAPES.items()}
    return params, {"x": rng.standard_normal((16, 8, 16), dtype=np.float32)}


def check(loss_fn, mesh, **fields):
    params, batch = arrays()
    loss = zero.MeshLoss(lambda mesh: lambda params, batch: loss_fn(params, batch, zero.sequence_parallel(mesh)))
    state, step = reference.make_trainer(loss, optax.sgd(0.1), mesh=mesh_of(mesh), params=params, **fields)
    value, grads = step.grads(state, batch)
    alone = jax.value_and_grad(lambda params, batch: loss_fn(params, batch, lambda x, kind: x))
    wanted, wanted_grads = jax.jit(alone)(params, batch)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    for name in params:
        assert reference.norm(grads[name] - wanted_grads[name]) <= 1e-5 * reference.norm(wanted_grads[name]), name
    evaluate = zero.make_eval_step(loss, mesh=mesh_of(mesh), config=reference.make_config(stage=fields["stage"]))
    np.testing.assert_allclose(evaluate(state.params, batch).loss, wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("mesh", "stage"),
    [("8", 0), *(pytest.param(m, s, marks=SLOW) for m, s in [("model4", 3), ("8", 2), ("replica", 3), ("model2", 0)])],
)
def test_along_the_examples(mesh, stage):
    check(along_examples, mesh, stage=stage)


@pytest.mark.parametrize(("stage", "remat"), [(0, "own"), pytest.param(3, "none", marks=SLOW)])
def test_along_a_sequence_that_is_sharded_over_the_model(stage, remat):
    check(along_a_sequence, "model4", stage=stage, remat=remat)


@pytest.mark.parametrize(
    "fields", [{"stage": 0, "num_microbatches": 2}, pytest.param({"stage": 3}, marks=SLOW)], ids=str
)
def test_along_a_param_that_is_sharded_over_the_model(fields):
    specs = {"w": PartitionSpec("model", None), "layers": PartitionSpec(None, "model", None)}
    check(along_a_param, "model4", param_specs=specs, **fields)


@pytest.mark.parametrize(
    "fields",
    [{"stage": 0}, *(pytest.param(x, marks=SLOW) for x in ({"stage": 3}, {"stage": 1, "num_microbatches": 2}))],
    ids=str,
)
def test_writes_to_features_that_are_sharded_over_the_model(fields):
    specs = {"w": PartitionSpec(None, "model"), "layers": PartitionSpec(None, None, "model")}
    check(to_features, "model2", param_specs=specs, **fields)


@pytest.mark.parametrize(
    ("mesh", "stage"), [("8", 0), *(pytest.param(m, 3, marks=SLOW) for m in ("8", "replica", "model2"))]
)
def test_kernels_of_each_example(mesh, stage):
    check(with_kernels_of_examples, mesh, stage=stage)


def convolutional(params, batch, place):
    """Convolutions, one of them by kernels that examples make, and a pool within examples, mapped over devices."""
    del place

    def convolve(x, kernel):
        return lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=DIMS)

    h = convolve(batch["x"], params["kernel"])
    h += jax.vmap(lambda x: convolve(x[None], params["layers"][:1] * (1 + x.mean()))[0])(batch["x"])
    return jnp.square(lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID") @ params["w"] - 1).mean()


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "stage"), [("8", 1), pytest.param("replica", 3, marks=SLOW)])
def test_within_examples_that_are_mapped_over_devices(mesh, stage):
    check(convolutional, mesh, stage=stage, num_microbatches=2)


def filtered(params, x):
    """Convolves all examples with one long filter, by its spectrum; examples are summed by theirs."""
    length = x.shape[1]
    spectrum = jnp.fft.rfft(jnp.sin(params["times"]).astype(jnp.float32) @ params["filter"], axis=0)
    y = jnp.fft.irfft(jnp.fft.rfft(x.astype(jnp.float32), axis=1) * spectrum, length, axis=1)
    mean = jnp.fft.irfft(jnp.fft.rfft(y, axis=1).mean(0), length, axis=0)
    return jnp.square(y - mean - 1).mean()


def filtered_init(length=64, features=128):
    return {"times": normal(length, 16), "filter": normal(16, features)}


@pytest.mark.slow
def test_sums_of_complex_numbers_by_part_are_the_same():
    params, x = filtered_init(), normal(8, 64, 128)
    by_part = complex_sums_by_part(filtered)
    assert "c64[8,33,128]" in str(jax.make_jaxpr(by_part)(params, x))
    found, expected = (jax.value_and_grad(fn, (0, 1))(params, x) for fn in (by_part, filtered))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), found, expected)


@pytest.mark.tpu_compiler
def test_sums_of_complex_numbers_are_all_reduced_on_tpus():
    """A mean of spectra, its gradient, and that of the filter's; XLA would gather 16 of each, of 33 x 128 pairs."""
    pytest.importorskip("libtpu")
    report = compiled_traffic(filtered, filtered_init, (32, 64, 128), 3)
    spectrum = 33 * 128 * 8
    assert activations(report) < 3.5 * 2 * spectrum

"""`fuse_attention` replaces what is the same function as the kernel's, and nothing else."""

import functools

import attention_models as cases
import gpt_linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero_jax as zero
from zero_jax.attention.placement import KernelPlacement
from zero_jax.models import gpt
from zero_jax.program.subcalls import equations

MESH = zero.make_mesh(devices=jax.devices()[:1])


def arrays(case, seed=0):
    """Returns params and a batch: queries, keys, values, and the data of a case."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in (case.q_shape, case.k_shape, case.k_shape))
    (b, t, n, _), s = case.q_shape, case.k_shape[1]
    batch = {
        "q": q,
        "k": k,
        "v": v,
        "segments": np.sort(rng.integers(0, 3, (b, t), np.int32), axis=1),
        "valid": rng.random((b, s)) < 0.7,
        "temperature": rng.random((b, n, t, 1), np.float32),
        "key": jax.random.key(seed),
    }
    params = {name: rng.standard_normal((6, 6), np.float32) / np.float32(6**0.5) for name in "qkv"}
    return params | {"bias": rng.standard_normal((n, t, s), np.float32)}, batch


def loss_of(case, params, batch):
    """Returns a sum of the results that weighs them differently."""
    outs = jax.tree.leaves(attend(case, params, batch))
    return sum((out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum() for out in outs)


def attend(case, params, batch):
    q, k, v = (batch[name] @ params[name] for name in "qkv")
    return case.attend(q, k, v, batch | {"bias": params["bias"]})


def has_scores(function, params, batch, case):
    """Tells whether there is an array with a score of each query and key in a function."""
    sizes = [case.q_shape[1], case.k_shape[1]]
    jaxpr = jax.make_jaxpr(function)(params, batch)
    shapes = [getattr(var.aval, "shape", ()) for eqn in equations(jaxpr) for var in eqn.outvars]
    return any(len(shape) > 3 and all(shape.count(x) >= sizes.count(x) for x in sizes) for shape in shapes)


@pytest.mark.parametrize("name", cases.SAME)
def test_the_same_function_is_replaced(name):
    case = cases.SAME[name]
    params, batch = arrays(case)
    loss = functools.partial(loss_of, case)
    report = zero.attention_report(loss, params, batch)
    assert report.num_by_xla and not report.num_left, report  # there is no kernel for CPUs
    assert case.says in str(report)
    kernel = zero.fuse_attention(loss, mesh=MESH, implementation="splash")
    assert name == "softmax_over_two_dims_of_keys" or has_scores(jax.value_and_grad(loss), params, batch, case)
    assert not has_scores(jax.value_and_grad(kernel), params, batch, case)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.SAME)
def test_values_and_gradients_are_the_same(name):
    params, batch = arrays(cases.SAME[name])
    loss = functools.partial(loss_of, cases.SAME[name])
    expected, actual = (
        jax.jit(jax.value_and_grad(f))(params, batch) for f in (loss, zero.fuse_attention(loss, mesh=MESH))
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), actual, expected)


@pytest.mark.parametrize("name", cases.OTHER)
def test_another_function_is_left(name):
    case = cases.OTHER[name]
    params, batch = arrays(case)
    loss = functools.partial(loss_of, case)
    if name == "weights_returned":
        loss = functools.partial(attend, case)
    report = zero.attention_report(loss, params, batch)
    assert not report.num_fused + report.num_by_xla, report
    assert report.num_left == 1 and case.reason in report.rows[0].reason, report


@pytest.mark.parametrize("kind", ["range", "triangle", "bias", "float", "part"])
def test_masks_of_long_sequences_are_not_computed(kind):
    t = 2**17  # a mask of 16 GiB

    def mask():
        rows, columns = jnp.arange(t)[:, None], jnp.arange(t)
        match kind:
            case "range":
                return (columns <= rows) & (rows - columns < 100)
            case "float":
                return rows.astype(jnp.float32) >= columns.astype(jnp.float32)
            case "part":
                return jax.lax.dynamic_slice(cases.causal(2 * t), (t, t), (t, t))
        return cases.causal(t)

    def loss(params, batch):
        x = batch @ params @ batch.T
        x = x + (1 - mask()) * -1e9 if kind == "bias" else cases.masked(x, mask())
        return (jax.nn.softmax(x) @ batch).sum()

    report = zero.attention_report(loss, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 4), (t, 4))))
    expected = "causal, window -99 to 0" if kind == "range" else "causal"
    assert report.num_by_xla == 1 and str(report).endswith(f"1 heads, {expected})"), report


@pytest.mark.parametrize(
    ("platform", "capability", "shape", "says"),
    [
        ("tpu", "", {}, "fused by splash: batch 2, 256 x 256, 4 heads, causal"),
        ("cuda", "9.0", {}, "fused by cudnn: batch 2, 256 x 256, 4 heads, causal"),
        ("cuda", "7.5", {}, "XLA computes it: it needs compute capability 8.0, and the devices have 7.5 (batch 2"),
        ("cuda", "9.0", {"h": 12}, "XLA computes it: heads are 12 and 12 wide: it takes equal multiples of 8"),
        ("cuda", "9.0", {"dtype": jnp.float32}, "XLA computes it: it takes bfloat16 and float16, not float32"),
        ("tpu", "", {"t": 64}, "XLA computes it: sequences of less than 128 places"),
        ("cpu", "", {}, "XLA computes it: there is no kernel for the platform 'cpu'"),
    ],
)
def test_the_report_says_which_kernel_the_devices_take(platform, capability, shape, says, monkeypatch):
    placement = KernelPlacement(platform=platform, compute_capability=capability)
    monkeypatch.setattr("zero_jax.attention.function.current_placement", lambda mesh: placement)
    monkeypatch.setattr("zero_jax.attention.cudnn.installed_version", lambda: 91200)
    sizes = {"t": 256, "h": 16, "dtype": jnp.bfloat16} | shape
    x = jax.ShapeDtypeStruct((3, 2, sizes["t"], 4, sizes["h"]), sizes["dtype"])

    def loss(params, batch):
        def block(carry, _):
            q, k, v = batch * params
            return carry + jax.nn.dot_product_attention(q, k, v, is_causal=True).sum().astype(jnp.float32), None

        return jax.lax.scan(block, jnp.float32(0), length=5)[0]

    report = zero.attention_report(loss, jax.ShapeDtypeStruct((), sizes["dtype"]), x)
    is_fused = "fused by" in says
    assert says in str(report)
    assert (report.num_fused, report.num_by_xla, report.num_left) == (5 * is_fused, 5 * (not is_fused), 0)
    assert report.summary().startswith(f"5 fused ({report.rows[0].kernel})" if is_fused else "0 fused, 5 by XLA")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "scan"),
    [
        pytest.param(gpt, True, id="gpt"),
        # Its attention is the same function as gpt's.
        pytest.param(gpt_linen, False, id="linen"),
    ],
)
def test_reference_models_train_alike(make, scan):
    config = gpt.GPTConfig(vocab_size=32, seq_len=8, num_layers=2, d_model=32, num_heads=4, scan=scan)
    if make is gpt:
        init_fn, loss_fn = functools.partial(gpt.init, config), gpt.loss_fn(config)
    else:
        init_fn, loss_fn = make.make(config)
    mesh, tx = zero.make_mesh(data=4, model=2), optax.sgd(0.1)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32, (16, 9), np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    batch["segments"] = np.sort(rng.integers(0, 3, (16, 8), np.int32), axis=1)
    results = {}
    for attention, remat, k in (("own", "own", 1), ("fused", "own", 1), ("fused", "full", 2)):
        stage = 1 if k > 1 else 3
        zero_config = zero.ZeroConfig(stage=stage, attention=attention, remat=remat, num_microbatches=k)
        state = zero.init_state(init_fn, tx, jax.random.key(0), mesh=mesh, config=zero_config)
        step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=zero_config)
        state, metrics = step(state, batch)
        evaluated = zero.make_eval_step(loss_fn, mesh=mesh, config=zero_config)(state, batch)
        results[attention, remat] = jax.device_get((metrics.loss, metrics.grad_norm, evaluated.loss, state.params))
    for result in results.values():
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), result, results["own", "own"])


def test_unknown_attention():
    with pytest.raises(ValueError, match="give one of own, fused"):
        zero.fuse_attention(lambda params: params, "flash", mesh=MESH)
    with pytest.raises(ValueError, match="attention"):
        zero.ZeroConfig(attention="flash")

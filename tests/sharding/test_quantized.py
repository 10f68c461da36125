"""Blocks of few bits: what they round, what they cost, which ones a leaf has, and settings that are refused."""

import importlib
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zero_jax as zero
from zero_jax.sharding.quantized import Blocks, GatherFormat, GradFormat, blocks_of

# Half a step of the largest element of a block; scales are rounded to the 8 bits of bfloat16 before codes are made.
STEP = {"int8": 0.5 / 127 * 1.01, "fp8": 2.0**-4, "int4": 0.5 / 7 * 1.01}


def test_every_format_is_known_wherever_formats_are():
    tolerances = importlib.import_module(
        "zero_jax.verification.verify"
    )._TOLERANCES  # the package has a function verify
    formats = {*get_args(GatherFormat), *get_args(GradFormat)}
    assert formats == {*STEP} and formats <= tolerances.keys()


@pytest.mark.parametrize("format", STEP)
@pytest.mark.parametrize("dim", [-1, -2, -3])
def test_blocks_are_off_by_half_a_step_at_most(format, dim):
    x = jax.random.normal(jax.random.key(0), (32, 64, 96)) * jnp.exp(jax.random.normal(jax.random.key(1), (32, 1, 1)))
    blocks = Blocks(format=format, dim=dim, size=32)
    codes, scales = blocks.encode(x)
    found = blocks.decode((codes, scales), x.dtype)
    assert found.shape == x.shape and found.dtype == x.dtype
    axis = x.ndim + dim
    parts = np.stack(np.split(np.asarray(x), x.shape[axis] // 32, axis))
    errors = np.stack(np.split(np.abs(np.asarray(found - x)), x.shape[axis] // 32, axis))
    largest = np.abs(parts).max(axis + 1, keepdims=True)
    bound = largest * STEP[format]
    assert (errors <= bound * 1.004).all()
    if format == "fp8":  # whose steps are relative, down to its smallest normal numbers
        assert (errors <= np.maximum(np.abs(parts) * 2.0**-4, largest / 448 * 2.0**-9) * 1.01).all()
    sizes = [part.size * part.dtype.itemsize for part in (codes, scales)]
    assert sum(sizes) == x.size * sum(share * jnp.dtype(dtype).itemsize for dtype, share in blocks.parts)
    assert sum(sizes) <= 0.55 * x.size * 2 * (1 if format != "int4" else 0.55)


@pytest.mark.parametrize("format", STEP)
def test_blocks_keep_zeros_and_show_what_is_not_finite(format):
    blocks = Blocks(format=format, dim=-1, size=32)
    x = jnp.zeros((4, 64)).at[1, 3].set(jnp.inf).at[2, 40].set(jnp.nan).at[3].set(1e-42)
    found = np.asarray(blocks.decode(blocks.encode(x), x.dtype))
    assert (found[0] == 0).all() and np.isfinite(found[3]).all() and np.abs(found[3]).max() < 1e-40
    assert not np.isfinite(found[1, :32]).all() and (found[1, 32:] == 0).all()
    assert not np.isfinite(found[2, 32:]).all() and (found[2, :32] == 0).all()


@pytest.mark.parametrize("format", STEP)
def test_blocks_along_rows_show_what_is_not_finite(format):
    """XLA:CPU's kernel of such a maximum leaves NaN out."""
    blocks = Blocks(format=format, dim=-2, size=32)
    x = jnp.ones((256, 16)).at[3, 1].set(jnp.nan).at[40, 2].set(-jnp.inf)
    found = np.isfinite(jax.jit(lambda x: blocks.decode(blocks.encode(x), x.dtype))(x))
    assert not found[:32, 1].any() and not found[32:64, 2].all() and found.sum() >= x.size - 64


def test_every_code_of_int4_comes_back():
    x = jnp.tile(jnp.arange(-7.0, 8.0), 32)[: 15 * 32].reshape(15, 32).T.reshape(-1, 32)
    blocks = Blocks(format="int4", dim=-1, size=32)
    np.testing.assert_allclose(blocks.decode(blocks.encode(x), x.dtype), x, rtol=1e-2)
    assert blocks.encode(x)[0].dtype == jnp.uint8 and blocks.encode(x)[0].shape == (15, 16)


@pytest.mark.parametrize(
    ("shape", "dims", "block_size", "expected"),
    [
        ((256, 512), ((), ("data",)), None, (-2, 128)),  # rows first, which leave lanes as they are
        ((24, 512), ((), ("data",)), None, (-1, 64)),
        ((12, 96, 13), ((), ("data",), ()), None, None),  # 12 rows of shards [12, 12, 13]
        ((640, 48, 13), (("data",), (), ()), None, (-2, 48)),  # one of the last two, though the first has larger ones
        ((256, 512), ((), ("data",)), 64, (-2, 64)),
        ((256, 512), ((), ("data",)), 512, ValueError),
        ((768,), (("data",),), None, (-1, 96)),
        ((104,), (("data",),), None, None),
    ],
)
def test_the_blocks_of_a_shard(shape, dims, block_size, expected):
    mesh = zero.make_mesh(data=8)
    if expected is ValueError:
        with pytest.raises(ValueError, match=r"block_size=512 divides no dim of the shard \[256, 64\].*'a/b'"):
            blocks_of("int8", "a/b", shape, dims, mesh=mesh, block_size=block_size)
        return
    blocks = blocks_of("int8", "a/b", shape, dims, mesh=mesh, block_size=block_size)
    assert (blocks and (blocks.dim, blocks.size)) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(gathers="int4"), "gathers='int4': did you mean 'int8'. give one of int8, fp8"),
        (dict(grads="fp8"), "grads='fp8'"),
        (dict(grads=8), "grads=8"),
        (dict(gathers={"w": "int9"}), "gathers='int9'"),
        (dict(gathers={"(": "int8"}), "not a regular expression"),
        (dict(gathers="int8", block_size=63), "block_size=63: give an even number"),
        (dict(gathers="int8", block_size=0), "block_size=0: give an even number"),
        (dict(gathers="int8", block_size="64"), "block_size='64'"),
        (dict(gathers="int8", grads_over="replica"), "grads_over='replica' without grads"),
        (dict(gathers="int8", error_feedback=True), "error_feedback=True without grads"),
        (dict(grads="int8", error_feedback="yes"), "error_feedback='yes'"),
        (dict(grads="int8", error_feedback={"(": True}), "not a regular expression"),
        (dict(grads="int8", error_feedback={"w": None}), "error_feedback=None"),
        (dict(grads="int8", grads_over=()), "grads_over=.*give the name of a mesh axis"),
        (dict(grads="int8", grads_over=("replica", 1)), "grads_over=.*give the name of a mesh axis"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        zero.Quantize(**settings)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(stage=0, quantize=zero.Quantize(gathers="int8")), "stage=0 gathers no params"),
        (dict(stage=0, quantize=zero.Quantize(grads="int8")), "stage=0 scatters no gradients"),
        (dict(stage=2, quantize=zero.Quantize(gathers="int8")), "lose precision in every step; give precision='bf16'"),
        (dict(quantize="int8"), r"give a zero\.Quantize"),
        (dict(quantize=dict(gathers="int8")), r"give a zero\.Quantize"),
    ],
)
def test_nothing_to_quantize(config, message):
    with pytest.raises(ValueError, match=message):
        zero.ZeroConfig(**config)


@pytest.mark.parametrize(
    ("quantize", "message"),
    [
        (zero.Quantize(gathers={"nothing": "int8"}), "'nothing' matches the path of no leaf; some are"),
        (
            zero.Quantize(grads={"b": "int8"}),
            "'b' matches no leaf to quantize; the largest is 'b'.*under 1024 elements",
        ),
        (zero.Quantize(gathers={"odd": "int8"}), "no dim of its shard has a divisor from 32 to 128"),
        (zero.Quantize(gathers="int8", block_size=24), "block_size=24 divides no dim of the shard .* give block_size="),
    ],
)
def test_settings_that_do_not_fit_the_leaves(quantize, message):
    shapes = {"w": (256, 512), "b": (512,), "odd": (13, 104)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        zero.sharding_report(params, mesh=zero.make_mesh(data=8), config=zero.ZeroConfig(quantize=quantize))

"""Quantized weights against their definitions: a scale per block, the nearest code, and a bounded error."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero_jax.finetuning import dequantize, quantize
from zero_jax.finetuning.quantization import NF4_LEVELS

# The largest gap between two levels, halved: 0.1520 for NF4's widest, half a step of 1 / 127 for int8. A scale that is
# quantized too may be half a step of 1 / 255 of its group's largest below the block's largest element.
LARGEST_ERROR = {"int8": 0.5 / 127, "nf4": max(np.diff(NF4_LEVELS)) / 2, "nf4_double": max(np.diff(NF4_LEVELS)) / 2}
FORMATS = list(LARGEST_ERROR)


def weight(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("format", FORMATS)
def test_a_weight_that_is_not_finite_shows(format):
    matrix = weight(256, 16)
    matrix[3, 1] = np.nan
    found = np.isfinite(dequantize(quantize(matrix, format, block_size=64)))
    assert not found[3, 1] and found[64:].all()


@pytest.mark.parametrize("format", FORMATS)
def test_each_element_is_the_nearest_code_of_its_block(format):
    matrix = weight(128, 24)
    found = quantize(matrix, format, block_size=64)
    blocks = matrix.reshape(2, 64, 24)
    scales = np.abs(blocks).max(1)
    if format == "nf4_double":
        assert found.scales.dtype == np.uint8 and found.steps.shape == (2, 1)
        stored = np.asarray(found.scales) * np.asarray(found.steps)
        assert np.abs(stored - scales).max() <= scales.max() / 255 / 2 * 1.0001
        scales = stored
    else:
        np.testing.assert_array_equal(found.scales, scales)
    levels = np.arange(-127, 128) / 127 if format == "int8" else np.array(NF4_LEVELS)
    unit = blocks / scales[:, None]
    nearest = levels[np.abs(unit[..., None] - levels).argmin(-1)] * scales[:, None]
    np.testing.assert_allclose(dequantize(found), nearest.reshape(128, 24), rtol=1e-6)
    assert np.abs(dequantize(found) - matrix).max() <= LARGEST_ERROR[format] * scales.max() * 1.0001


@pytest.mark.parametrize("format", FORMATS)
def test_what_a_code_stands_for_is_kept_exactly(format):
    levels = np.arange(-127, 128, 2) / 127 if format == "int8" else np.array(NF4_LEVELS)
    matrix = np.resize(levels, (len(levels) * 2, 3)).astype(np.float32)
    found = dequantize(quantize(matrix, format, block_size=len(matrix)))
    np.testing.assert_allclose(found, matrix, rtol=1e-6)


@pytest.mark.parametrize("format", FORMATS)
def test_stacks_and_kernels_of_many_dims(format):
    kernel = weight(2, 8, 16, 4, 6)
    found = quantize(kernel, format, num_stack=1, num_rows_dims=2, block_size=32)
    assert found.shape == kernel.shape and found.scales.shape == (2, 4, 24)
    one = quantize(kernel[1].reshape(128, 24), format, block_size=32)
    np.testing.assert_array_equal(dequantize(found)[1], dequantize(one).reshape(kernel.shape[1:]))


def test_bits_per_element():
    matrix = weight(256, 128)
    stored = {format: sum(x.nbytes for x in jax.tree.leaves(quantize(matrix, format))) for format in FORMATS}
    bits = {name: 8 * size / matrix.size for name, size in stored.items()}
    assert bits == {"int8": 8.5, "nf4": 4.5, "nf4_double": 4 + 8 / 64 + 32 / 64 / 128}


def test_outside_jit_a_weight_is_compiled_once(caplog):
    stored = quantize(weight(128, 8), "nf4_double")
    dequantize(stored)
    with jax.log_compiles():
        dequantize(stored)
    assert "Compiling" not in caplog.text


def test_zeros_and_vmap():
    zeros = jnp.zeros((64, 4))
    stack = weight(3, 64, 4)
    for format in FORMATS:
        np.testing.assert_array_equal(dequantize(quantize(zeros, format)), zeros)
        mapped = jax.vmap(lambda w, format=format: dequantize(quantize(w, format)))(stack)
        np.testing.assert_array_equal(mapped, dequantize(quantize(stack, format, num_stack=1)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "int4"}, "format='int4': choose one of int8, nf4, nf4_double"),
        ({"format": "int8", "block_size": 48}, "a weight of 64 rows (shape [64, 4]) does not divide into blocks of 48"),
        ({"format": "int8", "block_size": 0}, "does not divide into blocks of 0"),
    ],
)
def test_what_does_not_divide_is_refused(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        quantize(weight(64, 4), **arguments)

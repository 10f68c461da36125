"""Convolutions of a pipeline as matrix products: equal to XLA's, with the gradients of both operands."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from zero_jax.program.loss import LossProgram
from zero_jax.transforms import convolutions_as_products

CASES = {
    "same, strided": ((2, 9, 4), (3, 4, 6), ("NWC", "WIO", "NWC"), {"window_strides": (2,), "padding": "SAME"}),
    "patches that leave a rest": ((2, 3, 7, 9), (5, 3, 2, 3), ("NCHW", "OIHW", "NHWC"), {"window_strides": (2, 3)}),
    "depthwise, dilated": (
        (9, 4, 2),
        (3, 1, 8),
        ("WCN", "WIO", "NWC"),
        {"rhs_dilation": (2,), "padding": [(4, 0)], "feature_group_count": 4},
    ),
    "transposed, in groups": (
        (2, 5, 5, 4),
        (3, 2, 2, 6),
        ("NHWC", "HWIO", "NHWC"),
        {"lhs_dilation": (2, 1), "padding": [(1, 2), (-1, 1)], "feature_group_count": 2},
    ),
    "of images in depth": ((1, 4, 4, 4, 2), (2, 3, 1, 2, 3), ("NDHWC", "DHWIO", "NDHWC"), {"padding": "SAME"}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_products_equal_convolutions(case):
    x, kernel, dims, fields = case
    rng = np.random.default_rng(0)
    operands = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in (x, kernel)]
    fields = {"window_strides": (1,) * (len(x) - 2), "padding": "VALID"} | fields
    convolve = lambda kernel, x: lax.conv_general_dilated(x, kernel, dimension_numbers=dims, **fields)  # noqa: E731
    program = LossProgram.of(convolve).then(convolutions_as_products)
    found, wanted = (
        jax.jit(lambda x, kernel, fn=fn: (*jax.vjp(fn, kernel, x)[1](jnp.cos(fn(kernel, x))), fn(kernel, x)))
        for fn in (program, convolve)
    )
    assert "conv_general_dilated" not in str(found.trace(*operands).jaxpr)
    chex.assert_trees_all_close(found(*operands), wanted(*operands), rtol=1e-4, atol=1e-4)
    halves = [x.astype(jnp.bfloat16) for x in operands]
    assert program(*halves[::-1]).dtype == convolve(*halves[::-1]).dtype

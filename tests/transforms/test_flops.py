"""Operations counted on jaxprs, against sums by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.extend import core
from jax.sharding import PartitionSpec

import zero_jax as zero
from zero_jax.core.tree import leaf_names
from zero_jax.models import gpt
from zero_jax.transforms.flops import count_flops, training_flops

X = jax.ShapeDtypeStruct((3, 4), jnp.float32)
W = jax.ShapeDtypeStruct((4, 5), jnp.float32)
SQUARE = jax.ShapeDtypeStruct((4, 4), jnp.float32)


def forward_flops(fn, *args):
    """Counts the operations of one call of a function."""
    return count_flops(jax.make_jaxpr(fn)(*args))


def test_a_product_is_two_operations_a_multiply_add():
    assert forward_flops(jnp.matmul, X, W) == 2 * 3 * 4 * 5


def test_a_batched_product():
    left, right = jax.ShapeDtypeStruct((7, 3, 4), jnp.float32), jax.ShapeDtypeStruct((7, 4, 5), jnp.float32)
    assert forward_flops(jnp.matmul, left, right) == 7 * 2 * 3 * 4 * 5


def test_fused_attention_counts_every_query_with_every_key():
    q, k = jax.ShapeDtypeStruct((2, 7, 4, 8), jnp.float32), jax.ShapeDtypeStruct((2, 9, 2, 8), jnp.float32)
    fused, plain = (functools.partial(zero.dot_product_attention, implementation=name) for name in ("splash", "xla"))
    assert forward_flops(fused, q, k, k) == forward_flops(plain, q, k, k) == 2 * 2 * 2 * 4 * 7 * 9 * 8


def test_a_convolution():
    image, kernel = jax.ShapeDtypeStruct((2, 8, 8, 3), jnp.float32), jax.ShapeDtypeStruct((3, 3, 3, 5), jnp.float32)
    convolve = functools.partial(
        lax.conv_general_dilated,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    assert forward_flops(convolve, image, kernel) == 2 * (2 * 8 * 8 * 5) * (3 * 3 * 3)


def test_a_grouped_convolution_has_fewer():
    image, kernel = jax.ShapeDtypeStruct((1, 8, 4), jnp.float32), jax.ShapeDtypeStruct((3, 1, 4), jnp.float32)
    convolve = functools.partial(
        lax.conv_general_dilated,
        window_strides=(1,),
        padding="SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=4,
    )
    assert forward_flops(convolve, image, kernel) == 2 * (8 * 4) * 3


def test_a_scan_counts_every_iteration():
    def loop(x, w):
        return lax.scan(lambda x, _: (x @ w, None), x, length=6)[0]

    assert forward_flops(loop, X, SQUARE) == 6 * 2 * 3 * 4 * 4


def test_remat_jit_and_custom_derivatives_are_looked_into():
    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(lambda x, w: (x @ w, None), lambda _, g: (g, g))
    assert forward_flops(jax.jit(jax.checkpoint(product)), X, W) == 2 * 3 * 4 * 5


def test_a_conditional_counts_its_costliest_branch():
    def either(x, w):
        return lax.cond(x.sum() > 0, lambda: x @ w @ w, lambda: x @ w)

    assert forward_flops(either, X, SQUARE) == 2 * 2 * 3 * 4 * 4


@pytest.mark.parametrize("scan", [True, False])
def test_a_transformer(scan):
    config = gpt.GPTConfig(vocab_size=32, seq_len=8, num_layers=3, d_model=16, num_heads=2, scan=scan)
    params = jax.eval_shape(functools.partial(gpt.init, config), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    blocks = 3 * (12 * 16 * 16 * 2 * 16 + 2 * (2 * 8 * 8 * 16) * 2)  # weights; scores and their product with values
    head = 2 * 16 * 32 * 16
    batch = {"inputs": tokens, "targets": tokens}
    assert forward_flops(gpt.loss_fn(config), params, batch) == blocks + head
    assert attention(gpt.loss_fn(config), params, batch) == 3 * 2 * (2 * 8 * 8 * 16) * 2


def training(fn, trained, *args):
    """The operations of a training step over those of the forward pass."""
    flags = [*trained, *[False] * (len(jax.tree.leaves(args)) - len(trained))]
    return training_flops(jax.make_jaxpr(fn)(*args), flags) / forward_flops(fn, *args)


@pytest.mark.parametrize("scan", [True, False])
def test_a_step_counts_the_gradients_that_it_computes(scan):
    config = gpt.GPTConfig(vocab_size=32, seq_len=8, num_layers=3, d_model=16, num_heads=2, scan=scan, remat=True)
    params = jax.eval_shape(functools.partial(gpt.init, config), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    batch, loss = {"inputs": tokens, "targets": tokens}, gpt.loss_fn(config)
    names = leaf_names(params)
    share = lambda chosen: training(loss, [chosen(name) for name in names], params, batch)  # noqa: E731
    assert share(lambda name: True) == 3
    assert share(lambda name: False) == 1
    # Of the tied embedding alone: the weights of the blocks have no gradient.
    weights, scores, head = 3 * 12 * 16 * 16, 3 * 2 * 8 * 16, 16 * 32
    found = share(lambda name: name == "embed") * (weights + scores + head)
    assert found == pytest.approx(2 * weights + 3 * scores + 3 * head)
    found = share(lambda name: name == "final_norm") * (weights + scores + head)
    assert found == pytest.approx(weights + scores + 2 * head)


def test_products_of_what_is_not_trained_have_no_gradient():
    down, up = jax.ShapeDtypeStruct((4, 2), jnp.float32), jax.ShapeDtypeStruct((2, 5), jnp.float32)
    own = lambda trained: training(lambda w, x: x @ w, [trained], W, X)  # noqa: E731
    assert (own(False), own(True)) == (1, 2)  # the data have no gradient
    adapted = training(lambda down, up, w, x: x @ w + (x @ down) @ up, [True, True], down, up, W, X)
    assert adapted * (20 + 8 + 10) == 20 + 2 * 8 + 3 * 10
    stopped = lambda w, x: (x @ lax.stop_gradient(w)).sum() * (w.T @ w).sum()  # noqa: E731
    assert training(stopped, [True], W, X) * (3 + 5) == pytest.approx(3 + 3 * 5)


def test_a_loop_and_branches_count_what_every_iteration_and_the_costliest_computes():
    def loop(w, x):
        # In the first iteration x depends on no param.
        return lax.scan(lambda carry, _: (carry @ w, None), x, length=6)[0]

    def either(w, x):
        return lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x @ w)

    assert training(loop, [True], SQUARE, X) == 3
    assert training(either, [True], SQUARE, X) == 5 / 2
    assert training(jax.jit(jax.checkpoint(loop)), [True], SQUARE, X) == 3


def attention(fn, *args):
    return training_flops(jax.make_jaxpr(fn)(*args), [False] * len(jax.tree.leaves(args)), attention_only=True)


Q = jax.ShapeDtypeStruct((2, 64, 4, 32), jnp.bfloat16)
SCORES_AND_VALUES = 2 * 2 * (2 * 4 * 64 * 64 * 32)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_its_scores_and_their_use(causal):
    def attend(q, w):
        return jax.nn.dot_product_attention(q, q, q, is_causal=causal).reshape(2, 64, 128) @ w

    w = jax.ShapeDtypeStruct((128, 8), jnp.bfloat16)
    assert attention(attend, Q, w) == SCORES_AND_VALUES
    assert forward_flops(attend, Q, w) == SCORES_AND_VALUES + 2 * 2 * 64 * 128 * 8


def test_a_router_and_experts_are_no_attention():
    def mix(x, router, experts):
        shares = jax.nn.softmax(x @ router)
        return jnp.einsum("te,ted->td", shares, jnp.einsum("td,edf->tef", x, experts))

    shapes = (8, 4), (4, 3), (3, 4, 4)
    assert attention(mix, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)) == 0


@pytest.mark.parametrize("wrapper", ["", "_wrapper"])
def test_attention_of_cudnn_counts_by_its_shapes(wrapper):
    """In the layouts `[batch, length, heads, dim]` and `[batch, heads, length, dim]`, with one head of keys."""
    key = jax.ShapeDtypeStruct((2, 16, 1, 32), jnp.bfloat16)
    for layout, turn in ((0, lambda x: x), (1, lambda x: x.transpose(0, 2, 1, 3))):
        primitive = core.Primitive(f"dot_product_attention_fwd{wrapper}")
        primitive.def_abstract_eval(lambda q, k, v, **_: q)

        def call(q, k):
            return primitive.bind(turn(q), turn(k), turn(k), layout=layout)  # noqa: B023

        assert forward_flops(call, Q, key) == 2 * 2 * (2 * 4 * 64 * 16 * 32)
        assert attention(call, Q, key) == forward_flops(call, Q, key)
        # The scores have a cotangent for the trained keys, and so has their product, with the scores and the values.
        assert training(call, [False, True], Q, key) == 1 + 3 / 2


def scores_times_values(q_ref, k_ref, out_ref):
    scores = jnp.exp(jnp.dot(q_ref[...], k_ref[...].T, preferred_element_type=jnp.float32))
    out_ref[...] = jnp.dot(scores, k_ref[...], preferred_element_type=jnp.float32)


def kernel(q, k, cost_estimate=None):
    return pl.pallas_call(
        scores_times_values,
        out_shape=jax.ShapeDtypeStruct((64, 32), jnp.float32),
        grid=(4,),
        in_specs=[pl.BlockSpec((16, 32), lambda i: (i, 0)), pl.BlockSpec((64, 32), lambda i: (0, 0))],
        out_specs=pl.BlockSpec((16, 32), lambda i: (i, 0)),
        cost_estimate=cost_estimate,
    )(q, k)


ROWS = jax.ShapeDtypeStruct((64, 32), jnp.float32)


def test_a_kernel_counts_its_body_at_every_step_of_its_grid():
    assert forward_flops(kernel, ROWS, ROWS) == 4 * 2 * (2 * 16 * 64 * 32)
    assert attention(kernel, ROWS, ROWS) == forward_flops(kernel, ROWS, ROWS)


def test_a_kernels_own_estimate_comes_first():
    own = pl.CostEstimate(flops=777, transcendentals=0, bytes_accessed=0)
    assert forward_flops(functools.partial(kernel, cost_estimate=own), ROWS, ROWS) == 777


def test_a_shard_map_counts_on_all_shards():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows = jax.ShapeDtypeStruct((16, 4), jnp.float32)
    specs = {"in_specs": (PartitionSpec("data"), PartitionSpec()), "out_specs": PartitionSpec("data")}
    assert forward_flops(jax.shard_map(jnp.matmul, mesh=mesh, **specs), rows, W) == 2 * 16 * 4 * 5
    specs = {
        "in_specs": (PartitionSpec(("data", "model")), PartitionSpec()),
        "out_specs": PartitionSpec(mesh.axis_names),
    }
    assert forward_flops(jax.shard_map(jnp.matmul, mesh=mesh, **specs), rows, W) == 2 * 16 * 4 * 5


def test_a_ragged_product_multiplies_each_row_once():
    rows, experts = jax.ShapeDtypeStruct((30, 8), jnp.float32), jax.ShapeDtypeStruct((3, 8, 5), jnp.float32)
    sizes = jax.ShapeDtypeStruct((3,), jnp.int32)
    assert forward_flops(lax.ragged_dot, rows, experts, sizes) == 2 * 30 * 8 * 5

"""The kernels of a traced function: FLOPs and bytes that can be worked out by hand."""

import jax
import jax.numpy as jnp
import pytest

import zero_jax as zero
from zero_jax.attention import attention_work, fused
from zero_jax.attention.placement import KernelPlacement
from zero_jax.attention.xla import Band
from zero_jax.dims import ValueSharding, propagate_shardings
from zero_jax.transforms import Kernel, kernels

SIZES = {"data": 1, "model": 4}
B, D, F = 8, 16, 64
BF16, F32 = jnp.bfloat16, jnp.float32


def kernels_of(fn, *inputs):
    """Returns the kernels of a function of `(shape, dtype, dims)`s, those that move nothing left out."""
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in inputs]
    jaxpr = jax.make_jaxpr(fn)(*shapes)
    shardings = [ValueSharding(dims=dims, varies="data" in str(dims)) for _, _, dims in inputs]
    found = propagate_shardings(jaxpr, shardings, sizes=SIZES, counted=("model",))
    return [x for x in kernels(jaxpr, found.values, sizes=SIZES, batch_axes=("data",)) if x.split_bytes + x.other_bytes]


def examples(*shape, dtype=BF16):
    return shape, dtype, (("data",), *((),) * (len(shape) - 1))


def params(*shape, dims=None, dtype=BF16):
    return shape, dtype, dims or ((),) * len(shape)


def test_a_product_reads_its_operands_and_writes_its_result():
    (got,) = kernels_of(lambda x, w: x @ w, examples(B, D), params(D, F))
    assert got == Kernel(
        flops=2 * B * D * F, vector_ops=0, split_bytes=2 * (B * D + B * F), other_bytes=2 * D * F, is_split=True
    )


def test_the_gradient_of_a_param_does_not_grow_with_the_batch():
    (got,) = kernels_of(lambda x, y: x.T @ y, examples(B, D), examples(B, F))
    assert (got.flops, got.is_split) == (2 * B * D * F, True)
    assert (got.split_bytes, got.other_bytes) == (2 * (B * D + B * F), 2 * D * F)


def test_elementwise_work_is_part_of_the_product_before_or_after_it():
    def fn(x, w):
        return jnp.tanh((2 * x.astype(F32)).astype(BF16) @ w).astype(F32)

    (got,) = kernels_of(fn, examples(B, D), params(D, F))
    assert (got.split_bytes, got.other_bytes) == (2 * B * D + 4 * B * F, 2 * D * F)
    assert got.vector_ops > 8 * B * F  # tanh, beside casts


def test_a_softmax_of_scores_is_written_once_and_read_three_times():
    def fn(q, k, v):
        return jax.nn.softmax((q @ k.T).astype(F32)).astype(BF16) @ v

    queries = 1024
    found = kernels_of(fn, examples(queries, D), params(512, D), params(512, D))
    product, maximum, total, weighted = found
    scores = 4 * queries * 512
    assert product.flops == weighted.flops == 2 * queries * 512 * D
    assert product.split_bytes == 2 * queries * D + scores
    for reads in (maximum, total, weighted):
        assert scores < reads.split_bytes < 1.1 * scores


def test_a_result_that_is_cheaper_to_write_is_written():
    # A sum of eight arrays is read by three reductions: 8 + 1 + 3 arrays are less than 3 x 8.
    def fn(*arrays):
        total = sum(arrays)
        return total.sum(1), total.max(1), total.min(1)

    found = kernels_of(fn, *[examples(B, 4096, dtype=F32)] * 8)
    array = 4 * B * 4096
    assert sorted(round(x.split_bytes / array) for x in found) == [1, 1, 1, 9]
    found = kernels_of(lambda x: fn(x, 1.0), examples(B, 4096, dtype=F32))
    assert [round(x.split_bytes / array) for x in found] == [1, 1, 1]


def test_a_sharded_product_is_divided():
    (got,) = kernels_of(lambda x, w: x @ w, examples(B, D), params(D, F, dims=((), ("model",))))
    assert got.flops == 2 * B * D * F / 4
    assert (got.split_bytes, got.other_bytes) == (2 * (B * D + B * F / 4), 2 * D * F / 4)


def test_a_loop_counts_its_iterations():
    def fn(x, stack):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, stack)[0]

    (got,) = kernels_of(fn, examples(B, D), params(5, D, D))
    assert got.times == 5
    assert (got.flops, got.split_bytes, got.other_bytes) == (2 * B * D * D, 2 * 2 * B * D, 2 * D * D)


def test_what_a_loop_keeps_is_written():
    def fn(x, stack):
        return jax.lax.scan(lambda x, w: (x @ w, x), x, stack)[1]

    found = kernels_of(fn, examples(B, D), params(5, D, D))
    copies = [x for x in found if not x.flops]
    assert [(x.times, x.split_bytes) for x in copies] == [(5, 2 * 2 * B * D)]


def test_remat_runs_the_forward_pass_again():
    def loss(x, w):
        return jnp.tanh(jnp.tanh(x @ w) @ w).sum()

    plain = kernels_of(jax.grad(loss, argnums=1), examples(B, D), params(D, D))
    again = kernels_of(jax.grad(jax.checkpoint(loss), argnums=1), examples(B, D), params(D, D))
    assert sum(x.flops for x in again) == pytest.approx(sum(x.flops for x in plain) + 2 * 2 * B * D * D)


def test_a_lookup_moves_its_rows():
    found = kernels_of(lambda table, tokens: table[tokens], params(4096, D), ((B, 4), jnp.int32, (("data",), ())))
    assert sum(x.split_bytes + x.other_bytes for x in found) < 3 * 2 * B * 4 * D


def test_the_branch_that_moves_most_counts():
    def fn(x, w):
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x[:, :1] @ w[:1])

    found = kernels_of(fn, examples(B, D), params(D, F))
    assert max(x.flops for x in found) == 2 * B * D * F and sum(x.flops > 0 for x in found) == 1


@pytest.mark.tpu_compiler
def test_fused_attention_counts_the_blocks_that_it_visits():
    pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'jax[tpu]'")

    def fn(q, k, v):
        return zero.dot_product_attention(q, k, v, is_causal=True, mesh=zero.make_mesh(topology="v5p:2x2x1"))

    tokens, heads = 1024, 2
    q = examples(B, tokens, heads, 128)
    found = [x for x in kernels_of(fn, q, q, q) if x.engine]
    assert [x.engine for x in found] == ["attention", *["layout"] * 5]
    assert [x.split_bytes for x in found[1:5]] == [2 * 2 * B * tokens * heads * 128] * 4  # log-sum-exps are the fifth
    seen = tokens * tokens * 3 / 4  # three of four blocks of 512 x 512
    assert found[0].flops == 2 * 2 * B * heads * 128 * seen and found[0].is_split
    gradient = jax.grad(lambda *arrays: fn(*arrays).sum().astype(F32), argnums=(0, 1, 2))
    backward = [x for x in kernels_of(gradient, q, q, q) if x.engine == "attention backward"]
    assert [x.flops for x in backward] == [2 * 5 * B * heads * 128 * seen]
    # What both kernels take is copied once: queries, keys, values, result, log-sum-exps; then four cotangents.
    assert sum(x.engine == "layout" for x in kernels_of(gradient, q, q, q)) == 9
    sums = [x for x in kernels_of(gradient, q, q, q) if x.engine == "sum"]
    assert [x.split_bytes for x in sums] == [3 * 2 * B * tokens * heads * 128]  # two parts of dq, one for each 512 keys


def test_attention_of_gpus_counts_the_keys_that_queries_see():
    q = jax.ShapeDtypeStruct((2, 1024, 4, 64), jnp.bfloat16)
    call = fused.Call(
        kernel="cudnn", scale=1.0, band=Band(None, 0), soft_cap=None, placement=KernelPlacement(platform="cuda")
    )
    seen = 2 * 4 * 64 * 1024 * 1025 / 2
    assert attention_work(q, q, q, call=call, backward=False)[0] == 2 * 2 * seen
    assert attention_work(q, q, q, call=call, backward=True)[0] == 2 * 5 * seen


def test_splitting_the_minor_dim_of_activations_is_a_copy():
    def fn(x, w):
        y = (x @ w).reshape(B, 4, D // 4)
        return jnp.tanh(y).reshape(B, D), w.reshape(D, 2, D // 2)

    found = kernels_of(fn, examples(B, D), params(D, D))
    assert [x.split_bytes for x in found if x.engine == "layout"] == [2 * 2 * B * D] * 2


def test_activations_are_copied_out_of_the_stack_of_a_loop():
    def fn(x, xs, w):
        return jax.lax.scan(lambda x, slices: (x @ slices[1] + slices[0], None), x, (xs, w))[0]

    stacked = (3, B, D), BF16, ((), ("data",), ())
    found = kernels_of(fn, examples(B, D), stacked, params(3, D, D))
    assert [(x.times, x.split_bytes) for x in found if x.engine == "slice"] == [(3, 2 * 2 * B * D)]

"""Shardings carried through jaxprs: collectives that can be counted by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import zero_jax as zero
from zero_jax.dims import ValueSharding, propagate_shardings
from zero_jax.program.jaxprs import open_jaxpr, without_dead_code
from zero_jax.sharding.chains import Chain, reshard
from zero_jax.sharding.spec import dims_of

SIZES = {"data": 2, "model": 4}
B, T, D, F = 8, 16, 32, 64
P = PartitionSpec
U = PartitionSpec.UNCONSTRAINED


def arrays(*shapes, dtype=jnp.float32):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def found(fn, *inputs):
    """Traces a function of (shape, spec) pairs; what has `data` in its spec varies."""
    shapes = [x if isinstance(x[0], jax.ShapeDtypeStruct) else (arrays(x[0])[0], x[1]) for x in inputs]
    jaxpr, _ = open_jaxpr(jax.make_jaxpr(fn)(*(x for x, _ in shapes)))
    shardings = [ValueSharding(dims=dims_of(spec, x.ndim), varies="data" in spec) for x, spec in shapes]
    return propagate_shardings(jaxpr, shardings, sizes=SIZES, counted=("model",))


def moves(spreading):
    return [(move.kind, move.sent_bytes, move.times) for move in spreading.moves]


X = ((B, T, D), P("data"))
UP, DOWN = ((D, F), P(None, "model")), ((F, D), P("model", None))
STREAM = B // 2 * T * D * 4  # bytes of an activation [B, T, D] on a device
ALL_REDUCE = ("all-reduce", 2 * STREAM * 3 / 4, 1)


def mlp(x, up, down):
    return x + jax.nn.relu(x @ up) @ down


def test_a_split_mlp_is_one_sum_forward():
    got = found(mlp, X, UP, DOWN)
    assert moves(got) == [ALL_REDUCE]
    assert got.outputs[0].dims == (("data",), (), ())
    assert got.local_bytes == (STREAM,)
    assert not got.unknown


def test_its_gradient_is_one_more_in_the_backward_pass():
    got = found(jax.grad(lambda x, up, down: mlp(x, up, down).sum() ** 2, argnums=(0, 1, 2)), X, UP, DOWN)
    sums = [(move.kind, move.sent_bytes, move.phase) for move in got.moves if move.sent_bytes > 100]
    assert sums == [(*ALL_REDUCE[:2], "forward"), (*ALL_REDUCE[:2], "backward")]
    assert [laid.dims for laid in got.outputs[1:]] == [((), ("model",)), (("model",), ())]


@pytest.mark.parametrize(("num_kv_heads", "num_gathers"), [(4, 0), (2, 3)])
def test_fused_attention_keeps_heads_forward_and_backward(num_kv_heads, num_gathers):
    """Heads that the axis divides stay; where it does not divide those of keys, each device computes all of them."""

    def attention(query, key, value):
        return zero.dot_product_attention(query, key, value, is_causal=True, implementation="splash")

    keys = P("data", None, "model" if num_kv_heads == 4 else None)
    inputs = ((B, T, 8, 2), P("data", None, "model")), *[((B, T, num_kv_heads, 2), keys)] * 2
    got = found(lambda *xs: jax.vjp(attention, *xs)[1](xs[0]), *inputs)
    assert not got.unknown
    assert [kind for kind, _, _ in moves(got)] == ["all-gather"] * num_gathers
    assert got.outputs[0].dims == (("data",), (), () if num_gathers else ("model",), ())
    got = found(lambda *xs: jax.jvp(attention, xs, xs)[1], *inputs)
    assert not got.unknown


def test_partial_sums_that_are_added_are_summed_once():
    def attention_inputs(x, q, k, v):
        return jnp.tanh(x @ q + x @ k - x @ v)

    rows = ((D, D), P("model", None))
    assert moves(found(attention_inputs, X, rows, rows, rows)) == [ALL_REDUCE]


def test_a_value_is_summed_once_for_all_that_read_it():
    def twice(x, up, down):
        y = jax.nn.relu(x @ up) @ down
        return jnp.tanh(y), jnp.exp(y), jax.jit(jnp.sin)(y)

    assert moves(found(twice, X, UP, DOWN)) == [ALL_REDUCE]


def test_sums_are_of_the_narrow_type_of_the_product():
    shapes = arrays(X[0], UP[0], DOWN[0], dtype=jnp.bfloat16)
    bf16 = list(zip(shapes, (X[1], UP[1], DOWN[1]), strict=True))
    got = found(lambda x, up, down: jnp.tanh((jax.nn.relu(x @ up) @ down).astype(jnp.float32)), *bf16)
    assert moves(got) == [("all-reduce", ALL_REDUCE[1] / 2, 1)]


def test_loops_count_each_time():
    def layers(x, up, down):
        return jax.lax.scan(lambda x, w: (mlp(x, *w), x.sum()), x, (up, down))

    got = found(layers, X, ((3, D, F), P(None, None, "model")), ((3, F, D), P(None, "model", None)))
    assert moves(got) == [(*ALL_REDUCE[:2], 3)]
    assert got.outputs[0].dims == (("data",), (), ())
    assert got.sliced_param_bytes == 2 * D * F * 4 / 4


def test_a_carry_comes_to_lie_as_the_body_leaves_it():
    """A sum of split products, which begins as whole zeros, is cut: nothing moves."""

    def products(x, up):
        return jax.lax.scan(lambda total, w: (total + x @ w, None), jnp.zeros((B, T, F)), up)[0]

    got = found(products, X, ((3, D, F), P(None, None, "model")))
    assert moves(got) == []
    assert got.outputs[0].dims == (("data",), (), ("model",))


def test_a_loop_whose_carry_changes_its_dims_gathers():
    got = found(lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x.mT, x), ((4, D, D), P("data", "model", None)))
    assert {kind for kind, _, _ in moves(got)} == {"all-gather"}


def test_heads_are_split_with_their_features_and_not_where_they_do_not_divide():
    def heads(num):
        return found(lambda x, w: jnp.tanh((x @ w).reshape(B, T, num, D // num)), X, ((D, D), P(None, "model")))

    assert heads(8).outputs[0].dims == (("data",), (), ("model",), ())
    assert not heads(8).moves and not heads(8).unknown
    assert "takes the 4 shards of dim 2 apart" in heads(2).unknown
    assert moves(heads(2)) == [("all-gather", STREAM * 3 / 4, 1)]


def test_a_lookup_in_split_rows_is_summed_and_in_split_features_is_not():
    tokens = (jax.ShapeDtypeStruct((B, T), jnp.int32), P("data"))
    lookup = lambda tokens, table: jnp.tanh(table[tokens])  # noqa: E731
    assert moves(found(lookup, tokens, ((64, D), P("model", None)))) == [ALL_REDUCE]
    by_features = found(lookup, tokens, ((64, D), P(None, "model")))
    assert not by_features.moves
    assert by_features.outputs[0].dims == (("data",), (), ("model",))


def test_the_loss_over_a_split_vocabulary_sums_numbers_per_token():
    def loss(logits, labels):
        shifted = logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        picked = jnp.take_along_axis(shifted, labels[..., None], -1)[..., 0]
        return jnp.log(jnp.exp(shifted).sum(-1)) - picked

    labels = (jax.ShapeDtypeStruct((B, T), jnp.int32), P("data"))
    got = found(loss, ((B, T, 64), P("data", None, "model")), labels)
    assert moves(got) == [("all-reduce", 2 * B // 2 * T * 4 * 3 / 4, 1)] * 3  # the largest, the sum, the label's


@pytest.fixture
def mesh():
    return Mesh([[*jax.devices()[:4]], [*jax.devices()[4:]]], ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def test_constraints_scatter_sums_and_gather_shards(mesh):
    cut, whole = (NamedSharding(mesh, P(U, dim, None)) for dim in ("model", None))

    def placed(x, up, down):
        y = jax.lax.with_sharding_constraint(jax.nn.relu(x @ up) @ down, cut)
        return jnp.tanh(reshard(jnp.tanh(y), forward=Chain((cut, whole)), backward=Chain()))

    half = STREAM * 3 / 4
    got = found(placed, X, UP, DOWN)
    assert moves(got) == [("reduce-scatter", half, 1), ("all-gather", half, 1)]
    assert got.outputs[0].dims == (("data",), (), ())


def test_what_is_stacked_lies_as_its_parts():
    up = ((D, F), P(None, "model"))
    got = found(lambda up: jnp.stack([up, 2 * up], axis=1), up)
    assert (got.outputs[0].dims, moves(got), got.unknown) == (((), (), ("model",)), [], "")
    got = found(lambda up: jnp.unstack(up, axis=0)[0], up)
    assert (got.outputs[0].dims, moves(got), got.unknown) == ((("model",),), [], "")
    assert moves(found(lambda up: jnp.unstack(up, axis=1)[0], up)) == [("all-gather", D * F * 4 * 3 / 4, 1)]


def test_conflicting_dims_gather_the_smaller_side():
    got = found(lambda x, w: x @ w, ((B, T, D), P("data", "model")), ((D, F), P(None, "model")))
    assert moves(got) == [("all-gather", D * F * 4 * 3 / 4, 1)]
    assert len(got.outputs[0].axes) == 2


@pytest.mark.parametrize("d", [16, 256])
@pytest.mark.parametrize(("x_spec", "w_spec"), [(P("data", None, "model"), UP[1]), (P("data", "model"), DOWN[1])])
def test_a_dim_that_is_contracted_is_gathered_for_one_of_the_result(x_spec, w_spec, d):
    """Whichever operand is larger; so XLA propagates, which of layers that are all split over their results is each."""
    product = lambda x, w: jnp.tanh(x @ w)  # noqa: E731
    got = found(product, ((B, T, d), x_spec), ((d, F), w_spec))
    gathered = (B // 2 * T * d if x_spec[-1] == "model" else d * F) * 4 * 3 / 4
    assert moves(got) == [("all-gather", gathered, 1)]
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    placed = [NamedSharding(mesh, spec) for spec in (x_spec, w_spec)]
    compiled = jax.jit(product, in_shardings=placed).lower(*arrays((B, T, d), (d, F))).compile()
    assert got.outputs[0].dims == dims_of(compiled.output_shardings, 3)


def test_a_constraint_to_another_mesh_says_nothing_of_the_axes_of_this_one():
    experts = jax.make_mesh((8,), ("experts",), axis_types=(AxisType.Auto,))
    constrained = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(experts, P("experts")))  # noqa: E731
    assert found(constrained, X).outputs[0].dims == (("data",), (), ())


def test_what_is_not_known_is_said():
    factor = lambda x: jnp.linalg.eigh(x)[1]  # noqa: E731
    got = found(factor, ((B, D, D), P("data", "model", None)))
    assert "eigh" in got.unknown
    assert not found(factor, ((B, D, D), P("data"))).unknown


def test_branches_count_as_the_one_that_moves_most():
    def either(x, up, down):
        return jax.lax.cond(x.sum() > 0, lambda: mlp(x, up, down), lambda: x)

    assert ALL_REDUCE in moves(found(either, X, UP, DOWN))


def test_a_convolution_is_split_over_its_channels():
    def layers(x, first, second):
        conv = lambda x, w: jax.lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))  # noqa: E731
        return jnp.tanh(conv(jax.nn.relu(conv(x, first)), second))

    got = found(layers, X, ((3, D, F), P(None, None, "model")), ((3, F, D), P(None, "model", None)))
    assert moves(got) == [ALL_REDUCE]


def test_dead_code_of_a_recomputation_moves_nothing():
    def loss(x, up, down):
        return (jax.checkpoint(mlp)(x, up, down) ** 2).sum()

    jaxpr = without_dead_code(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*arrays(X[0], UP[0], DOWN[0])))
    shardings = [ValueSharding(dims=dims_of(spec, len(shape)), varies=shape == X[0]) for shape, spec in (X, UP, DOWN)]
    got = propagate_shardings(jaxpr, shardings, sizes=SIZES, counted=("model",))
    assert [move.phase for move in got.moves] == ["forward", "backward"]


def test_alive_at_the_peak_is_what_products_read_and_write():
    """The hidden features are alive together with what they came from and what they make."""
    got = found(lambda x, up, down: jax.nn.relu(x @ up) @ down, X, UP, DOWN)
    hidden = B // 2 * T * F * 4 / 4
    assert hidden + STREAM <= got.peak_bytes <= 2 * hidden + STREAM


def test_a_loop_that_jax_wraps_for_a_remat_policy_is_looked_into():
    """`closed_call`, which JAX 0.12 calls `eval_jaxpr`."""

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def layers(x, up, down):
        return jax.lax.scan(lambda x, w: (jnp.tanh(mlp(x, *w)), None), x, (up, down))[0].sum()

    ups, downs = ((3, D, F), P(None, None, "model")), ((3, F, D), P(None, "model", None))
    got = found(jax.grad(layers), X, ups, downs)
    assert not got.unknown
    assert (*ALL_REDUCE[:2], 3) in moves(got)


def test_a_sort_of_several_operands_gathers_the_dim_that_it_sorts():
    rows = found(lambda x, y: jax.lax.sort((x, y), dimension=1, num_keys=1), ((B, F), P("model")), ((B, F), P("model")))
    assert [x.dims for x in rows.outputs] == [(("model",), ())] * 2
    assert not rows.moves and not rows.unknown
    sorted_dim = found(lambda x: jax.lax.sort_key_val(x, x), ((B, F), P(None, "model")))
    assert moves(sorted_dim) == [("all-gather", B * F * 4 * 3 / 4, 1)] * 2

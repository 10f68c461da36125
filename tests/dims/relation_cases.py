"""Programs of `jax.lax`'s primitives, in which the dim of examples may be any dim of any operand.

Each is a function and its operands: `(shape, what)`, where `what` is "f" (floats between 0.1 and 0.9), "i" (indices),
"b" (booleans), "m" (matrices that are symmetric and positive) or "k" (keys). Dims of examples grow from 4 to 8.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from equinox.internal import while_loop
from jax import lax
from jax._src.lax.linalg import geqrf
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import sparse
from jax.lax import linalg

import zero_jax as zero

F, I, B = "f", "i", "b"  # noqa: E741
X, Y = ((4, 3), F), ((4, 3), F)
UNARY = (
    "acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2 expm1 "
    "floor is_finite lgamma log log1p logistic neg reduce_precision round rsqrt sign sin sinh sqrt square "
    "stop_gradient tan tanh abs real imag conj".split()
)


def unary(x):
    special = {
        "reduce_precision": lambda x: lax.reduce_precision(x, 8, 7),
        "real": lambda x: lax.real(lax.complex(x, x)),
        "imag": lambda x: lax.imag(lax.complex(x, x)),
        "conj": lambda x: lax.real(lax.conj(lax.complex(x, x))),
    }
    done = [special.get(name, getattr(lax, name, None))(x) for name in UNARY]
    more = [getattr(lax, name)(x) for name in ("log2", "one_minus_square") if hasattr(lax, f"{name}_p")]
    return [
        *done,
        *more,
        lax.integer_pow(x, 3),
        lax.clamp(0.2, x, 0.5),
        lax.bitcast_convert_type(x, jnp.int32),
        x.astype(int),
    ]


def binary(x, y):
    names = (
        "add atan2 div eq ge gt igamma igamma_grad_a igammac le lt max min mul ne nextafter polygamma pow rem sub zeta"
    )
    total_order = [lax.eq_to_p, lax.le_to_p, lax.lt_to_p]
    return [
        *(getattr(lax, name)(x, y) for name in names.split()),
        *(p.bind(x, y) for p in total_order if x.shape == y.shape),
        lax.complex(x, y),
        lax.add_any_p.bind(x, y) if hasattr(lax, "add_any_p") else jax.interpreters.ad.add_jaxvals(x, y),
    ]


def of_integers(x, y):
    bits = "bitwise_and bitwise_or bitwise_xor shift_left shift_right_arithmetic shift_right_logical div max mul rem"
    return [
        *(getattr(lax, name)(x, y) for name in bits.split()),
        *(lax.bitwise_not(x), lax.clz(x), lax.population_count(x), lax.mulhi(x, y), x.astype(jnp.float32)),
    ]


def windows(x):
    sizes, strides = (1, 2), (1, 1)
    pooled = [
        lax.reduce_window(x, init, f, sizes, strides, "SAME") for init, f in ((0.0, lax.add), (-jnp.inf, lax.max))
    ]
    other = [lax.reduce_window(x, jnp.inf, lax.min, sizes, strides, "VALID")]
    general = lax.reduce_window(x, 0.0, lambda a, b: a + 2 * b, sizes, strides, "VALID")
    unpooled = jax.vjp(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, sizes, strides, "VALID"), x)
    tangent = jax.jvp(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, sizes, strides, "VALID"), (x,), (jnp.sin(x),))
    return [*pooled, *other, general, *unpooled[1](unpooled[0]), tangent[1]]


def conv(spec):
    def fn(x, kernel):
        numbers = lax.ConvDimensionNumbers(spec, (0, 1, 2), spec)
        return lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=numbers)

    return fn


def dot(contract, batch=((), ())):
    return lambda x, y: lax.dot_general(x, y, (contract, batch))


def fused_attention(query, key, value):
    return zero.dot_product_attention(query, key, value, is_causal=True, implementation="splash")


def gather(**fields):
    sizes = fields.pop("sizes")

    def fn(x, i):
        numbers = lax.GatherDimensionNumbers(**fields)
        full = tuple(x.shape[d] if size is None else size for d, size in enumerate(sizes))
        return lax.gather(x, i, numbers, full, mode="clip")

    return fn


def scatter(op, fields):
    def fn(x, i, u):
        return op(x, i, u, lax.ScatterDimensionNumbers(**fields), mode="clip")

    return fn


ROWS = dict(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,), sizes=(1, None))
CELLS = dict(offset_dims=(), collapsed_slice_dims=(0, 1), start_index_map=(0, 1), sizes=(1, 1))
COLUMNS = dict(offset_dims=(0,), collapsed_slice_dims=(1,), start_index_map=(1,), sizes=(None, 1))
OWN = dict(
    offset_dims=(), collapsed_slice_dims=(1,), start_index_map=(1,), operand_batching_dims=(0,),
    start_indices_batching_dims=(0,), sizes=(1, 1),
)  # fmt: skip
WRITE_ROWS = dict(update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,))
WRITE_COLUMNS = dict(update_window_dims=(0,), inserted_window_dims=(1,), scatter_dims_to_operand_dims=(1,))
WRITE_OWN = dict(
    update_window_dims=(), inserted_window_dims=(1,), scatter_dims_to_operand_dims=(1,), operand_batching_dims=(0,),
    scatter_indices_batching_dims=(0,),
)  # fmt: skip
SCATTERS = {"scatter": lax.scatter, "scatter-add": lax.scatter_add, "scatter-mul": lax.scatter_mul,
            "scatter-min": lax.scatter_min, "scatter-max": lax.scatter_max, "scatter-sub": lax.scatter_sub}  # fmt: skip


def added_to_zeros(op):
    return lambda i, u: op(jnp.zeros((5, 3)), i, u, lax.ScatterDimensionNumbers(**WRITE_ROWS), mode="clip")


def over_named_axis(name, x):
    """A collective over an axis that `jax.vmap` names, of scalars and of arrays, along either dim."""
    reduce = functools.partial(getattr(lax, name), axis_name="i")
    of_each = [jax.vmap(reduce, dim, out_axes=None, axis_name="i")(x) for dim in (0, 1)]
    return *of_each, jax.vmap(lambda x: reduce(x.sum()), 0, out_axes=None, axis_name="i")(x)


def sparse_product(x, i, w):
    """The product of sparse rows, or of a sparse matrix if both dims are places, with a matrix."""
    shape = (*x.shape[: i.ndim - 2], *[w.shape[0]] * i.shape[-1])
    return sparse.BCOO((x, i), shape=shape) @ w


def by_position(x, i):
    return x[jnp.arange(len(x)), i]


def set_by_position(x, i):
    return x.at[jnp.arange(len(x)), i].set(2.0)


def by_repeated_positions(x):
    """Rows looked up and written to at places of which each is there twice, and one that has no such places."""
    places, pairs = jnp.repeat(jnp.arange(len(x)), 2), jnp.stack([x, x * x], 1).reshape(-1, x.shape[1])
    sums = [jax.ops.segment_sum(pairs, places, n * len(x)) for n in (1, 2)]
    return x[places] - pairs, *sums, x.at[places].set(pairs), x[places.reshape(-1, 2)[:, 1]], pairs[places]


def by_constants(x, i):
    """Constants of NumPy as long as there are rows: equal rows and places; the last three are none of these."""
    n = len(x)
    places = np.arange(n)
    known = [x * np.full((n, 3), 2.0, "f"), x + np.tile(np.arange(3.0, dtype="f"), (n, 1)), x[places, i], x[places]]
    known += [x.at[places, i].set(2.0), np.zeros((3, n), "f") @ x, x[np.repeat(places, 2)] * np.ones((2 * n, 1), "f")]
    known += [lax.scan(lambda h, x: (h + x, h), np.zeros(n, "f"), x.T)[1]]
    others = [np.linspace(0, 1, n, dtype="f"), places, np.tile(np.array([1, 0], "f"), n)[:n]]
    return *known, *(x * other[:, None] for other in others)


def with_scan(x, y):
    last, each = lax.scan(lambda c, x: (c + x, c * x), jnp.zeros_like(x[0]), x)
    return last, each, lax.scan(lambda c, x: (c, (x + y).sum()), 0.0, x)[1], lax.map(lambda x: jnp.sin(x).sum(), x)


def with_while(x, y):
    less = lambda c: (c[0] < 3) & (c[2].max() < 99)  # noqa: E731
    return lax.while_loop(less, lambda c: (c[0] + 1, jnp.sin(c[1]), c[2] + 1), (0, x, y))[1:]


def with_cond(x, y):
    return lax.cond(y.sum() > 0, jnp.sin, lambda x: x * 2, x), lax.switch(1, [jnp.sin, jnp.cos], x)


def solved(a, b):
    return lax.linalg.triangular_solve(a, b, left_side=True, lower=True), lax.linalg.triangular_solve(a, b.mT)


@jax.custom_vjp
def doubled_backward(x):
    return jnp.sin(x)


doubled_backward.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g * jnp.cos(x),))


def approximate(x):
    return lax.approx_max_k(x, 2), lax.approx_max_k(x, 2, reduction_dimension=0)


MATRIX, STACK = ((4, 3, 3), "m"), ((4, 4, 3), F)
# The programs, by a name; the primitives that each exercises are read off its trace.
PROGRAMS = {
    "unary": (unary, X),
    "binary": (binary, X, Y),
    "integers": (of_integers, ((4, 3), I), ((4, 3), I)),
    "booleans": (lambda x, y: [x & y, x | y, x ^ y, ~x, x.astype(int)], ((4, 3), B), ((4, 3), B)),
    "beta": (lax.betainc, X, Y, ((4, 3), F)),
    "select": (lambda p, x, y: [lax.select(p, x, y), lax.select_n(p.astype(jnp.int32), x, y)], ((4, 3), B), X, Y),
    "select by a number": (lambda p, x, y: lax.select(p > 0, x, y), ((), F), X, Y),
    "sum of sums": (lambda x, y: x.sum() + y.sum(), X, Y),
    "sum and another": (lambda x, y: (x.sum(0) + y, x.sum(0) * y, x.mean(0) + y, x.sum() / y), X, ((3,), F)),
    "complex means": (lambda x, y: lax.complex(x, y).mean(), X, Y),
    "quotient of sums": (lambda x, y: (x.sum() / y.sum(), x / y.sum(), 1 / y.sum(), jnp.maximum(y.sum(), 1)), X, Y),
    "sums of sums": (lambda x: (x.sum(0)[1:], jnp.stack([x.sum(0), 2 * x.mean(0)]), -x.sum(0).reshape(3, 1)), X),
    "converted sums": (lambda x: (x.sum(0).astype(jnp.bfloat16), x.sum(0).astype(int), jnp.round(x.sum(0))), X),
    "max of sums": (lambda x: (x.sum(0).max(), jnp.maximum(x.sum(0), 0.0), x.max(), jnp.sort(x.sum(0))), X),
    "broadcast": (lambda x: [x[None], x[:, None], jnp.broadcast_to(x, (4, *x.shape)), x.sum() + 0 * x], X),
    "reshape": (lambda x: [x.reshape(-1), x.reshape(2, -1), x.reshape(-1, 2), x.reshape(-1, 4), x[..., None]], STACK),
    "reshape of rows": (lambda x: [x.reshape(x.shape[0] // 2, 2, -1), x.reshape(2, x.shape[0] // 2, -1)], X),
    "shapes": (lambda x: [x.T, x[:, None].squeeze(1), jnp.copy(x), lax.rev(x, (0,)), lax.rev(x, (1,))], X),
    "slices": (lambda x: [x[:2], x[:, :2], x[:, ::2], x[0], x[:, 0], x[-2:], lax.slice(x, (0, 0), (3, 3))], X),
    "slices by steps": (
        lambda x: [x[::2], x[1::2], x[2::2], x[::4], x[::3], x[: len(x) - 1 : 2], x[::2, ::2] - x[1::2, 1::2], x[2::4]],
        ((4, 4, 4), F),
    ),
    "pads": (lambda x, y: [lax.pad(x, y.sum(), ((0, 0, 0), (1, 1, 1))), jnp.pad(x, ((1, 0), (0, 0)))], X, ((2,), F)),
    "concatenate": (lambda x, y: [jnp.concatenate([x, y], d) for d in (0, 1)], X, Y),
    "batches behind one another": (
        lambda x, y: [
            *(z := jnp.concatenate([jnp.sin(x), y])[:, None] * jnp.arange(3.0)[:, None], jnp.square(z).sum((0, 2))),
            *(z[: len(x)], z[len(x) :], *jnp.split(z, 2), z.reshape(2, len(x), 3, -1), z.reshape(len(x), 2, 3, -1)),
            *(
                z[: len(x) // 2],
                z[1 : 1 + len(x)],
                z[::2][: len(x) // 2],
                z[1::2],
                jnp.cumsum(z, 0)[: len(x)],
                z[::-1][: len(x)],
            ),
            *(jnp.concatenate([z, z])[len(z) :][: len(x)], jnp.concatenate([z, x[:, None] + z[: len(x)]])[len(z) :]),
            *((z * jnp.repeat(z[: len(x)], 2, 0))[: len(x)], (z * jnp.arange(len(z))[:, None, None])[: len(x)]),
            *(jnp.where(z > 0.2, z, jnp.ones_like(z))[len(x) :], jax.nn.relu(z)[len(x) :], jax.nn.softmax(z)[: len(x)]),
            *(lax.scan(lambda c, _: (jnp.tanh(c), c.sum()), z, None, length=2)[0][: len(x)], z[: len(x)] - z[len(x) :]),
            *(jnp.tile(x, (2, 1))[len(x) :] * y, lax.tile(x, (2, 1))[: len(x)] * y, lax.tile(x, (2, 1)) * x[0]),
            *(z.reshape(-1, z.shape[-1])[: 3 * len(x)], (z.reshape(-1) * jnp.tile(x[0], 6 * len(x)))[: len(x)]),
            *(jnp.concatenate([x, jnp.repeat(y, 2, 0)])[: len(x)], lax.map(jnp.sin, z)[: len(x)]),
            *(jnp.stack([x, y]).reshape(-1, x.shape[1])[len(x) :], jnp.tile(jnp.arange(3.0), len(x)) * x[0, 0]),
            *((z * jnp.sin(lax.broadcasted_iota(float, z.shape, 1)))[: len(x)], jnp.concatenate([x, y], 1)[:, ::2]),
            *(jnp.repeat(x, 2, 0)[1::2], jnp.repeat(x, 3, 0)[::2], z[: len(x)][::2], z[1::2][: len(x) // 2]),
            *((z * (jnp.ones((2 * len(x), 3))[..., None] / 2))[: len(x)], jnp.ones((len(z), 3)).reshape(-1)[: len(x)]),
            *((z @ x[0])[len(x) :], jnp.einsum("nij,nkj->nik", z, z)[: len(x)], jnp.sort(z, 1)[: len(x)]),
        ],
        X,
        X,
    ),
    "stacks": (lambda x, y: [jnp.stack([x, y], d) for d in (0, 1, 2)], X, Y),
    "splits": (lambda x: [jnp.split(x, [1], d) for d in (0, 1)] + [jnp.unstack(x, axis=1), jnp.tile(x, (1, 2))], X),
    "unstack": (lambda x: jnp.unstack(x, axis=1), X),
    "tile": (lambda x: [jnp.tile(x, (1, 2)), jnp.tile(x, (2, 1))], X),
    "tile_p": (lambda x: [lax.tile(x, (1, 2)), lax.tile(x, (2, 1)), lax.tile(x[:1], (2, len(x))), len(x) * x], X),
    "tile of a row": (lambda x, y: (lax.tile(y[:1], (len(x), 1)), lax.tile(y, (len(x), 1))), X, ((2, 3), F)),
    "dynamic_slice": (lambda x, i: [lax.dynamic_slice_in_dim(x, i.sum(), 2, d) for d in (0, 1)], X, ((2,), I)),
    "dynamic_update_slice": (
        lambda x, y, i: lax.dynamic_update_slice(x, y, (0, i.sum())),
        X,
        ((4, 2), F),
        ((2,), I),
    ),
    "dynamic_update_slice of rows": (lambda x, y: lax.dynamic_update_slice(x, y, (1, 0)), X, ((2, 3), F)),
    "iota": (lambda x: [x * jnp.arange(x.shape[0])[:, None], x * lax.broadcasted_iota(int, x.shape, 1)], X),
    "positions": (lambda x: (jnp.arange(len(x)) < 2) * x[:, 0], X),
    "shapes in numbers": (lambda x: [x.sum() / len(x), x.sum() / x.size, x * len(x), x + len(x), x / x.shape[1]], X),
    "platform": (lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos), X),
    "diagonal": (lambda x: (jnp.diagonal(x), jnp.diagonal(x, axis1=1, axis2=2)), MATRIX),
    "eye": (lambda x: jnp.eye(len(x)) * x[:, :1], X),
    "reductions": (
        lambda x: [f(x, d) for f in (jnp.sum, jnp.max, jnp.min, jnp.prod, jnp.argmax, jnp.argmin) for d in (0, 1)],
        X,
    ),
    "all reductions": (lambda x: [jnp.all(x > 0.5, d) for d in (0, 1)] + [jnp.any(x > 0.5, d) for d in (0, 1)], X),
    "extrema": (
        lambda x: [
            f(g(x, 0))
            for g in (jnp.max, jnp.min)
            for f in (
                *(jnp.negative, jnp.exp, jnp.tanh, jnp.max, jnp.min, jnp.square, jnp.abs, jnp.sum, jnp.argmax),
                *(
                    lambda m: 2 * m,
                    lambda m: -2 * m,
                    lambda m: m / 3,
                    lambda m: 1 / m,
                    lambda m: 1 - m,
                    lambda m: m - 1,
                ),
                *(lambda m: m > 0.5, lambda m: m < 0.5, lambda m: 0.5 > m, lambda m: 0.5 <= m, lambda m: m == m[0]),
                *(lambda m: ~(m > 0.5), lambda m: jnp.clip(m, 0.2, 0.8), lambda m: m.astype(jnp.bfloat16)),
                *(lambda m: jnp.minimum(m, m[::-1]), lambda m: jnp.maximum(m, m[::-1]), lambda m: m + m[::-1]),
                *(
                    lambda m: m[:2],
                    lambda m: m[:, None],
                    lambda m: jnp.concatenate([m, m]),
                    lambda m: (9 * m).astype("i4"),
                ),
                *(lambda m: jnp.where(m > 0.5, m, 0), lambda m: (m - 0.5).astype(bool), lambda m: jnp.floor(3 * m)),
                lambda m: (m > 0.5) | (m < 0.2),
            )
        ],
        X,
    ),
    "reduce_xor": (lambda x: [lax.reduce_xor(x, (d,)) for d in (0, 1)], ((4, 3), I)),
    "reduce": (lambda x: [lax.reduce(x, 1.0, lambda a, b: a + 2 * b, (d,)) for d in (0, 1)], X),
    "cumulative": (
        lambda x: [getattr(lax, f"cum{f}")(x, d) for f in ("sum", "prod", "max", "min", "logsumexp") for d in (0, 1)],
        X,
    ),
    "cumsum of a sum": (lambda x: jnp.cumsum(x.sum(0)), X),
    "sort": (lambda x, y: [lax.sort((x, y), dimension=d, num_keys=1) for d in (0, 1)], X, Y),
    "sort alone": (lambda x: [jnp.sort(x, d) for d in (0, 1)] + [jnp.argsort(x, d) for d in (0, 1)], X),
    "top_k": (lambda x: lax.top_k(x, 2), X),
    "approx_top_k": (approximate, ((4, 4), F)),
    "windows": (windows, X),
    "window over rows": (lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 1), (2, 1), "VALID"), X),
    "select_and_scatter": (
        jax.grad(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 1), "VALID").sum()),
        X,
    ),
    "fft": (
        lambda x: [jnp.fft.fft(x).real, jnp.fft.rfft(x).real, jnp.fft.fft(x, axis=0).real, jnp.fft.fft2(x).real],
        STACK,
    ),
    "dot": (dot(((1,), (0,))), X, ((3, 4), F)),
    "dot of rows": (dot(((0,), (0,))), X, Y),
    "dot by batch": (dot(((2,), (1,)), ((0,), (0,))), STACK, ((4, 3, 4), F)),
    "dot by a middle dim": (dot(((2,), (2,)), ((1,), (1,))), STACK, ((4, 4, 3), F)),
    "dot of a sum": (lambda x, y: (x.sum(0) @ y, x.sum(0) @ y.sum(1)), ((4, 3), F), ((3, 4), F)),
    "conv": (conv((0, 1, 2)), ((4, 4, 3), F), ((4, 4, 1), F)),
    "conv with features last": (conv((0, 2, 1)), ((4, 3, 4), F), ((4, 4, 1), F)),
    "conv with examples last": (conv((2, 0, 1)), ((4, 3, 4), F), ((4, 4, 3), F)),
    "conv by batch groups": (
        lambda x, k: lax.conv_general_dilated(x, k, (1,), "SAME", batch_group_count=2),
        ((4, 4, 3), F),
        ((4, 4, 1), F),
    ),
    "conv by several kernels": (
        lambda x, k: jax.vmap(lambda k: conv((0, 2, 1))(x, k))(k),
        ((4, 3, 2), F),
        ((3, 5, 2, 1), F),
    ),
    "conv by the kernel of each": (
        lambda x, k: jax.vmap(lambda x, k: conv((0, 2, 1))(x[None], k)[0])(x, k),
        ((4, 3, 2), F),
        ((4, 5, 2, 1), F),
    ),
    "ragged_dot": (lambda x, w: lax.ragged_dot(x, w, jnp.array([1, 3])), X, ((2, 3, 4), F)),
    "gather rows": (gather(**ROWS), X, ((4, 1), I)),
    "gather cells": (gather(**CELLS), X, ((4, 2), I)),
    "gather columns": (gather(**COLUMNS), X, ((4, 1), I)),
    "gather one column": (gather(**COLUMNS), X, ((1,), I)),
    "gather its own": (gather(**OWN), X, ((4, 1), I)),
    "take along": (lambda x, i: jnp.take_along_axis(x, i, 1), X, ((4, 2), I)),
    "take along rows": (lambda x, i: jnp.take_along_axis(x, i, 0), X, ((4, 3), I)),
    "gather by position": (by_position, X, ((4,), I)),
    "at constants": (by_constants, X, ((4,), I)),
    "at repeated positions": (by_repeated_positions, X),
    "gather the first half": (lambda x: x[jnp.arange(len(x) // 2)], X),
    "gather the first half of columns": (lambda x: x[jnp.arange(len(x) // 2), 1], X),
    "write the first half": (lambda x: x.at[jnp.arange(len(x) // 2)].set(2.0), X),
    "scatter by position": (set_by_position, X, ((4,), I)),
    **{f"{n} of rows": (scatter(op, WRITE_ROWS), ((5, 3), F), ((4, 1), I), ((4, 3), F)) for n, op in SCATTERS.items()},
    **{f"{n} of columns": (scatter(op, WRITE_COLUMNS), X, ((2, 1), I), ((4, 2), F)) for n, op in SCATTERS.items()},
    **{f"{n} of its own": (scatter(op, WRITE_OWN), X, ((4, 1), I), ((4,), F)) for n, op in SCATTERS.items()},
    **{f"{n} to zeros": (added_to_zeros(op), ((4, 1), I), ((4, 3), F)) for n, op in SCATTERS.items()},
    "set a column": (lambda x, y: [x.at[:, 1].set(y), x.at[:, 1].add(y), x.at[1].set(0.0)], X, ((4,), F)),
    "fused attention": (fused_attention, ((4, 3, 2, 2), F), ((4, 3, 1, 2), F), ((4, 3, 1, 2), F)),
    "fused attention of heads": (fused_attention, ((2, 3, 4, 2), F), ((2, 3, 4, 2), F), ((2, 3, 4, 2), F)),
    "cholesky": (lambda a: linalg.cholesky(a, symmetrize_input=False), MATRIX),
    "cholesky of one": (lambda x: linalg.cholesky(x @ x.T + 2 * jnp.eye(len(x))), X),
    "eigh": (lambda a: linalg.eigh(a)[1] if len(linalg.eigh(a)) else None, MATRIX),
    "eig": (lambda a: jnp.sort(linalg.eig(a, compute_left_eigenvectors=False)[0].real, -1), MATRIX),
    "svd": (lambda a: linalg.svd(a, compute_uv=False), ((4, 3, 4), F)),
    "svd of one": (lambda a: linalg.svd(a, compute_uv=False), ((4, 3), F)),
    "qr": (lambda a: jnp.abs(linalg.qr(a, full_matrices=False)[1]), ((4, 4, 3), F)),
    "geqrf": (lambda a: linalg.householder_product(*geqrf(a)), ((4, 4, 3), F)),
    "householder_product": (linalg.householder_product, ((4, 4, 3), F), ((4, 3), F)),
    "lu": (lambda a: linalg.lu(a)[::2], MATRIX),
    "schur": (lambda a: linalg.schur(a)[0], MATRIX),
    "hessenberg": (lambda a: linalg.hessenberg(a)[0], MATRIX),
    "tridiagonal": (lambda a: linalg.tridiagonal(a)[1], MATRIX),
    "tridiagonal_solve": (linalg.tridiagonal_solve, ((4, 3), F), ((4, 3), F), ((4, 3), F), ((4, 3, 4), F)),
    "triangular_solve": (solved, MATRIX, ((4, 3, 3), F)),
    "triangular_solve of columns": (
        lambda a, b: linalg.triangular_solve(a, b, left_side=True, lower=True),
        ((4, 4), "m"),
        ((4, 4), F),
    ),
    "triangular_solve of rows": (lambda a, b: linalg.triangular_solve(a, b, lower=True), ((4, 4), "m"), ((4, 4), F)),
    "symmetric_product": (
        lambda a, c: linalg.symmetric_product(a, c, symmetrize_output=True),
        ((4, 3, 4), F),
        ((4, 3, 3), "m"),
    ),
    "solve": (jnp.linalg.solve, MATRIX, ((4, 3, 2), F)),
    "permutations": (lambda i: lax.linalg.lu_pivots_to_permutation(jnp.minimum(i, 1), 4), ((4, 2), I)),
    "optimization_barrier": (lambda x, y: lax.optimization_barrier((x, y)), X, Y),
    "bcoo_dot_general": (sparse_product, X, ((4, 3, 1), I), ((4, 5), F)),
    "bcoo_dot_general by the same places": (sparse_product, X, ((1, 3, 1), I), ((4, 5), F)),
    "bcoo_dot_general of one": (sparse_product, ((4,), F), ((4, 2), I), ((4, 5), F)),
    "bcoo_dot_general of each with each": (
        lambda x, i, w: jax.vmap(lambda x, i, w: sparse_product(x, i, w))(x, i, w),
        X,
        ((4, 3, 1), I),
        ((4, 4, 2), F),
    ),
    "select_if_vmap": (lambda x: while_loop(lambda c: True, lambda c: jnp.sin(c), x, max_steps=3, kind="lax"), X),
    "concatenate with no rows": (lambda x: [jnp.concatenate([x, x[:0]]), jnp.concatenate([x[:, 3:], x], 1)], X),
    "while of each": (
        lambda x: jax.vmap(lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: 2 * x + 1, x))(x),
        X,
    ),
    "while of each beside others": (
        lambda x, y: jax.vmap(lambda x: lax.while_loop(lambda x: x[0] < 9, lambda x: 2 * x + y, x))(x),
        X,
        ((3,), F),
    ),
    "scan that adds": (lambda x, y: lax.scan(lambda c, x: (c + x * y, x + y), 0 * y, x), X, ((3,), F)),
    "scan that adds from zeros": (
        lambda x, y: lax.scan(lambda c, x: ((c[0] + x * y, x.sum() + c[1]), None), (jnp.zeros(3), 0.0), x)[0],
        X,
        ((3,), F),
    ),
    "scan that adds to others": (
        lambda x: lax.scan(lambda c, x: ((c[0] + x, c[1] + c[0]), None), (jnp.zeros(3), jnp.zeros(3)), x)[0],
        X,
    ),
    "scan that adds and rounds": (
        lambda x: lax.scan(lambda c, x: (lax.reduce_precision(c + x, 8, 2), None), jnp.zeros(3), x)[0],
        X,
    ),
    "scan that adds from ones": (lambda x: lax.scan(lambda c, x: (c + x, None), jnp.ones(3), x)[0], X),
    **{
        f"{name} of what jax.vmap maps": (functools.partial(over_named_axis, name), X)
        for name in ("psum", "pmean", "pmax", "pmin")
    },
    "scan": (with_scan, X, ((3,), F)),
    "while": (with_while, X, ((3,), F)),
    "cond": (with_cond, X, ((3,), F)),
    "custom_vjp": (doubled_backward, X),
    "calls": (lambda x: (jax.jit(jnp.sin)(x), jax.checkpoint(jnp.cos)(x), jax.nn.relu(x), jax.nn.logsumexp(x, 0)), X),
    "copies": (lambda x: (jax.device_put(x), checkpoint_name(x, "x")), X),
}


@functools.cache
def random_programs():
    """Returns draws, which are compared by their relations and not by their values."""
    return {
        "random_bits": (lambda k, x: jax.random.uniform(k, x.shape), ((), "k"), X),
        "random_split": (lambda k, x: jax.random.key_data(jax.random.split(k, len(x))), ((), "k"), X),
        "random_fold_in": (
            lambda k, i: jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(k, i)),
            ((), "k"),
            ((4,), I),
        ),
        "random_gamma": (lambda k, x: jax.random.gamma(k, x), ((), "k"), X),
        "random_wrap": (lambda k: jax.random.key_data(jax.random.clone(jax.random.wrap_key_data(k))), ((4, 2), "u")),
        "random_seed": (lambda i: jax.random.key_data(jax.vmap(jax.random.key)(i)), ((4,), I)),
        "rng_bit_generator": (lambda k, x: lax.rng_bit_generator(k, x.shape)[1], ((4,), "u"), X),
    }

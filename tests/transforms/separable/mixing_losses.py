"""Small losses of a batch `{"x": [N, 8], "label": [N], "mask": [N]}` and params `{"w": [8, 6], "b": [6]}`.

Those of `MIXING` are another loss on parts of the batch than on the whole; those of `SEPARABLE` are not.
"""

import functools

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def out_of(params, batch):
    return jnp.tanh(batch["x"] @ params["w"] + params["b"])


def error_of(params, batch):
    return jnp.square(out_of(params, batch) - batch["x"][:, :6]).mean(-1)


def nuclear(out):
    return np.linalg.svd(out, compute_uv=False).sum().astype(np.float32)


@jax.custom_vjp
def centred_backward(x):
    return x


centred_backward.defvjp(lambda x: (x, None), lambda _, g: (g - g.mean(0),))


@jax.custom_vjp
def clipped_backward(x):
    return x


clipped_backward.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))


@jax.custom_jvp
def mixed_tangent(x):
    return x


mixed_tangent.defjvp(lambda x, t: (x[0], t[0][::-1]))


@jax.custom_vjp
def doubled_backward(x):
    return jnp.sin(x)


doubled_backward.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g * jnp.cos(x),))


def callback(params, batch):
    out = lax.stop_gradient(out_of(params, batch))
    centre = jax.pure_callback(lambda x: x - x.mean(0), jax.ShapeDtypeStruct(out.shape, out.dtype), out)
    return error_of(params, batch).mean() + (centre * out_of(params, batch)).mean()


def callback_nuclear(params, batch):
    number = jax.ShapeDtypeStruct((), jnp.float32)
    norm = jax.pure_callback(nuclear, number, lax.stop_gradient(out_of(params, batch)), vmap_method="sequential")
    return error_of(params, batch).mean() - norm / len(batch["x"])


def running(combine):
    def loss(params, batch):
        return jnp.square(lax.associative_scan(combine, out_of(params, batch))).mean()

    return loss


def each(fn):
    """A loss of what a function makes of the outputs `[N, 6]`."""

    def loss(params, batch):
        return jnp.square(fn(out_of(params, batch))).mean()

    return loss


def gram(out):
    return out @ out.T + jnp.eye(len(out))


def conv(out, lhs, rhs):
    numbers = lax.ConvDimensionNumbers(lhs, (0, 1, 2), (0, 1, 2))
    return lax.conv_general_dilated(out, rhs, (1,), "SAME", dimension_numbers=numbers)


def keyed(params, batch):
    order = jax.random.permutation(jax.random.key(0), len(batch["x"]))
    return jnp.square(out_of(params, batch) - batch["x"][order, :6]).mean()


def counted(total, x):
    return total + 1, x * total


def in_pairs(params, batch):
    """As preferences are learnt: chosen and rejected examples go through the model together."""
    both = {"x": jnp.concatenate([batch["x"], batch["x"][:, ::-1]])}
    chosen, rejected = jnp.split(out_of(params, both).sum(-1), 2)
    return -jax.nn.log_sigmoid(chosen - rejected).mean()


def ragged(params, batch):
    experts = jnp.stack([params["w"], 2 * params["w"]])
    sizes = jnp.array([3, len(batch["x"]) - 3])
    return jnp.square(lax.ragged_dot(batch["x"], experts, sizes)).mean()


def while_loop(params, batch):
    error = error_of(params, batch)
    again = lax.while_loop(lambda x: x.sum() < 20, lambda x: 2 * x, lax.stop_gradient(error))
    return (error * again).mean()


def until(test):
    """A loss of outputs that are doubled as long as a test of those of one example holds."""

    def loss(params, batch):
        end = jax.vmap(lambda x: lax.while_loop(test, lambda x: 2 * x + 1, x))(lax.stop_gradient(out_of(params, batch)))
        return (error_of(params, batch) * end.mean(-1)).mean()

    return loss


def loop_over_examples(body, start=0.0):
    """A mean of what a loop over examples carries: it takes the error and the mask of one."""

    def loss(params, batch):
        return lax.scan(body, start, (error_of(params, batch), batch["mask"]))[0] / len(batch["x"])

    return loss


def added_by_a_loop(params, batch):
    def body(carry, one):
        x, weight = one
        error = jnp.square(jnp.tanh(x @ params["w"])).mean()
        return (carry[0] + weight * error, weight + carry[1]), error

    (total, count), errors = lax.scan(body, (0.0, jnp.zeros(())), (batch["x"], batch["mask"]), reverse=True)
    return (total - 0.1 * count) / len(batch["x"]) + errors.mean()


def either(params, batch):
    error = error_of(params, batch)
    return lax.cond(error.sum() > 30, lambda x: 2 * x, lambda x: x, error).mean()


def learnt_weights(params, batch):
    weights = jax.nn.sigmoid(out_of(params, batch)[:, 0])
    return (weights * error_of(params, batch)).sum() / weights.sum()


def two_means(params, batch):
    error, mask = error_of(params, batch), batch["mask"]
    return (error * mask).sum() / mask.sum() + (error * (1 - mask)).sum() / (1 - mask).sum()


def looped(out, numbers):
    """Returns what a loop of Equinox over numbers makes of each row; its derivative is of its own."""
    step = lambda x, number: (jnp.tanh(x + number), None)  # noqa: E731
    return jax.vmap(lambda x: eqxi.scan(step, x, numbers, kind="checkpointed")[0])(out)


MIXING = {
    # The six that were taken for separable.
    "svd": lambda p, b: error_of(p, b).mean() - jnp.linalg.svd(out_of(p, b), compute_uv=False).sum() / len(b["x"]),
    "qr": each(lambda out: jnp.square(jnp.linalg.qr(out)[0])),
    "fft": each(lambda out: jnp.fft.fft(out, axis=0).real * jnp.arange(6)),
    "reduce_window": each(lambda out: lax.reduce_window(out, -jnp.inf, lax.max, (2, 1), (1, 1), "SAME")),
    "segment_max": lambda p, b: jnp.square(jax.ops.segment_max(out_of(p, b), b["label"], 3)).mean(),
    "pure_callback": callback,
    "pure_callback to a number": callback_nuclear,
    # Along the batch.
    **{
        name: each(functools.partial(getattr(lax, name), axis=0))
        for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
    },
    "associative_scan": running(jnp.add),
    "sort": lambda p, b: jnp.square(jnp.sort(out_of(p, b), 0) - b["x"][:, :6]).mean(),
    "argsort": each(lambda out: jnp.argsort(out, 0) * out),
    "argmax": each(lambda out: out - out[out.argmax(0), jnp.arange(6)]),
    "top_k": lambda p, b: lax.top_k(error_of(p, b), 2)[0].mean(),
    "approx_max_k": lambda p, b: lax.approx_max_k(error_of(p, b), 2)[0].mean(),
    "rev": lambda p, b: jnp.square(out_of(p, b) - b["x"][::-1, :6]).mean(),
    "rows of two batches": each(lambda out: jnp.concatenate([out, jnp.sin(out)])[len(out) // 2 : -len(out) // 2] - out),
    "two batches by two orders": each(lambda out: jnp.concatenate([out, out]) * jnp.repeat(out, 2, 0)),
    "two batches looked up by another order": each(
        lambda out: jnp.tile(out, (2, 1))[jnp.arange(2 * len(out)), jnp.repeat(out.argmax(-1), 2)]
    ),
    "behind a row": each(lambda out: jnp.concatenate([jnp.zeros((1, 6)), out])),
    "roll": lambda p, b: jnp.square(out_of(p, b) - jnp.roll(b["x"], 1, 0)[:, :6]).mean(),
    "first example": each(lambda out: out - out[0]),
    "dynamic_slice": each(lambda out: out - lax.dynamic_slice_in_dim(out, 1, 1)),
    "every other example": each(lambda out: out[::2] - out[: len(out) // 2]),
    "median": lambda p, b: jnp.median(error_of(p, b)),
    "scan over examples": lambda p, b: lax.scan(lambda c, x: (0.5 * c + x, c), 0.0, error_of(p, b))[1].mean(),
    "count over examples": lambda p, b: lax.scan(counted, 0.0, error_of(p, b))[1].mean(),
    "loop that forgets": loop_over_examples(lambda c, x: (0.9 * c + x[0], None)),
    "loop from one": loop_over_examples(lambda c, x: (c + x[0], None), 1.0),
    "loop that multiplies": loop_over_examples(lambda c, x: (c + c * x[0] + x[0], None)),
    "loop to the largest": loop_over_examples(lambda c, x: (jnp.maximum(c, x[0]), None)),
    "loop that doubles": loop_over_examples(lambda c, x: (c + c, None)),
    "loop that adds what it has": lambda p, b: (
        lax.scan(lambda c, x: ((c[0] + x, c[1] + c[0]), None), (0.0, 0.0), error_of(p, b))[0][1] / len(b["x"])
    ),
    "checkpointed loop of Equinox over examples": lambda p, b: looped(out_of(p, b), error_of(p, b)).mean(),
    "scatter": each(lambda out: out.at[1].set(0.0)),
    "scatter-mul": lambda p, b: (
        error_of(p, b).mean() + jnp.ones((3, 6)).at[b["label"]].multiply(lax.stop_gradient(out_of(p, b))).mean()
    ),
    "scatter in another order": lambda p, b: jnp.zeros((99, 6)).at[b["label"]].set(out_of(p, b)).mean(),
    "rows of others": lambda p, b: jnp.square(out_of(p, b) - b["x"][b["label"], :6]).mean(),
    # The batch as a dim of matrices.
    "cholesky": each(lambda out: jnp.linalg.cholesky(gram(out)) @ out),
    "eigh": lambda p, b: jnp.square(jnp.linalg.eigvalsh(gram(out_of(p, b)))).mean(),
    "solve": each(lambda out: jnp.linalg.solve(gram(out), out)),
    "triangular_solve": each(lambda out: lax.linalg.triangular_solve(gram(out), out, left_side=True, lower=True)),
    "lu": each(lambda out: lax.linalg.lu(gram(out))[0] @ out),
    "slogdet": lambda p, b: jnp.linalg.slogdet(gram(out_of(p, b)))[1] / len(b["x"]),
    "conv over examples": each(lambda out: conv(out.T[:, None], (0, 1, 2), jnp.ones((1, 1, 3)))),
    "conv of features": each(lambda out: conv(out.T[None], (0, 1, 2), jnp.ones((1, 6, 3)))),
    "contrastive": each(lambda out: out @ out.T),
    "ragged_dot": ragged,
    # Statistics of the batch.
    "normalized": each(lambda out: (out - out.mean(0)) / (out.std(0) + 1)),
    "divided by the largest": lambda p, b: (error_of(p, b) / error_of(p, b).max()).mean(),
    "divided by the largest, stopped": lambda p, b: (error_of(p, b) / lax.stop_gradient(error_of(p, b).max())).mean(),
    "divided by the largest input": lambda p, b: (error_of(p, b) / b["x"].max()).mean(),
    "divided by a deviation": lambda p, b: error_of(p, b).mean() / b["x"].std(),
    "while": while_loop,
    "while any goes on": lambda p, b: lax.while_loop(
        lambda x: (x < 20).any(), lambda x: 2 * x + 1, lax.stop_gradient(error_of(p, b))
    ).mean(),
    "while of features": lambda p, b: jnp.square(
        jax.vmap(lambda x: lax.while_loop(lambda x: x.sum() < 20, lambda x: 2 * x + 1, x), 1)(
            lax.stop_gradient(jnp.abs(out_of(p, b)))
        )
        * out_of(p, b).T
    ).mean(),
    "cond": either,
    # No mean.
    "max": lambda p, b: error_of(p, b).max(),
    "prod": lambda p, b: error_of(p, b).prod(),
    "logsumexp": lambda p, b: jax.nn.logsumexp(error_of(p, b)),
    "norm": lambda p, b: jnp.linalg.norm(error_of(p, b)),
    "square of a mean": lambda p, b: jnp.mean(error_of(p, b)) ** 2,
    "square by itself": lambda p, b: jnp.mean(error_of(p, b)) * jnp.mean(error_of(p, b)),
    "log of a mean": lambda p, b: jnp.log(jnp.mean(error_of(p, b))),
    "sqrt of a mean": lambda p, b: jnp.sqrt(jnp.mean(error_of(p, b))),
    "relu of a mean": lambda p, b: jax.nn.relu(jnp.mean(out_of(p, b))),
    "learnt weights": learnt_weights,
    # The number and the places of examples.
    "positions": lambda p, b: (error_of(p, b) * jnp.arange(len(b["x"]))).mean(),
    "numpy positions": lambda p, b: (error_of(p, b) * np.linspace(0, 1, len(b["x"]), dtype=np.float32)).mean(),
    "rows of others by numpy": each(lambda out: out - out[np.arange(len(out))[::-1]]),
    "every other by numpy": lambda p, b: (
        np.tile(np.eye(2, dtype="f")[0], len(b["x"]))[: len(b["x"])] * error_of(p, b)
    ).mean(),
    "first half": lambda p, b: (error_of(p, b) * (jnp.arange(len(b["x"])) < 3)).mean(),
    "eye": lambda p, b: (error_of(p, b)[:, None] * (1 - jnp.eye(len(b["x"])))).mean(),
    "log of the number": lambda p, b: error_of(p, b).mean() * np.log(len(b["x"])),
    "other operations": lambda p, b: functools.reduce(jnp.add, [error_of(p, b).mean()] * len(b["x"])),
    "first half by places": each(lambda out: out[jnp.arange(len(out) // 2), 0]),
    "random order": keyed,
    # Gradients that mix what values do not.
    "custom_vjp that centres": each(centred_backward),
    "custom_vjp that clips": each(clipped_backward),
    "custom_jvp that reverses": each(mixed_tangent),
}


def folded(params, batch):
    return lax.scan(lambda total, column: (total + column.sum(), None), 0.0, out_of(params, batch).T)[0] / len(
        batch["x"]
    )


def dropped(params, batch, rate=0.0):
    kept = jax.random.bernoulli(jax.random.key(0), 1 - rate, (len(batch["x"]), 6))
    return jnp.square(jnp.where(kept, out_of(params, batch), 0)).mean()


def masked_by_draws(params, batch, rate=0.0):
    kept = jax.random.bernoulli(jax.random.key(0), 1 - rate, (len(batch["x"]), 6))
    return jnp.square(jnp.where(kept, out_of(params, batch), 0)).sum() / kept.sum()


def squares(out):
    return jnp.einsum("ni,nj->nij", out, out) + jnp.eye(6)


def conjugate_gradients(out):
    matrix = jnp.eye(6) + 0.1
    solve = lambda f, x: jax.scipy.sparse.linalg.cg(f, x, maxiter=9)[0]  # noqa: E731
    return jax.vmap(lambda x: lax.custom_linear_solve(lambda v: matrix @ v, x, solve, symmetric=True))(out)


def bags(params, batch):
    """Two rows of a table for each example, added up, as of a recommendation model's bags."""
    of_each = jnp.stack([batch["label"], batch["label"] + 1], 1).reshape(-1)
    places = jnp.repeat(jnp.arange(len(batch["label"])), 2)
    return jax.ops.segment_sum(params["w"][of_each], places, num_segments=len(batch["label"]))


def masked(params, batch):
    return (error_of(params, batch) * batch["mask"]).sum() / jnp.maximum(batch["mask"].sum(), 1)


def two_terms(params, batch):
    """Two losses of the same tokens, each divided by its own sum of the mask."""
    mean = lambda x: (x * batch["mask"]).sum() / jnp.maximum(batch["mask"].sum(), 1)  # noqa: E731
    return mean(error_of(params, batch)) - 0.3 * mean(jnp.tanh(out_of(params, batch)).sum(-1))


def by_ones(params, batch):
    """A sum with the mask of a batch that has none."""
    return (error_of(params, batch) * jnp.ones_like(batch["mask"])).sum()


def labelled(params, batch):
    scores = jax.nn.log_softmax(out_of(params, batch))
    return -jnp.take_along_axis(scores, batch["label"][:, None], -1).mean()


def nhwc(params, batch):
    image = batch["x"].reshape(-1, 2, 2, 2)
    numbers = ("NHWC", "HWIO", "NHWC")
    hidden = jax.nn.gelu(
        lax.conv_general_dilated(
            image, params["w"][:4, :4].reshape(2, 2, 2, 2), (1, 1), "SAME", dimension_numbers=numbers
        )
    )
    pooled = lax.reduce_window(hidden, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.square(pooled).mean()


def convolve(image, kernel):
    return lax.conv_general_dilated(image, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


def of_several_kernels(params, batch):
    image, kernels = batch["x"].reshape(-1, 4, 2), jnp.stack([params["w"][:4, :2], params["w"][4:, 2:4]])
    return jnp.square(jax.vmap(lambda kernel: convolve(image, kernel.reshape(2, 2, 2)))(kernels)).mean()


def of_the_kernel_of_each(params, batch):
    def of_one(x):
        kernel = params["w"][:4, :4].reshape(2, 2, 4) * (1 + x.mean())
        return jnp.tanh(convolve(x.reshape(1, 4, 2), kernel))

    return jnp.square(jax.vmap(of_one)(batch["x"])).mean()


def recurrent(params, batch):
    def cell(state, x):
        state = jnp.tanh(state @ params["w"][:6] + x[:, None] * params["b"])
        return state, state

    states = lax.scan(cell, jnp.zeros((len(batch["x"]), 6)), batch["x"].T)[1]
    return jnp.square(states).mean()


def attention(params, batch):
    x = batch["x"].reshape(-1, 4, 2) @ params["w"][:2]
    same = batch["label"][:, None, None] == jnp.arange(4)
    scores = jnp.where(same, -1e9, jnp.einsum("nqd,nkd->nqk", x, x))
    return jnp.square(jnp.einsum("nqk,nkd->nqd", jax.nn.softmax(scores), x)).mean()


SEPARABLE = {
    "two batches in one": in_pairs,
    "behind no rows": each(lambda out: jnp.concatenate([jnp.zeros((0, 6)), out, jnp.zeros((0, 6))])),
    "two batches behind no rows": each(
        lambda out: jnp.concatenate([jnp.zeros((0, 6)), jnp.concatenate([out, 2 * out])]).reshape(2, -1, 6).max(0)
    ),
    "two batches by tile": lambda p, b: error_of(p, {"x": jnp.tile(b["x"], (2, 1))}).reshape(2, -1).max(0).mean(),
    "mean": lambda p, b: error_of(p, b).mean(),
    "sum by their number": lambda p, b: error_of(p, b).sum() / len(b["x"]),
    "by its reciprocal": lambda p, b: (1 / len(b["x"])) * error_of(p, b).sum(),
    "with a regularizer": lambda p, b: error_of(p, b).mean() + 0.1 * jnp.square(p["w"]).sum(),
    "masked": masked,
    "masked, moved by an epsilon": lambda p, b: (error_of(p, b) * b["mask"]).sum() / (b["mask"].sum() + 1e-8),
    "masked, with a regularizer": lambda p, b: (
        (error_of(p, b) * b["mask"]).sum() / b["mask"].sum() + 0.1 * jnp.square(p["w"]).sum()
    ),
    "by a bounded count": lambda p, b: error_of(p, b).sum() / jnp.maximum((b["label"] == 0).sum(), 1),
    "by a bounded count and an epsilon": lambda p, b: (
        error_of(p, b).sum() / (jnp.maximum((b["label"] == 0).sum(), 1) + 1e-6)
    ),
    "by a count with two bounds": lambda p, b: (
        error_of(p, b).sum() / jnp.maximum(jnp.maximum((b["label"] == 0).sum(), 0.5), 1)
    ),
    "two by one sum": lambda p, b: (lambda n: b["mask"] @ error_of(p, b) / n + (error_of(p, b) * b["mask"]).sum() / n)(
        b["mask"].sum()
    ),
    "two by equal sums": two_terms,
    "masked by ones": lambda p, b: by_ones(p, b) / jnp.ones_like(b["mask"]).sum(),
    "masked by ones, bounded": lambda p, b: by_ones(p, b) / jnp.maximum(jnp.ones_like(b["mask"]).sum(), 1),
    "masked by ones, moved by an epsilon": lambda p, b: by_ones(p, b) / (jnp.ones_like(b["mask"]).sum() + 1e-6),
    "masked by booleans": lambda p, b: by_ones(p, b) / jnp.ones_like(b["label"], bool).sum(),
    "masked by where": lambda p, b: jnp.mean(error_of(p, b), where=b["mask"] > 0),
    "labelled": labelled,
    "looked up by short places": lambda p, b: out_of(p, b)[
        jnp.arange(len(b["x"])).astype(jnp.int16), b["label"].astype(jnp.int16)
    ].mean(),
    "looked up": lambda p, b: -jax.nn.log_softmax(out_of(p, b))[jnp.arange(len(b["x"])), b["label"]].mean(),
    "one hot": lambda p, b: (out_of(p, b) * jax.nn.one_hot(b["label"], 6)).mean(),
    "set at a place": lambda p, b: jnp.square(out_of(p, b).at[jnp.arange(len(b["x"])), b["label"]].set(2.0)).mean(),
    "embedded": lambda p, b: jnp.square(p["w"][b["label"]]).mean(),
    "looked up by numpy": lambda p, b: -jax.nn.log_softmax(out_of(p, b))[np.arange(len(b["x"])), b["label"]].mean(),
    "beside rows of numpy": lambda p, b: (np.full(len(b["x"]), 0.5, np.float32) * error_of(p, b)).mean(),
    "loop from rows of numpy": each(lambda out: lax.scan(lambda h, x: (h + x, h), np.zeros(len(out), "f"), out.T)[1].T),
    "bags of embeddings": lambda p, b: jnp.square(bags(p, b)).mean(),
    "vmap": lambda p, b: jax.vmap(lambda x, i: lax.dynamic_slice_in_dim(x, i, 2))(out_of(p, b), b["label"]).mean(),
    "map": lambda p, b: lax.map(lambda x: jnp.square(jnp.tanh(x @ p["w"]).sum()), b["x"]).mean(),
    "loop that adds": loop_over_examples(lambda c, x: (c + jnp.tanh(x[0] * x[1]), None)),
    "added and stacked by a loop": added_by_a_loop,
    "while of each": until(lambda x: x.sum() < 20),
    "while of each, by nested tests": until(
        lambda x: lax.while_loop(lambda x: x.max() < 20, lambda x: 3 * x + 1, x).sum() < 200
    ),
    "checkpointed loop of Equinox": each(lambda out: looped(out, jnp.arange(3.0))),
    "conjugate gradients": each(conjugate_gradients),
    "remat": lambda p, b: jax.checkpoint(error_of)(p, b).mean(),
    "scan over features": folded,
    "recurrent": recurrent,
    "attention": attention,
    "convolution": nhwc,
    "convolution by several kernels": of_several_kernels,
    "convolution by the kernel of each": of_the_kernel_of_each,
    "dropout": dropped,
    "masked by draws": masked_by_draws,
    "masked and not": lambda p, b: error_of(p, b).mean() + masked(p, b) - 0.1 * error_of(p, b).sum(),
    "custom_vjp": each(doubled_backward),
    "relu": each(lambda out: jax.nn.relu(out) + jax.nn.silu(out) + jax.nn.softplus(out)),
    "layer norm": each(lambda out: (out - out.mean(-1, keepdims=True)) * lax.rsqrt(out.var(-1, keepdims=True) + 1e-5)),
    "logsumexp": lambda p, b: jax.nn.logsumexp(out_of(p, b), -1).mean(),
    "sort": each(lambda out: jnp.sort(out, -1) * jnp.argsort(out, -1)),
    "top_k": each(lambda out: lax.top_k(out, 2)[0]),
    "cumsum": each(lambda out: jnp.cumsum(out, -1) + lax.associative_scan(jnp.multiply, out, axis=1)),
    "fft": each(lambda out: jnp.fft.fft(out, axis=1).real),
    "cholesky": each(lambda out: jnp.linalg.cholesky(squares(out))),
    "eigh": each(lambda out: jnp.linalg.eigvalsh(squares(out))),
    "svd": each(lambda out: jnp.linalg.svd(squares(out), compute_uv=False)),
    "qr": each(lambda out: jnp.linalg.qr(squares(out))[1]),
    "solve": each(lambda out: jnp.linalg.solve(squares(out), out[..., None])),
    "slogdet": each(lambda out: jnp.linalg.slogdet(squares(out))[1]),
    "pad and slice": each(lambda out: jnp.roll(jnp.pad(out, ((0, 0), (1, 2))), 1, -1)[:, 1:]),
    "cond on params": lambda p, b: lax.cond(p["b"].sum() > 0, lambda x: 2 * x, jnp.sin, error_of(p, b)).mean(),
    "debug print": lambda p, b: (jax.debug.callback(lambda x: None, p["b"].sum()), error_of(p, b).mean())[1],
    "reversed features": each(lambda out: out[:, ::-1]),
    "sum of products": lambda p, b: jnp.vdot(error_of(p, b), b["mask"]) / len(b["x"]),
    "a penalty by a count": lambda p, b: jnp.square(p["w"]).sum() / b["mask"].sum() + jnp.square(p["b"]).sum(),
    "sum": lambda p, b: error_of(p, b).sum(),
    "sum by a number": lambda p, b: error_of(p, b).sum() / 100,
    "sum of the batch by its root": lambda p, b: error_of(p, b).sum() / len(b["x"]) ** 0.5,
    "sum and a regularizer": lambda p, b: error_of(p, b).sum() + jnp.square(p["w"]).sum(),
    "two means": two_means,
    "bounded, with a regularizer": lambda p, b: masked(p, b) + 0.1 * jnp.square(p["w"]).sum(),
    "number of examples": lambda p, b: error_of(p, b).mean() * len(b["x"]),
    "no examples": lambda p, b: jnp.square(p["w"]).sum(),
}


def make_inputs(size, seed=0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32)  # noqa: E731
    batch = {
        "x": normal(size, 8),
        "label": rng.integers(0, 3, size, dtype=np.int32),
        "mask": (rng.random(size) < 0.7).astype(np.float32),
    }
    batch["mask"][::2] = 1  # some of each part
    batch["mask"][1] = 0
    return {"w": normal(8, 6) / 2, "b": normal(6)}, batch

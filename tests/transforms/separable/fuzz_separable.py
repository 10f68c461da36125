"""Random losses of a batch: those that are judged to be means over examples are, by value and by gradient.

`python tests/transforms/separable/fuzz_separable.py --seconds 300` tries as many as it can.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zero_jax.dims import Kind, Relation
from zero_jax.program.loss import LossProgram
from zero_jax.sharding.mesh import Axes
from zero_jax.training.grads.accumulator import CombinedAux
from zero_jax.transforms.separable.counts import CountedProgram
from zero_jax.transforms.separable.separability import BatchParts, separability

EXAMPLES, MICROBATCHES, DEVICES = 32, 2, 4
PARTS = MICROBATCHES * DEVICES
FEATURES = 4  # as many as a device has examples of a microbatch: dims can only be told apart by what they are


def unary(rng):
    fns = [jnp.sin, jnp.tanh, jax.nn.relu, jax.nn.gelu, jnp.square, jnp.abs, lambda x: -x, lambda x: 0.5 * x, jnp.floor]
    fns += [
        lax.stop_gradient,
        jax.checkpoint(jnp.cos),
        jax.jit(jnp.tanh),
        lambda x: lax.reduce_precision(x, 8, 20),
    ]
    return fns[rng.integers(len(fns))]


def binary(rng):
    fns = [
        jnp.add,
        jnp.subtract,
        jnp.multiply,
        jnp.maximum,
        lambda x, y: x / (jnp.abs(y) + 1),
        lambda x, y: jnp.where(y > 0, x, y),
    ]
    return fns[rng.integers(len(fns))]


def pooled(x, dim):
    sizes = tuple(2 if i == dim else 1 for i in range(x.ndim))
    return lax.reduce_window(x, -jnp.inf, lax.max, sizes, (1,) * x.ndim, "SAME")


def scanned(x, dim):
    x = jnp.moveaxis(x, dim, 0)
    return jnp.moveaxis(lax.scan(lambda c, s: (c + s, c * s), jnp.zeros_like(x[0]), x)[1], 0, dim)


def doubled_until(x):
    return lax.while_loop(lambda x: x.sum() < 2, lambda x: 2 * jnp.abs(x) + 1, x)


def doubled(x, dim):
    both = jnp.concatenate([x, jnp.sin(x)], dim)
    return jnp.split(both / (1 + jnp.abs(both).sum(-1, keepdims=True)), 2, dim)[1]


def along(rng, num_dims):
    """Returns a function along one dim."""
    dim = int(rng.choice([0, *range(1, num_dims), *range(1, num_dims)])) if num_dims > 1 else 0
    fns = [
        lambda x: jnp.cumsum(x, dim),
        lambda x: jnp.sort(x, dim),
        lambda x: jax.nn.softmax(x, dim),
        lambda x: jnp.flip(x, dim),
        lambda x: jnp.roll(x, 1, dim),
        lambda x: x - x.mean(dim, keepdims=True),
        lambda x: x - x.max(dim, keepdims=True),
        lambda x: lax.associative_scan(jnp.add, x, axis=dim),
        lambda x: jnp.fft.fft(x, axis=dim).real,
        lambda x: jnp.concatenate([x[:, :1], x[:, 1:]], 1) if x.ndim > 1 else x,
        lambda x: jnp.take(x, jnp.array([1, 0, 1, 2]), dim),
        lambda x: pooled(x, dim),
        lambda x: scanned(x, dim),
        lambda x: doubled(x, dim),
        lambda x: lax.top_k(jnp.moveaxis(x, dim, -1), 2)[0],
    ]  # fmt: skip
    return fns[rng.integers(len(fns))]


def column(b, x):
    return b["label"].reshape(-1, *[1] * (x.ndim - 1))


def squares(x):
    return jnp.einsum("ni,nj->nij", x, x) + 2 * jnp.eye(x.shape[1])


def product(rng):
    fns = [
        lambda x, w, b: x @ w if x.shape[-1] == w.shape[0] else x,
        lambda x, w, b: jnp.einsum("...i,...j->...ij", x, x)[..., :2].sum(-1),
        lambda x, w, b: x @ x.T if x.ndim == 2 else x,
        lambda x, w, b: x.T @ x if x.ndim == 2 else x,
        lambda x, w, b: x[jnp.arange(len(x)), b["label"] % x.shape[1]] if x.ndim == 2 else x,
        lambda x, w, b: jnp.take_along_axis(x, column(b, x), x.ndim - 1) if x.ndim > 1 else x,
        lambda x, w, b: x * w[b["label"]].mean(-1).reshape(-1, *[1] * (x.ndim - 1)),
        lambda x, w, b: x[b["label"]],
        lambda x, w, b: jax.ops.segment_sum(x, b["label"], 4),
        lambda x, w, b: jnp.zeros((4, *x.shape[1:])).at[b["label"]].max(x),
        lambda x, w, b: jnp.linalg.cholesky(squares(x)) if x.ndim == 2 else x,
        lambda x, w, b: jnp.linalg.svd(x, compute_uv=False) if x.ndim == 2 else x,
        lambda x, w, b: lax.map(lambda row: jnp.tanh(row).sum(), x),
        lambda x, w, b: jax.vmap(doubled_until)(lax.stop_gradient(x)) + x,
        lambda x, w, b: doubled_until(lax.stop_gradient(x)) * x,
        lambda x, w, b: lax.scan(lambda c, row: (c + jnp.sin(row), c + row), jnp.zeros_like(x[0]), x)[1],
        lambda x, w, b: lax.cond(w.sum() > 0, jnp.sin, jnp.cos, x),
        lambda x, w, b: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
        lambda x, w, b: x.at[jnp.arange(len(x)), b["label"] % x.shape[1]].add(1.0) if x.ndim == 2 else x,
        lambda x, w, b: x * jnp.arange(x.shape[-1]),
        lambda x, w, b: x * jnp.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1)),
        lambda x, w, b: x.reshape(len(x), -1),
        lambda x, w, b: x.reshape(-1, 2) if x.size % 2 == 0 else x,
        lambda x, w, b: x[..., None],
        lambda x, w, b: x.swapaxes(0, -1),
        lambda x, w, b: x[1:],
        lambda x, w, b: x[..., :2],
    ]  # fmt: skip
    return fns[rng.integers(len(fns))]


def weighted(x, b, least):
    """Returns a mean over the examples that count, where there is one entry an example."""
    if len(x) != len(b["mask"]):
        return x.mean()
    return (x.reshape(len(x), -1).mean(-1) * b["mask"]).sum() / jnp.maximum(b["mask"].sum(), least)


def ending(rng):
    """Returns what makes a loss of a value, and whether it is usually a mean."""
    fns = [
        lambda x, b: x.mean(),
        lambda x, b: x.mean(),
        lambda x, b: x.mean(),
        lambda x, b: x.sum() / len(b["mask"]),
        lambda x, b: weighted(x, b, -1.0),
        lambda x, b: weighted(x, b, 1.0),
        lambda x, b: x.sum(),
        lambda x, b: lax.scan(lambda c, row: (c + row.mean(), None), 0.0, x)[0] / len(x),
        lambda x, b: lax.scan(lambda c, row: (0.1 * c + row.mean(), None), 0.0, x)[0] / len(x),
        lambda x, b: x.max(),
        lambda x, b: jnp.sqrt(jnp.square(x).mean() + 1),
        lambda x, b: jax.nn.logsumexp(x),
    ]  # fmt: skip
    return fns[rng.integers(len(fns))]


ENTRIES = [
    lambda x, b: x,
    lambda x, b: x.swapaxes(0, -1),
    lambda x, b: x.sum(),
    lambda x, b: x.mean(0),
    lambda x, b: x.max(0),
    lambda x, b: 1 - 2 * x.min(),
    lambda x, b: (x > 0).all(),
    lambda x, b: (x > 0.5).any(0),
    lambda x, b: (x > 0).sum(),
    lambda x, b: weighted(x, b, 1.0),
    lambda x, b: 3 * weighted(x, b, -1.0),
    lambda x, b: jnp.where(b["mask"].sum() > 0, weighted(x, b, -1.0), 0),
    lambda x, b: x.var(),
    lambda x, b: jnp.full(4, x.mean()),
    lambda x, b: x.size,
]


def make_loss(seed, *, with_aux=False):
    """Returns a random loss function of 6 to 14 steps; a step whose shapes do not fit is left out.

    With `with_aux` it returns entries made of its values, too.
    """
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(int(rng.integers(6, 15))):
        kind = rng.choice(["unary", "binary", "along", "product", "params"], p=[0.35, 0.25, 0.12, 0.13, 0.15])
        made = {"unary": unary, "binary": binary, "product": product, "params": lambda rng: None}
        fn = along(rng, 2) if kind == "along" else made[kind](rng)
        steps.append((kind, fn, rng.integers(0, 1 << 30, 2)))
    end, regular = ending(rng), rng.random() < 0.3
    chosen = [ENTRIES[i] for i in rng.permutation(len(ENTRIES))[:8]]

    def loss_fn(params, batch):
        w, values = params["w"], [batch["x"], jnp.tanh(batch["x"] @ params["w"])]
        for kind, fn, picks in steps:
            x = values[-1 - picks[0] % min(3, len(values))]
            others = [y for y in values if y.shape == x.shape]
            if kind == "unary":
                new = fn(x)
            elif kind == "binary":
                new = fn(x, others[picks[1] % len(others)])
            elif kind == "along":
                new = fn(x) if x.ndim > 1 else jnp.sin(x)
            elif kind == "product":
                new = fn(x, w, batch) if x.ndim > 2 or (x.ndim and len(x) == len(batch["x"])) else x
            else:
                new = x * params["b"] if x.shape[-1:] == params["b"].shape else x + params["b"].sum()
            values.append(new)
        loss = end(jnp.tanh(values[-1]), batch)
        loss = loss + 0.1 * jnp.square(w).sum() if regular else loss
        entries = [entry(jnp.tanh(x), batch) for x, entry in zip(values[::-1], chosen, strict=False)]
        return (loss, entries) if with_aux else loss

    return loss_fn


def make_inputs(seed, size=EXAMPLES):
    rng = np.random.default_rng(seed)
    params = {"w": rng.standard_normal((FEATURES, FEATURES)) / 2, "b": rng.standard_normal(FEATURES)}
    mask = (rng.random(size) < 0.7).astype(np.float32)
    mask[::2] = 1  # some of every part
    batch = {
        "x": rng.standard_normal((size, FEATURES)),
        "label": rng.integers(0, 4, size, dtype=np.int32),
        "mask": mask,
    }
    return jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, (params, batch))


def separability_of(program, params, batch):
    mesh = jax.sharding.AbstractMesh((DEVICES,), ("data",))
    axes = Axes(replica=(), data=("data",), model=())
    parts = BatchParts(mesh=mesh, axes=axes, num_microbatches=MICROBATCHES)
    return separability(program, (params, batch, jax.random.key(0)), parts)


def program_of(loss_fn):
    return LossProgram(lambda params, batch, key: (loss_fn(params, batch), (None, None)))


def judge(loss_fn, params, batch):
    """Returns why a loss is no mean over examples, empty if it is."""
    return separability_of(program_of(loss_fn), params, batch).not_local


def split(batch):
    size = len(batch["x"]) // PARTS
    return [jax.tree.map(lambda x: x[i * size : (i + 1) * size], batch) for i in range(PARTS)]  # noqa: B023


def microbatches(batch):
    """Returns microbatches, of which each has a run of the examples of each device."""
    take = lambda x, i: x.reshape(DEVICES, MICROBATCHES, -1, *x.shape[1:])[:, i].reshape(-1, *x.shape[1:])  # noqa: E731
    return [jax.tree.map(lambda x: take(x, i), batch) for i in range(MICROBATCHES)]  # noqa: B023


def joined(x, dim):
    """Returns what is of the examples of `microbatches`, along a dim, in the order of the batch."""
    x = jnp.moveaxis(x, 1 + dim, 1)
    x = x.reshape(MICROBATCHES, DEVICES, -1, *x.shape[2:]).swapaxes(0, 1)
    return jnp.moveaxis(x.reshape(-1, *x.shape[3:]), 0, dim)


def difference_of_aux(loss_fn, params, batch):
    """Returns how far entries of aux that are made of those of parts are from those of the whole batch, and how many.

    The loss function returns its aux, too.
    """
    key = jax.random.key(0)

    def with_aux(params, batch, key):
        loss, aux = loss_fn(params, batch)
        return loss, (aux, None)

    judged = separability_of(LossProgram(with_aux), params, batch)
    program, aux = CountedProgram(LossProgram(with_aux), judged.on_parts), CombinedAux(judged.aux)
    parts, join = (microbatches, joined) if judged.not_local else (split, lambda x, dim: jnp.concatenate([*x], dim))

    @jax.jit
    def entries(params, batch, counts):
        _, (values, _, _) = program(params, (batch, counts), key)
        return aux.entries(values)

    counts = counts_of(program, params, parts(batch))
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *(entries(params, part, counts) for part in parts(batch)))
    found = aux.combine(stacked, join, lead=1)
    wanted = jax.jit(loss_fn)(params, batch)[1]
    known = [x for x, how in zip(wanted, aux.combinations.values(), strict=True) if not how.why]
    pairs = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in zip(found, known, strict=True)]
    apart = [np.abs(x - y).max() / max(1, np.abs(y).max()) if x.shape == y.shape else np.inf for x, y in pairs]
    return max(apart, default=0.0), len(apart)


def counts_of(program, params, parts):
    """Returns the counts of the batch, as a step sums them."""
    each = [program.counts(params, part, jax.random.key(0)) for part in parts]
    how = {str(i): Relation(kind=Kind.SUM, power=power) for i, power in program.how.counts.items()}
    return CombinedAux(how).combine([jnp.stack(xs) for xs in zip(*each, strict=True)], None, lead=1)


def difference(loss_fn, params, batch):
    """Returns how far the mean over the parts of loss and gradients is from those of the whole batch."""
    program, parts = program_of(loss_fn), split(batch)
    program = CountedProgram(program, separability_of(program, params, batch).on_parts)
    counts = counts_of(program, params, parts)
    loss_of_part = lambda params, batch: program(params, (batch, counts), jax.random.key(0))[0]  # noqa: E731
    grad = jax.jit(jax.value_and_grad(loss_of_part))
    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(params, batch)
    if not all(np.isfinite(x).all() for x in jax.tree.leaves((loss, grads))):
        return 0.0
    found = jax.tree.map(lambda *xs: np.mean(xs, 0), *(grad(params, part) for part in parts))
    scale = max(float(np.abs(x).max()) for x in jax.tree.leaves((loss, grads)))
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves((loss, grads)), strict=True)
    return max(float(np.abs(x - y).max()) for x, y in pairs) / max(scale, 1e-3)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    end, seed, num_separable, untraced, worst = time.monotonic() + args.seconds, args.first, 0, 0, (0.0, -1)
    entries = 0
    while time.monotonic() < end:
        loss_fn, (params, batch) = make_loss(seed), make_inputs(seed)
        try:
            jax.eval_shape(loss_fn, params, batch)
        except (TypeError, ValueError):
            untraced += 1
        else:
            if not judge(loss_fn, params, batch):
                num_separable += 1
                off = difference(loss_fn, params, batch)
                worst = max(worst, (off, seed))
                if not off < 1e-3:
                    print(f"seed {seed}: {off:.2e}", flush=True)
            off, num_entries = difference_of_aux(make_loss(seed, with_aux=True), params, batch)
            entries += num_entries
            if not off < 1e-3:
                print(f"seed {seed}, aux: {off:.2e}", flush=True)
        seed += 1
    tried = seed - args.first - untraced
    print(
        f"{tried} losses, {num_separable} judged separable; furthest off {worst[0]:.1e} (seed {worst[1]}); "
        f"{entries} entries of aux"
    )


if __name__ == "__main__":
    main()

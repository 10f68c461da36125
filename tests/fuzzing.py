"""Random loss functions as source text, and their comparison with themselves transformed.

`program(seed)` writes a function of some params and a batch in 6 to 14 steps, each a line of Python on what the lines
before it made. `compare` transforms it in one of the ways of `MODES` over 8 simulated devices. `scripts/fuzz_losses.py`
goes through as many seeds as asked for. `model_fuzzing.py` has whole train steps of programs that are like models.
"""

import contextlib
import dataclasses
import math
import random
import unittest.mock
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import reference
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import zero_jax as zero
from zero_jax.sharding.mesh import axes_of
from zero_jax.transforms import GatherOptions
from zero_jax.transforms import gathered as at_uses
from zero_jax.transforms.remat.transform import rematerialize

BATCH = 16
SIZES = (1, 2, 3, 5, 8, 13, 16, 24)
MAX_ELEMENTS = 2048
# Of the largest number in each leaf: float32 sums in another order, through up to 14 steps.
TOLERANCE = 1e-4

# What XLA itself gets wrong, with zero_jax or without, is not written; docs/xla_faults.md has the smallest programs.
SLICES_WITHIN = False  # the gradient of `a[20:22]` where `a` is 24 rows over 8 devices: two rows of two shards
CONVOLUTIONS = False  # the gradient of a kernel where the image's rows are sharded over one mesh axis of two
FFT = False  # XLA:CPU has no FFT of an array that is not row-major, which sharding may make it


# What programs may call, beside `jax` and `jnp`.


def mm(a, b):
    return a @ b / np.sqrt(b.shape[0]).astype(np.float32)


def fit(a, shape):
    """Returns an array with the elements of another, over and over, in a given shape."""
    return jnp.resize(a, shape)


def small(a):
    """Keeps numbers from growing step by step."""
    return a / (1 + jnp.sqrt(jnp.mean(jnp.square(a))))


def conv(a, kernel):
    """A matrix convolved with another, as an image of one channel."""
    return lax.conv_general_dilated(a[None, None], fit(kernel, (1, 1, 3, 3)), (1, 1), "SAME")[0, 0]


@jax.custom_vjp
def halved_backwards(a):
    return jnp.sin(a)


halved_backwards.defvjp(lambda a: (jnp.sin(a), a), lambda a, g: (0.5 * g * jnp.cos(a),))


@jax.custom_jvp
def soft(a):
    return jnp.log1p(jnp.exp(-jnp.abs(a))) + jnp.maximum(a, 0)


soft.defjvp(lambda primals, tangents: (soft(*primals), jax.nn.sigmoid(primals[0]) * tangents[0]))

NAMES = {
    name: globals()[name] for name in ("mm", "fit", "small", "conv", "halved_backwards", "soft", "jax", "jnp", "lax")
}


class Writer:
    """Writes one program: lines on values whose shapes are known."""

    def __init__(self, seed, params, inputs):
        self.rng = random.Random(seed)
        self.shapes = dict(params) | dict(inputs)
        self.params = list(params)
        self.lines = []

    def any(self, *, ndim=None, least=0):
        """Returns the name of a value, often of a param or of what was made last."""
        fits = [n for n, s in self.shapes.items() if (len(s) == ndim if ndim is not None else len(s) >= least)]
        if not fits:
            return None
        late = [n for n in fits if n.startswith("v")][-3:]
        params = [n for n in fits if n in self.params]
        return self.rng.choice(self.rng.choice([group for group in (late, late, params, fits) if group]))

    def line(self, write):
        """Adds the line that a step writes, if it can be evaluated and is not too large."""
        text = write(self)
        if not text:
            return False
        try:
            known = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in self.shapes.items()}
            known["i"] = jax.ShapeDtypeStruct((4,), jnp.int32)
            out = jax.eval_shape(lambda known: eval(text, NAMES | known), known)
        except (TypeError, ValueError, IndexError, ZeroDivisionError):
            return False
        if not isinstance(out, jax.ShapeDtypeStruct) or out.dtype != jnp.float32:
            return False
        if not 0 < math.prod(out.shape) <= MAX_ELEMENTS or len(out.shape) > 4:
            return False
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = small({text})")
        self.shapes[name] = out.shape
        return True

    def write(self, num_steps):
        steps = list(STEPS.values())
        while len(self.lines) < num_steps:
            self.line(self.rng.choice(steps))
        return self.lines


STEPS = {}


def step(function):
    STEPS[function.__name__] = function
    return function


@step
def unary(w):
    kinds = ("jnp.tanh", "jnp.sin", "jax.nn.gelu", "jnp.exp", "soft", "halved_backwards", "jnp.square", "jax.nn.relu")
    return f"{w.rng.choice(kinds)}({w.any()})"


@step
def binary(w):
    a, b = w.any(), w.any()
    b = b if w.shapes[a] == w.shapes[b] else f"fit({b}, {w.shapes[a]})"
    kinds = "{a} + {b}|{a} * {b}|{a} - jnp.tanh({b})|jnp.where({a} > {b}, {a}, 2 * {b})|jnp.maximum({a}, {b})"
    return w.rng.choice(kinds.split("|")).format(a=a, b=b)


@step
def broadcast(w):
    a, b = w.any(ndim=2), w.any(ndim=1)
    return b and a and f"{a} * {b if w.shapes[b][0] == w.shapes[a][-1] else f'fit({b}, {w.shapes[a][-1:]})'}"


@step
def product(w):
    a, b = w.any(least=1), w.any(ndim=2)
    if a is None or b is None:
        return None
    if w.rng.random() < 0.3:
        b = f"{b}.T"
    inner = w.shapes[b.removesuffix(".T")][-1 if b.endswith(".T") else 0]
    return f"mm({a}, {b})" if w.shapes[a][-1] == inner else f"mm(fit({a}, {(*w.shapes[a][:-1], inner)}), {b})"


@step
def attention(w):
    a = w.any(ndim=2)
    return a and f"jax.nn.softmax(mm({a}, {a}.T)) @ jnp.sin({a})"


@step
def batched_product(w):
    a, b = w.any(ndim=3), w.any(ndim=3)
    return a and b and f"jnp.einsum('abc,adc->abd', {a}, fit({b}, {(w.shapes[a][0], 5, w.shapes[a][2])})) * 0.3"


@step
def reshape(w):
    a = w.any()
    size = math.prod(w.shapes[a])
    first = w.rng.choice([n for n in range(1, size + 1) if size % n == 0])
    second = w.rng.choice([n for n in range(1, size // first + 1) if (size // first) % n == 0])
    shape = w.rng.choice([(first, size // first), (first, second, -1), (-1,)])
    return f"{a}.reshape({shape})"


@step
def transpose(w):
    a = w.any(least=2)
    dims = list(range(len(w.shapes[a]))) if a else []
    w.rng.shuffle(dims)
    return a and f"{a}.transpose({tuple(dims)})"


def some_dim(w, a):
    return w.rng.randrange(len(w.shapes[a]))


@step
def slices(w):
    a = w.any(least=1)
    dim = some_dim(w, a) if a else 0
    size = w.shapes[a][dim] if a else 0
    if size < 2:
        return None
    start = w.rng.randrange(size) if SLICES_WITHIN or w.rng.random() < 0.5 else 0
    stop = w.rng.randrange(start + 1, size + 1) if SLICES_WITHIN or not start else size
    stride = w.rng.choice(["", "", ":2"]) if SLICES_WITHIN or not start else ""
    return f"{a}[{':, ' * dim}{start}:{stop}{stride}]"


@step
def index(w):
    a = w.any(least=2)
    dim = some_dim(w, a) if a else 0
    return a and f"{a}[{':, ' * dim}{w.rng.randrange(w.shapes[a][dim])}]"


@step
def dynamic_slice(w):
    a = w.any(least=1)
    dim = some_dim(w, a) if a else 0
    return a and f"lax.dynamic_slice_in_dim({a}, i[0], {max(w.shapes[a][dim] // 2, 1)}, {dim})"


@step
def dynamic_update(w):
    a, b = w.any(least=1), w.any()
    if a is None:
        return None
    dim = some_dim(w, a)
    shape = list(w.shapes[a])
    shape[dim] = max(shape[dim] // 2, 1)
    return f"lax.dynamic_update_slice_in_dim({a}, fit({b}, {tuple(shape)}), i[1], {dim})"


@step
def concatenate(w):
    a, b = w.any(least=1), w.any()
    return a and f"jnp.concatenate([{a}, fit({b}, {w.shapes[a]})], {some_dim(w, a)})"


@step
def pad(w):
    a = w.any(least=1)
    edges = [(w.rng.randrange(3), w.rng.randrange(3), w.rng.randrange(2)) for _ in w.shapes[a]] if a else []
    return a and f"lax.pad({a}, 0.5, {edges})"


@step
def reverse(w):
    a = w.any(least=1)
    kinds = ["jnp.flip({a}, {dim})"] + ["jnp.roll({a}, 3, {dim})"] * SLICES_WITHIN
    return a and w.rng.choice(kinds).format(a=a, dim=some_dim(w, a))


@step
def lookup(w):
    a = w.any(least=1)
    dim = some_dim(w, a) if a else 0
    return a and f"jnp.take({a}, (i + jnp.arange(4)) % {w.shapes[a][dim]}, axis={dim})"


@step
def lookup_of_examples(w):
    a = w.any(ndim=2)
    return a and f"{a}[(jnp.abs(x[:, 0]) * 97).astype(int) % {w.shapes[a][0]}]"


@step
def along_axis(w):
    a = w.any(ndim=2)
    return a and f"jnp.take_along_axis({a}, jnp.argsort({a}, {(dim := some_dim(w, a))}), {dim})"


@step
def scatter(w):
    a, b = w.any(least=1), w.any()
    kind = w.rng.choice(["add", "set", "multiply", "max"])
    if a is None:
        return None
    indices = f"(i[0] + 3 * jnp.arange({min(4, w.shapes[a][0])})) % {w.shapes[a][0]}"
    if kind != "add" and math.gcd(3, w.shapes[a][0]) != 1:
        return None  # which of two writes to a place is last is not defined
    unique = ", unique_indices=True" if kind == "multiply" else ""
    return f"{a}.at[{indices}].{kind}(fit({b}, {(min(4, w.shapes[a][0]), *w.shapes[a][1:])}){unique})"


@step
def segments(w):
    a = w.any(least=1)
    return a and f"jax.ops.segment_sum({a}, (jnp.arange({w.shapes[a][0]}) * 7 + i[2]) % 5, num_segments=5)"


@step
def reduction(w):
    a = w.any(least=1)
    kinds = ("jnp.sum", "jnp.mean", "jnp.max", "jnp.min", "jax.nn.logsumexp", "jnp.var")
    return a and f"{w.rng.choice(kinds)}({a}, axis={some_dim(w, a)})"


@step
def along(w):
    a = w.any(least=1)
    kinds = ("jnp.cumsum", "jnp.sort", "jax.nn.softmax", "lax.cumlogsumexp", "lax.cummax")
    return a and f"{w.rng.choice(kinds)}({a}, {some_dim(w, a)})"


@step
def top(w):
    a = w.any(least=1)
    return a and f"lax.top_k({a}, {min(3, w.shapes[a][-1])})[0]"


@step
def scan_over(w):
    a = w.any(least=2)
    body = w.rng.choice(["jnp.tanh(c + s)", "0.5 * c * s + s", "jnp.sin(c) - s"])
    wrap = w.rng.choice(["{}", "jax.checkpoint({})"]).format(f"lambda c, s: ({body}, {body}.sum())")
    return a and f"lax.scan({wrap}, jnp.ones({w.shapes[a][1:]}), {a})[{w.rng.choice([0, 1])}]"


@step
def scan_with(w):
    a, b = w.any(ndim=2), w.any()
    size = w.shapes[a][0] if a else 0
    turns = f"fit({b}, {(size, size)}), fit({a}, {(3, size, size)})"
    return a and f"lax.scan(lambda c, s: (jnp.tanh(mm(s, c)), s.sum()), {turns})[0]"


@step
def loop(w):
    a, b = w.any(), w.any()
    return f"lax.fori_loop(0, 3, lambda n, c: jnp.sin(c + fit({b}, {w.shapes[a]})), {a})"


@step
def while_loop(w):
    a, b = w.any(), w.any()
    inner = f"lax.while_loop(lambda c: c[0] < i[3] + 2, lambda c: (c[0] + 1, jnp.cos(c[1])), (0, {b}))[1]"
    return f"{a} * jnp.mean(lax.stop_gradient(jax.jvp(lambda {b}: {inner}, ({b},), ({b},))[1]))"


@step
def cond(w):
    a, b = w.any(), w.any()
    branches = f"lambda a, b: a * jnp.tanh(b), lambda a, b: b + fit(jnp.cumsum(a), {w.shapes[a]})"
    chosen = w.rng.choice(["i[0] > 1", "x[0, 0] > 0"])
    return f"lax.cond({chosen}, {branches}, {a}, fit({b}, {w.shapes[a]}))"


@step
def switch(w):
    a = w.any()
    return f"lax.switch(i[1] % 3, [jnp.sin, lambda a: -a, lambda a: a * a.sum()], {a})"


@step
def recomputed(w):
    a, b = w.any(), w.any(ndim=2)
    return b and f"jax.checkpoint(lambda a, b: jnp.sin(jnp.tanh(a) * fit(mm(b, b.T), {w.shapes[a]})))({a}, {b})"


@step
def jitted(w):
    a, b = w.any(), w.any()
    return f"jax.jit(lambda a, b: jnp.tanh(a) + fit(b, {w.shapes[a]}) * b.mean())({a}, {b})"


@step
def mapped(w):
    a, b = w.any(ndim=2), w.any()
    of_row = "jnp.convolve(r, fit(b, (3,)), mode='same')" if CONVOLUTIONS else "r * fit(b, r.shape) - jnp.sort(r)"
    return a and f"jax.vmap(lambda r, b: {of_row}, ({w.rng.choice([0, 1])}, None))({a}, {b})"


@step
def convolution(w):
    a, b = w.any(ndim=2), w.any()
    return a and CONVOLUTIONS and f"conv({a}, {b})"


@step
def windows(w):
    a = w.any(ndim=2)
    return a and f"lax.reduce_window({a}, 0.0, lax.add, (2, 2), (1, {w.rng.choice([1, 2])}), 'SAME')"


@step
def complex_numbers(w):
    a, b = w.any(least=1), w.any()
    if a is None:
        return None
    kinds = ["jnp.abs(jnp.fft.fft({a})) * 0.2"] * FFT + ["jnp.real(({a} + 1j * {b}) * jnp.exp(1j * {a}))"]
    return w.rng.choice(kinds).format(a=a, b=f"fit({b}, {w.shapes[a]})")


@step
def associative(w):
    a = w.any(least=1)
    return a and f"lax.associative_scan(lambda a, b: a * 0.5 + b, {a}, axis={some_dim(w, a)})"


@step
def gradient_inside(w):
    a, b = w.any(), w.any()
    return f"jax.grad(lambda a: jnp.sum(jnp.sin(a) * fit({b}, {w.shapes[a]})))({a})"


@dataclasses.dataclass(frozen=True)
class Program:
    """A random loss function `(params, batch)`: its source, its params, and its batch of `x` and, of integers, `i`."""

    seed: int
    source: str
    params: dict
    batch: dict

    @property
    def loss_fn(self):
        scope = dict(NAMES)
        exec(self.source, scope)
        return lambda params, batch, key=None: scope["loss"](params, **batch)


def array(rng, shape):
    return (0.5 * rng.standard_normal(shape)).astype(np.float32)


def some_shape(rng):
    return tuple(rng.choice(SIZES) for _ in range(rng.choice([1, 2, 2, 2, 3])))


def body(writer, num_steps, indent):
    """Returns the lines of a body and the names of those values that no line uses."""
    lines = writer.write(num_steps)
    unused = [f"v{n}" for n in range(len(lines)) if not any(f"v{n}" in words(line) for line in lines[n + 1 :])]
    return "".join(f"{indent}{line}\n" for line in lines), unused


def words(line):
    return "".join(c if c.isalnum() else " " for c in line).split()


def ends(names):
    return " + ".join(f"jnp.mean(jnp.square({name}))" for name in names)


def program(seed, kind="plain"):
    """Returns a random program.

    Args:
      seed: the same program for the same seed and kind.
      kind: `plain`; `loop` or `scan`, of layers.
    """
    rng = random.Random(f"{seed} {kind}")
    shapes = {name: some_shape(rng) for name in "abc"} | {"d": (8, rng.choice((8, 16)))}
    layered = kind in ("loop", "scan")
    writer = Writer(rng.random(), shapes, {"x": (BATCH, 8)})
    text, unused = body(writer, rng.randint(3, 7) if layered else rng.randint(6, 14), " " * 8 if layered else " " * 4)
    last, num_layers = f"v{len(writer.lines) - 1}", rng.choice([2, 3])
    unpack = "a, b, c, d = (p[n] for n in 'abcd')\n"
    if layered:
        turns = {
            "loop": "    for q in p:\n        x, t = layer(x, q)\n        total += t\n",
            "scan": "    x, t = lax.scan(layer, x, p)\n    total = t.sum()\n",
        }[kind]
        start = rng.choice(["0.0", "jnp.zeros(())"])
        source = (
            f"def loss(p, x, i):\n    def layer(x, p):\n        {unpack}{text}"
            f"        return x + fit({last}, x.shape), {ends(unused)}\n"
            f"    total = {start}\n{turns}    return jnp.mean(jnp.square(x)) + total\n"
        )
    else:
        source = f"def loss(p, x, i):\n    {unpack}{text}    return {ends(unused)}\n"
    numbers = np.random.default_rng(rng.getrandbits(32))
    params = {name: array(numbers, shape) for name, shape in shapes.items()}
    if kind == "loop":
        params = [{name: array(numbers, shape) for name, shape in shapes.items()} for _ in range(num_layers)]
    elif kind == "scan":
        params = {name: array(numbers, (num_layers, *shape)) for name, shape in shapes.items()}
    batch = {"x": array(numbers, (BATCH, 8)), "i": numbers.integers(0, 5, 4, dtype=np.int32)}
    return Program(seed=seed, source=source, params=params, batch=batch)


# --- the ways to transform it ----------------------------------------------------------------------------------------

CONSTRAIN = lax.with_sharding_constraint
POLICIES = ("full", "full_sharded", "full_offloaded", "dots", "dots_sharded", "dots_offloaded", "attention", "none")


def some_specs(params, mesh, rng):
    """Shards each param over `data` along a random one of the dims that it divides, sometimes along none."""
    data = axes_of(mesh).data
    size = math.prod(mesh.shape[axis] for axis in data)

    def spec(leaf):
        dims = [i for i, n in enumerate(leaf.shape) if n % size == 0]
        if not dims or rng.random() < 0.1:
            return NamedSharding(mesh, PartitionSpec())
        entries = [None] * leaf.ndim
        entries[rng.choice(dims)] = data
        return NamedSharding(mesh, PartitionSpec(*entries))

    return jax.tree.map(spec, params)


def placed(fn, program, specs, mesh):
    """Returns value and gradients of a function on params that are sharded."""
    whole = NamedSharding(mesh, PartitionSpec())
    params, x = (specs, zero.batch_sharding(mesh)) if lax.with_sharding_constraint is CONSTRAIN else (whole, whole)
    batch = {"x": jax.device_put(program.batch["x"], x), "i": jax.device_put(program.batch["i"], whole)}
    return jax.jit(jax.value_and_grad(fn))(jax.device_put(program.params, params), batch)


def gathered(program, rng):
    mesh = reference.mesh_of(rng.choice(["8", "8", "4", "staged24", "replica", "model2"]))
    specs = some_specs(program.params, mesh, rng)
    keep = rng.random() < 0.3
    return placed(zero.gather_on_use(program.loss_fn, specs, mesh=mesh, keep_gathered=keep), program, specs, mesh)


def scattered(program, rng):
    mesh = reference.mesh_of(rng.choice(["8", "4", "staged24", "replica"]))
    specs = some_specs(program.params, mesh, rng)
    whole = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), program.params)
    options = GatherOptions(mesh=mesh, axes=axes_of(mesh), stored_unsharded=True, regather=False)
    return placed(at_uses(program.loss_fn, specs, options), program, whole, mesh)


def rematerialized(program, rng):
    policy = rng.choice(POLICIES)
    mesh = reference.mesh_of("model2" if policy.endswith("sharded") else rng.choice(["8", "4", "model2"]))
    specs = some_specs(program.params, mesh, rng)
    fn = rematerialize(program.loss_fn, policy, mesh=mesh)
    if rng.random() < 0.5:
        return placed(zero.gather_on_use(fn, specs, mesh=mesh), program, specs, mesh)
    return placed(fn, program, jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), program.params), mesh)


# How a mode transforms, of which programs.
MODES = {
    "gather": (gathered, ("plain", "plain", "plain", "loop", "scan")),
    "scatter": (scattered, ("plain", "plain", "plain", "loop", "scan")),
    "remat": (rematerialized, ("loop", "scan")),
}


def largest_difference(got, want):
    """Returns how far two trees are apart at most, relative to the largest number among all gradients."""
    scale = max((np.abs(leaf).max(initial=0) for leaf in jax.tree.leaves(want)), default=0)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    apart = [np.abs(np.asarray(a, np.float64) - b).max(initial=0) for a, b in pairs]
    return float(max(apart) / max(scale, 1e-6)) if np.all(np.isfinite(apart)) else math.inf


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How a transformed program compares.

    Its `outcome` is `same`; `refused`, as by `rematerialize`; `not finite` even if not transformed; `differs`; or
    `XLA`: it differs, but not if XLA is told no shardings, so what it computes is right, and what XLA makes of the
    shardings not, or XLA fails. Of `model_fuzzing.py`: `mean`, another loss, which a warning says is the mean of those
    of microbatches, and is.
    """

    program: Any
    mode: str  # with what it is transformed by
    outcome: str
    apart: float = 0.0
    text: str = ""  # what else is known: warnings, an error


def compare(seed, mode):
    """Transforms the program of a seed, and compares its value and gradients with those of the program as it is."""
    transform, kinds = MODES[mode]
    rng = random.Random(f"{seed} {mode}")
    this = program(seed, rng.choice(kinds))
    want = jax.jit(jax.value_and_grad(this.loss_fn))(this.params, this.batch)
    want = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), want)
    if not all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(want)):
        return Comparison(this, mode, "not finite")
    choices = rng.getrandbits(32)
    run = lambda: largest_difference(transform(this, random.Random(choices)), want)  # noqa: E731
    with quiet():
        try:
            apart = run()
        except ValueError as error:
            if "finds nothing to recompute" not in str(error):
                raise
            return Comparison(this, mode, "refused")
        except jax.errors.JaxRuntimeError:  # in the partitioner, say
            return Comparison(this, mode, "XLA", math.inf)
        if apart <= TOLERANCE:
            return Comparison(this, mode, "same", apart)
        with unittest.mock.patch.object(lax, "with_sharding_constraint", lambda x, _: x):
            return Comparison(this, mode, "XLA" if run() <= TOLERANCE else "differs", apart)


@contextlib.contextmanager
def quiet():
    """Ignores warnings: that examples meet, say."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

"""Programs of XLA:CPU run by the interpreter give what XLA:CPU's own execution of them gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import zero_jax as zero
from zero_jax.hlo import Program, parse_shape
from zero_jax.interpreter import Interpreter, NotInterpretable
from zero_jax.interpreter.values import bitcast, dtype_of, literal
from zero_jax.program.jaxprs import hlo_text
from zero_jax.verification.execution import Execution

X = np.random.default_rng(0).standard_normal((6, 8), dtype=np.float32)
Y = np.random.default_rng(1).standard_normal((8, 4), dtype=np.float32)
IDS = np.array([[3, 0], [5, 5], [9, -1]], np.int32)
IMAGE = np.random.default_rng(2).standard_normal((2, 9, 8, 4), dtype=np.float32)
KERNEL = np.random.default_rng(3).standard_normal((3, 2, 4, 6), dtype=np.float32)
CONVOLUTION = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}


def convolved(kernel, image, **options):
    return lax.conv_general_dilated(
        image, kernel, **{"window_strides": (1, 1), "padding": "SAME", **CONVOLUTION, **options}
    )


def gradients(fn):
    """The value of a function with its gradients, weighted so that none of them cancel."""

    def both(*args):
        def weighed(*args):
            weights = lambda y: jnp.cos(jnp.arange(y.size))  # noqa: E731
            return sum(jnp.vdot(weights(y), y.ravel()) for y in jax.tree.leaves(fn(*args)))

        return fn(*args), jax.grad(weighed, argnums=tuple(range(len(args))))(*args)

    return both


def counted(x):
    """A loop whose number of iterations depends on the data, with a branch in it."""
    step = lambda state: (state[0] + 1, lax.cond(state[0] % 3 == 0, jnp.sin, lambda x: 1.01 * x, state[1]))  # noqa: E731
    return lax.while_loop(lambda state: state[0] < 20 + (state[1] > 1).sum(), step, (0, x))


ELEMENTWISE = [
    jnp.sin,
    jnp.exp,
    jnp.expm1,
    jnp.log1p,
    jnp.tanh,
    lax.rsqrt,
    jnp.cbrt,
    lax.erf,
    jax.nn.gelu,
    jax.nn.sigmoid,
    lax.erf_inv,
    jnp.floor,
    jnp.round,
    jnp.sign,
    lambda x: jnp.atan2(x, 0.3),
    lambda x: x**3,
    lambda x: jnp.clip(x, -0.5, 0.2),
    lambda x: jnp.mod(x, 0.3),
    lambda x: jnp.where(x > 0, x, jnp.nan),
    lambda x: x / 0,
    jnp.isfinite,
    lambda x: lax.nextafter(x, x + 1),
    lambda x: lax.reduce_precision(x, 5, 7),
    lambda x: x.astype(jnp.bfloat16) * 1.3 + 0.1,
    lambda x: (x * 400).astype(jnp.int8),
    lambda x: (x * 1e11).astype(jnp.int32),
    lambda x: lax.bitcast_convert_type(x, jnp.uint32) >> 3,
    lambda x: lax.population_count((x * 100).astype(jnp.int32)),
    lambda x: lax.clz((x * 100).astype(jnp.int32)),
    lambda x: (x * 100).astype(jnp.int32) // 7,
    lambda x: (x * 100).astype(jnp.int32) % 7,
    lambda x: (x * 9).astype(jnp.int32) << 30,
]
CASES = {
    "elementwise": (
        lambda x: [
            fn(jnp.abs(x) if fn in (lax.rsqrt, jnp.log1p) else x / 4 if fn is lax.erf_inv else x) for fn in ELEMENTWISE
        ],
        X,
    ),
    "products": (gradients(lambda x, y: (x @ y, jnp.einsum("ij,kj->ikj", x, x), jnp.tensordot(x, x, 2))), X, Y),
    "batched product": (lambda x: jnp.einsum("bhwc,bhvc->bhwv", x, x), IMAGE),
    "reductions": (
        lambda x: [
            x.sum(0),
            x.max(1),
            x.min(),
            jnp.prod(x, 1),
            (x > 0).any(0),
            (x > 0).all(1),
            x.argmax(1),
            x.argmin(0),
            jnp.logaddexp.reduce(x, axis=1),
        ],
        X,
    ),
    "cumulative": (gradients(lambda x: (jnp.cumsum(x, 1), lax.cummax(x, axis=0), lax.cumlogsumexp(x, axis=1))), X),
    "moves": (
        lambda x: [
            x.T,
            x[::2, 1:7:3],
            x[::-1],
            jnp.pad(x, 2),
            lax.pad(x, 0.5, ((-1, 2, 1), (1, -3, 0))),
            x.reshape(4, 12),
            jnp.concatenate([x, x]),
            jnp.roll(x, 3),
            jnp.tile(x, 2),
            jnp.tril(x),
            lax.broadcasted_iota(np.int32, (3, 4), 1),
        ],
        X,
    ),
    "lookups": (
        gradients(
            lambda x: (
                x[IDS],
                jnp.take(x, IDS, axis=1, mode="clip"),
                jnp.take(x, IDS, axis=0, mode="fill", fill_value=2),
                jnp.take_along_axis(x, X.argsort(1), 1),
            )
        ),
        X,
    ),
    "writes": (
        lambda x: [
            x.at[IDS[:, 0]].add(1.5, mode="drop"),
            x.at[:, 2].set(0),
            x.at[IDS[:2, 0]].max(0.1),
            x.at[IDS[:2, 1], 3].multiply(2),
            x.at[2].apply(jnp.sin),
        ],
        X,
    ),
    "slices": (
        lambda x: (
            [lax.dynamic_slice(x, (i, 9), (3, 4)) for i in (0, 2)] + [lax.dynamic_update_slice(x, x[:2, :3], (5, -1))]
        ),
        X,
    ),
    "sorts": (
        gradients(lambda x: (jnp.sort(x, 0), *lax.top_k(x, 3)[:1], lax.sort((x, -x, x), dimension=1, num_keys=2))),
        X,
    ),
    "argsorts": (lambda x: [jnp.argsort(x, 1), lax.top_k(x, 3)[1], jnp.argsort(jnp.round(x), 0, stable=True)], X),
    "pools": (
        gradients(
            lambda x: (
                lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 2, 1), (1, 2, 2, 1), "SAME"),
                lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 1, 3, 1), "VALID"),
            )
        ),
        IMAGE,
    ),
    "convolution": (gradients(lambda k, x: convolved(k, x, window_strides=(2, 1))), KERNEL, IMAGE),
    "dilated": (
        gradients(lambda k, x: convolved(k, x, padding=((3, -1), (0, 2)), lhs_dilation=(1, 2), rhs_dilation=(2, 1))),
        KERNEL,
        IMAGE,
    ),
    "grouped": (gradients(lambda k, x: convolved(k[:, :, :2], x, feature_group_count=2)), KERNEL, IMAGE),
    "scan": (gradients(lambda x, y: lax.scan(lambda c, row: (jnp.tanh(c @ y @ y.T + row), c[0]), x, x)), X, Y),
    "while": (counted, X),
    "random": (lambda x: [jax.random.normal(jax.random.key(0), x.shape), jax.random.bits(jax.random.key(1), (5,))], X),
    "fft": (lambda x: [jnp.abs(jnp.fft.fft2(x)), jnp.fft.irfft(jnp.fft.rfft(x))], X),
    "complex": (lambda x: [jnp.abs((x + 2j * x) * 1j), jnp.angle(x + 1j), (x + 1j).conj().imag], X),
    "small floats": (
        lambda x: [
            x.astype(jnp.float8_e4m3fn).astype(jnp.float32),
            (x.astype(jnp.bfloat16) @ Y.astype(jnp.bfloat16)),
            x.astype(jnp.float16).sum(0),
        ],
        X,
    ),
    "reduced by a function": (
        lambda x: [
            lax.reduce(
                (x, x * 2), (np.float32(0), np.float32(1)), lambda a, b: (a[0] + b[1], jnp.maximum(a[1], b[0])), (1,)
            )
        ],
        X,
    ),
}


def run(compiled, *args):
    """What the interpreter makes of a program of one device."""
    results = Interpreter(Program(hlo_text(compiled))).run([np.asarray(x)[None] for x in args])
    return [x[0] for x in results]


@pytest.mark.parametrize("name", CASES)
def test_one_device(name):
    fn, *args = CASES[name]
    compiled = jax.jit(fn, keep_unused=True).lower(*args).compile()
    want = jax.tree.leaves(compiled(*args))
    got = run(compiled, *args)
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype
        tolerance = {"bfloat16": 2e-2, "float16": 2e-3}.get(str(y.dtype), 3e-5)
        x, y = (np.asarray(a, np.complex64 if np.iscomplexobj(a) else np.float64) for a in (x, y))
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def exchanges(x):
    """Every collective, over one axis and over both, of `x: [1, 4, 8]` on each of 2 x 4 devices."""
    place = lax.axis_index("data")
    looped = lax.fori_loop(0, 3, lambda _, y: lax.ppermute(y, "data", [(0, 1), (1, 2), (2, 0)]) + y, x)
    return [
        lax.psum(x, "data"),
        lax.psum(x, ("replica", "data")),
        lax.pmax(x, "replica"),
        lax.all_gather(x, "data", axis=1),
        lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True),
        lax.ppermute(x, "data", [(0, 2), (3, 1)]),
        looped,
        lax.all_to_all(x, "data", split_axis=1, concat_axis=2, tiled=True),
        x * place,
        lax.pmean(x, "data"),
        lax.cond(place > 1, jnp.sin, lambda x: x * 2, x),
        lax.fori_loop(0, place, lambda _, y: y + 1, x),
        x[:, lax.axis_index("replica")],
        lax.all_gather(x, ("replica", "data"), axis=0, tiled=True),
    ]


def test_eight_devices():
    mesh = zero.make_mesh(replica=2)
    x = np.random.default_rng(0).standard_normal((8, 4, 8), dtype=np.float32)
    spec = P(("replica", "data"))
    mapped = jax.jit(jax.shard_map(exchanges, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    compiled = mapped.lower(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=zero.batch_sharding(mesh))).compile()
    want = compiled(zero.shard_batch(x, mesh=mesh))
    for got, y in zip(Execution(compiled, mesh)(x), want, strict=True):
        assert got.differences(np.asarray(y)).max() < 1e-6


def test_a_collective_that_some_devices_do_not_reach():
    mesh = zero.make_mesh()
    alone = lambda x: lax.cond(lax.axis_index("data") > 1, lambda x: lax.psum(x, "data"), lambda x: x, x)  # noqa: E731
    spec = P("data")
    mapped = jax.jit(jax.shard_map(alone, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    compiled = mapped.lower(jax.ShapeDtypeStruct((8,), jnp.float32, sharding=zero.batch_sharding(mesh))).compile()
    with pytest.raises(RuntimeError, match="not all devices reach"):
        Execution(compiled, mesh)(np.ones(8, np.float32))


def test_what_is_not_known_is_named_with_its_line():
    compiled = jax.jit(jnp.linalg.svd).lower(np.eye(3, dtype=np.float32)).compile()
    with pytest.raises(NotInterpretable, match=r"custom call '\S+': .*custom-call"):
        run(compiled, np.eye(3, dtype=np.float32))


@pytest.mark.parametrize(
    ("source", "target", "reads"),
    [
        ("f32[2,3]{1,0}", "f32[3,2]{0,1}", lambda x: x.T),
        ("f32[2,3]{0,1}", "f32[6]{0}", lambda x: x.T.reshape(6)),
        ("f32[8,256]{1,0:T(8,128)}", "f32[8,2,128]{2,0,1:T(8,128)}", lambda x: x.reshape(8, 2, 128)),
        ("f32[8,256]{1,0:T(8,128)}", "f32[2,8,128]{2,1,0:T(8,128)}", lambda x: x.reshape(8, 2, 128).swapaxes(0, 1)),
        ("f32[4,64]{1,0:T(4,128)}", "f32[4,8]{1,0:T(4,128)}", lambda x: x[:, :8]),
        ("s32[1,2]{1,0:T(1,128)}", "s32[1]{0:T(128)}", lambda x: x[:, 0]),
        ("bf16[16,128]{1,0:T(8,128)(2,1)}", "bf16[2,8,128]{2,1,0:T(8,128)(2,1)}", lambda x: x.reshape(2, 8, 128)),
    ],
)
def test_a_bitcast_reads_the_same_memory(source, target, reads):
    old = parse_shape(source)
    x = np.arange(np.prod(old.dims)).reshape(old.dims).astype(dtype_of(old.dtype))
    np.testing.assert_array_equal(bitcast(x[None], old, parse_shape(target))[0], reads(x))


def test_constants():
    np.testing.assert_array_equal(literal("{ { 1, -2 }, { 3, inf } }", "f32[2,2]{1,0}")[0], [[1, -2], [3, np.inf]])
    np.testing.assert_array_equal(literal("{ true, false }", "pred[2]{0}")[0], [True, False])
    np.testing.assert_array_equal(literal("(1, -2)", "c64[]")[0], 1 - 2j)
    with pytest.raises(NotInterpretable, match="all constants"):
        literal("{...}", "f32[100]{0}")

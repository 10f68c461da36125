"""What goes into and comes out of a function under `gather_on_use`, other transformations, and what it cannot see."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gather_cases import CASES, mean_square, python_loop, scanned_loop
from gathering import (
    BATCH_SIZE,
    FEATURES,
    HIDDEN,
    LAYERS,
    assert_close,
    assert_sharded,
    block,
    check,
    examples,
    mlp,
    normal,
    place_batch,
    specs_of,
    stacked,
)
from jax import lax
from jax.experimental import io_callback
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from reference import mesh_of

import zero_jax as zero
from zero_jax.program.jaxprs import source_line
from zero_jax.program.subcalls import equations


@dataclasses.dataclass(frozen=True)
class Shape:
    depth: int


@pytest.mark.slow
def test_arguments_that_are_no_arrays_stay_what_they_are():
    mesh, params = mesh_of("8"), mlp()

    def loss_fn(params, x, shape, mode, nothing, times, *, dtype, train=False, mask, rate=1.0):
        assert type(times) is int and type(train) is bool and type(rate) is float
        assert nothing is None and mode == "square" and type(mask) is np.ndarray
        for _ in range(shape.depth * times if train and mask[0] else 0):
            x = rate * block(x, params).astype(dtype)
        return mean_square(x)

    args, options = (examples(), Shape(2), "square", None, 1), {"dtype": jnp.float32, "mask": np.array([True])}
    bound = functools.partial(loss_fn, train=True, **options)
    specs = specs_of(params, mesh)
    gathered = zero.gather_on_use(loss_fn, specs, mesh=mesh)
    want = jax.value_and_grad(bound)(params, *args)
    got = jax.value_and_grad(gathered)(jax.device_put(params, specs), *args, train=True, **options)
    assert_close(got, want)
    assert len(zero.gather_report(bound, specs, params, *args, mesh=mesh).events) == 2


def test_batch_that_is_closed_over():
    mesh, params = mesh_of("8"), [mlp(seed) for seed in range(8)]
    specs = specs_of(params, mesh)

    def loss_fn(x, params):
        return python_loop(None, params, x)

    @jax.jit
    def step(params, x):
        return jax.value_and_grad(zero.gather_on_use(functools.partial(loss_fn, x), specs, mesh=mesh))(params)

    got, grads = step(jax.device_put(params, specs), *place_batch((examples(),), mesh))
    want, want_grads = jax.jit(jax.value_and_grad(functools.partial(loss_fn, examples())))(params)
    assert_close(got, want)
    assert_close(grads, want_grads)
    assert_sharded(grads, specs)


def test_params_that_are_returned():
    mesh, params = mesh_of("8"), mlp()
    specs = specs_of(params, mesh)

    def fn(params, x):
        return {"loss": mean_square(block(x, params)), "params": params, "up": params["up"].T, "aux": (None, 1.0)}

    out = jax.jit(zero.gather_on_use(fn, specs, mesh=mesh))(jax.device_put(params, specs), examples())
    assert_close(out, jax.jit(fn)(params, examples()))
    assert_sharded(out["params"], specs)  # and not gathered


def test_params_that_are_no_floats():
    mesh = mesh_of("8")
    params = mlp() | {"order": np.arange(FEATURES)[::-1].copy(), "mask": np.arange(HIDDEN) % 2 == 0}
    key = jax.random.key(0)
    specs = {**dict.fromkeys(params, P("data")), "key": P()}

    def loss_fn(params, x):
        noise = jax.random.normal(params["key"], (HIDDEN,))
        return mean_square((x[:, params["order"]] @ params["up"] * params["mask"] + noise) @ params["down"])

    gathered = zero.gather_on_use(loss_fn, specs, mesh=mesh)
    shardings = jax.tree.map(functools.partial(NamedSharding, mesh), specs)
    placed = jax.device_put(params | {"key": key}, shardings)

    def value_and_grad(fn):
        def of_floats(floats, rest, x):
            return fn(rest | floats, x)

        return jax.jit(jax.value_and_grad(of_floats))

    split = ({n: p[n] for n in ("up", "down")} for p in (placed, params))
    got = value_and_grad(gathered)(next(split), placed, examples())
    assert_close(got, value_and_grad(loss_fn)(next(split), params | {"key": key}, examples()))
    events = zero.gather_report(loss_fn, specs, placed, examples(), mesh=mesh).events
    assert {event.path for event in events} == {"up", "down", "order", "mask"}


def test_narrow_params_and_gradients():
    mesh = mesh_of("8")
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), stacked(LAYERS))
    specs = specs_of(params, mesh)

    def loss_fn(params, x):
        return scanned_loop(None, params, x.astype(jnp.bfloat16)).astype(jnp.float32)

    gathered = zero.gather_on_use(loss_fn, specs, mesh=mesh, reduce_dtype=jnp.bfloat16)
    grads = jax.jit(jax.grad(gathered))(jax.device_put(params, specs), examples())
    chex.assert_trees_all_equal_shapes_and_dtypes(grads, params)
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    want = jax.jit(jax.grad(functools.partial(scanned_loop, None)))(wide, examples())
    # 8 bits of mantissa, and errors that add up over three layers and eight partial sums.
    for grad, exact in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        error = np.abs(np.asarray(grad, np.float32) - exact).max() / np.abs(exact).max()
        assert error < 0.03, error


@pytest.mark.parametrize("form", ["one", "named", "prefix", "none"])
def test_forms_of_specs(form):
    mesh, params = mesh_of("8"), {"layers": [mlp(0), mlp(1)], "bias": normal(FEATURES)}
    specs = {
        "one": P("data"),
        "named": jax.tree.map(lambda _: NamedSharding(mesh, P("data")), params),
        "prefix": {"layers": P(None, "data"), "bias": None},
        "none": None,
    }[form]

    def loss_fn(params, x):
        return python_loop(None, params["layers"], x + params["bias"])

    gathered = zero.gather_on_use(loss_fn, specs, mesh=mesh)
    assert_close(jax.jit(gathered)(params, examples()), jax.jit(loss_fn)(params, examples()))
    num_events = len(zero.gather_report(loss_fn, specs, params, examples(), mesh=mesh).events)
    assert num_events == {"one": 5, "named": 5, "prefix": 4, "none": 0}[form]


def test_errors_name_the_param():
    mesh, params = mesh_of("8"), mlp()

    def run(specs, **options):
        zero.gather_on_use(lambda params, x: block(x, params), specs, mesh=mesh, **options)(params, examples())

    with pytest.raises(ValueError, match=r"param 'down' of shape \(32, 16\).*3 entries.*2 dims"):
        run({"up": P("data"), "down": P(None, None, "data")})
    with pytest.raises(ValueError, match=r"param 'down': spec .* names the axis 'dat', but the mesh has"):
        run(P("dat"))
    with pytest.raises(ValueError, match="not a prefix"):
        run({"up": P("data")})
    with pytest.raises(ValueError, match=r"none called 'dat'; did you mean 'data'"):
        run(P("dat"), data_axes=("dat",))


def test_without_jit():
    mesh, params = mesh_of("8"), mlp()
    specs = specs_of(params, mesh)

    def loss_fn(params, x):
        return mean_square(block(x, params))

    gathered = zero.gather_on_use(loss_fn, specs, mesh=mesh)
    got = jax.value_and_grad(gathered)(jax.device_put(params, specs), examples())
    assert_close(got, jax.value_and_grad(loss_fn)(params, examples()))


# --- other transformations -------------------------------------------------------------------------------------------


def both_ways(transform, name="loop, remat"):
    """Applies a transformation to a case and to its gathered form, each jitted, and returns both results."""
    case, mesh = CASES[name], mesh_of("8")
    specs = specs_of(case.params, mesh)
    gathered = zero.gather_on_use(case.fn, specs, mesh=mesh)
    placed = jax.device_put(case.params, specs), *place_batch(case.args, mesh)
    return jax.jit(transform(gathered))(*placed), jax.jit(transform(case.fn))(case.params, *case.args)


@pytest.mark.parametrize("name", ["loop, kept", "scan, remat", "tied_embedding"])
def test_jvp(name):
    def transform(fn):
        return lambda params, *args: jax.jvp(lambda params: fn(params, *args), (params,), (params,))

    assert_close(*both_ways(transform, name))


@pytest.mark.parametrize("name", ["loop, kept", pytest.param("scan, kept", marks=pytest.mark.slow), "lora"])
def test_hessian_vector_product(name):
    def transform(fn):
        def product(params, *args):
            gradient = jax.grad(lambda params: fn(params, *args))
            return jax.jvp(gradient, (params,), (params,))[1]

        return product

    assert_close(*both_ways(transform, name))


def test_while_loop_in_forward_mode():
    mesh, params = mesh_of("8"), {"w": normal(FEATURES, FEATURES)}

    def fn(params, x):
        x, _ = lax.while_loop(
            lambda c: c[1] < 3, lambda c: (jnp.tanh(c[0] @ params["w"]), c[1] + 1), (x, x.size // 512)
        )
        return mean_square(x @ params["w"])

    specs = specs_of(params, mesh)
    gathered = zero.gather_on_use(fn, specs, mesh=mesh)

    def transform(fn):
        return jax.jit(lambda params, x: jax.jvp(lambda params: fn(params, x), (params,), (params,)))

    got = transform(gathered)(jax.device_put(params, specs), examples())
    assert_close(got, transform(fn)(params, examples()))
    report = zero.gather_report(fn, specs, params, examples(), mesh=mesh)
    assert [event.reason for event in report.early] == ["before while, which is not looked into"]


def test_vmap():
    mesh = mesh_of("8")
    ensemble = stacked(2)  # two models, not two layers
    specs = {"up": P(None, "data"), "down": P("data")}

    def loss_fn(params, x):
        return mean_square(block(x, params))

    def grads(fn):
        return jax.jit(jax.vmap(jax.value_and_grad(fn), in_axes=(0, None)))

    got = grads(zero.gather_on_use(loss_fn, specs, mesh=mesh))(ensemble, examples())
    assert_close(got, grads(loss_fn)(ensemble, examples()))


def test_vmap_over_examples():
    def transform(fn):
        return lambda params, x: jax.vmap(lambda x: jax.grad(fn)(params, x[None])["up"].sum())(x)

    assert_close(*both_ways(transform, "cond"))


# --- what cannot be seen through -------------------------------------------------------------------------------------


def manual(x, w):
    """A matrix product in a shard_map, which wants the whole of `w` on each device."""
    specs = {"in_specs": (P("data"), P()), "out_specs": P("data")}
    return jax.shard_map(lambda x, w: jnp.tanh(x @ w), mesh=mesh_of("8"), **specs)(x, w)


def interpreted(x, w):
    from jax.experimental import pallas as pl

    def kernel(x_ref, w_ref, out_ref):
        out_ref[...] = x_ref[...] * w_ref[...]

    call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)
    return x @ w + call(lax.stop_gradient(x), lax.stop_gradient(w))  # as it is, it has no derivative


def fixed(x, w):
    whole = NamedSharding(mesh_of("8"), P())
    return jax.jit(jnp.matmul, in_shardings=(NamedSharding(mesh_of("8"), P("data")), whole))(x, w)


@pytest.mark.parametrize(
    ("opaque", "reason"),
    [(manual, "before shard_map"), (interpreted, "before pallas_call"), (fixed, "before jit")],
)
def test_falls_back_to_an_early_gather_and_says_so(opaque, reason):
    params = {"w": normal(FEATURES, FEATURES), "head": normal(FEATURES, HIDDEN)}

    def loss_fn(params, x):
        return mean_square(opaque(x, params["w"]) @ params["head"])

    report = check(loss_fn, params, examples(), mesh=mesh_of("8"))
    (event,) = report.early
    assert event.path == "w" and event.reason.startswith(reason)
    assert event.gathered_bytes == 4 * FEATURES * FEATURES
    assert "test_gather_calls.py" in event.where
    assert str(report).splitlines()[1].startswith("EARLY"), str(report)


def test_side_effects_happen_once():
    mesh, params, seen = mesh_of("8"), mlp(), []
    specs = specs_of(params, mesh)

    def loss_fn(params, x):
        jax.debug.callback(lambda w: seen.append(("param", w.shape)), params["up"])
        io_callback(lambda w: seen.append(("ordered", w.shape)), None, lax.stop_gradient(params["down"]), ordered=True)
        jax.debug.callback(lambda y: seen.append(("use", y.shape)), x @ params["up"])
        return mean_square(block(x, params))

    jax.jit(jax.grad(zero.gather_on_use(loss_fn, specs, mesh=mesh)))(jax.device_put(params, specs), examples())
    jax.effects_barrier()
    up, down = (FEATURES, HIDDEN), (HIDDEN, FEATURES)
    assert sorted(seen) == [("ordered", down), ("param", up), ("use", (BATCH_SIZE, HIDDEN))]


def test_one_trace_per_compile():
    mesh, params = mesh_of("8"), stacked(LAYERS)
    specs = specs_of(params, mesh)
    traces = {"loss": 0, "block": 0}

    def counted_block(x, params):
        traces["block"] += 1
        return block(x, params)

    def loss_fn(params, x):
        traces["loss"] += 1
        return scanned_loop(lambda _: jax.checkpoint(counted_block), params, x)

    step = jax.jit(jax.value_and_grad(zero.gather_on_use(loss_fn, specs, mesh=mesh)))
    placed = jax.device_put(params, specs), *place_batch((examples(),), mesh)
    step(*placed)
    plain = dict(traces)
    assert plain == {"loss": 1, "block": 1}
    step(*placed)
    assert traces == plain
    assert step._cache_size() == 1


def test_prevent_cse_by_argument():
    """Of an argument made of two params, each array has what the argument has."""
    body = jax.checkpoint(lambda w, x: jnp.tanh(x @ w) @ w.T, prevent_cse=(True, False))

    def loss_fn(params, x):
        return mean_square(body(params["up"] @ params["down"], body(params["up"] @ params["down"], x)))

    assert not check(loss_fn, mlp(), examples(), mesh=mesh_of("8")).early


@pytest.mark.parametrize(
    "fields",
    [{"stage": 1}, {"stage": 3}, {"stage": 3, "num_microbatches": 2}, {"stage": 3, "remat": "full"}],
    ids=str,
)
def test_errors_of_a_trace_name_the_loss(fields):
    def users_own_loss(params, batch):
        return batch["x"].sum() if params["up"].sum() > 0 and batch["x"].sum() > 0 else params["up"].sum()

    mesh, config = mesh_of("8"), zero.ZeroConfig(**fields)
    state = zero.init_state(mlp(), optax.sgd(0.1), jax.random.key(0), mesh=mesh, config=config)
    step = zero.make_train_step(users_own_loss, optax.sgd(0.1), mesh=mesh, config=config)
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"users_own_loss at .*test_gather_calls.py"):
        step(state, {"x": examples()})
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"argument (params|batch)\['(up|x)'\]"):
        step(state, {"x": examples()})


def test_slices_that_straddle_shards():
    """XLA's own gradient of `a[20:22]` on shards of three rows is zero, with plain shardings too."""
    mesh, rows = mesh_of("8"), [(0, 2), (2, 4), (5, 7), (11, 13), (20, 22), (2, 7)]
    params = {f"{a}:{b}": normal(24, 8, seed=a) for a, b in rows} | {"pad": normal(24, 8)}
    specs = jax.tree.map(lambda _: NamedSharding(mesh, P("data")), params)

    def loss_fn(params, x):
        parts = [x[:, :8] @ params[f"{a}:{b}"][a:b].T for a, b in rows]
        parts.append(x[:, :8] @ lax.pad(params["pad"], 0.0, ((-20, -2, 0), (0, 0, 0))).T)
        return mean_square(jnp.concatenate(parts, axis=1))

    report = check(loss_fn, params, examples(), mesh=mesh, specs=specs)
    assert {event.path for event in report.events if "gathered first" in event.reason} == set(params)


def test_writes_and_pools_along_a_sharded_dim():
    """XLA's own gradients of them are wrong on shards, with plain shardings too."""
    mesh, uses = mesh_of("8"), {
        "set": lambda w: w.at[:, 3].set(0.0),
        "set to an input": lambda w: w.at[:, 3].set(w[:, 5]),
        "multiply": lambda w: w.at[:, 3].multiply(2.0),
        "pool": lambda w: lax.reduce_window(w, -jnp.inf, lax.max, (3, 3), (1, 1), "SAME"),
    }  # fmt: skip
    params = {name: normal(FEATURES, FEATURES, seed=i) for i, name in enumerate(uses)}
    specs = jax.tree.map(lambda _: NamedSharding(mesh, P(None, "data")), params)
    loss = lambda params, x: mean_square(sum(jnp.tanh(x @ use(params[name])) for name, use in uses.items()))  # noqa: E731
    check(loss, params, examples(), mesh=mesh, specs=specs)


@pytest.mark.parametrize("options", [{}, {"out_shardings": NamedSharding(mesh_of("8"), P())}], ids=["jit", "sharded"])
def test_a_loop_gathers_once_what_it_uses_through_a_call(options):
    swapped = jax.jit(lambda w: w.T, **options)

    def loss(params, x):
        return lax.scan(lambda x, _: (jnp.tanh(x @ swapped(params["w"])), None), x, length=3)[0].mean()

    report = check(loss, {"w": normal(FEATURES, FEATURES)}, examples(), mesh=mesh_of("8"))
    assert ["once before 3 iterations" in event.reason for event in report.events] == [True]


def test_products_with_params_have_their_lines_and_names():
    mesh, params = mesh_of("8"), [mlp(seed) for seed in range(4)]

    def named_block(x, params):
        with jax.named_scope("hidden"):
            x = x @ params["up"]
        return x @ params["down"]

    def loss_fn(params, x):
        for each in params:
            x = named_block(x, each)
        return mean_square(x)

    gathered = zero.gather_on_use(loss_fn, specs_of(params, mesh), mesh=mesh)
    jaxpr = jax.make_jaxpr(jax.grad(gathered))(params, examples())
    products = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "dot_general"]
    assert len(products) == 3 * 8 - 1  # forward, and backward for the param and, but for the first, for the input
    assert all("named_block" in source_line(eqn) for eqn in products)
    assert [str(eqn.source_info.name_stack).count("hidden") for eqn in products[:8]] == [1, 0] * 4

"""Python loops over layers that are not quite equal: every layer is rematerialized, or the report says why not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import mesh_of

from zero_jax.transforms.remat.transform import remat_report, rematerialize

BATCH, TOKENS, WIDTH, EXPERTS = 8, 8, 16, 4
# Bytes of the residual stream on one of 8 shards of the batch, and of what may be running beside it.
STREAM_BYTES, SCALAR_BYTES = BATCH * TOKENS * WIDTH * 4 // 8, 32


def normal(seed, *shape):
    return (0.3 * np.random.default_rng([seed, *shape]).standard_normal(shape)).astype(np.float32)


def dense_params(seed):
    return {"scale": np.ones(WIDTH, np.float32), "query": normal(seed, WIDTH, WIDTH)} | {
        "up": normal(seed, WIDTH, 2 * WIDTH),
        "down": normal(seed, 2 * WIDTH, WIDTH),
    }


def moe_params(seed):
    shared = {name: dense_params(seed)[name] for name in ("scale", "query")}
    up, down = normal(seed, EXPERTS, WIDTH, 2 * WIDTH), normal(seed, EXPERTS, 2 * WIDTH, WIDTH)
    return shared | {"router": normal(seed, WIDTH, EXPERTS), "up": up, "down": down}


def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def attention(x, p):
    return x + jax.nn.softmax((x @ p["query"]) @ jnp.swapaxes(x, -1, -2)) @ x


def dense(x, p):
    x = attention(x, p)
    return x + jax.nn.gelu(norm(x, p["scale"]) @ p["up"]) @ p["down"]


def moe(x, p):
    """A layer of experts, all of which see all tokens; returns its balance loss, too."""
    x = attention(x, p)
    y = norm(x, p["scale"])
    weights = jax.nn.softmax(y @ p["router"])
    hidden = jax.nn.gelu(jnp.einsum("btw,ewh->bteh", y, p["up"]))
    load = weights.mean((0, 1))
    return x + jnp.einsum("bteh,ehw,bte->btw", hidden, p["down"], weights), EXPERTS * jnp.sum(load * load)


def examples():
    return jnp.asarray(normal(99, BATCH, TOKENS, WIDTH))


def model(layers):
    ends = {"norm": np.ones(WIDTH, np.float32), "head": normal(77, WIDTH, 3 * WIDTH), "embed": normal(78, WIDTH, WIDTH)}
    return ends | {"layers": layers}


def moes(num):
    return model([moe_params(seed) for seed in range(num)])


def finish(params, x, aux):
    return jnp.mean((norm(x, params["norm"]) @ params["head"]) ** 2) + 0.01 * aux


def mixture(add, *, start=0.0, layer=moe, make=moes):
    """Returns a maker of params and a loss function that carries a sum of the layers' balance losses."""

    def loss_fn(params, x):
        x, total = x @ params["embed"], start
        for i, p in enumerate(params["layers"]):
            x, aux = layer(x, p)
            total = add(total, aux, i)
        return finish(params, x, total)

    return make, loss_fn


def summed(params, x):
    x, each = x @ params["embed"], []
    for p in params["layers"]:
        x, aux = moe(x, p)
        each.append(aux)
    return finish(params, x, sum(each))


def of_metrics(params, x):
    x, metrics = x @ params["embed"], {}
    for p in params["layers"]:
        x, aux = moe(x, p)
        for name, value in {"balance": aux, "size": jnp.mean(x**2)}.items():
            metrics[name] = metrics.get(name, 0.0) + value
    return finish(params, x, metrics["balance"] + metrics["size"])


def without_ends(params, x):
    """Nothing before the first layer, and no params after the last."""
    total = 0.0
    for p in params["layers"]:
        x, aux = moe(x, p)
        total += aux
    return jnp.mean(x**2) + total


def in_another_order(params, x):
    """The first layer takes `[features, batch, tokens]`, as of an embedding; those after it another order."""
    x = jnp.einsum("btw,wv->vbt", x, params["embed"])
    for p in params["layers"]:
        square = jnp.mean(x**2, axis=0 if x.shape[0] == WIDTH and x.shape[1] == BATCH else -1)
        x = x.transpose(1, 2, 0) if x.shape[0] == WIDTH and x.shape[1] == BATCH else x
        y = x * jax.lax.rsqrt(square + 1e-6)[..., None] * p["scale"]
        x = x + jnp.einsum("bteh,ehw->btw", jax.nn.gelu(jnp.einsum("btw,ewh->bteh", y, p["up"])), p["down"])
    return finish(params, x, 0.0)


def carried_beside(params, x):
    """The residual stream is carried beside the last layer's result, and none is there for the first layer."""
    y, stream = x @ params["embed"], None
    for p in params["layers"]:
        stream = y if stream is None else stream + y
        hidden = norm(stream, p["scale"])
        y = dense(hidden, p | {"up": p["up"][0], "down": p["down"][0]})
    return finish(params, stream + y, 0.0)


def of_either(params, x):
    """Layers of two kinds, the dense ones without a balance loss."""
    x, total = x @ params["embed"], 0.0
    for p in params["layers"]:
        if "router" in p:
            x, aux = moe(x, p)
            total += aux
        else:
            x = dense(x, p)
    return finish(params, x, total)


def kinds(pattern):
    make = {"d": dense_params, "m": moe_params}
    return lambda _: model([make[kind](i) for i, kind in enumerate(pattern)])


def first_is_none(total, aux, _):
    return aux if total is None else total + aux


def weighted(total, aux, i):
    return total + aux * (i + 1) / 8


LOOPS = {
    "running sum": mixture(lambda total, aux, _: total + aux),
    "array": mixture(lambda total, aux, _: total + aux, start=jnp.zeros(())),
    "integer": mixture(lambda total, aux, _: total + aux, start=0),
    "none first": mixture(first_is_none, start=None),
    "schedule": mixture(weighted),
    "maximum": mixture(lambda total, aux, _: jnp.maximum(total, aux), start=-jnp.inf),
    "first is weighted otherwise": mixture(lambda total, aux, i: total + (aux * 0.5**i if i else aux)),
    "last is not added": mixture(lambda total, aux, i: total + aux if i < 2 else total),
    "jit": mixture(lambda total, aux, _: total + aux, layer=jax.jit(moe)),
    "jax.checkpoint": mixture(first_is_none, start=None, layer=jax.checkpoint(moe)),
    "list": (moes, summed),
    "metrics": (moes, of_metrics),
    "without ends": (moes, without_ends),
    "another order": (moes, in_another_order),
    "carried beside": (moes, carried_beside),
}
QUICK = ("running sum", "another order")
# By the kinds of the layers: what the blocks are. Layers of experts may be alike enough to dense ones to stand alone.
PATTERNS = {"dmm": 3, "dmmmm": 5, "mdmd": 2, "dmdm": 2, "mdmdm": 3, "ddmmm": 5, "mmmd": 4}


def report_of(make, loss_fn, num, policy="full"):
    return remat_report(loss_fn, make(num), examples(), remat=policy, mesh=mesh_of("8"))


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LOOPS]
)
def test_no_layer_is_left_out(name):
    for num in (2, 3, 6):
        report = report_of(*LOOPS[name], num)
        assert sum(row.times for row in report.regions) == num, report
        assert not report.left, report
        # What enters the first layer is the batch where nothing is before it.
        assert report.kept.device_bytes <= num * (STREAM_BYTES + SCALAR_BYTES), report
        assert report.without.device_bytes > 10 * report.kept.device_bytes, report


@pytest.mark.parametrize("pattern", ["dmm", *(pytest.param(p, marks=pytest.mark.slow) for p in PATTERNS if p != "dmm")])
def test_layers_of_two_kinds(pattern):
    report = report_of(kinds(pattern), of_either, 0)
    assert sum(row.times for row in report.regions) == PATTERNS[pattern], report
    assert not report.left, report
    assert report.without.device_bytes > 10 * report.kept.device_bytes, report


@pytest.mark.parametrize(
    "name", ["metrics", *(pytest.param(n, marks=pytest.mark.slow) for n in LOOPS if n != "metrics")]
)
def test_values_and_gradients_are_the_same(name):
    make, loss_fn = LOOPS[name]
    params, x = make(2), examples()
    transformed = rematerialize(loss_fn, "full", mesh=mesh_of("8"))
    both = jax.jit(lambda *args: [jax.value_and_grad(fn)(*args) for fn in (loss_fn, transformed)])(params, x)
    for want, got in zip(*map(jax.tree.leaves, both), strict=True):
        # Sums over devices in another order, of numbers of the size of the largest.
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * max(float(jnp.abs(want).max()), 1e-6), err_msg=name)


def test_a_layer_that_is_too_different_is_listed():
    """It uses params like the others, but begins with its experts, and what it makes is twice as wide."""

    def loss_fn(params, x):
        x, last = x @ params["embed"], params["last"]
        for p in params["layers"]:
            x, _ = moe(x, p)
        hidden = jnp.einsum("btw,ewh->bteh", jnp.sin(x), last["up"])
        x = jnp.einsum("bteh,ehv,bte->btv", jnp.tanh(hidden), last["down"], x @ last["router"])
        return jnp.mean(x**2)

    last = moe_params(9) | {"down": normal(9, EXPERTS, 2 * WIDTH, 2 * WIDTH)}
    report = report_of(lambda num: moes(num) | {"last": last}, loss_fn, 2)
    assert sum(row.times for row in report.regions) == 2
    assert len(report.left) == 1 and "test_remat_loops.py" in report.left[0].where, report
    assert "differs too much" in str(report)


@pytest.mark.slow
def test_a_model_of_one_layer_is_refused():
    with pytest.raises(
        ValueError, match=r"finds nothing to recompute in .*test_remat_loops.py:\d+ \(mixture.*loss_fn\)"
    ):
        rematerialize(LOOPS["running sum"][1], "full", mesh=mesh_of("8"))(moes(1), examples())


def chunked(params, x):
    """JAX traces a `jax.checkpoint` that is the body of a scan with no line of the user's."""
    return jax.lax.scan(jax.checkpoint(lambda total, x: (total + jnp.sum(x @ params["embed"]), None)), 0.0, x)[0]


def without_blocks(params, x):
    return jnp.mean(x @ params["embed"])


@pytest.mark.parametrize("policy", ["full", "attention", "own_offloaded", "names:a"])
@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit, functools.partial], ids=["plain", "jit", "partial"])
def test_a_refusal_names_a_line(policy, wrap):
    with pytest.raises(ValueError, match=r"test_remat_loops\.py:\d+ \(without_blocks\)"):
        rematerialize(wrap(without_blocks), policy, mesh=mesh_of("8"))(moes(0), examples())


@pytest.mark.parametrize("policy", ["full", "attention", "none"])
def test_a_report_names_lines(policy):
    report = report_of(moes, chunked, 0, policy)
    assert report.left and all("test_remat_loops.py" in item.where for item in report.left), report


# Layers that share their weights


def tied(num, repeat):
    """Returns a loss whose layers, made by `repeat(layer, x)`, all have the same params."""

    def loss_fn(params, x):
        x = repeat(lambda x: dense(x, params["layers"][0]), x @ params["embed"])
        return finish(params, x, 0.0)

    return lambda _: model([dense_params(0)]), loss_fn, num


def python_loop(layer, x):
    for _ in range(6):
        x = layer(x)
    return x


def with_dropout(split, layer, x):
    def body(x, key):
        return layer(x * jax.random.bernoulli(key, 0.9, x.shape)), None

    return jax.lax.scan(body, x, split(jax.random.key(0), 6))[0]


def by_scan(layer, x):
    return jax.lax.scan(lambda x, _: (layer(x), None), x, None, length=6)[0]


def recycled(params, x):
    """Two layers, one after the other, again and again: they are the blocks, not both together."""
    layers = jax.tree.map(lambda *xs: jnp.stack(xs), *params["layers"])
    cycle = lambda _, x: jax.lax.scan(lambda x, p: (dense(x, p), None), x, layers)[0]  # noqa: E731
    return finish(params, jax.lax.fori_loop(0, 3, cycle, x @ params["embed"]), 0.0)


def from_latents(params, x):
    """What is carried begins as a param, and meets the batch in each turn."""
    body = lambda z, _: (dense(z + x, params["layers"][0]), None)  # noqa: E731
    return finish(params, jax.lax.scan(body, params["start"], None, length=6)[0], 0.0)


TIED = {
    "python": tied(6, python_loop),
    "scan": tied(6, by_scan),
    "fori": tied(6, lambda layer, x: jax.lax.fori_loop(0, 6, lambda _, x: layer(x), x)),
    "keys": tied(6, functools.partial(with_dropout, jax.random.split)),
    "raw keys": tied(6, functools.partial(with_dropout, lambda key, n: jax.random.key_data(jax.random.split(key, n)))),
    "checkpoint": tied(6, lambda layer, x: by_scan(jax.checkpoint(layer), x)),
    "checkpoint around": tied(6, jax.checkpoint(by_scan, static_argnums=0)),
    "recycled": (lambda _: model([dense_params(0), dense_params(1)]), recycled, 6),
    "latents": (
        lambda _: model([dense_params(0)]) | {"start": normal(3, BATCH, TOKENS, WIDTH)},
        from_latents,
        6,
    ),
}


def in_periods(num_turns, size, checkpoint=lambda layer: layer):
    """Returns a scan over periods of some layers, the last of which is unlike the others."""
    layers = [checkpoint(dense)] * (size - 1) + [checkpoint(lambda x, p: dense(jnp.sin(x), p))]
    params = [dense_params(seed) for seed in range(size)]
    stacks = jax.tree.map(lambda *xs: jnp.stack([jnp.stack(xs)] * num_turns), *params)

    def turn(x, of_layers):
        for i, layer in enumerate(layers):
            x = layer(x, jax.tree.map(lambda w, i=i: w[i], of_layers))
        return x, None

    return {"layers": stacks}, lambda params, x: jnp.sum(jax.lax.scan(turn, x, params["layers"])[0] ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("own", [{}, {"checkpoint": functools.partial(jax.checkpoint, prevent_cse=False)}])
def test_the_layers_of_a_scan_over_periods_are_its_blocks(own):
    params, loss_fn = in_periods(2, 3, **own)
    report = remat_report(loss_fn, params, examples(), remat="full", mesh=mesh_of("8"))
    assert sum(region.times for region in report.regions) == 6, report
    again, plain = (jax.value_and_grad(f) for f in (rematerialize(loss_fn, "full", mesh=mesh_of("8")), loss_fn))
    # A barrier in each keeps the scheduler from recomputing the layers of a turn all at once.
    num_barriers = str(jax.jit(again).lower(params, examples()).as_text()).count("optimization_barrier")
    assert num_barriers >= 3
    jax.tree.map(np.testing.assert_array_equal, again(params, examples()), plain(params, examples()))


def test_a_scan_of_many_turns_over_periods_is_cut_where_that_takes_less_memory():
    """Turns that keep more inputs of their layers than a layer makes values are blocks as they are."""
    params, loss_fn = in_periods(64, 3)
    report = remat_report(loss_fn, params, examples(), remat="full", mesh=mesh_of("8"))
    assert [region.times for region in report.regions] == [64], report


QUICK_TIED = ("scan", "keys", "checkpoint", "checkpoint around")


@pytest.mark.parametrize(
    "name", [name if name in QUICK_TIED else pytest.param(name, marks=pytest.mark.slow) for name in TIED]
)
def test_layers_that_share_their_weights_are_blocks(name):
    make, loss_fn, num = TIED[name]
    params, x, mesh = make(0), examples(), mesh_of("8")
    report = remat_report(loss_fn, params, x, remat="full", mesh=mesh)
    assert sum(row.times for row in report.regions) == num and not report.left, report
    assert report.kept.device_bytes <= num * (STREAM_BYTES + SCALAR_BYTES), report
    assert report.without.device_bytes > 10 * report.kept.device_bytes, report
    transformed = rematerialize(loss_fn, "full", mesh=mesh)
    grads = [jax.jit(jax.value_and_grad(fn)).lower(params, x).compile() for fn in (loss_fn, transformed)]
    results = [jax.tree.leaves(compiled(params, x)) for compiled in grads]
    for want, got in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * max(float(jnp.abs(want).max()), 1e-6))
    temporaries = [compiled.memory_analysis().temp_size_in_bytes for compiled in grads]
    # XLA:CPU computes what a Python loop computes again once (test_remat_proof.py has the TPU's program).
    if name != "python" and "checkpoint" not in name:
        assert temporaries[1] < 0.7 * temporaries[0], temporaries


def over_time(params, x):
    step = lambda state, x: (jnp.tanh(state @ params["embed"] + x), None)  # noqa: E731
    return jnp.mean(jax.lax.scan(step, x[:, 0], jnp.swapaxes(x, 0, 1))[0])


def in_chunks(params, x):
    def add(i, total):
        return total + jnp.square(jax.lax.dynamic_slice_in_dim(x, i, 1) @ params["embed"])

    return jnp.mean(jax.lax.fori_loop(0, BATCH, add, jnp.zeros((1, TOKENS, WIDTH))))


@pytest.mark.parametrize("loss_fn", [over_time, in_chunks])
def test_loops_that_take_new_data_in_each_turn_are_no_layers(loss_fn):
    with pytest.raises(ValueError, match="no loop that applies the same params again and again to what it carries"):
        rematerialize(loss_fn, "full", mesh=mesh_of("8"))(moes(0), examples())


def test_equal_blocks_are_traced_once():
    def loss(params, x):
        for w in params:
            x = x + jax.nn.softmax(jnp.sin(x) @ w)
        return (x**2).mean()

    params, x = [jnp.ones((8, 8))] * 4, jnp.ones((4, 8))
    closed = jax.make_jaxpr(rematerialize(loss, "full", mesh=mesh_of("8")))(params, x)
    regions = [eqn.params["jaxpr"] for eqn in closed.jaxpr.eqns if eqn.primitive.name == "remat2"]
    assert len(regions) == 4 and len({*map(id, regions[1:])}) == 1  # the first takes the batch, which is kept anyway

"""Gathers and gradients of a Python loop's blocks in order: the same values, and ties where blocks begin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gathering import BATCH_SIZE, FEATURES, HIDDEN, block, check, examples, mlp, normal, specs_of, stacked
from reference import mesh_of

import zero_jax as zero
from zero_jax.models import gpt
from zero_jax.program import jaxprs
from zero_jax.transforms.gather.ordering import order, order_p

LAYERS = 4


def layers(num=LAYERS):
    return [mlp(seed) for seed in range(num)]


def loop(params, x, layer=block):
    for p in params:
        x = layer(x, p)
    return x


def plain(params, x):
    return jnp.mean(loop(params, x) ** 2)


def with_head(params, x):
    return jnp.mean(jnp.tanh(loop(params["layers"], x @ params["in"]) @ params["in"].T @ params["out"]) ** 2)


def checkpointed(params, x):
    return jnp.mean(loop(params, x, jax.checkpoint(block)) ** 2)


def jitted(params, x):
    return jnp.mean(loop(params, x, jax.jit(block)) ** 2)


def inside_a_jit(params, x):
    return jnp.mean(jax.jit(loop)(params, x) ** 2)


def cast_before(params, x):
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), params)
    return jnp.mean(loop(half, x) ** 2) + 1e-3 * sum(jnp.sum(p["up"] ** 2) for p in params)


def regularized(params, x):
    return jnp.mean(loop(params, x) ** 2) + 1e-3 * sum(jnp.sum(w**2) for w in jax.tree.leaves(params))


def slices(params, x):
    return jnp.mean(loop([jax.tree.map(lambda w, i=i: w[i], params) for i in range(LAYERS)], x) ** 2)


def sliced_in_turn(params, x):
    for i in range(LAYERS):
        x = block(x, jax.tree.map(lambda w, i=i: w[i], params))
    return jnp.mean(x**2)


def transposed(params, x):
    return jnp.mean(loop(params, x, lambda x, p: block(x, {"up": p["up"].T, "down": p["down"].T})) ** 2)


def low_rank(params, x):
    def layer(x, p):
        return x + jnp.tanh(x @ (p["w"] + p["a"] @ p["b"]))

    return jnp.mean(loop(params, x, layer) ** 2)


def skips(params, x):
    """As in a U-Net: the second half takes what the first half made, last made first taken."""
    kept = []
    for p in params[: LAYERS // 2]:
        kept.append(x)
        x = block(x, p)
    for p in params[LAYERS // 2 :]:
        x = block(x + kept.pop(), p)
    return jnp.mean(x**2)


def dense(params, x):
    """As in a DenseNet: every layer takes what all layers before it made."""
    seen = x
    for p in params:
        x = block(seen, p)
        seen = seen + x
    return jnp.mean(seen**2)


def partly_shared(params, x):
    for p in params:
        x = block(block(x, p), params[0] | {"up": p["up"]})
    return jnp.mean(x**2)


def stages(params, x):
    x = loop(params["first"], x) @ params["between"]
    return jnp.mean(jnp.sin(loop(params["second"], x, lambda x, p: x + jnp.sin(x @ p["w"]))) ** 2)


def square(seed):
    return {"w": normal(FEATURES, FEATURES, seed=seed)}


HEAD = {"layers": layers(), "in": normal(FEATURES, FEATURES), "out": normal(FEATURES, HIDDEN)}
LOW_RANK = [square(i) | {"a": normal(FEATURES, 8, seed=i), "b": normal(8, FEATURES, seed=i)} for i in range(LAYERS)]
STAGES = {"first": layers(3), "second": [square(i) for i in range(3)], "between": normal(FEATURES, FEATURES, seed=9)}
CASES = {
    "plain": (plain, layers()),
    "with_head": (with_head, HEAD),
    "checkpointed": (checkpointed, layers()),
    "jitted": (jitted, layers()),
    "inside_a_jit": (inside_a_jit, layers()),
    "cast_before": (cast_before, layers()),
    "regularized": (regularized, layers()),
    "slices": (slices, stacked(LAYERS)),
    "sliced_in_turn": (sliced_in_turn, stacked(LAYERS)),
    "transposed": (transposed, [{name: w.T for name, w in p.items()} for p in layers()]),
    "low_rank": (low_rank, LOW_RANK),
    "skips": (skips, layers()),
    "dense": (dense, layers()),
    "partly_shared": (partly_shared, layers()),
    "stages": (stages, STAGES),
}
# The head is tied to what enters the last layer; the third layer of `skips` differs from those before it.
NUM_TIES = {"with_head": LAYERS, "skips": 2}
QUICK = ("with_head", "checkpointed", "sliced_in_turn", "stages")


def ties(jaxpr):
    """Yields the shapes that each barrier holds together, wherever it is, of what is read after it."""
    read = {*jaxpr.outvars, *(var for eqn in jaxpr.eqns for var in jaxprs.variables(eqn))}
    for eqn in jaxpr.eqns:
        if eqn.primitive is order_p and eqn.params["forward"]:
            yield [var.aval.shape for var in eqn.outvars if var in read]
        for inner in jaxprs.inner_jaxprs(eqn):
            yield from ties(jaxprs.open_jaxpr(inner)[0])


def ties_of(fn, params, *args, transform=lambda fn: fn):
    specs = specs_of(params, mesh_of("8"))
    gathered = zero.gather_on_use(fn, specs, mesh=mesh_of("8"))
    return list(ties(jaxprs.open_jaxpr(jax.make_jaxpr(transform(gathered))(params, *args))[0]))


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES])
def test_equals_the_untransformed_function(name):
    fn, params = CASES[name]
    assert not check(fn, params, examples(), mesh=mesh_of("8")).early


@pytest.mark.parametrize("name", [name for name in CASES if name != "stages"])
def test_the_params_of_the_next_block_are_tied_to_what_enters_a_block(name):
    fn, params = CASES[name]
    found = ties_of(fn, params, examples())
    assert len(found) == NUM_TIES.get(name, LAYERS - 1)
    assert all((BATCH_SIZE, FEATURES) in shapes for shapes in found)
    # What two products use, as `in` of both ends or what a block uses twice, is gathered once, and tied to no block.
    assert all(len(shapes) >= (2 if name in ("with_head", "partly_shared") else 3) for shapes in found)
    assert not any(shape[0] == LAYERS for shapes in found for shape in shapes)  # a layer's slices, not the stack


def test_gradients_are_tied_to_what_leaves_a_block_backwards():
    forward = ties_of(plain, layers(), examples())
    both = ties_of(plain, layers(), examples(), transform=lambda fn: jax.grad(fn, argnums=(0, 1)))
    assert len(forward) == LAYERS - 1
    assert len(both) == LAYERS - 1 + LAYERS
    assert {tuple(sorted(shapes)) for shapes in both} == {tuple(sorted(shapes)) for shapes in forward}


def test_several_runs_are_tied_to_what_lies_between():
    shapes = [sorted(shape for shape in tie) for tie in ties_of(stages, STAGES, examples())]
    # Two of the first run, one for the weight between, one for the first of the second run, two of that.
    assert len(shapes) == 6
    assert shapes[2] == [(BATCH_SIZE, FEATURES), (FEATURES, FEATURES)]


def test_frozen_params_get_no_gradient():
    """A tie makes no zeros for what is not differentiated."""
    specs = specs_of(layers(), mesh_of("8"))
    gathered = zero.gather_on_use(plain, specs, mesh=mesh_of("8"))

    def ups(params):
        return [p["up"] for p in params]

    def loss(ups, params, x):
        return gathered([p | {"up": up} for p, up in zip(params, ups, strict=True)], x)

    jaxpr = jax.make_jaxpr(jax.grad(loss))(ups(layers()), layers(), examples())
    found = list(ties(jaxprs.open_jaxpr(jaxpr)[0]))
    forward, backward = found[: LAYERS - 1], found[LAYERS - 1 :]
    assert all((HIDDEN, FEATURES) in shapes for shapes in forward)
    assert backward
    assert not any((HIDDEN, FEATURES) in shapes for shapes in backward)


def test_blocks_are_cut_before_norms():
    """What a norm makes would be an array beside its operand, as in a ResNet or a transformer that normalizes sums."""

    def normalized(x, p):
        y = block(x, p)
        return (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)

    specs = specs_of(layers(), mesh_of("8"))
    gathered = zero.gather_on_use(lambda params, x: loop(params, x, normalized).sum(), specs, mesh=mesh_of("8"))
    jaxpr = jax.make_jaxpr(gathered)(layers(), examples()).jaxpr
    makers = {var: eqn.primitive.name for eqn in jaxpr.eqns for var in eqn.outvars}
    tied = [var for eqn in jaxpr.eqns if eqn.primitive is order_p for var in eqn.invars if var in makers]
    names = [makers[var] for var in tied if var.aval.shape == (BATCH_SIZE, FEATURES)]
    assert {*names} == {"add", "zero_order"}


def test_functions_without_blocks_have_no_ties():
    assert ties_of(lambda params, x: jnp.mean(block(x, params)), mlp(), examples()) == []


def test_what_a_layer_itself_repeats_is_not_tied():
    """Such as queries, keys and values: XLA:GPU gathers what is tied to activations no iteration early."""

    config = gpt.GPTConfig(vocab_size=64, seq_len=16, num_layers=LAYERS, d_model=64, num_heads=2)
    params = jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))
    batch = {name: jax.ShapeDtypeStruct((BATCH_SIZE, 16), jnp.int32) for name in ("inputs", "targets")}
    assert ties_of(gpt.loss_fn(config), params, batch) == []


def test_order_is_linear_and_maps():
    x, y = jnp.arange(3.0), jnp.arange(4.0)
    assert [a.tolist() for a in order(x, y)] == [x.tolist(), y.tolist()]
    _, tangents = jax.jvp(lambda x: order(x, y), (x,), (2 * x,))
    np.testing.assert_array_equal(tangents[0], 2 * x)
    np.testing.assert_array_equal(tangents[1], 0 * y)
    mapped = jax.vmap(lambda x: order(x, y)[0] * 2)(x)
    np.testing.assert_array_equal(mapped, 2 * x)
    grads = jax.grad(lambda x, y: sum(a.sum() for a in order(x, y)), argnums=(0, 1))(x, y)
    np.testing.assert_array_equal(grads[0], 1 + 0 * x)
    np.testing.assert_array_equal(grads[1], 1 + 0 * y)


def test_outside_jit_arrays_are_ordered_by_one_program(caplog):
    order(*(arrays := [jnp.ones(3), jnp.ones(5)]))
    with jax.log_compiles():
        order(*arrays)
    assert "Compiling" not in caplog.text

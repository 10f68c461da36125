"""Repeated blocks of Python loops, found in jaxprs."""

import dataclasses

import gpt_linen
import gpt_nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero_jax.models import gpt
from zero_jax.program import jaxprs
from zero_jax.transforms.blocks import find_blocks
from zero_jax.transforms.eqn_sequence import EqnSequence
from zero_jax.transforms.facts import Facts

WIDTH, LAYERS, BATCH_SIZE = 16, 5, 8
TINY = gpt.GPTConfig(num_layers=LAYERS, scan=False, remat=False, d_model=WIDTH, seq_len=8, vocab_size=32)


def layer_params(kind="mlp", seed=0):
    key = jax.random.key(seed)
    wide = 3 * WIDTH if kind == "wide" else 2 * WIDTH
    return {
        "scale": jnp.ones(WIDTH),
        "up": jax.random.normal(key, (WIDTH, wide)),
        "down": jax.random.normal(key, (wide, WIDTH)),
    }


def layer(x, p):
    y = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * p["scale"]
    return x + jax.nn.gelu(y @ p["up"]) @ p["down"]


def layers(num=LAYERS, kind="mlp"):
    return [layer_params(kind, seed) for seed in range(num)]


def trace(fn, params, *args):
    """Returns the open jaxpr of `fn(params, *args)` and which of its inputs are params."""
    leaves, tree = jax.tree.flatten(params)
    closed = jax.make_jaxpr(lambda leaves, *args: fn(tree.unflatten(leaves), *args))(leaves, *args)
    jaxpr, _ = jaxprs.open_jaxpr(closed)
    return jaxpr, [i < len(leaves) for i in range(len(jaxpr.invars))]


def sequence(jaxpr, is_param, **options):
    return EqnSequence(Facts(jaxpr, ["param" if x else "value" for x in is_param]), **options)


def check(fn, params, *args, **options):
    """Finds blocks, and checks what each must be: in order, disjoint, and a function from its reads to its writes."""
    jaxpr, is_param = trace(fn, params, *args)
    blocks = find_blocks(sequence(jaxpr, is_param, **options))
    stop = 0
    for block in blocks:
        assert stop <= block.start < block.stop <= len(jaxpr.eqns)
        stop = block.stop
        inside = jaxpr.eqns[block.start : block.stop]
        known = set(block.invars)
        for eqn in inside:
            assert all(jaxprs.is_literal(atom) or atom in known for atom in eqn.invars)
            known.update(eqn.outvars)
        after = [atom for eqn in jaxpr.eqns[block.stop :] for atom in eqn.invars] + list(jaxpr.outvars)
        made = {var for eqn in inside for var in eqn.outvars}
        assert set(block.outvars) == {atom for atom in after if not jaxprs.is_literal(atom) and atom in made}
    return jaxpr, is_param, blocks


def activations(jaxpr, is_param, block):
    """Returns the shapes of what a block reads that is neither a param nor an input of the function."""
    return [var.aval.shape for var in block.invars if var not in set(jaxpr.invars)]


def assert_one_run(fn, params, *args, num=LAYERS):
    """One run of `num` blocks, cut where one `[batch, width]` passes, each with params of its own."""
    jaxpr, is_param, blocks = check(fn, params, *args)
    assert [block.repeat for block in blocks] == [0] * num
    assert [len(block.outvars) for block in blocks] == [1] * num
    streams = {block.outvars[0].aval.shape for block in blocks}
    assert len(streams) == 1
    for block in blocks[1:]:
        assert activations(jaxpr, is_param, block).count(next(iter(streams))) == 1
    marked = {var for var, mark in zip(jaxpr.invars, is_param, strict=True) if mark}
    assert all(len(marked & set(block.invars)) == len(marked & set(blocks[0].invars)) for block in blocks)
    return jaxpr, is_param, blocks


def examples():
    return jnp.ones((BATCH_SIZE, WIDTH))


def plain(params, x):
    for p in params:
        x = layer(x, p)
    return x.sum()


def cast_before(params, x):
    return plain(jax.tree.map(lambda w: w.astype(jnp.bfloat16), params), x.astype(jnp.bfloat16))


def cast_just_before(params, x):
    return plain(jax.tree.map(lambda w: w.astype(jnp.float16).astype(jnp.float32), params), x)


def cast_inside(params, x):
    for p in params:
        x = layer(x, jax.tree.map(lambda w: w.T.astype(jnp.float16).astype(jnp.float32).T, p))
    return x.sum()


def checkpointed(params, x):
    for p in params:
        x = jax.checkpoint(layer)(x, p)
    return x.sum()


def jitted_layers(params, x):
    for p in params:
        x = jax.jit(layer)(x, p)
    return x.sum()


def head_and_tail_differ(params, x):
    x = jnp.tanh(x) @ jnp.ones((WIDTH, WIDTH))
    x = plain_stream(params[:-1], x)
    y = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * params[-1]["scale"]  # a layer's own begin
    return (y @ params[-1]["up"]).sum()


def plain_stream(params, x):
    for p in params:
        x = layer(x, p)
    return x


def dropout(params, x, key):
    for p, own_key in zip(params, jax.random.split(key, len(params)), strict=True):
        x = layer(x, p)
        x = jnp.where(jax.random.bernoulli(own_key, 0.9, x.shape), x / 0.9, 0)
    return x.sum()


def folded_keys(params, x, key):
    for i, p in enumerate(params):
        x = layer(x, p)
        x = jnp.where(jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape), x / 0.9, 0)
    return x.sum()


def activation_by_layer(params, x):
    for i, p in enumerate(params):
        x = layer(x * (i + 1), p) + 0.1 * i
    return x.sum()


@pytest.mark.parametrize(
    "fn",
    [plain, cast_before, cast_just_before, cast_inside, checkpointed, jitted_layers, activation_by_layer],
    ids=lambda f: f.__name__,
)
def test_loops(fn):
    assert_one_run(fn, layers(), examples())


@pytest.mark.parametrize("fn", [dropout, folded_keys])
def test_random_keys(fn):
    assert_one_run(fn, layers(), examples(), jax.random.key(0))


def test_first_and_last_differ():
    assert_one_run(head_and_tail_differ, layers(LAYERS + 1), examples())


@pytest.mark.parametrize("index", [lambda w, i: w[i], lambda w, i: jax.lax.dynamic_index_in_dim(w, i, keepdims=False)])
def test_slices_of_stacked_params(index):
    stack = jax.tree.map(lambda *ws: jnp.stack(ws), *layers())

    def fn(params, x):
        for i in range(LAYERS):
            x = layer(x, jax.tree.map(lambda w, i=i: index(w, i), params))
        return x.sum()

    jaxpr, _, blocks = assert_one_run(fn, stack, examples())
    # The slices of a layer are its own, not handed over by the layer before.
    assert all(eqn.primitive.name != "slice" for eqn in jaxpr.eqns[blocks[-1].stop :])


def test_alternating_layers_are_blocks_of_two():
    params = [layer_params(kind, seed) for seed in range(3) for kind in ("mlp", "wide")]
    assert_one_run(plain, params, examples(), num=3)


def test_several_runs():
    params = {"encoder": layers(4), "decoder": layers(3, "wide"), "between": jnp.ones((WIDTH, WIDTH))}

    def fn(params, x):
        x = plain_stream(params["encoder"], x)
        return plain_stream(params["decoder"], jnp.sin(x @ params["between"])).sum()

    _, _, blocks = check(fn, params, examples())
    assert [block.repeat for block in blocks] == [0] * 4 + [1] * 3
    assert all(len(block.outvars) == 1 for block in blocks)


@pytest.mark.slow
def test_attention_is_cut_where_the_residual_stream_passes():
    batch = {name: jnp.zeros((2, TINY.seq_len), jnp.int32) for name in ("inputs", "targets")}
    for remat in (False, True):
        config = dataclasses.replace(TINY, remat=remat)
        for init, loss in (
            (lambda key, config=config: gpt.init(config, key), gpt.loss_fn(config)),
            gpt_linen.make(config),
            gpt_nnx.make(config),
        ):
            _, _, blocks = assert_one_run(loss, jax.eval_shape(init, jax.random.key(0)), batch)
            assert {block.outvars[0].aval.shape for block in blocks} == {(2, TINY.seq_len, WIDTH)}


def test_params_shared_in_part_make_blocks_of_two():
    def fn(params, x):
        for p in params:
            x = layer(layer(x, p), params[0] | {"up": p["up"]})
        return x.sum()

    assert len(check(fn, layers(), examples())[2]) == LAYERS


def shared(params, x):
    for _ in range(LAYERS):
        x = layer(x, jax.tree.map(lambda w: w.astype(jnp.float16).astype(jnp.float32), params[0]))
    return x.sum()


def parallel(params, x):
    return jnp.stack([x @ p["up"] for p in params]).sum()


def different(params, x):
    return (jnp.tanh(jnp.sin(x @ params[0]["up"]) @ params[0]["down"]) @ params[1]["up"]).sum()


def same_slice(params, x):
    for _ in range(LAYERS):
        x = jnp.tanh(x @ params[0]["up"][:, :WIDTH])
    return x.sum()


@pytest.mark.parametrize("fn", [shared, parallel, different, same_slice], ids=lambda f: f.__name__)
def test_no_blocks(fn):
    """The same params again, params side by side, and nothing that repeats."""
    assert check(fn, layers(), examples())[2] == ()


def in_groups(params, x):
    for _ in range(3):
        x = layer(layer(x, params[0]), params[1])
    return x.sum()


def shared_beside_own(params, x):
    """The first layer twice, and others."""
    return plain([params[0], *params], x)


def chained_chunks(params, x):
    total = 0.0
    for i in range(LAYERS):
        total += layer(x[i : i + 1], params[0]).sum() * total
    return total


def called_twice(params, x):
    """A model on two batches of tokens; the loss takes what each layer makes of the first."""

    def call(tokens):
        x, made = params[0]["down"][tokens], []
        for p in params:
            x = x + jnp.tanh(x @ p["up"]) @ p["down"]
            made.append(x)
        return x @ params[0]["up"][:, 1:], jnp.stack(made)

    tokens = (x > 0).sum(-1)
    (one, made), (other, _) = call(tokens), call(tokens[::-1])
    return jnp.square(one - other).mean() + jnp.square(made).mean()


def twins(params, x):
    return (layer(x, params[0]) * layer(x + 1, params[0])).sum()


@pytest.mark.parametrize(
    ("fn", "num"),
    [(shared, LAYERS), (same_slice, LAYERS), (in_groups, 6), (shared_beside_own, LAYERS + 1), (plain, LAYERS)]
    + [(fn, 0) for fn in (chained_chunks, twins, parallel, different)],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_blocks_that_share_params_are_found_where_they_may(fn, num):
    """Not what sums the losses of chunks, nor what applies the same params to two values."""
    _, _, blocks = check(fn, layers(), examples(), tied=True)
    assert len(blocks) == num and all(len(block.outvars) == 1 for block in blocks)


def test_a_model_that_is_called_twice_has_layers():
    """Its calls are alike, and are two; the layers of each are more."""
    _, _, blocks = check(called_twice, layers(8), examples(), tied=True)
    assert len(blocks) == 16 and all(len(block.outvars) == 1 for block in blocks)


def test_nothing_is_a_param():
    jaxpr, is_param = trace(plain, layers(), examples())
    assert find_blocks(sequence(jaxpr, [False] * len(is_param))) == ()


def test_equinox():
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0), LAYERS)
    model = [eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, key=key) for key in keys]
    params, static = eqx.partition(model, eqx.is_array)

    def fn(params, x):
        for block in eqx.combine(params, static):
            x = x + jax.vmap(block)(x)
        return x.sum()

    assert_one_run(fn, params, examples())


def test_hundreds_of_layers_are_found():
    params = jax.tree.map(lambda w: np.zeros(w.shape, w.dtype), layers(1)) * 400
    jaxpr, is_param = trace(plain, params, examples())
    assert len(find_blocks(sequence(jaxpr, is_param))) == 400

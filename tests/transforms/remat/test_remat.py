"""Remat policies: which blocks are found, what they keep, and that values and gradients stay what they are."""

import functools

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec
from reference import mesh_of
from rematting import (
    BATCH,
    LAYERS,
    TOKENS,
    WIDTH,
    assert_same,
    batch_of,
    model_of,
    names_of,
    placed,
    plain,
    report_of,
)

import zero_jax as zero
from zero_jax.program.subcalls import equations
from zero_jax.training.sequence_sharding import sequence_parallel
from zero_jax.transforms.remat.transform import POLICIES, Remat, remat_report, rematerialize, resolve_remat

KINDS = ("dict scan", "dict loop", "linen scan", "linen loop", "nnx scan", "nnx loop")
KINDS += tuple(f"{kind} own" for kind in KINDS)
# In each run of the tests; the others are marked slow.
FEW = ("dict scan", "dict loop own", "linen scan own", "nnx loop")
SPREAD = [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
RECOMPUTING = tuple(name for name, remat in POLICIES.items() if remat.policy not in ("own", "none"))
# Bytes of the residual stream that enters a block, on one of two shards of the batch.
STREAM_BYTES = BATCH * TOKENS * WIDTH * 4 // 2


# Names


def test_names_lead_to_policies_and_back():
    assert all(resolve_remat(name).name == name for name in POLICIES)
    assert resolve_remat("names:a,b_offloaded") == Remat(policy="names", names=("a", "b"), residuals="offloaded")
    assert resolve_remat("names:a_b").names == ("a_b",)
    assert resolve_remat(Remat()).is_own


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: resolve_remat("ful"), "did you mean 'full'"),
        (lambda: resolve_remat("names:"), "needs the names"),
        (lambda: Remat(policy="full", names=("a",)), "no other policy takes any"),
        (lambda: Remat(policy="none", residuals="sharded"), "nothing is recomputed"),
        (lambda: Remat(residuals="ofloaded"), "did you mean 'offloaded'"),
    ],
)
def test_wrong_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Blocks, and what they keep


@pytest.mark.parametrize("kind", SPREAD)
def test_blocks_of_every_kind_of_model_are_found(kind):
    """Also of those that carry no `jax.checkpoint`; a layer's input is all that it keeps."""
    report = report_of(kind, "full")
    assert sum(row.times for row in report.regions) == LAYERS, report
    assert not report.left, report
    assert report.kept.device_bytes == LAYERS * STREAM_BYTES, report
    assert report.without.device_bytes > 10 * report.kept.device_bytes, report


@pytest.mark.parametrize("kind", ["dict scan", pytest.param("dict loop own", marks=pytest.mark.slow)])
def test_sharded_and_offloaded_residuals_are_a_share(kind):
    sharded, offloaded = report_of(kind, "full_sharded"), report_of(kind, "full_offloaded")
    assert sharded.kept.device_bytes == LAYERS * STREAM_BYTES // 4
    assert (offloaded.kept.device_bytes, offloaded.kept.host_bytes) == (0, LAYERS * STREAM_BYTES // 4)


def test_products_keep_more_and_attention_more_still():
    kept = {name: report_of("dict scan", name).kept.device_bytes for name in ("full", "dots", "attention", "none")}
    assert kept["full"] < kept["dots"] < kept["attention"] < kept["none"]
    # Queries, keys, values and the hidden layer lie over `model` by their weights; out and down do not.
    per_layer = STREAM_BYTES * (1 + 3 / 4 + 4 / 4 + 1)
    assert kept["dots"] == LAYERS * per_layer
    sharded = report_of("dict scan", "dots_sharded").kept.device_bytes
    assert sharded == LAYERS * (per_layer - 2 * STREAM_BYTES * 3 / 4)


@pytest.mark.slow
def test_own_regions_keep_their_policy_and_only_their_residuals_move():
    for kind in ("dict scan own", "dict loop own"):
        assert report_of(kind, "own_sharded").kept.device_bytes == LAYERS * STREAM_BYTES // 4
        assert report_of(kind, "own_offloaded").kept.host_bytes == LAYERS * STREAM_BYTES // 4


def test_none_removes_the_models_own_regions():
    params, loss_fn, _ = model_of("dict scan own")
    removed = rematerialize(loss_fn, "none", mesh=mesh_of("model4"))
    assert "remat2" in names_of(jax.make_jaxpr(loss_fn)(params, batch_of()))
    assert "remat2" not in names_of(jax.make_jaxpr(removed)(params, batch_of()))


def test_the_report_prints():
    text = str(report_of("dict loop", "dots_offloaded"))
    assert "block of a Python loop" in text and "on host MB" in text and "zero_jax/models/" in text


# Attention


def attend(q, k, v, *, mask=None, bias=None, keep=None, name="softmax"):
    logits = jnp.einsum("bthk,bshk->bhts", q, k)
    logits = logits if bias is None else logits + bias
    logits = logits if mask is None else jnp.where(mask, logits, -1e9)
    probabilities = jax.nn.softmax(logits) if name == "softmax" else jax.nn.gelu(logits)
    probabilities = probabilities if keep is None else jnp.where(keep, probabilities, 0)
    return jnp.einsum("bhts,bshk->bthk", probabilities, v)


def with_dropout(q, k, v, params):
    keep = jax.random.bernoulli(jax.random.wrap_key_data(params["key"]), 0.9, (BATCH, 4, TOKENS, TOKENS))
    return attend(q, k, v, keep=keep)


ATTENTION = {
    "plain": lambda q, k, v, p: attend(q, k, v),
    "causal": lambda q, k, v, p: attend(q, k, v, mask=jnp.tril(jnp.ones((TOKENS, TOKENS), bool))),
    "bias of params": lambda q, k, v, p: attend(q, k, v, bias=p["bias"]),
    "dropout": with_dropout,
    "jax.nn": lambda q, k, v, p: jax.nn.dot_product_attention(q, k, v, is_causal=True),
    "grouped queries": lambda q, k, v, p: jax.nn.dot_product_attention(q, k[:, :, :2], v[:, :, :2]),
    "vmapped": lambda q, k, v, p: jax.vmap(lambda *x: attend(*(y[None] for y in x))[0])(q, k, v),
    "jitted": lambda q, k, v, p: jax.jit(attend)(q, k, v),
}


def attention_model(core):
    params = {name: 0.3 * jax.random.normal(jax.random.key(i), (LAYERS, WIDTH, WIDTH)) for i, name in enumerate("qkvo")}
    params["bias"] = jnp.ones((LAYERS, 4, TOKENS, TOKENS))
    params["key"] = jnp.arange(2 * LAYERS, dtype=jnp.uint32).reshape(LAYERS, 2)

    def loss_fn(params, x):
        def block(x, p):
            q, k, v = ((x @ p[name]).reshape(BATCH, TOKENS, 4, WIDTH // 4) for name in "qkv")
            return x + core(q, k, v, p).reshape(x.shape) @ p["o"], None

        return jnp.mean(jax.lax.scan(block, x, params)[0] ** 2)

    return params, loss_fn


@pytest.mark.parametrize("name", ATTENTION)
def test_only_the_core_of_attention_is_recomputed(name):
    params, loss_fn = attention_model(ATTENTION[name])
    x = jax.random.normal(jax.random.key(9), (BATCH, TOKENS, WIDTH))
    report = remat_report(loss_fn, params, x, remat="attention", mesh=mesh_of("model4"))
    scores_bytes = LAYERS * BATCH * 4 * TOKENS * TOKENS * 4 // 2
    stream = LAYERS * STREAM_BYTES
    assert not report.left
    assert report.without.device_bytes >= scores_bytes + stream, report
    # The stream, the queries, keys and values, and what comes out of attention; nothing with a dim for each pair.
    assert 3 * stream <= report.kept.device_bytes <= 6 * stream, report
    assert report.kept.device_bytes + scores_bytes <= report.without.device_bytes, report


def test_what_is_no_attention_is_left_alone():
    gelu = lambda q, k, v, p: attend(q, k, v, name="gelu")  # noqa: E731
    params, loss_fn = attention_model(gelu)
    x = jnp.ones((BATCH, TOKENS, WIDTH))
    report = remat_report(loss_fn, params, x, remat="attention", mesh=mesh_of("model4"))
    assert not report.regions
    assert "no attention" in str(report)
    with pytest.raises(ValueError, match=r"finds nothing to recompute.*no attention"):
        rematerialize(loss_fn, "attention", mesh=mesh_of("model4"))(params, x)


# Names, and what cannot be done


def stacked_mlp(width=WIDTH, layers=LAYERS):
    keys = jax.random.split(jax.random.key(0))
    return {n: 0.3 * jax.random.normal(k, (layers, width, width)) for n, k in zip(("up", "down"), keys, strict=True)}


def mlp_block(x, p):
    hidden = checkpoint_name(jnp.tanh(x @ p["up"]), "hidden")
    return x + jax.nn.silu(hidden) @ p["down"]


def scanned(block):
    return lambda params, x: jnp.mean(jax.lax.scan(lambda x, p: (block(x, p), None), x, params)[0] ** 2)


def looped(block):
    def loss_fn(params, x):
        for i in range(LAYERS):
            x = block(x, jax.tree.map(lambda p, i=i: p[i], params))
        return jnp.mean(x**2)

    return loss_fn


X = functools.partial(jax.random.normal, jax.random.key(5), (BATCH, TOKENS, WIDTH))


@pytest.mark.parametrize("make", [scanned, looped])
def test_values_are_kept_by_the_models_own_names(make):
    for place, share, host in (("", 1, 0), ("_sharded", 4, 0), ("_offloaded", 4, 1)):
        report = remat_report(make(mlp_block), stacked_mlp(), X(), remat=f"names:hidden{place}", mesh=mesh_of("model4"))
        kept = report.kept.host_bytes if host else report.kept.device_bytes
        inputs = LAYERS if make is scanned else LAYERS - 1  # the first turn of a Python loop reads the batch itself
        assert kept == (LAYERS + inputs) * STREAM_BYTES // share, report


def test_unknown_names_are_refused():
    loss_fn = rematerialize(scanned(mlp_block), "names:hiden", mesh=mesh_of("8"))
    with pytest.raises(ValueError, match="did you mean 'hidden'"):
        loss_fn(stacked_mlp(), X())


def test_sharding_needs_an_axis_and_offloading_does_not():
    with pytest.raises(ValueError, match="choose 'full' or 'full_offloaded'"):
        rematerialize(scanned(mlp_block), "full_sharded", mesh=mesh_of("8"))
    report = remat_report(scanned(mlp_block), stacked_mlp(), X(), remat="full_offloaded", mesh=mesh_of("4"))
    assert report.kept.host_bytes == LAYERS * STREAM_BYTES // 2


def test_a_model_without_blocks_is_refused():
    params = {"w": jnp.ones((WIDTH, WIDTH))}
    loss_fn = lambda p, x: jnp.mean((x @ p["w"]) ** 2)  # noqa: E731
    with pytest.raises(ValueError, match="no scan over stacked params"):
        rematerialize(loss_fn, "full", mesh=mesh_of("8"))(params, X())
    with pytest.raises(ValueError, match="choose 'full_offloaded'"):
        rematerialize(loss_fn, "own_offloaded", mesh=mesh_of("8"))(params, X())
    rematerialize(loss_fn, "none", mesh=mesh_of("8"))(params, X())


def test_a_loss_in_chunks_keeps_its_own_region():
    """A scan over chunks uses the head whole in each turn: it is not over layers. Positions have no inputs."""
    positions = functools.partial(jax.lax.iota, jnp.float32, WIDTH)

    def loss_fn(params, x):
        x, _ = jax.lax.scan(lambda x, p: (mlp_block(x, p), None), x, params["blocks"])
        chunk = jax.checkpoint(lambda total, x: (total + jnp.sum((x @ (params["head"] * positions())) ** 2), None))
        return jax.lax.scan(chunk, 0.0, x.reshape(4, BATCH, -1, WIDTH))[0]

    params = {"blocks": stacked_mlp(), "head": jnp.ones((WIDTH, WIDTH))}
    for policy in ("full", "none"):
        report = remat_report(loss_fn, params, X(), remat=policy, mesh=mesh_of("8"))
        assert [row.kind for row in report.regions] == ["scan body"]
        assert "not over layers" in str(report)


@pytest.mark.parametrize("loop", [scanned, looped])
def test_a_block_that_prints_is_recomputed(loop):
    seen, params = [], stacked_mlp()

    def shown(x, p):
        jax.debug.callback(lambda: seen.append("row"))
        return mlp_block(x, p)

    report = remat_report(loop(shown), params, X(), remat="full", mesh=mesh_of("8"))
    assert report.regions
    grads = jax.jit(jax.grad(rematerialize(loop(shown), "full", mesh=mesh_of("8"))))(params, X())
    jax.effects_barrier()
    assert_same(grads, jax.jit(jax.grad(loop(mlp_block)))(params, X()))
    assert seen


def test_effects_do_not_run_twice():
    def noisy(x, p):
        jax.experimental.io_callback(lambda: None, None)
        return mlp_block(x, p)

    report = remat_report(scanned(noisy), stacked_mlp(), X(), remat="full", mesh=mesh_of("8"))
    assert not report.regions
    assert "must not run twice" in str(report)


def test_what_the_model_has_sharded_stays_so():
    """With sequence parallelism the stream is a share already: it is kept as it is."""
    mesh = mesh_of("model4")
    place = sequence_parallel(mesh)
    block = lambda x, p: place(x + jnp.tanh(place(x, "gathered") @ p["up"]) @ p["down"], "residual")  # noqa: E731
    report = remat_report(scanned(block), stacked_mlp(), X(), remat="full_sharded", mesh=mesh)
    assert "already sharded over `model`" in str(report)
    assert report.kept.device_bytes == LAYERS * STREAM_BYTES // 4
    plain_block = jax.make_jaxpr(rematerialize(scanned(block), "full_sharded", mesh=mesh))(stacked_mlp(), X())
    assert "zero_join" not in names_of(plain_block)


def test_products_that_are_sharded_are_kept_as_they_are():
    """Those of experts are shares already, and of layers that are all split over their results each is one."""
    num_experts, features = 4, 64
    shapes = {"up": (LAYERS, num_experts, WIDTH, features), "down": (LAYERS, num_experts, features, WIDTH)}
    experts = {name: jnp.ones(shape) for name, shape in shapes.items()}

    def of_experts(x, p):
        hidden = jnp.tanh(jnp.einsum("btd,edf->ebtf", x, p["up"]))
        return x + jnp.einsum("ebtf,efd->ebtd", hidden, p["down"]).sum(0)

    report = functools.partial(remat_report, mesh=mesh_of("model4"))
    found = report(
        scanned(of_experts),
        experts,
        X(),
        remat="dots_sharded",
        specs=dict.fromkeys(experts, PartitionSpec(None, "model")),
    )
    products = num_experts * BATCH * TOKENS * features * 4 // 2  # what goes down is summed, and not read again
    assert found.kept.device_bytes == LAYERS * (STREAM_BYTES + products) // 4
    layers, specs = [{"up": jnp.ones((WIDTH, WIDTH))}] * LAYERS, [{"up": PartitionSpec(None, "model")}] * LAYERS
    split = lambda params, x: functools.reduce(lambda x, p: jnp.tanh(x @ p["up"]), params, x).mean()  # noqa: E731
    first, *others = report(split, layers, X(), remat="full", specs=specs).regions
    assert (first.times, [row.times for row in others]) == (1, [LAYERS - 1])
    assert others[0].kept.device_bytes == STREAM_BYTES // 4


def test_indivisible_residuals_are_reported():
    report = remat_report(
        scanned(mlp_block),
        stacked_mlp(width=30),
        jnp.ones((BATCH, 18, 30)),
        remat="full_sharded",
        mesh=mesh_of("model4"),
    )
    assert "no dim of (4, 18, 30) divides" in str(report)


def test_a_shared_input_is_kept_once():
    """What every turn of a loop reads is alive until the last backward turn: it is not kept again in each."""

    def loss_fn(params, x):
        memory = jnp.tanh(x)
        for i in range(LAYERS):
            p = jax.tree.map(lambda p, i=i: p[i], params)
            x = mlp_block(x, p) + jnp.sin(memory @ p["up"])
        return jnp.mean(x**2)

    report = remat_report(loss_fn, stacked_mlp(), X(), remat="full_offloaded", mesh=mesh_of("model4"))
    assert report.kept.host_bytes == (LAYERS - 1) * STREAM_BYTES // 4


# Values and gradients


def test_the_forward_pass_does_not_go_through_the_shards():
    """Only the recomputation gathers what was kept."""
    mesh = mesh_of("model4")
    loss_fn = rematerialize(scanned(mlp_block), "full_sharded", mesh=mesh)
    forward = jax.make_jaxpr(lambda p, x: jax.vjp(loss_fn, p, x)[0])(stacked_mlp(), X())
    both = jax.make_jaxpr(jax.grad(loss_fn))(stacked_mlp(), X())
    moves = lambda jaxpr: [e.params["forward"] for e in equations(jaxpr) if e.primitive.name == "zero_reshard"]  # noqa: E731
    gathers = lambda jaxpr: [chain for chain in moves(jaxpr) if len(chain.shardings) == 2]  # noqa: E731
    assert moves(forward.jaxpr)
    assert not gathers(forward.jaxpr)
    assert len(gathers(both.jaxpr)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dict scan own", "nnx loop own"])
def test_every_policy_computes_the_same(kind):
    """Half of the policies on params that are gathered on use, the other half on params that lie whole over `data`."""
    params, loss_fn, specs = model_of(kind)
    policies = [*RECOMPUTING, "none", *(("own_sharded", "own_offloaded") if kind.endswith("own") else ())]
    want = plain(loss_fn, params, batch_of())
    for gathered in (False, True):
        some = policies[gathered == (len(kind) % 2) :: 2]
        got = placed(loss_fn, params, batch_of(), policies=some, specs=specs, gathered=gathered)
        for policy, values in zip(some, got, strict=True):
            assert_same(values, want, f"{policy}, gathered={gathered}")


def test_complex_values_are_computed_again():
    params = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH), jnp.complex64) / WIDTH
    x = jax.random.normal(jax.random.key(1), (BATCH, TOKENS, WIDTH))

    def loss_fn(params, x):
        layer = lambda x, w: (x + 1j * jnp.tanh(x @ w), None)  # noqa: E731
        return jnp.square(jnp.abs(jax.lax.scan(layer, x.astype(params.dtype), params)[0])).mean()

    policies = ("dots", "full_offloaded", "dots_sharded")
    want = plain(loss_fn, params, x)
    for policy, got in zip(policies, placed(loss_fn, params, x, policies=policies), strict=True):
        np.testing.assert_allclose(got[1], want[1], atol=1e-5, err_msg=policy)


def test_under_vmap_and_forward_mode():
    mesh = mesh_of("model4")
    params, xs = stacked_mlp(), jnp.stack([X(), 2 * X()])
    plain_fn, fn = scanned(mlp_block), rematerialize(scanned(mlp_block), "full_sharded", mesh=mesh)
    both = lambda f: jax.jit(lambda p, xs: jax.vmap(jax.grad(f), in_axes=(None, 0))(p, xs))(params, xs)  # noqa: E731
    assert_same(both(fn), both(plain_fn))
    tangent = lambda f: jax.jit(lambda p, x: jax.jvp(lambda x: f(p, x), (x,), (x,)))(params, X())  # noqa: E731
    assert_same(tangent(fn), tangent(plain_fn))


def test_names_and_offloading_run():
    """Residuals in host memory come back; also inside `jax.checkpoint` regions that gather sharded params."""
    for make in (scanned, looped):
        got = placed(make(mlp_block), stacked_mlp(), X(), policies=["names:hidden_offloaded"], gathered=True)
        assert_same(got[0], plain(make(mlp_block), stacked_mlp(), X()))


def test_gathered_params_are_no_residuals():
    """What is computed of params alone is cheaper gathered again than kept, whatever the policy."""
    mesh = mesh_of("8")
    params = stacked_mlp()
    spec = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec(None, "data")), params)
    block = lambda x, p: x + jnp.tanh(x @ p["up"].T) @ p["down"].T  # noqa: E731
    fn = zero.gather_on_use(rematerialize(scanned(block), "dots", mesh=mesh), spec, mesh=mesh)
    x = jnp.ones((16, WIDTH))
    kept = jax.tree.leaves(jax.eval_shape(lambda p, x: jax.vjp(lambda p, x: fn(p, x), p, x)[1], params, x))
    whole = [leaf for leaf in kept if leaf.shape == (LAYERS, WIDTH, WIDTH)]
    assert len(whole) <= len(params), kept  # the stored shards, and no gathered copy


def test_an_activation_function_stays_a_call_in_a_block():
    """XLA:TPU fuses its derivative with products only then; a softmax is written out, as attention is looked for."""

    def loss_fn(params, x):
        block = lambda x, w: (jax.nn.softmax(jax.nn.silu(x @ w)), None)  # noqa: E731
        return jax.lax.scan(block, x, params)[0].sum()

    mesh = zero.make_mesh(data=8)
    recomputed = zero.rematerialize(loss_fn, "full", mesh=mesh)
    text = str(jax.make_jaxpr(recomputed)(jnp.ones((2, 8, 8)), jnp.ones((8, 8))))
    assert "name=silu" in text and "softmax" not in text


@pytest.mark.parametrize(
    "policy", ["dots_offloaded", *(pytest.param(x, marks=pytest.mark.slow) for x in RECOMPUTING if "att" not in x)]
)
def test_second_derivatives_are_those_of_the_loss(policy):
    """What is kept is recomputed from a copy, which has derivatives, too."""
    with jax.enable_x64(True):
        params = {"up": jnp.full((2, 8, 16), 0.3), "down": jnp.full((2, 16, 8), 0.2)}
        batch = jnp.sin(jnp.arange(4 * 2 * 8.0)).reshape(4, 2, 8)

        def loss_fn(params, batch):
            layer = lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None)  # noqa: E731
            return jnp.square(jax.lax.scan(layer, batch, params)[0]).mean()

        def product(loss_fn):
            return jax.jit(lambda params: jax.jvp(jax.grad(loss_fn), (params, batch), (params, batch))[1])(params)

        mesh = zero.make_mesh(model=2, devices=jax.devices()[:4])
        recomputed = rematerialize(loss_fn, policy, mesh=mesh)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-10), product(recomputed), product(loss_fn))

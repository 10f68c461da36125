"""State that is neither param nor example: sharded, donated, cast by nothing, and as on one device."""

import contextlib
import dataclasses
import functools
import re
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import safetensors.numpy
from jax.sharding import PartitionSpec as P
from model_states import (
    BATCH_SIZE,
    MODELS,
    linen_eval,
    linen_init,
    make,
    make_batches,
    optimizer,
    plain_run,
)
from reference import assert_close, assert_placed_alike, mesh_of

import zero_jax as zero
from zero_jax.checkpoint import Checkpointer, describe, restore
from zero_jax.checkpoint.exporting import export
from zero_jax.checkpoint.saved_state import saved_leaves

NUM_STEPS = 3
NNX_INIT, _ = MODELS["nnx"]
# Sums over a batch are made in another order on several devices.
FLOAT32 = 1e-5
BFLOAT16 = 2.0**-5


def shards_of_batch(mesh):
    return mesh_of(mesh).shape["data"]


@contextlib.contextmanager
def may_warn(model, num_microbatches):
    """Expects what examples that a batch norm mixes are warned of, and a target network that the loss reads."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        yield
    messages = [str(x.message) for x in warned]
    if num_microbatches == 1:
        assert not messages
    elif model == "q":
        (message,) = messages
        assert re.search(r"another one .* because it reads 'model_state/target/down', .*model_states.py:\d+", message)
        assert "model_state/updates" not in message
    else:  # running averages and counts of random numbers are in model state, too: they make it no other loss
        loss, *aux = sorted(messages, reverse=True)
        assert re.search(r"another one .* mixed at .*(_normalize|equinox)", loss) and "reads" not in loss
        assert all("aux is returned without 'logits'" in x for x in aux) and len(aux) == (model == "linen")


def run(model, mesh, stage, k, **fields):
    init_fn, loss_fn = MODELS[model]
    traces = []

    @functools.wraps(loss_fn)
    def counted(*args, **kwargs):
        traces.append(None)
        return loss_fn(*args, **kwargs)

    state, step, _ = make((init_fn, counted), mesh, stage=stage, num_microbatches=k, **fields)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    losses, num_traces = [], []
    with may_warn(model, k):
        for batch in make_batches(NUM_STEPS):
            old = state
            state, metrics = step(state, batch)
            losses.append(metrics.loss)
            num_traces.append(len(traces))
    assert len(set(num_traces)) == 1, "the first step's trace is the only one"
    assert all(x.is_deleted() for x in jax.tree.leaves(old)), "the state is donated, model state included"
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        like = dict(jax.tree_util.tree_leaves_with_path(shardings))[path]
        assert x.sharding.is_equivalent_to(like, x.ndim), path
    return state, losses


CASES = [("linen", "8", 3, 2), ("q", "8", 3, 2)]
FURTHER = [
    ("linen", "model2", 1, 2),
    ("nnx", "8", 3, 1),
    *(("equinox", *rest) for rest in [("8", 3, 1), ("8", 0, 2), ("model2", 2, 1), ("8", 1, 2)]),
    *(("linen", mesh, stage, k) for mesh, stage, k in [("8", 0, 1), ("8", 1, 1), ("8", 2, 2), ("model2", 3, 1)]),
    *(("nnx", mesh, stage, k) for mesh, stage, k in [("8", 0, 2), ("model2", 1, 1), ("8", 2, 1), ("model2", 3, 2)]),
    *(("q", mesh, stage, k) for mesh, stage, k in [("8", 0, 1), ("8", 1, 2), ("model2", 2, 1), ("model2", 3, 1)]),
]


@pytest.mark.parametrize(
    ("model", "mesh", "stage", "k"), CASES + [pytest.param(*case, marks=pytest.mark.slow) for case in FURTHER]
)
def test_equals_one_device(model, mesh, stage, k):
    params, model_state, losses = plain_run(model, NUM_STEPS, shards_of_batch(mesh), k)
    state, found = run(model, mesh, stage, k)
    assert_close(found, losses, tolerance=FLOAT32)
    assert_close(state.params, params, tolerance=FLOAT32)
    assert_close(state.model_state, model_state, tolerance=FLOAT32)


@pytest.mark.slow
def test_a_rematerialized_model_draws_the_same_numbers_again():
    params, model_state, losses = plain_run("deep", NUM_STEPS, shards_of_batch("8"), 2)
    state, found = run("deep", "8", 3, 2, remat="full")
    assert_close(found, losses, tolerance=FLOAT32)
    assert_close(state.params, params, tolerance=FLOAT32)
    assert_close(state.model_state, model_state, tolerance=FLOAT32)


BF16_CASES = [("linen", "8", 3, 1), ("q", "8", 2, 2), ("nnx", "8", 1, 1)]


@pytest.mark.parametrize(
    ("model", "mesh", "stage", "k"), BF16_CASES[:1] + [pytest.param(*c, marks=pytest.mark.slow) for c in BF16_CASES[1:]]
)
def test_nothing_casts_it_in_bfloat16(model, mesh, stage, k):
    params, model_state, losses = plain_run(model, NUM_STEPS, shards_of_batch(mesh), k, jnp.bfloat16)
    first = make(model, mesh, stage=stage, precision="bf16")[0]
    state, found = run(model, mesh, stage, k, precision="bf16")
    assert_close(found, losses, tolerance=BFLOAT16)
    initial = reference.to_host(first.masters), reference.to_host(first.model_state)
    for old, new, wanted in zip(initial, (state.masters, state.model_state), (params, model_state), strict=True):
        for start, x, y in zip(*map(jax.tree.leaves, map(reference.to_host, (old, new, wanted))), strict=True):
            assert x.dtype == y.dtype == start.dtype and x.dtype != jnp.bfloat16
            if np.issubdtype(x.dtype, np.floating):
                assert reference.norm(x - y) <= BFLOAT16 * max(reference.norm(y - start), 0.1)


def test_a_target_network_is_sharded_as_its_params():
    """1/n of it is on each device at stage 3, over `model` as well, and it is in memory of its own."""
    specs = {"up": P(None, "model"), "down": P("model", None)}
    state, step, config = make("q", "model2", stage=3, param_specs=specs)
    mesh = mesh_of("model2")
    assert_placed_alike(state.model_state["target"], state.params)
    assert state.model_state["updates"].sharding.is_fully_replicated
    groups = zero.memory.measure_arrays(state).groups
    assert (
        groups["model_state"] == groups["params"] + 4 == sum(x.nbytes for x in jax.tree.leaves(state.params)) // 8 + 4
    )
    estimate = zero.memory.estimate(state, mesh=mesh, config=config)
    assert estimate.by_group["model_state"] == groups["model_state"]
    assert "model_state" in str(estimate) and "model_state" in estimate.sharded
    compiled = step.lower(state, make_batches(1)[0]).compile()
    measured = zero.memory.measure(compiled)
    assert measured.arguments["model_state"] == groups["model_state"] and not measured.not_donated
    assert "model_state/target/up" in str(zero.sharding_report(state, mesh=mesh, config=config))
    # Its gather for the loss is named, and estimated; averaging it with the params gathers nothing.
    rows = zero.comms.measure(compiled, mesh=mesh).rows
    gathers = {row.param: row.num_executions for row in rows if row.kind.startswith("all-gather")}
    assert gathers["model_state/target/up"] == gathers["model_state/target/down"] == 1
    bare = dataclasses.replace(state, model_state=None)
    sent, without = (zero.comms.estimate(x, mesh=mesh, config=config).sent_bytes for x in (state, bare))
    share = sum(x.nbytes for x in jax.tree.leaves(state.params)) / 2  # of the model axis
    assert sent - without == pytest.approx(share * 3 / 4)


@pytest.mark.parametrize("given", [False, True], ids=["made", "given"])
def test_a_copy_of_the_params_has_memory_of_its_own(given):
    def init_fn(key):
        w = jax.random.normal(key, (16, 16))
        return zero.Variables(params={"w": w}, model_state={"w": w})

    config = zero.ZeroConfig(stage=3, min_shard_size=1)
    mesh, key = mesh_of("8"), jax.random.key(0)
    variables = init_fn(key)
    made = zero.init_state(variables if given else init_fn, optax.sgd(0.1), key, mesh=mesh, config=config)
    again = zero.init_state(made.variables, optax.sgd(0.1), key, mesh=mesh, config=config)

    def loss_fn(params, batch, model_state):
        return jnp.square(batch["x"] @ (params["w"] - model_state["w"])).mean(), None, params

    step = zero.make_train_step(loss_fn, optax.sgd(0.1), mesh=mesh, config=config)
    for state in (made, again):
        for _ in range(2):
            state, _ = step(state, {"x": np.ones((8, 16), np.float32)})
    np.testing.assert_array_equal(variables.params["w"], variables.model_state["w"])


@pytest.mark.slow
def test_the_params_themselves_are_copied_first():
    """A hard update of a target network between two steps: an array cannot be donated twice."""
    state, step, _ = make("q", "8", stage=3)
    batch = make_batches(1)[0]
    alike = dataclasses.replace(state, model_state=state.model_state | {"target": state.params})
    with pytest.raises(
        ValueError, match="leaf 'model_state/target/down' of the state is the same array as 'params/down'"
    ):
        step(alike, batch)
    target = jax.tree.map(jnp.copy, state.params)
    state, _ = step(dataclasses.replace(state, model_state=state.model_state | {"target": target}), batch)
    assert int(state.model_state["updates"]) == 1


def test_overrides_and_specs_go_by_path():
    mesh = mesh_of("model2")
    specs = {"up": P(None, "model"), "model_state/target/down": P("model", None)}
    overrides = {"model_state/target/up": P()}
    state, _, config = make("q", "model2", stage=3, param_specs=specs, overrides=overrides)
    assert state.model_state["target"]["up"].sharding.is_fully_replicated
    assert state.model_state["target"]["down"].sharding.spec[0] == "model"
    assert "model" not in state.params["down"].sharding.spec
    zero.sharding_report(state.params, mesh=mesh, config=config)  # of params alone, patterns of model state are idle
    with pytest.raises(ValueError, match=r"param_specs: 'model_state/targets/.*' matches the path of no leaf"):
        make("q", "model2", param_specs={"model_state/targets/.*": P("model")})
    with pytest.raises(ValueError, match="overrides: 'model_state/nothing' matches"):
        make("q", "model2", overrides={"model_state/nothing": P()})


def test_a_skipped_step_leaves_it():
    state, step, _ = make("linen", "8", stage=2, skip_nonfinite=True)
    before = reference.to_host(state.model_state)
    bad, good = make_batches(2)
    bad = bad | {"x": np.where(np.arange(4)[:, None, None] < 3, bad["x"], np.inf).astype(np.float32)}
    state, metrics = step(state, bad)
    assert bool(metrics.skipped)
    chex.assert_trees_all_equal(reference.to_host(state.model_state), before)
    state, metrics = step(state, good)
    assert not bool(metrics.skipped) and not np.array_equal(
        jax.tree.leaves(state.model_state)[0], jax.tree.leaves(before)[0]
    )


def test_evaluation_reads_it_and_drops_what_comes_back():
    state, _, config = make("linen", "8", stage=3)
    batch = make_batches(1)[0]
    evaluate = zero.make_eval_step(linen_eval, mesh=mesh_of("8"), config=config)
    host = jax.tree.map(np.asarray, state.variables)
    expected = jax.jit(linen_eval)(host.params, batch, model_state=host.model_state)[0]
    for given in (state, state.variables, host):
        np.testing.assert_allclose(evaluate(given, batch).loss, expected, rtol=1e-5)
    with pytest.raises(ValueError, match=r"was given params alone.*give an evaluation the TrainState"):
        evaluate(state.params, batch)
    of_params = zero.make_eval_step(lambda params, batch: jnp.float32(1), mesh=mesh_of("8"), config=config)
    assert float(of_params(state, batch).loss) == 1


def test_forms_of_loss_functions():
    """By keyword whatever its place, with or without a key, partial, callable, made for a mesh; idle if optional."""

    class Loss:
        def __call__(self, params, batch, *, model_state, rng):
            return self.of(params, batch, model_state, rng)

        def of(self, params, batch, model_state, key):
            assert jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
            return (params["w"] * batch["x"]).mean(), {"n": model_state["n"]}, {"n": model_state["n"] + 1}

    of = Loss().of
    forms = {
        "positional": lambda params, batch, model_state, key: of(params, batch, model_state, key),
        "key first": lambda params, batch, key, model_state: of(params, batch, model_state, key),
        "callable": Loss(),
        "partial": functools.partial(
            lambda scale, params, batch, key, *, model_state: of(params, batch, model_state, key), 1
        ),
        "mesh": zero.MeshLoss(lambda mesh: Loss()),
        "jitted": jax.jit(lambda params, batch, key, model_state: of(params, batch, model_state, key)),
    }
    mesh, config = mesh_of("1"), zero.ZeroConfig(stage=0)
    variables = zero.Variables(params={"w": np.float32(2)}, model_state={"n": 3})
    batch = {"x": np.ones(2, np.float32)}
    for form in forms.values():
        state = zero.init_state(variables, optax.sgd(1.0), jax.random.key(0), mesh=mesh, config=config)
        state, metrics = zero.make_train_step(form, optax.sgd(1.0), mesh=mesh, config=config)(state, batch)
        assert int(metrics.aux["n"]) == 3 and int(state.model_state["n"]) == 4

    def optional(params, batch, *, model_state=None):
        assert model_state is None
        return (params["w"] * batch["x"]).mean()

    state = zero.init_state(variables.params, optax.sgd(1.0), jax.random.key(0), mesh=mesh, config=config)
    assert state.model_state is None
    _, metrics = zero.make_train_step(optional, optax.sgd(1.0), mesh=mesh, config=config)(state, batch)
    assert float(metrics.loss) == 2


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda s: {"mean": s["mean"].astype(jnp.bfloat16), "n": s["n"]},
         r"leaf 'model_state/mean': loss_fn was given float32\[4\] and returned bfloat16\[4\].*astype\('float32'\)"),
        (lambda s: {"mean": s["mean"][:3], "n": s["n"]},
         r"leaf 'model_state/mean': loss_fn was given float32\[4\] and returned float32\[3\]"),
        (lambda s: {"mean": s["mean"]}, "lacks the leaf 'model_state/n'"),
        (lambda s: s | {"var": 1.0}, "has the leaf 'model_state/var', which loss_fn was not given"),
        (lambda s: s | {"n": "three"}, "leaf 'n' is 'three' of type str"),
    ],
)  # fmt: skip
def test_what_a_loss_returns_is_checked(returned, message):
    mesh, config = mesh_of("1"), zero.ZeroConfig(stage=0)
    variables = zero.Variables(
        params={"w": np.ones(4, np.float32)}, model_state={"mean": np.ones(4, np.float32), "n": 1}
    )
    state = zero.init_state(variables, optax.sgd(1.0), jax.random.key(0), mesh=mesh, config=config)

    def loss_fn(params, batch, *, model_state):
        return (params["w"] * batch["x"][0]).mean(), None, returned(model_state)

    step = zero.make_train_step(loss_fn, optax.sgd(1.0), mesh=mesh, config=config)
    with pytest.raises(ValueError, match=message):
        step(state, {"x": np.ones(2, np.float32)})


def test_losses_and_states_that_do_not_fit_each_other():
    mesh, config, batch = mesh_of("1"), zero.ZeroConfig(stage=0), {"x": np.ones(2, np.float32)}
    params = {"w": np.ones(4, np.float32)}

    def step(variables, loss_fn):
        state = zero.init_state(variables, optax.sgd(1.0), jax.random.key(0), mesh=mesh, config=config)
        return zero.make_train_step(loss_fn, optax.sgd(1.0), mesh=mesh, config=config)(state, batch)

    def takes(params, batch, *, model_state):
        return params["w"].mean(), model_state

    with pytest.raises(ValueError, match="loss_fn takes model_state, and was given params alone"):
        step(params, takes)
    variables = zero.Variables(params=params, model_state={"n": 1})
    with pytest.raises(
        ValueError, match="takes model_state and returned 2 values: return \\(loss, aux, model_state\\)"
    ):
        step(variables, takes)
    with pytest.raises(ValueError, match="the state has model_state, and loss_fn has no parameter of that name"):
        step(variables, lambda params, batch: params["w"].mean())
    with pytest.raises(ValueError, match="model_state leaf 'name' is 'x' of type str"):
        step(zero.Variables(params=params, model_state={"name": "x"}), takes)
    step(zero.Variables(params=params), lambda params, batch: params["w"].mean())  # the same as bare params


@pytest.mark.slow
@pytest.mark.parametrize("stage", [3, 1])
def test_two_players(stage):
    """A generator and a discriminator, each trained against the other's params as its model state."""
    mesh, noise, real = mesh_of("8"), make_batches(3), make_batches(4)[3]["x"].reshape(BATCH_SIZE, -1)

    def init_fn(sizes, key):
        keys = jax.random.split(key, len(sizes) - 1)
        return [jax.random.normal(k, (a, b)) / a**0.5 for k, a, b in zip(keys, sizes[:-1], sizes[1:], strict=True)]

    def apply(params, x):
        return jnp.tanh(x @ params[0]) @ params[1]

    def fake_of(g, batch):
        return apply(g, batch["x"].reshape(BATCH_SIZE, -1))

    def d_loss(params, batch, *, model_state):
        fake = fake_of(model_state, batch)
        return (jax.nn.softplus(-apply(params, real)) + jax.nn.softplus(apply(params, fake))).mean(), None, model_state

    def g_loss(params, batch, *, model_state):
        return jax.nn.softplus(-apply(model_state, fake_of(params, batch))).mean(), None, model_state

    inits = [functools.partial(init_fn, sizes) for sizes in ((48, 32, 48), (48, 32, 1))]
    tx = optax.adam(1e-2)

    @functools.partial(jax.jit, static_argnums=0)
    def plain_step(loss_fn, params, opt_state, batch, other):
        grads = jax.grad(lambda params: loss_fn(params, batch, model_state=other)[0])(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    g, d = (jax.jit(init)(jax.random.key(i)) for i, init in enumerate(inits))
    g_opt, d_opt = tx.init(g), tx.init(d)
    for batch in noise:
        d, d_opt = plain_step(d_loss, d, d_opt, batch, g)
        g, g_opt = plain_step(g_loss, g, g_opt, batch, d)

    config = zero.ZeroConfig(stage=stage, min_shard_size=8)
    make = functools.partial(zero.init_state, mesh=mesh, config=config)
    g_state, d_state = (make(init, tx, jax.random.key(i)) for i, init in enumerate(inits))
    d_step, g_step = (zero.make_train_step(f, tx, mesh=mesh, config=config) for f in (d_loss, g_loss))
    for batch in noise:
        # A step donates what it is given and returns it: the params go back to whom they belong.
        d_state, _ = d_step(dataclasses.replace(d_state, model_state=g_state.params), batch)
        g_state = dataclasses.replace(g_state, params=d_state.model_state, model_state=d_state.params)
        g_state, _ = g_step(g_state, batch)
        d_state = dataclasses.replace(d_state, params=g_state.model_state)
    assert_close((g_state.params, d_state.params), (g, d), tolerance=2e-5)


def test_the_step_is_planned_and_traced_with_it():
    state, _, config = make("q", "model2", stage=3, remat="own")
    traced = zero.trace_loss(MODELS["q"][1], state.variables, make_batches(1)[0], mesh=mesh_of("model2"), config=config)
    assert traced.flops > 0 and traced.residuals.device_bytes > 0


def test_a_state_of_ones_own_has_it_too():
    """Such as Flax's TrainState with a field for the batch statistics."""
    shapes = jax.eval_shape(linen_init, jax.random.key(0))
    own = {"model": {"params": shapes.params, "batch_stats": shapes.model_state["batch_stats"]}, "opt": shapes.params}
    config = zero.ZeroConfig(stage=2, min_shard_size=8)
    find = functools.partial(zero.state_shardings, mesh=mesh_of("8"), params="model/params")
    as_opt_state = find(own, config=config)["model"]["batch_stats"]["BatchNorm_0"]["mean"]
    assert as_opt_state.spec == P("data")
    whole = find(own, config=config, model_state="model/batch_stats")
    assert whole["model"]["batch_stats"]["BatchNorm_0"]["mean"].spec == P()
    assert whole["opt"]["Conv_0"]["kernel"].spec != P()
    sharded = find(own, config=zero.ZeroConfig(stage=3, min_shard_size=8), model_state="model/batch_stats")
    assert sharded["model"]["batch_stats"]["BatchNorm_0"]["mean"].spec == P("data")
    with pytest.raises(ValueError, match=r"no model_state at 'stats' \(it has model, opt\)"):
        find(own, config=config, model_state="stats")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint after two steps at stage 3, the losses of two further steps, and the state after them."""
    folder, (state, step, _) = tmp_path_factory.mktemp("run"), make("nnx", "8", stage=3)
    *batches, third, fourth = make_batches(4)
    for batch in batches:
        state, _ = step(state, batch)
    with Checkpointer(folder, log=pytest.fail) as checkpointer:
        checkpointer.save(2, state)
    host = reference.to_host(saved_leaves(state))
    losses = []
    for batch in (third, fourth):
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    return folder, host, losses


def reload(folder, init_fn=None, *, mesh="8", stage=3, **options):
    config = zero.ZeroConfig(stage=stage, min_shard_size=8)
    init_fn = NNX_INIT if init_fn is None else init_fn
    return restore(folder, init_fn=init_fn, tx=optimizer(), mesh=mesh_of(mesh), config=config, **options)


def test_a_run_goes_on_bit_by_bit(saved):
    folder, _, losses = saved
    _, step, _ = make("nnx", "8", stage=3)
    state, found = reload(folder).state, []
    for batch in make_batches(4)[2:]:
        state, metrics = step(state, batch)
        found.append(float(metrics.loss))
    assert found == losses


@pytest.mark.parametrize(
    ("mesh", "stage"), [("4", 1), *(pytest.param(*to, marks=pytest.mark.slow) for to in [("model2", 3), ("1", 0)])]
)
def test_it_reloads_anywhere(saved, mesh, stage):
    folder, host, _ = saved
    state = reload(folder, mesh=mesh, stage=stage).state
    assert_placed_alike(state, make("nnx", mesh, stage=stage)[0])
    chex.assert_trees_all_equal(reference.to_host(saved_leaves(state)), host)
    alone = reload(folder, mesh=mesh, stage=stage, params_only=True).state
    of_the_model = {name: x for name, x in host.items() if name.startswith(("params/", "model_state/"))}
    chex.assert_trees_all_equal(
        reference.to_host(saved_leaves(alone)) | of_the_model, reference.to_host(saved_leaves(alone))
    )
    assert int(alone.step) == 0


def test_what_a_checkpoint_lacks_or_has_too_much_is_named(saved, tmp_path):
    folder, _, _ = saved
    assert describe(folder).bytes_by_group["model_state"] > 0
    names = "model_state/norm/mean(/value)?"
    with pytest.raises(
        ValueError, match=rf"{names}: the checkpoint has it, the state has not(?s:.*)init_fn that returns"
    ):
        reload(folder, lambda key: NNX_INIT(key).params)
    reload(folder, lambda key: NNX_INIT(key).params, params_only=True)
    state = make((lambda key: NNX_INIT(key).params, lambda params, batch: 0.0), "8", stage=3)[0]
    with Checkpointer(tmp_path, log=pytest.fail) as checkpointer:
        checkpointer.save(1, state)
    for params_only in (False, True):
        with pytest.raises(ValueError, match=rf"{names}: the checkpoint has no such leaf(?s:.*)init_fn that returns"):
            reload(tmp_path, params_only=params_only)


def test_an_export_has_it_as_it_is(saved, tmp_path):
    folder, host, _ = saved
    export(folder, tmp_path / "out", dtype="bfloat16")
    tensors = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    params = {
        name.removeprefix("params/").replace("/", "."): x for name, x in host.items() if name.startswith("params/")
    }
    assert {tensors.pop(name).dtype for name in params} == {jnp.dtype(jnp.bfloat16)}
    model_state = {name.replace("/", "."): x for name, x in host.items() if name.startswith("model_state/")}
    chex.assert_trees_all_equal(tensors, model_state)


class Libraries:
    """Models of libraries whose state is not a dict: Equinox's batch norm, and Haiku's transform_with_state."""

    @staticmethod
    def equinox():
        eqx = pytest.importorskip("equinox")

        class Net(eqx.Module):
            up: eqx.nn.Linear
            norm: eqx.nn.BatchNorm
            down: eqx.nn.Linear

            def __init__(self, key):
                keys = jax.random.split(key)
                self.up = eqx.nn.Linear(48, 16, use_bias=False, key=keys[0])
                self.norm = eqx.nn.BatchNorm(16, axis_name="batch", mode="batch")
                self.down = eqx.nn.Linear(16, 4, key=keys[1])

            def __call__(self, x, state):
                x, state = self.norm(self.up(x), state)
                return self.down(jax.nn.relu(x)), state

        shapes = eqx.filter_eval_shape(eqx.nn.make_with_state(Net), jax.random.key(0))[0]
        static = eqx.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))[1]

        def init_fn(key):
            model, state = eqx.nn.make_with_state(Net)(key)
            return zero.Variables(params=eqx.filter(model, eqx.is_array), model_state=state)

        def apply(params, x, state):
            model = eqx.combine(params, static)
            return jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)

        return init_fn, apply

    @staticmethod
    def haiku():
        hk = pytest.importorskip("haiku")

        def forward(x):
            x = hk.BatchNorm(True, True, 0.9)(hk.Linear(16, with_bias=False)(x), is_training=True)
            return hk.Linear(4)(jax.nn.relu(x))

        net = hk.transform_with_state(forward)

        def init_fn(key):
            params, state = net.init(key, jnp.zeros((2, 48)))
            return zero.Variables(params=params, model_state=state)

        return init_fn, lambda params, x, state: net.apply(params, state, None, x)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["equinox", "haiku"])
def test_other_libraries(library):
    init_fn, apply = getattr(Libraries, library)()

    def loss_fn(params, batch, *, model_state):
        logits, model_state = apply(params, batch["x"].reshape(BATCH_SIZE, -1), model_state)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), None, model_state

    batch = make_batches(1)[0]
    variables = jax.jit(init_fn)(jax.random.key(1))
    of_params = lambda params: loss_fn(params, batch, model_state=variables.model_state)  # noqa: E731
    grads = jax.jit(jax.grad(lambda params: of_params(params)[0]))(variables.params)
    state, step, _ = make((init_fn, loss_fn), "8", stage=3)
    state, _ = step(state, batch)
    assert_close(state.params, jax.tree.map(lambda p, g: p - 0.05 * g, variables.params, grads), tolerance=FLOAT32)
    expected = jax.jit(lambda params: of_params(params)[2])(variables.params)
    assert_close(jax.tree.leaves(state.model_state), jax.tree.leaves(expected), tolerance=FLOAT32)


@pytest.mark.slow
@pytest.mark.tpu_compiler
def test_it_is_planned():
    def init_fn(key):
        params = {"w": jax.random.normal(key, (1024, 1024))}
        return zero.Variables(params=params, model_state=params)

    def loss_fn(params, batch, *, model_state):
        x = batch["x"].astype(params["w"].dtype)
        aim = jax.lax.stop_gradient(x @ model_state["w"].astype(x.dtype))
        target = jax.tree.map(lambda t, p: 0.9 * t + 0.1 * p, model_state, params)
        return jnp.square((x @ params["w"] - aim).astype(jnp.float32)).mean(), None, target

    config = zero.ZeroConfig(stage=3, precision="bf16")
    batch = {"x": jax.ShapeDtypeStruct((64, 1024), jnp.float32)}
    report = zero.plan(loss_fn, init_fn, optimizer(), batch=batch, topology="v5e:2x4", config=config, cache=None)
    assert report.memory.arguments["model_state"] == 4 * 1024 * 1024 // 8
    gathers = [row for row in report.comms.rows if row.kind.startswith("all-gather") and "model_state" in row.param]
    # Cast on the shards by the loss function, gathered once; the average is made on the shards.
    assert [(row.param, row.dtypes, row.num_executions) for row in gathers] == [("model_state/w", ("bf16",), 1)]

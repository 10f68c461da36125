"""All that optax exports as an optimizer trains sharded as on one device, or is refused with what it lacks."""

import contextlib
import functools
import gc
import inspect
import math
import warnings
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import optax.transforms
import pytest
import reference
from reference import assert_close, assert_placed_alike, mesh_of

import zero_jax as zero
from zero_jax.training.optimizer.update import first_opt_state

# Sums over a batch are made in another order on several devices; second derivatives and searches magnify that.
TOLERANCE = 2e-5
MESH = "4"


def are_matrices(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def adversary():
    return optax.chain(optax.contrib.normalize(), optax.sgd(0.05))


# What factories are given, by the names of their parameters; those without a default.
ARGUMENTS = {
    "learning_rate": 1e-2, "weight_decay": 1e-2, "inner": optax.adam(1e-2), "tx": optax.adam(1e-2), "decay": 0.9,
    "base_optimizer": optax.adam(1e-2), "optimizer": optax.sgd(1e-2), "opt": optax.sgd(1e-2), "max_norm": 1.0,
    "adv_optimizer": adversary(), "max_delta": 1.0, "threshold": 1.0, "step_size": -1e-2, "eta": 0.01, "gamma": 0.5,
    "step_size_fn": lambda count: -1e-2, "clipping": 0.1, "seed": 0, "key": jax.random.key(0), "rank": 4, "k": 2,
    "max_consecutive_errors": 3, "mask": are_matrices, "every_k_schedule": 2, "max_backtracking_steps": 15,
    "max_linesearch_steps": 15, "should_transform_fn": lambda step: step > 0, "freeze_mask": are_matrices,
    "measure_name": "norm", "measure": optax.tree.norm, "measures": {"norm": optax.tree.norm},
    "f": lambda updates, params=None: jax.tree.map(lambda u: 0.1 * u, updates), "fast_optimizer": optax.sgd(1e-2),
    "sync_period": 2, "slow_step_size": 0.5, "transforms": {True: optax.sgd(1e-2), False: optax.adam(1e-2)},
    "param_labels": are_matrices, "noise_multiplier": 0.1, "l2_norm_clip": 1.0,
}  # fmt: skip
MADE = {
    "chain": lambda: optax.chain(optax.trace(0.9), optax.scale(-1e-2)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "named_chain": lambda: optax.named_chain(("a", optax.adam(1e-2))),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda u, p: -0.1 * u),
    "scale_by_muon": lambda: optax.masked(
        optax.contrib.scale_by_muon(
            weight_dimension_numbers=lambda params: jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), params)
        ),
        are_matrices,
    ),
    "scale_by_backtracking_linesearch": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15, store_grad=True)
    ),
    "scale_by_zoom_linesearch": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(15)),
    "sophia": lambda: optax.contrib.sophia(1e-2, update_interval=2),
    "sam": lambda: optax.contrib.sam(optax.sgd(1e-2), adversary()),
    "sam_opaque": lambda: optax.contrib.sam(optax.sgd(1e-2), adversary(), opaque_mode=True),
    "differentially_private_aggregate": lambda: optax.contrib.differentially_private_aggregate(
        1.0, 0.1, key=jax.random.key(0)
    ),
    "dpsgd": lambda: optax.chain(MADE["differentially_private_aggregate"](), optax.sgd(1e-2)),
    "freeze": lambda: optax.chain(optax.sgd(1e-2), optax.freeze(are_matrices)),
}
# What is passed to each by hand, as optax's documentation has it; what is not here is called without.
ASKS = {
    "lbfgs": ("value", "grad", "value_fn"), "scale_by_backtracking_linesearch": ("value", "grad", "value_fn"),
    "scale_by_zoom_linesearch": ("value", "grad", "value_fn"), "sophia": ("obj_fn",), "sam_opaque": ("grad_fn",),
    "hutchinson_estimator_diag_hessian": ("obj_fn",), "momo": ("value",), "momo_adam": ("value",),
    "polyak_sgd": ("value",), "scale_by_polyak": ("value",), "reduce_on_plateau": ("value",),
}  # fmt: skip
ALONE = {"lookahead", "sam", "measure_with_ema", "monitor", *ASKS}
PER_EXAMPLE = {"dpsgd", "differentially_private_aggregate"}
# Other names of what is here, or its type.
OTHERS = {"with_extra_args_support", "multi_transform", "inject_stateful_hyperparams"}


def make(name, factory):
    if name in MADE:
        return MADE[name]()
    parameters = inspect.signature(factory).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty or p.name == "key"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # what is deprecated is there still
        return factory(**{n: ARGUMENTS[n] for n in needed})


@functools.cache
def factories():
    """Returns every public function (or `MultiSteps`) of optax that returns an optimizer, by its name."""
    found = {}
    for module in (optax, optax.contrib, optax.transforms):
        for name in sorted(vars(module)):
            value = getattr(module, name)
            if name.startswith("_") or name in OTHERS or not callable(value):
                continue
            if inspect.isclass(value):
                if name == "MultiSteps":
                    found[name] = value
                continue
            try:
                annotated = "GradientTransformation" in str(inspect.signature(value).return_annotation)
                tx = make(name, value)
            except (KeyError, TypeError, ValueError):  # it takes other arguments, which those of no optimizer do
                assert not annotated, f"optax.{name} is new: give its arguments above"
                continue
            if hasattr(tx, "init") and hasattr(tx, "update"):
                found[name] = value
    return found


def is_part_of_another(name):
    """Whether it is all of another one but the learning rate, as `scale_by_adam` of `adam`."""
    return name.removeprefix("scale_by_") in factories().keys() - {name}


def host_params():
    rng = np.random.default_rng(0)
    return {"w": rng.standard_normal((8, 12), dtype=np.float32) / 4, "b": np.full(12, 0.1, np.float32)}


def make_batches(num_steps):
    rng = np.random.default_rng(1)
    normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32)  # noqa: E731
    return [{"inputs": normal(8, 8), "targets": normal(8, 12)} for _ in range(num_steps)]


def loss_fn(params, batch):
    params = params.fast if isinstance(params, optax.LookaheadParams) else params
    return jnp.square(jnp.tanh(batch["inputs"] @ params["w"] + params["b"]) - batch["targets"]).mean()


def run_plain(tx, batches, params, *, loss=loss_fn, asks=()):
    @jax.jit
    def step(params, opt_state, batch):
        at = functools.partial(loss, batch=batch)
        value, grads = jax.value_and_grad(at)(params)
        values = {"value": value, "grad": grads, "value_fn": at, "obj_fn": at, "grad_fn": lambda p, _: jax.grad(at)(p)}
        values["value_fn"] = lambda p: at(p)
        extras = {name: values[name] for name in asks}
        taken = grads.fast if isinstance(params, optax.LookaheadParams) else grads
        updates, opt_state = tx.update(taken, opt_state, params, **extras)
        return optax.apply_updates(params, updates), opt_state

    opt_state = tx.init(params)
    for batch in batches:
        params, opt_state = step(params, opt_state, batch)
    return params, opt_state


def compare(tx, *, stage, asks=(), params=None, loss=loss_fn, num_steps=3, **fields):
    """Trains with and without ZeRO and compares params and state; the state is sharded as before and as estimated."""
    params, batches = host_params() if params is None else params, make_batches(num_steps)
    expected = run_plain(tx, batches, params, loss=loss, asks=asks)
    state, step = reference.make_trainer(loss, tx, mesh=mesh_of(MESH), stage=stage, params=params, **fields)
    before = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    for batch in batches:
        state, metrics = step(state, batch)
        assert int(metrics.nonfinite_leaf) == -1
        assert_placed_alike(state, before)
    assert len(step.compiled_for) == 1
    assert_close(state.params, expected[0], tolerance=TOLERANCE)
    assert_close(state.opt_state, expected[1], tolerance=TOLERANCE)
    return state


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_what_is_frozen_before_it_is_scaled_stays(stage):
    compare(optax.chain(optax.freeze({"w": True, "b": False}), optax.sgd(0.1)), stage=stage)


def test_all_of_optax_is_there():
    assert len(factories()) > 100 and {*ASKS} - {"sam_opaque"} < {*factories()} and PER_EXAMPLE < {*factories()}


@pytest.mark.slow
def test_no_optimizer_outlives_its_user():
    """What is traced of one is dropped with it, and so is what its functions hold."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), host_params())
    alive = {}
    for name, factory in factories().items():
        tx = make(name, factory)
        with contextlib.suppress(ValueError):  # some need what a step does not have
            assert first_opt_state(tx, shapes, mesh=None) is first_opt_state(tx, shapes, mesh=None)
        alive[name] = weakref.ref(tx.update if isinstance(tx, tuple) else tx)
        del tx
    gc.collect()
    assert not [name for name, reference in alive.items() if reference() is not None]


def test_a_step_keeps_no_optimizer_alive():
    def optimizer(scale):
        return optax.stateless_with_tree_map(lambda grad, _: grad * scale[0])

    scale = np.full(1, -0.1, np.float32)
    held = weakref.ref(scale)
    compare(optimizer(scale), stage=3)
    del scale
    gc.collect()
    assert held() is None


def made_small(name):
    """Returns an optimizer whose steps are small, so that what rounding makes of them is."""
    tx = make(name, factories()[name])
    return optax.chain(tx, optax.scale(-1e-2)) if name.startswith("scale_by_") else tx


@pytest.mark.slow  # a quarter of all compiles for 10 seconds
@pytest.mark.parametrize("stage", range(4))
def test_those_that_take_gradients_alone_equal_one_device(stage):
    """Many at once, each with params of its own: every fourth, from the stage on."""
    alone = [name for name in factories() if name not in ALONE | PER_EXAMPLE and not is_part_of_another(name)]
    names = alone[stage::4]
    tx = optax.partition({name: made_small(name) for name in names}, lambda params: {n: n for n in names})
    loss = lambda params, batch: sum(loss_fn(params[name], batch) for name in names)  # noqa: E731
    compare(tx, stage=stage, params={name: host_params() for name in names}, loss=loss)


def cases():
    """Those that call functions at all stages, with and without microbatches in turn; the others at one stage each."""
    usual = {("lbfgs", 3, 1), ("sophia", 1, 2), ("sam_opaque", 1, 2)}
    for i, name in enumerate(sorted(ALONE)):
        for stage in range(4) if name in ("lbfgs", "sophia", "sam_opaque") else [3 - i % 4]:
            k = 1 if stage % 2 == (name == "lbfgs") or name not in ("lbfgs", "sophia", "sam_opaque") else 2
            is_usual = (name, stage, k) in usual or name in ("sam", "monitor", "lookahead", "momo")
            yield pytest.param(name, stage, k, marks=[] if is_usual else pytest.mark.slow)


@pytest.mark.parametrize(("name", "stage", "k"), list(cases()))
def test_those_that_ask_for_more_equal_one_device(name, stage, k):
    if name not in MADE and name not in factories():
        pytest.skip(f"this release of optax has no {name}")
    params = host_params()
    if name == "lookahead":
        params = optax.LookaheadParams(fast=params, slow=params)
    tx = make(name, factories().get(name))
    if name == "measure_with_ema":  # its updates are measurements: it goes into a monitor
        tx = optax.monitor({"ema": tx})
    compare(tx, stage=stage, asks=ASKS.get(name, ()), params=params, num_microbatches=k, num_steps=2)


@pytest.mark.parametrize("stage", [pytest.param(stage, marks=[pytest.mark.slow] * (stage != 2)) for stage in range(4)])
def test_second_derivatives_of_a_lookup(stage):
    """As those of sophia, forward over reverse: the gradient of a lookup is a function of its own."""

    def loss_of(params, batch):
        rows = jnp.abs(3 * batch["inputs"][:, 0]).astype(int) % 8
        return jnp.square(jnp.tanh(params["w"][rows] + params["b"]) - batch["targets"]).mean()

    def update(grads, state, params, *, value_fn):
        curvature = jax.jvp(jax.grad(value_fn), (params,), (grads,))[1]
        return jax.tree.map(lambda g, c: -0.1 * g - c, grads, curvature), state

    compare(asking(update), stage=stage, asks=("value_fn",), loss=loss_of, num_steps=2)


def test_memories_of_a_search_are_sharded_as_the_params_are():
    state = zero.abstract_state(
        lambda key: host_params(), optax.lbfgs(memory_size=3), mesh=mesh_of(MESH), config=reference.make_config(stage=1)
    )
    memory, param = state.opt_state[0].diff_params_memory["w"], state.opt_state[0].params["w"]
    assert memory.shape == (3, 8, 12) and tuple(memory.sharding.spec)[1:] == tuple(param.sharding.spec)


@pytest.mark.parametrize("name", sorted(PER_EXAMPLE))
def test_gradients_of_examples_are_not_there(name):
    tx = make(name, factories()[name])
    for params in ({"w": np.ones((8, 12), np.float32)}, host_params()):  # with equal leading dims optax takes them
        loss = lambda params, batch: jnp.square(batch["inputs"] @ params["w"]).mean()  # noqa: E731
        with pytest.raises(ValueError, match=r"optimizer's update .* gradients of single examples"):
            reference.run_zero(loss, tx, make_batches(1), mesh=mesh_of(MESH), stage=1, params=params)


def asking(update):
    return optax.GradientTransformationExtraArgs(lambda params: (), update)


def test_what_a_step_cannot_make_is_named():
    tx = optax.chain(optax.sgd(0.1), asking(lambda updates, state, params, *, curvature: (updates, state)))
    with pytest.raises(ValueError, match=r"asks for 'curvature', which a step cannot make: .* value, loss, grad"):
        reference.run_zero(loss_fn, tx, make_batches(1), mesh=mesh_of(MESH), stage=1, params=host_params())


def test_a_rule_of_matrices_for_a_vector_is_named():
    numbers = optax.contrib.MuonDimensionNumbers(-2, -1)
    tx = optax.contrib.muon(0.1, muon_weight_dimension_numbers=lambda params: jax.tree.map(lambda _: numbers, params))
    with pytest.raises(ValueError, match=r"rank >= 2.* no rule of matrices for leaves without two dims: 'b' \[12\]"):
        reference.run_zero(loss_fn, tx, make_batches(1), mesh=mesh_of(MESH), stage=1, params=host_params())


@pytest.mark.parametrize(
    ("stage", "made", "used", "message"),
    [
        (1, optax.sgd(0.1), optax.adam(0.1), r"it holds no other leaf, and the step needs 0/count int32\[\]"),
        (
            3,
            optax.adam(0.1),
            optax.amsgrad(0.1),
            r"it holds no other leaf, and the step needs 0/nu_max/b float32\[12\]",
        ),
        (1, optax.adam(0.1), optax.lion(0.1), r"it holds 0/nu/b float32\[12\], and the step needs no other leaf"),
        (3, optax.adam(0.1), optax.adamw(0.1), r"it has its leaves in other containers"),
    ],
    ids=["adam", "amsgrad", "lion", "adamw"],
)
def test_the_state_of_another_optimizer_is_named(made, used, message, stage):
    """Its update fails, which says nothing of what the optimizer needs."""
    state, _ = reference.make_trainer(loss_fn, made, mesh=mesh_of(MESH), params=host_params(), stage=stage)
    step = zero.make_train_step(loss_fn, used, mesh=mesh_of(MESH), config=reference.make_config(stage=stage))
    with pytest.raises(ValueError, match=rf"state.opt_state does not match the optimizer: {message}. Make the state"):
        step(state, make_batches(1)[0])


def test_strict_promotion_is_not_for_optimizers():
    """Those of optax themselves fail under it."""
    with jax.numpy_dtype_promotion("strict"), pytest.raises(ValueError, match=r"'standard'.*optax"):
        reference.run_zero(loss_fn, optax.adamw(0.1), make_batches(1), mesh=mesh_of(MESH), params=host_params())


def test_a_state_that_grows_is_refused():
    grows = optax.GradientTransformation(
        lambda params: jnp.zeros(1), lambda updates, state, params=None: (updates, jnp.concatenate([state, state]))
    )
    with pytest.raises(ValueError, match=r"leaf '' of the optimizer's state from \[1\] to \[2\]"):
        reference.run_zero(loss_fn, grows, make_batches(1), mesh=mesh_of(MESH), stage=1, params=host_params())


def test_a_search_over_some_of_the_params():
    """The masked ones stay as they are, for the loss that is searched too."""
    params = {"base": host_params(), "free": {"scale": np.ones(12, np.float32)}}
    loss = lambda params, batch: loss_fn(  # noqa: E731
        {"w": params["base"]["w"] * params["free"]["scale"], "b": params["base"]["b"]}, batch
    )
    labels = {"base": "frozen", "free": "free"}
    search = {"free": optax.lbfgs(), "frozen": optax.set_to_zero()}
    run = functools.partial(
        reference.run_zero, loss, batches=make_batches(1), mesh=mesh_of(MESH), stage=3, params=params
    )
    state, _ = run(tx=optax.partition(search, labels, mask_compatible_extra_args=True))
    chex.assert_trees_all_equal(reference.to_host(state.params["base"]), params["base"])
    assert np.abs(np.asarray(state.params["free"]["scale"]) - 1).max() > 1e-3
    with pytest.raises(ValueError, match="mask_compatible_extra_args=True"):
        run(tx=optax.partition(search, labels))


@pytest.mark.parametrize("stage", [pytest.param(s, marks=[] if s == 1 else pytest.mark.slow) for s in (1, 3)])
def test_a_search_in_float16_has_the_unscaled_loss(stage):
    tx = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(8))
    state, history = reference.run_zero(
        loss_fn, tx, make_batches(1) * 2, mesh=mesh_of(MESH), stage=stage, params=host_params(), precision="fp16"
    )
    assert float(history[1].loss) < float(history[0].loss)
    assert not any(bool(metrics.skipped) for metrics in history)
    assert 0 < float(state.opt_state[1].value) < float(history[1].loss)


SHAPES = {"stack": (16, 128, 128), "w": (128, 512), "b": (256,)}
# What an update sends beside matrices, as a share of the params' bytes, and why.
SENDS = {
    "flatten": 1.4,  # one vector of all leaves in a row: no shard is a part of it, all are gathered
    # Sums of rows and columns, all-reduced: 4 / width of a matrix of float32, so less than 1% from 400 features on.
    "adafactor": 0.02,
    "scale_by_factored_rms": 0.02,
}


def sent_by_update(name):
    """Returns what a device sends for an optimizer's update, and for its matrices by the estimate, in params' bytes."""
    tx, mesh = make(name, factories().get(name)), zero.make_mesh(topology="v5p:2x2x4")
    tx = optax.monitor({"ema": tx}) if name == "measure_with_ema" else tx
    init = lambda key: {leaf: jax.random.normal(key, shape) for leaf, shape in SHAPES.items()}  # noqa: E731
    if name == "lookahead":
        init_fn = lambda key: optax.LookaheadParams(fast=init(key), slow=init(key))  # noqa: E731
    else:
        init_fn = init
    loss = lambda params, batch: batch.mean() * sum(jnp.square(x).sum() for x in jax.tree.leaves(params))  # noqa: E731
    config = zero.ZeroConfig(stage=3, overlap=False)
    state = zero.abstract_state(init_fn, tx, mesh=mesh, config=config)
    lowered = zero.make_train_step(loss, tx, mesh=mesh, config=config).lower(state, jax.ShapeDtypeStruct((16,), "f4"))
    sent = zero.comms.measure(lowered.compile(), unknown_trip_count=1).sent_bytes
    rows = zero.comms.estimate(state, mesh=mesh, config=config, tx=tx).rows
    of_matrices = sum(row.total_sent_bytes for row in rows if row.phase == "update")  # at stage 3 nothing else is
    params_bytes = 4 * sum(map(math.prod, SHAPES.values()))
    return sent / params_bytes, of_matrices / params_bytes


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("part", range(8))
def test_updates_send_scalars_and_whole_matrices(part):
    """Of the whole program, as this loss sends no params: its gradients are elementwise."""
    names = [name for name in sorted(factories()) if name not in PER_EXAMPLE and not is_part_of_another(name)]
    odd = {}
    for name in names[part::8]:
        sent, of_matrices = sent_by_update(name)
        if sent > of_matrices + 0.01 + SENDS.get(name, 0):
            odd[name] = f"sends {sent:.3f} of the params' bytes, {of_matrices:.3f} of it for matrices"
    assert not odd

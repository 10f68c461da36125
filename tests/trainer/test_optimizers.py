"""Optimizers that are composed, masked or scheduled train as on one device, with state that is sharded as the params.

Each of optax's own by itself: tests/training/optimizer/test_every_optimizer.py.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import reference
from reference import assert_close, assert_placed_alike, mesh_of, run_plain

from zero_jax.core.tree import leaf_names, path_name

# Sums over a batch are made in another order on several devices, which float32 rounds at 6e-8, and steps of 0.01 hardly
# magnify; what some optimizers keep is a sum over elements or steps.
TOLERANCE = 2e-6
MESH = "4"


@functools.cache
def host_params():
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32) / 4  # noqa: E731
    return {"in": {"kernel": normal(16, 32), "bias": normal(32)}, "out": {"kernel": normal(32, 8)}}


def make_batches(num_steps):
    rng = np.random.default_rng(1)
    normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32)  # noqa: E731
    return [{"inputs": normal(12, 16), "targets": normal(12, 8)} for _ in range(num_steps)]


def loss_fn(params, batch, extra=0):
    hidden = jnp.tanh(batch["inputs"] @ params["in"]["kernel"] + params["in"]["bias"] + extra)
    return jnp.square(hidden @ params["out"]["kernel"] - batch["targets"]).mean()


def by_path(fn):
    """Returns a function of params that maps `fn` over their paths."""
    return lambda params: jax.tree_util.tree_map_with_path(lambda path, _: fn(path_name(path)), params)


def is_kernel(path):
    return path.endswith("kernel")


def schedule():
    return optax.warmup_cosine_decay_schedule(1e-3, 1e-2, warmup_steps=2, decay_steps=10)


def ema_of_params():
    """Keeps a moving average of the params, as evaluation wants it."""

    def update(updates, ema, params):
        return updates, jax.tree.map(lambda e, p, u: 0.9 * e + 0.1 * (p + u), ema, params, updates)

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.asarray, params), update)


def labels(params):
    return by_path(lambda path: "kernels" if is_kernel(path) else "others")(params)


OPTIMIZERS = {
    "adamw_mask_by_path": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=by_path(is_kernel)),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8, momentum=0.9),
    "chain": lambda: optax.chain(
        optax.clip_by_global_norm(0.1),
        optax.scale_by_adam(),
        optax.add_decayed_weights(0.1, by_path(is_kernel)),
        optax.scale_by_learning_rate(schedule()),
    ),
    "masked": lambda: optax.chain(optax.masked(optax.trace(0.9), by_path(is_kernel)), optax.scale(-1e-2)),
    "multi_transform": lambda: optax.multi_transform(
        {"kernels": optax.adamw(1e-2), "others": optax.sgd(1e-2, momentum=0.9)}, labels
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=schedule(), weight_decay=0.1),
    "multi_steps": lambda: optax.MultiSteps(optax.adamw(1e-2), every_k_schedule=2),
    "ema": lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "ema_of_params": lambda: optax.chain(optax.adam(1e-2), ema_of_params()),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-2, warmup_steps=1),
}
OFTEN_USED = ("adafactor", "chain", "multi_transform", "multi_steps", "inject_hyperparams")


def cases():
    """Pairs each optimizer with stage 3, and with 1 or 2 by turns, which shard its state alike; one of them is slow."""
    for i, name in enumerate(OPTIMIZERS):
        for stage in (1 + i % 2, 3):
            is_usual = name in OFTEN_USED and (stage == 3) == (i % 3 == 0)
            yield pytest.param(name, stage, marks=[] if is_usual else pytest.mark.slow)


@pytest.mark.parametrize(("name", "stage"), list(cases()))
def test_equals_one_device_and_keeps_its_place(name, stage):
    tx, batches = OPTIMIZERS[name](), make_batches(3)
    chex.clear_trace_counter()
    params, opt_state, losses = run_plain(loss_fn, tx, batches, params=host_params())
    traced_once = chex.assert_max_traces(lambda *args: loss_fn(*args), n=1)
    state, step = reference.make_trainer(traced_once, tx, mesh=mesh_of(MESH), stage=stage, params=host_params())
    before = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    for batch, loss in zip(batches, losses, strict=True):
        state, metrics = step(state, batch)
        assert_close(metrics.loss, loss, tolerance=TOLERANCE)
        assert_placed_alike(state, before)
    assert_close(state.params, params, tolerance=TOLERANCE)
    assert_close(state.opt_state, opt_state, tolerance=TOLERANCE)
    assert_lies_as_params(state.opt_state)


def assert_lies_as_params(opt_state):
    """Asserts that leaves shaped as a param are sharded as it is, and that others are sharded where they divide."""
    shapes = dict(zip(leaf_names(host_params()), (x.shape for x in jax.tree.leaves(host_params())), strict=True))
    dims = {"in/kernel": (16, 8), "in/bias": (8,), "out/kernel": (32, 2)}  # of the shards on 4 devices
    found = 0
    for path, leaf in zip(leaf_names(opt_state), jax.tree.leaves(opt_state), strict=True):
        local = leaf.sharding.shard_shape(leaf.shape)
        param = next((p for p in shapes if path == p or path.endswith("/" + p)), None)
        if param and shapes[param] == leaf.shape:
            found += 1
            assert local == dims[param], path
        elif leaf.ndim and leaf.size >= reference.MIN_SHARD_SIZE and any(d % 4 == 0 for d in leaf.shape):
            assert np.prod(local) == leaf.size // 4, path
    assert found, leaf_names(opt_state)


def test_apply_if_finite_passes_over_a_bad_batch():
    tx, batches = optax.apply_if_finite(optax.adam(1e-2), 3), make_batches(3)
    batches[1]["targets"][-1] = np.nan  # on the last device only
    params, opt_state, _ = run_plain(loss_fn, tx, batches, params=host_params())
    state, _ = reference.run_zero(
        loss_fn, tx, batches, mesh=mesh_of(MESH), stage=2, params=host_params(), skip_nonfinite=False
    )
    assert int(state.opt_state.total_notfinite) == 1
    assert_close((state.params, state.opt_state), (params, opt_state), tolerance=TOLERANCE)


def lora_params():
    rng = np.random.default_rng(2)
    normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32) / 4  # noqa: E731
    return {"base": host_params(), "lora": {"down": normal(16, 4), "up": normal(4, 32)}}


def lora_loss(params, batch):
    lora = params["lora"]
    return loss_fn(params["base"], batch, batch["inputs"] @ lora["down"] @ lora["up"])


def is_frozen(path):
    return path.startswith("base")


def freezing(tx):
    transforms = {"frozen": optax.set_to_zero(), "free": tx}
    return optax.multi_transform(transforms, by_path(lambda path: "frozen" if is_frozen(path) else "free"))


@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        (1, "bf16"),
        (3, "fp32"),
        *[pytest.param(*x, marks=pytest.mark.slow) for x in ((2, "fp32"), (2, "bf16"), (3, "bf16"))],
    ],
)
def test_frozen_params_cost_nothing(stage, precision):
    """LoRA: no optimizer state, no gradient and no change for what is frozen."""
    tx, batches = freezing(optax.adamw(1e-2, weight_decay=0.1)), make_batches(3)
    state, step = reference.make_trainer(
        lora_loss, tx, mesh=mesh_of(MESH), stage=stage, params=lora_params(), precision=precision
    )
    assert not any("base" in path for path in leaf_names(state.opt_state))
    before = reference.to_host((state.params, state.master))
    assert gradients_computed(step, state, batches[0]) == {"lora/down", "lora/up"}
    for batch in batches:
        state, _ = step(state, batch)
    after = reference.to_host((state.params, state.master))
    for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True):
        assert (old == new).all() == ("base" in path_name(path)), path_name(path)
    if precision == "fp32":
        params, opt_state, _ = run_plain(lora_loss, tx, batches, params=lora_params())
        assert_close((state.params, state.opt_state), (params, opt_state), tolerance=TOLERANCE)


def gradients_computed(step, state, batch):
    """Returns the paths of the params whose shape, which nothing else has, some matrix product or sum of a step has."""
    jaxpr = jax.make_jaxpr(step.program.step)(state, batch)
    shapes = set()

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("dot_general", "reduce_sum"):
                shapes.add(tuple(sorted(eqn.outvars[0].aval.shape)))
            for value in jax.tree.leaves(
                tuple(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
            ):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    visit(inner)

    visit(jaxpr.jaxpr)
    leaves = zip(leaf_names(state.params), jax.tree.leaves(state.params), strict=True)
    return {path for path, leaf in leaves if tuple(sorted(leaf.shape)) in shapes}


def test_unfrozen_gradients_are_seen():
    """The control of the test above."""
    state, step = reference.make_trainer(lora_loss, optax.sgd(0.1), mesh=mesh_of(MESH), stage=3, params=lora_params())
    assert gradients_computed(step, state, make_batches(1)[0]) == set(leaf_names(state.params))

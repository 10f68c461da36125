"""Master params and state along the layers, beside all that a step can do, against plain optax on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from covering import covering_array
from test_matrices import BATCH, init_eight, init_stacked, loss_fn, matrix_dims

import zero_jax as zero
from zero_jax.training.state import gathering

# Params of the loss in bf16, and products in float32: a step has the numbers of one device.
BF16_PARAMS = zero.Precision(param=jnp.bfloat16, compute=jnp.float32, reduce=jnp.float32, master=jnp.float32)
FACTORS = {
    "stage": (1, 2, 3),
    "layers": (6, 8),  # six do not divide over all devices: over some of the axes, or not at all
    "axes": ("", "replica", "model", "pipe", "data_layout"),
    "offload": (None, "optimizer", "state"),
    "precision": ("fp32", BF16_PARAMS),
    "num_microbatches": (1, 2),
    "mu_dtype": (None, jnp.bfloat16),
}
SIZES = {
    "": {},
    "replica": {"replica": 2},
    "model": {"model": 2},
    "pipe": {"pipe": 2},
    "data_layout": {"data_layout": (4, 2)},
}
SPECS = {"up": jax.P(None, None, "model"), "down": jax.P(None, "model", None)}
ROWS = covering_array(FACTORS)
USUAL = {
    "stage": 3, "layers": 6, "axes": "data_layout", "offload": None, "precision": BF16_PARAMS, "num_microbatches": 1,
    "mu_dtype": jnp.bfloat16,
}  # fmt: skip


def optimizer(mu_dtype):
    return optax.contrib.muon(1e-2, muon_weight_dimension_numbers=matrix_dims, mu_dtype=mu_dtype)


@functools.cache
def on_one_device(layers, is_rounded, mu_dtype):
    """Returns params and state after a step, and the loss at these params."""
    tx, params = optimizer(mu_dtype), {6: init_stacked, 8: init_eight}[layers](jax.random.key(0))

    def used(params):
        return jax.tree.map(lambda x: x.astype("bfloat16").astype("f4") if is_rounded else x, params)

    @jax.jit
    def step(params):
        updates, state = tx.update(jax.grad(loss_fn)(used(params), BATCH), tx.init(params), params)
        params = optax.apply_updates(params, updates)
        return params, state, loss_fn(used(params), BATCH)

    return step(params)


@pytest.mark.parametrize("row", [USUAL, *(pytest.param(row, marks=pytest.mark.slow) for row in ROWS)], ids=str)
def test_a_step_and_an_evaluation_equal_one_device(row, monkeypatch):
    if row["stage"] == 2:  # stacks are gathered in parts of features, as large ones are
        monkeypatch.setattr(gathering, "_GATHERED_AT_ONCE_BYTES", 0)
    tx, mesh, specs = optimizer(row["mu_dtype"]), zero.make_mesh(**SIZES[row["axes"]]), {}
    if row["axes"] == "model":
        specs = {"param_specs": SPECS}
    config = zero.ZeroConfig(
        stage=row["stage"],
        precision=row["precision"],
        num_microbatches=2 if row["axes"] == "pipe" else row["num_microbatches"],
        offload=row["offload"],
        layer_shards=True,
        **specs,
    )
    init_fn = {6: init_stacked, 8: init_eight}[row["layers"]]
    with jax.default_matmul_precision("highest"):
        state = zero.init_state(init_fn, tx, jax.random.key(0), mesh=mesh, config=config)
        momentum = next(
            x for name, x in jax.tree.leaves_with_path(state.opt_state) if "'q'" in str(name) and x.ndim > 2
        )
        assert (momentum.sharding.spec[0] not in (None, "pipe")) == (row["layers"] == 8 or row["axes"] == "data_layout")
        step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
        state, _ = step(state, BATCH)
        loss = zero.make_eval_step(loss_fn, mesh=mesh, config=config)(state, BATCH).loss
        is_rounded = row["precision"] != "fp32" and row["stage"] < 3  # at stage 3 the master params are the params
        params, opt_state, expected_loss = on_one_device(row["layers"], is_rounded, row["mu_dtype"])
    of_state = 1e-2 if row["mu_dtype"] else 1e-5  # a bf16 moment is rounded the other way
    for found, expected, rtol in ((state.masters, params, 1e-5), (state.opt_state, opt_state, of_state)):
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=rtol, atol=1e-5)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)

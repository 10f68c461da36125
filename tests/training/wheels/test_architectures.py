"""Models as others write them train at every stage as on one device: U-Net, T5, Mamba, MAML; Tunix's and Penzai's.

The last two are tried where their wheels are installed (`google-tunix`, `penzai`). GANs, Haiku and Equinox are in
`test_model_state.py` and `test_gather_models.py`.
"""

import functools

import jax
import numpy as np
import optax
import pytest
from architectures import MODELS
from reference import assert_close, assert_placed_alike, make_trainer, mesh_of, norm, run_plain, to_host
from wheel_models import WHEEL_MODELS

pytestmark = pytest.mark.slow

NUM_STEPS = 2
ACCUMULATED = ("mamba", "unet")
# Sums over a batch are made in another order on several devices.
FLOAT32 = 1e-5
EPSILON = np.finfo(np.float32).eps


def optimizer():
    return optax.sgd(0.1, momentum=0.9)


@functools.cache
def plain(name):
    """Returns the loss function, the first params on the host, batches, and params and losses of plain optax."""
    init_fn, loss_fn, make_batch = MODELS[name] if name in MODELS else WHEEL_MODELS[name]()
    params = jax.tree.map(np.asarray, jax.jit(init_fn)(jax.random.key(0)))
    batches = [make_batch(seed) for seed in range(NUM_STEPS)]
    expected, _, losses = run_plain(loss_fn, optimizer(), batches, params=params)
    return loss_fn, params, batches, to_host(expected), losses


def check(name, stage, num_microbatches=1):
    """Asserts that losses, params and their changes are those of plain optax on one device, and sharding stays."""
    loss_fn, start, batches, expected, losses = plain(name)
    fields = {"mesh": mesh_of("8"), "stage": stage, "num_microbatches": num_microbatches}
    first, step = make_trainer(loss_fn, optimizer(), params=start, **fields)
    state, history = first, []
    for batch in batches:
        state, metrics = step(state, batch)
        history.append(metrics.loss)
        assert_placed_alike(state, first)
    assert_close(history, losses, tolerance=FLOAT32)
    assert_close(state.params, expected, tolerance=FLOAT32)
    for new, wanted, old in zip(*map(jax.tree.leaves, (to_host(state.params), expected, start)), strict=True):
        assert norm(wanted - old) > 0, "every param is trained"
        # Params near 1 are rounded to 1e-7 of themselves in each step, whatever is added to them.
        assert norm(new - wanted) <= FLOAT32 * norm(wanted - old) + 2 * EPSILON * norm(old)


@pytest.mark.parametrize(
    ("name", "stage"), [(name, stage) for name in MODELS for stage in (0, 1, 3) if stage or name in ACCUMULATED]
)
def test_equals_one_device(name, stage):
    """Some with microbatches where gradients of devices are summed, and at stage 0, which is as 1, without."""
    check(name, stage, num_microbatches=2 if stage and name in ACCUMULATED else 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what wheels use of JAX and Flax
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", WHEEL_MODELS)
def test_models_of_wheels_equal_one_device(name, stage):
    check(name, stage)

"""The whole state is donated: every leaf of it, at every stage and precision, and nothing of it is held twice.

What is donated is read from compiled programs, whose header pairs each result with the argument that it is written
over; that the memory really is the same one is seen on running steps.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from reference import mesh_of

import zero_jax as zero
from zero_jax import memory
from zero_jax.models import gpt

QUICK = [(1, "bf16"), (3, "fp16")]
ALL = [
    pytest.param(stage, precision, marks=() if (stage, precision) in QUICK else pytest.mark.slow)
    for stage in (0, 1, 2, 3)
    for precision in ("fp32", "bf16", "fp16")
]


def lower(stage, precision, *, mesh=None, **fields):
    """Lowers a step of the reference model; returns it and the abstract state."""
    mesh = mesh_of("4") if mesh is None else mesh
    tx, config = optax.adamw(1e-2), reference.make_config(stage=stage, precision=precision, **fields)
    state = zero.abstract_state(reference.init_params, tx, mesh=mesh, config=config)
    batch = {
        name: jax.ShapeDtypeStruct((2 * mesh.size, *x.shape[1:]), x.dtype)
        for name, x in reference.make_batch(0).items()
    }
    step = zero.make_train_step(reference.loss_fn, tx, mesh=mesh, config=config)
    return step.lower(state, batch), state


def written_over(compiled):
    """Returns the numbers of the arguments that results are written over, read from the text on its own."""
    header = re.search(r"input_output_alias=\{(.*?\)\s*)\}", compiled.as_text())
    return sorted(int(number) for number in re.findall(r"\{[\d, ]*\}:\s*\((\d+),", header[1] if header else ""))


def per_device_bytes(state):
    """Returns the bytes of a device's shards of an abstract state."""

    def size(x):
        data = jax.eval_shape(jax.random.key_data, x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        return np.prod(x.sharding.shard_shape(x.shape) + data.shape[len(x.shape) :], dtype=int) * data.dtype.itemsize

    return sum(size(x) for x in jax.tree.leaves(state))


def assert_all_donated(compiled, state):
    """Asserts that each leaf of the state, an argument of its own, has a result written over it."""
    num_leaves = len(jax.tree.leaves(state))
    assert written_over(compiled) == list(range(num_leaves))  # the state comes first
    report = memory.measure(compiled)
    assert (report.not_donated, report.warnings) == ((), ())
    return report


@pytest.mark.parametrize(("stage", "precision"), ALL)
def test_every_leaf_is_written_over(stage, precision):
    lowered, state = lower(stage, precision)
    compiled = lowered.compile()
    report = assert_all_donated(compiled, state)
    assert report.alias_bytes == per_device_bytes(state)
    assert report.output_bytes - report.alias_bytes < 512  # the metrics, and the table of pointers to the results


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_every_leaf_is_written_over_with_microbatches_clipping_and_skipping(stage):
    lowered, state = lower(stage, "bf16", num_microbatches=2, clip_norm=1.0, skip_nonfinite=True)
    assert_all_donated(lowered.compile(), state)


def test_skipping_copies_no_state():
    """A step that may skip has no more copies of the size of a param than one that never does."""
    tx, mesh = optax.adamw(1e-2), mesh_of("4")
    loss = lambda p, x: jnp.square(jnp.tanh(x @ p["a"]) @ p["b"]).mean()  # noqa: E731
    num_copies = {}
    for skip in (None, False):
        config = zero.ZeroConfig(stage=0, skip_nonfinite=skip)
        state = zero.abstract_state(lambda _: dict.fromkeys("ab", jnp.zeros((512, 512))), tx, mesh=mesh, config=config)
        step = zero.make_train_step(loss, tx, mesh=mesh, config=config)
        text = step.lower(state, jax.ShapeDtypeStruct((8, 512), jnp.float32)).compile().as_text()
        num_copies[skip] = len(re.findall(r"= f32\[512,512\]\S* copy\(", text))
    assert num_copies[None] <= num_copies[False], num_copies


def test_one_leaf_that_loses_its_donation_is_found():
    """The step as a user might write it, with the second moment of one leaf left out of what is donated."""
    tx = optax.adam(1e-3)
    params = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
    opt_state = tx.init(params)

    def step(state, kept, batch):
        params, (adam, *rest) = state["params"], state["opt_state"]
        full = adam._replace(nu={**adam.nu, "w": kept["opt_state"]})
        grads = jax.grad(lambda p: jnp.sum((batch @ p["w"] + p["b"]) ** 2))(params)
        updates, new = tx.update(grads, (full, *rest), params)
        return optax.apply_updates(params, updates), new

    adam, *rest = opt_state
    donated = {"params": params, "opt_state": (adam._replace(nu={"b": adam.nu["b"]}), *rest)}
    arguments = donated, {"opt_state": adam.nu["w"]}, jnp.ones((8, 64))
    compiled = jax.jit(step, donate_argnums=0).lower(*arguments).compile()
    report = memory.measure(compiled)
    assert [leaf.path for leaf in report.not_donated] == ["kept/opt_state"]
    (warning,) = report.warnings
    assert "1 leaves twice, the largest kept/opt_state" in warning
    whole = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()
    assert (memory.measure(whole).not_donated, memory.measure(whole).warnings) == ((), ())


@pytest.mark.parametrize(("stage", "precision"), [(2, "bf16")])
def test_running_steps_stay_in_the_memory_of_the_first_state(stage, precision):
    def places(state):
        leaves = [
            jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves_of(state)
        ]
        return [sorted(shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards) for x in leaves]

    leaves_of = jax.tree.leaves
    state, step = reference.make_trainer(
        reference.loss_fn, optax.adamw(1e-2), mesh=mesh_of("4"), stage=stage, precision=precision
    )
    state, _ = step(state, reference.make_batch(0))
    before = places(state)
    for seed in range(3):
        old = state
        state, _ = step(old, reference.make_batch(seed))
        assert all(x.is_deleted() for x in leaves_of(old))
    assert places(state) == before


TPU_CASES = [(0, "bf16"), (2, "fp32")]


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(("stage", "precision"), TPU_CASES)
def test_every_leaf_is_written_over_on_a_tpu(stage, precision):
    mesh = zero.make_mesh(topology="v5p:2x2x1")
    lowered, state = lower(stage, precision, mesh=mesh)
    report = assert_all_donated(lowered.compile(), state)
    # With the padding of its tiles the state takes what is aliased, to the byte.
    sizes = [leaf.num_bytes for leaf in report.leaves if leaf.group != "batch"]
    assert report.alias_bytes == sum(sizes[: len(jax.tree.leaves(state))]) == sum(sizes)


@pytest.mark.slow
@pytest.mark.tpu_compiler
def test_every_leaf_of_a_scanned_gpt_is_written_over_on_a_tpu():
    mesh, tx = zero.make_mesh(topology="v5p:2x2x1"), optax.adamw(3e-4)
    config = gpt.GPTConfig(vocab_size=512, seq_len=128, num_layers=2, d_model=256)
    zero_config = zero.ZeroConfig(stage=3, precision="bf16", overlap=False)
    state = zero.abstract_state(functools.partial(gpt.init, config), tx, mesh=mesh, config=zero_config)
    step = zero.make_train_step(gpt.loss_fn(config), tx, mesh=mesh, config=zero_config)
    tokens = jax.ShapeDtypeStruct((8, config.seq_len), jnp.int32)
    assert_all_donated(step.lower(state, {"inputs": tokens, "targets": tokens}).compile(), state)

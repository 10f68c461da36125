"""What the trace of a loss says, beside what programs of the TPU compiler do; it needs no TPU."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'jax[tpu]'")

import zero_jax as zero
from zero_jax import comms, memory
from zero_jax.analysis import trace_loss
from zero_jax.models import gpt

pytestmark = [pytest.mark.tpu_compiler, pytest.mark.slow]
GPT = gpt.GPTConfig(vocab_size=512, seq_len=512, num_layers=3, d_model=512, num_heads=8)
TX = optax.adamw(1e-3)


def compiled(loss_fn, init_fn, batch, **options):
    """Returns the trace, the comparison of the traffic, and the program's memory."""
    mesh = zero.make_mesh(topology="v5p:2x2x4", model=4)
    config = zero.ZeroConfig(precision="bf16", overlap=False, **options)
    state = zero.abstract_state(init_fn, TX, mesh=mesh, config=config)
    found = trace_loss(loss_fn, state.params, batch, mesh=mesh, config=config)
    program = zero.make_train_step(loss_fn, TX, mesh=mesh, config=config).lower(state, batch).compile()
    estimate = comms.estimate(state, mesh=mesh, config=config, traced=found)
    return found, comms.compare(estimate, comms.measure(program, mesh=mesh)), memory.measure(program)


@pytest.mark.parametrize(
    ("remat", "vocab", "stage"), [("own", True, 3), ("full_sharded", False, 2)], ids=["own", "sharded"]
)
def test_a_transformer_moves_over_the_model_axis_what_its_trace_says(remat, vocab, stage):
    tokens = jax.ShapeDtypeStruct((32, GPT.seq_len), jnp.int32)
    found, compared, held = compiled(
        gpt.loss_fn(GPT), functools.partial(gpt.init, GPT), {"inputs": tokens, "targets": tokens},
        stage=stage, remat=remat, param_specs=gpt.param_specs(GPT, vocab=vocab),
    )  # fmt: skip
    ratios = {row.phase: row.ratio for row in compared.rows if row.axes == "model"}
    assert ratios.keys() == {"forward", "backward"}, compared
    assert all(ratio == pytest.approx(1, abs=0.01) for ratio in ratios.values()), compared
    assert {row.axes: row.ratio for row in compared.by_axes}["model"] == pytest.approx(1, abs=0.01), compared
    # Good enough to tell what is worth compiling: never too little by a half, never more than three times.
    live = sum(held.temporaries.values()) if hasattr(held, "temporaries") else held.temp_bytes
    assert live / 2 < found.peak_bytes < 3 * live, (found, held)


def test_a_model_of_another_kind_moves_what_its_trace_says():
    """Gated blocks in a Python loop, with no attention and no remat."""
    num_blocks, width, hidden = 3, 512, 1024

    def init_fn(key):
        keys = jax.random.split(key, num_blocks)
        block = lambda key: {  # noqa: E731
            "gate": jax.random.normal(key, (width, hidden)) * 0.02,
            "up": jax.random.normal(key, (width, hidden)) * 0.02,
            "down": jax.random.normal(key, (hidden, width)) * 0.02,
        }
        return {"blocks": [block(key) for key in keys]}

    def loss_fn(params, batch):
        x = batch["x"].astype(params["blocks"][0]["up"].dtype)
        for block in params["blocks"]:
            y = x / (1 + jnp.abs(x).mean(-1, keepdims=True))
            x = x + (jax.nn.silu(y @ block["gate"]) * (y @ block["up"])) @ block["down"]
        return jnp.mean((x - batch["y"]).astype(jnp.float32) ** 2)

    x = jax.ShapeDtypeStruct((64, 128, width), jnp.float32)
    specs = {"blocks/[0-9]+/(gate|up)": P(None, "model"), "blocks/[0-9]+/down": P("model", None)}
    found, compared, _ = compiled(loss_fn, init_fn, {"x": x, "y": x}, stage=3, param_specs=specs)
    assert not found.unknown
    sums = 2 * (64 // 4 * 128 * width * 2) * 3 / 4
    # The first block's input has no gradient.
    assert found.model_bytes == (2 * num_blocks - 1) * sums
    assert {row.axes: row.ratio for row in compared.by_axes}["model"] == pytest.approx(1, abs=0.01), compared

"""Every pair of settings together: stage, mesh axes, remat, precision, accumulation, host memory, quantization ...

A covering array of the settings on the reference GPT in three frameworks, each row against one device and plain optax.
"""

import functools
import itertools

import gpt_linen
import gpt_nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from covering import covering_array, pairs_of
from jax.sharding import PartitionSpec

import zero_jax as zero
from zero_jax.models import gpt
from zero_jax.sharding.precision import LossScaleConfig

POLICIES = {
    "own": ("own",),
    "none": ("none",),
    "on a device": ("full", "attention"),
    "sharded": ("full_sharded", "dots_sharded"),
    "in host memory": ("full_offloaded",),
}
FACTORS = {
    "stage": (0, 1, 2, 3, "3 secondary"),
    "model": (1, 2, 4),
    "replica": (1, 2),
    # Those that a stage has: all of the params at stage 3 alone, where there is no secondary shard.
    "offload": (None, "optimizer", "most"),
    # And those that go with it: params that are gathered from master params, or at stage 3.
    "quantize": (None, "gathers", "both"),
    # By where a block keeps its values: the policies of one place take turns, `test_remat.py` has each of them.
    "remat": tuple(POLICIES),
    "precision": ("fp32", "bf16", "scaled"),
    "num_microbatches": (1, 2),
    "clip_norm": (None, 0.05),
    "framework": ("dict", "dict loop", "linen loop", "nnx"),
    "own_checkpoint": (False, True),
}
ROWS = covering_array(FACTORS, seed=62)
# With layers as stages, what goes with them: nothing quantized, no params in host memory. Some microbatches of these
# sizes are too small to be worth moving to the host, where the batch is not: such layers differ, and are refused.
# Microbatches are a multiple of stages, and the axes have eight devices.
STAGES = ("pipe", "replica", "num_microbatches")
PIPED = [
    {**dict(zip(STAGES, row.pop("stages"), strict=True)), **row}
    for row in covering_array(
        {
            **{name: values for name, values in FACTORS.items() if name not in STAGES},
            "stage": (0, 1, 2, 3),
            "model": (1, 2),
            "offload": (None, "optimizer"),
            "quantize": (None,),
            "remat": tuple(name for name in FACTORS["remat"] if name != "in host memory"),
            "stages": ((2, 1, 2), (2, 2, 4), (4, 1, 4)),
            "pipeline": ("gpipe", "1f1b", "circular"),
        },
        seed=0,
    )
]

# Loss scaling as for float16, in the dtype that XLA has products for on every backend.
PRECISIONS = {
    "fp32": "fp32",
    "bf16": "bf16",
    "scaled": zero.Precision(loss_scale=LossScaleConfig(initial=2.0**10)),
}
# As a share of each gradient's norm: float32 sums in another order; in bfloat16 the roundings of two blocks. Codes of 8
# bits round to 1 in 254 of a block's largest element.
TOLERANCES = {"fp32": 1e-5, "scaled": 1e-5, "bf16": 2.0**-5}
QUANTIZED = 2.0**-5
NUM_STEPS = 2


def test_every_pair_is_there():
    covered = set().union(*(pairs_of(row) for row in ROWS))
    names = sorted(FACTORS)
    wanted = {((a, x), (b, y)) for a in names for b in names if a < b for x in FACTORS[a] for y in FACTORS[b]}
    assert covered == wanted


def in_turn(rows):
    """Returns the rows with the policies of their `remat` in turn."""
    turns = {name: itertools.cycle(policies) for name, policies in POLICIES.items()}
    return [row | {"remat": next(turns[row["remat"]])} for row in rows]


def config_of(row):
    is_scanned = not row["framework"].endswith("loop")
    return gpt.GPTConfig(
        vocab_size=32,
        seq_len=16,
        num_layers=row["num_layers"],
        d_model=32,
        num_heads=4,
        scan=is_scanned,
        remat=row["own_checkpoint"],
    )


def num_layers_of(row):
    """Returns two layers, and in a pipeline as many as its groups have: test_pipeline.py has several in a group."""
    return max(2, row.get("pipe", 1) * (2 if row.get("pipeline") == "circular" else 1))


@functools.cache
def functions_of(framework, own_checkpoint, num_layers=2):
    """Returns `(init_fn, loss_fn)` of the GPT in a framework."""
    config = config_of({"framework": framework, "own_checkpoint": own_checkpoint, "num_layers": num_layers})
    kind = framework.split()[0]
    if kind == "dict":
        return functools.partial(gpt.init, config), gpt.loss_fn(config)
    return {"linen": gpt_linen, "nnx": gpt_nnx}[kind].make(config)


def specs_of(row):
    """Returns Megatron's specs by path, for stacked and for separate blocks."""
    lead = () if row["framework"].endswith("loop") else (None,)
    return {
        r"(?!.*(norm|embed)).*/(query|key|value|up)(/kernel.*)?": PartitionSpec(*lead, None, "model"),
        r".*/(out|down)(/.*)?": PartitionSpec(*lead, "model", None),
        r"embed(/.*)?": PartitionSpec("model", None),
    }


def make_batches():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32, (NUM_STEPS, 16, 17), dtype=np.int32)
    return [{"inputs": t[:, :-1], "targets": t[:, 1:]} for t in tokens]


def apart(params):
    """Returns the params of a Python loop over blocks, from those of a scan."""
    blocks = params["blocks"]
    count = len(jax.tree.leaves(blocks)[0])
    return params | {"blocks": [jax.tree.map(lambda x: x[i], blocks) for i in range(count)]}  # noqa: B023


@functools.cache
def params_of(framework, num_layers=2):
    if framework == "dict loop":
        return apart(params_of("dict", num_layers))
    init_fn, _ = functions_of(framework, False, num_layers)
    return jax.tree.map(np.asarray, jax.jit(init_fn)(jax.random.key(0)))


def optimizer():
    return optax.chain(reference.keep_grads(), optax.sgd(0.1, momentum=0.9))


@functools.cache
def plain_run(framework, clip_norm, compute_dtype, num_layers=2):
    """Trains on one device; returns params, the gradients of the last step after clipping, and losses."""
    if framework == "dict loop":  # a scan computes the same, and compiles in a part of the time
        params, grads, losses = plain_run("dict", clip_norm, compute_dtype, num_layers)
        return apart(params), apart(grads), losses
    _, loss_fn = functions_of(framework, False, num_layers)
    clip = optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm)
    params, opt_state, losses = reference.run_plain(
        lambda params, batch: loss_fn(params, batch)[0],
        optax.chain(clip, optimizer()),
        make_batches(),
        params=params_of(framework, num_layers),
        compute_dtype=compute_dtype,
    )
    return params, opt_state[1][0], losses


def refusal_of(row):
    """Returns what the error says of a row that makes no sense, or None."""
    if row.get("pipeline") == "1f1b" and row["precision"] == "scaled":
        return "a loss scale with pipeline='1f1b' is not supported"
    if row["remat"].endswith("_sharded") and row["model"] == 1:
        return r"shards residuals over `model`, but the mesh is .*make it with zero.make_mesh\(model="
    if row["remat"] == "own_sharded" and not row["own_checkpoint"]:
        return "the model's own jax.checkpoint regions, but it has none: choose 'full_sharded'"
    return None


def mesh_of(row):
    """Returns a mesh; with a secondary shard, `data` is over two axes as far as it divides."""
    data, pipe = 8 // row["model"] // row["replica"], row.get("pipe", 1)
    layout = (data // 2, 2) if data > 1 and has_secondary(row) else None
    return zero.make_mesh(model=row["model"], replica=row["replica"], pipe=pipe, data_layout=layout)


def has_secondary(row):
    return row["stage"] == "3 secondary" and 8 // row["model"] // row["replica"] > 2


def extras_of(row):
    """Returns the fields of what a row keeps in host memory and quantizes, as far as its stage has them."""
    stage, has_master = int(str(row["stage"])[0]), row["precision"] == "bf16"
    most = "all" if stage == 3 and not has_secondary(row) else "state"
    fields = {"offload": most if row["offload"] == "most" else row["offload"]}
    if row["quantize"] and (stage == 3 or (stage > 0 and has_master)):
        fields["quantize_gathers"] = "int8"
    if row["quantize"] == "both" and stage > 0:
        fields["quantize_grads"] = "int8"
    if has_secondary(row):
        fields["secondary"] = ("data_0",)
    return {"stage": stage, **fields}


def run(row):
    """Returns the last state and the metrics of each step."""
    _, loss_fn = functions_of(row["framework"], row["own_checkpoint"], num_layers_of(row))
    return reference.run_zero(
        loss_fn,
        optimizer(),
        make_batches(),
        params=params_of(row["framework"], num_layers_of(row)),
        mesh=mesh_of(row),
        **extras_of(row),
        pipeline=row.get("pipeline", "gpipe"),
        remat=row["remat"],
        precision=PRECISIONS[row["precision"]],
        num_microbatches=row["num_microbatches"],
        clip_norm=row["clip_norm"],
        param_specs=specs_of(row) if row["model"] > 1 else None,
    )


def name_of(row):
    return " ".join(f"{name}:{value}" for name, value in row.items())


@pytest.mark.slow
@pytest.mark.parametrize("row", [*in_turn(ROWS), *in_turn(PIPED)], ids=name_of)
def test_equals_one_device(row):
    refusal = refusal_of(row)
    if refusal is not None:
        with pytest.raises(ValueError, match=refusal):
            run(row)
        return
    state, history = run(row)
    compute_dtype = jnp.bfloat16 if row["precision"] == "bf16" else None
    params, plain_grads, losses = plain_run(row["framework"], row["clip_norm"], compute_dtype, num_layers_of(row))
    is_quantized = {"quantize_gathers", "quantize_grads"} & extras_of(row).keys()
    tolerance = QUANTIZED if is_quantized else TOLERANCES[row["precision"]]
    reference.assert_close([m.loss for m in history], losses, tolerance=tolerance)
    grads, wanted = (reference.to_host(x) for x in (state.opt_state[0], plain_grads))
    for grad, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        assert reference.norm(grad - expected) <= 10 * tolerance * reference.norm(expected)
    masters = state.params if state.master is None else state.master
    reference.assert_close(masters, params, tolerance=tolerance)
    assert [bool(m.skipped) for m in history] == [False] * NUM_STEPS


@pytest.mark.slow
def test_a_loss_that_knows_the_mesh():
    config = config_of({"framework": "dict", "own_checkpoint": True, "num_layers": 2})
    losses = functools.partial(zero.losses.softmax_cross_entropy_with_integer_labels, chunk_size=12)

    def make(mesh):
        token_losses = functools.partial(losses, mesh=mesh)
        return gpt.loss_fn(config, place=zero.sequence_parallel(mesh), token_losses=token_losses)

    mesh = zero.make_mesh(model=2)
    state, history = reference.run_zero(
        zero.MeshLoss(make),
        optimizer(),
        make_batches(),
        params=params_of("dict"),
        mesh=mesh,
        stage=3,
        param_specs=gpt.param_specs(config),
    )
    params, _, losses_of_one = plain_run("dict", None, None)
    reference.assert_close([m.loss for m in history], losses_of_one, tolerance=1e-5)
    reference.assert_close(state.params, params, tolerance=1e-5)
    evaluate = zero.make_eval_step(zero.MeshLoss(make), mesh=mesh, config=reference.make_config(stage=3))
    assert np.isfinite(evaluate(state.params, make_batches()[0]).loss)

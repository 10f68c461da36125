"""What a trace of the loss tells: traffic over `model`, residuals and operations, counted by hand for known models."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

import zero_jax as zero
from zero_jax import comms, memory
from zero_jax.analysis import trace_loss
from zero_jax.models import gpt
from zero_jax.transforms.flops import count_flops

P = PartitionSpec
GPT = gpt.GPTConfig(vocab_size=64, seq_len=16, num_layers=3, d_model=32, num_heads=4)
B = 16


def mesh_of(data=2, model=4):
    return zero.make_mesh(data=data, model=model)


@functools.cache
def traced(config=GPT, *, mesh=None, vocab=False, **options):
    mesh = mesh or mesh_of()
    params = jax.eval_shape(functools.partial(gpt.init, config), jax.random.key(0))
    zero_config = zero.ZeroConfig(precision="bf16", param_specs=gpt.param_specs(config, vocab=vocab), **options)
    tokens = jax.ShapeDtypeStruct((B, config.seq_len), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}
    return trace_loss(gpt.loss_fn(config), params, batch, mesh=mesh, config=zero_config)


STREAM = B // 2 * GPT.seq_len * GPT.d_model * 2  # bytes of the residual stream on a device
UNIT = STREAM * 3 / 4  # what a device sends to gather it


def test_the_paper_s_count_without_what_the_recomputation_does_not_need():
    """Section 8: 12 units a block, of which the backward pass needs no second sum of the recomputation: 10."""
    assert traced(num_microbatches=1).model_bytes == 10 * UNIT * GPT.num_layers
    assert traced(dataclasses.replace(GPT, remat=False)).model_bytes == 8 * UNIT * GPT.num_layers


def test_loops_and_microbatches_move_the_same():
    whole = traced()
    assert traced(dataclasses.replace(GPT, scan=False)).model_bytes == whole.model_bytes
    parts = traced(num_microbatches=4)
    assert parts.model_bytes == whole.model_bytes
    assert parts.peak_bytes < whole.peak_bytes / 2
    assert parts.residuals.device_bytes == whole.residuals.device_bytes / 4
    assert parts.flops == whole.flops


def test_a_split_vocabulary_adds_the_lookup_s_sum_and_the_head_s():
    more = traced(vocab=True).model_bytes - traced().model_bytes
    per_token = 3 * (B // 2 * GPT.seq_len * 4) * 2 * 3 / 4  # the largest logit, the sum, and the label's, in float32
    assert more == 4 * UNIT + per_token


def test_sharded_residuals_cost_one_gather_a_block_and_a_share_of_the_bytes():
    own, sharded = traced(remat="full"), traced(remat="full_sharded")
    assert sharded.model_bytes - own.model_bytes == UNIT * GPT.num_layers
    saved = own.residuals.device_bytes - sharded.residuals.device_bytes
    assert saved == GPT.num_layers * STREAM * 3 / 4


def test_offloaded_residuals_lie_on_the_host_in_shards():
    own, offloaded = traced(remat="full"), traced(remat="full_offloaded")
    assert offloaded.residuals.host_bytes == GPT.num_layers * STREAM / 4
    assert own.residuals.device_bytes - offloaded.residuals.device_bytes == GPT.num_layers * STREAM
    assert "in host memory" in str(offloaded)


def test_a_policy_is_applied_to_a_model_of_the_user_s_own():
    def loss(params, batch):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(jnp.tanh(x @ w["up"]) @ w["down"]), None), batch, params)
        return (x.astype(jnp.float32) ** 2).mean()

    shapes = {
        "up": jax.ShapeDtypeStruct((5, 32, 64), jnp.float32),
        "down": jax.ShapeDtypeStruct((5, 64, 32), jnp.float32),
    }
    batch = jax.ShapeDtypeStruct((B, 16, 32), jnp.float32)
    specs = {"up": P(None, None, "model"), "down": P(None, "model", None)}

    def run(remat):
        config = zero.ZeroConfig(param_specs=specs, remat=remat)
        return trace_loss(loss, shapes, batch, mesh=mesh_of(), config=config)

    none, full = run("none"), run("full")
    stream = B // 2 * 16 * 32 * 4
    forward = count_flops(jax.make_jaxpr(loss)(shapes, batch))
    assert full.flops - none.flops == forward  # the derivative of tanh needs what the second product gives, too
    assert none.residuals.device_bytes - full.residuals.device_bytes > 5 * stream
    assert full.residuals.device_bytes == pytest.approx(5 * stream, rel=0.25)
    sums = 2 * 3 / 4 * stream * 5
    assert none.model_bytes == 2 * sums  # one sum forward, one backward


def test_values_that_the_model_offloads_itself_are_seen():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["kept"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def block(x, w):
        return jnp.tanh(checkpoint_name(x, "kept") @ w)

    def loss(params, batch):
        step = jax.checkpoint(block, policy=policy, prevent_cse=False)
        return (jax.lax.scan(lambda x, w: (step(x, w), None), batch, params)[0] ** 2).mean()

    shape = jax.ShapeDtypeStruct((4, 32, 32), jnp.float32)
    batch = jax.ShapeDtypeStruct((B, 32), jnp.float32)
    found = trace_loss(loss, shape, batch, mesh=mesh_of(data=8, model=1), config=zero.ZeroConfig())
    assert found.residuals.host_bytes == 4 * B // 8 * 32 * 4
    assert found.model_bytes == 0


def test_params_in_host_memory_are_traced_as_on_the_devices():
    tokens = jax.ShapeDtypeStruct((B, GPT.seq_len), jnp.int32)
    batch, mesh = {"inputs": tokens, "targets": tokens}, mesh_of(data=8, model=1)
    found = []
    for offload in (None, "all"):
        config = zero.ZeroConfig(precision="bf16", offload=offload)
        state = zero.abstract_state(functools.partial(gpt.init, GPT), optax.adam(1e-3), mesh=mesh, config=config)
        assert {x.sharding.memory_kind == "pinned_host" for x in jax.tree.leaves(state.params)} >= {bool(offload)}
        found.append(trace_loss(gpt.loss_fn(GPT), state.variables, batch, mesh=mesh, config=config))
    assert found[0].flops == found[1].flops and found[0].peak_bytes == found[1].peak_bytes


def test_heads_that_do_not_divide_are_told():
    found = traced(dataclasses.replace(GPT, num_heads=2))
    assert found.model_bytes is None
    assert "takes the 4 shards of dim 2 apart" in found.unknown
    assert "unknown" in str(found)


# In the estimates.


def estimates(mesh, *, trace, stage=3, **options):
    config = zero.ZeroConfig(
        stage=stage, precision="bf16", param_specs=gpt.param_specs(GPT), min_shard_size=1, **options
    )
    init = functools.partial(gpt.init, GPT)
    state = zero.abstract_state(init, optax.adamw(1e-3), mesh=mesh, config=config)
    found = traced(mesh=mesh, vocab=True) if trace else None
    sent = comms.estimate(state, mesh=mesh, config=config, traced=found)
    return sent, memory.estimate(state, mesh=mesh, config=config, traced=found)


@pytest.mark.parametrize(("stage", "psi"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_the_traffic_over_data_is_that_of_a_share_of_the_model(stage, psi):
    sent, _ = estimates(mesh_of(), trace=True, stage=stage)
    norms = 2 * GPT.num_layers * GPT.d_model + GPT.d_model  # whole over `model`
    share = (GPT.num_params - norms) / 4 + norms
    assert sent.num_params == share
    assert sent.by_axes["data"] == pytest.approx(psi * 2 * share / 2, rel=0.01)
    assert sent.by_axes["model"] == traced(vocab=True).model_bytes
    assert f"{psi * 2 / 2:.3f} bytes a param over data" in str(sent)


def test_without_a_trace_the_estimate_says_what_it_lacks():
    sent, _ = estimates(mesh_of(), trace=False)
    assert set(sent.by_axes) == {"data"}
    assert "not counted: activations over model: give traced=zero.trace_loss" in str(sent)
    assert not estimates(mesh_of(data=8, model=1), trace=False)[0].not_counted


def test_unknown_primitives_are_named_in_the_estimate():
    def loss(params, batch):
        return jnp.linalg.eigh(batch @ params)[0].sum()

    mesh, specs = mesh_of(), P(None, "model")
    config = zero.ZeroConfig(param_specs=specs)
    state = zero.abstract_state(lambda key: jnp.zeros((32, 32)), optax.sgd(0.1), mesh=mesh, config=config)
    found = trace_loss(loss, state.params, jax.ShapeDtypeStruct((B, 32, 32), jnp.float32), mesh=mesh, config=config)
    assert "eigh" in comms.estimate(state, mesh=mesh, config=config, traced=found).not_counted


def test_residuals_of_the_trace_are_a_group_of_the_memory_estimate():
    _, held = estimates(mesh_of(), trace=True)
    assert held.by_group["residuals"] == traced(vocab=True).residuals.device_bytes > 0
    _, lacking = estimates(mesh_of(), trace=False)
    assert "residuals" not in lacking.by_group
    assert held.total_bytes - held.by_group["residuals"] == lacking.total_bytes


@pytest.mark.parametrize(
    ("remat", "device", "host"),
    [("own", 1, 0), ("none", 12, 0), ("full_sharded", 1 / 4, 0), ("full_offloaded", 0, 1 / 4)],
)
def test_the_paper_s_residuals_follow_the_policy(remat, device, host):
    config = zero.ZeroConfig(precision="bf16", remat=remat)
    found = memory.transformer_residuals(GPT, batch_size=B, mesh=mesh_of(), config=config)
    assert found.device_bytes == device * GPT.num_layers * STREAM
    assert found.host_bytes == host * GPT.num_layers * STREAM


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_constant_factor_is_no_residual(precision):
    """What the backward pass is handed may be a literal, such as the factor of the logits."""

    def loss(params, batch):
        logits = batch.astype(params.dtype) @ params * 32**-0.5
        return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[..., 0])

    mesh, config = mesh_of(data=8, model=1), zero.ZeroConfig(precision=precision)
    params, batch = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((32, 64), (B, 32)))
    found = trace_loss(loss, params, batch, mesh=mesh, config=config)
    itemsize = 2 if precision == "bf16" else 4
    assert found.residuals.device_bytes >= B // 8 * 64 * itemsize


def test_python_s_numbers_are_params_as_they_are_to_a_step():
    weights, config = jnp.ones((16, 4)), zero.ZeroConfig(stage=3)
    loss_fn = lambda params, x: jnp.square(x @ params["w"]).mean() * params["scale"]  # noqa: E731
    of_number, of_array = (
        trace_loss(loss_fn, {"w": weights, "scale": scale}, jnp.ones((8, 16)), mesh=mesh_of(), config=config)
        for scale in (2.0, jnp.float32(2))
    )
    assert of_number.flops == of_array.flops > 0


VOCAB, WIDTH, LENGTH = 4096, 64, 8
EXAMPLES = 32 * LENGTH * WIDTH  # elements of the rows that are looked up


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(("stage", "k"), [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2)])
def test_rows_that_are_looked_up_move_and_the_last_param_is_gathered_once(is_tied, stage, k):
    def init(key):
        params = {"embed": jnp.zeros((VOCAB, WIDTH)), "mid": jnp.zeros((WIDTH, WIDTH))}
        return params if is_tied else {**params, "head": jnp.zeros((VOCAB, WIDTH))}

    def loss(params, batch):
        x = jnp.tanh(params["embed"][batch] @ params["mid"])
        return jax.nn.logsumexp(x @ params["embed" if is_tied else "head"].T, axis=-1).mean()

    mesh = zero.make_mesh(data=8)
    config = zero.ZeroConfig(stage=stage, precision="bf16", min_shard_size=1, num_microbatches=k)
    state = zero.abstract_state(init, optax.sgd(0.1), mesh=mesh, config=config)
    found = trace_loss(loss, state.params, jax.ShapeDtypeStruct((32, LENGTH), jnp.int32), mesh=mesh, config=config)
    sent = functools.partial(comms.estimate, state, mesh=mesh)
    table, mid, rows = (n * 2 * 7 / 8 for n in (VOCAB * WIDTH, WIDTH * WIDTH, EXAMPLES / 8))
    all_params = table * (1 if is_tied else 2) + mid
    gathers = {
        ("all-gather", "forward"): k * (table + mid),
        ("all-gather", "backward"): k * mid,
        ("all-to-all", "forward"): rows + k * table / 8,  # from shards of rows to shards of features
    }
    assert {(row.kind, row.phase): row.total_sent_bytes for row in sent(config=config, traced=found).rows} == {
        **(gathers if stage == 3 else {("all-gather", "update"): all_params}),
        ("reduce-scatter", "backward"): k * (table + mid),
        ("all-to-all", "backward"): rows + k * table / 8,
    }
    assert sent(config=config).sent_bytes == (3 * k if stage == 3 else k + 1) * all_params
    other = dataclasses.replace(config, stage=5 - stage if stage > 1 else 3)
    assert sent(config=other, traced=found).sent_bytes == sent(config=other).sent_bytes  # the trace is of another stage


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data_0": 4, "data_1": 2}], ids=["1 axis", "2 axes"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_gradient_of_a_small_table_that_is_looked_up_moves_once_for_each_use(is_tied, mesh):
    """It is gathered, as it is smaller than the rows; all-to-alls bring what devices have of its gradient to shards."""
    num_bytes, head = 2 * 16 * WIDTH * 7 / 8, {} if is_tied else {"head": jnp.zeros((16, WIDTH))}

    def loss(params, batch):
        return jax.nn.logsumexp(params["embed"][batch] @ params["embed" if is_tied else "head"].T, axis=-1).mean()

    mesh = jax.make_mesh(tuple(mesh.values()), tuple(mesh), axis_types=(jax.sharding.AxisType.Auto,) * len(mesh))
    config = zero.ZeroConfig(stage=3, precision="bf16", min_shard_size=1)
    init = lambda key: {"embed": jnp.zeros((16, WIDTH)), **head}  # noqa: E731
    state = zero.abstract_state(init, optax.sgd(0.1), mesh=mesh, config=config)
    found = trace_loss(loss, state.params, jax.ShapeDtypeStruct((32, LENGTH), jnp.int32), mesh=mesh, config=config)
    sent = collections.Counter()
    for row in comms.estimate(state, mesh=mesh, config=config, traced=found).rows:
        sent[row.kind, row.phase] += row.total_sent_bytes
    assert sent == {
        ("all-gather", "forward"): num_bytes * (1 if is_tied else 2),
        ("reduce-scatter", "backward"): num_bytes,
        ("all-to-all", "backward"): num_bytes,
    }
    uses = found.to_json()["uses"]["embed"]
    assert uses["gathered_in"] == ["forward"] and uses["is_scattered"] == is_tied


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data_0": 4, "data_1": 2}], ids=["1 axis", "2 axes"])
def test_the_gradient_of_lookups_of_more_rows_than_the_table_has_moves_once_beside_rows_that_move(mesh):
    """It is that of copies of each device's own, and no reduce-scatter besides."""

    def loss(params, batch):
        of_many = params["embed"][(batch[..., None] + jnp.arange(128)) % VOCAB].mean(2)
        return ((params["embed"][batch] @ params["mid"]) * of_many).mean()

    mesh = jax.make_mesh(tuple(mesh.values()), tuple(mesh), axis_types=(jax.sharding.AxisType.Auto,) * len(mesh))
    config = zero.ZeroConfig(stage=2, precision="bf16", min_shard_size=1)
    init = lambda key: {"embed": jnp.zeros((VOCAB, WIDTH)), "mid": jnp.zeros((WIDTH, WIDTH))}  # noqa: E731
    state = zero.abstract_state(init, optax.sgd(0.1), mesh=mesh, config=config)
    found = trace_loss(loss, state.params, jax.ShapeDtypeStruct((32, LENGTH), jnp.int32), mesh=mesh, config=config)
    sent = comms.estimate(state, mesh=mesh, config=config, traced=found).rows
    scattered = [row.total_sent_bytes for row in sent if row.kind == "reduce-scatter"]
    assert sum(scattered) == WIDTH * WIDTH * 2 * 7 / 8
    moved = sum(row.total_sent_bytes for row in sent if row.kind == "all-to-all")
    steps = sum((1 - 1 / size) / 8 for size in mesh.shape.values())  # of the rows, and of the gradient they make
    assert moved == VOCAB * WIDTH * 2 * 7 / 8 + (EXAMPLES + VOCAB * WIDTH) * 2 * steps


def test_a_leaf_of_the_model_s_state_is_gathered_alone_and_a_param_beside_its_gradient():
    params = {"embed": jnp.zeros((VOCAB, WIDTH)), "mid": jnp.zeros((WIDTH, WIDTH))}
    lora = zero.Lora(rules=["mid"], rank=2)

    def loss(params, batch):
        return jax.nn.logsumexp(jnp.tanh(batch @ params["mid"]) @ params["embed"].T, axis=-1).mean()

    def whole_bytes(fn, init, **how):
        config = zero.ZeroConfig(stage=3, precision="bf16", min_shard_size=1)
        variables, batch = jax.eval_shape(init, jax.random.key(0)), jax.ShapeDtypeStruct((B, WIDTH), jnp.float32)
        return trace_loss(fn, variables, batch, mesh=zero.make_mesh(data=8), config=config).whole_bytes(**how)

    table, sharded = VOCAB * WIDTH * 2, {"are_sharded": True, "scatters": True}
    assert whole_bytes(loss, lambda key: params, **sharded) == 2 * table
    assert whole_bytes(lora.loss_fn(loss), lambda key: lora.init(params, key), **sharded) == table
    stored_whole = {"are_sharded": False, "scatters": True}
    assert whole_bytes(loss, lambda key: params, **stored_whole) == table
    assert whole_bytes(lora.loss_fn(loss), lambda key: lora.init(params, key), **stored_whole) < table

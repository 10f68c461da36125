"""What `gather_on_use` keeps from the forward to the backward pass, and how often it gathers."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gathering import check, examples, normal, specs_of
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from reference import mesh_of

import zero_jax as zero
from zero_jax import hlo

LAYERS, WIDTH, RANK, BATCH_SIZE = 5, 64, 16, 16

WEIGHTS = [np.zeros((WIDTH, WIDTH), np.float32) for _ in range(LAYERS)]
STACK = np.zeros((LAYERS, WIDTH, WIDTH), np.float32)
policies = jax.checkpoint_policies


def apply(x, w):
    return jnp.tanh(x @ w)


def loop(layer, params, x):
    for w in params:
        x = layer(x, w)
    return jnp.mean(x**2)


def scan(layer, params, x):
    return jnp.mean(lax.scan(lambda x, w: (layer(x, w), None), x, params)[0] ** 2)


def abstract(params, shardings):
    return jax.tree.map(lambda p, s: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=s), params, shardings)


def batch_of(mesh, width=WIDTH, size=BATCH_SIZE):
    return jax.ShapeDtypeStruct((size, width), jnp.float32, sharding=zero.batch_sharding(mesh))


def gathered_residuals(fn, params, **options):
    """Returns the shapes of the residuals that are as large as a part of a weight and whole on each device."""
    mesh = mesh_of("8")
    specs = specs_of(params, mesh)
    gathered = zero.gather_on_use(fn, specs, mesh=mesh, **options)
    forward = jax.jit(lambda params, x: jax.vjp(lambda params: gathered(params, x), params)[1])
    lowered = forward.lower(abstract(params, specs), batch_of(mesh))
    outputs = zip(jax.tree.leaves(lowered.out_info), jax.tree.leaves(lowered.compile().output_shardings), strict=True)
    return [out.shape for out, s in outputs if s.shard_shape(out.shape) == out.shape and out.size >= WIDTH * RANK]


@pytest.mark.parametrize(("run", "params"), [(loop, WEIGHTS), (scan, STACK)], ids=["loop", "scan"])
def test_gathered_params_are_no_residuals(run, params):
    # The last use of the forward pass is the first of the backward pass: in a loop of Python's it is kept.
    assert gathered_residuals(lambda params, x: run(apply, params, x), params) == [(WIDTH, WIDTH)] * (run is loop)


@pytest.mark.parametrize(
    ("run", "params", "kept"),
    # The gradient of the first layer does not need its weight, but a scan does not know which layer is the first.
    [(loop, WEIGHTS, [(WIDTH, WIDTH)] * (LAYERS - 1)), (scan, STACK, [(LAYERS, WIDTH, WIDTH)])],
    ids=["loop", "scan"],
)
def test_keep_gathered_keeps_them(run, params, kept):
    assert gathered_residuals(lambda params, x: run(apply, params, x), params, keep_gathered=True) == kept


def lora(x, p):
    return jnp.tanh(x @ (p["w"] + p["a"] @ p["b"]))


def weight_norm(x, p):
    return jnp.tanh(x @ (p["w"] / jnp.linalg.norm(p["w"], axis=0)))


def several_forms(x, p):
    w = p["w"]
    x = x @ w.T.reshape(4, WIDTH // 4, WIDTH).transpose(2, 0, 1).reshape(WIDTH, WIDTH)
    x = (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)
    return jnp.tanh(x @ jnp.cumsum(w, axis=1) + x @ jnp.concatenate([w[: WIDTH // 2], w[WIDTH // 2 :]]))


@pytest.mark.parametrize("layer", [lora, weight_norm, several_forms])
def test_what_is_made_of_params_is_no_residual(layer):
    params = {"w": STACK, "a": STACK[:, :, :RANK], "b": STACK[:, :RANK]}
    assert gathered_residuals(lambda params, x: scan(layer, params, x), params) == []


@pytest.mark.parametrize(
    "policy",
    [None, policies.dots_saveable, policies.everything_saveable, policies.save_anything_except_these_names("none")],
    ids=["none", "dots", "everything", "anything_except"],
)
@pytest.mark.parametrize(("run", "params"), [(loop, WEIGHTS), (scan, STACK)], ids=["loop", "scan"])
def test_a_policy_of_the_user_does_not_save_gathered_params(policy, run, params):
    layer = jax.checkpoint(apply, policy=policy)
    assert gathered_residuals(lambda params, x: run(layer, params, x), params) == []


# --- how often -------------------------------------------------------------------------------------------------------


def num_gathers(fn, params, *, transform=jax.grad, **options):
    """Returns how many all-gathers of whole weights a program runs."""
    mesh = mesh_of("8")
    specs = specs_of(params, mesh)
    gathered = zero.gather_on_use(fn, specs, mesh=mesh, **options)
    program = jax.jit(transform(gathered)).lower(abstract(params, specs), batch_of(mesh)).compile()
    gathers = [c for c in hlo.collectives(program.as_text()) if c.kind == "all-gather"]
    assert all(c.full_bytes == 4 * WIDTH * WIDTH * len(c.dtypes) for c in gathers)
    return sum(c.num_executions * len(c.dtypes) for c in gathers)


def test_gathers_of_a_python_loop():
    def fn(params, x):
        return loop(apply, params, x)

    assert num_gathers(fn, WEIGHTS, transform=lambda fn: fn) == LAYERS
    # Again for the backward pass all but the first layer, which does not need it, and the last, which has just had it.
    assert num_gathers(fn, WEIGHTS) == LAYERS + LAYERS - 2
    assert num_gathers(fn, WEIGHTS, keep_gathered=True) == LAYERS


def test_gathers_of_a_scan():
    def fn(params, x):
        return scan(apply, params, x)

    assert num_gathers(fn, STACK) == 2 * LAYERS
    assert num_gathers(fn, STACK, keep_gathered=True) == LAYERS


def scaled(x, p):
    return jnp.tanh(x @ p["w"]) * p["scale"]


def in_pairs(layer, params, x):
    of_pair = lambda x, p: functools.reduce(layer, [jax.tree.map(lambda w, i=i: w[i], p) for i in range(2)], x)  # noqa: E731
    return scan(of_pair, jax.tree.map(lambda w: w.reshape(-1, 2, *w.shape[1:]), params), x)


@pytest.mark.parametrize("run", [scan, in_pairs, loop])
def test_vectors_of_layers_are_gathered_once(run):
    """As a stack, also those that a Python loop has apart."""
    mesh, num_layers = mesh_of("8"), 6
    params = {"w": normal(num_layers, WIDTH, WIDTH), "scale": np.ones((num_layers, WIDTH), np.float32)}
    if run is loop:
        params = [{name: stack[i] for name, stack in params.items()} for i in range(num_layers)]
    fn, specs = functools.partial(run, scaled), specs_of(params, mesh)
    program = jax.jit(jax.grad(zero.gather_on_use(fn, specs, mesh=mesh)), out_shardings=specs)
    text = program.lower(abstract(params, specs), batch_of(mesh)).compile().as_text()
    gathers = [c for c in hlo.collectives(text) if c.kind == "all-gather"]
    little = [(c.full_bytes, c.num_executions) for c in gathers if c.full_bytes < 4 * WIDTH**2]
    assert little == [(4 * num_layers * WIDTH, 1)]
    report = check(fn, params, np.tile(examples(), (1, WIDTH // 16)), mesh=mesh)
    assert all("once" in event.reason for event in report.events if "scale" in event.path)


def test_gathers_of_rematerialized_layers():
    def fn(params, x):
        return loop(jax.checkpoint(apply), params, x)

    assert num_gathers(fn, WEIGHTS) == 2 * LAYERS


def test_gathers_of_a_recurrent_weight():
    def fn(params, x):
        return jnp.mean(lax.fori_loop(0, LAYERS, lambda _, x: apply(x, params["w"]), x) ** 2)

    params, specs = {"w": WEIGHTS[0]}, {"w": P("data")}
    assert num_gathers(fn, params) == 1
    # In each iteration, both ways; XLA:CPU then takes the two gathers out of the two loops.
    assert num_gathers(fn, params, max_hoisted_bytes=0) == 2
    for max_hoisted_bytes, reason in ((1 << 20, f"once before {LAYERS} iterations"), (0, "dot_general")):
        options = {"mesh": mesh_of("8"), "max_hoisted_bytes": max_hoisted_bytes}
        (event,) = zero.gather_report(fn, specs, params, batch_of(mesh_of("8")), **options).events
        assert event.reason.startswith(reason)


def frozen_first(layer):
    """Also calls a layer with params without gradient, as a discriminator is called for the generator's loss."""
    return lambda x, w: layer(layer(x, lax.stop_gradient(w)), w)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, frozen_first], ids=["plain", "checkpoint", "frozen"])
def test_what_layers_of_a_python_loop_share_is_gathered_and_reduced_once(wrap, stage):
    """A gradient that is reduced once is an all-to-all here, of what devices have of it."""

    def fn(params, x):
        for _ in range(2):  # as a network that is called on two inputs
            x = wrap(apply)(x, params["w"])
        return jnp.mean(x**2)

    mesh, config = mesh_of("8"), zero.ZeroConfig(stage=stage, min_shard_size=1)
    init_fn = lambda key: {"w": jnp.asarray(WEIGHTS[0])}  # noqa: E731
    state = zero.abstract_state(init_fn, optax.sgd(0.1), mesh=mesh, config=config)
    step = zero.make_train_step(fn, optax.sgd(0.1), mesh=mesh, config=config)
    text = step.lower(state, batch_of(mesh)).compile().as_text()
    moved = collections.Counter(c.kind for c in hlo.collectives(text) if c.full_bytes > WIDTH)
    assert moved == {"all-gather": 1, "all-to-all": 1}


def test_a_large_param_of_two_products_leaves_those_of_more_gathered_once():
    def fn(params, x):
        x = jnp.tanh(x @ params["table"]) @ params["table"].T
        for _ in range(3):
            x = apply(x, params["w"])
        return jnp.mean(x**2)

    params = {"table": np.zeros((WIDTH, 8 * WIDTH), np.float32), "w": WEIGHTS[0]}
    options = {"mesh": mesh_of("8"), "max_hoisted_bytes": params["table"].nbytes}
    report = zero.gather_report(fn, {"table": P("data"), "w": P("data")}, params, batch_of(mesh_of("8")), **options)
    assert [event.reason for event in report.events if event.path == "w"] == ["once for 3 products"]
    assert [event.reason for event in report.events if event.path == "table"] == ["dot_general"] * 2


def test_branch_not_taken_gathers_nothing():
    mesh, specs = mesh_of("8"), {"w": NamedSharding(mesh_of("8"), P("data"))}

    def fn(params, x):
        return lax.cond(x.sum() > 0, lambda: jnp.mean(apply(x, params["w"])), lambda: jnp.mean(x))

    gathered = zero.gather_on_use(fn, specs, mesh=mesh)
    program = jax.jit(gathered).lower(abstract({"w": WEIGHTS[0]}, specs), batch_of(mesh)).compile()
    (gather,) = (c for c in hlo.collectives(program.as_text()) if c.kind == "all-gather")
    assert "branch" in gather.op_name


def test_temporaries_of_a_scan():
    mesh, params = mesh_of("8"), np.zeros((8, 512, 512), np.float32)
    specs = NamedSharding(mesh, P(None, "data"))

    def temp_bytes(**options):
        gathered = zero.gather_on_use(lambda params, x: scan(apply, params, x), specs, mesh=mesh, **options)
        program = jax.jit(jax.grad(gathered), out_shardings=specs).lower(abstract(params, specs), batch_of(mesh, 512))
        return program.compile().memory_analysis().temp_size_in_bytes

    weight_bytes = 4 * 512 * 512
    # One gathered weight and one gradient; XLA:CPU copies one of them in one of the releases.
    assert temp_bytes() < 4 * weight_bytes
    assert temp_bytes(keep_gathered=True) > 8 * weight_bytes


def test_what_scales_and_biases_change_passes_no_barrier():
    """Else the results of norms, and their cotangents, are arrays, which XLA computes where they are read."""
    mesh = mesh_of("8")
    params = {"scale": np.ones(WIDTH), "norm": np.ones((2, WIDTH)), "position": np.zeros((4, WIDTH // 4))}
    params = jax.tree.map(np.float32, params)

    def fn(params, x):
        x = jnp.sin(x * params["scale"]) * params["norm"][0] + params["norm"][1]
        return jnp.mean(jnp.sin(x.reshape(BATCH_SIZE, 4, -1) + params["position"]) ** 2)

    specs = specs_of(params, mesh)
    gradient = jax.jit(jax.grad(zero.gather_on_use(fn, specs, mesh=mesh)))
    text = gradient.lower(abstract(params, specs), batch_of(mesh)).as_text()
    barriers = [line for line in text.splitlines() if "optimization_barrier" in line]
    assert barriers and not [line for line in barriers if f"tensor<{BATCH_SIZE}x" in line]


def relu_chain(params, batch):
    x = batch["x"].astype(jnp.bfloat16)
    for w in params["in"]:
        x = jax.nn.relu(x @ w)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def each_alone(params, batch):
    x = batch["x"].astype(jnp.bfloat16)
    return sum(jnp.mean((x @ w).astype(jnp.float32) ** 2) for w in params["in"])


def gelu_blocks(params, batch):
    x = batch["x"].astype(jnp.bfloat16)
    for up, down in zip(params["in"], params["out"], strict=True):
        x = x + jax.nn.gelu(x @ up) @ down
    return jnp.mean(x.astype(jnp.float32) ** 2)


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("loss", [relu_chain, gelu_blocks])
def test_results_of_activation_functions_are_no_residuals(loss, stage):
    """XLA computes them from their operands where they are read, unless something makes arrays of them."""
    pytest.importorskip("libtpu")
    width, layers, size = 512, 2, 2048
    hidden = width if loss is relu_chain else 2 * width
    shapes = {"in": [(width, hidden)] * layers, "out": [(hidden, width)] * layers}
    mesh, tx = zero.make_mesh(topology="v5e:2x2"), optax.sgd(0.1)
    config = zero.ZeroConfig(stage=stage, precision="bf16", overlap=False)
    init = lambda _: jax.tree.map(jnp.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))  # noqa: E731
    state = zero.abstract_state(init, tx, mesh=mesh, config=config)
    batch = {"x": jax.ShapeDtypeStruct((mesh.size * size, width), jnp.float32)}
    compiled = zero.make_train_step(loss, tx, mesh=mesh, config=config).lower(state, batch).compile()
    kept = layers * hidden + (0 if loss is relu_chain else (layers + 1) * width)  # the functions' operands, and sums
    assert zero.memory.measure(compiled).residual_bytes <= 1.05 * size * kept * 2


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("shape", "shard"), [((512, 512), "512,128"), ((4096, 16), "1024,16"), ((16, 4096), "16,1024")], ids=str
)
def test_the_state_is_not_copied_to_the_layout_of_its_gradients(shape, shard):
    """XLA:TPU reduce-scatters to the lanes of rows with these in front, and would copy the state to that, and back.

    The state of a param with few features is stored in columns, and its gradient in rows would be padded.
    """
    pytest.importorskip("libtpu")
    mesh, tx, config = zero.make_mesh(topology="v5e:2x2"), optax.adam(0.1), zero.ZeroConfig(stage=3, precision="bf16")
    state = zero.abstract_state(lambda _: {"in": [jnp.zeros(shape)] * 3}, tx, mesh=mesh, config=config)
    loss_fn = relu_chain if shape[0] == shape[1] else each_alone
    batch = {"x": jax.ShapeDtypeStruct((mesh.size * 4096, shape[0]), jnp.float32)}
    compiled = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config).lower(state, batch).compile()
    assert f"f32[{shard}]" in compiled.as_text()
    assert not re.findall(rf"= f32\[{shard}\]\S* copy\(", compiled.as_text())

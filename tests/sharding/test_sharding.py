"""The stage table, which dim of a leaf is cut, and where that leaves each leaf of a train state."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from gathering import mlp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from reference import mesh_of

import zero_jax as zero
from zero_jax.core.tree import leaf_names
from zero_jax.sharding.stages import sharded_groups


def shapes(**leaves):
    """Returns leaves of given shapes, which may be followed by a dtype."""

    def leaf(shape):
        *dims, dtype = shape if shape and not isinstance(shape[-1], int) else (*shape, jnp.float32)
        return jax.ShapeDtypeStruct(tuple(dims), dtype)

    return {name: leaf(shape) for name, shape in leaves.items()}


def placed(params, *, mesh="8", **fields):
    """Returns the placement of each leaf, by path."""
    mesh = mesh_of(mesh) if isinstance(mesh, str) else mesh
    config = zero.ZeroConfig(**{"min_shard_size": 8, **fields})
    return {p.path: p for p in zero.sharding_report(params, mesh=mesh, config=config).placements}


def spec_of(shape, **options):
    """Returns the spec that one leaf is given."""
    return placed(shapes(leaf=shape), **options)["leaf"].dims


# --- the table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "groups"),
    [
        (0, set()),
        (1, {"master", "opt_state"}),
        (2, {"master", "opt_state", "grads"}),
        (3, {"master", "opt_state", "grads", "params", "model_state"}),
    ],
)
def test_stages(stage, groups):
    assert sharded_groups(stage) == groups


@pytest.mark.parametrize("stage", [4, -1, "3", None, True, 2.5])
def test_unknown_stage(stage):
    with pytest.raises(ValueError, match=r"unknown ZeRO stage .*choose one of 0, 1, 2, 3"):
        sharded_groups(stage)


def test_a_stage_may_be_a_number_of_numpy():
    config = zero.ZeroConfig(stage=np.int64(2))
    assert config == zero.ZeroConfig(stage=2) and type(config.stage) is int


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_where_each_group_lies(stage, precision):
    mesh, config = mesh_of("8"), zero.ZeroConfig(stage=stage, precision=precision)
    state = zero.abstract_state(lambda key: jnp.zeros((256, 256)), optax.adam(1.0), mesh=mesh, config=config)
    sharded = {True: P("data"), False: P()}
    assert state.params.sharding.spec == sharded[stage == 3]
    assert (state.master is not None) == (precision == "bf16" and stage < 3)
    if state.master is not None:
        assert state.master.sharding.spec == sharded[stage >= 1]
        assert (state.params.dtype, state.master.dtype) == (jnp.bfloat16, jnp.float32)
    assert state.opt_state[0].mu.sharding.spec == sharded[stage >= 1]
    assert state.opt_state[0].count.sharding.spec == P()


# --- which dim -------------------------------------------------------------------------------------------------------

WHOLE, D = (), ("data",)


@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((1024, 1024), (WHOLE, D)),  # both fill their tiles: the last
        ((256, 256), (D, WHOLE)),  # 32 rows fill tiles of 16, 32 columns do not fill tiles of 128
        ((1024, 768), (D, WHOLE)),
        ((768, 1024), (WHOLE, D)),
        ((13, 1024), (WHOLE, D)),  # what divides
        ((1024, 13), (D, WHOLE)),
        ((50257, 768), (WHOLE, D)),  # a vocabulary that does not divide
        ((4096,), (D,)),
        # The first dim of a stack of layers is scanned over.
        ((8, 1024, 1024), (WHOLE, WHOLE, D)),
        ((64, 256, 256), (WHOLE, D, WHOLE)),
        ((8, 1024), (WHOLE, D)),
        ((8, 13, 13), (D, WHOLE, WHOLE)),  # unless nothing else divides
        ((8, 13), (D, WHOLE)),
        ((8, 16, 13, 1024), (WHOLE, WHOLE, WHOLE, D)),
        # Nor is it one of layers where it is large: attention's kernels, and their stacks.
        ((768, 12, 64), (D, WHOLE, WHOLE)),
        ((640, 4, 256), (D, WHOLE, WHOLE)),
        ((12, 64, 768), (WHOLE, WHOLE, D)),
        ((24, 768, 12, 64), (WHOLE, D, WHOLE, WHOLE)),
        ((96, 12, 64), (WHOLE, WHOLE, D)),  # a stack of biases
        # A convolution: its features.
        ((3, 3, 64, 128), (WHOLE, WHOLE, WHOLE, D)),
        ((3, 3, 3, 64), (WHOLE, WHOLE, WHOLE, D)),
        ((7, 7, 16, 13), (WHOLE, WHOLE, D, WHOLE)),
    ],
)
def test_dim(shape, dims):
    assert spec_of(shape) == dims


@pytest.mark.parametrize("shape", [(), (1,), (13,), (13, 13), (0, 64), (7, 7, 3, 13)])
def test_what_cannot_be_cut_is_whole_and_says_why(shape):
    leaf = placed(shapes(leaf=shape))["leaf"]
    assert not any(leaf.dims)
    assert leaf.reason.startswith("unsharded: "), leaf.reason


def test_threshold():
    leaves = shapes(small=(1023,), large=(1024,), matrix=(32, 32))
    by_default = placed(leaves, min_shard_size=1024)
    assert not any(by_default["small"].dims) and by_default["small"].reason == "unsharded: under 1024 elements"
    assert any(by_default["large"].dims) and any(by_default["matrix"].dims)
    assert not any(any(p.dims) for p in placed(leaves, min_shard_size=2000).values())


def test_keys_stay_whole():
    leaf = placed({"key": jax.random.split(jax.random.key(0), 64)})["key"]
    assert leaf.dims == (WHOLE,) and leaf.reason == "PRNG keys are not sharded"


def test_one_device():
    assert placed(shapes(leaf=(64, 64)), mesh="1")["leaf"].reason == "data has one device"


# --- several axes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "shape", "dims"),
    [
        ("staged24", (4096, 4096), (("data_0", "data_1"), ())),  # both on one dim
        ("staged24", (13, 4096), ((), ("data_0", "data_1"))),
        ("staged24", (2, 13, 12), (("data_0",), (), ("data_1",))),  # spread over two, the larger axis first
        ("staged24", (4, 6), (("data_1",), ("data_0",))),
        # Three: two on one dim, the third on the last (docs/gather_on_use.md).
        ("staged222", (4096, 4096), (("data_0", "data_1"), ("data_2",))),
        ("staged222", (4, 4096, 4096), ((), ("data_0", "data_1"), ("data_2",))),
        ("staged222", (13, 4096), ((), ("data_0", "data_1", "data_2"))),
        ("staged222", (4096,), (("data_0", "data_1", "data_2"),)),
    ],
)
def test_several_data_axes(mesh, shape, dims):
    assert spec_of(shape, mesh=mesh) == dims


def test_partly_whole():
    leaf = placed(shapes(leaf=(4, 7)), mesh="staged24")["leaf"]
    assert leaf.dims == (("data_1",), ()) and leaf.reason.startswith("partly sharded")
    assert leaf.num_bytes == 4 * 4 * 7


# --- specs of the model's own ----------------------------------------------------------------------------------------

MODEL_MESH = {"data": 4, "model": 2}


@pytest.mark.parametrize(
    ("shape", "given", "dims"),
    [
        ((1024, 1024), P("model"), (("model",), D)),
        ((1024, 1024), P(None, "model"), (WHOLE, ("model", "data"))),
        ((1024, 256), P(None, "model"), (D, ("model",))),  # 32 columns would not fill tiles of 128
        ((13, 1024), P(None, "model"), (WHOLE, ("model", "data"))),  # both on the dim that divides
        ((13, 8), P(None, "model"), (WHOLE, ("model", "data"))),
        ((13, 12), P(None, "model"), (WHOLE, ("model",))),
        ((4, 256, 256), P(None, None, "model"), (WHOLE, D, ("model",))),
        ((4, 256, 1024), P("model"), (("model",), WHOLE, D)),
        ((1024,), P("model"), (("model", "data"),)),
        ((1024, 1024), P("data", "model"), (D, ("model",))),  # as given
        ((1024, 1024), P(("data", "model")), (("data", "model"), WHOLE)),
        ((1024, 1024), P(), (WHOLE, D)),
        ((1024, 1024), None, (WHOLE, D)),
    ],
)
def test_data_is_added_to_the_models_spec(shape, given, dims):
    mesh = zero.make_mesh(**MODEL_MESH)
    assert spec_of(shape, mesh=mesh, param_specs={"leaf": given}) == dims


@pytest.mark.parametrize(
    "param_specs",
    [
        {"layers": {"up": P(None, "model"), "down": P("model")}, "bias": None},
        {r"layers/up": P(None, "model"), r".*down": P("model")},
        {"layers/up": P(None, "model"), "layers/down": P("model"), "bias": P()},
        {"layers/up": P(None, "model"), "layers/down": P("model")},
        {"layers": {"up": P(None, "model"), "down": P("model")}, "bias": P()},
    ],
    ids=["tree", "patterns", "all paths", "some paths", "tree with P()"],
)
def test_forms_of_param_specs(param_specs):
    params = {"layers": shapes(up=(256, 256), down=(256, 512)), **shapes(bias=(64,))}
    dims = {
        path: p.dims for path, p in placed(params, mesh=zero.make_mesh(**MODEL_MESH), param_specs=param_specs).items()
    }
    assert dims == {"layers/up": (D, ("model",)), "layers/down": (("model",), D), "bias": (D,)}


def test_a_prefix_of_param_specs():
    params = {"layers": shapes(up=(256, 256), down=(256, 512)), **shapes(bias=(64,))}
    mesh = zero.make_mesh(**MODEL_MESH)
    dims = {p.path: p.dims for p in placed(params, mesh=mesh, param_specs={"layers": P("model"), "bias": P()}).values()}
    assert dims == {"layers/up": (("model", "data"), WHOLE), "layers/down": (("model",), D), "bias": (D,)}


def test_the_models_axis_stays_at_every_stage():
    mesh = zero.make_mesh(**MODEL_MESH)
    for stage in (0, 1, 3):
        config = zero.ZeroConfig(stage=stage, param_specs={"w": P("model")})
        state = zero.abstract_state(lambda key: {"w": jnp.zeros((64, 256))}, optax.adam(1.0), mesh=mesh, config=config)
        assert state.params["w"].sharding.spec == (P("model", "data") if stage == 3 else P("model"))
        assert state.opt_state[0].mu["w"].sharding.spec == (P("model", "data") if stage else P("model"))


def test_overrides():
    params = {"layers": [shapes(kernel=(64, 256), bias=(256,)) for _ in range(2)], "head": shapes(kernel=(256, 64))}
    overrides = {r"layers/\d/kernel": P("data"), r"head/.*": P(), r"layers/1/.*": P(None)}
    leaves = placed(params, overrides=overrides)
    dims = {path: p.dims for path, p in leaves.items()}
    assert dims == {
        "layers/0/kernel": (D, WHOLE),
        "layers/0/bias": (D,),
        "layers/1/kernel": (D, WHOLE),  # the first pattern that matches
        "layers/1/bias": (WHOLE,),
        "head/kernel": (WHOLE, WHOLE),
    }
    assert leaves["head/kernel"].reason == "override"


def test_overrides_hold_for_the_optimizer_too():
    mesh, config = mesh_of("8"), zero.ZeroConfig(overrides={"w": P("data"), "v": P()})
    params = {"w": jnp.zeros((64, 1024)), "v": jnp.zeros((64, 1024))}
    state = zero.abstract_state(lambda key: params, optax.adam(1.0), mesh=mesh, config=config)
    for group in (state.params, state.opt_state[0].mu, state.opt_state[0].nu):
        assert group["w"].sharding.spec == P("data") and group["v"].sharding.spec == P()


# --- the state of an optimizer ---------------------------------------------------------------------------------------


def state_specs(tx, params, **fields):
    """Returns the specs of an optimizer's state by path."""
    state = zero.abstract_state(lambda key: params, tx, mesh=mesh_of("8"), config=zero.ZeroConfig(**fields))
    return {
        n: x.sharding.spec for n, x in zip(leaf_names(state.opt_state), jax.tree.leaves(state.opt_state), strict=True)
    }


def test_state_of_a_params_shape_lies_as_the_param_does():
    params = {"a": {"w": jnp.zeros((256, 256))}, "w": jnp.zeros((256, 256))}
    specs = state_specs(optax.adam(1.0), params, overrides={"w": P(None, "data")})
    assert specs["0/mu/a/w"] == P("data") and specs["0/mu/w"] == P(None, "data")  # the longest path that fits
    assert specs["0/count"] == P()


def test_factored_state_is_placed_by_its_own_shape():
    specs = state_specs(optax.adafactor(1.0), {"w": jnp.zeros((256, 2048))})
    rows, columns = (next(s for name, s in specs.items() if part in name) for part in ("v_row/w", "v_col/w"))
    assert rows == P() and columns == P("data")  # 256 elements are under the threshold, 2048 are not


def test_empty_and_odd_states():
    params = {"w": jnp.zeros((256, 256)), "scalar": jnp.zeros(()), "none": jnp.zeros((0, 8))}
    assert state_specs(optax.sgd(1.0), params) == {}
    specs = state_specs(optax.chain(optax.clip(1.0), optax.trace(0.9)), params)
    assert specs == {"1/trace/none": P(), "1/trace/scalar": P(), "1/trace/w": P("data")}


# --- any train state -------------------------------------------------------------------------------------------------

CONFIG = zero.ZeroConfig(min_shard_size=8)

UP, DOWN = P(None, "data"), P(None, "data")


def specs_by_path(state, **options):
    shardings = zero.state_shardings(state, mesh=mesh_of("8"), config=options.pop("config", CONFIG), **options)
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    jax.device_put(state, shardings)  # they fit
    return {name: s.spec for name, s in zip(leaf_names(state), jax.tree.leaves(shardings), strict=True)}


def test_state_shardings_of_a_dict():
    params = mlp()
    state = {"params": params, "opt": optax.adam(1.0).init(params), "ema": params, "step": 0, "rng": jax.random.key(0)}
    specs = specs_by_path(jax.tree.map(jnp.asarray, state))
    for prefix in ("params", "opt/0/mu", "opt/0/nu", "ema"):
        assert (specs[f"{prefix}/up"], specs[f"{prefix}/down"]) == (UP, DOWN)
    assert specs["opt/0/count"] == specs["step"] == specs["rng"] == P()


def test_state_shardings_of_a_tuple():
    params = mlp()
    state = (params, optax.adam(1.0).init(params))
    specs = specs_by_path(state, params="0")
    assert specs["0/up"] == specs["1/0/mu/up"] == UP
    with pytest.raises(ValueError, match=r"no params at 'params' \(it has 0, 1\).*params='path/of/params'"):
        specs_by_path(state)


def test_state_shardings_of_flax_train_state():
    model = nn.Dense(64)
    params = model.init(jax.random.key(0), jnp.zeros((1, 32)))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1.0))
    specs = specs_by_path(state.replace(step=jnp.int32(0)))
    kernel = specs["params/params/kernel"]
    assert "data" in kernel and kernel == specs["opt_state/0/mu/params/kernel"]
    assert specs["step"] == P()


def test_state_shardings_of_nnx():
    model = nnx.Linear(32, 64, rngs=nnx.Rngs(0))
    state = nnx.state(nnx.ModelAndOptimizer(model, optax.adam(1.0)))
    specs = specs_by_path(state, params="model")
    kernel = specs["model/kernel/value"]
    assert "data" in kernel and kernel == specs["opt_state/0/mu/kernel/value"]


def test_state_shardings_of_one_array():
    specs = specs_by_path({"params": np.zeros((64, 64), np.float32), "mu": np.zeros((64, 64), np.float32)})
    assert specs == {"params": P(None, "data"), "mu": P(None, "data")}


@pytest.mark.parametrize(("stage", "params", "opt_state"), [(0, P(), P()), (1, P(), UP), (2, P(), UP), (3, UP, UP)])
def test_state_shardings_by_stage(stage, params, opt_state):
    state = {"params": mlp(), "opt_state": optax.sgd(1.0, momentum=0.9).init(mlp())}
    specs = specs_by_path(state, config=zero.ZeroConfig(stage=stage, min_shard_size=8))
    assert (specs["params/up"], specs["opt_state/0/trace/up"]) == (params, opt_state)


def test_state_shardings_of_a_train_state_are_those_it_was_born_with():
    tx, mesh, config = optax.adam(1.0), mesh_of("8"), zero.ZeroConfig(precision="fp16", stage=2, min_shard_size=8)
    state = zero.init_state(mlp(), tx, jax.random.key(0), mesh=mesh, config=config)
    shardings = zero.state_shardings(state, mesh=mesh, config=config)
    for x, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert isinstance(sharding, NamedSharding) and x.sharding.is_equivalent_to(sharding, x.ndim)


# --- the report ------------------------------------------------------------------------------------------------------


def test_report():
    params = shapes(kernel=(256, 64), odd=(13, 13), bias=(64,), half=(256, 64, jnp.bfloat16))
    report = zero.sharding_report(params, mesh=mesh_of("8"), config=zero.ZeroConfig(min_shard_size=128))
    whole_bytes = 4 * (13 * 13 + 64)
    assert report.whole_bytes == whole_bytes
    assert report.per_device_bytes == (4 + 2) * 256 * 64 // 8 + whole_bytes
    assert str(report).splitlines() == [
        "kernel  (256, 64)  float32   [data, -]  sharded",
        "half    (256, 64)  bfloat16  [data, -]  sharded",
        "odd     (13, 13)   float32   [-, -]     unsharded: no dim of (13, 13) is divisible by 8 devices "
        "(make_mesh(data_layout=...) splits them)",
        "bias    (64,)      float32   [-]        unsharded: under 128 elements",
        f"{(12288 + whole_bytes) / 1e3:.2f} KB a device, {whole_bytes} bytes of it unsharded leaves",
    ]


def test_report_warns_where_whole_leaves_dominate():
    params = shapes(kernel=(64, 64), table=(50257, 13), scalar=())
    report = zero.sharding_report(params, mesh=mesh_of("8"), config=zero.ZeroConfig())
    *_, warning = str(report).splitlines()
    assert warning == "warning: unsharded leaves take more than half of that; the last column says why"
    assert "[scalar]" in str(report)


def test_report_has_a_row_for_layers_that_are_alike_and_none_is_unsharded_on_one_device():
    params = {"h": [shapes(up=(64, 64), norm=(64,)) for _ in range(3)], "out": shapes(a=(64, 64))}
    report = zero.sharding_report(params, mesh=mesh_of("8"), config=zero.ZeroConfig())
    assert str(report).splitlines() == [
        "h/*/up    3 x (64, 64)  float32  [-, data]  sharded",
        "out/a     (64, 64)      float32  [-, data]  sharded",
        "h/*/norm  3 x (64,)     float32  [-]        unsharded: under 1024 elements",
        "8.96 KB a device, 768 bytes of it unsharded leaves",
    ]
    report = zero.sharding_report(shapes(a=(64, 64)), mesh=mesh_of("1"), config=zero.ZeroConfig())
    assert str(report).splitlines()[1:] == [
        "16.38 KB a device, 16.38 KB of it unsharded leaves",
        "not sharded over data: it has one device (JAX_NUM_CPU_DEVICES=8 simulates eight)",
    ]


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        (0, "sharded like this at this stage: nothing; params are replicated over data"),
        (2, "sharded like this at this stage: grads, master, opt_state; params are replicated over data"),
        (3, None),
    ],
)
def test_report_says_what_the_stage_shards(stage, line):
    report = zero.sharding_report(shapes(kernel=(256, 64)), mesh=mesh_of("8"), config=zero.ZeroConfig(stage=stage))
    said = [row for row in str(report).splitlines() if "at this stage" in row]
    assert said == ([] if line is None else [line])


def test_report_of_a_state():
    mesh, config = mesh_of("8"), zero.ZeroConfig(min_shard_size=8)
    state = zero.init_state(mlp(), optax.adam(1.0), jax.random.key(0), mesh=mesh, config=config)
    report = zero.sharding_report(state, mesh=mesh, config=config)
    assert {p.path for p in report.placements} == {"up", "down"}
    shards = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.params)]
    assert report.per_device_bytes == sum(shards)

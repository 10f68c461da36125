"""What a user gets wrong is a ValueError that names it and ends with the remedy."""

import collections
import dataclasses
import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax.sharding import PartitionSpec as P
from reference import mesh_of
from two_layers import host_params, loss_fn, make_batch

import zero_jax as zero
from zero_jax.core.tree import check_structure


def mesh_with(*names, kind="Auto"):
    types = (jax.sharding.AxisType[kind],) * len(names)
    return jax.make_mesh((2,) * len(names), names, devices=jax.devices()[: 2 ** len(names)], axis_types=types)


CONFIG_ERRORS = [
    (dict(stage=4), "unknown ZeRO stage 4: choose one of 0, 1, 2, 3"),
    (dict(stage="3"), "unknown ZeRO stage '3'"),
    (dict(stage=True), "unknown ZeRO stage True"),
    (dict(stage=2.0), r"unknown ZeRO stage 2\.0"),
    (dict(skip_nonfinite="yes"), "skip_nonfinite='yes': give True or False"),
    (dict(keep_gathered=1), "keep_gathered=1: give True or False"),
    (dict(num_microbatches=0), "num_microbatches=0: give at least 1"),
    (dict(num_microbatches=2.0), "num_microbatches=2.0: give a whole number"),
    (dict(clip_norm=-1.0), "clip_norm=-1.0: give a positive norm, or None"),
    (dict(clip_norm=float("nan")), "clip_norm=nan"),
    (dict(clip_norm="1"), "clip_norm='1'"),
    (dict(clip_norm=True), "clip_norm=True"),
    (dict(combine_bytes=True), "combine_bytes=True"),
    (dict(loss_weight=3), "loss_weight=3: give 'auto', the name of an entry of aux, or None"),
    (dict(min_shard_size=-1), "min_shard_size=-1"),
]


@pytest.mark.parametrize(("fields", "message"), CONFIG_ERRORS)
def test_config_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        zero.ZeroConfig(**fields)
    with pytest.raises(TypeError, match="stagee"):
        zero.ZeroConfig(stagee=3)


MESH_ERRORS = [
    (lambda: zero.make_mesh(data=3), r"data=3 x model=1 is 3 devices, but there are 8: .*jax.devices\(\)\[:3\]"),
    (lambda: zero.make_mesh(data=16), "is 16 devices, but there are 8: .*or simulate more.*JAX_NUM_CPU_DEVICES=16"),
    (lambda: zero.make_mesh(replica=3), "replica=3 x model=1 does not divide the 8 devices"),
    (lambda: zero.make_mesh(data=0), "data=0 must be a positive integer"),
    (lambda: zero.make_mesh(model="2"), "model='2' must be a positive integer"),
    (lambda: zero.make_mesh(data=8, data_layout=(2, 2)), r"data_layout=\(2, 2\) multiplies to 4, not to data=8"),
    (lambda: zero.make_mesh(data=True), "data=True must be a positive integer"),
    (lambda: zero.make_mesh(devices=4), "devices=4 is no list of devices: give some of jax.devices"),
    (lambda: zero.make_mesh(devices=[]), r"devices=\[\] is no list of devices"),
    (lambda: zero.make_mesh(devices=jax.devices()[0]), "devices=.* is no list of devices"),
    (lambda: zero.make_mesh(data_layout=8), "data_layout=8: give sizes of mesh axes, such as .2, 4."),
    (lambda: zero.make_mesh(data_layout="2x4"), "data_layout='2x4': give sizes"),
    (lambda: zero.make_mesh(data_layout=(-2, -4)), "data_layout=.-2, -4.: give sizes"),
    (lambda: zero.make_mesh(topology="v5p:2x2x1", devices=jax.devices()), "`devices` or `topology`, not both"),
    (lambda: make_on(mesh_with("x", "y")), "none of them carries `data`.*data_axes"),
    (lambda: make_on(mesh_with("data", "y"), data_axes=("dat",)), "none called 'dat'; did you mean 'data'"),
    (
        lambda: make_on(mesh_with("data", "y"), data_axes="y", replica_axes="y"),
        "axis 'y' is given more than one role .*give each axis one",
    ),
    (lambda: make_on("8"), "mesh='8' is no mesh: make one with zero.make_mesh"),
    (lambda: make_on(host_params()), "mesh={'in': .*... is no mesh: make one with zero.make_mesh"),
    (lambda: make_on(mesh_with("data", kind="Explicit")), "Explicit, which is the default.*mesh with zero.make_mesh"),
    (lambda: make_on(mesh_with("data", "é")), "mesh axis 'é' has a name that XLA does not take"),
    (lambda: make_on(mesh_with("data", "a\\b")), "has a name that XLA does not take"),
    (lambda: make_on(jax.sharding.Mesh(np.empty(0, object), ("data",))), "the mesh has no devices"),
    (lambda: make_on(mesh_with("data", kind="Manual")), "Manual, as jax.shard_map makes it.*mesh with zero.make_mesh"),
]


def make_on(mesh, **fields):
    config = reference.make_config(**fields)
    return zero.init_state(host_params(), optax.adam(0.01), jax.random.key(0), mesh=mesh, config=config)


@pytest.mark.parametrize(("make", "message"), MESH_ERRORS)
def test_mesh_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


SPEC_ERRORS = [
    (dict(param_specs={"in": P("modle"), "out": P()}), "leaf 'in': spec .* names the axis 'modle', but the mesh has"),
    (dict(param_specs={"in": P(None, None, "model"), "out": P()}), "'in' of shape .8, 16.: .*3 entries, but .* 2 dims"),
    (dict(param_specs={"in": P("data", "data"), "out": P()}), "leaf 'in': .* names an axis twice"),
    (dict(param_specs={"in": "data", "out": P()}), "leaf 'in'.* expected a PartitionSpec"),
    (dict(param_specs=[P()]), "param_specs is not a prefix of the params"),
    (dict(param_specs={"inn.*": P()}), "param_specs: 'inn.*' matches the path of no leaf; some are in"),
    (dict(param_specs={"in(": P()}), r"param_specs: 'in\(' is not a regular expression"),
    (dict(overrides={"inn": P()}), "overrides: 'inn' matches the path of no leaf; some are in"),
    (dict(overrides={"in(": P()}), r"overrides: 'in\(' is not a regular expression"),
    (dict(overrides={"in": P("dat")}), "leaf 'in': spec .* names the axis 'dat'"),
    (dict(overrides={"in": None}), r"overrides=.*None is no spec: give PartitionSpec\(\) to replicate leaves"),
    (dict(overrides=[("in", P())]), "overrides=.*give a dict from regular expressions"),
]


@pytest.mark.parametrize(("fields", "message"), SPEC_ERRORS)
def test_spec_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        make_on(mesh_of("4"), **fields)


def test_spec_that_does_not_divide():
    with pytest.raises(
        ValueError, match=r"'in' of shape .8, 16.: dim 0 is not divisible by the 3 devices.*shard another dim or none"
    ):
        make_on(mesh_of("3"), param_specs={"in": P("data"), "out": P()})


def test_spec_over_copies():
    with pytest.raises(ValueError, match="leaf 'in': its spec names the axis 'replica', which is of full copies"):
        make_on(zero.make_mesh(replica=2), overrides={"in": P("replica", "data")})


LOSS_ERRORS = [
    (lambda p, b: loss_fn(p, b)[None], "loss of shape .1,. and dtype float32: return a floating scalar"),
    (lambda p, b: jnp.int32(1), "dtype int32: return a floating scalar"),
    (lambda p, b: None, "loss of type NoneType: return a floating scalar, or .scalar, aux."),
    (lambda p, b: {"loss": loss_fn(p, b)}, "loss of type dict"),
    (lambda p, b: [loss_fn(p, b), {}], "loss of type list"),
    (lambda p, b: (loss_fn(p, b), {}, {}), "loss_fn returned 3 values"),
    (lambda p, b: (loss_fn(p, b), {"name": "a"}), "aux leaf 'name' is 'a' of type str, no array: return arrays"),
]


@functools.cache
def stage_1_state():
    return make_on(mesh_of("4"), stage=1)


@pytest.mark.parametrize(("loss", "message"), LOSS_ERRORS)
def test_loss_errors(loss, message):
    step = zero.make_train_step(loss, optax.adam(0.01), mesh=mesh_of("4"), config=reference.make_config(stage=1))
    with pytest.raises(ValueError, match=message):
        step(stage_1_state(), make_batch())


BATCH_ERRORS = [
    (1, make_batch(6), r"'inputs' has 6 examples.* 4 devices \(replica=1 x data=4\): .* multiple of 4, for example 8"),
    (4, make_batch(8), "'inputs' has 8 examples.* and 4 microbatches: .* multiple of 16, for example 16"),
    (1, make_batch(0), "has 0 examples"),
    (2, {**make_batch(16), "weights": np.ones(8)}, "differ in their leading dim: .*'inputs': 16, 'weights': 8"),
    (2, {**make_batch(16), "scale": np.ones(4)}, "leading dim: .*'scale': 4.*; an array that all examples share goes"),
    (1, {**make_batch(16), "scale": np.ones(3)}, "'scale' has 3 examples.*; an array that all examples share goes"),
    (2, {"scale": 2.0}, "num_microbatches=2: no leaf of the batch has examples.*or set num_microbatches=1"),
    (1, {**make_batch(16), "name": "train"}, "batch leaf 'name' is 'train' of type str, no array: leave it out"),
    (1, {**make_batch(16), "x": np.ones(16, ">f4")}, "leaf 'x' is .*, no array that JAX takes .*>f4.*: leave it out"),
    (1, {**make_batch(16), "x": memoryview(np.ones(16))}, "leaf 'x' is <memory.* of type memoryview, no array that"),
    (1, {**make_batch(16), "x": np.ma.masked_array(np.ones(16))}, "leaf 'x' is .* of type MaskedArray, no array that"),
    (1, {**make_batch(16), "x": jax.ShapeDtypeStruct((16,), "f4")}, "leaf 'x' is a shape alone: give an array of its"),
    (1, {**make_batch(16), "x": 2**40}, "leaf 'x' is 1099511627776 of type int, no array that .*too large"),
]


@pytest.mark.parametrize(("num_microbatches", "batch", "message"), BATCH_ERRORS)
def test_batch_errors(num_microbatches, batch, message):
    config = reference.make_config(stage=1, num_microbatches=num_microbatches)
    step = zero.make_train_step(loss_fn, optax.adam(0.01), mesh=mesh_of("4"), config=config)
    with pytest.raises(ValueError, match=message):
        step(stage_1_state(), batch)
    assert not stage_1_state().step.is_deleted()


SIZED_LOSSES = [
    lambda p, b: jnp.square(b["inputs"].reshape(16, 2, -1).reshape(16, -1) @ p["in"]).mean(),
    lambda p, b: (jnp.linspace(0, 1, 16)[:, None] * (b["inputs"] @ p["in"])).mean(),
]


@pytest.mark.parametrize("loss", SIZED_LOSSES)
@pytest.mark.parametrize(("stage", "k", "size"), [(1, 2, 8), (3, 4, 4)])
def test_a_loss_with_the_size_of_the_batch_in_it(loss, stage, k, size):
    config, tx = reference.make_config(stage=stage, num_microbatches=k), optax.adam(0.01)
    step = zero.make_train_step(loss, tx, mesh=mesh_of("4"), config=config)
    with pytest.raises(TypeError) as caught:
        step(make_on(mesh_of("4"), stage=stage), make_batch())
    (note,) = caught.value.__notes__[:1]
    assert f"takes the batch of 16 examples, and no microbatch of {size} (num_microbatches={k})" in note


def test_what_prints_in_order_on_several_devices():

    def loss(params, batch):
        jax.debug.print("{}", batch["inputs"][0, 0], ordered=True)
        return loss_fn(params, batch)

    step = zero.make_train_step(loss, optax.adam(0.01), mesh=mesh_of("4"), config=reference.make_config(stage=1))
    with pytest.raises(ValueError, match="ordered effects") as caught:
        step(stage_1_state(), make_batch())
    assert "give ordered=False to those in loss_fn" in "".join(caught.value.__notes__)


def test_a_third_parameter_that_is_no_key():
    loss = lambda params, x, y: loss_fn(params, {"inputs": x}) - y  # noqa: E731
    step = zero.make_train_step(loss, optax.adam(0.01), mesh=mesh_of("4"), config=reference.make_config(stage=1))
    with pytest.raises(TypeError) as caught:
        step(stage_1_state(), tuple(make_batch().values()))
    assert "third parameter of loss_fn ('y') gets a PRNG key: " in "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("wrong", "is_of_key"),
    [
        (lambda x, y: x["inputs"] - y, True),  # names the dtype of a key
        (lambda x, y: x["inputs"][y[:, None]], True),  # of a scalar
        (lambda x, y: jnp.tanh(x), True),  # all of the batch as an array
        (lambda x, y: x["input"], False),
        (lambda x, y: jnp.ones(3) @ jnp.ones(4) * jax.random.bernoulli(y), False),
    ],
)
def test_the_note_on_a_third_parameter_is_of_errors_that_it_explains(wrong, is_of_key):
    loss = lambda params, x, y: loss_fn(params, x) + wrong(x, y).mean()  # noqa: E731
    step = zero.make_train_step(loss, optax.adam(0.01), mesh=mesh_of("4"), config=reference.make_config(stage=1))
    with pytest.raises((TypeError, IndexError, KeyError)) as caught:
        step(stage_1_state(), make_batch())
    assert ("third parameter" in "".join(getattr(caught.value, "__notes__", []))) == is_of_key


def test_a_module_of_flax_linen_is_no_params():
    module = pytest.importorskip("flax.linen").Dense(4)
    with pytest.raises(ValueError, match=r"params is Dense.*no array: give the params that its init returns"):
        zero.init_state(module, optax.sgd(0.1), jax.random.key(0), mesh=mesh_of("4"), config=reference.make_config())


def test_params_that_are_gathered_may_be_given_by_keyword_and_their_specs_are_not_those_of_a_state():
    loss = zero.gather_on_use(lambda weights, batch: (batch @ weights).sum(), P("data"), mesh=mesh_of("4"))
    assert loss(batch=jnp.ones((4, 8)), weights=jnp.ones((8, 4))) == 128
    with pytest.raises(TypeError, match="missing a required argument: 'weights'"):
        loss(batch=jnp.ones((4, 8)))
    with pytest.raises(ValueError, match=r"give those of the params alone: shardings\.params"):
        shardings = jax.tree.map(lambda x: x.sharding, stage_1_state())
        zero.gather_on_use(loss_fn, shardings, mesh=mesh_of("4"))(host_params(), make_batch())


def test_keys_of_microbatches_make_no_key():
    config = reference.make_config(stage=1, num_microbatches=2)
    loss = lambda p, b, key: (loss_fn(p, b), {"key": key})  # noqa: E731
    step = zero.make_train_step(loss, optax.adam(0.01), mesh=mesh_of("4"), config=config)
    with pytest.raises(ValueError, match=r"aux leaf 'key' holds PRNG keys.*leave it out of aux, or set num_micro"):
        step(stage_1_state(), make_batch())


@pytest.mark.parametrize("given", [False, True])
def test_params_that_are_no_arrays(given):
    params = {**host_params(), "activation": np.tanh}
    with pytest.raises(ValueError, match=r"params leaf 'activation' is .* of type ufunc.* zero.from_equinox"):
        zero.init_state(
            params if given else lambda key: params,
            optax.sgd(0.1),
            jax.random.key(0),
            mesh=mesh_of("4"),
            config=reference.make_config(),
        )


def test_containers_that_jax_does_not_know(tmp_path):
    Pair = dataclasses.make_dataclass("Pair", ["up", "down"])
    config, batch = reference.make_config(stage=1), collections.UserDict(make_batch())
    with pytest.raises(ValueError, match=r"of type Pair, .*register its class, .*register_dataclass\(Pair\)"):
        zero.init_state(lambda _: Pair(1.0, 2.0), optax.sgd(0.1), jax.random.key(0), mesh=mesh_of("4"), config=config)
    with pytest.raises(ValueError, match=r"'pair' is .* of type type, no array.*: (?!register)"):
        zero.init_state({"pair": Pair}, optax.sgd(0.1), jax.random.key(0), mesh=mesh_of("4"), config=config)
    step = zero.make_train_step(loss_fn, optax.adam(0.01), mesh=mesh_of("4"), config=config)
    trainer = lambda batch: zero.Trainer(  # noqa: E731
        loss_fn, lambda _: host_params(), [batch], config=zero.TrainConfig(steps=1, out=tmp_path, name="a")
    ).train()
    for take in (lambda x: zero.shard_batch(x, mesh=mesh_of("4")), lambda x: step(stage_1_state(), x), trainer):
        with pytest.raises(ValueError, match=r"batch is .* of type UserDict, no array: make a dict of it, dict\("):
            take(batch)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["act"])
@dataclasses.dataclass
class Layer:
    w: jax.Array
    act: Callable

    def __call__(self, x):
        return self.act(x @ self.w)


def layers_of(act):
    """Makes an `init_fn` of layers, the second of which has a function that `act()` makes."""
    return lambda key: [
        Layer(jax.random.normal(key, (8, 8)), jnp.tanh),
        {"a": Layer(jnp.ones((8, 4)), act()), "b": None},
    ]


def new_function():
    return lambda x: x


@pytest.mark.parametrize("group", ["params", "model_state"])
def test_a_static_field_that_each_call_makes_anew(group, tmp_path):
    """As of an Equinox model: JAX's own error compares two trees and says nothing of what to do."""

    def variables_of(act):
        init_fn, params = layers_of(act), {"w": jnp.ones((8, 4))}
        if group == "params":
            return init_fn
        return lambda key: zero.Variables(params=params, model_state=init_fn(key))

    name = "1/a/w"
    message = rf"{group} leaf '{name}': 'act' of its Layer is <function .*<lambda> .*init_fn.*zero\.from_equinox"
    common = dict(tx=optax.adam(0.1), mesh=mesh_of("4"), config=reference.make_config())
    key = jax.random.key(0)
    with pytest.raises(ValueError, match=message):
        zero.init_state(variables_of(new_function), key=key, **common)
    act = new_function()
    state = zero.init_state(variables_of(lambda: act), key=key, **common)
    with zero.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
    with pytest.raises(ValueError, match=message):
        zero.restore(tmp_path, init_fn=variables_of(new_function), **common)
    given = variables_of(new_function)(key)
    chex.assert_trees_all_equal(*(jax.tree.leaves(x) for x in (zero.init_state(given, key=key, **common), state)))
    restored = zero.restore(tmp_path, init_fn=given, **common).state
    assert jax.tree.structure(getattr(restored, group)) == jax.tree.structure(
        given if group == "params" else given.model_state
    )


@pytest.mark.parametrize(
    ("trees", "name"),
    [
        ([{"a": 0, "b": [1.0]}, {"a": 0, "c": [1.0]}], "params leaf 'a'"),
        ([{"a": 0, "b": [1.0]}, {"a": 0, "b": [1.0, 2.0]}], "params leaf 'b/0'"),
        ([{"a": 0, "b": [1.0]}, {"a": 0, "b": (1.0,)}], "params leaf 'b/0'"),
        ([{"a": 0, "b": [1.0]}, {"a": 0, "b": [None]}], "params leaf 'b/0'"),
        ([[], 1.0], "params"),
    ],
)
def test_a_tree_that_each_call_makes_anew(trees, name):
    for one, other in (trees, trees[::-1]):
        with pytest.raises(ValueError, match=rf"^{name}.*: init_fn returned another tree when it was called again"):
            check_structure("params", other, jax.tree.structure(one), maker="init_fn")
        check_structure("params", one, jax.tree.structure(one), maker="init_fn")


def test_an_optimizer_whose_state_has_a_function_of_its_own():
    init = lambda params: {"m": Layer(jax.tree.map(jnp.zeros_like, params), lambda x: x)}  # noqa: E731
    tx = optax.GradientTransformation(init, lambda grads, state, params=None: (grads, state))
    with pytest.raises(ValueError, match=r"opt_state leaf 'm/w/in': 'act' of its Layer .* outside of the optimizer"):
        make_any(tx=tx)


def test_loss_weight_that_is_not_in_aux():
    config = reference.make_config(stage=1, num_microbatches=2, loss_weight="tokens")
    for loss in (loss_fn, lambda p, b: (loss_fn(p, b), {"token": 1.0})):
        step = zero.make_train_step(loss, optax.adam(0.01), mesh=mesh_of("4"), config=config)
        with pytest.raises(ValueError, match=r"loss_weight='tokens', but the aux.* has no such entry"):
            step(stage_1_state(), make_batch())


def make_any(**fields):
    """Makes a state and a step of the arguments given, by default right ones."""
    given = dict(mesh=mesh_of("4"), config=reference.make_config(), tx=optax.sgd(0.1), key=jax.random.key(0))
    given |= dict(params=host_params(), loss_fn=loss_fn) | fields
    common = dict(mesh=given["mesh"], config=given["config"])
    zero.make_train_step(given["loss_fn"], given["tx"], **common)
    zero.init_state(given["params"], given["tx"], given["key"], **common)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(tx=optax.adam), "tx=<function adam.* is no optimizer: give an optax transformation, as optax.adamw"),
        (dict(config={"stage": 3}), "config={'stage': 3} is no config: give a zero.ZeroConfig"),
        (dict(key=7), r"key=7 is no key: give jax.random.key\(7\)"),
        (dict(params={}), "the params {} hold no arrays"),
        (
            dict(params={"w": np.ones((4, 4), np.int32)}),
            r"no floating leaf.* \(leaf 'w' is int32\): make",
        ),
        (dict(loss_fn=None), "loss_fn=None is no function"),
        (
            dict(loss_fn=lambda p: 0.0),
            r"loss_fn: <lambda>\(p\) cannot be called with \(params, batch\) .*: give loss_fn",
        ),
        (
            dict(loss_fn=lambda p, b, state, key: 0.0),
            r"\(p, b, state, key\) cannot be called with \(params, batch, key",
        ),
        (dict(loss_fn=lambda p, *, batch: 0.0), r"\(p, batch\) cannot be called with \(params, batch\)"),
        (dict(loss_fn=lambda p, b, *, key, train: 0.0), r"cannot be called with \(params, batch, key=...\).*'train'"),
        (dict(params=lambda: {}), r"init_fn: <lambda>\(\) cannot be called with \(key\) .*a function of a key"),
    ],
)
def test_arguments_of_another_kind(fields, message):
    with pytest.raises(ValueError, match=message):
        make_any(**fields)


def test_axes_told_have_no_other_role():
    mesh = mesh_with("data", "model")
    assert zero.ZeroConfig(data_axes=("data", "model")).axes_of(mesh).model == ()


STATE_ERRORS = [
    # the step's optimizer and config, and where the state of stage 1 does not fit them
    (optax.sgd(0.1), dict(stage=1), "it holds 0/count .*and the step needs no other leaf"),
    (optax.adam(0.1, mu_dtype=jnp.bfloat16), dict(stage=1), "it holds 0/mu/in float32.*needs 0/mu/in bfloat16"),
    (optax.adam(0.1), dict(stage=3), "leaf 'params/in' of the state is sharded as .*zero.state_shardings"),
    (
        optax.adam(0.1),
        dict(stage=1, mesh="2"),
        "leaf 'step' of the state is sharded as .*'data': 4.*made for .*'data': 2",
    ),
    (optax.adam(0.1), dict(stage=1, precision="bf16"), "another stage or precision .it has no master params."),
    (optax.adam(0.1), dict(stage=3, precision="fp16"), "differ in loss scaling"),
    (optax.adam(0.1), dict(stage=1, overrides={"out": P()}), "leaf 'opt_state/0/mu/out' of the state is sharded as"),
]


@pytest.mark.parametrize(("tx", "fields", "message"), STATE_ERRORS)
def test_state_errors(tx, fields, message):
    fields = dict(fields)
    mesh = mesh_of(fields.pop("mesh", "4"))
    step = zero.make_train_step(loss_fn, tx, mesh=mesh, config=reference.make_config(**fields))
    with pytest.raises(ValueError, match=message):
        step(stage_1_state(), make_batch())
    with pytest.raises(ValueError, match=r"takes the TrainState that zero.init_state returns, not a dict"):
        step(host_params(), make_batch())


def test_a_state_on_other_devices_is_told_by_their_numbers():
    config, tx = reference.make_config(stage=1), optax.adam(0.01)
    step = zero.make_train_step(loss_fn, tx, mesh=zero.make_mesh(devices=jax.devices()[4:]), config=config)
    with pytest.raises(ValueError, match=r"of devices 0, 1, 2, 3, and the step was made for .* of devices 4, 5, 6, 7"):
        step(stage_1_state(), make_batch())


def test_disable_jit_is_named():
    config, tx = reference.make_config(stage=3), optax.adam(0.01)
    with jax.disable_jit(), pytest.raises(ValueError, match=r"jax\.disable_jit is on"):
        state = zero.init_state(host_params(), tx, jax.random.key(0), mesh=mesh_of("4"), config=config)
        zero.make_train_step(loss_fn, tx, mesh=mesh_of("4"), config=config)(state, make_batch())


def test_an_abstract_mesh_has_no_devices():
    mesh = jax.sharding.AbstractMesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(ValueError, match="AbstractMesh, which has no devices"):
        zero.shard_batch(make_batch(), mesh=mesh)


def test_state_can_be_moved_as_the_error_says():
    config = reference.make_config(stage=3)
    shardings = zero.state_shardings(stage_1_state(), mesh=mesh_of("8"), config=config)
    step = zero.make_train_step(loss_fn, optax.adam(0.01), mesh=mesh_of("8"), config=config)
    moved, metrics = step(jax.device_put(stage_1_state(), shardings), make_batch())
    state, step = reference.make_trainer(loss_fn, optax.adam(0.01), mesh=mesh_of("8"), params=host_params(), stage=3)
    state, expected = step(state, make_batch())
    chex.assert_trees_all_equal(*(jax.tree.map(np.asarray, s.params) for s in (moved, state)))
    assert float(metrics.loss) == float(expected.loss)


def test_a_traceback_has_the_lines_of_the_user_and_not_those_of_zero_jax_between(monkeypatch):
    mesh, config, tx = mesh_of("4"), reference.make_config(), optax.sgd(0.1)
    state, batch = zero.init_state(host_params(), tx, jax.random.key(0), mesh=mesh, config=config), {"x": np.ones(8)}
    missing = zero.make_train_step(lambda params, batch: batch["none"], tx, mesh=mesh, config=config)
    vector = zero.make_eval_step(lambda params, batch: batch["x"], mesh=mesh, config=config)

    def ours(call, kind):
        with pytest.raises(kind) as found:
            call(state, batch)
        return [path.name for path in (entry.path for entry in found.traceback) if "zero_jax" in path.parts]

    assert ours(missing, KeyError) == ours(missing.lower, KeyError) == []
    assert ours(vector, ValueError) == ["function.py"]
    before = jax.config.jax_traceback_filtering
    try:
        jax.config.update("jax_traceback_filtering", "off")
        assert len(ours(missing, KeyError)) > 5
    finally:
        jax.config.update("jax_traceback_filtering", before)
    bug = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)
    monkeypatch.setattr("zero_jax.training.compiled_step.train_state_shardings", None)
    assert ours(bug, TypeError)[-1] == "compiled_step.py"


def test_a_nan_of_debug_nans_has_the_line_that_made_it():

    def loss(params, batch):
        return jnp.log(loss_fn(params, batch) - batch["inputs"][0, 0])

    tx, batch, state = optax.adam(0.01), make_batch(), make_on(mesh_of("4"), stage=1)
    make_step = lambda: zero.make_train_step(loss, tx, mesh=mesh_of("4"), config=reference.make_config(stage=1))  # noqa: E731
    good, bad = ({**batch, "inputs": batch["inputs"] * 0 + x} for x in (0, 1e30))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"invalid value \(nan\)") as found:
        make_step()(state, bad)
    assert any(f"it was made at {__file__}:{loss.__code__.co_firstlineno + 1}:" in x for x in found.value.__notes__)
    assert [entry.path.name for entry in found.traceback if "zero_jax" in entry.path.parts] == ["jaxprs.py"]
    step = make_step()
    state, _ = step(state, good)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"donated: .*set jax_debug_nans .*before"):
        step(state, bad)

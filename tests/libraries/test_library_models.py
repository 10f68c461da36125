"""Functions made of a library's model are those that its users would write; tests/training/state compares the steps."""

import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zero_jax as zero
from zero_jax.planning import explain

BATCH = {"x": np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32), "y": np.arange(8, dtype=np.int32) % 4}
KEY = jax.random.key(3)


def cross_entropy(logits):
    return optax.softmax_cross_entropy_with_integer_labels(logits, BATCH["y"]).mean()


def assert_equal(found, expected):
    values = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    jax.tree.map(lambda x, y: np.testing.assert_allclose(values(x), values(y), rtol=1e-6), found, expected)


class Attending(nnx.Module):
    """Attention whose modules leave open whether they are deterministic, and dropout that is off for good."""

    def __init__(self, *, rngs):
        self.attention = nnx.MultiHeadAttention(2, 6, decode=False, dropout_rate=0.5, rngs=rngs)
        self.off = nnx.Dropout(0.5, deterministic=True, rngs=rngs)

    def __call__(self, x):
        return self.off(self.attention(x[None])[0])


def test_nnx_modules_that_leave_it_open_draw_in_training_and_others_as_they_say():
    made = zero.from_nnx(Attending, lambda model, batch: (jnp.square(model(batch["x"])).mean(), model.off(batch["x"])))
    variables = made.init_fn(KEY)
    states = [{"model_state": variables.model_state}]
    values = []
    for _ in range(2):
        value, x, state = made.loss_fn(variables.params, BATCH, KEY, **states[-1])
        states.append({"model_state": state})
        values.append(float(value))
        assert_equal(x, BATCH["x"])
    assert values[0] != values[1]
    evaluated = [float(made.eval_fn(variables.params, BATCH, **state)[0]) for state in states]
    assert evaluated[0] == evaluated[1] == evaluated[2]


class LinenNet(nn.Module):
    """Batch norm, dropout and noise: two streams, one collection."""

    @nn.compact
    def __call__(self, x, *, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(5)(x))
        if train:
            x = x + 0.1 * jax.random.normal(self.make_rng("noise"), x.shape)
        return nn.Dense(4)(nn.Dropout(0.5, deterministic=not train)(x))


@pytest.mark.slow
def test_linen_collections_and_streams():
    module = LinenNet()

    def loss(model, batch):
        return cross_entropy(model(batch["x"], train=True)), {"again": model(batch["x"], train=True)}

    def eval_loss(model, batch):
        return cross_entropy(model(batch["x"], train=False))

    made = zero.from_linen(module, loss, jnp.zeros((1, 6)), train=False, rngs=["dropout", "noise"], eval_loss=eval_loss)
    variables = made.init_fn(KEY)
    params, state = variables.params, variables.model_state

    def by_hand(params):
        merged, outs = {"params": params, **state}, []
        for first in (0, 2):
            rngs = {name: jax.random.fold_in(KEY, first + i) for i, name in enumerate(("dropout", "noise"))}
            out, new = module.apply(merged, BATCH["x"], train=True, rngs=rngs, mutable=["batch_stats"])
            merged |= new
            outs.append(out)
        return cross_entropy(outs[0]), ({"again": outs[1]}, {"batch_stats": merged["batch_stats"]})

    def by_helper(params):
        value, aux, new = made.loss_fn(params, BATCH, KEY, model_state=state)
        return value, (aux, new)

    found, expected = (jax.jit(jax.value_and_grad(f, has_aux=True))(params) for f in (by_helper, by_hand))
    assert_equal(found, expected)
    value, _, same = made.eval_fn(params, BATCH, model_state=state)
    assert_equal(value, cross_entropy(module.apply({"params": params, **state}, BATCH["x"], train=False)))
    assert_equal(same, state)
    assert module.apply(made.merge(params, state), BATCH["x"], train=False).shape == (8, 4)


def test_a_module_of_params_alone_has_no_model_state_and_takes_no_key():
    linen = zero.from_linen(nn.Dense(4), lambda model, batch: cross_entropy(model(batch["x"])), jnp.zeros((1, 6)))
    assert_equal(
        linen.loss_fn(linen.init_fn(KEY), BATCH)[0],
        cross_entropy(nn.Dense(4).apply(linen.merge(linen.init_fn(KEY)), BATCH["x"])),
    )
    assert linen.eval_fn is None
    model = zero.from_nnx(
        lambda rngs: nnx.Linear(6, 4, rngs=rngs), lambda model, batch: cross_entropy(model(batch["x"]))
    )
    params = model.init_fn(KEY)
    assert isinstance(params, nnx.State)
    assert_equal(model.loss_fn(params, BATCH)[0], cross_entropy(model.merge(params)(BATCH["x"])))
    mlp = zero.from_equinox(
        lambda key: eqx.nn.MLP(6, 4, 8, 1, key=key), lambda model, batch: cross_entropy(jax.vmap(model)(batch["x"]))
    )
    params = mlp.init_fn(KEY)
    assert_equal(mlp.eval_fn(params, BATCH)[0], cross_entropy(jax.vmap(mlp.merge(params))(BATCH["x"])))


class Sowing(nn.Module):
    """Sows into two collections, of which init makes one."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(x)
        self.sow("losses", "large", jnp.square(x).mean())
        self.sow("intermediates", "seen", x)
        return x


def test_what_linen_modules_sow_is_returned_where_it_is_asked_for():
    def loss(model, batch):
        _, sown = model(batch["x"], mutable=["losses", "intermediates"])
        plain = model(batch["x"])
        return cross_entropy(plain) + sown["losses"]["large"][0], {"same": plain - sown["intermediates"]["seen"][0]}

    made = zero.from_linen(Sowing(), loss, jnp.zeros((1, 6)), eval_loss=loss)
    params = made.init_fn(KEY)
    logits = Sowing().apply({"params": params}, BATCH["x"])
    for function in (made.loss_fn, made.eval_fn):
        value, aux = function(params, BATCH)
        assert_equal(value, cross_entropy(logits) + jnp.square(logits).mean())
        assert not aux["same"].any()
    with pytest.raises(ValueError, match="give the names of collections"):
        zero.from_linen(Sowing(), lambda model, batch: model(batch["x"], mutable=True), jnp.zeros((1, 6))).loss_fn(
            params, BATCH
        )


class Summing(nn.Module):
    """Sows a sum into one collection, and counts its calls in another, which it reads."""

    @nn.compact
    def __call__(self, x):
        calls = self.variable("calls", "count", lambda: jnp.zeros((), jnp.int32))
        calls.value += 1
        for _ in range(2):
            x = nn.Dense(6)(x)
            self.sow("losses", "sum", jnp.square(x).mean(), reduce_fn=jnp.add, init_fn=lambda: jnp.float32(0.0))
        if self.has_variable("scales", "scale") or self.is_mutable_collection("scales"):  # read without `variable`
            scale = self.get_variable("scales", "scale", jnp.float32(2.0))
            self.put_variable("scales", "scale", scale)
            x *= scale
        return x


def test_what_is_sown_with_a_reduce_fn_is_new_in_each_step_and_what_is_read_is_kept():
    def loss(model, batch):
        _, sown = model(batch["x"], mutable=["losses"])
        return sown["losses"]["sum"]

    made = zero.from_linen(Summing(), loss, jnp.zeros((1, 6)))
    variables = made.init_fn(KEY)
    assert {*variables.model_state} == {"calls", "scales"}
    values, state = [], variables.model_state
    for _ in range(2):
        value, _, state = made.loss_fn(variables.params, BATCH, KEY, model_state=state)
        values.append(value)
    assert values[0] == values[1] > 0 and state["calls"]["count"] == 3


def test_collections_that_the_loss_asks_for_are_updated_and_returned():
    def loss(model, batch):
        x, updated = model(batch["x"], train=True, mutable=["batch_stats"])
        return cross_entropy(x), updated

    made = zero.from_linen(LinenNet(), loss, jnp.zeros((1, 6)), train=False, rngs=["dropout", "noise"])
    variables = made.init_fn(KEY)
    _, returned, state = made.loss_fn(variables.params, BATCH, KEY, model_state=variables.model_state)
    assert_equal(returned, state)
    assert not np.allclose(state["batch_stats"]["BatchNorm_0"]["mean"], 0)


class TableOfNumPy(eqx.Module):
    """Arrays of NumPy, as Equinox takes them: floats are trained, integers are not."""

    table: np.ndarray
    order: np.ndarray

    def __init__(self, key):
        self.table, self.order = np.ones((6, 4), np.float32), np.arange(4)[::-1]

    def __call__(self, x):
        return (x @ self.table)[:, self.order]


def test_arrays_of_numpy_in_an_equinox_model_are_arrays():
    made = zero.from_equinox(TableOfNumPy, lambda model, batch: cross_entropy(model(batch["x"])))
    variables = made.init_fn(KEY)
    assert len(jax.tree.leaves(variables.params)) == 1
    value, _, _ = made.loss_fn(variables.params, BATCH, model_state=variables.model_state)
    assert_equal(value, cross_entropy(TableOfNumPy(KEY)(BATCH["x"])))


def waves(frequencies, x):
    return jnp.sin(x * frequencies)


class Waves:
    """An object with an array that no library sees."""

    def __init__(self, frequencies):
        self.frequencies = frequencies

    def __call__(self, x):
        return waves(self.frequencies, x)


@jax.custom_vjp
def scaled(x, scale):
    return x * scale


scaled.defvjp(lambda x, scale: (x * scale, scale), lambda scale, g: (g * scale, jnp.zeros_like(scale)))

# Functions that hold an array.
HOLDERS = {
    "partial": lambda array: functools.partial(waves, array),
    "nested": lambda array: functools.partial(lambda inner, x: inner(x), functools.partial(waves, array)),
    "closure": lambda array: lambda x: jnp.sin(x * array),
    "default": lambda array: lambda x, array=array: jnp.sin(x * array),
    "object": Waves,
    "method": lambda array: Waves(array).__call__,
    "jit": lambda array: jax.jit(lambda x: jnp.sin(x * array)),
    "custom_vjp": lambda array: lambda x: scaled(x, array),
}


class EquinoxHolder(eqx.Module):
    """A linear layer and two functions, of which one is a static field."""

    linear: eqx.nn.Linear
    function: Callable
    static: Callable = eqx.field(static=True)

    def __call__(self, x):
        return self.static(self.function(jax.vmap(self.linear)(x)))


class NnxHolder(nnx.Module):
    """A linear layer and a function."""

    def __init__(self, function, rngs):
        self.linear, self.function = nnx.Linear(6, 4, rngs=rngs), function

    def __call__(self, x):
        return self.function(self.linear(x))


def equinox_holder(hold, key, array):
    return EquinoxHolder(eqx.nn.Linear(6, 4, key=key), hold(array), hold(array))


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_functions_of_a_model_may_hold_arrays(hold):
    loss = lambda model, batch: cross_entropy(model(batch["x"]))  # noqa: E731
    equinox = lambda key: equinox_holder(hold, key, jnp.linspace(0.5, 2.0, 4))  # noqa: E731
    linear = lambda rngs: NnxHolder(hold(jnp.linspace(0.5, 2.0, 4)), rngs)  # noqa: E731
    mesh, config = zero.make_mesh(), zero.ZeroConfig(stage=3, min_shard_size=2)
    for made, model in (
        (zero.from_equinox(equinox, loss), equinox(KEY)),
        (zero.from_nnx(linear, loss), linear(nnx.Rngs(KEY))),
    ):
        state = zero.init_state(made.init_fn, optax.sgd(0.1), KEY, mesh=mesh, config=config)
        assert_equal(made.merge(state.params, state.model_state)(BATCH["x"]), model(BATCH["x"]))
        state, metrics = zero.make_train_step(made.loss_fn, optax.sgd(0.1), mesh=mesh, config=config)(state, BATCH)
        assert_equal(metrics.loss, loss(model, BATCH))


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_a_function_that_holds_an_array_of_the_key_is_refused(hold):
    loss = lambda model, batch: cross_entropy(model(batch["x"]))  # noqa: E731
    message = r"test_library_models\.py:\d+ .*holds an array that is made from the key.* make it a field"
    with pytest.raises(ValueError, match=message):
        zero.from_equinox(lambda key: equinox_holder(hold, key, jax.random.normal(key, 4)), loss)
    with pytest.raises(ValueError, match=message):
        zero.from_nnx(lambda rngs: NnxHolder(hold(jax.random.normal(rngs(), 4)), rngs), loss)


class BoundMethod(nnx.Module):
    """A method that is kept as a value refers to the module that is made first."""

    def __init__(self, read, rngs):
        self.linear, self.scale, self.read = nnx.Linear(6, 4, rngs=rngs), nnx.Param(jnp.ones(4)), read
        self.function = self.scaled

    def scaled(self, x):
        return self.read(self, x)

    def __call__(self, x):
        return self.function(self.linear(x))


def test_an_nnx_model_may_keep_a_bound_method_that_reads_no_variable():
    loss = lambda model, batch: cross_entropy(model(batch["x"]))  # noqa: E731
    make = lambda rngs: BoundMethod(lambda self, x: jnp.tanh(x), rngs)  # noqa: E731
    made = zero.from_nnx(make, loss)
    assert_equal(made.loss_fn(made.init_fn(KEY), BATCH)[0], loss(make(nnx.Rngs(KEY)), BATCH))
    for read in (
        lambda self, x: x * self.scale,
        lambda self, x: jnp.multiply(x, self.scale),
        lambda self, x: self.scale[...] + x,
        lambda self, x: self.linear(x),
    ):
        made = zero.from_nnx(lambda rngs, read=read: BoundMethod(read, rngs), loss)
        with pytest.raises(ValueError, match=r"self\.f = self\.g.* call self\.g"):
            jax.grad(lambda params, made=made: made.loss_fn(params, BATCH)[0])(made.init_fn(KEY))


class Pair(NamedTuple):
    """Two models that are one."""

    first: eqx.nn.Linear
    second: eqx.nn.Linear


def test_an_equinox_model_may_be_beside_a_state_of_none():
    make, loss = lambda key: eqx.nn.Linear(6, 4, key=key), lambda model, batch: model(batch["x"][0]).sum()
    made = zero.from_equinox(lambda key: (make(key), None), loss)
    assert_equal(made.loss_fn(made.init_fn(KEY), BATCH)[0], loss(make(KEY), BATCH))


@pytest.mark.parametrize("kind", [lambda *models: models, Pair, lambda *models: (*models, models[1])])
def test_an_equinox_model_may_be_a_tuple_of_models(kind):
    def make(key):
        return kind(eqx.nn.Linear(6, 5, key=key), eqx.nn.Linear(5, 4, key=key))

    def loss(model, batch):
        return cross_entropy(jax.vmap(lambda x: model[1](jnp.tanh(model[0](x))))(batch["x"]))

    made, mesh, config = zero.from_equinox(make, loss), zero.make_mesh(), zero.ZeroConfig(stage=3, min_shard_size=2)
    state = zero.init_state(made.init_fn, optax.sgd(0.1), KEY, mesh=mesh, config=config)
    assert_equal(state.params, make(KEY))
    _, metrics = zero.make_train_step(made.loss_fn, optax.sgd(0.1), mesh=mesh, config=config)(state, BATCH)
    assert_equal(metrics.loss, loss(make(KEY), BATCH))


class NnxNet(nnx.Module):
    """A shared param, adapters, batch norm, dropout."""

    def __init__(self, *, rngs):
        self.first = nnx.Linear(6, 6, rngs=rngs)
        self.same, self.norm = self.first, nnx.BatchNorm(6, rngs=rngs)
        self.dropout, self.lora = nnx.Dropout(0.5, rngs=rngs), nnx.LoRA(6, 2, 4, rngs=rngs)

    def __call__(self, x):
        return self.lora(self.dropout(self.norm(self.same(self.first(x)))))


def test_nnx_variables_that_are_not_trained_are_model_state():
    def loss(model, batch, key):
        noise = 0.1 * jax.random.normal(key, batch["x"].shape)
        return cross_entropy(model(batch["x"] + noise))

    for wrt, num_trained in ((None, 6), (nnx.LoRAParam, 2)):
        made = zero.from_nnx(NnxNet, loss, wrt=wrt)
        variables = made.init_fn(KEY)
        assert len(jax.tree.leaves(variables.params)) == num_trained
        value, _, state = made.loss_fn(variables.params, BATCH, KEY, model_state=variables.model_state)
        model = NnxNet(rngs=nnx.Rngs(KEY))
        assert_equal(value, loss(model, BATCH, KEY))
        assert_equal(state, nnx.state(model, nnx.Not(wrt or nnx.Param)))
        value, _, _ = made.eval_fn(variables.params, BATCH, KEY, model_state=variables.model_state)
        model = NnxNet(rngs=nnx.Rngs(KEY))
        model.eval()
        assert_equal(value, loss(model, BATCH, KEY))
        merged = made.merge(variables.params, variables.model_state)
        assert isinstance(merged, NnxNet) and merged.same is merged.first


class NnxArrays(nnx.Module):
    """Arrays that are no variables, in an attribute and in a dict of a module of the library."""

    def __init__(self, *, rngs):
        self.positions, self.table = jnp.arange(6.0) / 6, np.ones(6, np.float32)
        self.linear = nnx.WeightNorm(nnx.Linear(6, 4, rngs=rngs), rngs=rngs)

    def __call__(self, x):
        return self.linear(x * self.table + self.positions)


def test_arrays_of_an_nnx_model_that_are_no_variables_are_model_state():
    loss = lambda model, batch: cross_entropy(model(batch["x"]))  # noqa: E731
    made, mesh, config = zero.from_nnx(NnxArrays, loss), zero.make_mesh(), zero.ZeroConfig(stage=3, min_shard_size=2)
    state = zero.init_state(made.init_fn, optax.sgd(0.1), KEY, mesh=mesh, config=config)
    model = NnxArrays(rngs=nnx.Rngs(KEY))
    assert_equal(state.model_state, nnx.state(model, nnx.Not(nnx.Param)))
    assert_equal(zero.make_eval_step(made.eval_fn, mesh=mesh, config=config)(state, BATCH).loss, loss(model, BATCH))
    with pytest.warns(UserWarning, match=r"writes to 'linear/layer_instance/kernel.*normalization\.py.*is not kept"):
        state, metrics = zero.make_train_step(made.loss_fn, optax.sgd(0.1), mesh=mesh, config=config)(state, BATCH)
    assert_equal(metrics.loss, loss(NnxArrays(rngs=nnx.Rngs(KEY)), BATCH))
    assert_equal(state.model_state, nnx.state(model, nnx.Not(nnx.Param)))


class ScannedNnx(nnx.Module):
    """Layers that return their params anew, as a scan and `nnx.remat` do."""

    def __init__(self, *, rngs):
        self.layers = nnx.vmap(lambda key: nnx.Linear(6, 6, rngs=nnx.Rngs(key)))(jax.random.split(rngs.params(), 2))

    def __call__(self, x):
        return nnx.scan(nnx.remat(lambda layer, x: layer(x)), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(
            self.layers, x
        )


def test_params_that_a_call_returns_as_they_were_are_not_written_to():
    made = zero.from_nnx(ScannedNnx, lambda model, batch: cross_entropy(model(batch["x"])))
    with warnings.catch_warnings(action="error"):
        made.loss_fn(made.init_fn(KEY), BATCH)


def test_an_nnx_model_of_a_state_changes_copies_of_its_variables():
    """Gradients are taken of values that the function closes over, which are of another trace."""
    made = zero.from_nnx(NnxNet, lambda model, batch: cross_entropy(model(batch["x"])))
    variables = made.init_fn(KEY)
    before = jax.tree.map(jnp.copy, variables.model_state)

    def loss(params):
        value, _, state = made.loss_fn(params, BATCH, model_state=variables.model_state)
        return value, state

    _, state = jax.grad(loss, has_aux=True)(variables.params)
    made.merge(variables.params, variables.model_state)(BATCH["x"])
    assert_equal(variables.model_state, before)
    assert_equal(state, loss(variables.params)[1])
    assert not np.allclose(state["norm"]["mean"][...], before["norm"]["mean"][...])


@pytest.mark.parametrize("make", [zero.from_nnx, zero.from_equinox, lambda _, loss: zero.from_linen(nn.Dense(4), loss)])
def test_a_loss_with_other_arguments_is_refused(make):
    with pytest.raises(ValueError, match="cannot be called with"):
        make(lambda rngs: nnx.Linear(6, 4, rngs=rngs), lambda model: 0.0)
    if make in (zero.from_nnx, zero.from_equinox):
        with pytest.raises(ValueError, match="make=3 is no function"):
            make(3, lambda model, batch: 0.0)


def test_a_module_of_another_kind_is_refused():
    loss = lambda model, batch: 0.0  # noqa: E731
    with pytest.raises(ValueError, match="not its class"):
        zero.from_linen(nn.Dense, loss, jnp.zeros((1, 6)))
    with pytest.raises(ValueError, match="give the class of the module"):
        zero.from_nnx(nnx.Linear(6, 4, rngs=nnx.Rngs(0)), loss)
    with pytest.raises(ValueError, match=r"make returns a dict.*nnx\.Dict"):
        zero.from_nnx(lambda rngs: {"a": nnx.Linear(6, 4, rngs=rngs)}, loss)


class Normed(nnx.Module):
    """A module with state that no gradient updates."""

    def __init__(self, rngs):
        self.linear, self.norm = nnx.Linear(6, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


def test_state_of_a_module_among_the_params_and_an_nnx_optimizer_are_refused():
    linen = lambda key: nn.BatchNorm(use_running_average=False).init(key, BATCH["x"])  # noqa: E731
    module = Normed(nnx.Rngs(0))
    only_params = nnx.state(module, nnx.Param)
    for init_fn, message in (
        (module, r"updates: dropout/rngs/count \(RngCount\), .* and 2 more.*zero.from_nnx"),
        (lambda key: Normed(nnx.Rngs(key)), "zero.from_nnx"),
        (linen, r"batch_stats\. .*zero.from_linen"),
    ):
        with pytest.raises(ValueError, match=message):
            zero.init_state(init_fn, optax.sgd(0.1), KEY, mesh=zero.make_mesh(), config=zero.ZeroConfig(stage=3))
    zero.init_state(only_params, optax.sgd(0.1), KEY, mesh=zero.make_mesh(), config=zero.ZeroConfig(stage=3))
    with pytest.raises(ValueError, match=r"^tx=.{,90} is no optimizer: .*, the one in its \.tx"):
        optimizer = nnx.Optimizer(module, optax.sgd(0.1), wrt=nnx.Param)
        zero.make_train_step(len, optimizer, mesh=zero.make_mesh(), config=zero.ZeroConfig(stage=3))


def mlp_of(key):
    return eqx.nn.MLP(6, 4, 8, 2, key=key)


def mean_of(model, batch):
    return jax.vmap(model)(batch["x"]).mean()


class Unnormed(eqx.Module):
    """A model with an error of its own."""

    linear: eqx.nn.Linear
    norm: Callable | None = None

    def __call__(self, x):
        return self.norm(self.linear(x))


def unnormed(key):
    return eqx.partition(Unnormed(eqx.nn.Linear(6, 4, key=key)), eqx.is_array)


EQUINOX, ALL = ("zero.from_equinox",), ("zero.from_nnx", "zero.from_linen", "zero.from_equinox")


@pytest.mark.parametrize(
    ("init_fn", "loss", "makers"),
    [
        (zero.from_equinox(mlp_of, mean_of).init_fn, mean_of, EQUINOX),
        (lambda key: (eqx.filter(mlp_of(key), eqx.is_array),), lambda models, batch: mean_of(*models, batch), EQUINOX),
        (zero.from_linen(nn.Dense(4), mean_of, BATCH["x"]).init_fn, lambda model, batch: model(batch["x"]).mean(), ALL),
        (nnx.state(nnx.Linear(6, 4, rngs=nnx.Rngs(0))), lambda model, batch: model(batch["x"]).mean(), ALL),
        (lambda key: {"w": jnp.ones(6)}, lambda params, batch: batch["none"](params["w"]), ()),
        (lambda key: eqx.filter(mlp_of(key), eqx.is_array), lambda model, batch: batch.get("none")(model), ()),
        (lambda key: unnormed(key)[0], lambda params, batch: mean_of(eqx.combine(params, unnormed(KEY)[1]), batch), ()),
    ],
)
def test_a_loss_on_the_model_that_gets_the_params_is_answered_with_the_function_that_merges_them(init_fn, loss, makers):
    settings = {"mesh": zero.make_mesh(), "config": zero.ZeroConfig(stage=3)}
    state = zero.init_state(init_fn, optax.sgd(0.1), KEY, **settings)
    with pytest.raises((TypeError, KeyError)) as caught:
        zero.make_train_step(loss, optax.sgd(0.1), **settings)(state, BATCH)
    notes = [note for note in getattr(caught.value, "__notes__", ()) if note.startswith("loss_fn gets the params")]
    assert len(notes) == bool(makers) and all(name in note for name in makers for note in notes)
    assert ("\n  loss_fn gets the params" in str(explain(caught.value))) == bool(makers)

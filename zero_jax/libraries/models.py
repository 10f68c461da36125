"""Splits models of libraries into params and model state, and makes functions of these from a loss on the model."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.core.signatures import check_callable, place_of
from zero_jax.core.tree import PyTree, key_shape, leaves_by_name, shown
from zero_jax.core.variables import MODEL_STATE, Variables, joined
from zero_jax.libraries.own_arrays import NotMerged, made_without_tracers
from zero_jax.program.dataflow import Makers
from zero_jax.program.jaxprs import stands_for, used_inputs
from zero_jax.training import LossFunction


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFunctions:
    """The functions of a model that is written in a library.

    Attributes:
      init_fn: `init_fn(key)` returns the params, or `zero.Variables` of params and model state if the model has any.
      loss_fn: the loss in training, as `zero.make_train_step`, `zero.plan` and `zero.Trainer` take it.
      eval_fn: the loss in evaluation (no dropout, running averages), for `zero.make_eval_step` and `zero.Trainer`; None
        where it is not known.
      merge: `merge(params, model_state=None)` returns the model with the params and the model state of a train state.
      loss: where the loss on the model is written.

    Example:
      >>> from flax import nnx
      >>> make = lambda rngs: nnx.Linear(64, 8, rngs=rngs)
      >>> model = zero.from_nnx(make, lambda model, batch: model(batch["x"]).mean())
      >>> model.merge(model.init_fn(jax.random.key(0)))(batch["x"]).shape
      (16, 8)
    """

    init_fn: Callable[[jax.Array], PyTree]
    loss_fn: Callable[..., Any]
    eval_fn: Callable[..., Any] | None
    merge: Callable[..., Any]
    loss: str = ""

    def __repr__(self) -> str:
        names = [field.name for field in dataclasses.fields(self) if callable(getattr(self, field.name))]
        return f"ModelFunctions of {self.loss or place_of(self.loss_fn)}: {', '.join(names)}"


def from_nnx(make: Callable[..., Any], loss: Callable[..., Any], *, wrt: Any = None) -> ModelFunctions:
    """Makes the functions of a Flax NNX model with any variables: dropout, batch norm, shared params, LoRA.

    All variables that are not trained (batch statistics, keys and counts of dropout) are model state. Modules that do
    not say whether they are `deterministic`, such as `nnx.MultiHeadAttention`, draw in training and not in evaluation.
    What a call writes to trained variables, as `nnx.WeightNorm` does, is not kept: a warning names these.

    Args:
      make: `make(rngs)` or `make(rngs=...)` of `nnx.Rngs` returns the module, such as its class.
      loss: `loss(model, batch)` or `loss(model, batch, key)` returns a scalar, or `(loss, aux)`.
      wrt: the filter of the variables that are trained; None means `nnx.Param`.

    Raises:
      ValueError: a loss that takes other arguments, a `make` that returns no module.

    Example:
      >>> from flax import nnx
      >>> make = lambda rngs: nnx.Linear(64, 8, rngs=rngs)
      >>> model = zero.from_nnx(make, lambda model, batch: model(batch["x"]).mean())
      >>> model.init_fn(jax.random.key(0))["kernel"].shape
      (64, 8)
    """
    from flax import nnx

    function = LossFunction.of(loss)
    remedy = "give the class of the module, or a function of nnx.Rngs that returns one"
    check_callable("make", make, remedy=remedy)
    if isinstance(make, nnx.Module):
        raise ValueError(f"make={shown(make)}: {remedy}")
    by_name = "rngs" in inspect.signature(make.__init__ if isinstance(make, type) else make).parameters
    trained = nnx.Param if wrt is None else wrt

    def module(key: jax.Array) -> Any:
        model = make(rngs=nnx.Rngs(key)) if by_name else make(nnx.Rngs(key))
        if not isinstance(model, nnx.Module):
            raise ValueError(f"make returns {shown(model)}: {remedy}, such as nnx.Dict(a=..., b=...) of several")
        for _, node in nnx.iter_graph(model):
            for name, value in vars(node).items() if isinstance(node, nnx.Pytree) else ():
                if isinstance(value, jax.Array):  # in a trace Flax does not see it, with Python 3.11
                    setattr(node, name, nnx.data(value))
        return model

    def parts(make: Callable[[jax.Array], Any]) -> tuple[PyTree, list[Any]]:
        graphs: list[Any] = []  # made of arrays in a trace: those of `nnx.eval_shape` are shapes, which are static
        state = jax.eval_shape(lambda key: graphdefs(make(key), graphs), key_shape())
        return state, graphs

    def graphdefs(model: Any, graphs: list[Any]) -> PyTree:
        for name in ("deterministic", "use_running_average"):  # which some modules leave open, and a call has to say
            is_open = lambda _, module, name=name: getattr(module, name, False) is None  # noqa: E731
            model.set_attributes(is_open, **{name: False}, raise_if_not_found=False)
        graphs.append(nnx.graphdef(model))
        model.eval()
        graphs.append(nnx.graphdef(model))
        state = jax.tree.map(lambda x: x, nnx.state(model, nnx.Not(trained)))  # in variables of its own
        nnx.update(model, jax.tree.map(lambda _: NotMerged(), nnx.state(model)))  # bound methods refer to this module
        return state

    state, (graphdef, evaluated) = made_without_tracers(parts, module)
    has_state = bool(jax.tree.leaves(state))

    def init_fn(key: jax.Array) -> PyTree:
        _, params, model_state = nnx.split(module(key), trained, ...)
        return Variables(params=params, model_state=model_state) if has_state else params

    def merge(params: PyTree, model_state: PyTree = None, *, graphdef: Any = graphdef) -> Any:
        # Copies of the variables: the model writes to its own, and not to those of the state.
        return nnx.merge(graphdef, params, *([model_state] if has_state else []), copy=True)

    def loss_of(graphdef: Any, unchecked: list[Any]) -> Callable[..., Any]:
        def call(variables: Variables, batch: PyTree, key: Any) -> Any:
            def called(params: PyTree) -> tuple[Any, Any, PyTree]:
                model = merge(params, variables.model_state, graphdef=graphdef)
                before = jax.tree.leaves(nnx.state(model, trained))
                return model, function(model, batch, key), before

            model, (value, (aux, _)), before = called(variables.params)
            after = jax.tree.leaves(nnx.state(model, trained))
            # New arrays may be the old ones still, as behind a `nnx.remat`: a program of its own says so, once.
            if unchecked and any(x is not y for x, y in zip(before, after, strict=False)):
                unchecked.clear()
                _warn_of_writes(lambda params: nnx.state(called(params)[0], trained), variables.params)
            return value, aux, nnx.state(model, nnx.Not(trained))

        return with_parameters(function, call, has_state=has_state)

    return ModelFunctions(
        init_fn=init_fn,
        loss_fn=loss_of(graphdef, [loss]),
        eval_fn=loss_of(evaluated, []),
        merge=merge,
        loss=place_of(loss),
    )


def _warn_of_writes(trained_after: Callable[[PyTree], PyTree], params: PyTree) -> None:
    """Warns of params that a call of a model writes to; `trained_after` of the params returns them after a call."""
    closed, shapes = jax.make_jaxpr(trained_after, return_shape=True)(params)
    numbers = {name: i for i, name in enumerate(leaves_by_name(params))}
    makers = zip(leaves_by_name(shapes), Makers().run(closed, range(len(numbers))), strict=True)
    if written := {name: maker for name, maker in makers if maker != numbers.get(name)}:
        name, line = next(iter(written.items()))
        more = f" (and to {len(written) - 1} more)" if len(written) > 1 else ""
        warnings.warn(
            f"the loss writes to {name!r}{more}, which is trained{f', at {line}' if line else ''}: that is not kept, "
            "and each call begins with what the optimizer made. What is to be kept has to be a variable that is not "
            "trained (wrt)",
            stacklevel=2,
        )


def from_linen(
    module: Any,
    loss: Callable[..., Any],
    *inputs: Any,
    rngs: Sequence[str] = (),
    eval_loss: Callable[..., Any] | None = None,
    **options: Any,
) -> ModelFunctions:
    """Makes the functions of a Flax Linen module with any mutable collections and PRNG streams.

    Collections other than `params` are model state, and each call of the model in the loss updates them. What modules
    `sow`, with a `reduce_fn` or without, is new in each call and not kept: `out, sown = model(x, mutable=["losses"])`
    returns it, as `module.apply` does.

    Args:
      module: the `nn.Module`.
      loss: `loss(model, batch)` or `loss(model, batch, key)`, where `model(*args, **kwargs)` applies the module;
        returns a scalar, or `(loss, aux)`.
      *inputs: what the module's `init` takes after the keys, such as `jnp.zeros((1, 64))`.
      rngs: the streams that the module draws from in the loss, such as `["dropout"]`.
      eval_loss: the loss in evaluation, such as one with `train=False`; there nothing is drawn and nothing updated.
        None leaves `eval_fn` out.
      **options: keywords of `init`, such as `train=False`.

    Raises:
      ValueError: a loss that takes other arguments, a class in the place of a module.

    Example:
      >>> import flax.linen as nn
      >>> model = zero.from_linen(nn.Dense(8), lambda model, batch: model(batch["x"]).mean(), jnp.ones((1, 64)))
      >>> model.init_fn(jax.random.key(0))["kernel"].shape
      (64, 8)
    """
    from flax import linen

    if not isinstance(module, linen.Module):
        remedy = "give an nn.Module of flax.linen, such as Net(), not its class (zero.from_nnx takes those of flax.nnx)"
        raise ValueError(f"module={shown(module)}: {remedy}")
    rngs = [rngs] if isinstance(rngs, str) else rngs
    keys_of = lambda key: dict(zip(("params", *rngs), jax.random.split(key, 1 + len(rngs)), strict=True))  # noqa: E731

    def init_fn(key: jax.Array) -> PyTree:
        initial = dict(module.init(keys_of(key), *inputs, **options))
        collections = {name: value for name, value in initial.items() if name not in sown}
        params = collections.pop("params", {})
        return Variables(params=params, model_state=collections) if jax.tree.leaves(collections) else params

    def loss_of(function: LossFunction, streams: Sequence[str] = (), *, updates: bool) -> Callable[..., Any]:
        def call(variables: Variables, batch: PyTree, key: Any) -> Any:
            collections = dict(variables.model_state or {})
            model = _applied(module, variables.params, collections, key, streams=streams, updates=updates)
            value, (aux, _) = function(model, batch, key)
            return value, aux, collections  # as the calls in the loss have left them

        return with_parameters(function, call, has_state=has_state, has_streams=bool(streams))

    function, sown = LossFunction.of(loss), set[str]()  # `init_fn` is called after this
    jax.eval_shape(lambda key: sown.update(_sown(module, keys_of(key), inputs, options)), key_shape())
    has_state = isinstance(jax.eval_shape(init_fn, key_shape()), Variables)
    eval_fn = None if eval_loss is None else loss_of(LossFunction.of(eval_loss), updates=False)
    loss_fn = loss_of(function, rngs, updates=True)
    merge = lambda params, model_state=None: {"params": params, **(model_state or {})}  # noqa: E731
    return ModelFunctions(init_fn=init_fn, loss_fn=loss_fn, eval_fn=eval_fn, merge=merge, loss=place_of(loss))


def _applied(
    module: Any, params: PyTree, collections: dict[str, Any], key: Any, *, streams: Sequence[str], updates: bool
) -> Callable[..., Any]:
    """Returns a Linen module as a function of its inputs; calls draw from `streams` and update `collections`."""
    counts = itertools.count()

    def model(*args: Any, mutable: Any = (), rngs: Any = None, **kwargs: Any) -> Any:
        keys = {name: jax.random.fold_in(key, next(counts)) for name in streams}  # others in each call
        wanted = [mutable] if isinstance(mutable, str) else mutable or ()
        if not isinstance(wanted, list | tuple):
            raise ValueError(f"mutable={mutable!r}: give the names of collections that the call returns too")
        rngs, changed = {**keys, **(rngs or {})}, [name for name in collections if updates and name not in wanted]
        variables = {"params": params, **collections}
        out, updated = module.apply(variables, *args, rngs=rngs, mutable=[*wanted, *changed], **kwargs)
        if updates:  # for the next call of the loss, and for the new model state (`loss_of`)
            collections.update({name: updated[name] for name in collections})
        return (out, {name: updated[name] for name in wanted if name in updated}) if wanted else out

    return model


def _sown(module: Any, keys: dict[str, jax.Array], inputs: tuple[Any, ...], options: dict[str, Any]) -> set[str]:
    """Returns the collections of a Linen module that calls write and never read."""
    initial, sown = dict(module.init(keys, *inputs, **options)), set()

    def call(name: str, collections: dict[str, Any]) -> Any:
        out, updated = module.apply(collections, *inputs, rngs=keys, **{**options, "mutable": [*initial]})
        return out, {other: updated[other] for other in updated if other != name}

    for name in initial.keys() - {"params"}:
        others = {other: value for other, value in initial.items() if other != name}
        program = jax.make_jaxpr(lambda value, name=name, others=others: call(name, {**others, name: value}))
        is_read = any(used_inputs(program(initial[name]).jaxpr)[: len(jax.tree.leaves(initial[name]))])
        # Both: a collection whose value no result is made of may yet have to be there.
        if not is_read and _runs_without(module, others, inputs, {**options, "rngs": keys}):
            sown.add(name)
    return sown


def _runs_without(module: Any, others: dict[str, Any], inputs: tuple[Any, ...], settings: dict[str, Any]) -> bool:
    """Returns whether a Linen module runs on `others` of its collections alone: `variable`s that are missing raise."""
    try:
        module.apply(others, *inputs, **{**settings, "mutable": [*others]})
    except Exception:  # of the module too, where it reads the collection in its own way
        return False
    return True


def from_equinox(make: Callable[[jax.Array], Any], loss: Callable[..., Any]) -> ModelFunctions:
    """Makes the functions of an Equinox model, with or without an `eqx.nn.State`.

    Floating arrays, of NumPy too, are params. Integers and keys among the leaves, and the `State`, are model state.
    Evaluation is of `eqx.nn.inference_mode(model)`.

    Args:
      make: `make(key)` returns the model, or the model and its state, as `eqx.nn.make_with_state(Model)` does.
      loss: `loss(model, batch)` or `loss(model, batch, key)` returns a scalar, or `(loss, aux)`. For a model with a
        state it has a keyword `model_state` for it, and returns `(loss, aux, model_state)`.

    Raises:
      ValueError: a loss that takes other arguments.

    Example:
      >>> import equinox as eqx
      >>> make = lambda key: eqx.nn.Linear(64, 8, key=key)
      >>> model = zero.from_equinox(make, lambda model, batch: jax.vmap(model)(batch["x"]).mean())
      >>> model.init_fn(jax.random.key(0)).weight.shape
      (8, 64)
    """
    import equinox as eqx

    function = LossFunction.of(loss)
    check_callable("make", make, remedy="give a function of a key that returns the model")
    is_array = lambda x: isinstance(x, jax.ShapeDtypeStruct) or eqx.is_array(x)  # noqa: E731
    is_param = lambda x: is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)  # noqa: E731

    def model_and_state(key: jax.Array) -> tuple[Any, Any]:
        out = make(key)  # a tuple may be the model: a generator and a discriminator
        is_pair = type(out) is tuple and len(out) == 2  # a NamedTuple of two is a model
        is_state = is_pair and (out[1] is None or isinstance(out[1], eqx.nn.State))
        has_own_state = is_state or (is_pair and function.model_state is not None)
        return out if has_own_state else (out, None)

    def init_fn(key: jax.Array) -> PyTree:
        model, state = model_and_state(key)
        return jax.tree.unflatten(tree, jax.tree.leaves(variables_of(eqx.filter(model, is_array), state)))

    def variables_of(arrays: Any, state: Any) -> PyTree:
        params, others = eqx.partition(arrays, is_param)
        return Variables(params=params, model_state=(others, state)) if has_state else params

    def merge(params: PyTree, model_state: PyTree = None) -> Any:
        others, state = model_state or (None, None)
        model = eqx.combine(params, static, *([] if others is None else [others]))
        return model if state is None else (model, state)

    def loss_of(mode: Callable[[Any], Any]) -> Callable[..., Any]:
        def call(variables: Variables, batch: PyTree, key: Any) -> Any:
            others, state = variables.model_state or (None, None)
            merged = merge(variables.params, variables.model_state)
            model = mode(merged if state is None else merged[0])
            value, (aux, state) = function(joined(model, state), batch, key)
            return value, aux, (others, state)

        return with_parameters(function, call, has_state=has_state)

    trace = lambda make: eqx.filter_eval_shape(make, key_shape())  # noqa: E731
    shapes, state = made_without_tracers(trace, model_and_state)
    arrays, static = eqx.partition(shapes, is_array)
    has_state = bool(jax.tree.leaves((eqx.partition(arrays, is_param)[1], eqx.filter(state, is_array))))
    tree = jax.tree.structure(variables_of(arrays, state))  # static fields of another call, as functions, are others
    loss_fn, eval_fn = loss_of(lambda x: x), loss_of(eqx.nn.inference_mode)  # which switches dropout and batch norm
    return ModelFunctions(init_fn=init_fn, loss_fn=loss_fn, eval_fn=eval_fn, merge=merge, loss=place_of(loss))


def with_parameters(
    function: LossFunction, call: Callable[[Variables, PyTree, Any], Any], *, has_state: bool, has_streams: bool = False
) -> Callable[..., Any]:
    """Returns a loss function with the parameters that `make_train_step` reads, and the user's name and place.

    `call` of variables, batch and key (or None) returns the loss, aux, and the new model state.
    """

    @stands_for(function.function)
    def loss_fn(params: PyTree, batch: PyTree, *keys: Any, **state: Any) -> Any:
        variables = Variables(params=params, model_state=state.get(MODEL_STATE))
        value, aux, model_state = call(variables, batch, *keys or (None,))
        return (value, aux, model_state) if has_state else (value, aux)

    words = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter(name, words)
        for name in ("params", "batch", *["key"] * (has_streams or function.key is not None))
    ]
    parameters += [inspect.Parameter(MODEL_STATE, inspect.Parameter.KEYWORD_ONLY)] * has_state
    # What a step reads to know whether the loss draws, and has a state: `*keys` says neither.
    loss_fn.__signature__ = inspect.Signature(parameters)
    return loss_fn

"""The user's loss function in a uniform signature, with checks of its parameters and results."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from zero_jax.attention import mesh_context
from zero_jax.core.signatures import check_takes
from zero_jax.core.tree import PyTree, check_arrays
from zero_jax.core.variables import MODEL_STATE, Variables, as_variables, checked_model_state, model_state_names
from zero_jax.program.dataflow import Makers
from zero_jax.program.jaxprs import open_jaxpr, stands_for
from zero_jax.program.loss import LossProgram
from zero_jax.sharding.mesh import Axes
from zero_jax.transforms import HostParam


def _parameters(loss_fn: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(loss_fn).parameters.values())
    except (TypeError, ValueError):
        return []


def key_parameter(loss_fn: Callable[..., Any]) -> inspect.Parameter | None:
    """Returns the PRNG-key parameter of a loss function: a third required one, or one named `..key` or `..rng`."""
    parameters = [p for p in _parameters(loss_fn) if p.name != MODEL_STATE]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keyword_only = [p for p in parameters if p.kind == p.KEYWORD_ONLY and p.name.endswith(("key", "rng"))]
    for parameter in positional[2:3]:
        if parameter.default is inspect.Parameter.empty or parameter.name.endswith(("key", "rng")):
            return parameter
    return keyword_only[0] if keyword_only else None


@dataclasses.dataclass(frozen=True)
class LossFunction:
    """A user's loss function with the signature `(variables, batch, key) -> (loss, (aux, model_state))`.

    `variables` are the params, or `Variables` where there is model state (`variables.joined`).
    """

    function: Callable[..., Any]  # the user's function
    key: inspect.Parameter | None  # its parameter for a key, if it has one
    model_state: inspect.Parameter | None  # its parameter for the model state, if it has one
    key_by_name: bool  # whether the key is passed by keyword, as it must be after `model_state`
    # Makes the context that it is called in: the mesh that attention in it is for
    context: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    @classmethod
    def of(cls, function: Callable[..., Any], **options: Any) -> LossFunction:
        """Returns a user's function with its parameters for a key and model state.

        Raises:
          ValueError: it cannot be called as a loss function.
        """
        parameters, key = {parameter.name: parameter for parameter in _parameters(function)}, key_parameter(function)
        state, names = parameters.get(MODEL_STATE), [*parameters]
        state = None if state is None or state.kind in (state.VAR_POSITIONAL, state.VAR_KEYWORD) else state
        by_name = key is not None and (key.kind == key.KEYWORD_ONLY or MODEL_STATE in names[: names.index(key.name)])
        positional = ["params", "batch", *([] if key is None or by_name else ["key"])]
        keywords = [parameter.name for parameter in (key if by_name else None, state) if parameter is not None]
        remedy = "give loss_fn(params, batch) or loss_fn(params, batch, key), or one with a keyword model_state"
        check_takes("loss_fn", function, positional, keywords=keywords, remedy=remedy)
        return cls(function, key, state, by_name, **options)

    def named(self) -> Callable[..., Any]:
        """Returns it as a function with the name and source location of the user's function, for JAX's errors."""

        @stands_for(self.function)
        def call(params: PyTree, batch: PyTree, key: jax.Array) -> tuple[jax.Array, tuple[PyTree, PyTree]]:
            return self(params, batch, key)

        return call

    def __call__(self, variables: PyTree, batch: PyTree, key: jax.Array) -> tuple[jax.Array, tuple[PyTree, PyTree]]:
        """Calls the function and checks what it returns."""
        has_state, variables = isinstance(variables, Variables), as_variables(variables)
        self._check_state(has_state)
        keys = () if self.key is None or self.key_by_name else (key,)
        kwargs = {self.key.name: key} if self.key is not None and self.key_by_name else {}
        if has_state:
            # Nodes of its own: NNX writes to the variables that it is given, of this very trace alone.
            kwargs[MODEL_STATE] = jax.tree.map(lambda x: x, variables.model_state)
        try:
            with self.context():
                out = self.function(variables.params, batch, *keys, **kwargs)
        except Exception as error:
            if isinstance(error, TypeError):
                _explain_model(error, variables.params)
            if keys and self.key is not None and _is_of_key(error, key, batch):
                error.add_note(
                    f"the third parameter of loss_fn ({self.key.name!r}) gets a PRNG key: loss_fn(params, batch) gets "
                    "all of the batch as one pytree, as in `x, y = batch`"
                )
            raise
        if not has_state:
            loss, aux = out if isinstance(out, tuple) and len(out) == 2 else (out, None)
            if isinstance(out, tuple) and len(out) != 2:
                raise ValueError(
                    f"loss_fn returned {len(out)} values: return the loss, or (loss, aux); "
                    "(loss, aux, model_state) is for a state and a loss_fn with model_state"
                )
            return _checked_loss(loss), (_checked_aux(aux), None)
        if not isinstance(out, tuple) or len(out) != 3:
            values = f"{len(out)} values" if isinstance(out, tuple) else "one value"
            raise ValueError(
                f"loss_fn takes model_state and returned {values}: return (loss, aux, model_state), with None "
                "for no aux"
            )
        loss, aux, model_state = out
        return _checked_loss(loss), (_checked_aux(aux), checked_model_state(model_state, variables.model_state))

    def _check_state(self, has_state: bool) -> None:
        """Raises `ValueError` if the function takes model state and there is none, or the other way round."""
        if has_state and self.model_state is None:
            raise ValueError(
                "the state has model_state, and loss_fn has no parameter of that name: "
                "give loss_fn(params, batch, *, model_state), which returns (loss, aux, model_state)"
            )
        if not has_state and self.model_state is not None and self.model_state.default is inspect.Parameter.empty:
            raise ValueError(
                "loss_fn takes model_state, and was given params alone: return zero.Variables(params=..., "
                "model_state=...) from init_fn, and give an evaluation the TrainState or such Variables"
            )


def _is_of_key(error: Exception, key: jax.Array, batch: PyTree) -> bool:
    """Tells whether an error may come of a loss function that takes its key for examples, or a part of the batch."""
    text, kind = str(error), type(batch).__name__
    if getattr(error, "obj", batch) is batch and not isinstance(batch, jax.Array) and re.search(rf"\b{kind}\b", text):
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    called = [frame.f_locals.values() for frame in frames if frame.f_globals.get("__name__", "").startswith("jax.")]
    return "key<" in text or any(value is key for values in called for value in values)


def _explain_model(error: TypeError, params: PyTree) -> None:
    """Adds to an error of a loss function that calls its params as a model where to get one that gets the model."""
    kind, models = type(params).__name__, [params, *jax.tree.leaves(params, is_leaf=callable)]
    called = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    bases = {base for x in called if x is not None and any(x is y for y in models) for base in type(x).__mro__}
    if str(error) == f"'{kind}' object is not callable":
        makers = "zero.from_nnx, zero.from_linen or zero.from_equinox"
    elif "NoneType" in str(error) and any(base.__module__.partition(".")[0] == "equinox" for base in bases):
        makers = "zero.from_equinox"
    else:
        return
    error.add_note(
        f"loss_fn gets the params (here of type {kind}), which are the arrays of a model alone: if it takes the model, "
        f"give the loss_fn that {makers} makes of it"
    )


def _checked_loss(loss: Any) -> jax.Array:
    shape, dtype = getattr(loss, "shape", ()), getattr(loss, "dtype", None)
    if dtype is None and not isinstance(loss, float):
        raise ValueError(
            f"loss_fn returned a loss of type {type(loss).__name__}: return a floating scalar, or (scalar, aux)"
        )
    if shape != () or (dtype is not None and not jnp.issubdtype(dtype, jnp.floating)):
        raise ValueError(
            f"loss_fn returned a loss of shape {shape} and dtype {dtype}: return a floating scalar, such as loss.mean()"
        )
    return jnp.asarray(loss)


def _checked_aux(aux: PyTree) -> PyTree:
    check_arrays("aux", aux, remedy="return arrays and numbers in aux")
    return jax.tree.map(jnp.asarray, aux)


@dataclasses.dataclass(frozen=True)
class MeshLoss:
    """A loss function that depends on the mesh, accepted wherever zero_jax takes a loss function.

    `make(mesh)` returns the function. The mesh of a plan, for example, exists only where the plan compiles:
    `zero.plan(zero.MeshLoss(lambda mesh: make_loss(place=zero.sequence_parallel(mesh))), ...)`.

    Example:
      >>> per_device = zero.MeshLoss(lambda mesh: lambda params, batch: loss_fn(params, batch) / mesh.size)
      >>> evaluate = zero.make_eval_step(per_device, mesh=mesh, config=config)
      >>> evaluate(state, batch).loss.shape
      ()
    """

    make: Callable[[Mesh], Callable[..., Any]]


def user_loss(loss_fn: Callable[..., Any] | MeshLoss, mesh: Mesh, axes: Axes | None = None) -> LossFunction:
    """Returns a user's loss function for a mesh (and the roles of its axes), with its key and model state parameters.

    Raises:
      ValueError: it cannot be called as a loss function.
    """
    function: Any = loss_fn
    if isinstance(loss_fn, MeshLoss):
        remedy = "give a function of a mesh that returns the loss function"
        function = check_takes("MeshLoss.make", loss_fn.make, ["mesh"], remedy=remedy)(mesh)
    return LossFunction.of(function, context=functools.partial(mesh_context, mesh, axes))


def model_state_changes(program: LossProgram, variables: PyTree, batch: PyTree, key: jax.Array) -> list[str | None]:
    """Returns for each leaf of model state the line at which a loss function changes it, None if it does not.

    The line is empty where it is not known. A frozen base is not changed.
    """
    num_leaves = len(jax.tree.leaves(as_variables(variables).model_state))
    if not num_leaves:
        return []
    traced = program.trace(variables, batch, key)
    first = traced.num_params - num_leaves  # model state comes last among the variables
    makers = Makers().run(traced.closed, range(len(open_jaxpr(traced.closed)[0].invars)))
    _, (_, returned, *_) = jax.tree.unflatten(jax.tree.structure(traced.out_shape), makers)
    return [None if x == first + i else str(x) for i, x in enumerate(jax.tree.leaves(returned))]


def check_unchanged(model_state: PyTree, changes: Sequence[str | None]) -> None:
    """Raises `ValueError` if the loss function changes a leaf of model state that is in host memory."""
    for name, leaf, line in zip(model_state_names(model_state), jax.tree.leaves(model_state), changes, strict=True):
        if line is not None and isinstance(leaf, HostParam):
            raise ValueError(
                f"offload: the loss function changes {name!r}, which is in host memory and is read there only: choose "
                "other paths of model state (offload_paths)"
            )


def on_devices(model_state: PyTree) -> PyTree:
    """Replaces the leaves of model state that are in host memory by None."""
    return jax.tree.map(lambda x: None if isinstance(x, HostParam) else x, model_state)


def pinned_model_state(new: PyTree, shardings: PyTree, old: PyTree) -> PyTree:
    """Constrains new model state to shardings; leaves in host memory become None, so that they are not fetched."""

    def pinned(old: Any, new: jax.Array, sharding: Any) -> Any:
        return None if isinstance(old, HostParam) else lax.with_sharding_constraint(new, sharding)

    return jax.tree.map(pinned, old, new, shardings)

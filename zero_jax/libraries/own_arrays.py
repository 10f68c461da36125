"""Arrays that functions of a model hold, in a closure, a `functools.partial` or an object with `__call__`.

A model is made in a trace, for its shapes alone. A library does not see the arrays of its functions: these are static,
and would leave the trace as tracers. So a model with such functions is made again, for the values of what does not
depend on the key.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import jax
from jax.core import Tracer

from zero_jax.core.signatures import place_of

Made = TypeVar("Made")


def made_without_tracers(trace: Callable[[Callable[..., Any]], Made], make: Callable[..., Any]) -> Made:
    """Returns `trace(make)`, which traces `make`, with arrays where functions would hold tracers.

    Raises:
      ValueError: a function holds an array that depends on the key.
    """

    def evaluated(*args: Any, **kwargs: Any) -> Any:
        # Allowed even where the user forbids transfers: arrays are made of Python's numbers here.
        with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
            return make(*args, **kwargs)

    made = trace(make)
    if _holder_of_tracer(made):
        made = trace(evaluated)
    if holder := _holder_of_tracer(made):
        raise ValueError(
            f"make: {holder} holds an array that is made from the key of the model, and that is no field of the model: "
            "make it a field, or draw it from a key of its own, as jax.random.key(0)"
        )
    return made


def _holder_of_tracer(root: Any) -> str:
    """Returns the place of the innermost function that holds a tracer, among all that an object refers to, or ""."""
    seen, left = {}, [(root, root)]
    while left:
        x, holder = left.pop()
        if isinstance(x, Tracer):
            return place_of(holder) if callable(holder) else "an object of the model"
        if id(x) in seen or not gc.is_tracked(x) or isinstance(x, type | types.ModuleType):
            continue
        # The object itself is kept: the id of one that is freed meanwhile would be given to another.
        seen[id(x)] = x
        if callable(x) and jax.tree_util.all_leaves([x]):  # not modules and variables
            holder = x
        # Not its globals, which are all of a module.
        is_function = isinstance(x, types.FunctionType)
        parts = [x.__closure__, x.__defaults__, x.__kwdefaults__, vars(x)] if is_function else gc.get_referents(x)
        left += [(part, holder) for part in parts]
    return ""


class NotMerged:
    """The value of a variable of a module that no params belong to, which a bound method of it would read."""

    def __getattr__(self, _: str) -> NoReturn:
        raise ValueError(
            "a method that the model keeps as a value (self.f = self.g) reads variables of the module that it was "
            "bound to, which are not those of the state: call self.g, or make f a method"
        )

    __getitem__ = __getattr__

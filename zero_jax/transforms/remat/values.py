"""What is known of the values of a trace, what they are called, and which of them a remat policy keeps."""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from zero_jax.attention import RESIDUALS
from zero_jax.dims import ValueSharding, is_contraction, is_float, propagate_shardings
from zero_jax.program import jaxprs
from zero_jax.sharding.mesh import axis_size
from zero_jax.sharding.spec import Dims, carries
from zero_jax.transforms.facts import Facts, find_cores

# Smaller values cost less where they are than a collective or a transfer does.
MIN_PLACED_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Mark:
    """What is known of a value."""

    kind: str  # `param` if it is made of params (and constants) alone, `const` if of constants alone, else `value`
    dims: Dims | None = None  # the axes of the model that its dims are sharded over; None if none is known to be
    stays_alive: bool = False  # whether it is alive until the backward pass whatever a region keeps


VALUE, CONST = Mark("value"), Mark("const")


class MarkedValues(Facts):
    """Facts of the values of an open jaxpr, with a mark for each variable, from those of its inputs."""

    def __init__(self, jaxpr: Any, marks: Sequence[Mark], *, mesh: Mesh, model: tuple[str, ...]):
        super().__init__(jaxpr, [mark.kind for mark in marks])
        self.of_inputs, self.mesh, self.model = marks, mesh, model

    @functools.cached_property
    def marks(self) -> dict[Any, Mark]:
        """For each variable what is known of it."""
        pairs = list(zip(self.jaxpr.invars, self.of_inputs, strict=True))
        found = dict[Any, ValueSharding]()
        if axis_size(self.mesh, self.model) > 1:
            inputs = [ValueSharding(dims=mark.dims or ((),) * len(getattr(x.aval, "shape", ()))) for x, mark in pairs]
            found = propagate_shardings(self.jaxpr, inputs, sizes=dict(self.mesh.shape), counted=()).values
        made = (var for eqn in self.jaxpr.eqns for var in eqn.outvars)
        dims_of = lambda var: on_model(found[var].dims, self.model) if found else None  # noqa: E731
        marks = {var: Mark(self.kind(var), dims_of(var)) for var in made}
        kinds = ((var, self.kind(var)) for var in self.jaxpr.constvars)
        return marks | dict(pairs) | {var: Mark(kind, stays_alive=kind == "value") for var, kind in kinds}

    def mark(self, atom: Any) -> Mark:
        """Returns the mark of a variable or a literal."""
        return CONST if jaxprs.is_literal(atom) else self.marks[atom]


def on_model(dims: Dims, model: tuple[str, ...]) -> Dims | None:
    """Returns the axes of the model among those of an array's dims, or None if it has none."""
    dims = tuple(tuple(axis for axis in axes if axis in model) for axes in dims)
    return dims if carries(dims, model) else None


def is_large(aval: Any) -> bool:
    """Tells whether a value is worth placing: a floating array of some size, not complex (`regions.keep_names`)."""
    is_real = hasattr(aval, "shape") and jnp.issubdtype(aval.dtype, jnp.floating)
    return is_real and aval.size * aval.dtype.itemsize >= MIN_PLACED_BYTES


def products_with_weights(facts: Facts) -> set[Any]:
    """Returns the results of products of activations with params."""
    return {
        var
        for eqn in facts.jaxpr.eqns
        if is_contraction(eqn) and {facts.kind(atom) for atom in eqn.invars} == {"param", "value"}
        for var in eqn.outvars
    }


def attention_cores(facts: Facts) -> tuple[set[Any], set[Any]]:
    """Finds what is within the cores of attention, with all that is only for them, as masks are, and their results."""
    inner, results = find_cores(facts)
    if inner:
        inner |= _made_for(facts, inner)
    return inner - results, results


def _made_for(facts: Facts, inner: set[Any]) -> set[Any]:
    """Returns what is used in a core alone and made of no activation: of keys, integers and constants."""
    jaxpr = facts.jaxpr
    inputs = [*jaxpr.invars, *jaxpr.constvars]
    kinds = ["const" if facts.kind(var) != "value" or not is_float(var.aval) else "value" for var in inputs]
    of_no_activation = Facts(jaxpr.replace(constvars=[], invars=inputs), kinds).origins.keys()
    used_outside = {atom for atom in jaxpr.outvars if not jaxprs.is_literal(atom)}
    made: set[Any] = set()
    for eqn in reversed(jaxpr.eqns):  # all readers of a value come before what makes it
        unused_outside = set(eqn.outvars) - used_outside
        if set(eqn.outvars) <= inner | (of_no_activation & unused_outside):
            made.update(set(eqn.outvars) - inner)
        else:
            used_outside.update(jaxprs.variables(eqn))
    return made


def all_values(facts: Facts) -> set[Any]:
    """Returns everything that equations make of activations, numbers only."""
    numbers = (jnp.number, jnp.bool_)
    return {
        var
        for eqn in facts.jaxpr.eqns
        for var in eqn.outvars
        if facts.kind(var) == "value" and any(jnp.issubdtype(var.aval.dtype, kind) for kind in numbers)
    }


INPUT, PRODUCTS, ATTENTION = "input", "products", "attention"
KINDS = (INPUT, PRODUCTS, ATTENTION)


def labels_of(jaxpr: Any) -> dict[Any, str]:
    """Returns the label of each value that an open jaxpr makes.

    That is its `checkpoint_name`, or `primitive@file:line` of the model, with a number where there are several such.
    The results of one equation have one label.
    """
    made = [*map(_label, jaxpr.eqns)]
    counts, numbers, labels = collections.Counter(made), collections.Counter[str](), dict[Any, str]()
    for eqn, label in zip(jaxpr.eqns, made, strict=True):
        if counts[label] > 1 and "@" in label:
            numbers[label] += 1
            label = f"{label}#{numbers[label]}"
        labels |= dict.fromkeys(eqn.outvars, label)
    return labels


def place_of(eqn: Any) -> str:
    """Returns `file:line` of the model's code that made an equation, '' if that is not known."""
    line, _, _ = jaxprs.model_line(eqn).partition(" ")
    path, _, numbers = line.partition(":")
    return f"{os.path.basename(path)}:{numbers.partition(':')[0]}" if numbers else ""


def selects(selector: str, label: str) -> bool:
    """Tells whether a selector of `Remat.save` or `Remat.offload` is a label, or what several have in common."""
    common = label.partition("#")[0]
    return selector in (label, common, common.partition("@")[2])


def _label(eqn: Any) -> str:
    name = eqn.primitive.name
    if name == "name":
        return eqn.params["name"]
    if name == "zero_attention":
        return RESIDUALS
    return f"{name}@{place_of(eqn)}"

"""Operations on values of which each device has a copy, and params that are worth one: larger values are made of them.

Such are biases of positions by a table or an MLP. XLA sums the gradient of such a value over all devices where examples
use it, and then each device goes on to the same gradients of the params. It is linear from there on: so each device has
a copy of these params, goes on with what it has of the gradient, and those of the params alone are summed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.dims import ELEMENTWISE, FACTORIZATIONS, dim_map, is_float, known_primitives, moves_elements
from zero_jax.program.jaxprs import bind_mapped, inner_jaxprs, is_literal, open_jaxpr, variables
from zero_jax.program.subcalls import equations, subcall
from zero_jax.sharding.mesh import axis_size
from zero_jax.sharding.spec import named
from zero_jax.transforms.facts import Facts
from zero_jax.transforms.gather.deferred import Copies, GatherOptions, Lazy, Value
from zero_jax.transforms.gather.per_device import by_device, example_dims

# A value is worth it from so many times the size of the params that it is made of; and where what is on the way is at
# most as many times as large, and what the backward pass keeps of it at most as large as a share of it: of a hidden
# layer for all positions XLA may compute, and keep, a share on each device.
GROWN_TIMES = 2


@dataclasses.dataclass(frozen=True)
class ByDevice:
    """Operations of each device's examples with its own copies of params, and of what is made of these."""

    options: GatherOptions
    batch_sizes: frozenset[int]
    states: Mapping[int, Sequence[Any]]  # for equations, by `id`, the dims of examples in their operands

    @property
    def num_blocks(self) -> int:
        """The devices along the batch."""
        return axis_size(self.options.mesh, self.options.axes.batch)

    def evaluate(self, eqn: Any, values: Sequence[Lazy | Value], arrays: Sequence[jax.Array]) -> Value | None:
        """Evaluates an equation on copies among other values, of these arrays; returns None where any copy will do."""
        mesh, axes, (out, *_) = self.options.mesh, self.options.axes, eqn.outvars
        places = [i for i, value in enumerate(values) if isinstance(value, Copies)]
        if (dim := self.broadcast_dim(eqn)) is not None:
            return Value(self.broadcast(eqn, arrays, dim), params_only=False)
        if can_be_mapped(eqn) and all(value.params_only for value in values):
            made = bind_mapped(eqn, arrays, [0 if i in places else None for i in range(len(values))])
            if axes.size_beside_batch(mesh) == 1:
                # Pinned, and so are the cotangents: XLA would shard them as the params' gradients are.
                made = jax.lax.with_sharding_constraint(made, named(mesh, (axes.batch, *[()] * out.aval.ndim)))
            return Copies(made, params_only=True)
        if eqn.primitive.name == "dot_general" and len(places) == 1 and (dims := self.example_dims(eqn, places[0])):
            rows, out_dim = {1 - places[0]: dims[0]}, dims[1]
        elif (out_dim := self.dim_of_examples(eqn, places)) is not None:
            of_rows = {i for i, x in enumerate(arrays) if jnp.ndim(x) == out.aval.ndim and i not in places}
            rows = {i: out_dim for i in of_rows if arrays[i].shape[out_dim] == out.aval.shape[out_dim]}
        else:
            return None
        return Value(by_device(eqn, arrays, places, rows, out_dim, mesh=mesh, axes=axes), params_only=False)

    def example_dims(self, eqn: Any, param: int) -> tuple[int, int] | None:
        """Returns the dim of examples in the other factor of a product with a param and in its result, or None."""
        states = self.states.get(id(eqn))
        state = None if states is None else states[1 - param]
        return example_dims(eqn, param, self.num_blocks, batch_sizes=self.batch_sizes, state=state)

    def dim_of_examples(self, eqn: Any, copies: Collection[int]) -> int | None:
        """Returns the dim of examples of an elementwise operation with copies, which have none; else None."""
        dims = {state for state in self.states.get(id(eqn), ()) if isinstance(state, int)}
        if eqn.primitive.name not in ELEMENTWISE or len(eqn.outvars) != 1 or len(dims) != 1:
            return None
        (dim,), of_copies = dims, [eqn.invars[i].aval.shape for i in copies]
        is_even = eqn.outvars[0].aval.shape[dim] % self.num_blocks == 0
        return dim if is_even and all(not shape or shape[dim] == 1 for shape in of_copies) else None

    def broadcast_dim(self, eqn: Any) -> int | None:
        """Returns the dim that a broadcast makes for the examples; None if it makes none."""
        if eqn.primitive.name != "broadcast_in_dim":
            return None
        kept, shape = dim_map(eqn).kept, eqn.outvars[0].aval.shape
        dims = [i for i, size in enumerate(shape) if not kept[i] and size in self.batch_sizes]
        return dims[0] if len(dims) == 1 and shape[dims[0]] % self.num_blocks == 0 else None

    def broadcast(self, eqn: Any, arrays: Sequence[jax.Array], dim: int) -> jax.Array:
        """Evaluates a broadcast along the examples, each device's own copy along its examples."""
        shape = eqn.outvars[0].aval.shape
        own = (*shape[:dim], shape[dim] // self.num_blocks, *shape[dim + 1 :])
        made = bind_mapped(eqn.replace(params={**eqn.params, "shape": own}), arrays, [0], dim)
        spec = tuple(self.options.axes.batch if i == dim else () for i in range(made.ndim))
        return jax.lax.with_sharding_constraint(made, named(self.options.mesh, spec)).reshape(shape)

    def grown_params(self, facts: Facts, values: Sequence[Any], least: Mapping[Any, int]) -> set[int]:
        """Returns the inputs of a jaxpr that are params of which only larger values are made, for examples to use.

        `least` has, for what is used, the size from which on it is larger.
        """
        larger, others, sizes = list[tuple[set[int], int]](), set[int](), _sizes(facts)
        params_of = lambda var: {i for i in facts.origins[var].params if isinstance(values[i], Lazy)}  # noqa: E731
        for var in facts.used:
            params, size = params_of(var), _size(var, sizes)
            if params and is_float(var.aval) and size >= least[var]:
                larger.append((params, size))
            else:
                others |= params
        found = set[int]()
        while larger:  # those of one value are copied together, or not at all
            params, size = larger.pop()
            while linked := [x for x in larger if not params.isdisjoint(x[0])]:
                params, size = params.union(*(x for x, _ in linked)), max(size, *(x for _, x in linked))
                larger = [x for x in larger if x not in linked]
            made = [eqn for eqn in facts.jaxpr.eqns if facts.only_params(eqn)]
            made = [eqn for eqn in made if not params.isdisjoint(params_of(eqn.outvars[0]))]
            is_cheap = all(_size(var, sizes) <= GROWN_TIMES * size for eqn in made for var in eqn.outvars)
            is_cheap &= all(_size(var, sizes) * self.num_blocks <= size for eqn in made for var in _kept(eqn, facts))
            if is_cheap and params.isdisjoint(others):
                ends = _Copied(self).run(facts.jaxpr, [i in params for i in range(len(facts.jaxpr.invars))])
                found |= params if ends is not None and not any(ends) else set()
        return found


def _kept(eqn: Any, facts: Facts) -> list[Any]:
    """Returns what the backward pass may keep of an operation on what is made of params."""
    known = known_primitives().get(eqn.primitive.name)
    if known is not None and known.linear == "product":
        factors = [atom for atom in eqn.invars if facts.kind(atom) == "param"]
        return factors if len(factors) > 1 else []
    is_linear = moves_elements(eqn) or (known is not None and known.linear)
    return [] if is_linear else [*variables(eqn), *eqn.outvars]


def _size(var: Any, sizes: Mapping[Any, int]) -> int:
    return sizes[var] if var in sizes else var.aval.size


def _sizes(facts: Facts) -> dict[Any, int]:
    """Returns the sizes of what is made of params by broadcasts, as before these: their gradients are sums at once."""
    sizes: dict[Any, int] = {}
    for eqn in facts.jaxpr.eqns:
        is_broadcast, atoms = eqn.primitive.name == "broadcast_in_dim", variables(eqn)
        is_like = eqn.primitive.name in ELEMENTWISE and any(atom in sizes for atom in atoms)
        if facts.only_params(eqn) and (is_broadcast or is_like):
            sizes[eqn.outvars[0]] = max((_size(atom, sizes) for atom in atoms), default=1)
    return sizes


class _Copied:
    """Follows values of which each device has a copy, through what examples use them in."""

    def __init__(self, by_device: ByDevice):
        self.by_device = by_device

    def run(self, jaxpr: Any, states: Sequence[bool | None]) -> list[bool] | None:
        """Returns which results of a jaxpr are such copies; None if one is used in another way.

        `states` says which inputs are copies; None for a constant.
        """
        opened, _ = open_jaxpr(jaxpr)
        copied = {var for var, state in zip(opened.invars, states, strict=True) if state}
        constants = {var for var, state in zip(opened.invars, states, strict=True) if state is None}
        for eqn in opened.eqns:
            states = [None if is_literal(x) or x in constants else x in copied for x in eqn.invars]
            if not any(states):
                constants.update(eqn.outvars if set(states) <= {None} and not eqn.effects else ())
                continue
            made = self.made(eqn, states)
            if made is None:
                return None
            copied.update(var for var, is_copy in zip(eqn.outvars, made, strict=True) if is_copy)
        return [not is_literal(x) and x in copied for x in opened.outvars]

    def made(self, eqn: Any, states: Sequence[bool | None]) -> list[bool] | None:
        """Returns which results of an equation that uses copies are such; None if it uses them in another way."""
        sub = subcall(eqn)
        if self.by_device.broadcast_dim(eqn) is not None:
            return [False]
        if False not in states and can_be_mapped(eqn):
            return [True]
        if sub is None:
            # Not what is multiplied with examples, as `a @ b` of low rank: it would be kept for the backward pass, and
            # may be larger than they are, where a value of each of their elements is not.
            places = [i for i, is_copy in enumerate(states) if is_copy]
            return [False] * len(eqn.outvars) if self.by_device.dim_of_examples(eqn, places) is not None else None
        if sub.kind == "call":
            return self.run(sub.jaxpr, states)
        if sub.kind not in ("remat", "scan"):
            return None
        if sub.kind == "scan":  # iterations take copies as they are, not from one another or in slices
            consts, carry, slices = sub.split(states)
            if any([*carry, *slices]):
                return None
            states = [*consts, *[False] * len([*carry, *slices])]
        made = self.run(sub.jaxpr, states)
        return None if made is None or any(made) else made


def can_be_mapped(eqn: Any) -> bool:
    """Tells whether an equation of one result can be evaluated for each device, by `jax.vmap`."""
    if len(eqn.outvars) != 1 or eqn.effects:
        return False
    sub = subcall(eqn)
    if sub is not None:
        return sub.kind == "custom_jvp" and all(map(_is_plain, equations(sub.jaxpr)))
    return _is_plain(eqn) and not inner_jaxprs(eqn)


def _is_plain(eqn: Any) -> bool:
    known = known_primitives().get(eqn.primitive.name)
    if known is None:
        return (sub := subcall(eqn)) is not None and sub.kind == "call"
    is_library = known.kind in ("library", "place") or eqn.primitive.name in FACTORIZATIONS
    return not is_library

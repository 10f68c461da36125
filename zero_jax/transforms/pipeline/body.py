"""The layer of a microbatch: as the model has it, with random numbers of its own for each microbatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from zero_jax.program import jaxprs
from zero_jax.program.evaluation import trace_flat
from zero_jax.program.jaxprs import bind, open_jaxpr
from zero_jax.program.subcalls import equations, kind_of
from zero_jax.program.walk import Rewriting
from zero_jax.sharding.mesh import Axes
from zero_jax.sharding.spec import dims_of, named, without

# What draws random numbers by a key, which is another one for each microbatch where they are of examples.
_BY_KEY = frozenset({"random_bits", "random_split"})
# What draws them otherwise, so that microbatches would have the same.
OTHERWISE = frozenset({"rng_bit_generator", "rng_uniform", "threefry2x32"})
_ENTERED = Rewriting.entered | {"while"}


class CannotCut(Exception):
    """Says why a loop over layers cannot be cut into stages."""


def layer_of_microbatch(layer: Any, compared: tuple[Any, Any], axes: Axes) -> Any:
    """Returns the closed jaxpr of a layer of a microbatch, which takes the microbatch's number first.

    Args:
      layer: the layer as traced on a microbatch.
      compared: the layer as traced on a batch, and on a part of it with the same operations as on a microbatch.
      axes: the roles of the mesh's axes.

    Raises:
      CannotCut: it has operations that cannot be a part of a stage.
    """
    _check(layer)
    of_examples = {id(eqn) for eqn in draws_of_examples(*(open_jaxpr(x)[0].eqns for x in compared))}
    # The layer that runs may be of another trace than the part that was compared: its draws are in the same order.
    draws, own_draws = ([x for x in equations(each) if x.primitive.name in _BY_KEY] for each in (compared[1], layer))
    assert len(draws) == len(own_draws)
    own = {id(eqn) for eqn, like in zip(own_draws, draws, strict=True) if id(like) in of_examples}

    def run(number: jax.Array, *operands: Any) -> list[Any]:
        return _Layer(own, axes, number).run(layer, operands, None)

    avals = [jax.ShapeDtypeStruct((), jnp.int32), *(var.aval for var in open_jaxpr(layer)[0].invars)]
    return trace_flat(run, avals)


def _check(layer: Any) -> None:
    """Refuses operations that cannot be a part of a stage."""
    for eqn in equations(layer):
        name = eqn.primitive.name
        if name == "shard_map":
            raise CannotCut(f"a jax.shard_map within a layer, at {jaxprs.model_line(eqn)}, has devices of its own")
        if name == "pallas_call":
            raise CannotCut(f"XLA does not partition the kernel at {jaxprs.model_line(eqn)} over stages")
        if name == "conv_general_dilated":
            where = jaxprs.model_line(eqn)
            raise CannotCut(f"XLA partitions the convolution at {where} wrongly where stages have kernels of their own")
        if eqn.effects:
            raise CannotCut(
                f"{name} at {jaxprs.model_line(eqn)} has effects, {', '.join(map(str, eqn.effects))}, and a stage "
                "runs on no microbatch of its own while the pipeline fills"
            )


def draws_of_examples(whole: Sequence[Any], part: Sequence[Any]) -> Iterator[Any]:
    """Yields what draws random numbers of examples by a key that all of them have: its results differ in size.

    It is among equations as traced on a part, or within these.
    """
    for a, b in zip(whole, part, strict=True):
        name, shapes = b.primitive.name, [[var.aval.shape for var in eqn.outvars] for eqn in (a, b)]
        if name in _BY_KEY | OTHERWISE and shapes[0] != shapes[1]:
            if a.invars[0].aval.shape != b.invars[0].aval.shape:
                continue  # a key for each example
            if name in OTHERWISE:
                raise CannotCut(f"{name} at {jaxprs.model_line(b)} draws the same numbers for all microbatches")
            yield b
        for pair in zip(jaxprs.inner_jaxprs(a), jaxprs.inner_jaxprs(b), strict=True):
            found = [*draws_of_examples(*(open_jaxpr(x)[0].eqns for x in pair))]
            if found and kind_of(b) not in _ENTERED:
                raise CannotCut(f"random numbers within {name} at {jaxprs.model_line(b)} are not looked into")
            yield from found


class _Layer(Rewriting):
    """Evaluates a layer of a microbatch, where no value is sharded over `pipe`.

    Args:
      own: the `id`s of what draws random numbers of its examples.
      axes: the roles of the mesh's axes.
      number: of the microbatch.
    """

    entered = _ENTERED

    def __init__(self, own: set[int], axes: Axes, number: jax.Array):
        super().__init__()
        self.own, self.axes, self.number = own, axes, number

    def changes(self, eqn: Any) -> bool:
        return id(eqn) in self.own or _is_over(eqn, self.axes.pipe)

    def changed(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        if _is_over(eqn, self.axes.pipe):
            sharding = eqn.params["sharding"]
            dims = without(dims_of(sharding, values[0].ndim), self.axes.pipe)
            return [jax.lax.with_sharding_constraint(values[0], named(sharding.mesh, dims))]
        fold_in = lambda key: jax.random.fold_in(key, self.number)  # noqa: E731
        for _ in range(values[0].ndim):  # an array of keys
            fold_in = jax.vmap(fold_in)
        return bind(eqn, [fold_in(values[0]), *values[1:]])


def _is_over(eqn: Any, axes: Sequence[str]) -> bool:
    """Tells whether an equation constrains a value to be sharded over some axes."""
    sharding = eqn.params.get("sharding") if eqn.primitive.name == "sharding_constraint" else None
    return isinstance(sharding, NamedSharding) and any(
        axis in axes for entry in dims_of(sharding, len(sharding.spec)) for axis in entry
    )

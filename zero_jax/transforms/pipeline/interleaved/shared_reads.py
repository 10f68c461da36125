"""What all stages read before and behind the layers of a microbatch, such as tables and heads, and its gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from zero_jax.dims import is_float
from zero_jax.program import jaxprs
from zero_jax.sharding.chains import SENT, Chain, reshard, scattering
from zero_jax.sharding.mesh import axis_size
from zero_jax.sharding.spec import Dims, dims_of, named, without
from zero_jax.transforms.pipeline.cut import MOVED_WHOLE
from zero_jax.transforms.pipeline.interleaved.microbatch import MicrobatchProgram
from zero_jax.transforms.weight_grads import is_summed_narrow, summed_in, with_weights


class SharedReads:
    """Evaluates equations on what all stages read, whose gradients are reduce-scattered where they are made.

    Args:
      program: the loss on a microbatch.
      shardings: those of the gradients of its operands, `[stages, ...]`; None leaves them open.
    """

    def __init__(self, program: MicrobatchProgram, shardings: Sequence[NamedSharding | None]):
        self.place, self.reduce_dtype = program.loop.place, program.loop.reduce_dtype
        jaxpr, _ = jaxprs.open_jaxpr(program.jaxpr)
        shared = zip(jaxpr.invars[1 : 1 + program.num_shared], shardings, strict=False)
        found = {x: dims_of(each, x.aval.ndim + 1)[1:] for x, each in shared if each is not None}
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in MOVED_WHOLE and not jaxprs.is_literal(eqn.invars[0]) and eqn.invars[0] in found:
                dims = found[eqn.invars[0]]
                found[eqn.outvars[0]] = tuple(dims[i] for i in eqn.params.get("permutation", range(len(dims))))
        # How gradients are sharded of what all stages read, and of that transposed or cast, by variable
        self.shards: dict[Any, Dims] = found

    def bind(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        """Evaluates an equation before or behind the layers; gradients of what all stages read are reduce-scattered.

        They are summed across devices in the reduce dtype. That of a product is made by each stage by itself.
        """
        name, dtype = eqn.primitive.name, self.reduce_dtype
        params = [i for i, x in enumerate(eqn.invars) if not jaxprs.is_literal(x) and x in self.shards]
        if name in MOVED_WHOLE:
            return jaxprs.bind(eqn, values)
        places, how = [i for i in params if is_summed_narrow(eqn, values[i], dtype)], {}
        if name == "gather" and params and self.axes_of(eqn.invars[params[0]]):
            places = []  # examples move to the features of the table: the gradients of devices are not summed
        if name == "dot_general" and len(params) == 1 and is_float(values[params[0]]):
            places, how = params, {"apart": self.place.by_itself}
        weights = {i: values[i] if dtype is None else summed_in(values[i], dtype) for i in places}
        weights = {i: self.scattered(eqn, eqn.invars[i], x) for i, x in weights.items()}
        with jax.named_scope(SENT) if name == "gather" and params else contextlib.nullcontext():
            operands = enumerate(zip(eqn.invars, values, strict=True))
            values = [x if i in weights else self.scattered(eqn, atom, x) for i, (atom, x) in operands]
            if not weights:
                return jaxprs.bind(eqn, values)
        with jaxprs.source_context(eqn):
            return with_weights(eqn, values, weights, **how)

    def axes_of(self, atom: Any) -> tuple[str, ...]:
        """Returns the axes of examples that the gradient of an atom which all stages read is sharded over."""
        dims = () if jaxprs.is_literal(atom) else self.shards.get(atom, ())
        return tuple(axis for axis in self.place.batch if any(axis in dim for dim in dims))

    def scattered(self, eqn: Any, atom: Any, x: Any) -> Any:
        """Returns what an equation reads; if all stages read it, its gradient there is reduce-scattered.

        That of a lookup of many rows has examples moved to where their features are: of rows XLA would all-reduce it.
        It is left to XLA where a shard of the table is larger, as examples are gathered then.
        """
        axes, mesh = self.axes_of(atom), self.place.mesh
        if not axes:
            return x
        dims = self.shards[atom]
        if eqn.primitive.name == "gather" and x.ndim > 1:
            *rows, last = without(dims, axes)
            features = (*last, *axes)
            is_small = eqn.outvars[0].aval.size * axis_size(mesh, axes) <= x.size
            if is_small or x.shape[-1] % axis_size(mesh, features):
                return x
            return reshard(x, forward=Chain(), backward=Chain((named(mesh, (*rows, features)), named(mesh, dims))))
        return reshard(x, forward=Chain(), backward=scattering(mesh, dims, axes, shape=x.shape))

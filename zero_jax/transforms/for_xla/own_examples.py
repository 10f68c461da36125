"""Operations of single examples that XLA computes for all of them on every device: each device computes its own.

XLA gathers the operand of a Fourier transform on GPUs and CPUs, and of a factorization on TPUs, however it is sharded.
A device computes that of its own examples in a `jax.shard_map`. In a loop over the examples, as `jax.lax.map` makes it,
every device computes every example: each step becomes one example of each device, by `jax.vmap` (docs/xla_faults.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from zero_jax.core.device_put import platform_of
from zero_jax.dims import FREE, RANDOM, UNKNOWN, Examples, State, computed_whole, dim_map
from zero_jax.program.evaluation import evaluate
from zero_jax.program.jaxprs import bind, draws_alike, is_literal, open_jaxpr, source_context
from zero_jax.program.loss import Traced, pass_of
from zero_jax.program.subcalls import MANUAL, Subcall, equations, equations_of, subcall
from zero_jax.program.walk import Rewriting
from zero_jax.sharding.mesh import Axes, axis_size


@pass_of(computed_whole(None) | {"scan"})
def own_examples(traced: Traced, *, mesh: Mesh, axes: Axes) -> Traced:
    """Transforms `loss_fn(params, batch, ...)` so that each device computes its own examples, and none of the others.

    The batch is sharded over the axes `axes.batch`. The result computes the same values and has the same derivatives.
    Of loops over examples those change that carry nothing from one to the next but sums. Chunks that all devices can
    share stay as they are: a step on as many would take their memory.
    """
    closed, num_shards = traced.closed, axis_size(mesh, axes.batch)
    names = computed_whole(platform_of(mesh)) & traced.primitives
    has_loops = "scan" in traced.primitives and any(map(_carries_sums, equations(closed, skip=MANUAL)))
    if num_shards == 1 or jax.sharding.get_abstract_mesh().manual_axes:  # each device has its own values already
        return traced.rewritten(closed)
    for change in [*[_OwnLoops] * has_loops, *[_OwnOperations] * bool(names)]:
        # Anew for operations: in a loop, one is of an example of each device then.
        shapes = [x.aval.shape for x in open_jaxpr(closed)[0].invars[traced.num_params :]]
        found = _Owned(mesh, axes, names, {shape[0] for shape in shapes if shape})
        of_data = [FREE if not shape else UNKNOWN if shape[0] % num_shards else 0 for shape in shapes]
        found.run(closed, [FREE] * traced.num_params + of_data)
        closed = change(mesh, axes, found.dims).rewritten(closed)
    return traced.rewritten(closed)


def by_device(
    eqn: Any, values: Sequence[Any], dims: Sequence[int], results: Sequence[int], *, mesh: Mesh, over: Sequence[str]
) -> Sequence[Any]:
    """Evaluates an operation on each device's own examples, which are along a dim of each operand and each result."""
    in_specs, out_specs = (tuple(PartitionSpec(*[None] * dim, over) for dim in x) for x in (dims, results))
    with source_context(eqn):
        own = lambda *xs: tuple(bind(eqn, xs))  # noqa: E731
        return jax.shard_map(own, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*values)


class _Owned(Examples):
    """Finds in `dims`, by `id`, along which dim the examples are in the operand of some primitives, and the results."""

    def __init__(self, mesh: Mesh, axes: Axes, names: frozenset[str], batch_sizes: set[int]):
        super().__init__(mesh, axes)
        self.names, self.batch_sizes, self.dims = names, batch_sizes, dict[int, State]()
        self.of_all = Examples(mesh, axes)  # of bodies of loops, each slice whole on every device

    def operation(self, eqn: Any, operands: list[State]) -> list[State]:
        if eqn.primitive.name not in self.names:
            return super().operation(eqn, operands)
        (dim,) = operands
        is_kept = isinstance(dim, int) and all(dim_map(eqn, i).to((0, dim)) == dim for i in range(len(eqn.outvars)))
        return [self.note(eqn, dim if is_kept or dim == FREE else UNKNOWN)] * len(eqn.outvars)

    def of_jaxprs(self, eqn: Any, sub: Subcall, operands: list[State]) -> Sequence[State]:
        results = super().of_jaxprs(eqn, sub, operands)
        if sub.kind != "scan" or not _carries_sums(eqn):
            return results
        (consts, sums, states), atoms = sub.split(operands), sub.split(eqn.invars)[2]
        can_be_own = 0 in states and {*states} <= {0, FREE, RANDOM} and sub.length % self.num_shards == 0
        chunks = [atom.aval.shape[1:2] for state, atom in zip(states, atoms, strict=True) if state == 0]
        is_shared = sub.length not in self.batch_sizes and all(x and x[0] % self.num_shards == 0 for x in chunks)
        if can_be_own and not is_shared:  # what each step makes of all examples, as of pairs, is sharded as these are
            made = self.of_all.run(sub.jaxpr, [*consts, *[FREE] * len(sums + states)])
            is_shared = any(isinstance(x, int) for x in made)
        stacks = [0] * (len(results) - sub.num_carry)  # each step has an example of its own
        is_own = self.note(eqn, 0 if can_be_own and not is_shared and _maps_alike(sub.jaxpr) else UNKNOWN) == 0
        return [*results[: sub.num_carry], *stacks] if is_own else results

    def note(self, eqn: Any, dim: State) -> State:
        """Notes the dim of the examples each time that an equation is run, and returns it."""
        self.dims[id(eqn)] = self.join(dim, self.dims.get(id(eqn), dim))
        return dim


def _maps_alike(jaxpr: Any) -> bool:
    """Tells whether `jax.vmap` of a loop's body computes what the body does.

    It runs all branches of a `cond` for each example: a `while` in one that the example does not take might not end.
    """
    inner = [*equations(jaxpr)]
    branches = (x for eqn in inner if eqn.primitive.name == "cond" for x in equations_of(eqn))
    return draws_alike(inner) and all(x.primitive.name != "while" for x in branches)


def _carries_sums(eqn: Any) -> bool:
    """Tells whether an equation is a scan, and all that it carries is added to once in each step, and else not read."""
    if eqn.primitive.name != "scan" or (sub := subcall(eqn)) is None:
        return False
    jaxpr, _ = open_jaxpr(sub.jaxpr)
    carries = zip(jaxpr.invars[sub.num_consts :], jaxpr.outvars[: sub.num_carry], strict=False)
    return all(_is_sum(jaxpr, *pair) for pair in carries)


def _is_sum(jaxpr: Any, before: Any, after: Any) -> bool:
    """Tells whether a jaxpr returns a value with something added to it, and does nothing else with either."""
    if is_literal(after) or [x for x in jaxpr.outvars if x is before or x is after] != [after]:
        return False
    read = [(eqn, i) for eqn in jaxpr.eqns for i, x in enumerate(eqn.invars) if x is before or x is after]
    if len(read) != 1 or before is after:
        return False
    ((eqn, i),), sub = read, subcall(read[0][0])
    if sub is not None and sub.kind in ("call", "remat") and after in eqn.outvars:
        inner, _ = open_jaxpr(sub.jaxpr)
        return _is_sum(inner, inner.invars[i], inner.outvars[eqn.outvars.index(after)])
    name, made = eqn.primitive.name, eqn.outvars
    if name == "convert_element_type" and made[0].aval.dtype == before.aval.dtype:  # to a type that is not weak
        return _is_sum(jaxpr, made[0], after)
    return name in ("add", "add_any") and made[0] is after


class _Own(Rewriting):
    """Evaluates equations, some of them on each device's own examples."""

    def __init__(self, mesh: Mesh, axes: Axes, dims: dict[int, State]):
        super().__init__()
        self.mesh, self.axes, self.num_shards = mesh, axes.batch, axis_size(mesh, axes.batch)
        self.dims = {key: dim for key, dim in dims.items() if isinstance(dim, int)}

    def changes(self, eqn: Any) -> bool:
        return id(eqn) in self.dims


class _OwnOperations(_Own):
    """Evaluates Fourier transforms and factorizations of examples within a `jax.shard_map`."""

    def changes(self, eqn: Any) -> bool:
        return super().changes(eqn) and subcall(eqn) is None

    def changed(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        dim = self.dims[id(eqn)]
        return by_device(eqn, values, [dim], [dim] * len(eqn.outvars), mesh=self.mesh, over=self.axes)


class _OwnLoops(_Own):
    """Evaluates loops over examples by steps of one example of each device."""

    def changes(self, eqn: Any) -> bool:
        sub = subcall(eqn) if super().changes(eqn) else None
        return sub is not None and not eqn.effects

    def enters(self, eqn: Any, sub: Subcall, values: list[Any], frame: None) -> bool:
        return not self.changes(eqn) and super().enters(eqn, sub, values, frame)

    def changed(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        sub = subcall(eqn)
        assert sub is not None
        (jaxpr, inner), (consts, sums, slices) = open_jaxpr(sub.jaxpr), sub.split(values)
        mapped = jax.vmap(lambda own, xs: evaluate(jaxpr, inner, [*consts, *own, *xs]))
        num_steps = sub.length // self.num_shards
        # Major are the devices, whose shards are runs of examples.
        by_device = lambda x: x.reshape(self.num_shards, num_steps, *x.shape[1:]).swapaxes(0, 1)  # noqa: E731
        how = {"reverse": sub.reverse, "unroll": min(sub.unroll, num_steps)}

        def step(own: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            made = mapped(own, xs)
            return made[: len(own)], made[len(own) :]

        with source_context(eqn):
            own = [jnp.zeros((self.num_shards, *jnp.shape(x)), jnp.result_type(x)) for x in sums]
            try:
                own, made = lax.scan(step, own, [*map(by_device, slices)], **how)
            except NotImplementedError:  # `jax.vmap` has no rule for an operation, such as a callback
                return bind(eqn, values)
            made = [x.swapaxes(0, 1).reshape(sub.length, *x.shape[2:]) for x in made]
            return [*(x + each.sum(0, dtype=each.dtype) for x, each in zip(sums, own, strict=True)), *made]

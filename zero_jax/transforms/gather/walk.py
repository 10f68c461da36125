"""The walk over a function's jaxpr that gathers each sharded param where it is used.

Values of the trace are either ordinary (`Value`) or still to be made from params (`Lazy`). An equation on params alone
makes another `Lazy`; the first equation that brings a `Lazy` together with anything else is its use.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from zero_jax.core import jaxprs
from zero_jax.core.evaluation import run_scan
from zero_jax.core.subcalls import scan_of, subcall
from zero_jax.sharding.chains import Chain, reshard, reshard_p
from zero_jax.sharding.gather_names import gather_scope, params_scope
from zero_jax.sharding.mesh import axis_size
from zero_jax.sharding.quantized import PLAIN
from zero_jax.sharding.spec import Dims, named
from zero_jax.transforms.facts import Facts
from zero_jax.transforms.gather.cached_bind import CachedBind, equation_key
from zero_jax.transforms.gather.deferred import Copies, Lazy, Roots, Value, as_it_is, pending, put_off, relative
from zero_jax.transforms.gather.dots import flat_product
from zero_jax.transforms.gather.events import Notes
from zero_jax.transforms.gather.lookup import move_rows, move_table, plan_lookup
from zero_jax.transforms.gather.loops import hoisted, scanned
from zero_jax.transforms.gather.ordering import Ordering
from zero_jax.transforms.gather.ordinary import OrdinaryRuns
from zero_jax.transforms.gather.per_device import SAME_PARAM, copy_per_device, example_dims, multiply
from zero_jax.transforms.gather.uses import Options, array_of, gathering, whole
from zero_jax.transforms.gather.weight_grads import (
    holds_convolution,
    is_partitioned_wrongly,
    needs_dtype,
    product,
    refuse_convolution,
)
from zero_jax.transforms.passthrough import has_wrong_gradient, is_contraction, is_local_reduction, passthrough

# Longer recipes are not made again at each use: they are chains of nested calls.
MAX_RECIPE_DEPTH = 50


@dataclasses.dataclass(frozen=True)
class GatherFrame:
    """How uses are kept for the backward pass in the region being walked."""

    regather: bool  # gather again in the backward pass, instead of keeping the gathered param as a residual
    prevent_cse: bool  # off in scan bodies, where forward and backward pass are different loops
    ends_forward: bool = False  # its last use is the first that the backward pass needs: not worth gathering twice


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedRegion:
    """A `jax.checkpoint` that is walked: its jaxpr (so that its id stays its own), and which results are pure."""

    jaxpr: Any
    function: Callable[..., list[Any]]
    pure: list[bool]


class GatherWalk:
    """One walk over one trace of a function."""

    def __init__(self, options: Options, batch_sizes: frozenset[int], notes: Notes, mixed: frozenset[int]):
        self.options, self.batch_sizes, self.notes, self.mixed = options, batch_sizes, notes, mixed
        self.whole, self.array = functools.partial(whole, options), functools.partial(array_of, options)
        self.made: dict[tuple[int, ...], Any] = {}  # results within one build: what a recipe uses twice is made once
        self.building = False
        self.bind = CachedBind()
        self.regions: dict[Any, SharedRegion] = {}  # of those of equal layers JAX traces and differentiates one
        self.uses: dict[Any, Callable[..., list[Any]]] = {}
        self.handlers: dict[str, Callable[..., list[Lazy | Value]]] = {
            "call": self.inline,
            "remat": self.remat,
            "scan": self.scan,
            "cond": self.cond,
        }

    def handler(self, eqn: Any) -> Callable[..., list[Lazy | Value]]:
        """Returns the method that evaluates an equation on params."""
        if eqn.primitive.name == "gather" and not self.options.mapped:
            return self.lookup
        sub = subcall(eqn)
        return self.first_order if sub is None else self.handlers.get(sub.kind, self.first_order)

    def run(self, jaxpr: Any, consts: Sequence[Any], ins: Sequence[Any], frame: GatherFrame) -> list[Lazy | Value]:
        """Evaluates a jaxpr and returns its results."""
        env: dict[Any, Lazy | Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *ins), strict=True))

        def read(atom: Any) -> Lazy | Value:
            return Value(atom.val, pure=True) if jaxprs.is_literal(atom) else env[atom]

        facts = Facts(jaxpr, ["param" if isinstance(v, Lazy) or v.pure else "value" for v in ins])
        deferred = {i for i, v in enumerate(ins) if isinstance(v, Lazy) and v.is_deferred}
        last = facts.last_use(deferred) if frame.ends_forward and deferred else None
        within, own = dataclasses.replace(frame, ends_forward=False), self.options.own_examples
        apart = {id(eqn) for eqn in jaxpr.eqns if own and holds_convolution(eqn)}

        def evaluate(eqn: Any) -> None:
            values = [read(atom) for atom in eqn.invars]
            if any(isinstance(value, Copies) for value in values):
                outs = self.copied(eqn, values, within)
            elif any(isinstance(value, Lazy) for value in values) or (id(eqn) in apart and subcall(eqn)):
                outs = self.handler(eqn)(eqn, values, frame if eqn is last else within)
            else:
                pure = all(value.pure for value in values)  # type: ignore[union-attr]
                arrays = [v.array for v in values]  # type: ignore[union-attr]
                made = [product(eqn, arrays, 1, arrays[1], own)] if id(eqn) in apart else self.bind(eqn, arrays)
                outs = [Value(out, pure) for out in made]
            env.update(zip(eqn.outvars, outs, strict=True))

        ordering, ordinary = Ordering(facts, ins), OrdinaryRuns(facts, apart)
        for index, eqn in enumerate(jaxpr.eqns):
            ordering.enter(index, env, evaluate)
            if index in ordering.evaluated:
                continue
            run = ordinary.at(index, env, ordering)
            if len(run) > 1:
                env.update(ordinary.evaluate(run, env, self.bind))
                ordering.evaluated.update(run)
            else:
                evaluate(eqn)
        return [read(atom) for atom in jaxpr.outvars]

    # --- uses ----------------------------------------------------------------------------------------------------

    def first_order(self, eqn: Any, values: Sequence[Any], frame: GatherFrame) -> list[Lazy | Value]:
        """Any primitive that the walk does not descend into: passes shards through, or is a use."""
        if (widened := put_off(eqn, values)) is not None:
            return [widened]
        inner = jaxprs.inner_jaxprs(eqn)
        if self.options.own_examples:
            refuse_convolution(eqn)
        dims_in = [value.dims if isinstance(value, Lazy) and value.is_deferred else None for value in values]
        shards = lambda dims, i: axis_size(self.options.mesh, dims[i])  # noqa: E731
        pure = all(isinstance(value, Lazy) or value.pure for value in values)
        passes, _ = pending(eqn, values)
        if self.options.mapped and not pure:  # a device's own activations are no part of what all devices gather
            passes &= eqn.primitive.name in ("dynamic_slice", "gather")  # whose index is mostly a counter
        out_dims = passthrough(eqn, dims_in, shards) if passes and not inner else None
        # A product with a constant is an activation of a model whose input is a constant: worth keeping.
        lazy = pure and not (inner or is_local_reduction(eqn) or eqn.effects)
        lazy = lazy and (not is_contraction(eqn) or all(isinstance(value, Lazy) for value in values))
        if out_dims is not None or lazy:
            return self.derive(eqn, values, out_dims)
        if is_local_reduction(eqn):
            return [Value(out, pure) for out in jaxprs.bind(eqn, [self.array(value) for value in values])]
        opaque = bool(inner) and not eqn.primitive.name.startswith(("custom_", "scatter"))
        for value in values:
            if isinstance(value, Lazy):
                reason = f"before {eqn.primitive.name}, which is not looked into" if opaque else eqn.primitive.name
                self.notes.gather(value, eqn, reason, early=opaque)
                self.notes.wide(value, eqn)
        return self.use(eqn, values, frame)

    def use(self, eqn: Any, values: Sequence[Any], frame: GatherFrame) -> list[Lazy | Value]:
        """Gathers the sharded inputs and evaluates the equation; what was gathered is not kept as a residual."""
        gathers = any(value.is_deferred or value.dims is None for value in values if isinstance(value, Lazy))
        pure = all(isinstance(value, Lazy) or value.pure for value in values)
        if not gathers or not frame.regather or frame.ends_forward or eqn.effects:
            region, split = self.gathered(eqn, values)
            return [Value(out, pure) for out in region(*split.arrays)]
        prefix, values = ("", values) if self.notes.records else relative(values)
        region, split = self.gathered(eqn, values)
        key = (*equation_key(eqn), id(eqn) in self.mixed, frame.prevent_cse, Roots(values).key)
        if key not in self.uses:
            self.uses[key] = jax.checkpoint(region, prevent_cse=frame.prevent_cse)
        with params_scope(prefix):
            return [Value(out, pure) for out in self.uses[key](*split.arrays)]

    def gathered(self, eqn: Any, values: Sequence[Any]) -> tuple[Callable[..., list[Any]], Roots]:
        """Returns an equation on gathered params as a function of the arrays that its inputs are made of, and these."""
        inputs, evaluate = flat_product(eqn, values)
        split, dtype = Roots(inputs), self.options.product_dtype
        pin = id(eqn) in self.mixed or has_wrong_gradient(eqn)
        lazy = [(i, value) for i, value in enumerate(inputs) if isinstance(value, Lazy)]
        weights = [i for i, value in lazy if dtype is not None and needs_dtype(eqn, i, value.aval.dtype, dtype)]
        own = self.options.own_examples
        if own and any(i == 1 and is_partitioned_wrongly(eqn, value.dims) for i, value in lazy):
            weights, dtype = [1], dtype or inputs[1].aval.dtype  # type: ignore[union-attr]
        else:
            own = None

        def region(*arrays: Any) -> list[Any]:
            pairs = split.assign(arrays)
            made = [self.whole(v, *roots, pin=pin) if isinstance(v, Lazy) else roots[0] for v, roots in pairs]
            if not weights:
                return evaluate(made, self.bind)
            (place,) = weights
            value, roots = pairs[place]
            weight = self.whole(value, *roots, dtype=dtype, pin=pin)
            return evaluate(made, lambda eqn, inputs: [product(eqn, inputs, place, weight, own)])

        return region, split

    def copied(self, eqn: Any, values: Sequence[Any], frame: GatherFrame) -> list[Lazy | Value]:
        """An equation on a param that each device has its own copy of; `only_multiplied` says which these can be."""
        name, handler = eqn.primitive.name, self.handler(eqn)
        if handler != self.first_order:
            return handler(eqn, values, frame)
        mesh, axes = self.options.mesh, self.options.axes
        arrays = [self.whole(v, *v.roots) if isinstance(v, Lazy) else v.array for v in values]
        places = [i for i, value in enumerate(values) if isinstance(value, Copies)]
        if name in SAME_PARAM and all(isinstance(value, Lazy) or value.pure for value in values):
            in_axes = [0 if i in places else None for i in range(len(values))]
            return [Copies(jax.vmap(lambda *xs: jaxprs.bind(eqn, xs)[0], in_axes=in_axes)(*arrays), pure=True)]
        dims = None
        if name == "dot_general" and len(places) == 1:
            dims = example_dims(eqn, places[0], self.batch_sizes, axis_size(mesh, axes.batch))
        if dims is None:  # any of the copies will do
            first = [Value(v.array[0], pure=True) if isinstance(v, Copies) else v for v in values]
            return self.first_order(eqn, first, frame)
        return [Value(multiply(eqn, arrays, places[0], dims, mesh=mesh, axes=axes), pure=False)]

    def derive(self, eqn: Any, values: Sequence[Any], out_dims: Dims | None) -> list[Lazy | Value]:
        """Makes the results of an equation on params alone lazy: on shards if `out_dims`, else on gathered params."""
        split = Roots(values)
        lazy = [value for value in values if isinstance(value, Lazy)]
        cast = pending(eqn, values)[1] if out_dims is not None else None
        pin = has_wrong_gradient(eqn)

        def make_all(arrays: Sequence[Any]) -> list[Any]:
            make = functools.partial(self.whole, pin=pin) if out_dims is None else lambda v, *roots: v.build(*roots)
            inputs = [make(v, *roots) if isinstance(v, Lazy) else roots[0] for v, roots in split.assign(arrays)]
            return jaxprs.bind(eqn, inputs)

        def build(index: int, *arrays: Any) -> Any:
            key, outermost = (id(split), *map(id, arrays)), not self.building
            self.building = True
            try:
                if key not in self.made:
                    self.made[key] = make_all(arrays)
                return self.made[key][index]
            finally:
                if outermost:
                    self.building = False
                    self.made.clear()

        depth = 1 + max(value.depth for value in lazy)
        path = " and ".join(dict.fromkeys(value.path for value in lazy))
        if out_dims is None:
            reason = "of its sharded dim, gathered first: XLA's gradient on shards may be wrong" if pin else "of params"
            for value in lazy:
                self.notes.gather(value, eqn, f"{eqn.primitive.name} {reason}", early=False)
        all_whole = all(value.dims is not None and not value.is_shard for value in lazy)
        made = [
            Lazy(
                roots=tuple(split.arrays),
                build=functools.partial(build, i),
                aval=var.aval if cast is None else var.aval.update(dtype=lazy[0].aval.dtype),
                path=path,
                dims=((),) * var.aval.ndim if all_whole else out_dims,
                depth=depth,
                cast=cast,
                formats=lazy[0].formats if len({value.formats for value in lazy}) == 1 else PLAIN,
                on_host=any(value.on_host for value in lazy),
            )
            for i, var in enumerate(eqn.outvars)
        ]
        if depth < MAX_RECIPE_DEPTH:
            return [*made]
        if made[0].dims is None:
            return [Value(self.array(value), pure=True) for value in made]
        return [
            dataclasses.replace(v, roots=(v.build(*v.roots),), build=as_it_is, depth=0, on_host=False) for v in made
        ]

    # --- equations with inner jaxprs -------------------------------------------------------------------------------

    def inline(self, eqn: Any, values: Sequence[Any], frame: GatherFrame) -> list[Lazy | Value]:
        """A nested `jit`: walks its body in place."""
        jaxpr, consts = jaxprs.open_jaxpr(*jaxprs.inner_jaxprs(eqn))
        with jaxprs.source_context(eqn):
            return self.run(jaxpr, [Value(c, pure=True) for c in consts], values, frame)

    def remat(self, eqn: Any, values: Sequence[Any], frame: GatherFrame) -> list[Lazy | Value]:
        """The user's own `jax.checkpoint`: gathers inside it, keeps its policy."""
        del frame
        (inner,) = jaxprs.inner_jaxprs(eqn)
        prefix, values = ("", values) if self.notes.records else relative(values)
        split = Roots(values)
        policy, prevent_cse = eqn.params["policy"], split.spread(eqn.params["prevent_cse"])
        key = (id(inner), policy, prevent_cse, split.key)
        if self.notes.records or key not in self.regions:
            self.regions[key] = self.region(inner, split, policy, prevent_cse)
        region = self.regions[key]
        with jaxprs.source_context(eqn), params_scope(prefix):
            outs = region.function(*split.arrays)
        return [Value(out, is_pure) for out, is_pure in zip(outs, region.pure, strict=True)]

    def region(self, inner: Any, split: Roots, policy: Any, prevent_cse: Any) -> SharedRegion:
        """Returns a `jax.checkpoint` of a walk over a jaxpr."""
        jaxpr, consts = jaxprs.open_jaxpr(inner)
        pure: list[bool] = []

        def call(*arrays: Any) -> list[Any]:
            ins, within = split.rebuild(arrays), GatherFrame(regather=False, prevent_cse=False)
            outs = self.run(jaxpr, [Value(c, pure=True) for c in consts], ins, within)
            pure[:] = [isinstance(out, Lazy) or out.pure for out in outs]
            return [self.array(out) for out in outs]

        function = jax.checkpoint(call, prevent_cse=prevent_cse, policy=refuse_gathered(policy))
        return SharedRegion(jaxpr=inner, function=function, pure=pure)

    def cond(self, eqn: Any, values: Sequence[Any], frame: GatherFrame) -> list[Lazy | Value]:
        """Gathers inside the branch that uses a param."""
        index, operands = self.array(values[0]), values[1:]
        split = Roots(operands)

        def branch(inner: Any) -> Callable[..., list[Any]]:
            jaxpr, consts = jaxprs.open_jaxpr(inner)

            def call(*arrays: Any) -> list[Any]:
                outs = self.run(jaxpr, [Value(c, pure=True) for c in consts], split.rebuild(arrays), frame)
                return [self.array(out) for out in outs]

            return call

        pure = all(isinstance(value, Lazy) or value.pure for value in values)
        with jaxprs.source_context(eqn):
            outs = lax.switch(index, [branch(b) for b in eqn.params["branches"]], *split.arrays)
        return [Value(out, pure) for out in outs]

    def scan(self, eqn: Any, values: Sequence[Any], frame: GatherFrame) -> list[Lazy | Value]:
        """Slices of stacked params enter the body as shards; loop-invariant params are gathered once before it."""
        scan = scan_of(eqn)
        jaxpr, inner_consts = jaxprs.open_jaxpr(scan.jaxpr)
        consts, carry, stacks = scan.split(values)
        carry = [self.before(v, eqn, "a carry of scan") for v in carry]
        xs, slices = scanned(self, eqn, stacks, scan.split(jaxpr.invars)[2])
        consts = hoisted(self, eqn, consts, jaxpr, scan.length)
        inner_frame = dataclasses.replace(frame, prevent_cse=False, ends_forward=False)

        def body(carry: list[Any], x: list[Any]) -> list[Any]:
            sliced = [
                dataclasses.replace(s, roots=tuple(arrays)) if isinstance(s, Lazy) else Value(arrays[0], s.pure)
                for s, arrays in zip(slices, x, strict=True)
            ]
            ins = [*consts, *(Value(c, pure=False) for c in carry), *sliced]
            outs = self.run(jaxpr, [Value(c, pure=True) for c in inner_consts], ins, inner_frame)
            return [self.array(out) for out in outs]

        return [Value(out, pure=False) for out in run_scan(eqn, body, [c.array for c in carry], xs)]

    def copies(self, value: Lazy) -> jax.Array:
        """Gathers a shard and gives each device its own copy, whose gradients are summed in the reduce dtype."""
        options, dims, array = self.options, value.shard, value.build(*value.roots)
        with gather_scope(value.path):
            forward = gathering(options, value, array.shape)
            array = reshard(array, forward=forward, backward=Chain((named(options.mesh, dims),)))
            return copy_per_device(array, dims, mesh=options.mesh, axes=options.axes, dtype=options.reduce_dtype)

    def before(self, value: Lazy | Value, eqn: Any, reason: str) -> Value:
        """Gathers a value before an equation that cannot take a shard."""
        if isinstance(value, Value):
            return value
        self.notes.gather(value, eqn, reason, early=True)
        return Value(self.whole(value, *value.roots), pure=True)

    def lookup(self, eqn: Any, values: Sequence[Any], frame: GatherFrame) -> list[Lazy | Value]:
        """Looks rows of examples up in a sharded table."""
        table, indices = values[0], values[1]
        if isinstance(table, Lazy) and table.cast is not None and isinstance(indices, Value) and not indices.pure:
            self.notes.wide(table, eqn)
            (rows,) = self.lookup(eqn, [dataclasses.replace(table, cast=None), *values[1:]], frame)
            return [Value(table.widened(self.array(rows)), pure=False)]
        plan = None
        if isinstance(table, Lazy) and table.is_shard and isinstance(indices, Value):
            mesh, axes = self.options.mesh, self.options.axes
            plan = plan_lookup(eqn, table.shard, mesh=mesh, axes=axes, batch_sizes=self.batch_sizes)
        if plan is None or indices.pure:
            return self.first_order(eqn, values, frame)
        assert isinstance(table, Lazy)
        if plan.feature is None:
            self.notes.gather(table, eqn, "lookup", early=False)
            copies = self.copies(table)
            with gather_scope(table.path):
                return [Value(move_table(eqn, plan, copies, indices.array), pure=False)]
        array, stored_whole = table.build(*table.roots), self.options.stored_whole
        with gather_scope(table.path):
            return [Value(move_rows(eqn, plan, array, indices.array, stored_whole=stored_whole), pure=False)]


def refuse_gathered(policy: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Returns a remat policy which never saves a gathered param and otherwise is the one given."""
    if policy is None:
        return None

    def refusing(primitive: Any, *args: Any, **params: Any) -> Any:
        return False if primitive is reshard_p else policy(primitive, *args, **params)

    return refusing

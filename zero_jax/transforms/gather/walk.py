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

from zero_jax.dims import ELEMENTWISE, REDUCTIONS, Examples, has_wrong_gradient, is_contraction, passthrough
from zero_jax.program import jaxprs
from zero_jax.program.subcalls import Subcall, subcall
from zero_jax.program.walk import Packed, Walk
from zero_jax.sharding.chains import gather_scope, params_scope, scattered_p
from zero_jax.sharding.mesh import axis_size
from zero_jax.sharding.quantized import PLAIN
from zero_jax.sharding.spec import Dims
from zero_jax.transforms.facts import Facts
from zero_jax.transforms.gather.cached_bind import CachedBind, OrdinaryRuns
from zero_jax.transforms.gather.copied import ByDevice
from zero_jax.transforms.gather.deferred import (
    Copies,
    GatherOptions,
    Lazy,
    Value,
    array_of,
    defer_cast,
    gathered_array,
    gathered_copies,
    is_unsharded,
    pending,
    relative,
)
from zero_jax.transforms.gather.events import Notes
from zero_jax.transforms.gather.lookup import move_rows, move_table, plan_lookup
from zero_jax.transforms.gather.loops import copied_where_grown, hoisted, shared_once, sliced, staged, with_moved
from zero_jax.transforms.gather.ordering import Ordering
from zero_jax.transforms.gather.products import holds_convolution, of_blocks, refuse_convolution, shared_rows
from zero_jax.transforms.gather.sent import SentProduct, SentValue, carried_on, sent_product
from zero_jax.transforms.gather.uses import gathered_use, refuse_gathered
from zero_jax.transforms.pipeline.transform import pipeline_p
from zero_jax.transforms.weight_grads import is_summed_narrow, product, with_weights

# Longer recipes are not made again at each use: they are chains of nested calls.
MAX_RECIPE_DEPTH = 50


@dataclasses.dataclass(frozen=True)
class GatherFrame:
    """How uses are kept for the backward pass in the region being walked."""

    regather: bool  # gather again in the backward pass, instead of keeping the gathered param as a residual
    prevent_cse: bool  # off in scan bodies, where forward and backward pass are different loops
    ends_forward: bool = False  # its last use is the first that the backward pass needs: not worth gathering twice
    # Activations that were sent to the shards of params, by what they were
    sent: dict[Any, tuple[Any, SentValue]] = dataclasses.field(default_factory=dict)


class GatherWalk(Walk[GatherFrame]):
    """One walk over one trace of a function."""

    def __init__(self, options: GatherOptions, batch_sizes: frozenset[int], notes: Notes, examples: Examples | None):
        super().__init__()
        self.options, self.batch_sizes, self.notes, self.examples = options, batch_sizes, notes, examples
        self.records = notes.events is not None  # what is noted has the full path of each param
        self.mixed = frozenset() if examples is None else examples.mixed
        self.gathered_array = functools.partial(gathered_array, options)
        self.by_device = ByDevice(options, batch_sizes, {} if examples is None else examples.operands)
        self.built: dict[tuple[int, ...], Any] = {}  # results within one build: what a recipe uses twice is made once
        self.building = False
        self.bind = CachedBind()
        # Each `jax.checkpoint` that is walked; of those of equal layers JAX traces and differentiates one
        self.regions: dict[Any, tuple[Callable[..., list[Any]], list[bool]]] = {}
        self.uses: dict[Any, Callable[..., list[Any]]] = {}

    def run(self, jaxpr: Any, values: Sequence[Any], frame: GatherFrame) -> list[Lazy | Value]:
        """Evaluates a jaxpr and returns its results."""
        opened, consts = jaxprs.open_jaxpr(jaxpr)
        return self.evaluate(opened, [Value(x, params_only=True) for x in consts], values, frame)

    def evaluate(self, jaxpr: Any, consts: Sequence[Any], ins: Sequence[Any], frame: GatherFrame) -> list[Lazy | Value]:
        """Evaluates an open jaxpr and returns its results."""
        facts = Facts(jaxpr, ["param" if value.params_only else "value" for value in ins])
        deferred = {i for i, value in enumerate(ins) if value.is_deferred}
        uses = facts.uses if frame.ends_forward and deferred else {}
        last = max((i for i, params in uses.items() if not params.isdisjoint(deferred)), default=None)
        within = dataclasses.replace(frame, ends_forward=False)
        ins = copied_where_grown(self, facts, shared_once(self, jaxpr, ins, uses))
        env: dict[Any, Lazy | Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *ins), strict=True))

        def read(atom: Any) -> Lazy | Value:
            return Value(atom.val, params_only=True) if type(atom) is jaxprs.Literal else env[atom]

        def evaluate(index: int) -> None:
            eqn = jaxpr.eqns[index]
            outs = self.equation(eqn, [read(atom) for atom in eqn.invars], frame if index == last else within)
            env.update(zip(eqn.outvars, outs, strict=True))

        ordering = Ordering(facts, ins)
        ordinary = OrdinaryRuns(facts, ordering, self.has_wrong_convolution)
        for index in range(len(jaxpr.eqns)):
            ordering.enter(index, env, evaluate)
            if index in ordering.evaluated:  # before its turn: a slice or a cast of params that were tied, or in a run
                continue
            run = ordinary.at(index, env)
            if len(run) > 1:
                env.update(ordinary.evaluate(run, env, self.bind))
                ordering.evaluated.update(run)
            else:
                evaluate(index)
        return [read(atom) for atom in jaxpr.outvars]

    def has_wrong_convolution(self, eqn: Any) -> bool:
        """Tells whether an equation is or runs a convolution that XLA partitions wrongly on this mesh."""
        return self.options.conv_batch is not None and holds_convolution(eqn)

    def enters(self, eqn: Any, sub: Subcall, values: list[Any], frame: GatherFrame) -> bool:
        """Tells whether an equation of params, or of such a convolution, is looked into."""
        is_special = any(isinstance(value, Lazy | Copies | SentValue) for value in values)
        return sub.kind != "while" and (is_special or self.has_wrong_convolution(eqn))

    def equation(self, eqn: Any, values: list[Any], frame: GatherFrame) -> Sequence[Any]:
        """Evaluates an equation: what was sent to shards comes home, but for products, calls and elementwise work."""
        if any(isinstance(value, SentValue) for value in values):
            if (carried := carried_on(eqn, values)) is not None:
                result, there = carried
                return [dataclasses.replace(result, array=self.bind(there, [value.array for value in values])[0])]
            sub = subcall(eqn)
            is_product = is_contraction(eqn) and any(isinstance(value, Lazy) for value in values)
            if not is_product and (sub is None or sub.kind != "call"):
                values = [value.at_home() for value in values]
        # A weight of rows that each device has sorted by itself: gradients go to its copies, not through `shard_map`.
        inner = of_blocks(eqn) if [isinstance(x, Lazy) for x in values] == [False, True, False] else None
        return super().equation(eqn if inner is None else inner, values, frame)

    def operation(self, eqn: Any, values: list[Any], frame: GatherFrame) -> list[Lazy | Value]:
        """Evaluates an equation that is not looked into."""
        if eqn.primitive is pipeline_p:
            return [*staged(self, eqn, values, frame)]
        is_wrong = self.has_wrong_convolution(eqn)
        if any(isinstance(value, Copies) for value in values):
            return self.copied(eqn, values, frame)
        if any(isinstance(value, Lazy) for value in values) or (is_wrong and subcall(eqn)):
            # A function that is mapped over devices has indices of one device's examples: no rows can move.
            is_lookup = eqn.primitive.name == "gather" and not self.options.mapped
            return (self.lookup if is_lookup else self.on_params)(eqn, values, frame)
        arrays = [value.array for value in values]
        made = [product(eqn, arrays, 1, arrays[1], own=self.options.conv_batch)] if is_wrong else self.bind(eqn, arrays)
        return _values(made, values)

    def on_params(self, eqn: Any, values: Sequence[Any], frame: GatherFrame) -> list[Lazy | Value]:
        """Any primitive that the walk does not descend into: passes shards through, or is a use."""
        if (widened := defer_cast(eqn, values)) is not None:
            return [widened]
        if eqn.primitive is scattered_p:
            return [self.scattered(value, **eqn.params) for value in values]
        inner = jaxprs.inner_jaxprs(eqn)
        if self.options.conv_batch:
            refuse_convolution(eqn)
        dims_in = [value.dims if value.is_deferred else None for value in values]
        num_shards = lambda dims, i: axis_size(self.options.mesh, dims[i])  # noqa: E731
        params_only = all(value.params_only for value in values)
        runs_on_shards, _ = pending(eqn, values)
        if self.options.mapped and not params_only:  # a device's own activations are no part of what all devices gather
            runs_on_shards &= eqn.primitive.name in ("dynamic_slice", "gather")  # whose index is mostly a counter
        out_dims = passthrough(eqn, dims_in, num_shards) if runs_on_shards and not inner else None
        # A product with a constant is an activation of a model whose input is a constant: worth keeping.
        is_reduction = eqn.primitive.name in REDUCTIONS  # so much smaller than its input: it is reduced on the shard
        is_lazy = params_only and not (inner or is_reduction or eqn.effects)
        is_lazy = is_lazy and (not is_contraction(eqn) or all(isinstance(value, Lazy) for value in values))
        if out_dims is not None or is_lazy:
            made = self.derive(eqn, values, out_dims)
            return made if out_dims is not None else [with_moved(self, eqn, values, x) for x in made]
        if is_reduction:
            return _values(jaxprs.bind(eqn, [self.array(value, eqn, frame) for value in values]), values)
        # What is left is a use. Derivatives of the user's and the sums of scatters have jaxprs, and use params as
        # others do: what else has one may use them anywhere in it.
        is_opaque = bool(inner) and not eqn.primitive.name.startswith(("custom_", "scatter"))
        has_batch_dim = eqn.primitive.name == "dot_general" and bool(eqn.params["dimension_numbers"][1][0])
        sent = sent_product(self.options, self.examples, eqn, values) if has_batch_dim else None
        for value in values if self.records else ():
            if isinstance(value, Lazy):
                reason = f"before {eqn.primitive.name}, which is not looked into" if is_opaque else eqn.primitive.name
                self.notes.gather(value, eqn, reason, early=is_opaque, sent=sent)
                self.notes.wide(value, eqn)
        values = [value.at_home() for value in values] if sent is None else sent.operands(values, frame.sent)
        return self.use(eqn, values, frame, sent)

    def scattered(self, value: Lazy, *, dim: int) -> Lazy:
        """Returns a param whose gradient arrives in shards of a dim; as it is if its shards would be uneven there."""
        # Beside axes of the model along that dim; XLA would gather a gradient to move it from uneven shards.
        axes = () if value.dims is None else dict.fromkeys((*value.dims[dim], *self.options.axes.data))
        is_even = value.aval.shape[dim] % axis_size(self.options.mesh, tuple(axes)) == 0
        return dataclasses.replace(value, scattered_dim=dim) if is_even else value

    def use(
        self, eqn: Any, values: Sequence[Any], frame: GatherFrame, sent: SentProduct | None = None
    ) -> list[Lazy | Value]:
        """Gathers the sharded inputs and evaluates the equation; what was gathered is not kept as a residual."""
        gathers = any(value.is_deferred or value.dims is None for value in values if isinstance(value, Lazy))
        rows, is_of_params = None, is_contraction(eqn) and all(value.params_only for value in values)
        if is_of_params and not self.options.mapped:
            rows = shared_rows(eqn, values, mesh=self.options.mesh, axes=self.options.axes)
        # What is made of params and constants is on all devices, as what is mixed is.
        is_unsharded = id(eqn) in self.mixed or (is_of_params and rows is None)
        how = {"is_mixed": is_unsharded, "sent": sent, "bind": self.bind, "shared": rows}
        if not gathers or not frame.regather or frame.ends_forward or eqn.effects:
            return _values(gathered_use(self.options, eqn, values, **how)(*Packed(values).arrays), values, sent)
        # Without what their paths begin with, the uses of equal layers have one key, and JAX traces one of them.
        prefix, values = ("", values) if self.records else relative(values)
        packed = Packed(values)
        key = (*jaxprs.equation_key(eqn), is_unsharded, rows, frame.prevent_cse, packed.key, sent is None)
        if key not in self.uses:
            # A barrier makes arrays: an activation function's result would be kept beside what it is computed from, and
            # the cotangent that a bias sums be read once more. What is as small as a bias may be kept gathered. Beside
            # tokens over `model`, XLA reduce-scatters an added param's gradient whole, if it finds no barrier.
            params, small = [v for v in values if isinstance(v, Lazy)], max(eqn.outvars[0].aval.shape, default=1)
            has_barrier: Any = True
            if eqn.primitive.name in ELEMENTWISE:
                is_alone = self.options.axes.size_beside_batch(self.options.mesh) == 1
                is_sum = is_alone and eqn.primitive.name in ("add", "sub")
                own = lambda v: [] if is_sum else [v.aval]  # noqa: E731
                gathered = [x for v in params for x in (own(v) if v.is_shard else v.roots)]
                has_barrier = any(x.size > small for x in gathered)
            elif self.options.outermost and is_contraction(eqn):
                has_barrier = packed.spread([isinstance(value, Lazy) for value in values])
            region = gathered_use(self.options, eqn, values, **how)
            checkpointed = jax.checkpoint(region, prevent_cse=frame.prevent_cse and has_barrier)
            self.uses[key] = jaxprs.inline_jit(checkpointed)  # whose derivative JAX keeps, too
        # The names are in the region, and of what is inlined JAX has the line where it is called.
        with jaxprs.source_context(eqn, names=False), params_scope(prefix):
            return _values(self.uses[key](*packed.arrays), values, sent)

    def copied(self, eqn: Any, values: Sequence[Any], frame: GatherFrame) -> list[Lazy | Value]:
        """An equation on what each device has its own copy of."""
        arrays = [value.array if isinstance(value, Copies) else self.gathered_array(value) for value in values]
        made = self.by_device.evaluate(eqn, values, arrays)
        return self.on_params(eqn, [value.at_home() for value in values], frame) if made is None else [made]

    def derive(self, eqn: Any, values: Sequence[Any], out_dims: Dims | None) -> list[Lazy | Value]:
        """Makes the results of an equation on params alone lazy: on shards if `out_dims`, else on gathered params."""
        packed = Packed(values)
        roots, packed = tuple(packed.arrays), packed.without_arrays()
        lazy = [value for value in values if isinstance(value, Lazy)]
        cast = pending(eqn, values)[1] if out_dims is not None else None
        pin = has_wrong_gradient(eqn)

        def make_all(arrays: Sequence[Any]) -> list[Any]:
            inputs = packed.values_of(arrays)
            if out_dims is None:
                arrays, dtype = [self.gathered_array(value, pin=pin) for value in inputs], self.options.product_dtype
                has_sums = eqn.primitive.name in ("broadcast_in_dim", "gather") and isinstance(inputs[0], Lazy)
                if has_sums and is_summed_narrow(eqn, inputs[0].aval, dtype):
                    return with_weights(eqn, arrays, {0: self.gathered_array(inputs[0], dtype=dtype)})
                return jaxprs.bind(eqn, arrays)
            return jaxprs.bind(eqn, [value.built if isinstance(value, Lazy) else value.array for value in inputs])

        def build(index: int, *arrays: Any) -> Any:
            # Recipes build one another. Ids stay their own until the outermost of them returns, and no longer.
            key, is_outermost = (id(packed), *map(id, arrays)), not self.building
            self.building = True
            try:
                if key not in self.built:
                    self.built[key] = make_all(arrays)
                return self.built[key][index]
            finally:
                if is_outermost:
                    self.building = False
                    self.built.clear()

        depth = 1 + max(value.depth for value in lazy)
        path = " and ".join(dict.fromkeys(value.path for value in lazy))
        if out_dims is None:
            reason = "of its sharded dim, gathered first: XLA's gradient on shards may be wrong" if pin else "of params"
            for value in lazy:
                self.notes.gather(value, eqn, f"{eqn.primitive.name} {reason}", early=False)
        are_unsharded = all(value.dims is not None and not value.is_shard for value in lazy)
        made = [
            Lazy(
                roots=roots,
                build=functools.partial(build, i),
                aval=var.aval if cast is None else var.aval.update(dtype=lazy[0].aval.dtype),  # the cast is pending
                path=path,
                dims=((),) * var.aval.ndim if are_unsharded else out_dims,
                depth=depth,
                cast=cast,
                formats=lazy[0].formats if len({value.formats for value in lazy}) == 1 else PLAIN,
                on_host=any(value.on_host for value in lazy),
                is_gathered=all(value.is_gathered for value in lazy),
            )
            for i, var in enumerate(eqn.outvars)
        ]
        if depth < MAX_RECIPE_DEPTH:
            return [*made]
        # A recipe that is too long is built once: a shard stays one, what is made of gathered params is kept.
        if made[0].dims is None:
            return [Value(array_of(self.options, value), params_only=True) for value in made]
        return [value.as_root() for value in made]

    def materialize(self, value: Lazy | Value, eqn: Any, frame: GatherFrame) -> Any:
        """Returns what a loop carries, gathered before it."""
        return self.before(value, eqn, f"a carry of {eqn.primitive.name}").array

    def array(self, value: Lazy | Value, eqn: Any, frame: GatherFrame) -> Any:
        """Returns the array of what a region returns, or a `cond` chooses by: a shard where it is one."""
        return array_of(self.options, value)

    def stack(self, value: Lazy | Value, aval: Any, eqn: Any, frame: GatherFrame) -> Lazy | Value:
        """Returns what a scan takes slices of: these enter its body as shards."""
        return sliced(self, value, aval, eqn)

    def loop_constants(self, eqn: Any, sub: Subcall, consts: list[Any], frame: GatherFrame) -> list[Lazy | Value]:
        """Returns what each iteration of a scan takes, params among them gathered before it or not yet."""
        return hoisted(self, eqn, consts, sub)

    def carried(self, eqn: Any, carry: list[Any]) -> list[Any]:
        """Returns what a scan carries as values."""
        return [Value(x, params_only=False) for x in carry]

    def results(self, eqn: Any, values: list[Any], arrays: Sequence[Any]) -> list[Lazy | Value]:
        """Returns the results of a scan or a `cond` as values."""
        return _values(arrays, values) if eqn.primitive.name == "cond" else self.carried(eqn, [*arrays])

    def inner_frame(self, eqn: Any, sub: Subcall, frame: GatherFrame) -> GatherFrame:
        """Returns how uses are kept in a loop or a branch."""
        changes = {"prevent_cse": False, "ends_forward": False} if sub.kind == "scan" else {}
        return dataclasses.replace(frame, **changes, sent={})

    def remat(self, eqn: Any, sub: Subcall, values: list[Any], frame: GatherFrame) -> list[Lazy | Value]:
        """The user's own `jax.checkpoint`: gathers inside it, keeps its policy. Equal ones share one trace."""
        prefix, values = ("", values) if self.records else relative(values)
        packed = Packed(values)
        policy, prevent_cse = eqn.params["policy"], packed.spread(eqn.params["prevent_cse"])
        key = (id(sub.jaxpr), policy, prevent_cse, packed.key)  # the region holds the jaxpr: its id stays its own
        if self.records or key not in self.regions:
            self.regions[key] = self.shared(sub.jaxpr, packed, prevent_cse=prevent_cse, policy=refuse_gathered(policy))
        region, params_only = self.regions[key]
        with jaxprs.source_context(eqn), params_scope(prefix):
            outs = region(*packed.arrays)
        return [Value(out, only) for out, only in zip(outs, params_only, strict=True)]

    def shared(self, jaxpr: Any, packed: Packed, **options: Any) -> tuple[Callable[..., list[Any]], list[bool]]:
        """Returns a `jax.checkpoint` of a walk over a jaxpr; and of its results, once traced, which are params only."""
        params_only: list[bool] = []
        packed = packed.without_arrays()

        def call(*arrays: Any) -> list[Any]:
            outs = self.run(jaxpr, packed.values_of(arrays), GatherFrame(regather=False, prevent_cse=False))
            params_only[:] = [out.params_only for out in outs]
            return [array_of(self.options, out) for out in outs]

        # Not in a nested `jit`, of which JAX would keep the derivative: all it inlines gets the line of its call.
        return jax.checkpoint(call, **options), params_only

    def before(self, value: Lazy | Value, eqn: Any, reason: str) -> Value:
        """Gathers a value before an equation that cannot take a shard."""
        if isinstance(value, Value):
            return value.at_home()
        self.notes.gather(value, eqn, reason, early=True)
        return Value(self.gathered_array(value), params_only=True)

    def lookup(self, eqn: Any, values: Sequence[Any], frame: GatherFrame) -> list[Lazy | Value]:
        """Looks rows of examples up in a sharded table."""
        table, indices = values[0], values[1]
        if not isinstance(table, Lazy) or not isinstance(indices, Value) or indices.params_only:
            return self.on_params(eqn, values, frame)
        if table.cast is not None:  # of the rows that were looked up, which move in the narrow dtype
            self.notes.wide(table, eqn)
            (rows,) = self.lookup(eqn, [dataclasses.replace(table, cast=None), *values[1:]], frame)
            return [Value(table.widened(self.array(rows, eqn, frame)), params_only=False)]
        mesh, axes = self.options.mesh, self.options.axes
        is_shard, sizes = table.is_shard, self.batch_sizes
        plan = plan_lookup(eqn, table.shard, mesh=mesh, axes=axes, batch_sizes=sizes) if is_shard else None
        if plan is None:
            return self.on_params(eqn, values, frame)
        is_wide = is_summed_narrow(eqn, table.aval, self.options.product_dtype)
        if plan.feature is None:
            self.notes.gather(table, eqn, "lookup", early=False)
            copies = gathered_copies(self.options, table)
            with gather_scope(table.path):
                return [Value(move_table(eqn, plan, copies, indices.array, is_wide=is_wide), params_only=False)]
        array, stored = table.built, is_unsharded(self.options, table)
        with gather_scope(table.path):
            rows = move_rows(eqn, plan, array, indices.array, stored_unsharded=stored, is_wide=is_wide)
        return [Value(rows, params_only=False)]


def _values(
    arrays: Sequence[Any], operands: Sequence[Lazy | Value], sent: SentProduct | None = None
) -> list[Lazy | Value]:
    if sent is not None:
        return [dataclasses.replace(sent.result, array=sent.result.pinned(array)) for array in arrays]
    params_only = all(value.params_only for value in operands)
    return [Value(array, params_only) for array in arrays]

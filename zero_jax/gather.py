"""Gather-on-use: ZeRO-3 (and the gradients of ZeRO-1 and 2) for a loss function that knows nothing of it.

The function is traced to a jaxpr, and the jaxpr is walked with the sharded params marked. Casts, transposes and slices
stay on the shard; at its first real use a param is gathered, inside the scan body or checkpointed region that uses it.
The transpose of the gather moves the cotangent to the shard, which is what makes XLA emit a reduce-scatter.
docs/gather_on_use.md tells why each rule is as it is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding

from zero_jax import jaxprs
from zero_jax.jaxprs import Chain
from zero_jax.mesh import Axes, axes_of, axis_size
from zero_jax.passthrough import is_float, is_local_reduction, narrows, passthrough
from zero_jax.spec import Dims, carries, dims_of, gather_steps, move_steps, named, scatter_steps, without
from zero_jax.tree import PyTree, leaf_names

# A param used in every iteration of a loop is gathered once before it while all such params of the loop fit in this.
MAX_HOISTED_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatherEvent:
    """One gather of a param: where, why there, and how many bytes it makes whole."""

    path: str
    where: str
    reason: str
    early: bool
    gathered_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatherReport:
    """What gather-on-use did with a function; prints as a table with the early gathers first."""

    events: tuple[GatherEvent, ...]

    @property
    def early(self) -> tuple[GatherEvent, ...]:
        """The gathers made before the param's use, because the walk could not see through what uses it."""
        return tuple(event for event in self.events if event.early)

    def __str__(self) -> str:
        rows = [f"{len(self.events)} gathers, {len(self.early)} of them early"]
        for event in sorted(self.events, key=lambda event: not event.early):
            mark = "EARLY" if event.early else "     "
            rows.append(f"{mark} {event.gathered_bytes / 2**20:9.2f} MiB  {event.path}: {event.reason} at {event.where}")
        return "\n".join(rows)


@dataclasses.dataclass(frozen=True, eq=False)
class _Lazy:
    """A param, or what was made of params alone: rebuilt from `roots` at each use rather than kept.

    `dims` is its sharding while it is still a shard, None once the recipe gathers.
    """

    roots: tuple[Any, ...]
    build: Callable[..., Any]
    aval: Any
    path: str
    dims: Dims | None


@dataclasses.dataclass(frozen=True)
class _Value:
    """An ordinary value; `pure` if it was made of params and constants alone."""

    array: Any
    pure: bool


@dataclasses.dataclass(frozen=True)
class _Frame:
    """How uses are kept for the backward pass in the region being walked."""

    regather: bool  # gather again in the backward pass, instead of keeping the gathered param as a residual
    prevent_cse: bool  # off in scan bodies, where forward and backward pass are different loops
    ends_forward: bool = False  # its last use is the first that the backward pass needs: not worth gathering twice


def gather_on_use(
    fn: Callable[..., Any],
    specs: PyTree,
    *,
    mesh: Mesh,
    keep_gathered: bool = False,
    reduce_dtype: Any = None,
    data_axes: Sequence[str] | None = None,
    replica_axes: Sequence[str] | None = None,
    max_hoisted_bytes: int = MAX_HOISTED_BYTES,
) -> Callable[..., Any]:
    """Transforms `fn(params, ...)` so that sharded params are gathered where they are used and released after.

    The result computes the same values and has the same derivatives. Gradients come out sharded like the params.

    Args:
      fn: any traceable function of a params pytree and further arguments; its own `jax.checkpoint`s are respected.
      specs: a `PartitionSpec` or `NamedSharding` for each leaf of the params (or a prefix of that tree).
      mesh: the mesh of the specs.
      keep_gathered: keep gathered params from the forward to the backward pass outside of `jax.checkpoint` regions:
        a third less traffic for the memory of the whole params.
      reduce_dtype: dtype in which gradients are summed across devices; None sums in their own.
      data_axes: the mesh axes to gather over, if they are not called `data` or `data_*`.
      replica_axes: the mesh axes of the batch besides `data_axes`, if not called `replica`.
      max_hoisted_bytes: params that a loop uses whole in every iteration are gathered once before the loop if all of
        them together take at most this many bytes, else in every iteration.

    Returns:
      A function with the signature of `fn`.

    Raises:
      ValueError: the specs do not fit the params.
    """
    axes = axes_of(mesh, data=data_axes, replica=replica_axes)
    options = _Options(
        mesh=mesh,
        axes=axes,
        stored_whole=False,
        regather=not keep_gathered,
        reduce_dtype=reduce_dtype,
        max_hoisted_bytes=max_hoisted_bytes,
    )
    return _transform(fn, specs, options, None)


def scatter_grads(fn: Callable[..., Any], specs: PyTree, *, mesh: Mesh, axes: Axes, reduce_dtype: Any = None) -> Callable:
    """Transforms `fn(params, ...)` of whole params so that their gradients are reduce-scattered to `specs`."""
    options = _Options(
        mesh=mesh, axes=axes, stored_whole=True, regather=False, reduce_dtype=reduce_dtype, max_hoisted_bytes=0
    )
    return _transform(fn, specs, options, None)


def gather_report(fn: Callable[..., Any], specs: PyTree, *args: Any, mesh: Mesh, **options: Any) -> GatherReport:
    """Reports where `gather_on_use(fn, specs, mesh=mesh, **options)` gathers, for arguments of these shapes.

    Args:
      fn: the function, as for `gather_on_use`.
      specs: the specs, as for `gather_on_use`.
      *args: arrays or `ShapeDtypeStruct`s: the params and the further arguments of `fn`.
      mesh: the mesh of the specs.
      **options: further options of `gather_on_use`.
    """
    events: list[GatherEvent] = []
    transformed = gather_on_use(fn, specs, mesh=mesh, **options)
    jax.eval_shape(functools.partial(transformed.__wrapped_with_events__, events), *args)  # type: ignore[attr-defined]
    return GatherReport(events=tuple(events))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options:
    mesh: Mesh
    axes: Axes
    stored_whole: bool
    regather: bool
    reduce_dtype: Any
    max_hoisted_bytes: int


def _transform(fn: Callable[..., Any], specs: PyTree, options: _Options, _: None) -> Callable[..., Any]:
    def run(events: list[GatherEvent], params: PyTree, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        traced = [i for i, leaf in enumerate(leaves) if _is_array_like(leaf)]

        def flat(params: PyTree, values: list[Any]) -> Any:
            full = list(leaves)
            for i, value in zip(traced, values, strict=True):
                full[i] = value
            args, kwargs = tree.unflatten(full)
            return fn(params, *args, **kwargs)

        values = [leaves[i] for i in traced]
        closed, out_shape = jax.make_jaxpr(flat, return_shape=True)(params, values)
        walk = _Walk(options, _batch_sizes(values), events)
        marked = _mark(params, specs, options)
        jaxpr, consts = jaxprs.open_jaxpr(closed)
        ins = [*marked, *(_Value(value, pure=False) for value in values)]
        frame = _Frame(regather=options.regather, prevent_cse=True, ends_forward=True)
        outs = walk.run(jaxpr, [_Value(c, pure=True) for c in consts], ins, frame)
        arrays = [out.build(*out.roots) if isinstance(out, _Lazy) else out.array for out in outs]
        return jax.tree.unflatten(jax.tree.structure(out_shape), arrays)

    @functools.wraps(fn)
    def transformed(params: PyTree, *args: Any, **kwargs: Any) -> Any:
        return run([], params, *args, **kwargs)

    transformed.__wrapped_with_events__ = run  # type: ignore[attr-defined]
    return transformed


def _is_array_like(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") or isinstance(leaf, (bool, int, float, complex))


def _batch_sizes(values: Sequence[Any]) -> frozenset[int]:
    return frozenset(value.shape[0] for value in values if getattr(value, "ndim", 0) >= 1)


def _mark(params: PyTree, specs: PyTree, options: _Options) -> list[_Lazy | _Value]:
    """Marks the params that are (or whose gradients are) sharded over `data`."""
    is_spec = lambda x: x is None or isinstance(x, (jax.sharding.PartitionSpec, NamedSharding))  # noqa: E731
    leaves, names = jax.tree.leaves(params), leaf_names(params)
    try:
        full = jax.tree.broadcast(specs, params, is_leaf=is_spec)
    except ValueError as error:
        raise ValueError(f"the specs are not a prefix of the params: {error}") from error
    marked: list[_Lazy | _Value] = []
    for name, leaf, spec in zip(names, leaves, jax.tree.leaves(full, is_leaf=is_spec), strict=True):
        aval = jax.typeof(leaf)
        try:
            dims = dims_of(spec, aval.ndim)
        except ValueError as error:
            raise ValueError(f"param {name!r} of shape {aval.shape}: {error}; give it a spec of its own") from error
        if carries(dims, options.axes.data) and is_float(aval):
            marked.append(_Lazy((leaf,), lambda x: x, aval, name, dims))
        else:
            marked.append(_Value(leaf, pure=True))
    return marked


class _Walk:
    """One walk over one trace of a function."""

    def __init__(self, options: _Options, batch_sizes: frozenset[int], events: list[GatherEvent]):
        self.options = options
        self.batch_sizes = batch_sizes
        self.events = events
        self.handlers: dict[str, Callable[..., list[_Lazy | _Value]]] = {
            "jit": self.inline,
            "pjit": self.inline,
            "closed_call": self.inline,
            "remat2": self.remat,
            "checkpoint": self.remat,
            "scan": self.scan,
            "cond": self.cond,
            "gather": self.lookup,
        }

    def run(self, jaxpr: Any, consts: Sequence[Any], ins: Sequence[Any], frame: _Frame) -> list[_Lazy | _Value]:
        env: dict[Any, _Lazy | _Value] = {}
        constvars = tuple(getattr(jaxpr, "constvars", ()))
        env.update(zip((*constvars, *jaxpr.invars), (*consts[: len(constvars)], *ins), strict=True))

        def read(atom: Any) -> _Lazy | _Value:
            return _Value(atom.val, pure=True) if jaxprs.is_literal(atom) else env[atom]

        last = _last_use(jaxpr, [isinstance(value, _Lazy) for value in ins]) if frame.ends_forward else None
        within = dataclasses.replace(frame, ends_forward=False)
        for eqn in jaxpr.eqns:
            values = [read(atom) for atom in eqn.invars]
            if any(isinstance(value, _Lazy) for value in values):
                handler = self.handlers.get(eqn.primitive.name, self.first_order)
                outs = handler(eqn, values, frame if eqn is last else within)
            else:
                pure = all(value.pure for value in values)  # type: ignore[union-attr]
                outs = [_Value(out, pure) for out in jaxprs.bind(eqn, [v.array for v in values])]  # type: ignore[union-attr]
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    # --- uses ----------------------------------------------------------------------------------------------------

    def whole(self, value: _Lazy, *roots: Any) -> Any:
        """Rebuilds a value from its roots and gathers it if it is a shard."""
        array = value.build(*roots)
        if value.dims is None:
            return array
        data = self.options.axes.data
        forward = [] if self.options.stored_whole else gather_steps(value.dims, data)
        backward = scatter_steps(value.dims, data)
        shardings = functools.partial(named, self.options.mesh)
        return jaxprs.reshard(
            array,
            forward=Chain(tuple(map(shardings, forward)), barrier=bool(forward)),
            backward=Chain(tuple(map(shardings, backward)), dtype=self.options.reduce_dtype),
        )

    def note(self, value: _Lazy, eqn: Any, reason: str, *, early: bool) -> None:
        if value.dims is not None and not self.options.stored_whole:
            num_bytes = value.aval.size * value.aval.dtype.itemsize
            where = jaxprs.source_line(eqn)
            self.events.append(
                GatherEvent(path=value.path, where=where, reason=reason, early=early, gathered_bytes=num_bytes)
            )

    def first_order(self, eqn: Any, values: Sequence[Any], frame: _Frame) -> list[_Lazy | _Value]:
        """Any primitive that the walk does not descend into: passes shards through, or is a use."""
        inner = jaxprs.inner_jaxprs(eqn)
        dims_in = [value.dims if isinstance(value, _Lazy) else None for value in values]
        shards = lambda dims, i: axis_size(self.options.mesh, dims[i])  # noqa: E731
        out_dims = None if inner else passthrough(eqn, dims_in, shards)
        pure = all(isinstance(value, _Lazy) or value.pure for value in values)
        if out_dims is not None or (pure and not inner and not is_local_reduction(eqn)):
            return self.derive(eqn, values, out_dims)
        if is_local_reduction(eqn):
            arrays = [value.build(*value.roots) if isinstance(value, _Lazy) else value.array for value in values]
            return [_Value(out, pure) for out in jaxprs.bind(eqn, arrays)]
        opaque = bool(inner) and not eqn.primitive.name.startswith("custom_")
        for value in values:
            if isinstance(value, _Lazy):
                reason = f"before {eqn.primitive.name}, which is not looked into" if opaque else eqn.primitive.name
                self.note(value, eqn, reason, early=opaque)
        return self.use(eqn, values, frame)

    def use(self, eqn: Any, values: Sequence[Any], frame: _Frame) -> list[_Lazy | _Value]:
        """Gathers the sharded inputs and evaluates the equation; what was gathered is not kept as a residual."""
        split = _Roots(values)

        def region(*arrays: Any) -> list[Any]:
            inputs = [self.whole(v, *roots) if isinstance(v, _Lazy) else roots[0] for v, roots in split.assign(arrays)]
            return jaxprs.bind(eqn, inputs)

        if frame.regather and not frame.ends_forward:
            region = jax.checkpoint(region, prevent_cse=frame.prevent_cse)
        pure = all(isinstance(value, _Lazy) or value.pure for value in values)
        return [_Value(out, pure) for out in region(*split.arrays)]

    def derive(self, eqn: Any, values: Sequence[Any], out_dims: Dims | None) -> list[_Lazy | _Value]:
        """Makes the results of an equation on params alone lazy: on the shards if `out_dims`, else on gathered params."""
        split = _Roots(values)

        def build(index: int, *arrays: Any) -> Any:
            make = (lambda v, *roots: v.build(*roots)) if out_dims is not None else self.whole
            inputs = [make(v, *roots) if isinstance(v, _Lazy) else roots[0] for v, roots in split.assign(arrays)]
            return jaxprs.bind(eqn, inputs)[index]

        path = " and ".join(dict.fromkeys(value.path for value in values if isinstance(value, _Lazy)))
        if out_dims is None:
            for value in values:
                if isinstance(value, _Lazy):
                    self.note(value, eqn, f"{eqn.primitive.name} of params", early=False)
        return [
            _Lazy(tuple(split.arrays), functools.partial(build, i), var.aval, path, out_dims)
            for i, var in enumerate(eqn.outvars)
        ]

    # --- equations with inner jaxprs -------------------------------------------------------------------------------

    def inline(self, eqn: Any, values: Sequence[Any], frame: _Frame) -> list[_Lazy | _Value]:
        if jaxprs.has_explicit_shardings(eqn):
            return self.first_order(eqn, values, frame)
        (inner,) = jaxprs.inner_jaxprs(eqn)
        jaxpr, consts = jaxprs.open_jaxpr(inner)
        with jaxprs.source_context(eqn):
            return self.run(jaxpr, [_Value(c, pure=True) for c in consts], values, frame)

    def remat(self, eqn: Any, values: Sequence[Any], frame: _Frame) -> list[_Lazy | _Value]:
        """The user's own `jax.checkpoint`: gathers inside it, keeps its policy."""
        del frame
        (inner,) = jaxprs.inner_jaxprs(eqn)
        jaxpr, consts = jaxprs.open_jaxpr(inner)
        split = _Roots(values)
        pure: list[bool] = []

        def region(*arrays: Any) -> list[Any]:
            ins = split.rebuild(arrays)
            consts_in = [_Value(c, pure=True) for c in consts]
            outs = self.run(jaxpr, consts_in, ins, _Frame(regather=False, prevent_cse=False))
            pure[:] = [isinstance(out, _Lazy) or out.pure for out in outs]
            return [_as_array(out) for out in outs]

        policy = jaxprs.refuse_gathered(eqn.params["policy"])
        with jaxprs.source_context(eqn):
            outs = jax.checkpoint(region, prevent_cse=eqn.params["prevent_cse"], policy=policy)(*split.arrays)
        return [_Value(out, is_pure) for out, is_pure in zip(outs, pure, strict=True)]

    def cond(self, eqn: Any, values: Sequence[Any], frame: _Frame) -> list[_Lazy | _Value]:
        """Gathers inside the branch that uses a param."""
        index, operands = _as_array(values[0]), values[1:]
        split = _Roots(operands)

        def branch(inner: Any) -> Callable[..., list[Any]]:
            jaxpr, consts = jaxprs.open_jaxpr(inner)

            def call(*arrays: Any) -> list[Any]:
                outs = self.run(jaxpr, [_Value(c, pure=True) for c in consts], split.rebuild(arrays), frame)
                return [_as_array(out) for out in outs]

            return call

        pure = all(isinstance(value, _Lazy) or value.pure for value in values)
        with jaxprs.source_context(eqn):
            outs = lax.switch(index, [branch(b) for b in eqn.params["branches"]], *split.arrays)
        return [_Value(out, pure) for out in outs]

    def scan(self, eqn: Any, values: Sequence[Any], frame: _Frame) -> list[_Lazy | _Value]:
        """Slices of stacked params enter the body as shards; loop-invariant params are gathered once before it."""
        parts = jaxprs.scan_parts(eqn)
        jaxpr, inner_consts = jaxprs.open_jaxpr(parts.jaxpr)
        num_consts, num_state = parts.num_consts, parts.num_consts + parts.num_carry
        carry = [self.before(v, eqn, "a carry of scan") for v in values[num_consts:num_state]]
        xs, slices = self.scanned(eqn, values[num_state:], jaxpr.invars[num_state:])
        consts = self.hoist(eqn, values[:num_consts], jaxpr, parts.length)
        inner_frame = dataclasses.replace(frame, prevent_cse=False, ends_forward=False)

        def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            sliced = [
                dataclasses.replace(s, roots=(array,)) if isinstance(s, _Lazy) else _Value(array, s.pure)
                for s, array in zip(slices, x, strict=True)
            ]
            ins = [*consts, *(_Value(c, pure=False) for c in carry), *sliced]
            outs = self.run(jaxpr, [_Value(c, pure=True) for c in inner_consts], ins, inner_frame)
            arrays = [_as_array(out) for out in outs]
            return arrays[: parts.num_carry], arrays[parts.num_carry :]

        with jaxprs.source_context(eqn):
            carry, ys = lax.scan(
                body, [c.array for c in carry], xs, length=parts.length, reverse=parts.reverse, unroll=parts.unroll
            )
        return [_Value(out, pure=False) for out in (*carry, *ys)]

    def scanned(self, eqn: Any, values: Sequence[Any], variables: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the arrays to scan over and, for each, what its slices are in the body."""
        arrays: list[Any] = []
        slices: list[_Lazy | _Value] = []
        for value, var in zip(values, variables, strict=True):
            if isinstance(value, _Lazy) and value.dims is not None and not value.dims[0]:
                arrays.append(value.build(*value.roots))
                slices.append(_Lazy((), lambda x: x, var.aval, value.path, value.dims[1:]))
            else:
                whole = self.before(value, eqn, "scan over its sharded dim")
                arrays.append(whole.array)
                slices.append(whole)
        return arrays, slices

    def hoist(self, eqn: Any, values: Sequence[Any], jaxpr: Any, length: int) -> list[_Lazy | _Value]:
        """Decides which loop-invariant params are gathered once before the loop rather than in every iteration."""
        invariant = [
            isinstance(value, _Lazy) and value.dims is not None and _used_whole(jaxpr, var)
            for value, var in zip(values, jaxpr.invars, strict=False)
        ]
        num_bytes = sum(v.aval.size * v.aval.dtype.itemsize for v, used in zip(values, invariant, strict=True) if used)
        hoisted = length > 1 and (num_bytes <= self.options.max_hoisted_bytes or self.options.stored_whole)
        consts: list[_Lazy | _Value] = []
        for value, used in zip(values, invariant, strict=True):
            if used and hoisted:
                self.note(value, eqn, f"once before {length} iterations that use it", early=False)
                consts.append(_Value(self.whole(value, *value.roots), pure=True))
            else:
                consts.append(value)
        return consts

    def before(self, value: _Lazy | _Value, eqn: Any, reason: str) -> _Value:
        """Gathers a value before an equation that cannot take a shard."""
        if isinstance(value, _Value):
            return value
        self.note(value, eqn, reason, early=True)
        return _Value(self.whole(value, *value.roots), pure=True)

    # --- lookups ---------------------------------------------------------------------------------------------------

    def lookup(self, eqn: Any, values: Sequence[Any], frame: _Frame) -> list[_Lazy | _Value]:
        """Looks rows up in a sharded table: moves the rows between devices where they are smaller than the table.

        Each device looks all tokens up in its share of the features, and an all-to-all turns features into examples.
        """
        table, indices = values[0], values[1]
        plan = None
        if isinstance(table, _Lazy) and table.dims is not None and isinstance(indices, _Value):
            plan = self.plan_lookup(eqn, table)
        if plan is None or passthrough(eqn, [table.dims if isinstance(table, _Lazy) else None, None], lambda *_: 1):
            return self.first_order(eqn, values, frame)
        mesh, options = self.options.mesh, self.options
        columns, rows = ([named(mesh, dims) for dims in steps] for steps in (plan.columns, plan.rows))
        array = jaxprs.reshard(
            table.build(*table.roots),
            forward=Chain(() if options.stored_whole else tuple(columns[1:])),
            backward=Chain(tuple(reversed(columns))),
        )
        everywhere = lax.with_sharding_constraint(indices.array, named(mesh, plan.indices))
        (out,) = jaxprs.bind(eqn, [array, everywhere])
        out = jaxprs.reshard(
            out, forward=Chain(tuple(rows[-1:] if options.stored_whole else rows)), backward=Chain(tuple(reversed(rows)))
        )
        return [_Value(out, pure=False)]

    def plan_lookup(self, eqn: Any, table: _Lazy) -> _LookupPlan | None:
        """Returns how rows and table are sharded for a lookup that moves rows, or None if the table should move."""
        mesh, data, batch = self.options.mesh, self.options.axes.data, self.options.axes.batch
        numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
        out, indices = eqn.outvars[0].aval, eqn.invars[1].aval
        if numbers.operand_batching_dims or carries(without(table.dims, data), mesh.axis_names):
            return None
        shape, num_shards = table.aval.shape, axis_size(mesh, data)
        kept = [i for i in range(len(shape)) if i not in numbers.collapsed_slice_dims]
        features = [i for i in kept if sizes[i] == shape[i] and shape[i] % num_shards == 0]
        row_dims = [i for i in range(out.ndim) if i not in numbers.offset_dims]
        batched = [i for i, dim in enumerate(row_dims) if out.shape[dim] in self.batch_sizes]
        batched = [i for i in batched if out.shape[row_dims[i]] % axis_size(mesh, batch) == 0]
        if not features or not batched:
            return None
        num_moved = 2 * out.size // axis_size(mesh, batch) + 2 * indices.size  # features one way, indices the other
        if num_moved >= 2 * table.aval.size:
            return None
        feature, row = max(features, key=lambda i: shape[i]), batched[0]
        out_feature, out_row = numbers.offset_dims[kept.index(feature)], row_dims[row]
        columns = [table.dims, *move_steps(table.dims, feature, data)]
        # The table has no other axes (above), so its features now carry all of `data`, in some order.
        start: list[tuple[str, ...]] = [()] * out.ndim
        start[out_feature] = columns[-1][feature]
        start[out_row] = self.options.axes.replica
        rows = [tuple(start), *_to_rows(tuple(start), out_row, data)]
        index_dims = tuple(self.options.axes.replica if i == row else () for i in range(indices.ndim))
        return _LookupPlan(columns=tuple(columns), rows=tuple(rows), indices=index_dims)


def _to_rows(start: Dims, row: int, data: Sequence[str]) -> list[Dims]:
    """Returns the specs from features over `data` to examples over `data`, one axis at a time where the order allows."""
    by_axis = move_steps(start, row, tuple(reversed(data)))
    goal = tuple((*dim, *data) if i == row else () for i, dim in enumerate(start))
    return by_axis if by_axis[-1] == goal else [goal]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LookupPlan:
    columns: tuple[Dims, ...]  # of the table: from its own sharding to features over `data`
    rows: tuple[Dims, ...]  # of the result, from features over `data` to examples over `data`
    indices: Dims


class _Roots:
    """Flattens mixed inputs to arrays and back, so that they can cross into a region as its arguments."""

    def __init__(self, values: Sequence[_Lazy | _Value]):
        self.values = list(values)
        self.arrays: list[Any] = []
        self.places: list[list[int]] = []
        seen: dict[int, int] = {}
        for value in self.values:
            roots = value.roots if isinstance(value, _Lazy) else (value.array,)
            self.places.append([])
            for root in roots:
                if id(root) not in seen:
                    seen[id(root)] = len(self.arrays)
                    self.arrays.append(root)
                self.places[-1].append(seen[id(root)])

    def assign(self, arrays: Sequence[Any]) -> list[tuple[Any, list[Any]]]:
        """Pairs each value with the arrays that stand for its roots."""
        return [(value, [arrays[i] for i in places]) for value, places in zip(self.values, self.places, strict=True)]

    def rebuild(self, arrays: Sequence[Any]) -> list[_Lazy | _Value]:
        """Returns the values with other arrays for roots."""
        return [
            dataclasses.replace(value, roots=tuple(roots)) if isinstance(value, _Lazy) else _Value(roots[0], value.pure)
            for value, roots in self.assign(arrays)
        ]


def _as_array(value: _Lazy | _Value) -> Any:
    return value.build(*value.roots) if isinstance(value, _Lazy) else value.array


def _last_use(jaxpr: Any, marked: Sequence[bool]) -> Any:
    """Returns the last equation that brings a marked input together with something else than params."""
    of_params = {var for var, mark in zip(jaxpr.invars, marked, strict=True) if mark}
    others = {var for var, mark in zip(jaxpr.invars, marked, strict=True) if not mark}
    last = None
    for eqn in jaxpr.eqns:
        variables = [atom for atom in eqn.invars if not jaxprs.is_literal(atom)]
        if not any(var in of_params for var in variables):
            others.update(eqn.outvars if any(var in others for var in variables) else ())
        elif any(var in others for var in variables):
            last = eqn
            others.update(eqn.outvars)
        else:
            of_params.update(eqn.outvars)
    return last


def _used_whole(jaxpr: Any, var: Any) -> bool:
    """Tells whether a loop body uses a variable as a whole, rather than slices of it that differ by iteration."""
    same = {var}
    for eqn in jaxpr.eqns:
        places = [i for i, atom in enumerate(eqn.invars) if not jaxprs.is_literal(atom) and atom in same]
        if not places or narrows(eqn):
            continue
        name, inner = eqn.primitive.name, jaxprs.inner_jaxprs(eqn)
        if name == "scan":
            parts = jaxprs.scan_parts(eqn)
            body, _ = jaxprs.open_jaxpr(parts.jaxpr)
            if any(i < parts.num_consts + parts.num_carry and _used_whole(body, body.invars[i]) for i in places):
                return True
        elif name in ("jit", "pjit", "remat2", "checkpoint") and len(inner) == 1:
            body, _ = jaxprs.open_jaxpr(inner[0])
            if any(_used_whole(body, body.invars[i]) for i in places):
                return True
        elif name in ("convert_element_type", "transpose", "reshape", "squeeze"):
            same.update(eqn.outvars)
        else:
            return True
    return False

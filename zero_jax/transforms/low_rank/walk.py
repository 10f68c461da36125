"""The walk over a function's jaxpr that makes each frozen weight, with its low-rank update, where it is used.

Slices of a stack, transposes and casts are put off. A use is evaluated on the factors if it is linear in the weight
and `products` has a rule, else on the merged weight. Outside of `jax.checkpoint` it is a small region of its own, so
that no weight that was dequantized, cast or merged is kept for the backward pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zero_jax.core.text_tables import Report
from zero_jax.program import jaxprs
from zero_jax.program.loss import trace_call
from zero_jax.program.subcalls import Subcall
from zero_jax.program.walk import Packed, Walk
from zero_jax.transforms.low_rank.weight import STACK, Evaluate, Weight, product_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightUse:
    """A use of a frozen weight, in an operation on its factors, or (`is_merged`) with its update merged into it."""

    path: str
    where: str
    operation: str
    is_merged: bool


@dataclasses.dataclass(frozen=True)
class AdaptedReport(Report):
    """The uses of the frozen weights of a function; prints as a table, those of merged weights first."""

    uses: tuple[WeightUse, ...]

    @property
    def merged(self) -> tuple[WeightUse, ...]:
        """The uses of weights with the update merged into them: gradients of the whole weight are computed there."""
        return tuple(use for use in self.uses if use.is_merged)

    def __str__(self) -> str:
        rows = [f"{len(self.uses)} uses of adapted weights, {len(self.merged)} of them merged"]
        for use in sorted(self.uses, key=lambda use: not use.is_merged):
            mark = "MERGED " if use.is_merged else "factors"
            rows.append(f"{mark} {use.path}: {use.operation} at {use.where}")
        if self.merged:
            rows.append(
                "where a weight is merged, gradients of the whole weight are computed, and summed across devices"
            )
        return "\n".join(rows)


@dataclasses.dataclass(frozen=True)
class _Frame:
    """The region being walked: within the model's own `jax.checkpoint`, or in a loop."""

    in_region: bool = False
    prevent_cse: bool = True


def evaluate_adapted(
    fn: Callable[..., Any], leaves: Sequence[Any], tree: Any, args: tuple[Any, ...], uses: list[WeightUse]
) -> Any:
    """Evaluates `fn(params, *args)` with frozen weights made at their uses.

    The leaves of the params are arrays, and `Weight`s, whose uses are added to `uses`.
    """
    avals = (x if isinstance(x, Weight) else jax.typeof(x) for x in leaves)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
    traced, values = trace_call(fn, tree.unflatten(shapes), args, {})
    outs = _LowRankWalk(uses).run(traced.closed, [*leaves, *values], _Frame())
    arrays = [jnp.asarray(out.merged() if isinstance(out, Weight) else out) for out in outs]
    return jax.tree.unflatten(jax.tree.structure(traced.out_shape), arrays)


class _LowRankWalk(Walk[_Frame]):
    """One walk over one trace of a function."""

    def __init__(self, uses: list[WeightUse]):
        super().__init__()
        self.uses = uses

    def enters(self, eqn: Any, sub: Subcall, values: list[Any], frame: _Frame) -> bool:
        return sub.kind != "while" and any(isinstance(value, Weight) for value in values)

    def inner_frame(self, eqn: Any, sub: Subcall, frame: _Frame) -> _Frame:
        if sub.kind == "remat":
            return dataclasses.replace(frame, in_region=True)
        return dataclasses.replace(frame, prevent_cse=False) if sub.kind == "scan" else frame

    def operation(self, eqn: Any, values: list[Any], frame: _Frame) -> Sequence[Any]:
        """Puts an operation off, or evaluates it on the factors of a weight, or on the merged weight."""
        if (deferred := _put_off(eqn, values)) is not None:
            return [deferred]
        places = [i for i, value in enumerate(values) if isinstance(value, Weight)]
        if not places:
            return jaxprs.bind(eqn, values)
        weights = [values[i] for i in places]
        product = product_of(eqn, weights[0], places[0]) if len(places) == 1 else None
        for weight in weights:
            self.note(eqn, weight, is_merged=product is None)
        merged = lambda inputs: [x.merged() if isinstance(x, Weight) else x for x in inputs]  # noqa: E731
        evaluate = product or _rows(eqn, values) or (lambda inputs: jaxprs.bind(eqn, merged(inputs)))
        # The weights come first: XLA's barriers have the order of a region's arguments.
        order = [*places, *(i for i in range(len(values)) if i not in places)]
        packed = Packed(values[i] for i in order)

        def region(*arrays: Any) -> list[Any]:
            by_place = dict(zip(order, packed.values_of(arrays), strict=True))
            return evaluate([by_place[i] for i in range(len(values))])

        makes_arrays = any(_makes_arrays(weight, is_merged=product is None) for weight in weights)
        if makes_arrays and not frame.in_region and not eqn.effects:
            region = jax.checkpoint(region, prevent_cse=frame.prevent_cse)
        return region(*packed.arrays)

    def materialize(self, value: Any, eqn: Any, frame: _Frame) -> Any:
        if not isinstance(value, Weight):
            return value
        self.note(eqn, value, is_merged=True)
        if not value.factors and value.is_plain:
            return value.base()
        make = lambda arrays: value.with_arrays(arrays).merged()  # noqa: E731
        return make(value.arrays) if frame.in_region else jax.checkpoint(make, prevent_cse=False)(value.arrays)

    def stack(self, value: Any, aval: Any, eqn: Any, frame: _Frame) -> Any:
        if isinstance(value, Weight):
            _check_stack(value, eqn)
        return value.element(value.arrays) if _is_stack(value) else self.materialize(value, eqn, frame)

    def note(self, eqn: Any, weight: Weight, *, is_merged: bool) -> None:
        if weight.factors:
            where = jaxprs.line_within(eqn)
            use = WeightUse(path=weight.path, where=where, operation=eqn.primitive.name, is_merged=is_merged)
            self.uses.append(use)


def _makes_arrays(weight: Weight, *, is_merged: bool) -> bool:
    """Tells whether arrays of its size are made of a weight at its use: they are not kept for the backward pass."""
    is_built = not (weight.is_plain or len(weight.shape) < 2)
    return is_built or weight.is_dora or (is_merged and bool(weight.factors))


def _is_stack(value: Any) -> bool:
    return isinstance(value, Weight) and value.labels[:1] == STACK and not value.moves


def _check_stack(weight: Weight, eqn: Any) -> None:
    """Refuses a loop over a dim of an adapted weight that was taken for one of its inputs or outputs."""
    if weight.factors and weight.labels[:1] != STACK:
        dims = STACK + weight.labels[1:]
        hint = f", as {dims!r} in rules={{{weight.path!r}: {dims!r}}}" if len(set(dims)) == 3 else ""
        raise ValueError(
            f"leaf {weight.path!r} of shape {list(weight.shape)} was adapted as {weight.labels!r}, but "
            f"{jaxprs.source_line(eqn) or 'a loop'} loops over its first dim: it is a stack, whose dims begin with "
            f"{STACK!r}{hint or '; a stack of vectors cannot be adapted: leave it out of the rules'}"
        )


def _put_off(eqn: Any, values: Sequence[Any]) -> Weight | None:
    """Returns the weight that a cast, move or slice of a weight is; None where the weight is used."""
    weight, name = values[0] if values else None, eqn.primitive.name
    if not isinstance(weight, Weight) or any(isinstance(value, Weight) for value in values[1:]):
        return None
    out = eqn.outvars[0].aval
    if name == "convert_element_type" and jnp.issubdtype(out.dtype, jnp.floating):
        return weight.cast(out.dtype)
    if name == "transpose":
        return weight.transposed(eqn.params["permutation"])
    if name == "squeeze" or (name == "reshape" and eqn.params["dimensions"] is None):
        if _is_stack(weight) and (1, *out.shape) == weight.shape:
            return weight.element([x.reshape(x.shape[1:]) for x in weight.arrays])
        return weight.reshaped(out.shape)
    if not _is_stack(weight):
        return None
    if name == "gather":
        return _element(eqn, weight, values[1])
    return _part(eqn, weight, values) if name in ("slice", "dynamic_slice") else None


def _part(eqn: Any, weight: Weight, values: Sequence[Any]) -> Weight | None:
    """A part of the stack, static or at an index."""
    shape = eqn.outvars[0].aval.shape
    if shape[1:] != weight.shape[1:]:
        return None
    if eqn.primitive.name == "dynamic_slice":
        arrays = [lax.dynamic_slice_in_dim(x, values[1], shape[0]) for x in weight.arrays]
    else:
        start, limit, steps = (eqn.params[name] for name in ("start_indices", "limit_indices", "strides"))
        arrays = [lax.slice_in_dim(x, start[0], limit[0], steps[0] if steps else 1) for x in weight.arrays]
    return dataclasses.replace(weight.with_arrays(arrays), shape=shape)


def _element(eqn: Any, weight: Weight, index: Any) -> Weight | None:
    """One element of the stack at an index, `w[i]`."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    is_of_stack = tuple(numbers.collapsed_slice_dims) == tuple(numbers.start_index_map) == (0,)
    is_single = jnp.ndim(index) == 1 and not getattr(numbers, "operand_batching_dims", ())
    if (
        not (is_of_stack and is_single)
        or tuple(sizes) != (1, *weight.shape[1:])
        or eqn.params["fill_value"] is not None
    ):
        return None

    def take(x: Any) -> Any:
        """Takes the element of an array that the weight is made of, which may have other dims behind the stack."""
        of_array = numbers._replace(offset_dims=tuple(range(x.ndim - 1)))
        params = {**eqn.params, "dimension_numbers": of_array, "slice_sizes": (1, *x.shape[1:])}
        return jaxprs.bind(eqn.replace(params=params), [x, index])[0]

    return weight.element([*map(take, weight.arrays)])


def _rows(eqn: Any, values: Sequence[Any]) -> Evaluate | None:
    """Returns how rows are taken from a table that is only cast: rows first, then the cast; None if that is not it."""
    table = values[0]
    is_cast = isinstance(table, Weight) and not table.factors and not table.moves and len(table.roots) == 1
    if eqn.primitive.name != "gather" or not is_cast or table.roots[0].shape != table.shape:
        return None
    dtype = eqn.outvars[0].aval.dtype
    return lambda inputs: [jaxprs.bind(eqn, [*inputs[0].roots, *inputs[1:]])[0].astype(dtype)]

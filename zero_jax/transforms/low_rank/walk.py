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

from zero_jax.core import jaxprs
from zero_jax.core.evaluation import evaluate, run_scan
from zero_jax.core.loss_program import trace_call
from zero_jax.core.subcalls import scan_of, subcall
from zero_jax.transforms.low_rank.products import product_of
from zero_jax.transforms.low_rank.weight import STACK, Weight

_MAX_MERGED = "gradients of the whole weight are computed, and summed across devices"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightUse:
    """A use of a frozen weight, in an operation on its factors, or (`is_merged`) with its update merged into it."""

    path: str
    where: str
    operation: str
    is_merged: bool


@dataclasses.dataclass(frozen=True)
class AdaptedReport:
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
            rows.append(f"where a weight is merged, {_MAX_MERGED}")
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

    Args:
      fn: a traceable function.
      leaves: the leaves of the params: arrays, and `Weight`s.
      tree: the structure of the params.
      args: the further arguments.
      uses: gets the uses of adapted weights.
    """
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, Weight) else jax.typeof(x) for x in leaves]
    shapes = [x if isinstance(x, jax.ShapeDtypeStruct) else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes]
    traced, values = trace_call(fn, tree.unflatten(shapes), args, {})
    jaxpr, consts = jaxprs.open_jaxpr(traced.closed)
    outs = _Walk(uses).run(jaxpr, consts, [*leaves, *values], _Frame())
    arrays = [jnp.asarray(out.merged() if isinstance(out, Weight) else out) for out in outs]
    return jax.tree.unflatten(jax.tree.structure(traced.out_shape), arrays)


class _Walk:
    """One walk over one trace of a function."""

    def __init__(self, uses: list[WeightUse]):
        self.uses = uses
        self.handlers = {"call": self.inline, "remat": self.remat, "scan": self.scan, "cond": self.cond}

    def run(self, jaxpr: Any, consts: Sequence[Any], ins: Sequence[Any], frame: _Frame) -> list[Any]:
        """Evaluates a jaxpr and returns its results: arrays, and weights still to be made."""

        def equation(eqn: Any, values: list[Any]) -> Sequence[Any]:
            if not any(isinstance(value, Weight) for value in values):
                return jaxprs.bind(eqn, values)
            sub = subcall(eqn)
            handler = self.operation if sub is None else self.handlers.get(sub.kind, self.operation)
            return handler(eqn, values, frame)

        return evaluate(jaxpr, consts, ins, equation)

    # --- operations --------------------------------------------------------------------------------------------------

    def operation(self, eqn: Any, values: Sequence[Any], frame: _Frame) -> list[Any]:
        """Puts an operation off, or uses the weights in it."""
        put_off = _put_off(eqn, values)
        return [put_off] if put_off is not None else self.use(eqn, values, frame)

    def use(self, eqn: Any, values: Sequence[Any], frame: _Frame) -> list[Any]:
        """Evaluates an equation on the factors of a weight, or on the merged weight."""
        places = [i for i, value in enumerate(values) if isinstance(value, Weight)]
        product = product_of(eqn, values[places[0]], places[0]) if len(places) == 1 else None
        rows = None if product else _rows(eqn, values)
        for i in places:
            self.note(eqn, values[i], is_merged=product is None)
        weights = [values[i] for i in places]
        others = [x for i, x in enumerate(values) if i not in places]

        def region(arrays: list[tuple[Any, ...]], others: list[Any]) -> list[Any]:
            made = iter([w.with_arrays(xs) for w, xs in zip(weights, arrays, strict=True)])
            rest = iter(others)
            inputs = [next(made) if i in places else next(rest) for i in range(len(values))]
            if product is not None:
                return [product(inputs[places[0]], inputs)]
            if rows is not None:
                return [rows(inputs)]
            return jaxprs.bind(eqn, [x.merged() if isinstance(x, Weight) else x for x in inputs])

        arrays = [w.arrays for w in weights]
        works = product is None and any(w.factors for w in weights)
        works = works or any(w.is_dora or not (w.is_plain or len(w.shape) < 2) for w in weights)
        if works and not frame.in_region and not eqn.effects:
            return jax.checkpoint(region, prevent_cse=frame.prevent_cse)(arrays, others)
        return region(arrays, others)

    def merge(self, value: Any, eqn: Any, frame: _Frame) -> Any:
        """Returns the array of a value, before an equation that is not looked into."""
        if not isinstance(value, Weight):
            return value
        self.note(eqn, value, is_merged=True)
        if not value.factors and value.is_plain:
            return value.base()
        make = lambda arrays: value.with_arrays(arrays).merged()  # noqa: E731
        return make(value.arrays) if frame.in_region else jax.checkpoint(make, prevent_cse=False)(value.arrays)

    def note(self, eqn: Any, weight: Weight, *, is_merged: bool) -> None:
        """Notes the use of an adapted weight."""
        if weight.factors:
            where = jaxprs.source_line(eqn)
            use = WeightUse(path=weight.path, where=where, operation=eqn.primitive.name, is_merged=is_merged)
            self.uses.append(use)

    # --- equations with inner jaxprs ---------------------------------------------------------------------------------

    def inline(self, eqn: Any, values: Sequence[Any], frame: _Frame) -> list[Any]:
        """A nested `jit`: walks its body in place."""
        jaxpr, consts = jaxprs.open_jaxpr(*jaxprs.inner_jaxprs(eqn))
        with jaxprs.source_context(eqn):
            return self.run(jaxpr, consts, values, frame)

    def remat(self, eqn: Any, values: Sequence[Any], frame: _Frame) -> list[Any]:
        """The model's own `jax.checkpoint`: makes the weights inside it, keeps its policy."""
        (inner,) = jaxprs.inner_jaxprs(eqn)
        jaxpr, consts = jaxprs.open_jaxpr(inner)
        prevent_cse = eqn.params["prevent_cse"]
        prevent_cse = prevent_cse if isinstance(prevent_cse, bool) else any(prevent_cse)
        within = dataclasses.replace(frame, in_region=True)

        def call(arrays: list[Any]) -> list[Any]:
            ins = [v.with_arrays(x) if isinstance(v, Weight) else x for v, x in zip(values, arrays, strict=True)]
            outs = self.run(jaxpr, consts, ins, within)
            return [self.merge(out, eqn, within) for out in outs]

        arrays = [value.arrays if isinstance(value, Weight) else value for value in values]
        with jaxprs.source_context(eqn):
            return jax.checkpoint(call, prevent_cse=prevent_cse, policy=eqn.params["policy"])(arrays)

    def cond(self, eqn: Any, values: Sequence[Any], frame: _Frame) -> list[Any]:
        """Makes the weights inside the branch that uses them."""

        def branch(inner: Any) -> Callable[[], list[Any]]:
            jaxpr, consts = jaxprs.open_jaxpr(inner)
            return lambda: [self.merge(x, eqn, frame) for x in self.run(jaxpr, consts, values[1:], frame)]

        with jaxprs.source_context(eqn):
            return lax.switch(values[0], [branch(inner) for inner in eqn.params["branches"]])

    def scan(self, eqn: Any, values: Sequence[Any], frame: _Frame) -> list[Any]:
        """Elements of a stack of weights enter the body still to be made, as do weights that all iterations use."""
        scan = scan_of(eqn)
        jaxpr, inner_consts = jaxprs.open_jaxpr(scan.jaxpr)
        consts, carry, stacks = scan.split(values)
        carry = [self.merge(value, eqn, frame) for value in carry]
        for value in stacks:
            if isinstance(value, Weight):
                _check_stack(value, eqn)
        slices = [v if _is_stack(v) else self.merge(v, eqn, frame) for v in stacks]
        within = dataclasses.replace(frame, prevent_cse=False)

        def body(carry: list[Any], xs: list[Any]) -> list[Any]:
            rest = iter(xs)
            ins = [s.element(lambda _: next(rest)) if isinstance(s, Weight) else next(rest) for s in slices]
            outs = self.run(jaxpr, inner_consts, [*consts, *carry, *ins], within)
            return [self.merge(out, eqn, within) for out in outs]

        xs = [x for s in slices for x in (s.arrays if isinstance(s, Weight) else (s,))]
        return run_scan(eqn, body, carry, xs)


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
    weight, name = values[0], eqn.primitive.name
    if not isinstance(weight, Weight) or any(isinstance(value, Weight) for value in values[1:]):
        return None
    out = eqn.outvars[0].aval
    if name == "convert_element_type" and jnp.issubdtype(out.dtype, jnp.floating):
        return weight.cast(out.dtype)
    if name == "transpose":
        return weight.transposed(eqn.params["permutation"])
    if name == "squeeze" or (name == "reshape" and eqn.params["dimensions"] is None):
        return _squeezed(weight, out.shape)
    rule = _SLICES.get(name)
    return None if rule is None or not _is_stack(weight) else rule(eqn, weight, values)


def _squeezed(weight: Weight, shape: Sequence[int]) -> Weight | None:
    if _is_stack(weight) and weight.shape[0] == 1 and tuple(shape) == weight.shape[1:]:
        return weight.element(lambda x: x.reshape(x.shape[1:]))
    return weight.reshaped(shape)


def _slice(eqn: Any, weight: Weight, values: Sequence[Any]) -> Weight | None:
    """A static part of the stack."""
    del values
    start, limit, strides = (eqn.params[name] for name in ("start_indices", "limit_indices", "strides"))
    step = 1 if strides is None else strides[0]
    rest = zip(start[1:], limit[1:], weight.shape[1:], (strides or (1,) * len(start))[1:], strict=True)
    if any((s, e, k) != (0, n, 1) for s, e, n, k in rest):
        return None
    arrays = [lax.slice_in_dim(x, start[0], limit[0], step) for x in weight.arrays]
    return dataclasses.replace(weight.with_arrays(arrays), shape=(arrays[0].shape[0], *weight.shape[1:]))


def _dynamic_slice(eqn: Any, weight: Weight, values: Sequence[Any]) -> Weight | None:
    """A part of the stack at an index."""
    sizes = eqn.params["slice_sizes"]
    if tuple(sizes[1:]) != weight.shape[1:]:
        return None
    arrays = [lax.dynamic_slice_in_dim(x, values[1], sizes[0]) for x in weight.arrays]
    return dataclasses.replace(weight.with_arrays(arrays), shape=(sizes[0], *weight.shape[1:]))


def _element(eqn: Any, weight: Weight, values: Sequence[Any]) -> Weight | None:
    """One element of the stack at an index, `w[i]`."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    plain = tuple(numbers.collapsed_slice_dims) == tuple(numbers.start_index_map) == (0,)
    one = jnp.ndim(values[1]) == 1 and not getattr(numbers, "operand_batching_dims", ())
    if not (plain and one) or tuple(sizes) != (1, *weight.shape[1:]):
        return None

    def take(x: Any) -> Any:
        of_x = numbers._replace(offset_dims=tuple(range(x.ndim - 1)))
        params = {**eqn.params, "dimension_numbers": of_x, "slice_sizes": (1, *x.shape[1:])}
        return jaxprs.bind(eqn.replace(params=params), [x, values[1]])[0]

    return weight.element(take)


_SLICES: dict[str, Callable[[Any, Weight, Sequence[Any]], Weight | None]] = {
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "gather": _element,
}


def _rows(eqn: Any, values: Sequence[Any]) -> Callable[[Sequence[Any]], Any] | None:
    """Returns how rows are taken from a table that is only cast: rows first, then the cast; None if that is not it."""
    table = values[0]
    is_cast = isinstance(table, Weight) and not table.factors and not table.moves and len(table.roots) == 1
    if eqn.primitive.name != "gather" or not is_cast or table.roots[0].shape != table.shape:
        return None
    return lambda inputs: jaxprs.bind(eqn, [inputs[0].roots[0], *inputs[1:]])[0].astype(eqn.outvars[0].aval.dtype)

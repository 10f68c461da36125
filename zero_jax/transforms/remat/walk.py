"""The walk over a function's jaxpr that finds its blocks and evaluates each as a region that is recomputed."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zero_jax.attention import RESIDUALS
from zero_jax.core import jaxprs
from zero_jax.core.close_match import did_you_mean
from zero_jax.core.evaluation import evaluate, flattened, run_scan
from zero_jax.core.subcalls import equations, scan_of, subcall
from zero_jax.dims import is_float, narrows
from zero_jax.transforms.blocks.search import RepeatedBlock, find_blocks, find_left_out
from zero_jax.transforms.blocks.sequence import EqnSequence
from zero_jax.transforms.facts import Facts
from zero_jax.transforms.remat.regions import RematRegion, RematSetting
from zero_jax.transforms.remat.report import Left, RegionRow, residuals_of
from zero_jax.transforms.remat.values import VALUE, Mark, is_large

_UNWRAPPED = ("call", "remat")  # evaluated in place where a region replaces the model's own
_LOOPS_AND_REGIONS = ("scan", "remat")
_KEYS = ((2,), (4,))  # the last dim of the data of PRNG keys


@dataclasses.dataclass(frozen=True)
class Log:
    """What a walk notes for the report: regions (with their residuals, to `measure` them), and what is left alone."""

    rows: list[RegionRow]
    left: list[Left]
    measure: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class RematFrame:
    """Where a jaxpr is: in a loop that is not over layers, how often it runs, and the line of the user's around it."""

    in_loop: bool
    times: int
    place: str

    def inside(self, eqn: Any) -> RematFrame:
        """Returns the frame of what is in an equation."""
        return dataclasses.replace(self, place=jaxprs.source_line(eqn) or self.place)


class RematWalk:
    """One walk over one trace of a function, which finds its blocks and evaluates them as regions."""

    def __init__(self, setting: RematSetting, log: Log):
        self.setting = setting
        self.policy = setting.remat.policy
        self.log = log

    def check_names(self, jaxpr: Any, place: str) -> None:
        """Refuses names that the model does not use."""
        known = {eqn.params["name"] for eqn in equations(jaxpr) if eqn.primitive.name == "name"}
        if any(eqn.primitive.name == "zero_attention" for eqn in equations(jaxpr)):
            known.add(RESIDUALS)
        for name in self.setting.remat.names:
            if name not in known:
                hint = did_you_mean(name, known)
                raise ValueError(
                    f"remat={self.setting.remat.name!r} keeps values named {name!r}, but {place} names none so: "
                    f"{hint}it names {sorted(known) or 'nothing'} (with jax.ad_checkpoint.checkpoint_name)"
                )

    def run(
        self, jaxpr: Any, consts: Sequence[Any], arrays: Sequence[Any], marks: Sequence[Mark], frame: RematFrame
    ) -> list[Any]:
        """Evaluates a jaxpr."""
        jaxpr, consts = jaxprs.open_jaxpr(flattened(jaxpr, consts))
        known = self.setting.marked(jaxpr, marks)
        blocks = {block.start: block for block in self.blocks(known, frame)}
        inside = {i for block in blocks.values() for i in range(block.start + 1, block.stop)}
        units = [blocks.get(i, eqn) for i, eqn in enumerate(jaxpr.eqns) if i not in inside]
        regions = [unit for unit in units if isinstance(unit, RepeatedBlock) or _kind(unit) in _LOOPS_AND_REGIONS]
        readers = collections.Counter(var for unit in regions for var in {*jaxprs.variables(unit)})

        def equation(unit: Any, values: list[Any]) -> Sequence[Any]:
            shared = [not jaxprs.is_literal(atom) and readers[atom] > 1 for atom in unit.invars]
            ins = [known.mark(atom) for atom in unit.invars]
            ins = [dataclasses.replace(m, held=m.held or s) for m, s in zip(ins, shared, strict=True)]
            if isinstance(unit, RepeatedBlock):
                return self.block(jaxpr, unit, values, ins, frame)
            return self.eqn(unit, values, ins, frame)

        return evaluate(jaxpr.replace(eqns=units), consts, arrays, equation)

    def blocks(self, facts: Facts, frame: RematFrame) -> list[RepeatedBlock]:
        """Returns the repeated blocks, and notes what is like them and none."""
        if self.policy == "own":
            return []
        jaxpr, sequence = facts.jaxpr, EqnSequence(facts, tied=True)
        found = find_blocks(sequence)
        for i in find_left_out(sequence, found):
            self.leave(jaxpr.eqns[i], "it is like a repeated block, but differs too much to be one", frame)
        blocks = [block for block in found if _makes_more(jaxpr, block)]
        for block in found if not blocks else ():
            self.leave(jaxpr.eqns[block.start], "a block that makes nothing but its results", frame)
        return blocks

    def eqn(self, eqn: Any, values: list[Any], marks: list[Mark], frame: RematFrame) -> list[Any]:
        """Evaluates an equation that is no part of a repeated block."""
        kind, on_params = _kind(eqn), any(mark.kind == "param" for mark in marks)
        if kind == "remat":
            return self.own_region(eqn, values, marks, frame)
        if kind == "scan" and on_params:
            return self.scan(eqn, values, marks, frame)
        if kind == "cond" and _has_blocks(eqn):
            return self.cond(eqn, values, marks, frame)
        if kind not in ("scan", "cond") and on_params and _has_blocks(eqn):
            self.leave(eqn, f"{eqn.primitive.name} is not looked into", frame)
        return jaxprs.bind(eqn, values)

    # --- regions -------------------------------------------------------------------------------------------------

    def block(
        self, jaxpr: Any, block: RepeatedBlock, values: list[Any], marks: list[Mark], frame: RematFrame
    ) -> list[Any]:
        """One turn of a Python loop over layers."""
        eqns = jaxpr.eqns[block.start : block.stop]
        turn = jaxpr.replace(constvars=[], invars=block.invars, outvars=block.outvars, eqns=eqns)
        traced = flattened(turn, kinds=_UNWRAPPED)
        return self.region(eqns[0], "block of a Python loop", traced, values, marks, frame, prevent_cse=True)

    def own_region(self, eqn: Any, values: list[Any], marks: list[Mark], frame: RematFrame) -> list[Any]:
        """A `jax.checkpoint` of the model's own."""
        (inner,) = jaxprs.inner_jaxprs(eqn)
        jaxpr, consts = jaxprs.open_jaxpr(inner)
        if self.policy != "own" and frame.in_loop:
            # Such as a loss in chunks: what it recomputes is no block of the model.
            self.leave(eqn, "a jax.checkpoint in a loop that is not over layers keeps its own policy", frame)
            return jaxprs.bind(eqn, values)
        if self.policy == "none" or (self.policy != "own" and _holds_blocks(inner, marks, tied=True)):
            with jaxprs.source_context(eqn):
                return self.run(jaxpr, consts, values, marks, frame.inside(eqn))
        own = self.policy == "own"
        traced = flattened(jaxpr, consts, ("call",) if own else _UNWRAPPED)
        prevent_cse = eqn.params["prevent_cse"]
        prevent_cse = prevent_cse if isinstance(prevent_cse, bool) else True
        own_policy = eqn.params["policy"] if own else None
        return self.region(
            eqn, "jax.checkpoint", traced, values, marks, frame, prevent_cse=prevent_cse, own_policy=own_policy
        )

    def region(
        self,
        eqn: Any,
        kind: str,
        traced: Any,
        values: Sequence[Any],
        marks: Sequence[Mark],
        frame: RematFrame,
        *,
        prevent_cse: bool,
        own_policy: Any = None,
    ) -> list[Any]:
        """Evaluates a closed jaxpr without calls inside a `jax.checkpoint`."""
        jaxpr, consts = jaxprs.open_jaxpr(traced)
        movable = [not mark.held for mark in marks]
        region = RematRegion(
            setting=self.setting, jaxpr=jaxpr, consts=consts, marks=marks, movable=movable, own_policy=own_policy
        )
        plain = functools.partial(evaluate, jaxpr, consts)
        if self.policy == "none":
            self.note(eqn, kind, region, plain, frame)
            return plain(values)
        if jaxpr.effects and kind != "jax.checkpoint":
            self.leave(eqn, f"it has effects, {', '.join(map(str, jaxpr.effects))}, which must not run twice", frame)
            return plain(values)
        if self.policy == "attention" and not region.cores.inner | region.fused:
            self.leave(eqn, "no attention in it, so nothing of it is recomputed", frame)
            return plain(values)
        for var, moves in zip(jaxpr.invars, movable, strict=True):
            large = moves and region.known.kind(var) == "value" and is_large(var.aval)
            if large and self.setting.remat.residuals == "sharded" and not region.leaves(var):
                is_sharded = region.known.marks[var].dims is not None
                reason = "already sharded over `model`" if is_sharded else f"no dim of {var.aval.shape} divides"
                self.leave(eqn, f"a residual is not sharded: {reason}", frame)
        recomputed = jax.checkpoint(region, policy=region.policy, prevent_cse=prevent_cse)
        self.note(eqn, kind, region, lambda values: recomputed(*values), frame)
        return recomputed(*values)

    # --- loops and branches ----------------------------------------------------------------------------------------

    def scan(self, eqn: Any, values: list[Any], marks: list[Mark], frame: RematFrame) -> list[Any]:
        """The body of a scan over layers is a block; into other loops that use params the walk descends."""
        scan, kinds = scan_of(eqn), [mark.kind for mark in marks]
        is_tied = _repeats_a_layer(eqn, kinds)
        is_layers = is_tied or _is_over_layers(eqn, kinds)
        jaxpr, inner_consts = jaxprs.open_jaxpr(scan.jaxpr)
        consts, carry, xs = scan.split(values)
        of_consts, of_carry, of_xs = scan.split(marks)
        inside = [
            *(dataclasses.replace(mark, held=True) for mark in of_consts),
            *(dataclasses.replace(VALUE, dims=mark.dims) for mark in of_carry),
            *(Mark(m.kind, None if m.dims is None else m.dims[1:], held=True) for m in of_xs),
        ]
        # A loop that repeats a stack of layers is no block: the layers are.
        is_block = (
            self.policy != "own" and is_layers and not (is_tied and _holds_blocks(scan.jaxpr, inside, tied=False))
        )
        traced = flattened(jaxpr, inner_consts, _UNWRAPPED)
        opened, _ = jaxprs.open_jaxpr(traced)
        known = self.setting.marked(opened, inside)
        for i, atom in enumerate(opened.outvars[: scan.num_carry], scan.num_consts):
            inside[i] = dataclasses.replace(inside[i], dims=known.mark(atom).dims)  # as the body itself leaves it
        times = frame.times * scan.length
        frame = dataclasses.replace(frame.inside(eqn), in_loop=not is_layers, times=times)

        def body(carry: list[Any], x: list[Any]) -> list[Any]:
            arrays = [*consts, *carry, *x]
            if not is_block:
                return self.run(jaxpr, inner_consts, arrays, inside, frame)
            return self.region(eqn, "scan body", traced, arrays, inside, frame, prevent_cse=False)

        return run_scan(eqn, body, carry, xs)

    def cond(self, eqn: Any, values: list[Any], marks: list[Mark], frame: RematFrame) -> list[Any]:
        """Descends into the branches."""

        def branch(inner: Any) -> Callable[..., list[Any]]:
            jaxpr, consts = jaxprs.open_jaxpr(inner)
            return lambda *arrays: self.run(jaxpr, consts, arrays, marks[1:], frame.inside(eqn))

        with jaxprs.source_context(eqn):
            return list(lax.switch(values[0], [branch(inner) for inner in eqn.params["branches"]], *values[1:]))

    # --- the report ----------------------------------------------------------------------------------------------

    def leave(self, eqn: Any, reason: str, frame: RematFrame) -> None:
        """Notes what is not rematerialized, or not placed."""
        self.log.left.append(Left(where=frame.inside(eqn).place, what=eqn.primitive.name, reason=reason))

    def note(self, eqn: Any, kind: str, region: RematRegion, function: Callable[..., Any], frame: RematFrame) -> None:
        """Notes a region and its residuals."""
        times = frame.times
        row = RegionRow(where=frame.inside(eqn).place, kind=kind, times=times)
        if self.log.measure:
            plain = functools.partial(evaluate, region.jaxpr, region.consts)
            row = dataclasses.replace(row, without=residuals_of(plain, region), kept=residuals_of(function, region))
        same = [i for i, old in enumerate(self.log.rows) if dataclasses.replace(old, times=times) == row]
        if same:
            row = dataclasses.replace(row, times=times + self.log.rows.pop(same[0]).times)
        self.log.rows.append(row)


def _kind(eqn: Any) -> str | None:
    """Returns the kind of `Subcall` of an equation, None for an operation."""
    sub = subcall(eqn)
    return None if sub is None else sub.kind


def _is_over_layers(eqn: Any, kinds: Iterable[str]) -> bool:
    """Tells whether a scan takes a slice of some params in each turn, stacked or by index."""
    scan = scan_of(eqn)
    consts, _, slices = scan.split([*kinds])
    jaxpr, _ = jaxprs.open_jaxpr(scan.jaxpr)
    invariant = [var for var, kind in zip(jaxpr.invars, consts, strict=False) if kind == "param"]
    taken = (eqn.invars[0] in invariant for eqn in equations(jaxpr) if narrows(eqn))
    return "param" in slices or any(taken)


def _repeats_a_layer(eqn: Any, kinds: Sequence[str]) -> bool:
    """Tells whether a scan applies the same params again and again to what it carries, as layers that share them are.

    It takes no new data in a turn, as loops over time and over chunks of a batch do; keys (of dropout) are none.
    """
    scan = scan_of(eqn)
    (consts, carry, slices), (_, carried, sliced) = scan.split(kinds), scan.split([x.aval for x in eqn.invars])
    jaxpr, _ = jaxprs.open_jaxpr(flattened(*jaxprs.open_jaxpr(scan.jaxpr)))
    data = {var for var, kind in zip(jaxpr.invars, consts, strict=False) if kind == "value"}
    takes_data = any(kind == "value" and not _is_key(x) for kind, x in zip(slices, sliced, strict=True))
    takes_data |= any(narrows(eqn) and eqn.invars[0] in data for eqn in equations(jaxpr))
    carries = any(is_float(x) and x.ndim for x in carried) and "value" in (*consts, *carry)
    return "param" in consts and "param" not in slices and carries and not takes_data


def _is_key(aval: Any) -> bool:
    """Tells whether an array holds PRNG keys, or their data."""
    return jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) or (aval.dtype == jnp.uint32 and aval.shape[-1:] in _KEYS)


def _holds_blocks(inner: Any, marks: Sequence[Mark], *, tied: bool) -> bool:
    """Tells whether there are blocks within a jaxpr; without `tied` those with params of their own alone."""
    jaxpr, _ = jaxprs.open_jaxpr(flattened(*jaxprs.open_jaxpr(inner)))
    facts = Facts(jaxpr, [mark.kind for mark in marks])
    loops = ((eqn, [*map(facts.kind, eqn.invars)]) for eqn in jaxpr.eqns if _kind(eqn) == "scan")
    is_loop = (_is_over_layers(eqn, kinds) or (tied and _repeats_a_layer(eqn, kinds)) for eqn, kinds in loops)
    return any(is_loop) or bool(find_blocks(EqnSequence(facts, tied=tied)))


def _has_blocks(eqn: Any) -> bool:
    """Tells whether there is a loop or a `jax.checkpoint` anywhere in an equation."""
    inner = (jaxprs.open_jaxpr(jaxpr)[0] for jaxpr in jaxprs.inner_jaxprs(eqn))
    return any(_kind(found) in _LOOPS_AND_REGIONS for jaxpr in inner for found in equations(jaxpr))


def _makes_more(jaxpr: Any, block: RepeatedBlock) -> bool:
    """Tells whether a block makes anything of activations that is not among its results."""
    eqns = jaxpr.eqns[block.start : block.stop]
    num_made = sum(len(eqn.outvars) for eqn in eqns)
    return num_made > len(block.outvars) or any(jaxprs.inner_jaxprs(eqn) for eqn in eqns)

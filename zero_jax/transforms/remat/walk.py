"""The walk over a function's jaxpr that finds its blocks and evaluates each as a region that is recomputed."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.attention import RESIDUALS
from zero_jax.core.close_match import did_you_mean
from zero_jax.core.tree import is_key
from zero_jax.dims import is_activation, is_float, narrows
from zero_jax.program import jaxprs
from zero_jax.program.evaluation import evaluate, flattened
from zero_jax.program.subcalls import Subcall, equations, kind_of, scan_of
from zero_jax.program.walk import Walk
from zero_jax.transforms.blocks import find_blocks, find_left_out
from zero_jax.transforms.eqn_sequence import EqnSequence, RepeatedBlock, num_bytes
from zero_jax.transforms.remat.choice import ValueChoice
from zero_jax.transforms.remat.regions import RematRegion, RematSetting
from zero_jax.transforms.remat.report import Left, RegionRow, residuals_of
from zero_jax.transforms.remat.values import KINDS, VALUE, Mark, MarkedValues, all_values, selects

_KEYS = ((2,), (4,))  # the last dim of the data of PRNG keys


class RematBody:
    """A jaxpr without calls, made of one that may have some, and what is known of its values."""

    def __init__(self, setting: RematSetting, jaxpr: Any, marks: Sequence[Mark]):
        self.origin = jaxpr  # so that its id stays its own
        self.jaxpr, self.consts = jaxprs.open_jaxpr(flattened(jaxpr))
        self.known = setting.marked(self.jaxpr, marks)

    @functools.cached_property
    def sequence(self) -> EqnSequence:
        """Its equations, among which blocks may share their params."""
        return EqnSequence(self.known, tied=True)

    @functools.cached_property
    def found(self) -> tuple[RepeatedBlock, ...]:
        """The repeated blocks."""
        return find_blocks(self.sequence)

    @functools.cached_property
    def blocks(self) -> list[RepeatedBlock]:
        """The repeated blocks that make anything of activations that is not among their results."""

        def makes_more(block: RepeatedBlock) -> bool:
            eqns = self.jaxpr.eqns[block.start : block.stop]
            num_made = sum(len(eqn.outvars) for eqn in eqns)
            return num_made > len(block.outvars) or any(jaxprs.inner_jaxprs(eqn) for eqn in eqns)

        return [*filter(makes_more, self.found)]

    @property
    def left_out(self) -> list[tuple[Any, str]]:
        """The first equations of what is like blocks and none, with the reason."""
        eqns = self.jaxpr.eqns
        reason = "it is like a repeated block, but differs too much to be one"
        left = [(eqns[i], reason) for i in find_left_out(self.sequence, self.found)]
        if not self.blocks:
            reason = "a block that makes nothing but its results"
            left += [(eqns[block.start], reason) for block in self.found]
        return left

    def holds_blocks(self, *, tied: bool) -> bool:
        """Tells whether there are blocks in it; without `tied` those with params of their own alone."""
        loops = [(eqn, [*map(self.known.kind, eqn.invars)]) for eqn in self.jaxpr.eqns if kind_of(eqn) == "scan"]
        is_loop = (is_over_layers(eqn, kinds) or (tied and repeats_a_layer(eqn, kinds)) for eqn, kinds in loops)
        return any(is_loop) or self.sequence.are_most(self.found if tied else find_blocks(EqnSequence(self.known)))


def is_loop_or_region(eqn: Any) -> bool:
    """Tells whether an equation is a scan or a `jax.checkpoint`."""
    return kind_of(eqn) in ("scan", "remat")


def may_have_blocks(eqn: Any) -> bool:
    """Tells whether there is a scan or a `jax.checkpoint` anywhere in an equation."""
    return any(map(is_loop_or_region, (found for inner in jaxprs.inner_jaxprs(eqn) for found in equations(inner))))


def is_over_layers(eqn: Any, kinds: Iterable[str]) -> bool:
    """Tells whether a scan takes a slice of some params in each turn, stacked or by index."""
    scan = scan_of(eqn)
    consts, _, slices = scan.split([*kinds])
    jaxpr, _ = jaxprs.open_jaxpr(scan.jaxpr)
    invariant = [var for var, kind in zip(jaxpr.invars, consts, strict=False) if kind == "param"]
    taken = (eqn.invars[0] in invariant for eqn in equations(jaxpr) if narrows(eqn))
    return "param" in slices or any(taken)


def repeats_a_layer(eqn: Any, kinds: Sequence[str]) -> bool:
    """Tells whether a scan applies the same params again and again to what it carries, as layers that share them are.

    It takes no new data in a turn, as loops over time and over chunks of a batch do; keys (of dropout) are none.
    """
    scan = scan_of(eqn)
    (consts, carry, slices), (_, carried, sliced) = scan.split(kinds), scan.split([x.aval for x in eqn.invars])
    jaxpr, _ = jaxprs.open_jaxpr(flattened(scan.jaxpr))
    data = {var for var, kind in zip(jaxpr.invars, consts, strict=False) if kind == "value"}
    may_be_keys = [is_key(x) or (x.dtype == jnp.uint32 and x.shape[-1:] in _KEYS) for x in sliced]
    takes_data = any(kind == "value" and not is_keys for kind, is_keys in zip(slices, may_be_keys, strict=True))
    takes_data |= any(narrows(eqn) and eqn.invars[0] in data for eqn in equations(jaxpr))
    carries = any(is_float(x) and x.ndim for x in carried) and "value" in (*consts, *carry)
    return "param" in consts and "param" not in slices and carries and not takes_data


_UNWRAPPED = ("call", "remat")  # evaluated in place where a region replaces the model's own


def _written_out(jaxpr: Any, kinds: Sequence[str] = _UNWRAPPED) -> Any:
    """Returns the jaxpr of a block with calls of these kinds in place, but for activation functions.

    XLA:TPU fuses the derivative of one with the products around it only while it is a call.
    """
    return flattened(jaxpr, kinds=kinds, leaves=is_activation)


@dataclasses.dataclass(frozen=True)
class Log:
    """What a walk notes: for the report regions (with their residuals, to `measure` them), and what is left alone."""

    rows: list[RegionRow] = dataclasses.field(default_factory=list)
    left: list[Left] = dataclasses.field(default_factory=list)
    measure: bool = False
    regions: list[tuple[RematRegion, int]] = dataclasses.field(default_factory=list)  # each with how often it runs
    choice: ValueChoice | None = None  # what the policy `auto` chose


@dataclasses.dataclass(frozen=True, kw_only=True)
class RematFrame:
    """Where a jaxpr is."""

    marks: Sequence[Mark]  # what is known of its inputs; within it, of the operands of the equation that is evaluated
    place: str  # the line of the user's around it
    times: int = 1  # how often it runs
    in_loop: bool = False  # whether it is in a loop that is not over layers
    in_stack: bool = False  # whether it is in a loop over layers whose turns have several
    block: Any = None  # the flat jaxpr that it is, if it is the body of a loop over layers, and a block

    def at(self, eqn: Any) -> str:
        """Returns the line of an equation in it."""
        return jaxprs.source_line(eqn) or self.place


class RematWalk(Walk[RematFrame]):
    """One walk over one trace of a function, which finds its blocks and evaluates them as regions."""

    def __init__(self, setting: RematSetting, log: Log):
        super().__init__()
        self.setting, self.policy, self.log = setting, setting.remat.policy, log
        self.bodies: dict[Any, RematBody] = {}
        self.regions: dict[Any, Callable[..., list[Any]]] = {}

    def check_names(self, jaxpr: Any, place: str) -> None:
        """Refuses names that the model does not use."""
        known = {eqn.params["name"] for eqn in named_within(jaxpr)}
        if any(eqn.primitive.name == "zero_attention" for eqn in equations(jaxpr)):
            known.add(RESIDUALS)
        for name in self.setting.remat.names:
            if name not in known:
                hint = did_you_mean(name, known)
                raise ValueError(
                    f"remat={self.setting.remat.name!r} keeps values named {name!r}, but {place} names none so: "
                    f"{hint}it names {sorted(known) or 'nothing'} (with jax.ad_checkpoint.checkpoint_name)"
                )

    def check_values(self, place: str) -> None:
        """Refuses values to keep that no region makes."""
        remat = self.setting.remat
        labels = {label for region, _ in self.log.regions for label in region.labels.values()}
        names = {eqn.params["name"] for region, _ in self.log.regions for eqn in named_within(region.jaxpr)}
        known = {*labels, *names, *KINDS}
        for selector in (*remat.save, *remat.offload):
            if not any(selects(selector, label) for label in known):
                hint = did_you_mean(selector, known)
                raise ValueError(
                    f"remat={remat.name!r} keeps {selector!r}, which no block of {place} makes: {hint}"
                    f"zero.remat_report(..., remat='auto') lists the values; kinds of them are {', '.join(KINDS)}"
                )

    def body(self, jaxpr: Any, marks: Sequence[Mark]) -> RematBody:
        """Returns a jaxpr with its blocks, which are looked for once in those of equal layers."""
        key = id(jaxpr), *marks
        if key not in self.bodies:
            self.bodies[key] = RematBody(self.setting, jaxpr, marks)
        return self.bodies[key]

    def run(self, jaxpr: Any, values: Sequence[Any], frame: RematFrame) -> list[Any]:
        """Evaluates a jaxpr, its repeated blocks as one equation each."""
        body = self.body(jaxpr, frame.marks)
        if self.policy != "own":
            for eqn, reason in body.left_out:
                self.leave(eqn, reason, frame)
        blocks = {block.start: block for block in (body.blocks if self.policy != "own" else ())}
        inside = {i for block in blocks.values() for i in range(block.start + 1, block.stop)}
        # A block stands for its equations: it has `invars` and `outvars` as one.
        units = [blocks.get(i, eqn) for i, eqn in enumerate(body.jaxpr.eqns) if i not in inside]
        regions = [unit for unit in units if isinstance(unit, RepeatedBlock) or is_loop_or_region(unit)]
        readers = collections.Counter(var for unit in regions for var in {*jaxprs.variables(unit)})

        def equation(unit: Any, values: list[Any]) -> Sequence[Any]:
            # What several regions read is alive for the others, wherever one keeps it.
            is_shared = [not jaxprs.is_literal(atom) and readers[atom] > 1 for atom in unit.invars]
            pairs = zip(map(body.known.mark, unit.invars), is_shared, strict=True)
            marks = [dataclasses.replace(mark, stays_alive=mark.stays_alive or flag) for mark, flag in pairs]
            within = dataclasses.replace(frame, marks=marks)
            if isinstance(unit, RepeatedBlock):
                return self.repeated(body.jaxpr, unit, values, within)
            return self.equation(unit, values, within)

        return evaluate(body.jaxpr.replace(eqns=units), body.consts, values, equation)

    def enters(self, eqn: Any, sub: Subcall, values: list[Any], frame: RematFrame) -> bool:
        """Tells whether there may be blocks in an equation."""
        is_loop = sub.kind == "scan" and _on_params(frame)
        return sub.kind == "remat" or is_loop or (sub.kind == "cond" and may_have_blocks(eqn))

    def operation(self, eqn: Any, values: list[Any], frame: RematFrame) -> list[Any]:
        """Evaluates an equation as it is."""
        if kind_of(eqn) not in ("scan", "cond") and _on_params(frame) and may_have_blocks(eqn):
            self.leave(eqn, f"{eqn.primitive.name} is not looked into", frame)
        return jaxprs.bind(eqn, values)

    def repeated(self, jaxpr: Any, block: RepeatedBlock, values: list[Any], frame: RematFrame) -> list[Any]:
        """One turn of a Python loop over layers."""
        eqns = jaxpr.eqns[block.start : block.stop]
        turn = jaxpr.replace(constvars=[], invars=block.invars, outvars=block.outvars, eqns=eqns)
        what = {"kind": "block of a Python loop", "is_scanned": frame.in_stack}
        return self.evaluated(eqns[0], _written_out(turn), values, frame, **what)

    def remat(self, eqn: Any, sub: Subcall, values: list[Any], frame: RematFrame) -> list[Any]:
        """A `jax.checkpoint` of the model's own."""
        own, prevent_cse = self.policy == "own", eqn.params["prevent_cse"]
        if frame.in_loop and not own:
            # Such as a loss in chunks: what it recomputes is no block of the model.
            self.leave(eqn, "a jax.checkpoint in a loop that is not over layers keeps its own policy", frame)
            return jaxprs.bind(eqn, values)
        if self.policy == "none" or (not own and self.body(sub.jaxpr, frame.marks).holds_blocks(tied=True)):
            with jaxprs.source_context(eqn):
                return self.run(sub.jaxpr, values, self.inner_frame(eqn, sub, frame))
        return self.evaluated(
            eqn,
            _written_out(sub.jaxpr, ("call",) if own else _UNWRAPPED),
            values,
            frame,
            kind="jax.checkpoint",
            is_scanned=frame.in_stack,
            # Of several in the body of a scan the scheduler recomputes all at once, unless barriers prevent it.
            prevent_cse=frame.in_stack or (prevent_cse if isinstance(prevent_cse, bool) else True),
            own_policy=eqn.params["policy"] if own else None,
        )

    def evaluated(self, eqn: Any, flat: Any, values: Sequence[Any], frame: RematFrame, **what: Any) -> list[Any]:
        """Evaluates a jaxpr without calls inside a `jax.checkpoint`, as a region."""
        jaxpr, consts = jaxprs.open_jaxpr(flat)
        region = RematRegion(setting=self.setting, jaxpr=jaxpr, consts=consts, marks=frame.marks, **what)
        if self.policy == "none":
            self.note(eqn, region, region.plain, frame)
            return region.plain(*values)
        effects, left = jaxprs.effects_of_once(region.jaxpr), ""
        if effects and region.kind != "jax.checkpoint":
            left = f"it has effects, {', '.join(map(str, effects))}, which must not run twice"
        elif self.policy == "attention" and not region.cores[0] | region.fused:
            left = "no attention in it, so nothing of it is recomputed"
        if left:
            self.leave(eqn, left, frame)
            return region.plain(*values)
        for reason in region.not_sharded():
            self.leave(eqn, f"a residual is not sharded: {reason}", frame)
        recomputed = self.recomputed(region)
        self.note(eqn, region, recomputed, frame)
        return recomputed(*values)

    def recomputed(self, region: RematRegion) -> Callable[..., list[Any]]:
        """Returns the `jax.checkpoint` of a region: one for those of equal layers, which JAX traces once."""
        make = lambda: jax.checkpoint(region, policy=region.policy, prevent_cse=region.prevent_cse)  # noqa: E731
        if region.jaxpr.constvars:
            return make()
        key = jaxprs.jaxpr_key(region.jaxpr), *region.marks, region.prevent_cse, region.own_policy
        if key not in self.regions:
            self.regions[key] = make()
        return self.regions[key]

    def inner_frame(self, eqn: Any, sub: Subcall, frame: RematFrame) -> RematFrame:
        """Returns the frame of what is in an equation."""
        frame = dataclasses.replace(frame, place=frame.at(eqn))
        if sub.kind == "scan":
            return self.inside_scan(eqn, sub, frame)
        return dataclasses.replace(frame, marks=frame.marks[1:]) if sub.kind == "cond" else frame

    def inside_scan(self, eqn: Any, sub: Subcall, frame: RematFrame) -> RematFrame:
        """The body of a scan over layers is a block; into other loops that use params the walk descends."""
        kinds = [mark.kind for mark in frame.marks]
        is_tied = repeats_a_layer(eqn, kinds)
        is_layers = is_tied or is_over_layers(eqn, kinds)
        of_consts, of_carry, of_xs = sub.split(frame.marks)
        # Only what it carries is made in the loop: constants and stacks are alive beside it.
        marks = [
            *(dataclasses.replace(mark, stays_alive=True) for mark in of_consts),
            *(dataclasses.replace(VALUE, dims=mark.dims) for mark in of_carry),
            *(Mark(m.kind, None if m.dims is None else m.dims[1:], stays_alive=True) for m in of_xs),
        ]
        flat = _written_out(sub.jaxpr)
        opened, _ = jaxprs.open_jaxpr(flat)
        known = self.setting.marked(opened, marks)
        is_stack = is_layers and self.is_stack(sub, known, marks, is_tied=is_tied)
        is_block = self.policy != "own" and is_layers and not is_stack
        for i, atom in enumerate(opened.outvars[: sub.num_carry], sub.num_consts):
            marks[i] = dataclasses.replace(marks[i], dims=known.mark(atom).dims)  # as the body itself leaves it
        times, block = frame.times * sub.length, flat if is_block else None
        of_loop = {"in_loop": not is_layers, "in_stack": is_stack, "block": block}
        return dataclasses.replace(frame, marks=marks, times=times, **of_loop)

    def is_stack(self, sub: Subcall, known: MarkedValues, marks: Sequence[Mark], *, is_tied: bool) -> bool:
        """Tells whether the blocks of a loop over layers are the layers in its body, and not the body as a whole.

        That keeps the inputs of each layer for all turns, and makes one layer's values at a time, not a turn's. So a
        scan over several layers a turn is cut where these are more; layers that are repeated always are.
        """
        body = self.body(sub.jaxpr, marks)
        if is_tied:
            return body.holds_blocks(tied=False)
        made_bytes = sum(num_bytes(var.aval) for var in all_values(known))
        kept_bytes = sub.length * sum(num_bytes(var.aval) for var in sub.split(known.jaxpr.invars)[1])
        num_blocks = len(body.blocks) if 2 * kept_bytes < made_bytes else 0  # the least of any two
        return num_blocks > 1 and num_blocks * kept_bytes < made_bytes and body.sequence.are_most(body.blocks)

    def inner(self, eqn: Any, jaxpr: Any, values: Sequence[Any], frame: RematFrame) -> list[Any]:
        """Evaluates a branch or the body of a loop, which may be a block."""
        if frame.block is None:
            return self.run(jaxpr, values, frame)
        return self.evaluated(eqn, frame.block, values, frame, kind="scan body", is_scanned=True, prevent_cse=False)

    def leave(self, eqn: Any, reason: str, frame: RematFrame) -> None:
        """Notes what is not rematerialized, or not placed."""
        self.log.left.append(Left(where=frame.at(eqn), what=eqn.primitive.name, reason=reason))

    def note(self, eqn: Any, region: RematRegion, function: Callable[..., Any], frame: RematFrame) -> None:
        """Notes a region and its residuals."""
        times = frame.times
        self.log.regions.append((region, times))
        row = RegionRow(where=frame.at(eqn), kind=region.kind, times=times)
        if self.log.measure:
            sizes = {"without": residuals_of(region.plain, region), "kept": residuals_of(function, region)}
            row = dataclasses.replace(row, **sizes)
        same = [i for i, old in enumerate(self.log.rows) if dataclasses.replace(old, times=times) == row]
        if same:
            row = dataclasses.replace(row, times=times + self.log.rows.pop(same[0]).times)
        self.log.rows.append(row)


def named_within(jaxpr: Any) -> list[Any]:
    """Returns the equations that name values, those of inner jaxprs among them."""
    return [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "name"]


def _on_params(frame: RematFrame) -> bool:
    return any(mark.kind == "param" for mark in frame.marks)

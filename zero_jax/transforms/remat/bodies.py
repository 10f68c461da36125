"""A jaxpr in which blocks are looked for: its repeated blocks, and the loops over layers in it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.dims import is_float, narrows
from zero_jax.program import jaxprs
from zero_jax.program.evaluation import flattened
from zero_jax.program.subcalls import equations, scan_of, subcall
from zero_jax.transforms.blocks.search import RepeatedBlock, find_blocks, find_left_out
from zero_jax.transforms.blocks.sequence import EqnSequence
from zero_jax.transforms.remat.regions import RematSetting
from zero_jax.transforms.remat.values import Mark

_LOOPS_AND_REGIONS = ("scan", "remat")
_KEYS = ((2,), (4,))  # the last dim of the data of PRNG keys


class RematBody:
    """A jaxpr without calls, and what is known of its values.

    Args:
      setting: what to do.
      jaxpr: the jaxpr, which may have calls.
      marks: what is known of its inputs.
    """

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

    @property
    def blocks(self) -> list[RepeatedBlock]:
        """The repeated blocks that make anything of activations that is not among their results."""
        return [block for block in self.found if self._makes_more(block)]

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
        return any(is_loop) or bool(self.found if tied else find_blocks(EqnSequence(self.known)))

    def _makes_more(self, block: RepeatedBlock) -> bool:
        eqns = self.jaxpr.eqns[block.start : block.stop]
        num_made = sum(len(eqn.outvars) for eqn in eqns)
        return num_made > len(block.outvars) or any(jaxprs.inner_jaxprs(eqn) for eqn in eqns)


def kind_of(eqn: Any) -> str | None:
    """Returns the kind of `Subcall` of an equation, None for an operation."""
    sub = subcall(eqn)
    return None if sub is None else sub.kind


def is_loop_or_region(eqn: Any) -> bool:
    """Tells whether an equation is a scan or a `jax.checkpoint`."""
    return kind_of(eqn) in _LOOPS_AND_REGIONS


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
    takes_data = any(kind == "value" and not _is_key(x) for kind, x in zip(slices, sliced, strict=True))
    takes_data |= any(narrows(eqn) and eqn.invars[0] in data for eqn in equations(jaxpr))
    carries = any(is_float(x) and x.ndim for x in carried) and "value" in (*consts, *carry)
    return "param" in consts and "param" not in slices and carries and not takes_data


def _is_key(aval: Any) -> bool:
    """Tells whether an array holds PRNG keys, or their data."""
    return jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) or (aval.dtype == jnp.uint32 and aval.shape[-1:] in _KEYS)

"""How a jaxpr uses its params, found without evaluating it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zero_jax.core import jaxprs
from zero_jax.transforms.passthrough import narrows


def last_use(jaxpr: Any, marked: Sequence[bool]) -> Any:
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


def used_whole(jaxpr: Any, var: Any) -> bool:
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
            if any(i < parts.num_consts + parts.num_carry and used_whole(body, body.invars[i]) for i in places):
                return True
        elif name in ("jit", "pjit", "remat2", "checkpoint") and len(inner) == 1:
            body, _ = jaxprs.open_jaxpr(inner[0])
            if any(used_whole(body, body.invars[i]) for i in places):
                return True
        elif name in ("convert_element_type", "transpose", "reshape", "squeeze"):
            same.update(eqn.outvars)
        else:
            return True
    return False

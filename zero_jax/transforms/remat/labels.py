"""What the values of a block are called: by the name that the model gives them, else by what made them."""

from __future__ import annotations

import collections
import os
from typing import Any

from zero_jax.attention import RESIDUALS
from zero_jax.program import jaxprs

INPUT, PRODUCTS, ATTENTION = "input", "products", "attention"
KINDS = (INPUT, PRODUCTS, ATTENTION)


def labels_of(jaxpr: Any) -> dict[Any, str]:
    """Returns the label of each value that an open jaxpr makes.

    That is its `checkpoint_name`, or `primitive@file:line` of the model, with a number where there are several such.
    The results of one equation have one label.
    """
    made = {id(eqn): _label(eqn) for eqn in jaxpr.eqns}
    counts, numbers = collections.Counter(made.values()), collections.Counter[str]()
    labels: dict[Any, str] = {}
    for eqn in jaxpr.eqns:
        label = made[id(eqn)]
        if counts[label] > 1 and "@" in label:
            numbers[label] += 1
            label = f"{label}#{numbers[label]}"
        labels |= dict.fromkeys(eqn.outvars, label)
    return labels


def place_of(eqn: Any) -> str:
    """Returns `file:line` of the model's code that made an equation, '' if that is not known."""
    line, _, _ = jaxprs.model_line(eqn).partition(" ")
    path, _, numbers = line.partition(":")
    return f"{os.path.basename(path)}:{numbers.partition(':')[0]}" if numbers else ""


def selects(selector: str, label: str) -> bool:
    """Tells whether a selector of `Remat.save` or `Remat.offload` is a label, or what several have in common."""
    common = label.partition("#")[0]
    return selector in (label, common, common.partition("@")[2])


def _label(eqn: Any) -> str:
    name = eqn.primitive.name
    if name == "name":
        return eqn.params["name"]
    if name == "zero_attention":
        return RESIDUALS
    return f"{name}@{place_of(eqn)}"

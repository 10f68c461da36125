"""Which leaves rules choose to adapt, and which of their dims are a stack, in and out."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zero_jax.core.close_match import did_you_mean
from zero_jax.core.tree import PyTree, leaf_names, shown

Rules = Sequence[str] | Mapping[str, str]
_DIMS = re.compile(r"s*(i+o+|o+i+)")
_SHOWN = 12  # paths in a message


@dataclasses.dataclass(frozen=True)
class Target:
    """A leaf that is adapted: `labels` has `s` (stack), `i` (in) or `o` (out) for each dim."""

    path: str
    labels: str

    @property
    def num_stack(self) -> int:
        """How many dims are a stack of weights."""
        return self.labels.count("s")

    @property
    def num_first(self) -> int:
        """How many dims the side has that comes first after the stack."""
        return self.labels.count(self.labels[self.num_stack])

    def adapter_dims(self, dims: Sequence[Any], rank: Any, *, has_magnitude: bool) -> dict[str, tuple[Any, ...]]:
        """Returns the dims of an adapter's arrays by those of its weight, sizes or mesh axes, and that of the rank."""
        stack, ins, outs = (
            tuple(dim for dim, label in zip(dims, self.labels, strict=True) if label == side) for side in "sio"
        )
        arrays = {"a": (*stack, *ins, rank), "b": (*stack, rank, *outs)}
        return arrays | {"magnitude": (*stack, *outs)} if has_magnitude else arrays


def check_rules(rules: Any) -> None:
    """Raises `ValueError` for anything but patterns of leaf paths, with the letters of dims or without."""
    if isinstance(rules, str) or not rules or not all(isinstance(rule, str) for rule in rules):
        raise ValueError(f"rules={shown(rules)}: give a list of patterns of leaf paths, as ['layers/*/kernel']")
    for rule, labels in rules.items() if isinstance(rules, Mapping) else ():
        if not isinstance(labels, str) or not _DIMS.fullmatch(labels):
            raise ValueError(
                f"rules: {rule!r} has dims {labels!r}: give a letter for each dim, first those of a stack (s), then "
                "those of in (i) and of out (o), as 'io', 'sio' or 'ioo'"
            )


def matching(what: str, patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Returns the paths that match one of some patterns; raises `ValueError` for a pattern that matches nothing."""
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in names):
            raise _unmatched(what, pattern, names)
    return [name for name in names if any(_matches(name, pattern) for pattern in patterns)]


def _matches(path: str, pattern: str) -> bool:
    # A path matches itself, whatever characters of patterns it has.
    # `fnmatchcase`, because `fnmatch` follows the system: on Windows it ignores case.
    return path == pattern or fnmatch.fnmatchcase(path, pattern)


def find_targets(rules: Rules, params: PyTree, *, trained: Sequence[str]) -> dict[str, Target]:
    """Returns the leaves that rules choose, by path.

    `params` are arrays or `ShapeDtypeStruct`s; no rule is for the leaves whose paths are `trained`.

    Raises:
      ValueError: a rule that matches nothing, a leaf whose dims it does not decide, or two leaves of one path.
    """
    leaves = dict(zip(names := leaf_names(params), jax.tree.leaves(params), strict=True))
    if len(leaves) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"several leaves have the path {twice!r}, by which adapters are kept: rename one")
    by_path: dict[str, Target] = {}
    for rule, labels in rules.items() if isinstance(rules, Mapping) else dict.fromkeys(rules).items():
        matched = [path for path in leaves if _matches(path, rule) and path not in trained]
        if not matched:
            raise _unmatched("rules", rule, leaves)
        targets = [_target(path, leaves[path], rule, labels) for path in matched]
        chosen = [target for target in targets if target is not None]
        if not chosen:
            need = "of two dims" if labels is None else f"with the {len(labels)} dims {labels!r}"
            raise ValueError(
                f"rules: {rule!r} matches no floating leaf {need}: {matched[0]!r} has shape "
                f"{list(leaves[matched[0]].shape)}; give a rule for matrices, with the letters of their dims if there "
                "are more than two, such as 'sio'"
            )
        for target in chosen:
            # Several rules may choose a leaf, if they agree.
            if by_path.setdefault(target.path, target) != target:
                raise ValueError(
                    f"leaf {target.path!r} has dims {by_path[target.path].labels!r} by one rule and "
                    f"{target.labels!r} by {rule!r}: give it one rule"
                )
    return by_path


def _target(path: str, leaf: Any, rule: str, labels: str | None) -> Target | None:
    """Returns the target that a rule makes of a leaf; None for one that a pattern with a `*` passes over."""
    shape, is_float = list(leaf.shape), jnp.issubdtype(leaf.dtype, jnp.floating)
    if labels is None and len(shape) > 2 and is_float:
        example = "sio" if len(shape) == 3 else "i" * (len(shape) - 1) + "o"
        raise ValueError(
            f"leaf {path!r} of shape {shape} has {len(shape)} dims, and the rule {rule!r} does not say which are in "
            f"and which out: give their letters, as rules={{{rule!r}: {example!r}}} (s: a stack of weights, i: in, "
            "o: out)"
        )
    if is_float and len(shape) == len(labels or "io") and leaf.size:
        return Target(path, labels or "io")
    if any(x in rule for x in "*?["):
        return None
    raise ValueError(
        f"leaf {path!r} of shape {shape} and dtype {leaf.dtype} cannot be adapted as {labels or 'io'!r}: give a "
        "floating leaf of two dims that has elements, or the letters of its dims"
    )


def _unmatched(what: str, pattern: str, names: Iterable[str]) -> ValueError:
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    # The nearest at any distance: also one that is far shows what paths look like.
    hint = did_you_mean(pattern, names, "the nearest is {!r}", cutoff=0.0) or "there are none"
    paths = f"; the paths are {', '.join(names[:_SHOWN])}{more}" if len(names) > 1 else ""
    is_regex = re.search(r"[()|+^$\\]|\.\*", pattern)
    kind = " (a pattern as of file names, with *, ? and [ab], and no regular expression)" if is_regex else ""
    return ValueError(f"{what}: {pattern!r}{kind} matches the path of no leaf that is left: {hint}{paths}")

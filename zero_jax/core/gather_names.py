"""The name scopes around the gathers of params, by which a compiled program's collectives are told apart.

XLA keeps the name stack of what an operation was made from in its `op_name`, so that the path of a leaf which is put
there by `gather_scope` is found again, by `gathered_path`, on the all-gather and on the reduce-scatter of its gradient.
"""

import re
from contextlib import AbstractContextManager
from typing import Any

import jax

# A `/` separates scopes and a `(` transforms: neither may stand in a name.
_SCOPE = re.compile(r"gather:([^/()\"]+)")


def gather_scope(path: str) -> AbstractContextManager[Any]:
    """Returns the scope in which the param of a path is gathered."""
    return jax.named_scope(f"gather:{escaped(path)}")


def gathered_path(op_name: str) -> str | None:
    """Returns the path in the innermost gather scope of an `op_name`, escaped, or None."""
    found = _SCOPE.findall(op_name)
    return found[-1] if found else None


def escaped(path: str) -> str:
    """Returns a leaf's path `a/b/c` as it stands in a scope, `a.b.c`."""
    return re.sub(r"[^\w.:+ -]", ".", path)

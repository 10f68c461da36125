"""The name scopes around the gathers of params, by which a compiled program's collectives are identified.

XLA keeps the name stack of what an operation was made from in its `op_name`: `zero_jax.hlo.gathered_path` reads the
path of a leaf, which `gather_scope` puts there, off the all-gather and the reduce-scatter of its gradient.
"""

import contextlib
import re
from contextlib import AbstractContextManager
from typing import Any

import jax

# The scope of what is moved for the update, which the instructions around it do not say: `zero_jax.hlo` reads it.
UPDATE = "of_update"
# The scope of activations that are sent to the shards of params, and of what comes home.
SENT = "sent_to_shards"
# A path that begins so continues that of the scope `params_scope` around it.
RELATIVE = "::"


def params_scope(path: str) -> AbstractContextManager[Any]:
    """Returns the scope of a region whose params all have paths that begin with this one; none for an empty path.

    Within it their paths are relative, so that the regions of equal layers are equal, and JAX traces one of them.
    """
    return jax.named_scope(f"params:{escaped(path)}") if path else contextlib.nullcontext()


def gather_scope(path: str) -> AbstractContextManager[Any]:
    """Returns the scope in which the param of a path is gathered."""
    return jax.named_scope(f"gather:{escaped(path)}")


def escaped(path: str) -> str:
    """Returns a leaf's path `a/b/c` as it stands in a scope, `a.b.c`: a `/` separates scopes and a `(` transforms."""
    return re.sub(r"[^\w.:+ -]", ".", path)

"""What an instruction's `op_name` says: the phase of the step that it belongs to, and the param that it gathers.

XLA keeps the name stack of the operation that an instruction was made from in its `op_name`.
"""

import re

# `zero_jax.core.gather_names.gather_scope` puts the path of a param into the name stack like this.
_GATHER_SCOPE = re.compile(r"gather:([^/()\"]+)")
# Where its path begins with two colons, it continues that of `params_scope`.
_PARAMS_SCOPE = re.compile(r"params:([^/()\"]+)")


def phase_of(op_name: str) -> str:
    """Returns `forward`, `backward`, `update`, or '' for no name: JAX's name stacks have jvp( and transpose( in."""
    if not op_name:
        return ""
    return "backward" if "transpose(" in op_name else "forward" if "jvp(" in op_name else "update"


def gathered_path(op_name: str) -> str | None:
    """Returns the path in the innermost gather scope of an `op_name`, escaped, or None."""
    paths = _GATHER_SCOPE.findall(op_name)
    if paths and paths[-1].startswith("::"):
        return "".join(_PARAMS_SCOPE.findall(op_name)[-1:]) + paths[-1][2:]
    return paths[-1] if paths else None

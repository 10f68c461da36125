"""What opcodes of HLO do: the only tables of them.

An asynchronous operation is printed in parts, such as `copy-start`, `copy-update` and `copy-done`, of the base `copy`.
"""

import functools

KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast"
COLLECTIVES = frozenset(KINDS.split("|"))
# Operations that run computations of their own; each `-start` may, too.
_CALLS = frozenset({"while", "fusion", "call", "conditional", "custom-call"})
# The result has the elements of the first operand, in another dtype, shape, layout or place.
MOVES = frozenset({"bitcast", "convert", "copy", "reshape", "transpose"})
# The result is the first operand: nothing is written.
FORWARDS = frozenset({"bitcast", "opt-barrier", "domain", "add-dependency"})
# The result may be written over the first operand, or over each operand.
UPDATES = frozenset({"dynamic-update-slice", "scatter"})
IN_PLACE = frozenset({*UPDATES, "all-reduce", "all-reduce-start", "sort"})
# Of the first operand a part is read.
SLICES = frozenset({"slice", "dynamic-slice", "gather"})
# In parts they are copies between memories, which engines of their own make.
COPIES = frozenset({"copy", "slice", "dynamic-slice", "dynamic-update-slice"})
# They do nothing themselves: names for parts of values, and what the schedule or a called computation accounts for.
FREE = frozenset(
    "tuple get-tuple-element bitcast parameter constant after-all add-dependency opt-barrier partition-id replica-id "
    "while conditional call send recv".split()
)
ELEMENTWISE = frozenset(
    "abs add and atan2 bitcast cbrt ceil clamp compare complex convert cosine divide erf exponential "
    "exponential-minus-one floor imag is-finite log log-plus-one logistic maximum minimum multiply negate not or power "
    "real reduce-precision remainder round-nearest-afz round-nearest-even rsqrt select shift-left "
    "shift-right-arithmetic shift-right-logical sign sine sqrt subtract tan tanh tuple xor".split()
)


@functools.cache
def split_opcode(opcode: str) -> tuple[str, str]:
    """Returns the base of an opcode, and which part it is: `start`, `update`, `done`, or '' for the whole operation."""
    base, _, part = opcode.rpartition("-")
    return (base, part) if part in ("start", "update", "done") else (opcode, "")


def calls(opcode: str) -> bool:
    """Returns whether an instruction runs the computations that it names, rather than reducing or sorting by them."""
    return opcode in _CALLS or split_opcode(opcode)[1] == "start"

"""The text of a compiled XLA program as data; imports neither jax nor zero_jax.

`Program` parses the text into computations and instructions. From it `collectives` reads what is sent between whom and
how often, `peak` the buffers that are alive at the peak of memory, `cycles` and `roofline` the cost of an instruction,
and `play` the schedule: which collectives hide behind computation. Names and shapes are read here, and only here.
"""

from zero_jax.hlo.cost import cycles, dtypes_and_dims, roofline
from zero_jax.hlo.heap_layout import HeapLayout, layout_options, read_layout
from zero_jax.hlo.layout import Array, arrays, parse_shape
from zero_jax.hlo.memory import Buffer, Heap, peak
from zero_jax.hlo.op_names import gathered_path, phase_of
from zero_jax.hlo.program import KINDS, Instruction, Program, integers
from zero_jax.hlo.schedule import Timeline, play
from zero_jax.hlo.traffic import Collective, by_kind, collectives, sent_bytes

__all__ = [
    "KINDS",
    "Array",
    "Buffer",
    "Collective",
    "Heap",
    "HeapLayout",
    "Instruction",
    "Program",
    "Timeline",
    "arrays",
    "by_kind",
    "collectives",
    "cycles",
    "dtypes_and_dims",
    "gathered_path",
    "integers",
    "layout_options",
    "parse_shape",
    "peak",
    "phase_of",
    "play",
    "read_layout",
    "roofline",
    "sent_bytes",
]

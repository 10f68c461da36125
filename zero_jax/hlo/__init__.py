"""The text of a compiled XLA program as data; imports neither jax nor zero_jax.

`parse` turns the text into a `Program` of computations and instructions, once. From it `collectives` lists what is
sent, how often and between which devices, and `network_transfers` what goes to other slices; `peak` the buffers that
are alive at the peak of memory; `cycles` and `roofline` the cost of an instruction, kernels included; `play` which
collectives overlap with computation; and `Phases` the pass that an instruction belongs to. Names and shapes are parsed
here, and only here.
"""

from zero_jax.hlo.cost import cycles, roofline
from zero_jax.hlo.kernels import Work
from zero_jax.hlo.layout import Array, Shape, arrays, minor_to_major, parse_shape, tile_sizes
from zero_jax.hlo.memory import Buffer, Heap, peak
from zero_jax.hlo.op_names import GRAD_OF_GATHER, Phases, gathered_path, phase_of
from zero_jax.hlo.opcodes import COLLECTIVES, KINDS, split_opcode
from zero_jax.hlo.program import Instruction, Program, integers, parse, read_aliases
from zero_jax.hlo.schedule import Costs, own_links, play
from zero_jax.hlo.scheduled import HeapLayout, layout_options, read_layout, read_scheduled
from zero_jax.hlo.traffic import Collective, collectives, groups_of, sent_bytes
from zero_jax.hlo.transfers import HOST_SPACE, NetworkTransfer, host_transfers, network_transfers
from zero_jax.hlo.windows import Window, read_windows

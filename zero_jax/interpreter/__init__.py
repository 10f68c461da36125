"""Runs the text of a compiled XLA program on the host, all of its devices in lockstep, in NumPy.

`Interpreter(program).run(arguments)` executes the entry computation of an `hlo.Program`. A value is a NumPy array
`[devices, *dims]`, or `[1, *dims]` where all devices have the same; a tuple is a tuple of values. `operations.py` has a
rule for each opcode. Collectives move data along the first dim.
An opcode, custom call or attribute that is not known raises `NotInterpretable`: nothing is guessed.
"""

from zero_jax.interpreter.interpreter import Interpreter
from zero_jax.interpreter.values import NotInterpretable

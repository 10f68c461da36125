"""Runs train steps that were compiled for hardware that is not there, and compares their numbers with one device.

`verify` compiles the step for a topology in another process, executes the compiled program on the host
(`execution`, on the `interpreter`), makes the same step on one device in plain optax (`reference`), and returns a
`Verification`: the difference of each leaf beside what rounding explains.
"""

from zero_jax.verification.verify import LeafDifference, Verification, verify, verify_job

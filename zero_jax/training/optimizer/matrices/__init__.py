"""Matrix computations of an optimizer's update, on whole matrices that are dealt out to the devices.

Muon, Shampoo and their like multiply and factorize matrices. On sharded matrices XLA sends partial products in every
iteration, and computes the rest on all devices alike. Here the equations between the first and the last such operation
on a leaf are one region (`regions.py`). Regions that compute the same function of matrices of one shape run together,
on a stack of all their matrices (`dealing.py`): an all-to-all brings each device some of them whole, and one brings the
results back to the shards. `MatrixProgram` has an update's groups of regions, those in its branches too, and evaluates
the update by them (`program.py`).
"""

from zero_jax.training.optimizer.matrices.dealing import Dealing
from zero_jax.training.optimizer.matrices.program import OF_MATRICES, MatrixProgram

__all__ = ["OF_MATRICES", "Dealing", "MatrixProgram"]

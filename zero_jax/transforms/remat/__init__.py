"""Rematerialization of a loss function: its blocks are found and recomputed in the backward pass.

`transform` is the entry; `walk` finds scans and repeated blocks, `regions` wraps each in a `jax.checkpoint`, `values`
and `policies` choose which residuals are saved and how they are sharded. A new policy is an entry of `policies._KEPT`
and of `regions._KEEPS`.
"""

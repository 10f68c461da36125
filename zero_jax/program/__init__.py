"""A function as data: its jaxpr, traced once, and what passes over it stand on.

`loss` has a function's program for arguments of some shapes and the passes over it (`LossProgram`, `Traced`). A pass
that evaluates a jaxpr stands on `walk`; what it has to know of each value is derived by a `dataflow` analysis. Both
know from `subcalls` which equations run other jaxprs. `evaluation` evaluates jaxprs, and `jaxprs` is the only module
that knows of JAX's internals, by release.
"""

"""Attention cores of a traced function, replaced by a fused kernel where that is provably the same function.

`transform` is the entry: `walk` evaluates the jaxpr, loops and regions included. `find` finds cores by their shape,
`prove` derives what each value of a jaxpr is (`scores`, `masks`, `static` on the dims of `dims`), and `core` makes the
arguments of the kernel.
"""

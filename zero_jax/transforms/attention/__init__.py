"""Attention cores of a traced function, replaced by a fused kernel where that is provably the same function.

`transform` is the entry. `walk` finds the cores of a jaxpr, loops and regions included, and evaluates them by a kernel.
`prove` derives what each value is: a table of what depends on no input (`tables`), logits and weights (`followed`, by
the rules of `softmax`) under masks, on the `dims`. `core` makes the arguments of the kernel.
"""

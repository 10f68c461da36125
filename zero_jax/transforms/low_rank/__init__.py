"""Low-rank adaptation: frozen weights, with what is added to them, made at each use of a function's jaxpr.

`weight` has the frozen weight that is still to be made, and the operations that take its factors one by one; `walk`
evaluates the jaxpr. `evaluate_adapted` is the entry.
"""

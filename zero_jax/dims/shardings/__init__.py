"""The sharding of every value of a jaxpr by those of its inputs, with the collectives that XLA will insert: estimates.

`propagate` walks the jaxpr, `rules` have what XLA does at an operation, `sharding` counts the bytes that are alive.
"""

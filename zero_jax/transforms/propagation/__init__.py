"""Sharding propagation through a jaxpr, for estimates: which collectives XLA will insert, what is alive."""

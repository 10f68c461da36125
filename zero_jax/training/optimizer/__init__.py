"""Calls of an optimizer: the extra arguments of its update, and the params that it freezes."""

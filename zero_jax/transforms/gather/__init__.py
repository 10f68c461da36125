"""Gather-on-use: each sharded param is gathered where a loss function uses it, and its gradient reduce-scattered.

`transform` is the entry: it traces the function, and `walk` evaluates the jaxpr with the sharded params deferred
(`deferred`). The other modules are the cases of that walk: lookups, products with weights of many dims, casts, copies
on each device, products whose param stays while activations are sent to it.
"""

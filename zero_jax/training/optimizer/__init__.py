"""The optimizer's update: `update` calls it, `frozen` reads from its trace what it leaves alone.

`offload` says which leaves are in host memory; `streaming` evaluates the update of these a chunk at a time (`chunks`,
on arrays that are `rows`).
"""

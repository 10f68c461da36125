"""Which dim of which leaf is sharded over which mesh axes.

A mesh (`mesh`, on hardware of `topology`) and the stage table (`stages`) go into `rules`, which give each leaf of a
train state its spec; `torus` has the steps between a shard and the gathered param, `precision` the dtypes. Only
`stages` reads the number of a stage. Others import from the modules of this package.
"""

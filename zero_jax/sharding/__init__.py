"""Which dim of which leaf is sharded over which mesh axes.

From a mesh (`mesh`, on hardware of `topology`, its devices in the order of `device_order`) and the stage table
(`stages`), `rules` compute the spec of each leaf of a train state. `chains` has the steps of gathers and
reduce-scatters and moves arrays through them, `precision` has the dtypes. Only `stages` reads the number of a stage.
Others import from the modules of this package.
"""

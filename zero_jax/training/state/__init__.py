"""The train state: sharded initialization, shardings, checks.

`placement` says how each group of a state is sharded, from params and config: all else asks it. `making` makes a state
by it, `shardings` has those of a user's own state; `matrix_updates` says where an update of whole matrices runs.
"""

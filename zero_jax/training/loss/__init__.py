"""The loss of a step: the user's function in one signature, its program, and the passes over it in their order."""

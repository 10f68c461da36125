"""The repeated blocks (layers) of a Python loop, found in the jaxpr that it leaves."""

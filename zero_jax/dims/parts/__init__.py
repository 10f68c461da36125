"""How a value that is computed from a batch relates to those computed from parts of it: exact, or not known.

`comparison` walks two traces of one function, on a batch and on a part of it; `rules` relate the results of an
operation as the records of `primitives` say.
"""

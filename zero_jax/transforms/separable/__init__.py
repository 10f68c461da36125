"""Whether a loss of a batch is the mean of its losses on parts of the batch.

`decision` compares two traces, on a batch and on a part; `walk` relates each value of one to the other, by the rules of
`rules` and `lookups`. A primitive without an exact rule counts as mixing examples.
"""

"""Pipeline parallelism for a loss that knows nothing of it: its scans over layers become loops over ticks.

`cut` says which scans can be stages, and what each of their operands is to a microbatch; `body` makes the layer of a
microbatch; `loop` runs a loop over ticks; `transform` puts such loops into the program of a loss, and reports them.
docs/pipeline.md shows what each costs.
"""

"""Pipeline parallelism for a loss that knows nothing of it: its scans over layers become loops over ticks.

`turns` finds the equal layers of a Python loop, and `rolled` makes a scan of them. `scans` finds scans over layers, and
lets those that read params by a number, or in reverse, take them in order; `convolutions` makes products of
convolutions. `cut` says which scans can be stages, and what each of their operands is to a microbatch; `body` makes the
layer of a microbatch. `loop` says what stages do in a tick (`Ticks`), for any number of groups of layers, and runs the
loop whose ticks are all forward, the gradient being taken through it. For 1F1B there is
`interleaved`: `microbatch` says what each value is to a microbatch, `by_microbatch` makes one equation of the layers
and of what is behind them, and `ticks` has the loop that takes its gradient, of layers whose two passes are apart
(`stage_passes`). `transform` puts such loops into the program of a loss, one after another on CPUs (`waiting`), and
reports them. Tables that examples are looked up in have a copy for each stage (`copied_tables`).

docs/pipeline.md shows what each costs.
"""

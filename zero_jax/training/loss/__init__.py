"""The loss of a step: the user's function in one signature, its program, and the passes over it in their order.

`function` has the signature, `program` the `StepLoss` of passes. What is known of a loss before anything is compiled is
in `trace` (memory, traffic, operations, stages), `param_uses` (what moves of params and their gradients) and
`residuals` (what blocks keep, by `remat="auto"`).
"""

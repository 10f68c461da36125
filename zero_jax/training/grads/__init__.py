"""Gradients of a batch: accumulated over microbatches and devices, sent quantized, and those of some params alone.

`plan` says where they are reduced across devices: `Placement.grad_plan` is what the config asks for, and `judge`
(`choice`) what the loss allows. By the plan `step_grads` makes the function of loss and gradients of a part of the
batch, and the `Accumulator` calls it on all parts and adds up; `combined` makes the aux of the batch of that of parts.
`norm` has the global norm that gradients are clipped by.
"""

"""What every other package stands on: trees, checks of arguments, JAX's internals, files that can be trusted.

Nothing here knows of ZeRO. `jaxprs` is the one module that depends on the JAX release; `subcalls` lists the equations
that run other jaxprs, and `passes` runs jaxprs on what is known of their values. `tree` names leaves by their
paths, `signatures` and `field_checks` refuse bad arguments with errors that name a remedy, `agreement` makes the
processes of a run agree. Others import from the modules of this package.
"""

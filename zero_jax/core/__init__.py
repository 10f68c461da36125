"""What every other package stands on: trees, checks of arguments, JAX's internals, files that can be trusted.

Nothing here knows of ZeRO. `tree` names leaves by their paths and looks them up by patterns, `signatures` and
`field_checks` refuse bad arguments with errors that name a remedy, `agreement` makes the processes of a run agree.
Others import from the modules of this package.
"""

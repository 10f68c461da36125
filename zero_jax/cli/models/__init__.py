"""The models that the commands know: `presets` of the reference models, a checkpoint of the `hub`, the user's `own`.

`options` adds their command-line options and makes the model of what was given; `adapters` puts low-rank adapters on
it.
"""

"""The models that the commands know, by their options.

`presets` has the reference models, by name or by a checkpoint of the hub, `own` those of the user's functions;
`planned` makes either one to plan for, `adapters` puts low-rank adapters on a preset.
"""

"""Checkpoints: save in the background, reload anywhere, describe.

`Checkpointer` saves, `restore` reloads, `describe` tells what there is, without devices.
"""

from zero_jax.checkpoint.description import Description, describe
from zero_jax.checkpoint.files import latest_step, list_steps
from zero_jax.checkpoint.record import CheckpointError
from zero_jax.checkpoint.restoring import Restored, restore
from zero_jax.checkpoint.saving import CheckpointConfig, Checkpointer

__all__ = [
    "CheckpointConfig",
    "CheckpointError",
    "Checkpointer",
    "Description",
    "Restored",
    "describe",
    "latest_step",
    "list_steps",
    "restore",
]

"""Checkpoints: save in the background, reload anywhere, describe.

`Checkpointer` saves, `restore` reloads, `describe` tells what there is, without devices.
"""

from zero_jax.checkpoint_files import latest_step, list_steps
from zero_jax.checkpoint_record import CheckpointError
from zero_jax.checkpoint_report import Description, describe
from zero_jax.checkpoint_restore import Restored, restore
from zero_jax.checkpoint_save import CheckpointConfig, Checkpointer

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

"""Checkpoints: save in the background, reload anywhere, describe, export.

`Checkpointer` saves: a train state is encoded the same way for every stage, mesh and precision (`saved_state`), orbax
writes its arrays, and a record with fingerprints completes the step. `restore` reads each device's shards and verifies
them, `describe` lists what a checkpoint has without devices, `export` writes safetensors.
"""

from zero_jax.checkpoint.description import Description, describe
from zero_jax.checkpoint.exporting import SavedParams, export, open_params, parse_size
from zero_jax.checkpoint.finding import (
    best_step,
    check_outside,
    find_checkpoint,
    find_restorable,
    latest_step,
    list_step_folders,
    list_steps,
)
from zero_jax.checkpoint.record import CheckpointError, resolve_folder, step_path
from zero_jax.checkpoint.restoring import Restored, restore
from zero_jax.checkpoint.saving import LOCK, CheckpointConfig, Checkpointer

__all__ = [
    "LOCK",
    "CheckpointConfig",
    "CheckpointError",
    "Checkpointer",
    "Description",
    "Restored",
    "SavedParams",
    "best_step",
    "check_outside",
    "describe",
    "export",
    "find_checkpoint",
    "find_restorable",
    "latest_step",
    "list_step_folders",
    "list_steps",
    "open_params",
    "parse_size",
    "resolve_folder",
    "restore",
    "step_path",
]

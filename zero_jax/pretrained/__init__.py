"""Checkpoints of the Hugging Face hub, in and out: folders with `config.json` and safetensors files.

`folder` checks a folder (config, index, headers) without reading tensors. `mapping` says which slices of which tensors
make a slice of a param, for the decoders of `models/` or by the user's own names. `loading` reads each process's shards
alone, `saving` writes a state, or a checkpoint of a run, back in the same names.
"""

from zero_jax.models.huggingface import TensorName
from zero_jax.pretrained.loading import HFModel, Pretrained, load_hf, load_tensors, open_hf
from zero_jax.pretrained.saving import SavedHF, export_hf, save_hf, save_tensors

# For the command line alone.
from zero_jax.pretrained.folder import TOKENIZER as TOKENIZER  # isort: skip
from zero_jax.pretrained.folder import copy_companions as copy_companions  # isort: skip
from zero_jax.pretrained.folder import run_companions as run_companions  # isort: skip
from zero_jax.pretrained.loading import attend as attend  # isort: skip
from zero_jax.pretrained.loading import read_decoder as read_decoder  # isort: skip
from zero_jax.pretrained.saving import write_config as write_config  # isort: skip

__all__ = [
    "HFModel",
    "Pretrained",
    "SavedHF",
    "TensorName",
    "export_hf",
    "load_hf",
    "load_tensors",
    "open_hf",
    "save_hf",
    "save_tensors",
]

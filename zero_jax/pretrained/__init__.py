"""Checkpoints of the Hugging Face hub, in and out: folders with `config.json` and safetensors files.

`folder` checks a folder (config, index, headers) without reading tensors. `mapping` says which slices of which tensors
make a slice of a param, for the decoders of `models/` or by the user's own names. `loading` reads each process's shards
alone, `saving` writes a state, or a checkpoint of a run, back in the same names.
"""

from zero_jax.models.tensor_name import TensorName
from zero_jax.pretrained.folder import TOKENIZER, copy_companions, run_companions
from zero_jax.pretrained.loading import HFModel, Pretrained, attend, load_hf, load_tensors, open_hf, read_decoder
from zero_jax.pretrained.saving import SavedHF, export_hf, save_hf, save_tensors, write_config

# Without the names that only the command line needs.
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

"""Checkpoints of the Hugging Face hub, in and out: folders with `config.json` and safetensors files.

`folder` checks a folder (config, index, headers) without reading tensors. `mapping` says which slices of which tensors
make a slice of a param, for the decoders of `models/` or by the user's own names. `loading` reads each process's shards
alone, `saving` writes a state back in the same names, `exporting` does so with a checkpoint of a run.
"""

from zero_jax.models.huggingface import TensorName
from zero_jax.pretrained.exporting import export_hf
from zero_jax.pretrained.folder import TOKENIZER, copy_companions, run_companions
from zero_jax.pretrained.loading import HFModel, Pretrained, attend, load_hf, load_tensors, open_hf, read_decoder
from zero_jax.pretrained.saving import SavedHF, save_hf, save_tensors, write_config

__all__ = [
    "TOKENIZER",
    "HFModel",
    "Pretrained",
    "SavedHF",
    "TensorName",
    "attend",
    "copy_companions",
    "export_hf",
    "load_hf",
    "load_tensors",
    "open_hf",
    "read_decoder",
    "run_companions",
    "save_hf",
    "save_tensors",
    "write_config",
]

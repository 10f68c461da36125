"""Checkpoints of the Hugging Face hub, in and out: folders with `config.json` and safetensors files.

`folder` checks a folder (config, index, headers) without reading tensors. `mapping` says which slices of which tensors
make a slice of a param, for the decoders of `models/` or by the user's own names. `loading` reads each process's shards
alone, `saving` writes a state, or a checkpoint of a run, back in the same names. `adapters` reads and writes low-rank
adapters as the library PEFT has them.
"""

from zero_jax.models.tensor_name import TensorName
from zero_jax.pretrained.adapters import ALL_LINEAR, LoadedAdapters, export_peft, load_peft, lora_rules, save_peft
from zero_jax.pretrained.folder import TOKENIZER, copy_companions, run_companions
from zero_jax.pretrained.loading import HFModel, Pretrained, attend, load_hf, load_tensors, open_hf, read_decoder
from zero_jax.pretrained.saving import SavedHF, export_hf, save_hf, save_tensors, write_config

# Without the names that only the command line needs.
__all__ = [
    "HFModel",
    "LoadedAdapters",
    "Pretrained",
    "SavedHF",
    "TensorName",
    "export_hf",
    "load_hf",
    "load_peft",
    "load_tensors",
    "lora_rules",
    "open_hf",
    "save_hf",
    "save_peft",
    "save_tensors",
]

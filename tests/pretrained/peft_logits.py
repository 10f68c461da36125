"""Writes `peft_logits.npz`: adapters as the library PEFT saves them, and what its models answer with them.

Run it where `peft`, `transformers` and `torch` are installed, in this folder and that of `transformers_logits.py`:
`PYTHONPATH=.:tests/models python tests/pretrained/peft_logits.py`.
"""

import json
import pathlib
import tempfile
from typing import Any

import numpy as np
import transformers_logits
from transformers_logits import CONFIGS

PATH = pathlib.Path(__file__).with_suffix(".npz")
# By name: the base, and the settings of `peft.LoraConfig`.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}),
    "dora": (
        "llama",
        {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", "use_dora": True, "modules_to_save": ["lm_head"]},
    ),
    "rslora": ("qwen2", {"r": 4, "lora_alpha": 2, "use_rslora": True, "target_modules": r".*\.(gate|down|o)_proj"}),
    "table": ("qwen3", {"r": 2, "lora_alpha": 4, "target_modules": ["embed_tokens", "k_proj"]}),
}


def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the values of a tensor of adapters, which its name decides."""
    values = transformers_logits.tensor(name, shape)
    return np.abs(values) + 0.5 if "magnitude" in name else values


def base_tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the tensors of a base by name."""
    from zero_jax.models import hub_families, huggingface

    shape = huggingface.decoder_config(config)
    tensors = {}
    for path, name in hub_families.tensor_names(shape, model_type=config["model_type"]).items():
        leaf = shape.shapes[path]
        for index in np.ndindex(*leaf[: name.num_indices]):
            values = leaf[name.num_indices :]
            key = name.of(index)
            tensors[key] = transformers_logits.tensor(key, values[::-1] if name.is_transposed else values)
    return tensors


def write_base(folder: pathlib.Path, config: dict[str, Any]) -> pathlib.Path:
    """Writes the folder of a base."""
    import safetensors.numpy

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(base_tensors(config), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def answer(base: pathlib.Path, adapters: pathlib.Path) -> np.ndarray:
    """Returns the logits of PEFT's model of two folders."""
    import peft  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return peft.PeftModel.from_pretrained(model, adapters)(
            torch.tensor(transformers_logits.tokens())
        ).logits.numpy()


def _case(name: str, folder: pathlib.Path) -> dict[str, np.ndarray]:
    import peft  # pyright: ignore[reportMissingImports]
    import safetensors.numpy
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    base, settings = CASES[name]
    write_base(folder / "base", CONFIGS[base])
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    adapted.save_pretrained(folder / "adapters", save_embedding_layers=False)
    file = folder / "adapters/adapter_model.safetensors"
    tensors = {key: tensor(key, x.shape) for key, x in safetensors.numpy.load_file(file).items()}
    safetensors.numpy.save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "adapters/adapter_config.json").read_text())
    config["base_model_name_or_path"] = None
    shapes = {key: x.shape for key, x in tensors.items()}
    told = np.array(json.dumps({"config": config, "shapes": shapes}))
    return {name: answer(folder / "base", folder / "adapters"), f"{name}/told": told}


if __name__ == "__main__":
    answers: dict[str, Any] = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as place:
            answers |= _case(case, pathlib.Path(place))
    np.savez_compressed(PATH, **answers)
    print(f"wrote {PATH}")

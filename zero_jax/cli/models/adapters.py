"""Options for fine-tuning with adapters: `--lora` and those beside it."""

import argparse
import dataclasses
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import optax
from jax.sharding import AbstractMesh

from zero_jax.checkpoint import find_restorable, restore
from zero_jax.cli.models.presets import ModelConfig, init_function, preset_config
from zero_jax.cli.options import field_values, log_line
from zero_jax.core.field_checks import check_fields
from zero_jax.core.tree import PyTree, key_shape, leaf_names
from zero_jax.core.variables import Variables
from zero_jax.finetuning import Lora
from zero_jax.models.decoder_config import DECODERS, DecoderConfig
from zero_jax.pretrained import ALL_LINEAR, SavedHF, export_peft, load_peft, lora_rules
from zero_jax.sharding.mesh import make_mesh
from zero_jax.trainer import Model
from zero_jax.training import ZeroConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The adapters of a run.

    Attributes:
      lora: train low-rank adapters of these leaves alone, separated by commas: modules of the hub's models as
        `q_proj,v_proj`, `all-linear` for all matrices of the layers, or patterns of paths as `blocks/query` (with the
        letters of its dims where it needs them, `layers/*/kernel=io`); `zero-jax inspect --model` lists both.
      lora_from: a folder of adapters of the library PEFT to begin with, which says which leaves, rank, alpha and DoRA.
      lora_rank: the rank of an update.
      lora_alpha: updates are scaled by lora_alpha / lora_rank.
      lora_dora: also learn the norm of each output (DoRA).
      lora_base: how the frozen params are stored; int8, nf4 (QLoRA) and nf4_double (whose scales are quantized too) are
        for the adapted ones, the others are then in bfloat16.
      lora_train: patterns of leaves that are trained as they are, separated by commas.
    """

    lora: str | None = None
    lora_from: str | None = None
    lora_rank: int = 8
    lora_alpha: float = 16.0
    lora_dora: bool = False
    lora_base: Literal["own", "bfloat16", "int8", "nf4", "nf4_double"] = "bfloat16"
    lora_train: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, lowest={"lora_rank": 1})
        if self.lora_alpha <= 0:
            raise ValueError(f"lora_alpha={self.lora_alpha}: give a positive number, such as twice the rank")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChosenLora:
    """The adapters that the options ask for."""

    lora: Lora  # the adapters' settings
    config: LoraConfig  # the options that say the same without a folder of PEFT
    adapters: dict[str, Any] | None = None  # the arrays that they begin with, from a folder of PEFT, or None


def choose_lora(options: argparse.Namespace, shape: ModelConfig, params: PyTree) -> ChosenLora | None:
    """Returns the adapters that the options ask for, None for none; `params` are the shapes of the model's."""
    config = LoraConfig(**field_values(LoraConfig, options))
    if config.lora_from is not None:
        return _from_folder(config, shape)
    if config.lora is None:
        if config != LoraConfig():
            raise ValueError("--lora-rank and its like need --lora: give the patterns of the leaves to adapt")
        return None
    lora = Lora(
        rules=_rules(config.lora, shape, leaf_names(params)),
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        dora=config.lora_dora,
        base=config.lora_base,
        train=tuple((config.lora_train or "").replace(",", " ").split()),
    )
    lora.targets(params)  # raises for patterns that match nothing
    return ChosenLora(lora=lora, config=config)


def _from_folder(config: LoraConfig, shape: ModelConfig) -> ChosenLora:
    folder, base = config.lora_from, config.lora_base
    if config != LoraConfig(lora_from=folder, lora_base=base):
        raise ValueError(
            f"--lora-from {folder} says which leaves are adapted, and how: of its like give --lora-base alone"
        )
    if not isinstance(shape, DecoderConfig):
        raise ValueError(f"--lora-from {folder} is for decoders, such as those of --from-hf: give --lora")
    loaded = load_peft(str(folder), shape, base=base)
    lora = loaded.lora
    assert isinstance(lora.rules, Mapping)
    equal = LoraConfig(
        lora=",".join(f"{path}={dims}" for path, dims in lora.rules.items()),
        lora_rank=lora.rank,
        lora_alpha=lora.alpha,
        lora_dora=lora.dora,
        lora_base=base,
        lora_train=",".join(lora.train) or None,
    )
    return ChosenLora(lora=lora, config=equal, adapters=loaded.adapters)


def adapted_model(model: Model, options: argparse.Namespace) -> Model:
    """Returns a model of adapters if the options ask for it, else itself; options replace a folder of PEFT's."""
    init_fn = model.init_fn
    shapes = jax.eval_shape(init_fn, key_shape())
    chosen = choose_lora(options, model.config, shapes)
    if chosen is None:
        return model
    if chosen.adapters is not None and model.load_fn is None and getattr(options, "TrainConfig.init_from") is None:
        raise ValueError("--lora-from needs the model that its adapters are for: give --from-hf, or --init-from")
    # The run's config file names what was trained, as the folder of PEFT may be gone when it is exported.
    for name, value in vars(chosen.config).items():
        setattr(options, f"LoraConfig.{name}", value)
    lora = chosen.lora

    def init_adapters(key: jax.Array) -> Variables:
        return lora.init(init_fn(key), key)

    split = jax.jit(lora.init)

    def adapt(params: PyTree, key: jax.Array) -> Variables:
        variables = split(params, key)
        return variables if chosen.adapters is None else dataclasses.replace(variables, params=chosen.adapters)

    # For its errors, before any data is read.
    jax.eval_shape(init_adapters, key_shape())
    specs = model.param_specs
    if specs is not None:
        mesh: Any = AbstractMesh((getattr(options, "TrainConfig.model_axis"),), ("model",))
        specs = lora.param_specs(shapes, specs, mesh=mesh)
    return dataclasses.replace(
        model,
        init_fn=init_adapters,
        loss_fn=lora.loss_fn(model.loss_fn),
        # The model's own takes its params, and these are adapters.
        generate_fn=None,
        param_specs=specs,
        base_init_fn=init_fn,
        base_param_specs=model.param_specs,
        adapt_fn=adapt,
        adapters=chosen.config,
    )


def export_adapters(path: str, out: str, config: Mapping[str, Any], options: argparse.Namespace) -> SavedHF:
    """Writes the adapters of a run, or of one of its steps, as PEFT does; `config` is as for `export_peft`."""
    lora, _ = _adapters_of(options, "--to-peft is for runs with --lora, and this one has no adapters: give --to-hf")
    return export_peft(path, out, lora, **config)


def merged_params(path: str, *, step: int | None, dtype: str | None, options: argparse.Namespace) -> PyTree:
    """Returns a checkpoint's params with its adapters merged on the host; `path` is a run, its steps or one of them."""
    refusal = "--merged is for runs with --lora, and this one has no adapters: leave it out"
    lora, init_fn = _adapters_of(options, refusal)
    folder, step = find_restorable(path, step)
    restored = restore(
        folder,
        step=step,
        init_fn=lambda key: lora.init(init_fn(key), key),
        tx=optax.identity(),
        # On the host, which has room for models that fit on no single device.
        mesh=make_mesh(devices=jax.devices("cpu")[:1]),
        config=ZeroConfig(stage=0, precision="fp32"),
        params_only=True,
        log=log_line,
    )
    log_line(f"params of step {restored.step} of {path}")
    return lora.merge(restored.state, dtype=dtype)


def _adapters_of(options: argparse.Namespace, refusal: str) -> tuple[Lora, Callable[..., PyTree]]:
    """Returns the adapters of a run, and the function that makes its base; raises `ValueError` if it has none."""
    shape = preset_config(options)
    init_fn = init_function(shape)
    chosen = choose_lora(options, shape, jax.eval_shape(init_fn, key_shape()))
    if chosen is None:
        raise ValueError(refusal)
    return chosen.lora, init_fn


def refuse_lora(options: argparse.Namespace) -> None:
    """Raises `ValueError` for options of adapters beside a model of the user's own."""
    if LoraConfig(**field_values(LoraConfig, options)) != LoraConfig():
        raise ValueError(
            "--lora is for the presets: adapt your own loss function with zero.Lora, and leave it out here"
        )


def _rules(text: str, shape: ModelConfig, paths: Sequence[str]) -> dict[str, str]:
    """Returns the rules of an option: of patterns that match paths, of modules of the hub, and of `all-linear`."""
    blocks = [path for path in paths if path.startswith(("blocks/", "layers/"))]
    stacked = blocks if getattr(shape, "scan", True) else []
    rules: dict[str, str] = {}
    for rule in text.replace(",", " ").split():
        pattern, separator, dims = rule.partition("=")
        if separator:
            rules[pattern] = dims
        elif pattern == ALL_LINEAR and not isinstance(shape, DecoderConfig):
            folders = {f"{path.partition('/')[0]}/*" for path in blocks}
            rules |= dict.fromkeys(folders, "sio" if stacked else "io")
        elif not fnmatch.filter(paths, pattern) and "/" not in pattern:
            of_module = lora_rules(shape if isinstance(shape, DecoderConfig) else DECODERS["llama-3-8b"], pattern)
            if not isinstance(shape, DecoderConfig):  # whose matrices have the same names
                layers = {f"*/{path.rpartition('/')[2]}" for path in of_module if "/" in path}
                of_module = dict.fromkeys(layers, "sio" if stacked else "io") or of_module
            rules |= of_module
        else:
            rules[pattern] = "sio" if fnmatch.filter(stacked, pattern) else "io"
    return rules

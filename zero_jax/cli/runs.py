"""The commands on a run, its checkpoints or one of the hub: `zero-jax inspect`, `export`, `sample` and `evaluate`."""

import argparse
import dataclasses
import pathlib
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from zero_jax.checkpoint import (
    best_step,
    describe,
    export,
    find_checkpoint,
    find_restorable,
    parse_size,
    resolve_folder,
    restore,
)
from zero_jax.cli.config_classes import option_fields
from zero_jax.cli.models.adapters import LoraConfig, choose_lora, export_adapters, merged_params
from zero_jax.cli.models.own import import_own_model, read_own_model
from zero_jax.cli.models.presets import hub_data, init_function, model_name, preset_config, preset_model
from zero_jax.cli.options import field_values, log_line, option_of, print_result, refuse, with_config_file
from zero_jax.cli.run_config import choose_platform, read_config, read_part
from zero_jax.core.files.untrusted import user_path
from zero_jax.core.text_tables import aligned, format_count
from zero_jax.core.tree import PyTree, key_shape, leaf_names, leaves_by_name
from zero_jax.core.variables import Variables
from zero_jax.data import DataConfig, is_token_folder, load_tokenizer, token_folder_tokenizer
from zero_jax.models.decoder_config import DecoderConfig
from zero_jax.models.hub_families import tensor_names
from zero_jax.models.huggingface import hf_config
from zero_jax.pretrained import TensorName, export_hf, open_hf, run_companions, save_tensors
from zero_jax.sharding.mesh import make_mesh
from zero_jax.sharding.precision import resolve_precision
from zero_jax.trainer import Model, OwnModel, Sampler, TrainConfig, is_run_config
from zero_jax.trainer import evaluate as evaluate_params
from zero_jax.training import ZeroConfig, make_placement

_CONFIG = "config.toml"
_MERGED_DTYPES = ("float32", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelLeaf:
    """A leaf of a model."""

    path: str  # its path, as rules of adapters and specs match it
    shape: tuple[int, ...]  # its shape
    # Its tensor in the hub's files, with `{layer}` for the number of a layer; None where it has none
    tensor: str | None
    num_params: int  # its elements
    num_trained: int  # what is trained of it or for it: the elements of its adapters, or its own


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelLeaves:
    """The leaves of a model, in its order; prints as a table."""

    name: str
    leaves: tuple[ModelLeaf, ...]
    has_adapters: bool

    def __str__(self) -> str:
        has_tensors = any(leaf.tensor for leaf in self.leaves)
        rows = [("leaf", "shape", "params", *["trained"] * self.has_adapters, *["in files of the hub"] * has_tensors)]
        for leaf in self.leaves:
            shape = " x ".join(map(str, leaf.shape)) or "scalar"
            trained = [f"{leaf.num_trained:,}" if leaf.num_trained else ""] * self.has_adapters
            rows.append((leaf.path, shape, f"{leaf.num_params:,}", *trained, *[leaf.tensor or ""] * has_tensors))
        total = sum(leaf.num_params for leaf in self.leaves)
        trained = f"{sum(leaf.num_trained for leaf in self.leaves):,} of " if self.has_adapters else ""
        heading = f"{self.name}: {len(self.leaves)} leaves, {trained}{format_count(total)} params"
        return f"{heading}{' are trained' * self.has_adapters}\n{aligned(rows, right=(2, 3) if trained else (2,))}"


def model_leaves(options: argparse.Namespace) -> ModelLeaves:
    """Returns the leaves of the preset or of the hub's folder, and what of them `--lora` and its like train."""
    shape = preset_config(options)
    init_fn = init_function(shape)
    params = jax.eval_shape(init_fn, key_shape())
    tensors: dict[str, str] = {}
    if isinstance(shape, DecoderConfig):
        family = open_hf(options.from_hf).hf_config if options.from_hf is not None else hf_config(shape)
        names = tensor_names(shape, model_type=family["model_type"])
        tensors = {path: name.template for path, name in names.items()}
    chosen = choose_lora(options, shape, params)
    trained = dict.fromkeys(leaves_by_name(params), 0)
    if chosen is not None:
        made: Variables = jax.eval_shape(lambda key: chosen.lora.init(init_fn(key), key), key_shape())
        for path, x in leaves_by_name(made.params).items():
            trained[path if path in trained else path.rpartition("/")[0]] += x.size
    leaves = tuple(
        ModelLeaf(path=path, shape=x.shape, tensor=tensors.get(path), num_params=x.size, num_trained=trained[path])
        for path, x in leaves_by_name(params).items()
    )
    return ModelLeaves(name=model_name(options), leaves=leaves, has_adapters=chosen is not None)


def inspect(options: argparse.Namespace) -> int:
    """Runs `zero-jax inspect`."""
    if (options.path is None) == (options.preset is None and options.from_hf is None):
        raise ValueError("give the PATH of a checkpoint, or a model by --model or --from-hf: one of them")
    if options.path is None:
        if options.step is not None or options.verify:
            raise ValueError("--step and --verify are of a checkpoint: leave them out")
        print_result(options, model_leaves(options))
        return 0
    of_model = [option_of(name) for name in option_fields("LoraConfig")]
    refuse(options, of_model, reason="that is of a model: give --model or --from-hf instead of PATH, or leave it out")
    description = describe(options.path, step=_step(options), verify_leaves=options.verify)
    print_result(options, description)
    return 1 if description.problems else 0  # so that a script sees damage


def export_params(options: argparse.Namespace) -> int:
    """Runs `zero-jax export`."""
    if options.merged:
        refuse(options, ("--ema",), reason="--merged takes the params themselves: leave it out")
        refuse(options, ("--force",), reason="--merged writes over nothing: give a new folder")
        if options.dtype not in (None, *_MERGED_DTYPES):
            names = ", ".join(_MERGED_DTYPES)
            raise ValueError(f"--dtype {options.dtype}: with --merged give one of {names}, or leave it out")
    elif options.to_hf is not None or options.to_peft is not None:
        refuse(options, ("--force", "--no-force"), reason="this writes over nothing: give a new folder")
    if options.to_peft is not None:
        refuse(options, ("--merged", "--no-merged", "--max-shard-size"), reason="--to-peft writes the adapters alone")
    results: list[Any] = []

    def write(record: Any) -> None:
        is_step = record.path == resolve_folder(options.path)
        results.append(_export(options, step=None if is_step else record.step))

    # As `restore` does, and with it `evaluate` and `sample`.
    _, passed_over = find_checkpoint(options.path, _step(options), accept=write)
    for reason in passed_over:
        log_line(f"checkpoint passed over: {reason}")
    print_result(options, results[0])
    return 0


def _export(options: argparse.Namespace, *, step: int | None) -> object:
    settings = {"step": step, "dtype": options.dtype, "ema": options.ema}
    if options.to_peft is not None:
        return export_adapters(options.path, options.to_peft, settings, _run_options(options))
    limit, params = parse_size(options.max_shard_size), None
    if options.merged:
        params = merged_params(options.path, step=step, dtype=options.dtype, options=_run_options(options))
    if options.to_hf is not None:
        return export_hf(options.path, options.to_hf, **settings, max_file_bytes=limit, params=params)
    if params is None:
        return export(options.path, options.out, **settings, max_shard_bytes=limit, force=options.force)
    tensors = {name: TensorName(name.replace("/", ".")) for name in leaf_names(params)}
    return save_tensors(options.out, params, tensors, dtype=options.dtype, max_file_bytes=limit)


def _step(options: argparse.Namespace) -> int | None:
    """Returns the step that the options ask for, None for the newest."""
    return best_step(options.path) if options.step == "best" else options.step


def _run_options(options: argparse.Namespace) -> argparse.Namespace:
    """Returns the options of a run with adapters, from its config file."""
    file = find_run_config(options.path)
    if file is None:
        raise ValueError(f"{options.path} has no {_CONFIG} with the options of --lora: give the folder of a run")
    run = read_run_options(file, options.known["train"])
    # Adapters are merged and written on the host: no accelerator is taken from a run.
    jax.config.update("jax_platforms", "cpu")
    return run


def find_run_config(path: str) -> pathlib.Path | None:
    """Returns the config file of the run that a path is of: its folder, its checkpoints, or one of them."""
    folder = user_path(path).absolute()
    return next((x / _CONFIG for x in (folder, *folder.parents[:2]) if (x / _CONFIG).is_file()), None)


def read_run_options(file: pathlib.Path, train: argparse.ArgumentParser, *more: str) -> argparse.Namespace:
    """Returns the options of a run by its config file, and `more` words of a command line, by the parser of `train`."""
    run = with_config_file(lambda: train.parse_args(["--config", str(file), *more]))
    if run.from_hf is not None and run_companions(file.parent).is_dir():
        run.from_hf = str(run_companions(file.parent))  # where it came from may be gone
    return run


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Source:
    """The run, or the folder of the hub, that a path names; `what` names the checkpoint."""

    run: argparse.Namespace
    path: str
    is_run: bool
    step: int | None

    def data(self, vocab_size: int, tokenizer: str | None) -> DataConfig:
        """Returns the data of the run, with a tokenizer by name: another one, or its own."""
        data = read_part("data", self.run)
        data = data if tokenizer is None else dataclasses.replace(data, tokenizer=tokenizer)
        if self.run.from_hf is not None:
            return hub_data(data, self.run.from_hf, vocab_size=vocab_size)
        if data.tokenizer != "auto":
            return data
        folder = user_path(data.data)
        is_path = data.data != "stdlib" and not data.data.startswith("hf:") and not {*"*?["} & {*data.data}
        if is_path and not folder.exists():
            raise ValueError(f"the run's data {data.data} is gone, and its tokenizer with it: give --tokenizer FILE")
        return dataclasses.replace(
            data, tokenizer=token_folder_tokenizer(folder) if is_token_folder(folder) else "bytes"
        )

    def params(self, model: Model | OwnModel, mesh: Mesh, zero: ZeroConfig) -> PyTree:
        """Returns the params on the mesh, adapters merged into them; with model state, `Variables`."""
        if not self.is_run:
            assert isinstance(model, Model) and model.load_fn is not None
            return model.load_fn(mesh, zero)
        if LoraConfig(**field_values(LoraConfig, self.run)).lora is not None:
            merged = merged_params(self.path, step=self.step, dtype="float32", options=self.run)
            shapes = jax.eval_shape(model.init_fn, key_shape())
            shardings = make_placement(shapes, mesh=mesh, config=zero).param_shardings("master")
            return jax.device_put(merged, shardings)
        folder, step = find_restorable(self.path, self.step)
        settings: dict[str, Any] = {"init_fn": model.init_fn, "tx": optax.identity(), "mesh": mesh, "config": zero}
        restored = restore(folder, step=step, params_only=True, log=log_line, **settings)
        log_line(f"params of step {restored.step} of {self.path}")
        return restored.state.variables


def _find(options: argparse.Namespace, *more: str) -> _Source:
    """Finds a run by its config file, or a folder of the hub; `more` are options of `train` that replace its own."""
    file = find_run_config(options.path)
    if file is not None:
        run = read_run_options(file, options.known["train"], *more)
        return _Source(run=run, path=options.path, is_run=True, step=_step(options))
    config = user_path(options.path) / "config.json"
    if not config.is_file():
        raise ValueError(
            f"{options.path} is neither a run (a folder with config.toml, its checkpoints, or one of them) nor a "
            "checkpoint of the hub (a folder with config.json and *.safetensors): give one of these"
        )
    if is_run_config(config):
        raise ValueError(
            f"{options.path} is a run that zero.Trainer made in Python, with a model that is not known here: go on in "
            "Python (zero.restore, zero.trainer.evaluate), or write its params by `zero-jax export`"
        )
    if options.step is not None:
        raise ValueError(
            f"--step {options.step} is of a run, and {options.path} is a checkpoint of the hub: leave it out"
        )
    run = options.known["train"].parse_args(["--from-hf", options.path, *more])
    return _Source(run=run, path=options.path, is_run=False, step=None)


def _on_all_devices(config: TrainConfig) -> tuple[Mesh, ZeroConfig]:
    """Returns a mesh of all devices, and the config to shard params over them."""
    choose_platform(config.devices)
    return make_mesh(), ZeroConfig(stage=3, precision=config.zero.precision)


def sample(options: argparse.Namespace) -> int:
    """Runs `zero-jax sample`."""
    if not options.prompt:
        raise ValueError("prompt='': give text to go on from")
    source = _find(options)
    if read_own_model(source.run) is not None:
        raise ValueError(f"{options.path} is a run of a model of your own: samples are for the presets and the hub's")
    shape, run = preset_config(source.run), read_config(source.run)
    tokenizer = load_tokenizer(source.data(shape.vocab_size, options.tokenizer).tokenizer)
    mesh, zero = _on_all_devices(run)  # after the options are checked: it takes the accelerators
    model = preset_model(source.run, has_checkpoint=source.is_run)
    assert model.generate_fn is not None
    sampler = Sampler(
        generate_fn=model.generate_fn,
        tokenizer=tokenizer,
        compute=resolve_precision(zero.precision).compute,
        prompt=options.prompt,
        num_tokens=options.num_tokens,
        temperature=options.temperature,
        top_k=None if options.top_k is None else min(options.top_k, shape.vocab_size),
        seed=options.seed,
    )
    sampler.check(model.init_fn)
    make, params = sampler.on(mesh), source.params(model, mesh, zero)
    texts = [make(getattr(params, "params", params), seed=options.seed + i) for i in range(options.num_samples)]
    shown = "\n\n".join(options.prompt + text for text in texts)
    print_result(options, shown, {"prompt": options.prompt, "samples": texts})
    return 0


def evaluate(options: argparse.Namespace) -> int:
    """Runs `zero-jax evaluate`."""
    changed = field_values(DataConfig, options)
    source = _find(options, *(["--seq-len", str(options.seq_len)] if options.seq_len is not None else []))
    config, own = read_config(source.run), read_own_model(source.run)
    mesh, zero = _on_all_devices(config)
    if own is not None:
        if changed:
            raise ValueError("--data and its like are of text: a model of your own is evaluated on its --validation")
        refuse(options, ("--batch-size",), reason="the --validation of a model of your own has batches of its own")
        model: Model | OwnModel = import_own_model(own)
    else:
        model = preset_model(source.run, has_checkpoint=source.is_run)
        data = dataclasses.replace(source.data(model.vocab_size, changed.get("tokenizer")), **changed)
        # Rounded up: this machine may have a number of devices that does not divide the run's batch.
        size = options.batch_size or -(-config.batch_size // mesh.size) * mesh.size
        config = dataclasses.replace(config, data=data, batch_size=size)
    if not source.is_run and "data" not in changed:
        raise ValueError(f"{options.path} is a checkpoint of the hub: give --data, what to evaluate it on")
    settings: dict[str, Any] = {"config": dataclasses.replace(config, zero=zero), "mesh": mesh, "log": log_line}
    params = source.params(model, mesh, zero)
    result = evaluate_params(model, params, held_out="data" in changed, **settings)
    print_result(options, result)
    return 0

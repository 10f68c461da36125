"""The training loop behind `zero-jax train`: from a config and a model to figures, a sample and a picture."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zero_jax import data as text
from zero_jax.evaluation import Metrics, make_eval_step
from zero_jax.grads import check_batch
from zero_jax.mesh import axes_of, make_mesh
from zero_jax.metrics import JsonLinesWriter, Log, Progress, format_bytes, per_device_bytes, plot_losses
from zero_jax.optimizers import OptimizerConfig, make_optimizer
from zero_jax.precision import cast_floating, resolve_precision
from zero_jax.sharding import sharded_groups
from zero_jax.spec import carries
from zero_jax.state import TrainState, ZeroConfig, init_state, sharding_report
from zero_jax.step import make_train_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """What the trainer has to know of a model.

    Attributes:
      name: what to call it.
      config: whatever says its shape; saved with the run.
      vocab_size: tokens it knows.
      seq_len: tokens in a training sequence.
      init_fn: `init_fn(key) -> params`.
      loss_fn: `loss_fn(params, batch) -> (loss, aux)`; a batch has `inputs` and `targets`, both
        int32 `[batch, seq_len]`.
      generate_fn: `generate_fn(params, prompt, key, num_tokens=, temperature=, top_k=) -> tokens`, or None.
    """

    name: str
    config: Any
    vocab_size: int
    seq_len: int
    init_fn: Callable[[Array], Any]
    loss_fn: Callable[[Any, Any], Any]
    generate_fn: Callable[..., Array] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Says what to train, on what, and for how long.

    Attributes:
      zero: stage, precision, microbatches and clipping.
      data: the text.
      optimizer: how params are updated.
      devices: number of devices to use, the first ones there are; None takes all. A CPU stands in for as many as asked,
        8 if not told.
      replica: size of the mesh axis `replica`, full copies of the sharded state; the axis `data` takes the rest.
      steps: optimizer updates.
      batch_size: sequences in a step, over all devices and microbatches.
      eval_every: steps between two measurements of the validation loss.
      eval_batches: batches of `batch_size` sequences in one such measurement, always the same ones.
      log_every: steps between two progress lines.
      seed: chooses the initial params, the batches and the sample.
      out: folder of all runs.
      name: name of the run's folder in `out`; None makes one up from model and stage.
      sample_prompt: text that the sample at the end goes on from.
      sample_tokens: length of that sample; 0 for none.
      temperature: below 1 the sample sticks to likelier tokens, 0 always takes the likeliest.
      top_k: the sample is chosen among this many of the likeliest tokens; None means among all.
    """

    zero: ZeroConfig = ZeroConfig(stage=3, precision="bf16", clip_norm=1.0)
    data: text.DataConfig = text.DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    devices: int | None = None
    replica: int = 1
    steps: int = 800
    batch_size: int = 8
    eval_every: int = 50
    eval_batches: int = 16
    log_every: int = 20
    seed: int = 0
    out: str = "runs"
    name: str | None = None
    sample_prompt: str = "def "
    sample_tokens: int = 256
    temperature: float = 0.8
    top_k: int | None = 40

    def __post_init__(self):
        """Refuses counts that make no run."""
        for name in ("steps", "batch_size", "eval_every", "eval_batches", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: give at least 1")
        if self.seed < 0 or self.sample_tokens < 0 or self.temperature < 0:
            raise ValueError(
                f"seed={self.seed}, sample_tokens={self.sample_tokens}, temperature={self.temperature}: "
                "none may be negative"
            )
        if self.sample_tokens and not self.sample_prompt:
            raise ValueError("a sample needs a prompt to go on from: give a sample_prompt, or sample_tokens=0 for none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A training run that was checked and may start: nothing is on the devices yet."""

    config: TrainConfig
    model: Model
    mesh: Mesh
    dataset: text.Dataset
    tx: optax.GradientTransformation
    directory: pathlib.Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What came of a run; losses are in nats per token."""

    directory: str
    model: str
    stage: int
    num_devices: int
    num_params: int
    num_steps: int
    num_skipped_steps: int
    first_train_loss: float
    final_train_loss: float
    first_validation_loss: float
    final_validation_loss: float
    tokens_per_second: float
    compile_seconds: float
    train_seconds: float
    per_device_params_bytes: int
    per_device_master_bytes: int
    per_device_opt_state_bytes: int
    prompt: str
    sample: str

    def __str__(self) -> str:
        skipped = f", {self.num_skipped_steps} skipped" if self.num_skipped_steps else ""
        devices = f"{self.num_devices} device{'s' if self.num_devices > 1 else ''}"
        lines = [
            f"{self.model}: {self.num_steps} steps at stage {self.stage} on {devices} in "
            f"{self.train_seconds:.0f} s{skipped}, {self.tokens_per_second:,.0f} tokens/s",
            f"validation loss  {self.first_validation_loss:.3f} -> {self.final_validation_loss:.3f}",
            f"training loss    {self.first_train_loss:.3f} -> {self.final_train_loss:.3f}",
            f"loss curve       {self.directory}/loss.png (figures in metrics.jsonl and config.json beside it)",
        ]
        return "\n".join(lines)


def train(config: TrainConfig, *, model: Model, log: Log = print) -> TrainResult:
    """Trains a model.

    Args:
      config: what to train on, how, and for how long.
      model: the model.
      log: takes the lines that tell how it goes.

    Returns:
      The figures of the run; curve, log and config are in its folder.

    Raises:
      ValueError: a config that contradicts itself or the devices; see `prepare`.
    """
    return execute(prepare(config, model=model), log=log)


def prepare(config: TrainConfig, *, model: Model) -> Run:
    """Checks a config against devices, data and model, reads the data and makes the run's folder.

    Raises:
      ValueError: more devices than there are, a batch that does not divide over devices and microbatches, no such data
        or too little of it, a vocabulary larger than the model's, or a folder that exists or cannot be made.
    """
    devices = jax.devices()
    if config.devices is not None and not 1 <= config.devices <= len(devices):
        raise ValueError(
            f"devices={config.devices}, but there are {len(devices)} of kind {devices[0].device_kind}: "
            f"choose from 1 to {len(devices)}, or leave it out to use all"
        )
    mesh = make_mesh(replica=config.replica, devices=devices[: config.devices])
    batch = {"batch_size": jax.ShapeDtypeStruct((config.batch_size,), np.int32)}
    check_batch(batch, mesh=mesh, axes=axes_of(mesh), num_microbatches=config.zero.num_microbatches)
    tx = make_optimizer(config.optimizer, num_steps=config.steps)
    dataset = text.load(config.data, seq_len=model.seq_len)
    if dataset.tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"the text has {dataset.tokenizer.vocab_size} different tokens, the model {model.name} has room for "
            f"{model.vocab_size}: give it a vocab_size of at least {dataset.tokenizer.vocab_size}"
        )
    directory = _make_directory(pathlib.Path(config.out), config.name, f"{model.name}-stage{config.zero.stage}")
    return Run(config=config, model=model, mesh=mesh, dataset=dataset, tx=tx, directory=directory)


def execute(run: Run, *, log: Log = print) -> TrainResult:
    """Carries out a run that `prepare` has checked."""
    config, model = run.config, run.model
    saved = {"model": {"name": model.name, **dataclasses.asdict(model.config)}, **dataclasses.asdict(config)}
    (run.directory / "config.json").write_text(json.dumps(saved, indent=2, default=str) + "\n", encoding="utf-8")
    state = init_state(model.init_fn, run.tx, jax.random.key(config.seed), mesh=run.mesh, config=config.zero)
    log(_describe(run, state))
    bytes_by_group = {f"per_device_{name}_bytes": per_device_bytes(tree) for name, tree in _groups(state).items()}
    with JsonLinesWriter(run.directory / "metrics.jsonl") as writer:
        progress = Progress(
            num_steps=config.steps,
            tokens_per_step=config.batch_size * model.seq_len,
            log_every=config.log_every,
            writer=writer,
            log=log,
        )
        state = _fit(run, state, progress)
    plot_losses(
        run.directory / "loss.png",
        train=progress.train,
        validation=progress.validation,
        title=f"{model.name}, ZeRO stage {config.zero.stage} on {run.mesh.size} devices",
    )
    sample = _sample(run, state)
    if sample:
        log(f"\na sample that goes on from {config.sample_prompt!r}:\n\n{config.sample_prompt}{sample}\n")
    return TrainResult(
        directory=str(run.directory),
        model=model.name,
        stage=config.zero.stage,
        num_devices=run.mesh.size,
        num_params=_num_params(state),
        num_steps=config.steps,
        num_skipped_steps=int(state.num_skipped_steps),
        first_train_loss=progress.train[0][1],
        final_train_loss=progress.train[-1][1],
        first_validation_loss=progress.validation[0][1],
        final_validation_loss=progress.validation[-1][1],
        tokens_per_second=progress.tokens_per_second,
        compile_seconds=progress.compile_seconds,
        train_seconds=progress.seconds,
        prompt=config.sample_prompt,
        sample=sample,
        **bytes_by_group,
    )


def _fit(run: Run, state: TrainState, progress: Progress) -> TrainState:
    """Takes all the steps; each one's metrics are read when the next one is already on its way."""
    config, model = run.config, run.model
    train_step = make_train_step(model.loss_fn, run.tx, mesh=run.mesh, config=config.zero)
    evaluate = make_eval_step(model.loss_fn, mesh=run.mesh, config=config.zero)
    sizes = {"batch_size": config.batch_size, "seq_len": model.seq_len}
    held_out = text.validation_batches(run.dataset, num_batches=config.eval_batches, **sizes)

    def validation_loss() -> float:
        # Each loss is read before the next is asked for: simulated devices that run far ahead of others can deadlock.
        return float(np.mean([float(evaluate(state, batch).loss) for batch in held_out]))

    progress.add_validation(0, validation_loss())
    dispatched: tuple[int, Metrics] | None = None
    for step in range(1, config.steps + 1):
        batch = text.train_batch(run.dataset, step - 1, seed=config.seed, **sizes)
        state, metrics = train_step(state, batch)
        if dispatched:
            progress.add_step(*dispatched)
        dispatched = step, metrics
        if step % config.eval_every == 0 or step == config.steps:
            progress.add_step(*dispatched)
            dispatched = None
            progress.add_validation(step, validation_loss())
    return state


def _sample(run: Run, state: TrainState) -> str:
    """Returns text that the model adds to the prompt, or nothing if none is asked for."""
    config, tokenizer = run.config, run.dataset.tokenizer
    if run.model.generate_fn is None or not config.sample_tokens:
        return ""
    generate = functools.partial(
        run.model.generate_fn,
        num_tokens=config.sample_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
    )
    compute = resolve_precision(config.zero.precision).compute
    replicated = NamedSharding(run.mesh, PartitionSpec())

    @functools.partial(jax.jit, out_shardings=replicated)
    def sample(params: Any, prompt: Array, key: Array) -> Array:
        return generate(cast_floating(params, compute), prompt, key)

    prompt = tokenizer.encode(config.sample_prompt).astype(np.int32)
    tokens = np.asarray(sample(state.params, prompt, jax.random.key(config.seed)))
    return tokenizer.decode(tokens[tokens < tokenizer.vocab_size])


def _describe(run: Run, state: TrainState) -> str:
    """Returns the lines that a run starts with: devices, mesh, model, data, dtypes, and what lies on a device."""
    config, mesh, num_micro = run.config, run.mesh, run.config.zero.num_microbatches
    precision = resolve_precision(config.zero.precision)
    dtypes = {name: getattr(precision, name) or "as initialized" for name in ("param", "compute", "reduce", "master")}
    floating = {x.dtype.name for x in jax.tree.leaves(state.opt_state) if np.issubdtype(x.dtype, np.inexact)}
    dtypes["optimizer"] = "+".join(sorted(floating)) or "none"
    groups = _groups(state)
    held = [
        f"{name} {format_bytes(per_device_bytes(tree))} of {format_bytes(sum(x.nbytes for x in jax.tree.leaves(tree)))}"
        for name, tree in groups.items()
        if jax.tree.leaves(tree)
    ]
    rows = {
        "devices": f"{mesh.size} x {mesh.devices.flat[0].device_kind} ({jax.__name__} {jax.__version__})",
        "mesh": " x ".join(f"{name}={size}" for name, size in mesh.shape.items()),
        "stage": str(config.zero.stage),
        "model": f"{run.model.name}, {_num_params(state):,} params",
        "data": str(run.dataset),
        "batch": f"{config.batch_size} sequences of {run.model.seq_len} tokens"
        + (f", in {num_micro} microbatches" if num_micro > 1 else ""),
        "dtypes": ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items()),
        "a device holds": ", ".join(held),
        "left whole": _left_whole(run, state),
        "run": str(run.directory),
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def _left_whole(run: Run, state: TrainState) -> str:
    """Returns which leaves the rules do not shard, although the stage would."""
    report = sharding_report(state, mesh=run.mesh, config=run.config.zero)
    paths = [p.path for p in report.placements if not carries(p.dims, axes_of(run.mesh).data)]
    if not paths or not sharded_groups(run.config.zero.stage):
        return "none"
    shown = ", ".join(paths[:4]) + (", ..." if len(paths) > 4 else "")
    return f"{len(paths)} of {len(report.placements)} leaves, {format_bytes(report.whole_bytes)}: {shown}"


def _groups(state: TrainState) -> dict[str, Any]:
    return {"params": state.params, "master": state.master, "opt_state": state.opt_state}


def _num_params(state: TrainState) -> int:
    return sum(x.size for x in jax.tree.leaves(state.params))


def _make_directory(out: pathlib.Path, name: str | None, made_up: str) -> pathlib.Path:
    """Makes a folder that did not exist before."""
    names = [made_up, *(f"{made_up}-{i}" for i in range(2, 10_000))] if name is None else [name]
    for name in names:
        try:
            (out / name).mkdir(parents=True)
            return out / name
        except FileExistsError:
            continue
        except OSError as error:
            raise ValueError(f"cannot make the folder {out / name} ({error.strerror}): choose another out") from error
    raise ValueError(f"{out / names[-1]} holds a run already: choose another name, or remove that folder")

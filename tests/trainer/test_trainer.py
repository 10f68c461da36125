"""A whole run, tiny: what it shows, what it leaves behind, and what it refuses."""

import dataclasses
import errno
import functools
import json
import math
import os
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import optax
import pytest

from zero_jax import trainer
from zero_jax.checkpoint import restore
from zero_jax.core.variables import Variables
from zero_jax.data.dataset import DataConfig
from zero_jax.models import gpt
from zero_jax.sharding.mesh import make_mesh
from zero_jax.trainer import optimizers, run_folder
from zero_jax.trainer import run as training_run
from zero_jax.trainer.checkpoints import ResumeError
from zero_jax.trainer.optimizers import OptimizerConfig
from zero_jax.trainer.reporting import metrics
from zero_jax.training import ZeroConfig, abstract_state

GPT = gpt.GPTConfig(vocab_size=128, seq_len=16, num_layers=2, d_model=32, num_heads=2)
MODEL = training_run.Model(
    name="gpt-test",
    config=GPT,
    vocab_size=256,
    seq_len=GPT.seq_len,
    init_fn=functools.partial(gpt.init, GPT),
    loss_fn=gpt.loss_fn(GPT),
    generate_fn=functools.partial(gpt.generate, GPT),
)


@pytest.fixture
def config(tmp_path):
    """A config of a run of 12 steps on text that a model learns at once."""
    source = tmp_path / "text.txt"
    source.write_text("the same words again and " * 200)
    return training_run.TrainConfig(
        data=DataConfig(data=str(source)),
        optimizer=OptimizerConfig(warmup_steps=2, learning_rate=0.02),
        steps=12,
        eval_every=5,
        eval_batches=2,
        log_every=4,
        sample_tokens=8,
        sample_prompt="the ",
        top_k=4,
        out=str(tmp_path / "runs"),
    )


def test_a_run_learns_tells_and_leaves_its_figures(config, tmp_path):
    lines = []
    result = trainer.train(config, model=MODEL, log=lines.append)
    log = "\n".join(lines)

    assert result.final_validation_loss < 0.7 * result.first_validation_loss
    assert math.isclose(result.first_validation_loss, math.log(128), rel_tol=0.1)
    assert result.num_params == GPT.num_params
    assert len(result.sample) == 8
    assert result.tokens_per_second > 0
    assert result.num_skipped_steps == 0
    # Adam keeps two float32 numbers a param; what is too small to cut is whole on each of the 8 devices.
    assert GPT.num_params < result.per_device_opt_state_bytes < 8 * GPT.num_params / 7
    assert result.per_device_params_bytes < 4 * GPT.num_params / 7
    assert result.per_device_master_bytes == 0
    assert f"validation loss  {result.first_validation_loss:.3f} -> {result.final_validation_loss:.3f}" in str(result)

    assert re.search(r"devices +8 x cpu", log)
    assert re.search(r"stage +3", log)
    assert re.search(r"dtypes +param float32, compute bfloat16, reduce bfloat16, optimizer float32\n", log)
    assert re.search(r"unsharded +3 of 10 leaves, .*final_norm", log)
    assert re.search(r"step +8/12  loss \d\.\d{3}  grad norm [\d.]+  lr 1\.\d\de-02 +[\d,]+ tokens/s ", log)
    # A CPU keeps no count: all arrays of this process are told, other tests' too.
    assert re.search(r"step +8/12 .*[\d.]+ [KM]B/device +\d+ s left", log)

    folder = tmp_path / "runs" / "gpt-test-stage3"
    assert result.directory == str(folder)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if r["kind"] == "train"] == list(range(1, 13))
    assert [r["step"] for r in records if r["kind"] == "validation"] == [0, 5, 10, 12]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    saved = json.loads((folder / "config.json").read_text())
    assert (saved["zero"]["stage"], saved["steps"], saved["model"]["d_model"]) == (3, 12, 32)


@pytest.mark.slow
def test_the_average_of_the_params_is_evaluated_beside_them(config):
    optimizer = dataclasses.replace(config.optimizer, ema_decay=0.5)
    result = trainer.train(dataclasses.replace(config, optimizer=optimizer), model=MODEL, log=lambda _: None)
    lines = (pathlib.Path(result.directory) / "metrics.jsonl").read_text().splitlines()
    first, *_, last = [record for record in map(json.loads, lines) if record["kind"] == "validation"]
    # Before the first update the average is the params themselves; later it lags behind them.
    assert math.isclose(first["ema_loss"], first["loss"], rel_tol=1e-2)
    assert last["ema_loss"] != last["loss"] and last["ema_loss"] < 0.8 * first["loss"]


@pytest.mark.slow
def test_a_model_with_model_state_trains_and_resumes(config, no_picture):
    def init_fn(key):
        return Variables(params=gpt.init(GPT, key), model_state={"batches": jnp.int32(0), "loss": jnp.float32(4)})

    def loss_fn(params, batch, *, model_state):
        loss, aux = gpt.loss_fn(GPT)(params, batch)
        mean = 0.9 * model_state["loss"] + 0.1 * loss.astype(jnp.float32)
        return loss, aux | model_state, {"batches": model_state["batches"] + 1, "loss": mean}

    model = dataclasses.replace(MODEL, init_fn=init_fn, loss_fn=loss_fn)
    optimizer = dataclasses.replace(config.optimizer, ema_decay=0.5)
    config = dataclasses.replace(config, optimizer=optimizer, name="mine", resume="auto")
    result = trainer.train(config, model=model, log=lambda _: None)
    assert result.final_validation_loss < 0.7 * result.first_validation_loss
    assert result.per_device_model_state_bytes == 8
    lines = []
    trainer.train(dataclasses.replace(config, steps=14), model=model, log=lines.append)
    assert any("resuming after step 12" in line for line in lines)
    tx = optimizers.make_optimizer(optimizer, num_steps=14)
    back = restore(result.directory, init_fn=init_fn, tx=tx, mesh=make_mesh(), config=config.zero)
    assert int(back.state.model_state["batches"]) == 14


def test_speed_and_utilization_are_per_second():
    sizes = {"batch_size": 4, "unit": "tokens", "num_units": 100, "flops": 2_000}
    meter = metrics.Speedometer(**sizes, peak_flops_per_second=10_000.0)
    assert meter.mfu(0.5) == 0.4
    assert dataclasses.replace(meter, peak_flops_per_second=None).mfu(0.5) is None


def test_operations_of_a_step_are_those_of_the_gradients_that_the_optimizer_reads():
    mesh, config = make_mesh(), ZeroConfig(stage=3)
    data = types.SimpleNamespace(batch_shapes=jax.ShapeDtypeStruct((8, 4), jnp.float32), batch_size=8, num_tokens=None)

    def flops(tx):
        init = lambda key: {"first": jnp.ones((4, 4)), "last": jnp.ones((4, 4))}  # noqa: E731
        state = abstract_state(init, tx, mesh=mesh, config=config)
        loss_fn = lambda params, x: (x @ params["first"] @ params["last"]).sum()  # noqa: E731
        return metrics.make_speedometer(loss_fn, tx, state, data, mesh=mesh, config=config).flops

    product, both = 2 * 8 * 4 * 4, {"first": "train", "last": "train"}
    frozen = lambda **labels: optax.multi_transform(  # noqa: E731
        {"train": optax.sgd(0.1), "freeze": optax.set_to_zero()}, both | labels
    )
    assert flops(frozen()) == 5 * product  # the data have no gradient
    assert flops(frozen(first="freeze")) == 3 * product
    assert flops(frozen(last="freeze")) == 4 * product


@pytest.mark.slow
def test_checkpoints_may_lie_elsewhere(config, tmp_path):
    config = dataclasses.replace(
        config, steps=3, sample_tokens=0, name="mine", resume="auto", checkpoints=str(tmp_path / "bucket")
    )
    trainer.train(config, model=MODEL, log=lambda _: None)
    assert [path.name for path in (tmp_path / "bucket" / "mine").iterdir()] == ["step_00000003"]
    lines = []
    result = trainer.train(dataclasses.replace(config, steps=5), model=MODEL, log=lines.append)
    assert "resuming after step 3" in "\n".join(lines)
    assert result.num_steps == 5
    for source in (tmp_path / "bucket" / "mine", tmp_path / "bucket" / "mine" / "step_00000003"):
        lines = []
        other = dataclasses.replace(config, name=None, resume="never", init_from=str(source))
        trainer.train(other, model=MODEL, log=lines.append)
        step = 3 if source.name.startswith("step") else 5
        assert f"params of step {step} of {source}" in lines


@pytest.mark.slow
def test_a_checkpoint_is_restored_by_the_folder_of_its_run_and_another_model_is_refused(config):
    config = dataclasses.replace(config, steps=3, sample_tokens=0, name="mine", resume="auto")
    result = trainer.train(config, model=MODEL, log=lambda _: None)
    tx = optimizers.make_optimizer(config.optimizer, num_steps=3)
    mesh = make_mesh(devices=jax.devices()[:2])
    found = restore(result.directory, init_fn=MODEL.init_fn, tx=tx, mesh=mesh, config=ZeroConfig(stage=1))
    assert (found.step, int(found.state.step)) == (3, 3)
    wide = dataclasses.replace(GPT, d_model=64)
    other = dataclasses.replace(MODEL, init_fn=functools.partial(gpt.init, wide), loss_fn=gpt.loss_fn(wide))
    with pytest.raises(ResumeError, match=r"params/blocks/key: saved as \[2, 32, 32\], the state has \[2, 64, 64\]"):
        trainer.train(config, model=other, log=lambda _: None)


@pytest.mark.slow
def test_a_profile_is_recorded_of_the_steps_asked_for(config, tmp_path):
    lines = []
    config = dataclasses.replace(config, steps=4, sample_tokens=0, profile_steps="2:3")
    result = trainer.train(config, model=MODEL, log=lines.append)
    assert "profile of steps 2 to 3" in "\n".join(lines)
    assert list((pathlib.Path(result.directory) / "profile").rglob("*.xplane.pb"))


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_and_folders_do_not_clash(config):
    config = dataclasses.replace(config, steps=4, eval_every=4)
    first, second = (trainer.train(config, model=MODEL, log=lambda _: None) for _ in range(2))
    assert second.directory == first.directory + "-2"
    same = ("final_train_loss", "final_validation_loss", "sample")
    assert [getattr(first, name) for name in same] == [getattr(second, name) for name in same]


@pytest.mark.slow
def test_params_in_host_memory_are_shown_validated_sampled_and_saved_as_others(config):
    """What the loop computes of them itself, norms and samples, is in device memory."""
    zero = ZeroConfig(stage=3, precision="bf16", min_shard_size=8)
    config = dataclasses.replace(config, steps=4, devices=2, zero=zero)
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, ema_decay=0.9))
    offloaded = dataclasses.replace(config, zero=dataclasses.replace(zero, offload="all"))
    first, second = (trainer.train(config, model=MODEL, log=lambda _: None) for config in (config, offloaded))
    same = ("status", "final_train_loss", "final_validation_loss", "sample")
    assert [getattr(first, name) for name in same] == [getattr(second, name) for name in same]
    records = [(pathlib.Path(run.directory) / "metrics.jsonl").read_text().splitlines() for run in (first, second)]
    norms = [[json.loads(line).get("param_norm") for line in lines] for lines in records]
    assert norms[0] == norms[1] and any(norms[0])


@pytest.mark.slow
def test_replicas_and_microbatches(config):
    zero = ZeroConfig(stage=2, precision="bf16", num_microbatches=2)
    config = dataclasses.replace(config, replica=2, batch_size=16, zero=zero, sample_tokens=0, devices=4)
    lines = []
    result = trainer.train(config, model=MODEL, log=lines.append)
    assert result.num_devices == 4
    assert "replica=2 x data=2" in lines[0]
    assert "in 2 microbatches" in lines[0]
    assert result.final_validation_loss < result.first_validation_loss
    # Stage 2 shards masters and optimizer state, over the 2 devices of `data`, and keeps the params whole.
    assert result.per_device_params_bytes == 2 * GPT.num_params
    assert 4 * GPT.num_params <= result.per_device_opt_state_bytes < 4.1 * GPT.num_params
    assert 2 * GPT.num_params <= result.per_device_master_bytes < 2.1 * GPT.num_params


@pytest.mark.slow
def test_a_pipeline_trains_and_goes_on_with_other_stages(config):
    zero = ZeroConfig(stage=1, precision="bf16", num_microbatches=4)
    config = dataclasses.replace(config, pipe=2, batch_size=16, zero=zero, sample_tokens=0, name="mine", resume="auto")
    lines = []
    result = trainer.train(dataclasses.replace(config, devices=4), model=MODEL, log=lines.append)
    assert "data=2 x pipe=2" in lines[0]
    assert result.final_validation_loss < result.first_validation_loss
    embed = GPT.vocab_size * GPT.d_model + GPT.d_model  # and the last norm; half of the layers are on a device
    assert result.per_device_params_bytes == 2 * (embed + (GPT.num_params - embed) // 2)
    # Back to more stages, and with what numbers, is in test_pipeline.py.
    without = dataclasses.replace(config, steps=13, pipe=1, zero=dataclasses.replace(zero, num_microbatches=1))
    trainer.train(without, model=MODEL, log=lines.append)
    assert any("resuming after step 12" in line for line in lines)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pipe": 2, "batch_size": 12, "zero": ZeroConfig(num_microbatches=3)},
            "num_microbatches=3 with 2 stages .* give a multiple of 2",
        ),
        ({"pipe": 3}, "pipe=3 does not divide the 8 devices"),
        ({"batch_size": 12}, "multiple of 8, for example 16"),
        ({"zero": ZeroConfig(num_microbatches=3)}, "multiple of 24"),
        ({"devices": 9}, "devices=9, but there are 8 .* from 1 to 8, leave it out .* more .JAX_NUM_CPU_DEVICES=9"),
        ({"replica": 3}, "replica=3"),
        ({"optimizer": OptimizerConfig(warmup_steps=12)}, "warmup_steps=12 leaves nothing of a run of 12 steps"),
    ],
)
def test_contradictions_are_refused_before_anything_is_made(config, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        trainer.train(dataclasses.replace(config, **changes), model=MODEL)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("epochs", "steps"), [(1, 36), (0.5, 18), (0.1, 4)])
def test_epochs_are_passes_over_the_rows_of_the_text(config, epochs, steps):
    changed = dataclasses.replace(config, steps=trainer.TrainConfig.steps, epochs=epochs)
    run = trainer.prepare(changed, model=MODEL)
    rows = run.input.dataset.train.num_rows(seq_len=GPT.seq_len)
    assert rows == 282 and run.config.steps == steps and run.config.epochs is None
    assert float(run.schedule(steps)) == pytest.approx(0.1 * 0.02)  # at the end of the schedule


@pytest.mark.parametrize(("changes", "message"), [({}, "epochs=2 and steps=12"), ({"epochs": 0}, "give a positive")])
def test_epochs_that_say_nothing(config, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **({"epochs": 2} | changes))


def cannot(params, prompt, key, **settings):
    raise TypeError(f"no sample of {prompt.shape}\nof that kind")


@pytest.mark.parametrize(
    ("changes", "model", "message"),
    [
        ({"top_k": 0}, MODEL, "top_k=0: give at least 1 or None"),
        ({"top_k": 129}, MODEL, "no sample can be made: .*top_k=129: .* vocabulary's 128.*sample_tokens=0 makes none"),
        ({}, dataclasses.replace(MODEL, generate_fn=cannot), "no sample can be made: no sample of .4,.. sample_tokens"),
    ],
)
def test_a_sampler_that_cannot_sample_is_refused_before_the_run(config, tmp_path, changes, model, message):
    with pytest.raises(ValueError, match=message) as refused:
        trainer.train(dataclasses.replace(config, **changes), model=dataclasses.replace(model, vocab_size=256))
    assert "\n" not in str(refused.value) and not (tmp_path / "runs").exists()


def test_a_vocabulary_too_small_for_the_text_is_refused(config):
    with pytest.raises(ValueError, match="vocab_size of at least 256"):
        trainer.train(config, model=dataclasses.replace(MODEL, vocab_size=128))


def test_a_name_that_is_taken_is_refused(config, tmp_path):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    with pytest.raises(ValueError, match="holds a run already: choose another name"):
        training_run.prepare(dataclasses.replace(config, name="mine"), model=MODEL)


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_what_is_no_folder_in_the_place_of_a_run_is_not_called_one(config, tmp_path, resume):
    """As a link to a disk that is not mounted."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "file").touch()
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "unmounted" / "run")
    reasons = {"file": "it exists already: move it away", "link": "is a link to a place that does not exist: mount its"}
    for name, reason in reasons.items():
        with pytest.raises(ValueError, match=f"cannot make the folder of the run: .*/{name}: File exists .*{reason}"):
            training_run.prepare(dataclasses.replace(config, name=name, resume=resume), model=MODEL)


def test_checkpoints_in_a_bucket_that_are_there_already_are_those_of_a_run(tmp_path):
    def check(name):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), f"gs://bucket/{name}")

    with pytest.raises(ValueError, match="gs://bucket/mine holds a run already: choose another name"):
        run_folder.make_folder(tmp_path, "mine", "default", resume=False, check=check)


@pytest.mark.parametrize("text", ['{"model_type": "llama"}', "[]", "no JSON"])
def test_a_config_that_no_run_wrote_is_not_written_over(config, tmp_path, text):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (path := tmp_path / "runs/mine/config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config.json is not the config of a run.*or move that file"):
        training_run.prepare(dataclasses.replace(config, name="mine", resume="auto"), model=MODEL)
    assert path.read_text() == text


def test_an_empty_config_as_a_power_cut_leaves_it_keeps_no_run_from_going_on(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").touch()
    assert run_folder.make_folder(tmp_path, "mine", "default", resume=True) == (tmp_path / "mine", False)


def test_a_pipe_in_place_of_a_config_is_not_waited_for(config, tmp_path):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    os.mkfifo(tmp_path / "runs/mine/config.json")
    with pytest.raises(ValueError, match=r"config.json is not the config of a run.*or move that file"):
        training_run.prepare(dataclasses.replace(config, name="mine", resume="auto"), model=MODEL)


def test_a_run_in_a_checkpoint_is_refused(config, tmp_path):
    step = tmp_path / "runs/mine/checkpoints/step_00000004"
    (step / "record").mkdir(parents=True)
    (step / "record/metadata").touch()
    with pytest.raises(ValueError, match=r"step_00000004 is a checkpoint, .*: choose a folder outside it"):
        training_run.prepare(dataclasses.replace(config, out=str(step / "state")), model=MODEL)
    assert [path.name for path in step.iterdir()] == ["record"]


def test_a_folder_that_cannot_be_made_is_refused(config, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot make the folder .* choose another path"):
        training_run.prepare(dataclasses.replace(config, out=str(tmp_path / "file" / "runs")), model=MODEL)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"steps": 0}, "steps=0"), ({"seed": -1}, "none may be negative"), ({"sample_prompt": ""}, "needs a prompt")],
)
def test_counts_that_make_no_run(changes, message):
    with pytest.raises(ValueError, match=message):
        training_run.TrainConfig(**changes)


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "adafactor", "muon"])
def test_optimizers_learn_and_decay_matrices_alone(name):
    config = OptimizerConfig(optimizer=name, warmup_steps=0, weight_decay=0.5, learning_rate=0.05)
    tx = optimizers.make_optimizer(config, num_steps=20)
    params = {"block": {"kernel": jnp.ones((2, 8, 8)), "norm": jnp.ones((2, 8))}, "embed": jnp.ones((8, 8))}
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.tree.map(jnp.zeros_like, params), state, params)
        return jax.tree.map(jnp.add, params, updates), state

    decayed, _ = step(params, state)
    assert decayed["block"]["kernel"].max() < 1
    assert (decayed["block"]["norm"] == 1).all()

    @jax.jit
    def descend(params, state):
        loss, grads = jax.value_and_grad(lambda p: sum(jnp.sum(x**2) for x in jax.tree.leaves(p)))(params)
        updates, state = tx.update(grads, state, params)
        return jax.tree.map(jnp.add, params, updates), state, loss

    losses = []
    for _ in range(20):
        params, state, loss = descend(params, state)
        losses.append(float(loss))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "adamv"}, "did you mean 'adamw'"),
        ({"learning_rate": 0.0}, "positive learning rate"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0: give at least 0"),
        ({"final_learning_rate": 2.0}, "at most 1"),
    ],
)
def test_optimizers_that_cannot_be_made(changes, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**changes)


def test_looking_at_memory_does_not_use_any():
    x = jnp.ones(1000)
    before = metrics.device_memory_bytes(jax.devices()[0])
    assert metrics.per_device_bytes({"x": x}) == 4000
    assert metrics.device_memory_bytes(jax.devices()[0]) == before


def test_what_a_run_of_one_step_tells_has_no_speed():
    fields = dict.fromkeys((field.name for field in dataclasses.fields(trainer.TrainResult)), 1)
    fields |= {"status": "preempted", "model": "gpt", "directory": "runs/a", "tokens_per_second": math.nan}
    told = str(trainer.TrainResult(**fields)).splitlines()[0]
    assert told == "gpt: 1 step at stage 1 on 1 device in 1 s, 1 skipped; stopped by a signal"
    fields |= dict.fromkeys(("first_train_loss", "final_train_loss", "first_validation_loss"), math.nan)
    assert "nan" not in str(trainer.TrainResult(**{**fields, "num_steps": 0}))


def test_where_a_host_has_its_files_may_differ_between_processes(monkeypatch):
    """What they hold is compared; anything else of the text has to be the same."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    model = trainer.OwnModel(init_fn=None, loss_fn=None, batches=None)
    facts = lambda **fields: training_run._facts(trainer.TrainConfig(data=DataConfig(**fields)), model, [])  # noqa: E731
    own = facts()
    for name in ("data", "validation_data", "tokenizer", "token_cache"):
        assert facts(**{name: "/mnt/other"}) == own, name
    assert facts(text_field="other") != own

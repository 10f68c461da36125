"""Models of the user's own in the trainer: any loss, any batches, the same loop."""

import dataclasses
import functools
import inspect
import json
import pathlib
import re

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from command_line import run

import zero_jax as zero
from zero_jax.checkpoint import CheckpointConfig
from zero_jax.trainer import OptimizerConfig, OwnModel, ResumeError, prepare, read_run
from zero_jax.trainer.inputs.own import own_input
from zero_jax.trainer.inputs.sources import find_source
from zero_jax.trainer.reporting.console import figures
from zero_jax.trainer.reporting.metrics import scalar_figures, unshown_leaves

pytestmark = pytest.mark.usefixtures("no_picture")
WIDTH = 32


def init_fn(key):
    params = {"w": jax.random.normal(key, (WIDTH, WIDTH)) / 6, "b": jnp.zeros(WIDTH)}
    return zero.Variables(params=params, model_state={"steps": jnp.int32(0), "mean": jnp.zeros(WIDTH)})


def loss_fn(params, batch, key, *, model_state):
    """A loss with dropout and a running mean, as batch norm has one."""
    kept = jax.random.bernoulli(key, 0.9, batch["x"].shape) / 0.9
    errors = (batch["x"] * kept) @ params["w"] + params["b"] - batch["y"]
    mean = 0.9 * model_state["mean"] + 0.1 * batch["x"].mean(0).astype(jnp.float32)
    aux = {"error": jnp.abs(errors).mean(), "loss": jnp.float32(7), "rows": {"first": errors[0], "num": len(errors)}}
    return jnp.square(errors).mean(), aux, {"steps": model_state["steps"] + 1, "mean": mean}


def eval_fn(params, batch, *, model_state):
    errors = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return jnp.square(errors).mean(), {"error": jnp.abs(errors).mean()}, model_state


def batch_of(step):
    x = np.random.default_rng(step).normal(size=(8, WIDTH)).astype(np.float32)
    return {"x": x, "y": 0.5 * x[:, ::-1].copy()}


def half(step):
    return jax.tree.map(lambda x: x[:4], batch_of(step))


def generator():
    for step in range(5):
        yield batch_of(step)


def dataset():
    return grain.MapDataset.range(4).shuffle(seed=3).map(lambda i: batch_of(int(i))).to_iter_dataset()


grain_map = grain.MapDataset.range(4).map(lambda i: batch_of(int(i)))


def config_in(folder):
    """Returns the config of a run of 6 steps on 2 devices."""
    return zero.TrainConfig(
        zero=zero.ZeroConfig(stage=3, min_shard_size=0, precision="fp32", clip_norm=None),
        optimizer=OptimizerConfig(learning_rate=0.02, warmup_steps=1),
        checkpoint=CheckpointConfig(save_every=3, keep_last=5, keep_best=0),
        devices=2,
        steps=6,
        eval_every=3,
        eval_batches=2,
        log_every=2,
        out=str(folder),
        name="run",
        resume="auto",
    )


@pytest.fixture
def config(tmp_path):
    return config_in(tmp_path)


def train(config, batches=batch_of, **options):
    """Trains; returns result, log and state."""
    lines = []
    trainer = zero.Trainer(loss_fn, init_fn, batches, config=config, **options)
    result = trainer.train(log=lines.append)
    return result, "\n".join(lines), trainer.state


def records(config):
    lines = (pathlib.Path(config.out) / config.name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def losses(config):
    return [record["loss"] for record in records(config) if record["kind"] == "train"]


@pytest.fixture(scope="module")
def unbroken_losses(tmp_path_factory):
    config = config_in(tmp_path_factory.mktemp("unbroken"))
    train(config)
    return losses(config)


def test_an_optimizer_with_fields_of_the_same_names_does_not_resume(config):
    train(config, tx=optax.adam(0.01))
    longer = dataclasses.replace(config, steps=8)
    with pytest.raises(ResumeError, match=r"class ScaleByAdamState, the state has the class ScaleByBeliefState"):
        train(longer, tx=optax.adabelief(0.01))
    assert train(longer, tx=optax.adam(0.01))[0].num_steps == 8


def test_a_run_of_any_loss_has_what_a_run_on_text_has(config):
    result, log, state = train(config, validation=[batch_of(7), half(8), batch_of(9)], eval_fn=eval_fn)
    assert (result.status, result.num_steps, result.sample, result.prompt) == ("done", 6, "", "")
    assert result.final_validation_loss < 0.95 * result.first_validation_loss
    assert result.examples_per_second > 0 and result.tokens_per_second is None
    assert "examples/s" in str(result) and "validation loss" in str(result) and "tokens" not in str(result)
    assert int(state.model_state["steps"]) == 6 and state.params["w"].sharding.spec == jax.P("data")

    *_, last = [record for record in records(config) if record["kind"] == "train"]
    assert (last["aux/loss"], last["rows/num"], last["examples"]) == (7, 8, 48) and last["error"] > 0
    assert "tokens" not in last and "rows/first" not in last
    *_, checked = [record for record in records(config) if record["kind"] == "validation"]
    evaluate = zero.make_eval_step(eval_fn, mesh=zero.make_mesh(devices=jax.devices()[:2]), config=config.zero)
    expected = [evaluate(state, batch).aux["error"] for batch in (batch_of(7), half(8))]  # eval_batches=2
    assert checked["error"] == pytest.approx(np.average(expected, weights=[8, 4]), rel=1e-5)
    assert result.per_device_model_state_bytes == 4 + 4 * WIDTH / 2

    assert re.search(r"batch +8 examples: x float32\[8, 32\], y float32\[8, 32\]", log)
    assert re.search(r"not shown +rows/first float32\[32\]", log)
    assert re.search(r"step 6/6  loss \d.\d+  error \d.\d+  aux/loss 7  rows/num 8  grad norm", log)
    assert re.search(r"step 6/6  validation loss \d.\d+  validation error \d", log)
    assert not read_run(pathlib.Path(config.out) / "run").is_text


def test_a_resumed_run_is_the_unbroken_one(config, tmp_path):
    """An iterator with a state goes on in the middle of a pass, without reading what was read before."""
    unbroken, tx = dataclasses.replace(config, out=str(tmp_path / "unbroken")), {"tx": optax.adam(1e-2)}
    result, log, _ = train(unbroken, dataset(), **tx)
    assert re.search("data +an iterator with a state", log)
    assert result.first_validation_loss is None and "validation" not in str(result)
    train(dataclasses.replace(config, steps=3), dataset(), **tx)
    _, log, _ = train(config, dataset(), **tx)
    assert "resuming after step 3" in log and "reading and dropping" not in log and "WARNING" not in log
    assert losses(config) == pytest.approx(losses(unbroken), rel=1e-6)
    assert records(config)[-1]["learning_rate"] is None
    # Other batches from there on: a function of the step needs no state.
    _, log, _ = train(dataclasses.replace(config, steps=7), **tx)
    assert "resuming after step 6" in log and "reading and dropping" not in log
    assert "batches: WARNING: the first batch is not the one of the run before: these are other data, or" in log


def test_what_a_config_leaves_open_is_as_on_the_command_line_or_as_the_run_began(config):
    def saved(zero_config, **changes):
        run = prepare(dataclasses.replace(config, zero=zero_config, **changes), model=own)
        return run.saved_config["zero"]["precision"], run.saved_config["zero"]["clip_norm"]

    own = OwnModel(init_fn=init_fn, loss_fn=loss_fn, batches=batch_of)
    left_open = zero.ZeroConfig(stage=2)
    assert saved(left_open, name="other") == ("bf16", 1.0)
    assert saved(zero.ZeroConfig(clip_norm=None), name="other") == ("bf16", None)
    train(dataclasses.replace(config, steps=3))  # in fp32 without clipping, which its checkpoint says
    assert saved(left_open) == ("fp32", None)
    assert saved(zero.ZeroConfig(precision="bf16")) == ("bf16", None)
    _, log, _ = train(dataclasses.replace(config, zero=zero.ZeroConfig(min_shard_size=0), steps=4))
    assert "precision='fp32', clip_norm=None as in the run until now" in log and "changed since: zero" not in log


def test_batches_that_end_end_the_run_with_its_state(config):
    result, log, _ = train(config, generator())
    assert (result.status, result.exit_status, result.num_steps) == ("ended", 1, 5)
    assert "stopping at step 5 of 6: there are no more batches" in log and "the batches ended" in str(result)
    result, log, _ = train(config, generator)  # of which there can be another pass
    assert (result.status, result.num_steps) == ("done", 6)
    assert "resuming after step 5" in log
    assert "batches: reading and dropping the 5 before step 6: an iterable without a state has no position" in log


@pytest.mark.parametrize(
    ("batches", "epochs", "steps"), [([batch_of(0)] * 3, 2, 6), pytest.param(grain_map, 1.5, 6, marks=pytest.mark.slow)]
)
def test_epochs_are_passes_over_batches_that_have_a_length(batches, epochs, steps, config):
    config = dataclasses.replace(config, steps=zero.TrainConfig.steps, epochs=epochs)
    result, log, _ = train(config, batches)
    assert result.num_steps == steps and f"step {steps}/{steps}" in log
    with pytest.raises(ValueError, match="epochs=2: the batches are a function of the step, which has no length"):
        train(dataclasses.replace(config, epochs=2, name="other"))


def test_a_run_of_which_every_step_was_skipped_is_not_done(config):
    """Its last state is saved, as that of a run whose last step alone was skipped."""
    infinite = lambda step: batch_of(step) | {"y": np.full((8, WIDTH), np.inf, np.float32)}  # noqa: E731
    result, log, _ = train(config, infinite)
    assert (result.status, result.exit_status, result.num_skipped_steps) == ("skipped", 3, 6)
    assert "all 6 steps were skipped, the last because the gradient of b was not finite" in log
    assert "6 skipped" in str(result) and "NOTHING IS TRAINED" in str(result)
    result, log, _ = train(dataclasses.replace(config, steps=7))  # one step that is not
    assert (result.status, result.num_skipped_steps) == ("done", 6) and "resuming after step 6" in log


def test_a_validation_that_fails_or_is_never_finite_costs_no_step(config):
    def reading(passes):
        """Batches whose third pass fails: one is read to check them, one before the first step."""
        passes.append(1)
        if len(passes) == 3:
            raise RuntimeError("the file server is gone")
        yield batch_of(0)

    passes = []
    with pytest.raises(RuntimeError, match="the file server is gone"):
        train(dataclasses.replace(config, eval_every=2), validation=lambda: reading(passes), eval_fn=eval_fn)
    useless = lambda params, batch, *, model_state: (jnp.nan * params["b"].sum(), None, model_state)  # noqa: E731
    result, log, _ = train(config, validation=[batch_of(0)], eval_fn=useless)
    assert "resuming after step 2" in log and result.status == "done"
    folder = pathlib.Path(config.out) / "run" / "checkpoints"
    assert sorted(path.name for path in folder.glob("step_*")) == [f"step_0000000{i}" for i in (2, 3, 6)]


def test_an_iterator_that_fills_the_same_arrays_validates_on_each_of_its_batches():
    def filling(buffers):
        for i in (1, 2, 3):
            for name, x in batch_of(i).items():
                buffers[name][...] = x
            yield buffers

    model = OwnModel(init_fn=init_fn, loss_fn=loss_fn, batches=batch_of, validation=filling(batch_of(0)))
    found = own_input(model, mesh=zero.make_mesh(), zero=zero.ZeroConfig(), eval_batches=2)
    assert [batch["x"].tolist() for batch in found.validation] == [batch_of(i)["x"].tolist() for i in (1, 2)]


def test_a_list_of_batches_of_other_sizes_is_refused_before_anything_is_made(config):
    with pytest.raises(ValueError, match="leaf 'x' of step 2 has 4 examples, and that of the first batch 8: drop the"):
        train(config, [batch_of(0), half(1)])
    assert not list(pathlib.Path(config.out).iterdir())


def fails(calls_before, make=batch_of):
    """Returns a function of the step that raises after some calls."""
    calls = iter(range(calls_before))
    return lambda step: make(step) if next(calls, None) is not None else 1 / 0


def full_disk(line):
    if line.startswith("step 4/6"):
        raise ZeroDivisionError("division by zero")


FAULTS = {
    "data": ({"batches": fails(1 + 4)}, 4),  # the first batch is read twice
    "a smaller last batch": ({"batches": lambda: iter([*map(batch_of, range(4)), half(4)])}, 4),
    "validation": ({"validation": fails(1 + 3), "eval_fn": eval_fn}, 3),
    "log": ({"log": full_disk}, 5),  # step 5 is dispatched by then
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_that_is_no_fault_of_the_state_leaves_a_checkpoint_of_the_last_step(
    fault, config, unbroken_losses, tmp_path
):
    options, step = FAULTS[fault]
    lines = []
    options = {"batches": batch_of, "log": lines.append, **options}
    log, batches = options.pop("log"), options.pop("batches")
    with pytest.raises((ZeroDivisionError, ValueError)) as caught:
        zero.Trainer(loss_fn, init_fn, batches, config=config, **options).train(log=log)
    assert (tmp_path / f"run/checkpoints/step_{step:08d}").is_dir()
    if fault != "log":
        assert f"stopping at step {step} of 6: {type(caught.value).__name__}: {caught.value}" in lines
    result, log, _ = train(config)
    assert result.status == "done" and f"resuming after step {step}" in log
    assert losses(config) == pytest.approx(unbroken_losses, rel=1e-6)


def test_a_state_that_is_not_finite_is_not_saved_by_an_error_either(config, tmp_path):
    nan = lambda step: jax.tree.map(lambda x: x * (np.nan if step == 4 else 1), batch_of(step))  # noqa: E731
    config = dataclasses.replace(config, zero=dataclasses.replace(config.zero, skip_nonfinite=False))
    with pytest.raises(ZeroDivisionError):
        train(config, fails(1 + 5, nan))
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["step_00000003"]


def test_a_resumed_run_with_fewer_batches_than_it_has_read_is_refused_and_keeps_its_state_and_config(config):
    train(dataclasses.replace(config, steps=3), map(batch_of, range(3)))
    written = (pathlib.Path(config.out) / "run/config.json").read_text()
    with pytest.raises(ResumeError, match="no more batches after 2, and the run has read 3: give those of before, or"):
        train(config, map(batch_of, range(2)))
    assert (pathlib.Path(config.out) / "run/config.json").read_text() == written
    assert train(config, map(batch_of, range(6)))[0].status == "done"


def test_positions_of_other_processes_or_iterators_are_refused(config):
    data = prepare(config, model=OwnModel(init_fn=init_fn, loss_fn=loss_fn, batches=dataset())).input
    for states, message in [
        (["", ""], "positions of 2 processes in their batches, and there are 1: start as many"),
        (3, "positions of 0 processes"),
        ([3], "3 is not a text"),
        (['{"other": 3}'], "is no state of batches"),
        (['{"json": 3}'], r"does not take the state 3 back .*: give the dataset that the checkpoint was written with"),
    ]:
        with pytest.raises(ValueError, match=message):
            data.open({"position": 1, "batches": "own", "states": states}, say=print, beat=lambda: None)


def test_other_values_shapes_and_names_are_other_batches(config):
    def record(batches):
        data = prepare(config, model=OwnModel(init_fn=init_fn, loss_fn=loss_fn, batches=batches)).input
        with data.open(None, say=print, beat=lambda: None) as opened:
            return data, data.record(opened.position)

    _, saved = record(batch_of)
    on_devices = lambda step: jax.tree.map(jnp.asarray, batch_of(step))  # noqa: E731
    with_more = lambda step: batch_of(step) | {"key": jax.random.key(step), "scale": 2.0}  # noqa: E731
    changed = lambda step: batch_of(step + (step == 0))  # noqa: E731
    for other, num_lines in [(on_devices, 0), (with_more, 1), (changed, 1), (lambda step: batch_of(0), 0)]:
        lines = []
        record(other)[0].open(saved, say=lines.append, beat=lambda: None)
        assert len(lines) == num_lines
    # With other processes or another batch size each process's part is another one, and older records have none.
    for change in ({"num_processes": 2}, {"batch_size": 16}, {"fingerprints": None}):
        say = (lambda line: None) if "batch_size" in change else pytest.fail
        record(changed)[0].open(saved | change, say=say, beat=lambda: None)


@pytest.mark.parametrize(
    ("before", "told"),
    [
        (4, "the 12 examples between 12 and 24 are never read"),
        (16, "the 24 examples between 24 and 48 are read twice"),
        (8, None),
    ],
)
def test_a_resumed_run_with_another_batch_size_says_what_is_skipped_or_repeated(before, told, config):
    data = prepare(config, model=OwnModel(init_fn=init_fn, loss_fn=loss_fn, batches=batch_of)).input
    saved, lines = {"position": 3, "batches": "own", "num_processes": 1, "batch_size": before}, []
    with data.open(saved, say=lines.append, beat=lambda: None) as opened:
        assert np.array_equal(next(opened)["x"], batch_of(3)["x"])
    assert len(lines) == (told is not None)
    if told:
        assert f"a batch has 8 examples, and had {before}. The run goes on after batch 3: " in lines[0]
        assert told in lines[0]


def token_init(key):
    return {"w": jax.random.normal(key, (WIDTH, 4))}


def token_loss(params, batch, *, guard=lambda count: count):
    """A mean over the examples that a mask leaves."""
    errors = jnp.square(batch["x"] @ params["w"]).mean(-1)
    loss = (errors * batch["mask"]).sum() / guard(batch["mask"].sum())
    return loss, {"named": batch["mask"].sum(), "right": (batch["mask"] * (errors < 1)).sum() / batch["mask"].sum()}


GUARDS = {"none": lambda count: count, "at least 3": lambda count: jnp.maximum(count, 3), "epsilon": lambda n: n + 1e-6}


def masked(counts):
    """Returns a batch with so many examples of each 4 that count."""
    mask = np.concatenate([np.arange(4) < count for count in counts]).astype(np.float32)
    return {"x": np.random.default_rng(5).normal(size=(len(mask), WIDTH)).astype(np.float32), "mask": mask}


@pytest.mark.parametrize(
    ("loss_weight", "guard"), [*(("auto", guard) for guard in GUARDS), ("named", "none"), (None, "none")]
)
def test_training_and_validation_loss_of_the_same_data_agree(loss_weight, guard, config):
    """In batches that weigh differently, one of them nothing, as in microbatches."""
    loss_fn, whole = functools.partial(token_loss, guard=GUARDS[guard]), masked([4, 1, 0, 2])
    parts = [jax.tree.map(lambda x: x[4 * i : 4 * i + 4], whole) for i in range(4)]  # noqa: B023
    parts = parts if loss_weight else [parts[0], parts[1], parts[3]]  # equal weights have a place for each part
    zero_config = dataclasses.replace(config.zero, loss_weight=loss_weight)
    config = dataclasses.replace(config, zero=zero_config, steps=1, eval_every=1, eval_batches=4)
    trainer = zero.Trainer(loss_fn, token_init, lambda step: whole, config=config, validation=parts, tx=optax.sgd(0.0))
    result = trainer.train(log=lambda _: None)
    trained, checked = ({x["kind"]: x for x in records(config)}[kind] for kind in ("train", "validation"))
    expected = trained["loss"], trained["right"]
    if loss_weight is None:
        outs = [loss_fn(jax.device_get(trainer.state.params), part) for part in parts]
        expected = np.mean([loss for loss, _ in outs]), np.mean([aux["right"] for _, aux in outs])
    assert result.status == "done" and (checked["loss"], checked["right"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("guard", GUARDS)
def test_a_validation_without_weight_says_so(guard, config):
    loss_fn = functools.partial(token_loss, guard=GUARDS[guard])
    trainer = zero.Trainer(loss_fn, token_init, lambda step: masked([4, 1]), config=config, validation=[masked([0, 0])])
    lines = []
    result = trainer.train(log=lines.append)
    assert result.status == "done" and np.isnan(result.final_validation_loss)
    assert "no batch of the validation has a weight above 0: its loss is NaN" in lines


# Sources of batches


def no_argument():
    return [batch_of(0), batch_of(1)]


@pytest.mark.parametrize(
    ("make", "kind", "is_dropped"),
    [
        (lambda: batch_of, "a function of the step", False),
        (lambda: [batch_of(0), batch_of(1)], "a sequence of 2", False),
        (lambda: no_argument, "a sequence of 2", False),
        (lambda: generator, "an iterable without a state", True),
        (lambda: map(batch_of, range(9)), "an iterable without a state", True),
        (dataset, "an iterator with a state", False),
        (lambda: dataset, "an iterator with a state", False),
    ],
)
@pytest.mark.parametrize("position", [2, 6])
def test_a_source_goes_on_where_it_was(make, kind, is_dropped, position):
    lines, beats = [], []
    options = {"say": lines.append, "beat": lambda: beats.append(1)}
    source = find_source("batches", make())
    assert source.kind == kind
    first, batches = source.first(), source.open(0, None, **options)
    read = [next(batches) for _ in range(position)]
    state, following = source.state(), next(batches)
    assert np.array_equal(read[0]["x"], first["x"]) and not lines
    again = find_source("batches", make())
    again.first()
    assert np.array_equal(next(again.open(position, state, **options))["x"], following["x"])
    assert (len(lines), len(beats)) == ((1, position) if is_dropped else (0, 0))
    assert (state is not None) == (kind == "an iterator with a state")


class Stateful:
    """An iterator with some state."""

    def __init__(self, state):
        self.state = state

    def __iter__(self):
        return self

    def __next__(self):
        return batch_of(0)

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def yields(step):
    yield batch_of(step)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (batch_of(0), "batches is a dict, a single batch perhaps: .*such as .batch."),
        (lambda: batch_of(0), "returned a dict, a single batch perhaps: take the step as an argument"),
        (lambda: batch_of, "returned <function batch_of .*, no batches"),
        ([], "batches has no batch: give one at least"),
        (iter([]), "batches has no batch: give one at least"),
        (3, "batches is 3, no batches: give a function of the step"),
        (lambda step: next(iter(())), "a function of the step raised StopIteration at step 0: let it return a batch"),
        (lambda a, b: batch_of(a), r"\(a, b\) takes 2 values: give a function of the step"),
        (yields, "yields takes a step and yields: return the batch of that step"),
        (Stateful({1, 2}), "its get_state\\(\\) returned {1, 2}, for which JSON has no form"),
        (Stateful({1: 2}), "for which JSON has no form"),
        ([{"x": np.zeros((7, WIDTH), np.float32)}], "first batch: batch leaf 'x' has 7 examples, which do not divide"),
        ([{"x": "text"}], "the first batch leaf 'x' is 'text' of type str, no array: give a pytree of arrays"),
        ([{}], "the first batch has no arrays"),
        ([{"x": 1.0}], "the first batch has no leaf with a leading dim"),
    ],
)
def test_what_is_no_batches_is_named_before_anything_is_made(config, batches, message):
    with pytest.raises(ValueError, match=message):
        train(config, batches)
    assert not list(pathlib.Path(config.out).iterdir())


def test_bytes_and_dicts_are_states():
    for state in (b"\x00\xff", {"a": [1, 2.5, None, "b"], "c": {}}):
        source = find_source("batches", Stateful(state))
        other = Stateful(None if isinstance(state, dict) else b"")
        find_source("batches", other).open(1, source.state(), say=print, beat=lambda: None)
        assert other.state == state


def rows_of_losses(params, batch, key, *, model_state):
    return jnp.square(batch["x"] @ params["w"]).mean(1), None, model_state


@pytest.mark.parametrize(
    ("changes", "config_changes", "message"),
    [
        ({"loss_fn": rows_of_losses}, {}, r"a loss of shape \(8,\) .* return a floating scalar, such as loss.mean\(\)"),
        ({"init_fn": lambda: None}, {}, r"init_fn: .* cannot be called with \(key\)"),
        ({"eval_fn": eval_fn}, {}, "eval_fn is for the validation, and there are no batches for it"),
        ({"validation": [batch_of(0)], "eval_fn": rows_of_losses}, {}, "return a floating scalar"),
        ({"validation": 3}, {}, "validation is 3, no batches"),
        ({}, {"batch_size": 16}, "batch_size=16 is for runs on text"),
        ({}, {"sample_every": 5}, "sample_every=5 is for runs on text"),
        (
            {},
            {"zero": zero.ZeroConfig(num_microbatches=3)},
            "8 examples, which do not divide over 2 devices .* 3 micro",
        ),
        (
            {"validation": [batch_of(0)], "eval_fn": eval_fn},
            {"zero": zero.ZeroConfig(loss_weight="rows/num")},
            "loss_weight='rows/num' is not in the aux of the validation, which has error: return it there too",
        ),
    ],
)
def test_models_that_cannot_be_trained_are_named_before_anything_is_made(config, changes, config_changes, message):
    model = OwnModel(**{"init_fn": init_fn, "loss_fn": loss_fn, "batches": batch_of} | changes)
    with pytest.raises(ValueError, match=message):
        prepare(dataclasses.replace(config, **config_changes), model=model)
    assert not list(pathlib.Path(config.out).iterdir())


# Figures


def test_the_scalars_of_the_aux_are_figures():
    aux = {"accuracy": jnp.float32(0.5), "step": jnp.int32(3), "is_good": jnp.bool_(True), "rows": jnp.ones(2)}
    aux["key"] = jax.random.key(0)
    assert scalar_figures(aux) == {"accuracy": 0.5, "aux/step": 3, "is_good": 1}
    assert unshown_leaves(aux) == ["key key<fry>[]", "rows float32[2]"]
    assert scalar_figures(jnp.float32(2)) == {"aux": 2} and scalar_figures(None) == {}


def test_a_line_has_a_few_of_them():
    record = {"kind": "train", "step": 1, "loss": 1.0, **{f"figure_{i}": i / 3 for i in range(9)}, "grad_norm": 2.0}
    shown = figures(record)
    assert shown.startswith("loss 1.000  figure_0 0  figure_1 0.3333") and shown.endswith(
        "figure_5 1.667  grad norm 2.00"
    )


# The command line

FILE = """
import numpy as np, jax, jax.numpy as jnp

started = jnp.zeros(2)  # uses JAX when it is imported

def init_fn(key):
    return {"w": jax.random.normal(key, (32, 32)) / 6}

def loss_fn(params, batch):
    errors = batch["x"] @ params["w"] - batch["x"][:, ::-1]
    return jnp.square(errors).mean(), {"error": jnp.abs(errors).mean()}

def bad_init(key):
    return {**init_fn(key), "act": len}

def bad_loss(params, batch):
    return batch["nothing"]

def batches(step):
    x = np.random.default_rng(step).normal(size=(8, 32)).astype(np.float32)
    num = 8 // jax.process_count()  # of this process
    return {"x": x[jax.process_index() * num :][:num]}

validation = [batches(99)] if jax.process_count() == 1 else []
"""
COMMAND = "train --steps 4 --eval-every 2 --warmup-steps 1 --stage 3 --devices 2 --json".split()
OWN = {"--loss": "loss_fn", "--init": "init_fn", "--batches": "batches"}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The options of a model in a file."""
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return [word for option, name in OWN.items() for word in (option, f"mine.py:{name}")]


def test_the_command_line_trains_it_and_its_config_file_does_it_again(own, capsys):
    status, out, err = run([*COMMAND, *own, "--validation", "mine.py:validation"], capsys)
    assert status == 0, err
    result = json.loads(out)
    assert result["model"] == "mine" and result["tokens_per_second"] is None
    assert result["final_validation_loss"] < result["first_validation_loss"]
    folder = pathlib.Path(result["directory"])
    assert folder.name == "mine-stage3" and re.search(r"loss \d.\d+  error \d.\d+  grad norm", err)
    status, out, err = run(["train", "--config", str(folder / "config.toml"), "--json"], capsys)
    assert status == 0, err
    assert json.loads(out)["final_validation_loss"] == result["final_validation_loss"]
    status, out, err = run(["evaluate", str(folder), "--json"], capsys)
    evaluated = json.loads(out)
    assert status == 0 and evaluated["loss"] == pytest.approx(result["final_validation_loss"], rel=1e-6), err
    assert evaluated["perplexity"] is None and evaluated["figures"]["error"] > 0
    status, out, err = run(["evaluate", str(folder), "--batch-size", "4"], capsys)
    assert status == 2 and "--batch-size: the --validation of a model of your own has batches of its own" in err
    status, out, err = run(["sample", str(folder)], capsys)
    assert status == 2 and "is a run of a model of your own: samples are for the presets and the hub's" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--loss", "mine.py:los_fn"], "'mine.py' has no function 'los_fn'; did you mean 'loss_fn'?"),
        (["--batches", "mine.py:batch"], "'mine.py' has no function 'batch'; did you mean 'batches'?"),
        (["--loss", "mien.py:loss_fn"], "cannot import 'mien.py': it does not exist; did you mean 'mine.py'?"),
        (["--init", "mine.py:validation"], "--init 'mine.py:validation' is of type list: name a function"),
        (["--init", "mine.py:bad_init"], "params leaf 'act' is <built-in function len> of type builtin_function_or"),
        (["--loss", "mine.py:bad_loss"], "the model raised KeyError: 'nothing'"),
        (["--eval-loss", "mine.py:loss_fn"], "--eval-loss is for the validation: give its batches, --validation"),
        (["--batch-size", "16"], "--batch-size: that is of text, and --batches stands for a source of your own"),
        (["--data", "words"], "--data: that is of text"),
        (["--model", "gpt-tiny"], "--model gpt-tiny: that is of the presets"),
        (["--d-model", "64"], "error: --d-model: that is of the presets"),
    ],
)
def test_the_command_line_names_what_is_wrong(own, arguments, message, capsys, tmp_path):
    status, out, err = run([*COMMAND, *own, *arguments], capsys)
    assert (status, out) == (2, "") and message in err, err
    assert not (tmp_path / "runs").exists()


WRONG = {
    "None": None, "text": "x", "integer": 3, "negative": -1, "nan": float("nan"), "list": [1], "nothing": [],
    "dict": {"a": 1}, "object": object(), "function": lambda: None, "bytes": b"x", "class": dict, "bool": True,
}  # fmt: skip
RIGHT = {
    "tx": {"None"},
    "validation": {"None", "class"},  # a class is a function, which may raise what it likes
    "eval_fn": {"None", "class"},
    "loss_fn": {"class"},
    "init_fn": {"class"},
    "batches": {"class"},
    "param_specs": {"None", "nothing"},
    "callbacks": {"nothing"},
    "trackers": {"nothing"},
    "name": {"text"},
}


@pytest.mark.parametrize("parameter", inspect.signature(zero.Trainer).parameters)
def test_arguments_of_another_kind_are_refused(config, parameter):
    """In one line of zero_jax's own, which names the argument, whatever it is given."""
    right = {"loss_fn": loss_fn, "init_fn": init_fn, "batches": batch_of, "config": config}
    for kind in WRONG.keys() - RIGHT.get(parameter, set()):
        with pytest.raises(ValueError, match=rf"^({parameter}\b|the first batch )") as caught:
            zero.Trainer(**right | {parameter: WRONG[kind]}).train(log=lambda _: None)
        assert len(str(caught.value).splitlines()) == 1, kind


def test_functions_of_the_trainer_take_their_own_records(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = OwnModel(init_fn=init_fn, loss_fn=loss_fn, batches=batch_of)
    evaluate = functools.partial(zero.trainer.evaluate, params={}, mesh=zero.make_mesh())
    for call, message in {
        lambda: prepare(config.zero, model=model): "config=ZeroConfig.*: give a zero.TrainConfig",
        lambda: prepare(config, model=loss_fn): "model=<function .*: give a zero.trainer.OwnModel",
        lambda: evaluate(loss_fn, config=config): "model=<function .*: give a zero.trainer.OwnModel",
        lambda: evaluate(model, config=config.zero): "config=ZeroConfig.*: give a zero.TrainConfig",
        lambda: zero.trainer.make_optimizer("adam", num_steps=3): "config='adam': give a zero.trainer.OptimizerConfig",
        lambda: zero.trainer.plot_runs("a.png", ["runs/a"]): r"runs\[0\]='runs/a': give what zero.trainer.read_run",
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_a_model_of_ones_own_needs_all_three(own, capsys):
    status, _, err = run([*COMMAND, *own[:4]], capsys)
    assert status == 2 and "--loss is of a model of your own, which needs --loss, --init and --batches: give --b" in err
    status, _, err = run([*COMMAND, "--validation", "mine.py:validation"], capsys)
    assert status == 2 and "--validation is of a model of your own" in err and "--loss and --init and --batches" in err
    assert "Of text it is --validation-data PATH" in err


def test_leaves_of_a_batch_have_the_leading_dims_of_the_first_one(config):
    """Edges and nodes of a graph; each leaf keeps its own size."""

    def graph(step, num_edges=12):
        return batch_of(step) | {"edges": np.zeros((num_edges, 2), np.int32)}

    result, log, _ = train(config, graph)
    assert result.status == "done" and "edges int32[12, 2], x float32[8, 32]" in log
    other = dataclasses.replace(config, name="other")
    with pytest.raises(ValueError, match="leaf 'edges' of step 3 has 14 examples, and that of the first batch 12"):
        train(other, [graph(0), graph(1), graph(2, num_edges=14)])
    with pytest.raises(ValueError, match="the batch of step 2 has no leaf 'edges' with examples, as the first batch"):
        train(dataclasses.replace(config, name="third"), [graph(0), batch_of(1)])

"""Functions of the user's own after steps: what they get, how they stop a run, and what they must not do."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero_jax as zero
from zero_jax.checkpoint import CheckpointConfig
from zero_jax.trainer import Callback, OptimizerConfig

pytestmark = pytest.mark.usefixtures("no_picture")
CONFIG = zero.TrainConfig(
    zero=zero.ZeroConfig(stage=3, min_shard_size=0),
    optimizer=OptimizerConfig(learning_rate=0.02, warmup_steps=1),
    checkpoint=CheckpointConfig(save_every=4),
    devices=2,
    steps=6,
    eval_every=2,
    log_every=3,
    name="run",
)


def init_fn(key):
    return {"w": jax.random.normal(key, (8, 8))}


def loss_fn(params, batch):
    return jnp.square(batch["x"] @ params["w"]).mean()


def batch_of(step):
    return {"x": np.random.default_rng(step).normal(size=(4, 8)).astype(np.float32)}


def trainer(out, callbacks, **changes):
    config = dataclasses.replace(CONFIG, out=str(out), **changes)
    return zero.Trainer(
        loss_fn, init_fn, batch_of, config=config, tx=optax.sgd(0.01), validation=[batch_of(9)], callbacks=callbacks
    )


def saved(out):
    return sorted(path.name for path in (out / "run/checkpoints").glob("step_*"))


def test_callbacks_get_the_metrics_and_the_state_of_each_of_their_steps(tmp_path):
    seen, every_second = [], []

    class Watching:
        every = 3

        def on_step(self, step, metrics, state):
            seen.append((step, metrics["step"], int(state.step), float(jnp.abs(state.params["w"]).sum())))

    def on_step(step, metrics, state):
        every_second.append((step, metrics["loss"], metrics.get("validation/loss")))
        metrics.clear()

    result = trainer(tmp_path, [Watching(), Callback(on_step, every=2)]).train()
    records = [dict(x) for x in zero.trainer.read_run(tmp_path / "run").train]
    validated = {x["step"]: x["loss"] for x in zero.trainer.read_run(tmp_path / "run").validation}
    assert result.status == "done" and [x[:3] for x in seen] == [(3, 3, 3), (6, 6, 6)] and seen[0][3] != seen[1][3]
    assert every_second == [(k, records[k - 1]["loss"], validated[k]) for k in (2, 4, 6)]
    assert len({x["loss"] for x in records}) == 6


def test_a_run_that_a_callback_stops_is_validated_saved_and_goes_on(tmp_path):
    lines = []

    def enough(step, metrics, state):
        return step == 3

    run = trainer(tmp_path, [enough], resume="auto")
    result = run.train(log=lines.append)
    assert (result.status, result.num_steps, result.exit_status) == ("stopped", 3, 0)
    assert saved(tmp_path) == ["step_00000003"] and int(run.state.step) == 3
    assert [x["step"] for x in zero.trainer.read_run(tmp_path / "run").validation] == [0, 2, 3]
    assert any(line == "stopping at step 3 of 6: enough returned True" for line in lines)
    again = trainer(tmp_path, [enough], resume="auto").train()
    assert (again.status, again.num_steps) == ("done", 6)


def donates(step, metrics, state):
    jax.jit(lambda x: x + 1, donate_argnums=0)(state.params["w"])


def changes(step, metrics, state):
    state.params["w"] = state.params["w"] * 2


def returns_the_loss(step, metrics, state):
    return metrics["loss"]


def raises(step, metrics, state):
    raise KeyError("no such metric")


@pytest.mark.parametrize(
    ("callback", "kind", "message", "is_saved"),
    [
        (donates, ValueError, "the callback donates, after step 2, has donated or deleted arrays of the state", False),
        (changes, ValueError, "the callback changes, after step 2, has changed the state", True),
        (returns_the_loss, ValueError, "returned [0-9.]+: return True to stop the run", True),
        (raises, KeyError, "no such metric", True),
        (lambda step, metrics, state: sys.exit(5), RuntimeError, "has ended Python .SystemExit.5..: return True", True),
    ],
)
def test_a_callback_that_does_what_it_must_not_ends_the_run_which_saves_what_is_there(
    callback, kind, message, is_saved, tmp_path
):
    lines = []
    with pytest.raises(kind, match=message) as caught:
        trainer(tmp_path, [Callback(callback, every=2)]).train(log=lines.append)
    assert saved(tmp_path) == (["step_00000002"] if is_saved else [])
    assert is_saved or any(line.startswith("the state of step 2 is NOT SAVED") for line in lines)
    if callback is raises:
        assert caught.value.__notes__ == ["the callback raises, after step 2, has raised this"]


def test_what_is_no_callback_is_refused_before_anything_is_made(tmp_path):
    for wrong, message in (
        ([3], r"callbacks\[0\]=3 is no function: give a function of \(step, metrics, state\)"),
        ([raises, lambda step: None], r"callbacks\[1\]: <lambda>\(step\) cannot be called with"),
        ([Callback(raises, every=0)], r"callbacks\[0\]: every=0: give a number of steps"),
        ([Callback], r"is a class: give an object of it"),
        (raises, r"callbacks=.*: give a list"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer(tmp_path, wrong).train()
    assert not any(tmp_path.iterdir())


def test_a_tracker_of_ones_own_gets_the_records_by_argument_and_by_config(tmp_path):
    records = []

    class Own:
        write = staticmethod(records.append)

        def close(self):
            records.append("closed")

    (tmp_path / "mine.py").write_text(
        "class Lines:\n    def __init__(self, run):\n        self.file = open(run.folder / 'own', 'w')\n\n"
        "    def write(self, record):\n        print(record['kind'], record['step'], file=self.file)\n\n"
        "    def close(self):\n        self.file.close()\n"
    )
    log = dataclasses.replace(CONFIG.log, tracker=f"{tmp_path}/mine.py:Lines")
    config = dataclasses.replace(CONFIG, out=str(tmp_path), log=log)
    zero.Trainer(loss_fn, init_fn, batch_of, config=config, trackers=[Own()]).train()
    assert [x if x == "closed" else x["step"] for x in records] == [1, 2, 3, 4, 5, 6, "closed"]
    assert (tmp_path / "run/own").read_text().split("\n")[:2] == ["train 1", "train 2"]
    wrong = dataclasses.replace(config, name="other", log=dataclasses.replace(log, tracker=f"{tmp_path}/mine.py:Line"))
    with pytest.raises(ValueError, match=r"tracker '.*mine.py:Line': .* has no function 'Line'; did you mean 'Lines'"):
        zero.Trainer(loss_fn, init_fn, batch_of, config=wrong).train()

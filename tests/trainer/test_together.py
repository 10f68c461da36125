"""Two real processes that differ are refused, and one that ends or fails first takes the other to a saved end.

All in one pair of processes, one run after another: a refusal or an end leaves both ready for the next.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import results_of

import zero_jax as zero
from zero_jax.trainer import OptimizerConfig

WORKER = pathlib.Path(__file__).with_name("together_worker.py")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each of two processes has reported."""
    folder = tmp_path_factory.mktemp("together")
    return results_of(WORKER, [(index, folder) for index in range(2)])


def both(results, name):
    return [result[name] for result in results]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (
            "config",
            [
                # not `hang_seconds`
                "in the config of the run: zero.stage is 3 in process 0, 1 in process 1; optimizer.learning_rate "
                "is 0.02 in process 0, 0.03 in process 1; steps is 5 in process 0, 6 in process 1; seed is 0 in "
                "process 0, 1 in process 1. Give all the same options and releases"
            ],
        ),
        ("batch size", ["batch leaf 'x' is float32[16, 8] in process 0, float32[8, 8] in process 1. Give all"]),
        (
            "loss",
            ["the train step: its program, line ", "dense<1.000000e+00> : tensor<f32> in process 0", "2.000000e+00"],
        ),
        ("width", ["leaf 'params/w' is float32[8, 8] in process 0, float32[8, 16] in process 1"]),
    ],
)
def test_processes_of_a_run_that_differ_are_refused_before_anything_is_made(name, parts, results):
    for error, checkpoints in both(results, name):
        assert error.startswith("ValueError: the processes differ in the ") and all(part in error for part in parts)
        assert checkpoints is None


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("learning rate", ["the train step: its program, line ", "dense<-1.000000e-01>", "dense<-2.000000e-01>"]),
        ("seed", ["the train state that they make: the state's key is [", "in process 0, ["]),
        ("batch size", ["batch leaf 'x' is float32[8, 8] in process 0, float32[12, 8] in process 1"]),
        ("evaluation", ["the evaluation step: its program, line ", "dense<1.000000e+00>", "dense<3.000000e+00>"]),
    ],
)
def test_processes_with_a_loop_of_ones_own_that_differ_are_refused_at_the_first_call(name, parts, results):
    for error in both(results, f"own {name}"):
        assert error.startswith("ValueError: the processes differ in ") and all(part in error for part in parts)


def test_processes_that_give_the_same_batch_are_refused_unless_each_is_to_use_its_part(results):
    for error, checkpoints in both(results, "equal"):
        assert "first batches of processes 0 and 1 are equal" in error and "--process-batches whole" in error
        assert checkpoints is None
    for error, _ in both(results, "not whole"):
        assert "the first batches of the processes differ" in error
    losses, examples = results[0]["losses"], results[0]["examples"]
    assert losses["whole"] == pytest.approx(losses["halves"], rel=1e-6) and len(losses["whole"]) == 5
    assert (examples["whole"], examples["halves"], examples["twice"]) == (40, 40, 80)


def test_two_processes_have_the_figures_of_one(results, tmp_path):
    """The run of `together_worker.py`, on four devices of this process, which has the batches of both."""

    def batch_of(step):
        shares = [np.random.default_rng(10 * step + index).normal(size=(4, 8)) for index in range(2)]
        return {"x": np.concatenate(shares).astype(np.float32)}

    config = zero.TrainConfig(
        zero=zero.ZeroConfig(stage=3, min_shard_size=0, precision="fp32", clip_norm=None),
        optimizer=OptimizerConfig(learning_rate=0.02, warmup_steps=1),
        devices=4,
        steps=5,
        eval_every=100,
        out=str(tmp_path),
        name="one",
    )
    loss_fn = lambda params, batch: jnp.square(batch["x"] @ params["w"]).mean()  # noqa: E731
    init_fn = lambda key: {"w": jax.random.normal(key, (8, 8))}  # noqa: E731
    zero.Trainer(loss_fn, init_fn, batch_of, config=config).train(log=lambda _: None)
    one = zero.trainer.read_run(tmp_path / "one").train
    assert results[0]["losses"]["done"] == pytest.approx([record["loss"] for record in one], rel=1e-6)
    assert results[0]["examples"]["done"] == one[-1]["examples"] == 40


def test_equal_processes_have_equal_programs_and_a_mesh_of_one_process_is_its_own_matter(results):
    first, second = both(results, "own step")
    assert isinstance(first, float) and first == second
    assert both(results, "alone") == [[1, 1]] * 2
    assert both(results, "sharded") == [[8, 8]] * 2


def test_a_sharded_batch_of_another_size_is_refused_in_both(results):
    """In the later one at once, and in the other where the processes meet next."""
    for index, error in enumerate(both(results, "sharded sizes")):
        assert "ValueError: a batch of process" in error and "has the global shapes x float32[" in error
        assert error.startswith(("ValueError: ", f"OtherProcessFailed: process {1 - index} failed: "))


def test_stages_that_differ_are_refused_before_one_process_gathers_params(results):
    """One that gathers nothing would leave the other waiting for it."""
    for name, does in (("own stage", "make"), ("own restored stage", "restore")):
        for error in both(results, name):
            assert error.startswith(
                f"ValueError: the processes differ in the train state that they {does}: the spec of"
            )
            assert "'params/w' is P(None, 'data') in process 0, P() in process 1" in error


def test_a_share_that_does_not_divide_over_the_devices_of_its_process_is_refused(results):
    for index, (size, next_size) in enumerate([(3, 4), (5, 6)]):
        assert results[index]["divided"] == (
            f"ValueError: batch leaf 'x' has {size} examples, which do not divide over the 2 devices with examples of "
            f"their own of process {index}: give a multiple of 2, for example {next_size}"
        )


def test_a_process_whose_batches_end_first_ends_the_run_with_its_state(results):
    saved = "step_00000003"
    for name in ("ended", "ended with a state"):
        assert both(results, name) == [["ended at step 3", [saved]]] * 2
    for name in ("goes on", "goes on with a state"):
        assert both(results, name) == [["done at step 5", [saved, "step_00000005"]]] * 2
    losses = results[0]["losses"]  # batches that a process has read and not used are read again
    assert losses["ended"] == pytest.approx(losses["done"], rel=1e-6) and len(losses["done"]) == 5
    assert losses["state"] == pytest.approx(losses["done"], rel=1e-6)


def test_a_resumed_process_with_fewer_batches_than_it_has_read_is_refused(results):
    (first, names), (second, _) = both(results, "shorter")
    message = "ResumeError: batches has no more batches after 3, and the run has read 5: give those of before, or"
    assert second.startswith(message) and first.startswith(f"OtherProcessFailed: process 1 failed: {message}")
    assert names == ["step_00000003", "step_00000005"]


@pytest.mark.parametrize(
    ("name", "who", "error", "saved"),
    [
        ("first batch", 1, "OSError: the disk is on fire", None),
        ("data", 1, "OSError: the disk is on fire", ["step_00000003"]),
        ("sizes", 1, "ValueError: batch leaf 'x' of step 4 has 2 examples", ["step_00000003"]),
        ("validation", 0, "OSError: the disk is on fire", ["step_00000002"]),
        ("log", 0, "RuntimeError: no log", ["step_00000004"]),
        ("callback", 0, "RuntimeError: the callback is lost", ["step_00000002"]),
    ],
)
def test_an_error_of_one_process_is_shown_in_both_and_the_last_good_state_saved(name, who, error, saved, results):
    for index, (shown, checkpoints) in enumerate(both(results, name)):
        assert shown.startswith(error if index == who else f"OtherProcessFailed: process {who} failed: {error}")
        assert checkpoints == saved
    if name == "data":
        assert f"stopping at step 3 of 5: OtherProcessFailed: process 1 failed: {error}" in results[0]["lines"]


def test_a_callback_of_one_process_stops_both_and_other_callbacks_are_refused(results):
    assert both(results, "stopped") == [["stopped at step 2", ["step_00000002"]]] * 2
    assert "stopping at step 2 of 5: stops in process 1 returned True" in results[0]["lines"]
    for error, _ in both(results, "callbacks"):
        assert 'callbacks is [["stops", 1]] in process 0, [["stops", 2]] in process 1' in error


def test_other_numbers_or_sizes_of_validation_batches_are_refused(results):
    sizes = (
        "those of the batch before in process 0; x float32[4, 8] in process 1. Give all processes batches of the same"
    )
    for error, _ in both(results, "sizes of validation batches"):
        assert error.startswith(
            f"ValueError: validation batches of the processes differ in their global sizes: {sizes}"
        )
    for error, _ in both(results, "fewer validation batches"):
        assert error.startswith(
            "ValueError: the validation batches of process 1 end after 2, and others have more: give"
        )

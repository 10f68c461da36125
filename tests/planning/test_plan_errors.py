"""What a plan tells when the model, the cache or the process that wants it gives up."""

import functools
import json
import os
import subprocess
import sys
import threading

import cloudpickle
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import planned
import pytest

import zero_jax as zero
from zero_jax.cli import commands as cli
from zero_jax.planning import errors as plan_errors
from zero_jax.planning import job as compile_job
from zero_jax.planning import process as compile_process
from zero_jax.planning import report as plan_report
from zero_jax.planning import step_time as plan_time

pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'jax[tpu]'")
pytestmark = pytest.mark.tpu_compiler
TOPOLOGY = "v5e:2x2"
CONFIG = zero.ZeroConfig(stage=3, precision="bf16")
OWN = ["--loss", "planned:loss_fn", "--init", "planned:init_fn", "--batch", "planned:batch", "--batch-size", "8"]


def explained(function, *arguments):
    """Returns what is told of an error that a function of zero_jax raises."""
    try:
        function(*arguments)
    except Exception as error:
        return plan_errors.explain(error.with_traceback(error.__traceback__.tb_next))
    pytest.fail("nothing was raised")


def explained_trace(loss_fn):
    mesh = zero.make_mesh(data=4, devices=jax.devices()[:4])
    params = jax.eval_shape(planned.init_fn, jax.random.key(0))
    return explained(functools.partial(zero.trace_loss, mesh=mesh, config=CONFIG), loss_fn, params, planned.batch())


def unpacks(params, batch):
    layers, count, more = params["layers"]
    return layers + count + more


def chunks_wrongly(params, batch):
    labels = jnp.zeros(8, jnp.int32)
    head = params["layers"][0]
    losses = functools.partial(zero.losses.softmax_cross_entropy_with_integer_labels, mesh=None, chunk_size=0)
    return losses(batch["x"], head, labels).mean()


def line_of(text):
    with open(__file__, encoding="utf-8") as lines:
        return 1 + next(i for i, line in enumerate(lines) if line.strip() == text)


def test_an_error_of_the_model_names_its_line():
    told = explained_trace(planned.wrong_loss)
    assert type(told) is zero.ModelError
    assert str(told).splitlines()[0] == "the model raised KeyError: 'z'"
    assert "planned.py:" in str(told) and 'in wrong_loss: return loss_fn(params, batch) + batch["z"]' in str(told)
    assert "zero_jax/" not in str(told).replace("\\", "/")
    # A ValueError of the model's own is one too: without its line nobody could tell where it came from.
    told = explained_trace(unpacks)
    assert type(told) is zero.ModelError
    line = 'layers, count, more = params["layers"]'
    assert f"test_plan_errors.py:{line_of(line)} in unpacks: {line}" in str(told)


def test_an_error_of_zero_jax_stays_what_it_is():
    told = explained_trace(lambda params, batch: batch["x"])
    assert type(told) is ValueError and str(told).startswith("loss_fn returned a loss of shape (8, 256)")
    assert "\n" not in str(told)
    told = explained(functools.partial(zero.ZeroConfig, stage=4))  # from a method that has no file
    assert type(told) is ValueError and str(told) == "unknown ZeRO stage 4: choose one of 0, 1, 2, 3"
    told = explained_trace(chunks_wrongly)  # found by zero_jax, in a call of the model's
    assert type(told) is ValueError and "in chunks_wrongly" in str(told)
    told = explained(functools.partial(plan_report.make_report, name="none"), None)
    assert type(told) is RuntimeError and "Traceback" in str(told)


def test_the_compilers_own_error_is_told_in_a_line():
    options = {"batch": planned.batch(), "topology": TOPOLOGY, "config": CONFIG, "cache": None, "own_process": False}
    refused = functools.partial(zero.plan, compiler_options={"xla_nonsense": "1"}, **options)
    told = explained(refused, planned.loss_fn, planned.init_fn, optax.adamw(1e-3))
    assert type(told) is zero.CompilerCrash
    assert str(told).startswith("the compiler refuses the program: ") and "xla_nonsense" in str(told)
    assert len(str(told).splitlines()) == 1


@pytest.mark.parametrize("command", ["memory", "comms"])
def test_the_command_tells_the_models_error(command, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--estimate", "--topology", TOPOLOGY, "--loss", "planned:wrong_loss", *OWN[2:]])
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert not out
    progress, error, line = err.splitlines()
    assert progress == "planned:wrong_loss: tracing"
    assert error == f"zero-jax {command}: error: the model raised KeyError: 'z'"
    assert "planned.py:" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model", "gpt-tiny"],
            "--model gpt-tiny: that is of the presets, and --loss stands for a model of your own",
        ),
        (["--num-layers", "2"], "error: --num-layers: that is of the presets"),
        (["--loss-chunk", "64"], "--loss-chunk: that is of the presets"),
        (["--batch-size", "many"], "argument --batch-size: invalid int value: 'many'"),
        (["--pipe", "3"], "does not divide the 4 devices: change one of them, or the topology"),
        (["--timeout", "0"], "timeout_seconds=0.0: give a positive number of seconds"),
        (["--batch", "planned:loss_fn"], "--batch 'planned:loss_fn': loss_fn(params, batch) cannot be called with ()"),
        (["--batch", "planned:none"], "the batch None holds no arrays"),
        (["--batch", "planned:words"], "batch leaf 'x/0' is 'one' of type str, no array: give arrays or"),
        (["--auto", "--max-compiles", "0", "--write-config", "x"], "--write-config: it takes a plan that was compiled"),
        (["--write-config", "x"], "--write-config is for the models that `zero-jax train` knows, not for --loss"),
        (["--auto", "--write-config", "x"], "--write-config is for the models that `zero-jax train` knows"),
    ],
)
def test_what_would_say_nothing_is_refused(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where what is not refused would be written
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", "--topology", TOPOLOGY, "--cache", "none", *OWN, *arguments])
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topology": 8}, "topology=8 is no name"),
        ({"timeout_seconds": "3"}, "timeout_seconds='3': give a positive number"),
        ({"batch": lambda: planned.batch()}, "batch is <function .* of type function, no array"),
        ({"batch": {}}, "the batch {} holds no arrays"),
    ],
)
def test_plans_of_another_kind(options, message):
    options = {"batch": planned.batch(), "topology": TOPOLOGY, "config": CONFIG, "cache": None, **options}
    with pytest.raises(ValueError, match=message):
        zero.plan(planned.loss_fn, planned.init_fn, optax.adamw(1e-3), **options)
    if "timeout_seconds" not in options:
        with pytest.raises(ValueError, match=message):
            zero.plan_auto(planned.loss_fn, planned.init_fn, optax.adamw(1e-3), **options)


def test_a_model_that_cannot_be_sent_to_the_process_that_compiles():
    lock = threading.Lock()

    def loss_fn(params, batch):
        with lock:
            return planned.loss_fn(params, batch)

    with pytest.raises(ValueError, match=r"cannot be sent to the process that compiles it .*lock.*: keep locks, open"):
        zero.plan(
            loss_fn, planned.init_fn, optax.adamw(1e-3), batch=planned.batch(), topology=TOPOLOGY, config=CONFIG,
            cache=None,
        )  # fmt: skip


def test_an_equinox_module_that_cannot_be_imported():
    """As one of a script: its class would have no fields in the process that compiles."""

    class Model(eqx.Module):
        w: jax.Array

    def init_fn(key):
        return Model(jax.random.normal(key, (8, 8)))

    batch = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    fields = {"batch": batch, "topology": TOPOLOGY, "config": CONFIG, "cache": None}
    with pytest.raises(ValueError, match=r"the Equinox module .*Model of .*define them in a module.*own_process=False"):
        zero.plan(lambda model, x: jnp.square(x @ model.w).mean(), init_fn, optax.sgd(0.1), **fields)


def test_a_program_that_cannot_be_kept_is_told_all_the_same(tmp_path):
    (tmp_path / "file").write_text("no folder")
    assert compile_job._save(tmp_path / "programs" / "one.program", {"text": ""}) == ""
    assert "File exists" in compile_job._save(tmp_path / "file" / "one.program", {"text": ""})
    report = zero.plan(
        planned.loss_fn, planned.init_fn, optax.adamw(1e-3), batch=planned.batch(), topology=TOPOLOGY, config=CONFIG,
        model=2, cache=tmp_path / "file", own_process=False,
    )  # fmt: skip
    assert report.fits
    whole, kept = report.notes
    assert whole.startswith("no param is sharded over `model`: its 2 devices hold and compute the same")
    assert kept.startswith("the program could not be kept for the next time") and "give another cache" in kept
    assert f"\nnote: {kept}\n" in str(report)


@pytest.mark.slow
def test_a_long_compile_is_told_of_a_shorter_one(monkeypatch):
    monkeypatch.setattr(compile_process, "_SECONDS_TO_HINT", 0)
    arguments = {"batch": planned.batch(), "topology": TOPOLOGY, "config": CONFIG, "cache": None}
    for quick in (False, True):
        lines = []
        zero.plan(planned.loss_fn, planned.init_fn, optax.sgd(0.1), quick=quick, log=lines.append, **arguments)
        assert sum("--quick (quick=True) leaves it out" in line for line in lines) == (not quick)


def test_leaves_over_a_part_of_the_devices_have_a_note():
    """Three slices do not divide 256."""
    report = zero.plan(
        planned.loss_fn, planned.init_fn, optax.adamw(1e-3), batch=planned.batch(12),
        topology="3xv5e:2x2", config=CONFIG, cache=None, own_process=False,
    )  # fmt: skip
    (note,) = (note for note in report.notes if "over a part of `data` alone" in note)
    assert "over data_0: no dims are divisible by all of its 12 devices; take a number of devices" in note


def test_small_figures_are_not_nothing():
    times = {49.706: "49.706 s", 0.1: "0.100 s", 0.0123: "12.30 ms", 173e-6: "173 us", 0: "0.000 s"}
    assert {seconds: plan_time._shown(seconds) for seconds in times} == times


def test_a_search_by_estimate_alone_finds_something(capsys):
    """The exit status says that something fits, and a line that the tracing goes on."""
    status = cli.main(["plan", "--auto", "--max-compiles", "0", "--stage", "3", "--topology", TOPOLOGY, *OWN, "--json"])
    out, err = capsys.readouterr()
    assert status == 0
    assert json.loads(out)["ranking"]["best"]
    assert "tracing the loss with remat=own, model=1" in err


@pytest.mark.slow
def test_the_compilers_process_ends_with_the_one_that_wants_it(tmp_path):
    """However that has ended: here the process whose number it is given is not its parent (any more)."""
    folder = tmp_path / "zero_jax-job"
    folder.mkdir()
    job = compile_job.Job(
        loss_fn=planned.endless, init_fn=planned.init_fn, tx=optax.sgd(1.0), batch=planned.batch(), config=CONFIG,
        topology=TOPOLOGY,
    )  # fmt: skip
    (folder / "job").write_bytes(
        cloudpickle.dumps((plan_report.make_report, job, {"name": "endless", "cache": None}, {}))
    )
    environment = {**os.environ, **compile_process.COMPILE_ONLY, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "zero_jax.planning.worker", str(folder), "1"]
    assert os.getpid() != 1
    ended = subprocess.run(command, env=environment, capture_output=True, timeout=120)
    assert ended.returncode == 1, ended.stderr
    assert not folder.exists()


def test_a_graph_is_planned_as_it_is():
    graph = {"nodes": np.zeros((24, 8), np.float32), "edges": np.zeros((40, 2), np.int32), "size": np.float32(24)}
    with pytest.raises(ValueError, match=r"differ in their leading dim: {'edges': 40, 'nodes': 24}; no batch of 8"):
        compile_job.batch_of(graph, 8)
    assert compile_job.batch_of({"x": graph["nodes"], "size": graph["size"]}, 8)["x"].shape == (8, 8)


def refuses_its_batch(params, batch):
    raise ValueError("the batch has no masks")


def refuses_its_batch_somewhere(mesh):
    if mesh.shape["model"] == 4:
        raise ValueError("3 heads do not divide over 4 devices")
    return planned.loss_fn


def makes_no_params(key):
    raise ValueError("no such checkpoint")


def search_by_estimate(loss_fn=planned.loss_fn, init_fn=planned.init_fn, **options):
    settings = {"batch": planned.batch(16), "topology": TOPOLOGY, "config": CONFIG, "max_compiles": 0}
    return zero.plan_auto(loss_fn, init_fn, optax.adamw(1e-3), **{**settings, **options})


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ({"loss_fn": refuses_its_batch}, {}, "the batch has no masks"),
        ({"loss_fn": refuses_its_batch}, {"remats": ("full", "dots")}, "the batch has no masks"),
        ({"loss_fn": {"a": planned.loss_fn, "b": refuses_its_batch}}, {}, "the batch has no masks"),
        ({"init_fn": makes_no_params}, {"config": zero.ZeroConfig(param_specs=planned.SPECS)}, "no such checkpoint"),
        ({"loss_fn": lambda params, batch: batch["x"]}, {}, "a loss of shape"),
    ],
)
def test_what_a_model_raises_ends_a_search(model, options, message):
    """It is no reason to reject a setting: it would reject them all."""
    with pytest.raises(ValueError, match=message) as caught:
        search_by_estimate(**model, **options)
    assert message == "a loss of shape" or caught.traceback[-1].path.name == "test_plan_errors.py"


def test_what_zero_jax_refuses_for_a_model_rejects_settings():
    found = search_by_estimate(lambda params, batch: jnp.mean(batch["x"] @ params["layers"][0]), remats=("own", "full"))
    reasons = {entry.reason for entry in found.ranking.rejected if entry.setting.remat == "full"}
    assert found.ranking.best is not None and {entry.setting.remat for entry in found.ranking.ranked} == {"own"}
    assert len(reasons) == 1 and "finds nothing to recompute" in reasons.pop()


def test_sizes_of_the_model_axis_that_the_model_refuses_are_left_out():
    said, config = [], zero.ZeroConfig(param_specs=planned.SPECS)
    loss_fn = zero.MeshLoss(refuses_its_batch_somewhere)
    found = search_by_estimate(loss_fn, config=config, stages=(3,), remats=("own",), log=said.append)
    assert {x.setting.model for x in (*found.ranking.ranked, *found.ranking.rejected)} == {1, 2}
    assert "model=4 is left out: 3 heads do not divide over 4 devices" in said


def test_products_without_tiles_are_compiled_by_a_library():
    """As XLA:GPU refuses those of 257 tokens where there is no GPU."""
    tried = []

    class Lowered:
        def compile(self, compiler_options):
            tried.append({name for name in compiler_options if "triton" in name})
            if len(tried) == 1:
                raise jax.errors.JaxRuntimeError("INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot")
            return jax.jit(jnp.sin).lower(jnp.ones(4)).compile()

    saved, _ = compile_job.compile_lowered(Lowered(), {}, quick=False)
    assert tried == [set(), {"xla_gpu_enable_triton_gemm"}] and "sine" in saved["text"]

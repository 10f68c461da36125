"""Plans: compiled apart, cached, and whatever happens to the compiler's process is told."""

import dataclasses
import functools
import gzip
import importlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import optax
import planned
import pytest

import zero_jax as zero
from zero_jax.cli import commands as cli
from zero_jax.cli import plan as cli_plan
from zero_jax.core.files.user_cache import cache_folder
from zero_jax.planning import job as compile_job
from zero_jax.planning import process as compile_process
from zero_jax.planning.process import CompileOptions

pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'jax[tpu]'")
pytestmark = pytest.mark.tpu_compiler
TOPOLOGY = "v5e:2x2"
CONFIG = zero.ZeroConfig(stage=3, precision="bf16")


def plan(cache, loss_fn=planned.loss_fn, batch=None, **options):
    settings = {"topology": TOPOLOGY, "config": CONFIG, "name": "small", **options}
    return zero.plan(
        loss_fn, planned.init_fn, optax.adamw(1e-3), batch=batch or planned.batch(), cache=cache, **settings
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def report(cache):
    return plan(cache, own_process=False)


def test_a_plan_tells_what_a_device_holds_and_sends(report):
    num_params = planned.DEPTH * planned.WIDTH**2
    assert report.num_params == report.comms.num_params == num_params
    assert report.mesh == {"replica": 1, "data": 4, "model": 1}
    assert report.fits
    assert report.usable_bytes == int(15.75 * 2**30)
    # 12 bytes a param over 4 devices; the batch, and a counter and a key in tiles of 512 bytes, on top.
    state = 12 * num_params / 4
    assert state <= report.memory.argument_bytes <= 1.1 * state + 2 * 8 * planned.WIDTH * 4
    assert report.needed_bytes >= report.memory.total_bytes
    assert report.comms.sent_bytes == pytest.approx(report.comms_estimate.sent_bytes, rel=0.6)
    assert 0 < report.time.step_seconds < 1
    assert report.time.unit == "examples"


@pytest.mark.slow
def test_a_quick_plan_is_exact_but_for_the_time(report, cache, tmp_path):
    quick = plan(tmp_path, quick=True)
    assert (report.has_code, quick.has_code) == (True, False)
    assert quick.comms == report.comms
    for name in ("arguments", "output_bytes", "alias_bytes", "heap_bytes", "host_bytes", "layout", "live_peak_bytes"):
        assert getattr(quick.memory, name) == getattr(report.memory, name), name
    assert quick.needed_bytes == report.needed_bytes - report.memory.generated_code_bytes
    assert quick.time.exposed_seconds == pytest.approx(report.time.exposed_seconds, rel=0.01)
    assert "without code" in str(quick) and "about what programs reach" in str(quick)
    again = plan(tmp_path, quick=True)
    assert again.from_cache and not again.has_code
    assert plan(cache, quick=True, own_process=False).has_code  # a whole program that is there is taken


def test_what_the_optimizer_freezes_has_no_gradients(cache):
    settings = {"batch": planned.batch(), "topology": TOPOLOGY, "config": CONFIG, "name": "frozen", "cache": cache}
    frozen = zero.plan(planned.loss_fn, planned.init_fn, optax.set_to_zero(), own_process=False, **settings)
    assert frozen.memory_estimate.by_group["grads"] == 0
    assert set(frozen.comms_estimate.by_kind) == {"all-gather"}
    assert set(frozen.comms_estimate.by_phase) == {"forward"}
    assert "backward" not in frozen.comms.by_phase


def test_it_prints_as_a_page_and_as_json(report):
    text = str(report)
    for part in ("fits: needs", "4 x TPU v5 lite, data=4", "(an estimate)", "the time assumes", "opt_state"):
        assert part in text
    plain = json.loads(json.dumps(report.to_json()))
    assert plain["fits"] is True
    assert plain["num_devices"] == 4
    assert plain["memory"]["argument_bytes"] == report.memory.argument_bytes
    assert plain["time"]["assumptions"]


def test_what_makes_the_traffic_more_than_the_ideal_is_no_scalar(report):
    rows = [dataclasses.replace(row, sent_bytes=2 * row.sent_bytes) for row in report.comms.rows]
    scalar = dataclasses.replace(rows[0], phase="update", sent_bytes=6.0, num_executions=1)
    more = dataclasses.replace(report, comms=dataclasses.replace(report.comms, rows=(*rows, scalar)))
    (line,) = [line for line in more.summary().splitlines() if line.startswith("above it")]
    assert "ideally" in line and "update" not in line


def test_a_program_is_compiled_once(cache, report, monkeypatch):
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_, **__: pytest.fail("compiled again"))
    again = plan(cache, own_process=False)
    assert again.from_cache
    assert again.memory == report.memory
    assert again.comms == report.comms
    assert again.time == report.time


@pytest.mark.slow
def test_another_config_or_layout_is_another_program(cache, report):
    other = plan(cache, own_process=False, config=dataclasses.replace(CONFIG, clip_norm=1.0))
    assert not other.from_cache
    assert not plan(cache, own_process=False, replica=2).from_cache


@pytest.mark.slow
def test_a_plan_lists_the_compiler_options_with_what_each_is_for(cache):
    settings = {"topology": "v5p:2x2x1", "own_process": False}
    own = {"xla_tpu_enable_latency_hiding_scheduler": True}
    report = plan(cache, compiler_options=own, **settings)
    options = zero.compiler_options(mesh=zero.make_mesh(topology="v5p:2x2x1"), config=CONFIG)
    assert options and {o.name: o.value for o in report.compiler_options} == {**options, **own}
    assert all(
        o.purpose and f"  - {o.name}=" in str(report) and o.purpose in str(report) for o in report.compiler_options
    )
    listed = json.loads(json.dumps(report.to_json()))["compiler_options"]
    assert {entry["name"]: entry["value"] for entry in listed} == {**options, **own}
    off = plan(cache, config=dataclasses.replace(CONFIG, overlap=False), **settings)
    guards = {"xla_disable_hlo_passes"} if jax.__version_info__ < (0, 12) else set()
    assert not off.from_cache and {option.name for option in off.compiler_options} == guards
    assert ("compiled with" in str(off)) == bool(guards)


def test_a_broken_cache_entry_is_as_good_as_none(report, tmp_path):
    plan(tmp_path, own_process=False)
    (entry,) = tmp_path.iterdir()
    whole = entry.read_bytes()
    mark = compile_job._MARK
    changed = bytes([*whole[:200], whole[200] ^ 1, *whole[201:]])
    for broken in (whole[:100], b"", gzip.compress(b"[]"), mark, changed):
        entry.write_bytes(whole)
        assert compile_job._load(entry)
        entry.write_bytes(broken)
        assert compile_job._load(entry) is None
    again = plan(tmp_path, own_process=False)
    assert not again.from_cache and compile_job._load(entry)
    assert again.memory == report.memory
    assert [path.name for path in tmp_path.iterdir()] == [entry.name]


def test_without_a_cache_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not plan(None, own_process=False).from_cache
    assert not list(tmp_path.iterdir())
    assert cache_folder("programs") == tmp_path / "zero_jax" / "programs"
    default = [CompileOptions(cache=cache).cache_path for cache in ("default", "")]
    assert default == [cache_folder("programs")] * 2
    assert CompileOptions(cache=pathlib.Path("default")).cache_path == pathlib.Path("default")


@pytest.mark.slow
def test_a_process_of_its_own_reports_the_same(cache, report):
    said = []
    apart = plan(cache, log=said.append)
    assert apart.from_cache
    assert apart.memory == report.memory
    assert "small on v5e:2x2" in said[0]


@pytest.mark.slow
def test_closures_reach_the_process(cache):
    """The process makes the program that this one makes: with another value of the closure it would be another one."""

    def scaled(scale):
        return lambda params, batch: scale * planned.loss_fn(params, batch)

    two, three = scaled(jnp.float32(2)), scaled(jnp.float32(3))
    here = plan(cache, loss_fn=two, own_process=False)
    assert not here.from_cache and plan(cache, loss_fn=two).from_cache
    assert not plan(cache, loss_fn=three, own_process=False).from_cache


def test_what_does_not_fit_is_told_with_its_size(cache):
    """64 GB of activations a device, of 15.75 GiB."""
    refused = plan(cache, batch=planned.batch(4 * 2**26), own_process=False)
    assert not refused.fits
    assert refused.needed_bytes > 64e9
    assert refused.memory is None and refused.time is None
    assert "RESOURCE_EXHAUSTED" in refused.refusal
    assert "DOES NOT FIT" in str(refused)
    assert "\nwhat helps  residuals takes the most by formula, " in str(refused)
    json.dumps(refused.to_json())
    assert plan(cache, batch=planned.batch(4 * 2**26), own_process=False).from_cache


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (planned.killed, "was killed while tracing; most likely this machine ran out of memory"),
        (
            planned.crashed,
            r"was ended by SIGABRT while tracing. Its last words:\n(.*\n)*  .*the compiler's last words",
        ),
    ],
)
def test_a_process_that_ends_badly(loss_fn, message, cache):
    with pytest.raises(zero.CompilerCrash, match=message):
        plan(cache, loss_fn=loss_fn)


@pytest.mark.slow
def test_an_error_of_the_users_own_function_arrives(cache):
    with pytest.raises(zero.ModelError, match=r"the model raised KeyError: 'z'\n.*planned.py:\d+ in wrong_loss"):
        plan(cache, loss_fn=planned.wrong_loss)


@pytest.mark.slow
def test_a_process_that_takes_too_long_is_ended(cache):
    started = time.monotonic()
    with pytest.raises(zero.CompilerCrash, match=r"small: still (starting|tracing) after 2 s, which is all the time"):
        plan(cache, loss_fn=planned.endless, timeout_seconds=2)
    assert time.monotonic() - started < 120


def test_ctrl_c_ends_the_process_too(cache, monkeypatch):
    started = []
    popen = subprocess.Popen

    def start(*arguments, **options):
        started.append(popen(*arguments, **options))
        return started[-1]

    def interrupt(line):
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(KeyboardInterrupt):
        plan(cache, loss_fn=planned.endless, log=interrupt)
    (process,) = started
    assert process.poll() is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topology": "v5p:2"}, "the compiler refuses it"),
        ({"topology": "v9:2x2"}, "unknown topology 'v9:2x2'"),
        ({"replica": 3}, "replica=3"),
        ({"batch": planned.batch(6)}, "multiple of 4"),
        ({"data_layout": (3,)}, "multiplies to 3"),
    ],
)
def test_bad_input(options, message, cache):
    with pytest.raises(ValueError, match=message):
        plan(cache, own_process=False, **options)


def test_layouts_are_compiled_and_ranked(cache):
    found = zero.plan_layouts(
        planned.loss_fn, planned.init_fn, optax.adamw(1e-3), batch=planned.batch(), topology=TOPOLOGY, config=CONFIG,
        cache=cache, own_process=False,
    )  # fmt: skip
    assert set(found.plans) == {(4,), (2, 2)}
    assert found.chosen == (4,)
    assert found.plans[found.best].time.step_seconds == min(r.time.step_seconds for r in found.plans.values())
    assert "what make_mesh chooses" in str(found) and str(found).split("\n")[0].split()[-2] == "MB"
    json.dumps(found.to_json())
    # As of XLA:GPU, which makes programs that do not fit.
    large = {layout: dataclasses.replace(report, fits=False) for layout, report in found.plans.items()}
    assert str(dataclasses.replace(found, plans=large)).count("does not fit") == 2


@pytest.mark.parametrize(
    ("topology", "data", "layouts"),
    [
        ("v5p:4x4x8", 128, {(128,), (4, 32), (16, 8), (4, 4, 8)}),
        ("2xv5e:4x4", 32, set()),  # make_mesh alone knows of slices
        ("tpu7x:2x2x1", 8, {(8,), (2, 4), (4, 2), (2, 2, 2)}),
        ("h100:1x8", 8, {(8,)}),
        ("v5p:2x2x4", 4, {(4,)}),  # the rest is of `replica`
        ("v5e:1x1", 1, {(1,)}),
    ],
)
def test_which_layouts_are_tried(topology, data, layouts):
    module = importlib.import_module("zero_jax.planning.plans")  # the package's own name is the function
    assert set(module._merged_dims(topology, data)) == layouts


def run(command, capsys, cache, *arguments):
    status = cli.main([command, "--topology", TOPOLOGY, "--cache", str(cache), *arguments])
    return status, *capsys.readouterr()


OWN = ["--loss", "planned:loss_fn", "--init", "planned:init_fn", "--batch", "planned:batch", "--batch-size", "8"]


@pytest.mark.slow
def test_the_command_takes_a_model_of_ones_own(cache, capsys):
    status, out, _ = run("plan", capsys, cache, *OWN, "--json")
    found = json.loads(out)
    assert status == 0
    assert found["num_params"] == planned.DEPTH * planned.WIDTH**2
    assert found["batch_size"] == 8


@pytest.mark.slow
def test_the_commands_memory_and_comms(cache, capsys):
    status, out, _ = run("memory", capsys, cache, *OWN)
    assert status == 0
    assert "side by side" in out and "difference" in out
    status, out, _ = run("comms", capsys, cache, *OWN)
    assert status == 0
    assert "all-gather" in out and "ratio" in out
    for command, batch in (("memory", OWN[4:]), ("comms", ["--batches", "planned:batches"])):
        status, out, err = run(command, capsys, cache, *OWN[:4], *batch, "--estimate", "--json")
        assert status == 0 and err == "planned:loss_fn: tracing\n"
        assert json.loads(out)["num_params"] == planned.DEPTH * planned.WIDTH**2


@pytest.mark.slow
def test_the_command_takes_a_file(cache, capsys, tmp_path):
    shutil.copy(planned.__file__, tmp_path / "their_model.py")
    file = str(tmp_path / "their_model.py")
    refs = ["--loss", f"{file}:loss_fn", "--init", f"{file}:init_fn", "--batch", f"{file}:batch"]
    status, out, _ = run("plan", capsys, cache, *refs, "--json")
    assert status == 0
    assert json.loads(out)["batch_size"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--loss", "planned:los_fn", *OWN[2:]], "has no function 'los_fn'; did you mean 'loss_fn'?"),
        (["--loss", "plannned:loss_fn", *OWN[2:]], "cannot import 'plannned'"),
        (["--loss", "planned", *OWN[2:]], "write module:function"),
        (OWN[:4], "needs --loss, --init and --batches: give --batches too"),
        ([*OWN, "--batches", "planned:batches"], "--batch makes one batch and --batches all of them: give one"),
        ([*OWN[:4], "--batches", "planned:batch"], "batch() returned a dict, a single batch perhaps"),
        (["--model", "gpt-tiny", "--batch-size", "6"], "make the batch size a multiple of 4"),
        (["--topology", "v5p-32"], "did you mean 'v5p:2x2x4'"),
        (["--data-layout", "2by2"], "give sizes of mesh axes, such as 8x8x16"),
        (["--data-layout", "2x3"], "multiplies to 6, not to data=4: give sizes whose product is that"),
        (["--model", "GPT-Tiny"], "invalid choice: 'GPT-Tiny': did you mean 'gpt-tiny'? Choose one of"),
        (["--model", "../x"], "invalid choice: '../x': Choose one of"),
    ],
)
def test_bad_input_of_the_command(arguments, message, cache, capsys):
    with pytest.raises(SystemExit) as caught:
        run("plan", capsys, cache, *arguments)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_trace_that_needs_more_memory_than_there_is_is_a_line(cache, capsys, monkeypatch):
    def too_large(*_, **__):
        raise MemoryError("Unable to allocate 4.63 TiB")

    monkeypatch.setattr("zero_jax.cli.plan.trace_step_loss", too_large)
    with pytest.raises(SystemExit):
        run("comms", capsys, cache, "--estimate", "--model", "gpt-tiny")
    err = capsys.readouterr().err.splitlines()
    assert "too small (Unable to allocate 4.63 TiB): give a smaller model, seq_len or batch" in err[-1]
    assert len([line for line in err if "error" in line]) == 1


def test_the_papers_tables(capsys):
    assert cli.main(["memory", "--paper"]) == 0
    assert "31.4" in capsys.readouterr().out


@pytest.mark.slow
def test_a_picture_of_the_stages(cache, capsys, tmp_path):
    picture = tmp_path / "memory.svg"
    status, out, _ = run("memory", capsys, cache, *OWN, "--plot", str(picture), "--json")
    assert status == 0
    assert [row["stage"] for row in json.loads(out)] == [0, 1, 2, 3]
    assert "stage 3" in picture.read_text()


def test_a_picture_by_formula_compiles_nothing(cache, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(cli_plan.Request, "compile", None)
    picture = tmp_path / "memory.svg"
    status, out, _ = run("memory", capsys, cache, *OWN, "--estimate", "--plot", str(picture), "--json")
    assert status == 0 and {row["measured"] for row in json.loads(out)} == {None}
    assert "stage 3" in picture.read_text() and "measured" not in picture.read_text()


@pytest.mark.slow
def test_the_worker_leaves_no_half_written_result(tmp_path):
    """A result appears in one move, so that a killed process leaves none."""
    import cloudpickle

    (tmp_path / "job").write_bytes(cloudpickle.dumps((functools.partial(int), None, {}, {})))
    environment = {**os.environ, **compile_process.COMPILE_ONLY, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "zero_jax.planning.worker", str(tmp_path)]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    assert isinstance(cloudpickle.loads((tmp_path / "result").read_bytes()), RuntimeError)
    assert not (tmp_path / "result.partial").exists()

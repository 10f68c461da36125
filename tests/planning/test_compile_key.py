"""The cache of compiled programs knows all that a program depends on: each input, changed, is another key."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import optax
import planned
import pytest

import zero_jax as zero
from zero_jax.planning import job as compile_job
from zero_jax.planning import key as compile_key
from zero_jax.planning import process as compile_process
from zero_jax.planning import worker as plan_worker

pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'jax[tpu]'")
pytestmark = [pytest.mark.tpu_compiler, pytest.mark.usefixtures("all_frames")]  # callers are not in the key
CONFIG = zero.ZeroConfig(stage=3)


def job_of(**changes):
    return compile_job.Job(
        **{
            "loss_fn": planned.loss_fn,
            "init_fn": planned.init_fn,
            "tx": optax.sgd(1.0),
            "batch": planned.batch(),
            "config": CONFIG,
            "topology": "v5e:2x2",
            **changes,
        }
    )


def lower(job):
    mesh = job.mesh()
    return zero.make_train_step(job.loss_fn, job.tx, mesh=mesh, config=job.config).lower(job.state(mesh), job.batch)


@pytest.fixture(scope="module")
def lowered(all_frames):
    return lower(job_of())


def key(lowered, job=None):
    job = job or job_of()
    return compile_key.digest(compile_key.compile_inputs(lowered, job, job.mesh()))


def scoped(params, batch):
    with jax.named_scope("elsewhere"):
        return planned.loss_fn(params, batch)


def other_init(key):
    return {"blocks": planned.init_fn(key)["layers"]}


# What each field of a job is changed to. Those that the program's text or names say are lowered again.
JOBS = {
    "loss_fn": {"loss_fn": scoped},
    "init_fn": {"init_fn": other_init, "loss_fn": lambda p, b: planned.loss_fn({"layers": p["blocks"]}, b)},
    "tx": {"tx": optax.sgd(0.5)},
    "batch": {"batch": planned.batch(16)},
    "config": {"config": dataclasses.replace(CONFIG, clip_norm=1.0)},
    "topology": {"topology": "v6e:2x2"},
    "replica": {"replica": 2},
    "model": {"model": 2},
    "pipe": {"pipe": 2, "config": dataclasses.replace(CONFIG, num_microbatches=2)},
    "data_layout": {"data_layout": (2, 2)},
    "compiler_options": {"compiler_options": {"xla_tpu_enable_latency_hiding_scheduler": "false"}},
}


@pytest.mark.slow
def test_every_field_of_a_job_is_in_the_key(lowered):
    assert set(JOBS) == {field.name for field in dataclasses.fields(compile_job.Job)}
    keys = [key(lower(job), job) for job in (job_of(), *(job_of(**changes) for changes in JOBS.values()))]
    assert len(set(keys)) == 1 + len(JOBS)
    assert keys[0] == key(lowered)
    combining = job_of(config=dataclasses.replace(CONFIG, combine_bytes=1))
    assert key(lowered, combining) != keys[0]  # it is a compiler option, not in the program


def test_each_input_of_a_key_changes_it(lowered):
    job = job_of()
    inputs = compile_key.compile_inputs(lowered, job, job.mesh())
    whole = compile_key.digest(inputs)
    for name in inputs:
        assert compile_key.digest({**inputs, name: [inputs[name], "changed"]}) != whole, name


PASSED_ON = [
    "XLA_FLAGS",
    "LIBTPU_INIT_ARGS",
    "TPU_LIBRARY_PATH",
    "TPU_MEGACORE",
    "MEGASCALE_NUM_SLICES",
    "TF_XLA_FLAGS",
    "CUDA_HOME",
    "NVIDIA_TF32_OVERRIDE",
    "LD_LIBRARY_PATH",
    "PJRT_NAMES_AND_LIBRARY_PATHS",
]
IRRELEVANT = ["HOME", "XLA_PYTHON_CLIENT_MEM_FRACTION", "TF_CPP_MIN_LOG_LEVEL", "CUDA_VISIBLE_DEVICES", "MY_MODEL"]


def test_variables_that_are_passed_on_are_in_the_key(lowered, monkeypatch):
    """The compiler's process gets the whole environment; what a compiler reads of it is known to the key."""
    for name in (*PASSED_ON, *IRRELEVANT):
        monkeypatch.setenv(name, "--one")
    monkeypatch.setenv("TPU_LIBRARY_PATH", __file__)
    first = key(lowered)
    assert set(compile_process._environment("cuda", "/tmp")) >= set(PASSED_ON)
    for name in PASSED_ON:
        with monkeypatch.context() as changed:
            changed.setenv(name, "--two")
            assert key(lowered) != first, name
            changed.delenv(name)
            assert key(lowered) != first, name
    for name in IRRELEVANT:
        with monkeypatch.context() as changed:
            changed.setenv(name, "--two")
            assert key(lowered) == first, name


def test_settings_of_jax_are_in_the_key_and_reach_the_compiler(lowered):
    first = key(lowered)
    for name, value in (("jax_compiler_enable_remat_pass", False), ("jax_default_matmul_precision", "highest")):
        before = jax.config.values[name]
        jax.config.update(name, value)
        try:
            changed, settings = key(lowered), compile_key.program_settings()
        finally:
            jax.config.update(name, before)
        assert changed != first, name
        plan_worker._copy_settings(settings)
        assert jax.config.values[name] == value
        plan_worker._copy_settings({name: before})
        assert jax.config.values[name] == before
    assert "jax_platforms" not in compile_key.program_settings()


def test_flags_that_change_no_program_are_left_out(tmp_path):
    named = compile_key.flags
    assert named("--xla_a=1 --xla_b='x y'") == ["--xla_a=1", "--xla_b=x y"]
    assert named("--xla_dump_to=/tmp/a --xla_a=1") == named("--xla_a=1 --xla_dump_to=/tmp/b --xla_dump_hlo_as_text")
    assert named("--xla_dump_to=/tmp/a") != named("")  # with it the compiler reports less of its heap
    assert named("--xla_log_hlo=1 --xla_force_host_platform_device_count=8 --vmodule=a=1") == []
    assert named("--xla_gpu_mock_topology=1 --xla_tpu_slice_topology=2") != []
    (tmp_path / "flags").write_text("--xla_a=1\n")
    assert named(str(tmp_path / "flags")) == ["--xla_a=1"]
    assert named("/none") == ["/none"]


def test_gpu_tools_are_in_the_key(tmp_path):
    for name in ("bin/ptxas", "nvvm/libdevice/libdevice.10.bc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    environment = {"XLA_FLAGS": f"--xla_gpu_cuda_data_dir={tmp_path}", "PATH": "", "CUDA_HOME": "/none"}
    first = compile_key.tools("cuda", environment)
    assert [path for path, *_ in first] == [
        str(tmp_path / "bin/ptxas"),
        str(tmp_path / "nvvm/libdevice/libdevice.10.bc"),
    ]
    (tmp_path / "nvvm/libdevice/libdevice.10.bc").write_text("12")
    assert compile_key.tools("cuda", environment) != first
    (tmp_path / "bin/ptxas").chmod(0o755)
    assert compile_key.tools("cuda", {"PATH": str(tmp_path / "bin"), "CUDA_HOME": "/none"}) != []


def test_versions_of_the_compilers_are_in_the_key(monkeypatch):
    names = [
        "jaxlib",
        "libtpu",
        "jax-cuda13-plugin",
        "jax-cuda12-pjrt",
        "nvidia-cuda-nvcc",
        "nvidia_nvvm",
        "jax",
        "numpy",
    ]
    records = dict.fromkeys(names, "")

    def distributions():
        for name in names:
            yield types.SimpleNamespace(metadata={"Name": name}, version="1", read_text=lambda _, n=name: records[n])

    monkeypatch.setattr(compile_key.importlib.metadata, "distributions", distributions)
    first = compile_key.packages()
    assert {name for name, *_ in first} == {name.lower() for name in names} - {"numpy"}
    records["nvidia_nvvm"] = "another build of the same version"
    assert compile_key.packages() != first


def test_source_lines_are_in_the_key_and_callers_are_not(lowered):
    def named(source):
        space = {"jnp": jnp}
        exec(compile(source, "their_model.py", "exec"), space)
        return key(lower(job_of(loss_fn=space["loss_fn"])))

    source = "def loss_fn(params, batch):\n  return jnp.mean((batch['x'] @ params['layers'][0]) ** 2)\n"
    first = named(source)
    assert named(source) == first
    assert named("\n" + source) != first  # findings name lines of the model
    assert (lambda: key(lower(job_of())))() == key(lowered)  # from another line

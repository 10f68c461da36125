"""Every option of every command, and every key of a config file, refuses what it cannot be before any work starts.

The cases are made from the parsers and the config classes: an option that is added is tested by that. Values that an
option may have although most may not are listed here.
"""

import argparse
import functools
import os
import subprocess
import sys

import pytest

from zero_jax.cli import checkpoint as cli_checkpoint
from zero_jax.cli import commands as cli
from zero_jax.cli import data as cli_data
from zero_jax.cli import launch as cli_launch
from zero_jax.cli import options
from zero_jax.cli import request as cli_request
from zero_jax.cli import train as cli_train
from zero_jax.cli.models import options as cli_model
from zero_jax.cli.options import check_value
from zero_jax.data.tokenizer import load_tokenizer
from zero_jax.trainer import run as training_run
from zero_jax.trainer.inputs import text

HUGE = "18446744073709551616"
WIDEST = "4611686018427387904"
INTEGERS = [
    "",
    "x",
    "1.5",
    "nan",
    "-inf",
    "-1",
    "0",
    "none",
    "[1]",
    "true",
    HUGE,
    f"-{HUGE}",
    WIDEST,
    "9" * 4500,
    "1e3",
]
NUMBERS = ["", "x", "nan", "inf", "-inf", "-1", "0", "none", "1e400", "-1e300", "1e300", "[1]", "true"]
TEXTS = ["a\0b", "\udcff", "x" * 5000]
PLACES = [*TEXTS, "", " ", "zz://b/x", "file:///x", "://x", "http://a/b"]
BUCKETS = ["gs://", "s3:///"]  # which only what may be in a bucket reads as that

# Options that may be 0, though most may not.
ZERO = set(
    "--beta1 --beta2 --combine-bytes --final-learning-rate --grace-seconds --hang-seconds --keep-best --max-compiles "
    "--max-restarts --min-shard-size --prefetch-batches --rejoin-seconds --sample-every --sample-tokens --save-every "
    "--seed --stage --step --temperature --warmup-steps --weight-decay".split()
)
# Counts for 64 bits, or whose bound is the machine's; all others are 32 bits on a device.
WIDE = {"--batch-size", "--combine-bytes", "--host-memory-bytes", "--min-shard-size", "--seed"}

# Refused by what samples; it may not be 0 or less either.
OF_SAMPLERS = {("--top-k", "0"), ("--top-k", "-1")}


class Started(Exception):
    """The work has begun."""


def start(*_, **__):
    raise Started


@pytest.fixture(autouse=True)
def no_work(monkeypatch, tmp_path):
    for module, name in (
        (text, "load_dataset"),
        (training_run, "make_folder"),
        (cli_request, "compile_plan"),
        (cli_request, "trace_loss"),
        (cli_data, "find_source"),
        (cli_checkpoint, "describe"),
        (cli_checkpoint, "export"),
        (cli_train, "read_run"),
        (cli_launch, "launch"),
    ):
        monkeypatch.setattr(module, name, start)
    # A parser takes longer to build than to use; only a config file changes one.
    monkeypatch.setattr(cli, "build_parser", functools.cache(cli.build_parser))
    monkeypatch.chdir(tmp_path)


NEEDED = {
    "tokenize": ["--vocab-size", "300"],
    "inspect": ["runs"],
    "export": ["runs", "--out", "out"],
    "plot": ["runs"],
    "plan": ["--topology", "v5e:2x2"],
    "memory": ["--topology", "v5e:2x2"],
    "comms": ["--topology", "v5e:2x2"],
}


def parsers() -> dict[str, argparse.ArgumentParser]:
    (commands,) = (action for action in cli.build_parser()._actions if action.choices and "train" in action.choices)
    return {name: command.with_options() for name, command in commands.choices.items()}  # type: ignore[union-attr]


def outcome(arguments, capsys):
    """Returns why a command refuses its arguments, or what else becomes of it."""
    try:
        status = cli.main(arguments)
    except SystemExit as error:
        status = error.code
    except Started:
        return "", "the work started"
    except BaseException as error:
        return "", f"raised {type(error).__name__}: {str(error)[:200]}"
    out, err = capsys.readouterr()
    lines = err.splitlines()
    if status != 2 or out or len(lines) != 1 or ": error: " not in err:
        return err, f"status {status}, stdout {out[:100]!r}, stderr {err[-300:]!r}"
    return err, ""


def bad_values(action):
    """Returns values that an option cannot have, by what it reads."""
    if isinstance(action, argparse.BooleanOptionalAction) or action.nargs == 0:
        return ["1", "x"]
    if action.choices:
        return ["", "x", "[1]", "none", *TEXTS]
    base = action.type.__name__
    if base == "str":
        return [value for value in [*PLACES, *BUCKETS] if refuses(action.type, value)]
    values = INTEGERS if base == "int" else NUMBERS
    return [value for value in values if value != "none" or refuses(action.type, value)]


def refuses(read, value):
    try:
        read(value)
    except (argparse.ArgumentTypeError, ValueError):
        return True
    return False


@pytest.mark.parametrize(
    "command", ["train", "plan", "memory", "comms", "tokenize", "inspect", "export", "plot", "launch"]
)
def test_every_option_refuses_what_it_cannot_be(command, capsys):
    assert command in parsers()
    wrong = []
    for action in parsers()[command]._actions:
        names = [name for name in action.option_strings if name.startswith("--") and not name.startswith("--no-")]
        if not names or action.dest in ("help", "json"):
            continue
        assert (
            action.nargs == 0 or action.choices or action.type or isinstance(action, argparse.BooleanOptionalAction)
        ), f"{names[0]} of {command} takes any text: give it a type=reader(...)"
        fine = {"0" if names[-1] in ZERO else "", WIDEST if names[-1] in WIDE - {"--batch-size"} else ""} - {""}
        for value in [value for value in bad_values(action) if value not in fine]:
            rest = ["--", "train"] if command == "launch" else []
            _, why = outcome([command, *NEEDED.get(command, []), f"{names[-1]}={value}", *rest], capsys)
            if why and (names[-1], value) not in OF_SAMPLERS:
                wrong.append(f"{names[-1]}={value[:30]!r}: {why}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("command", ["inspect", "export", "plot"])
def test_paths_are_checked_as_well(command, capsys):
    rest = ["--out", "out"] if command == "export" else []
    for value in (*PLACES, *(BUCKETS if command != "plot" else [])):
        assert outcome([command, value, *rest], capsys)[1] == "", value


# What a key of each type cannot be, as TOML.
FILE_VALUES = {
    int: ["'3'", "3.0", "true", "[1]", "{a = 1}", "nan", "1979-05-27", HUGE, "9" * 4500, "''", "[[[1]]]"],
    float: ["'x'", "true", "[1.0]", "nan", "-inf", "1e400", "1e300", "1979-05-27", "{}"],
    str: ["3", "3.0", "true", "['gpt-tiny']", "{a = 'x'}", "nan", '"a\\u0000b"', "1979-05-27"],
    bool: ["0", "1", "'true'", "[true]", "nan"],
    dict: ["3", "'x'", "true", "[1]", "{a = [1]}", "{a = {b = 1}}", "{'a b' = 1}", "{a = nan}", "1979-05-27"],
}


def keys():
    for section, config_class in cli_train.sections().items():
        for name, kind in options.option_fields(config_class).items():
            yield section, name, kind, f"{config_class.__name__}.{name}"
    for destination, kind in cli_model.model_keys().items():
        yield "model", destination.rpartition(".")[2], kind, destination


def test_every_key_of_a_config_file_refuses_what_it_cannot_be(tmp_path, capsys):
    path, wrong = tmp_path / "config.toml", []
    for section, name, kind, destination in keys():
        places = ["''", "' '", "'zz://b/x'"] if destination in options.PLACES else []
        choices = ["'no such word'"] if kind.choices else []
        for value in (*FILE_VALUES[kind.base], *places, *choices):
            path.write_text(f"[{section}]\n{name} = {value}\n")
            err, why = outcome(["train", "--config", str(path)], capsys)
            if why:
                wrong.append(f"{section}.{name} = {value[:30]}: {why or err}")
    assert not wrong, "\n".join(wrong)


def test_every_text_is_known_for_a_place_or_for_none():
    """A new option that takes a path has to say so, for URLs and empty paths to be refused."""
    words = {
        "text_field",
        "profile_steps",
        "sample_prompt",
        "wandb",
        "precision",
        "remat",
        "offload",
        "offload_paths",
        "quantize_gathers",
        "quantize_grads",
        "quantize_grads_over",
        "loss_weight",
        "optimizer",
    }
    words |= {"lora", "lora_train", "no_decay", "topology", "data_layout", "dtype", "max_shard_size", "preset"}
    words |= {"loss", "init", "batches", "validation", "eval_loss", "param_specs"}  # module:name, or file.py:name
    classes = [*cli_train.sections().values(), cli_request.PlanConfig, cli_checkpoint.ExportConfig]
    for config_class in [*classes, cli_checkpoint.InspectConfig, cli_launch.LaunchConfig]:
        for name, kind in options.option_fields(config_class).items():
            if kind.base is str and not kind.choices and f"{config_class.__name__}.{name}" not in options.PLACES:
                assert name in words, f"{config_class.__name__}.{name}: add it to options.PLACES if it is a path"


FILES = {
    "binary": b"\x7fELF\x00\xff\xfe",
    "NUL": b"[zero]\x00\nstage = 3",
    "nested arrays": b"a = " + b"[" * 50_000,
    "nested tables": b"[" + b"a." * 10_000 + b"a]\n",
    "nested values": b"[zero]\nstage = " + b"{a = " * 10_000,
    "a key twice": b"[zero]\nstage = 3\nstage = 2",
    "a section twice": b"[zero]\nstage = 3\n[zero]\nclip_norm = 1.0",
    "an array of sections": b"[[zero]]\nstage = 3",
    "a section in a section": b"[zero.stage]\nx = 3",
    "a key outside": b"stage = 3",
    "an unknown section": b"[zer0]\nstage = 3",
    "JSON": b'{"zero": {"stage": 3}}',
    "UTF-16": "[zero]\nstage = 3".encode("utf-16"),
    "large": b"# " + b"x" * 100_000,
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_config(name, tmp_path, capsys):
    path = tmp_path / "config.toml"
    path.write_bytes(FILES[name])
    err, why = outcome(["train", "--config", str(path)], capsys)
    assert not why
    assert "config.toml" in err and len(err) < 600


def test_what_is_no_file_is_no_config(tmp_path, capsys):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / "fifo", tmp_path, tmp_path / "none.toml", "/dev/zero", tmp_path / "loop", "x" * 3000):
        err, why = outcome(["train", "--config", str(path)], capsys)
        assert not why, path
        assert "cannot read the config file" in err
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "config.toml").write_text("")
    err, _ = outcome(["train", "--config", str(tmp_path / "config.json")], capsys)
    assert "did you mean" in err and "config.toml" in err


def test_what_is_checked_is_named():
    for value, message in {
        2**64: "18446744073709551616 is out of range: give an integer of at most 9223372036854775807",
        float("nan"): "nan is not finite: give a number",
        1e300: r"1e\+300 is out of range: give a number of float32",
        "a\0b": "holds a NUL character",
    }.items():
        with pytest.raises(ValueError, match=message):
            check_value(value)
    for value in (True, 2**63 - 1, -3, 0.0, 3e38, "", "x", None, [1]):
        check_value(value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--batch-size", "1000000000000"], "batch_size=1000000000000: this and prefetch_batches=2 more"),
        (["train", "--vocab-size", "2000000000"], "the params take 1,024.00 GB in all, and the 8 devices of this"),
        (["train", "--model-axis", "0"], "model_axis=0: give at least 1"),
        (["train", "--devices", "100000"], "devices=100000, but there are 8"),
        (
            ["train", "--checkpoints", "zz://b/x"],
            "the scheme zz:// is unknown: give a folder, or a URL of gs://",
        ),
        (["train", "--d-model", "1000000000"], "params: give sizes of at most 1e+16 in all"),
        (["plan", "--batch-size", "1000000000000"], "batch_size=1000000000000: the batch alone takes 96,000 GB"),
        (["plan", "--topology", "v5p:4000x4000x4000"], "has 64,000,000,000 chips, and plans are for at most 131,072"),
        (["plan", "--topology", f"v5p:{'9' * 3000}"], "of 3,004 characters: give a name such as"),
        (["plan", "--data-layout", f"{'9' * 3000}x2"], "give sizes of mesh axes, such as 8x8x16"),
        (["launch", "-n", "300", "--", "train"], "num_processes=300, devices_per_process=4: one machine stands in for"),
        (["launch", "--devices-per-process", "9000", "--", "train"], "at most 256 processes and 4,096 devices"),
        (["plan", "--timeout", "0"], "timeout_seconds=0.0: give a positive number of seconds"),
    ],
)
def test_what_is_too_large_is_told_before_it_is_made(arguments, message, capsys):
    err, why = outcome(arguments, capsys)
    assert not why
    assert message in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "100000"], "devices=100000: a CPU stands in for 1 to 1,024; `zero-jax plan` compiles for more"),
        (["--seed", HUGE], f"argument --seed: {HUGE} is out of range"),
        (["--config", "/dev/zero"], "it is a device, not a file"),
    ],
)
def test_as_a_program(arguments, message, tmp_path):
    """A process of its own, with nothing settled before: one line, status 2, and nothing left."""
    environment = {name: os.environ[name] for name in os.environ if name not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "zero_jax", "train", "--out", str(tmp_path / "runs"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_that_never_ends_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", "/dev/zero"):
        with pytest.raises(ValueError, match=r"cannot read the tokenizer .* .it is a .*, not a file.: give 'bytes'"):
            load_tokenizer(path)

"""Options of every command, and keys of a config file, refuse what they cannot be before any work starts.

The cases are made from the parsers and the config classes: an option that is added is tested by that. Each option gets
a few values of those that no option of its kind may have, and each command has something else that it refuses at last:
an error that names that instead of the option says that the value was taken.
"""

import argparse
import itertools
import os
import re
import subprocess
import sys

import pytest
from command_line import run

from zero_jax.cli import commands as cli
from zero_jax.cli.command_options import SECTIONS, model_keys
from zero_jax.cli.config_classes import option_fields
from zero_jax.cli.options import check_value, limits_of
from zero_jax.data.tokenizer import load_tokenizer

HUGE = "18446744073709551616"
TEXTS = ["a\0b", "\udcff", "x" * 5000]
URLS = ["", " ", "zz://b/x", "://x", "http://a/b"]
WRONG = {
    "int": ["x", "1.5", "nan", "-1", "", "[1]", f"-{HUGE}", "true", HUGE, "1e3", "9" * 4500],
    "float": ["x", "nan", "-inf", "-1", "1e400", "", "[1]", "true", "1e300"],
    "str": TEXTS,
}
# What each command refuses last, when its options are right.
LAST = {
    "train": ["--data", "no/such.txt"],
    "plan": ["--topology", "v5e:2x2", "--batch-size", "3"],
    "tokenize": ["--vocab-size", "300", "--data", "no/such.txt"],
    "inspect": ["no/such"],
    "export": ["no/such", "--out", "out"],
    "plot": ["no/such"],
    "launch": ["--", "no-such-program"],
}


def last_refused(command, without):
    """Returns what a command refuses last, less an option that is to have another value: the last one given counts."""
    arguments = LAST[command]
    if without not in arguments:
        return arguments
    at = arguments.index(without)
    return arguments[:at] + arguments[at + 2 :]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def options_of(command) -> list[argparse.Action]:
    (commands,) = (action for action in cli.build_parser()._actions if action.choices and "train" in action.choices)
    actions = commands.choices[command].with_options()._actions  # type: ignore[call-overload,index]
    return [action for action in actions if action.option_strings and action.dest not in ("help", "json")]


def refusal(arguments, capsys):
    """Returns the line with which a command refuses its arguments; fails if it does anything else."""
    status, out, err = run(arguments, capsys)
    assert (status, out, len(err.splitlines())) == (2, "", 1) and ": error: " in err, (arguments, status, out, err)
    return err


def bad_values(action):
    """Returns values that an option cannot have, by what it reads."""
    if isinstance(action, argparse.BooleanOptionalAction) or action.nargs == 0:
        return ["1", "x"]
    if action.choices:
        return ["", "x", "[1]", *TEXTS, *([] if action.default is None else ["none"])]
    assert action.type, f"{action.option_strings[0]} takes any text: give it a type=reader(...)"
    return WRONG[action.type.__name__] + (URLS if getattr(action.type, "place", None) else [])  # type: ignore[union-attr]


# Those with hundreds of options take seconds.
@pytest.mark.parametrize(
    "command", [pytest.param(x, marks=[pytest.mark.slow] * (x in ("train", "plan"))) for x in LAST]
)
def test_every_option_refuses_what_it_cannot_be(command, capsys):
    for i, action in enumerate(options_of(command)):
        option = next(name for name in action.option_strings if name.startswith("--"))
        values = bad_values(action)
        for value in {values[i % len(values)], values[(i + 1) % len(values)]}:
            err = refusal([command, f"{option}={value}", *last_refused(command, without=option)], capsys)
            name = action.dest.rpartition(".")[2]
            assert option in err or re.search(rf"\b{name}\b", err), f"{command} {option}={value[:30]!r} is taken: {err}"


@pytest.mark.parametrize("command", ["inspect", "export", "plot"])
def test_paths_are_checked_as_well(command, capsys):
    rest = ["--out", "out"] if command == "export" else []
    for value in (*TEXTS, *URLS, *(["gs://"] if command != "plot" else [])):
        assert "PATH" in (err := refusal([command, value, *rest], capsys)) or "RUN" in err


# What a key of each type cannot be, as TOML.
FILE_VALUES = {
    int: ["'3'", "3.0", "true", "[1]", "{a = 1}", "nan", "1979-05-27", HUGE, "''"],
    float: ["'x'", "true", "[1.0]", "nan", "-inf", "1e400", "1e300", "1979-05-27", "{}"],
    str: ["3", "3.0", "true", "['gpt-tiny']", "{a = 'x'}", "nan", '"a\\u0000b"', "1979-05-27"],
    bool: ["0", "1", "'true'", "[true]", "nan"],
    dict: ["3", "'x'", "true", "[1]", "{a = [1]}", "{a = {b = 1}}", "{'a b' = 1}", "{a = nan}"],
}


def keys():
    """Yields section, name, kind and destination of each key of a config file."""
    for section, config in SECTIONS.items():
        for name, field in option_fields(config).items():
            yield section, name, field.kind, f"{config}.{name}"
    for destination, kind in model_keys().items():
        yield "model", destination.rpartition(".")[2], kind, destination


def test_every_key_of_a_config_file_refuses_what_it_cannot_be(tmp_path, capsys):
    path, turns = tmp_path / "config.toml", {base: itertools.cycle(values) for base, values in FILE_VALUES.items()}
    for section, name, kind, destination in keys():
        places = ["'zz://b/x'"] if limits_of(destination)["place"] else []
        choices = ["'no such word'"] if kind.words else []
        for value in (next(turns[kind.base]), *places, *choices):
            path.write_text(f"[{section}]\n{name} = {value}\n")
            err = refusal(["train", "--config", str(path), *LAST["train"]], capsys)
            assert name in err, f"{section}.{name} = {value[:30]} is taken: {err}"


def test_every_text_is_known_for_a_place_or_for_none():
    """A new option that takes a path has to say so, for URLs and empty paths to be refused."""
    words = set(
        "text_field profile_steps sample_prompt wandb precision remat offload offload_paths experts quantize_gathers "
        "quantize_grads quantize_grads_over loss_weight optimizer lora lora_train no_decay topology data_layout dtype "
        # module:name, or file.py:name
        "max_shard_size loss init batches validation eval_loss param_specs tracker".split()
    )
    for config in [*SECTIONS.values(), "PlanConfig", "LaunchConfig"]:
        for name, field in option_fields(config).items():
            if field.kind.base is str and not field.words and limits_of(f"{config}.{name}")["place"] is None:
                assert name in words, f"{config}.{name}: add it to the fields of commands.toml if it is a path"


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
    "many digits": b"[zero]\nstage = " + b"9" * 4500,
    "large": b"# " + b"x" * 100_000,
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_config(name, tmp_path, capsys):
    path = tmp_path / "config.toml"
    path.write_bytes(FILES[name])
    err = refusal(["train", "--config", str(path)], capsys)
    assert "config.toml" in err and len(err) < 600
    assert name != "large" or "more than the 65,536 bytes that are read" in err


def test_what_is_no_file_is_no_config(tmp_path, capsys):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / "fifo", tmp_path, tmp_path / "none.toml", "/dev/zero", tmp_path / "loop", "x" * 3000):
        assert "cannot read the config file" in refusal(["train", "--config", str(path)], capsys)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "config.toml").write_text("")
    err = refusal(["train", "--config", str(tmp_path / "config.json")], capsys)
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
        (["train", "--d-model", "500000000"], "params: give sizes of at most 1e+16 in all"),
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
    assert message in refusal(arguments, capsys)


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

"""Config files: strict to the last key, and what one command writes another reads."""

import json

import pytest
from command_line import run

from zero_jax.cli import commands as cli
from zero_jax.cli.command_options import SECTIONS
from zero_jax.cli.config_classes import defaults_of, option_fields
from zero_jax.cli.config_file import read_file, write_file
from zero_jax.cli.plan import planning, read_request


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "config.toml"
    written = {
        "zero": {
            "stage": 2,
            "clip_norm": None,
            "precision": "bf16",
            "keep_gathered": True,
            "compiler_options": {"xla_a": True, "xla_b": None, "xla_c": 'x"'},
        },
        "optimizer": {"learning_rate": 0.5, "optimizer": "lion"},
    }
    write_file(path, written, title='with "quotes"')
    assert read_file(path) == {
        "ZeroConfig.stage": 2,
        "ZeroConfig.clip_norm": None,
        "ZeroConfig.precision": "bf16",
        "ZeroConfig.keep_gathered": True,
        "ZeroConfig.compiler_options": {"xla_a": True, "xla_b": None, "xla_c": 'x"'},
        "OptimizerConfig.learning_rate": 0.5,
        "OptimizerConfig.optimizer": "lion",
    }


def test_every_character_of_a_text_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "config.toml"
    text = "".join(map(chr, [*range(1, 0x250), 0x2028, 0x1F600, 0x10FFFF]))
    for part in (text[:300], text[300:]):
        written = {"zero": {"remat": part, "compiler_options": {part: part}}}
        write_file(path, written, title=part)
        assert read_file(path) == {
            "ZeroConfig.remat": part,
            "ZeroConfig.compiler_options": {part: part},
        }


@pytest.mark.parametrize("section", SECTIONS)
def test_every_default_may_be_given(section, tmp_path):
    path, config = tmp_path / "config.toml", SECTIONS[section]
    fields = option_fields(config)
    defaults = {name: value for name, value in defaults_of(config).items() if section != "model"}
    write_file(path, {section: defaults}, title="")
    assert read_file(path) == {f"{config}.{name}": value for name, value in defaults.items()}
    for name, value in defaults.items():
        option, kind = f"--{name.replace('_', '-')}", fields[name].kind
        if kind.base in (int, float, str):
            options = cli.parse(["train", option, "none" if value is None else str(value)])
            assert getattr(options, f"{config}.{name}") == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[zer0]\nstage = 3", "section 'zer0' is unknown: did you mean 'zero'?"),
        ("[zero]\nstge = 3", r"key of \[zero\] 'stge' is unknown: did you mean 'stage'?"),
        ("steps = 1", r"section 'steps' is unknown: it is a key of \[run\]"),
        ("[data]\nstage = 3", r"key of \[data\] 'stage' is unknown: it is a key of \[zero\]"),
        ("[zero]\nstage = '3'", "zero.stage = '3': give a value of type int"),
        ("[zero]\nclip_norm = 'atuo'", "zero.clip_norm = 'atuo': give a value of type float or auto"),
        ("[zero]\nstage = true", "zero.stage = True: give a value of type int"),
        ("[zero]\ncompiler_options = 3", "zero.compiler_options = 3: give a value of type dict"),
        ("[zero]\nparam_specs = 3", "'param_specs' is unknown"),
        ("zero = 3", r"write a section \[zero\]"),
        ("[zero\n", "is no TOML"),
    ],
)
def test_what_a_file_may_not_say(text, message, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_file(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="cannot read the config file"):
        read_file(tmp_path / "none.toml")


@pytest.mark.slow
@pytest.mark.usefixtures("no_picture")
def test_train_takes_a_file_and_the_command_line_has_the_last_word(tmp_path, capsys):
    path = tmp_path / "config.toml"
    path.write_text(
        '[model]\npreset = "gpt-tiny"\nseq_len = 16\nnum_layers = 1\nd_model = 32\nnum_heads = 2\n'
        "[zero]\nstage = 1\nnum_microbatches = 2\n"
        "[run]\nsteps = 9\nbatch_size = 16\neval_batches = 1\nsample_tokens = 0\n[optimizer]\nwarmup_steps = 1\n"
    )
    out = str(tmp_path / "runs")
    assert cli.main(["train", "--config", str(path), "--out", out, "--name", "a", "--steps", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_steps"] == 2
    saved = json.loads((tmp_path / "runs" / "a" / "config.json").read_text())
    assert (saved["zero"]["stage"], saved["zero"]["num_microbatches"], saved["batch_size"]) == (1, 2, 16)
    assert saved["model"]["d_model"] == 32


def test_a_wrong_file_is_an_error_of_the_command(tmp_path, capsys):
    path = tmp_path / "config.toml"
    path.write_text("[zero]\nstge = 3")
    with pytest.raises(SystemExit):
        cli.main(["train", "--config", str(path)])
    assert "did you mean 'stage'?" in capsys.readouterr().err


def _written(path, text=""):
    path.write_text(
        '[model]\npreset = "gpt-tiny"\nseq_len = 16\n[data]\ndata = "texts"\n[run]\nsteps = 9\nbatch_size = 64\n'
        'model_axis = 2\n[zero]\nstage = 1\nnum_microbatches = 2\nremat = "full"\n'
        f"[optimizer]\nwarmup_steps = 20000\n{text}"
    )
    return str(path)


@pytest.mark.parametrize("command", ["plan", "memory", "comms"])
def test_the_commands_of_planning_take_a_file_and_the_command_line_has_the_last_word(command, tmp_path):
    file = _written(tmp_path / "a.toml", "learning_rate = 0.5")
    options = cli.parse([command, "--config", file, "--stage", "2"])
    request = read_request(options)
    planned, job = request.config, request.job(request.zero)
    assert (request.model.config.seq_len, request.zero.stage, request.zero.num_microbatches) == (16, 2, 2)
    assert (planned.batch_size, job.batch_size, job.mesh().shape["model"]) == (64, 64, 2)
    assert read_request(cli.parse([command, "--config", file, "--batch-size", "32"])).config.batch_size == 32


def test_a_search_keeps_what_the_file_sets(tmp_path, monkeypatch, capsys):
    searched = {}

    def plan_auto(*_, **settings):
        searched.update(settings)
        raise ValueError("enough")

    monkeypatch.setattr(planning, "plan_auto", plan_auto)
    file = _written(tmp_path / "a.toml")
    assert "enough" in run(["plan", "--auto", "--config", file, "--replica", "1"], capsys)[2]
    assert [searched[name] for name in ("stages", "models", "replicas", "pipes", "remats", "overlaps")] == [
        (1,), (2,), (1,), None, ("full",), None,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat = 1.0", "'learning_rat' is unknown: did you mean 'learning_rate'?"),
        ("[data]", "is no TOML"),
        ("[lora]\nlora = 'all-linear'", "[lora] of {file}: a plan trains all params"),
        ("[checkpoint]\nkeep_last = 0", "keep_last=0"),
    ],
)
def test_a_plan_refuses_a_file_as_train_does(text, message, tmp_path, capsys):
    file = _written(tmp_path / "a.toml", text)
    status, out, err = run(["plan", "--config", file, "--quick"], capsys)
    assert (status, out) == (2, "") and message.format(file=file) in err

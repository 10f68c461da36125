"""The command line: its options, its errors and its JSON."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
from command_line import run

import zero_jax
from zero_jax.analysis.paper import PAPER_CONFIGS
from zero_jax.cli import commands as cli
from zero_jax.cli import run_config as cli_zero
from zero_jax.core.close_match import did_you_mean, names_elsewhere
from zero_jax.training import ZeroConfig

# Scripts depend on these: an option goes only with a line in the changelog.
TRAIN_OPTIONS = """
--attention --batch-size --batches --beta1 --beta2 --checkpoints --clip-norm --combine-bytes --compiler-option --config
--d-model --data --decay-fraction --devices --ema-decay --epochs --epsilon --eval-batches --eval-every --eval-loss
--experts --final-learning-rate --format --hang-seconds --help --init --init-from --json --keep-best --keep-gathered
--keep-last --layer-shards --learning-rate --log-every --lora --lora-alpha --lora-base --lora-dora --lora-from
--lora-rank --lora-train --loss --loss-chunk --max-nonfinite-steps --min-shard-size --mlp-ratio --model --model-axis
--momentum --mu-dtype --name --no-decay --no-keep-gathered --no-layer-shards --no-lora-dora --no-overlap
--no-noise-scale --no-quantize-error-feedback --no-scan --no-secondary --no-separate-documents --no-sequence-parallel
--no-skip-nonfinite --no-streaming --no-tensorboard --noise-scale --nu-dtype --num-heads --num-layers --num-microbatches
--offload --offload-fraction --offload-paths --offload-window-bytes --optimizer --out --overlap --paper-config
--param-specs --pipe --pipeline --position --precision --prefetch-batches --process-batches --profile-steps
--quantize-block-size --quantize-error-feedback --quantize-gathers --quantize-grads --quantize-grads-over --remat
--replica --resume --sample-every --sample-prompt --sample-tokens --save-every --scan --schedule --secondary --seed
--separate-documents --seq-len --sequence-parallel --show-config --skip-nonfinite --stage --steps --streaming
--temperature --tensorboard --text-field --token-cache --token-dtype --tokenizer --top-k --tracker --validation
--validation-data --validation-fraction --vocab-size --wandb --warmup-steps --weight-decay -h
""".split()
PLAN_OPTIONS = """
--attention --batch --batch-size --batches --beta1 --beta2 --cache --clip-norm --combine-bytes --compiler-option
--config --d-model --data-layout --decay-fraction --ema-decay --epsilon --experts --final-learning-rate --help --init
--json --keep-gathered --layer-shards --learning-rate --loss --loss-chunk --min-shard-size --mlp-ratio --model
--model-axis --momentum --mu-dtype --no-decay --no-keep-gathered --no-layer-shards --no-noise-scale --no-overlap
--no-quantize-error-feedback --no-quick --no-scan --no-secondary --no-sequence-parallel --no-skip-nonfinite
--noise-scale --nu-dtype --num-heads --num-layers --num-microbatches --offload --offload-fraction --offload-paths
--offload-window-bytes --optimizer --overlap --paper-config --param-specs --pipe --pipeline --position --precision
--quick --quantize-block-size --quantize-error-feedback --quantize-gathers --quantize-grads --quantize-grads-over
--remat --replica --scan --schedule --secondary --seq-len --sequence-parallel --skip-nonfinite --stage --timeout
--topology --vocab-size --weight-decay -h
""".split()
# Of the decoders' presets.
DECODER_OPTIONS = """
--activation --attention-soft-cap --d-hidden --d-hidden-dense --expert-balance --expert-capacity --experts-per-token
--extra-token-weight --from-hf --gated-mlp --head-dim --learned-positions --logits-soft-cap --mlp-bias --no-gated-mlp
--no-mlp-bias --no-norm-offset --no-normalize-expert-weights --no-out-bias --no-parallel --no-post-norms --no-qk-norm
--no-qkv-bias --no-scale-embedding --no-shared-norm --no-tie-embedding --norm --norm-eps --norm-offset
--normalize-expert-weights --num-dense-layers --num-experts --num-extra-tokens --num-kv-heads --num-shared-experts
--out-bias --parallel --post-norms --qk-norm --qkv-bias --query-scale --rope-theta --rotary-fraction --scale-embedding
--shared-norm --tie-embedding --window --window-period --window-rope-theta
""".split()
TRAIN_OPTIONS += DECODER_OPTIONS
PLAN_OPTIONS += DECODER_OPTIONS
TOKENIZE_OPTIONS = """
--data --format --help --json --out --text-field --token-dtype --tokenizer --tokens --vocab-size -h
""".split()
EXPORT_OPTIONS = """
--dtype --ema --force --help --json --max-shard-size --merged --no-ema --no-force --no-merged --out --step --to-hf
--to-peft -h
""".split()
INSPECT_OPTIONS = """
--from-hf --help --json --lora --lora-alpha --lora-base --lora-dora --lora-from --lora-rank --lora-train --model
--no-lora-dora --no-verify --step --verify -h
""".split()
LAUNCH_OPTIONS = """
--devices-per-process --grace-seconds --help --max-restarts --min-processes --num-processes --rejoin-seconds -h -n
""".split()
OPTIONS = {
    "train": TRAIN_OPTIONS,
    "tokenize": TOKENIZE_OPTIONS,
    "inspect": INSPECT_OPTIONS,
    "export": EXPORT_OPTIONS,
    "sample": (
        "--help --json --num-samples --num-tokens --prompt --seed --step --temperature --tokenizer --top-k -h"
    ).split(),
    "evaluate": (
        "--batch-size --data --format --help --json --no-separate-documents --separate-documents --seq-len --step "
        "--text-field --token-cache --token-dtype --tokenizer -h"
    ).split(),
    "plot": ["--help", "--metric", "--out", "--title", "--x", "-h"],
    "launch": LAUNCH_OPTIONS,
    "plan": [
        *PLAN_OPTIONS,
        "--auto",
        "--host-memory-bytes",
        "--layouts",
        "--max-compiles",
        "--tokens",
        "--verify",
        "--write-config",
    ],
    "memory": [*PLAN_OPTIONS, "--estimate", "--paper", "--plot"],
    "comms": [*PLAN_OPTIONS, "--estimate"],
    "completion": ["--help", "-h"],
    "help": ["--help", "-h"],
    "from-deepspeed": "--devices --force --help --json --out --per-device-batch-size -h".split(),
}
SMALL = (
    "--vocab-size 256 --seq-len 16 --num-layers 1 --d-model 32 --num-heads 2 --steps 4 --warmup-steps 1 "
    "--eval-batches 1 --sample-tokens 4"
).split()


def parser_of(command):
    (commands,) = (action for action in cli.build_parser()._actions if action.choices and "train" in action.choices)
    return commands.choices[command].with_options()


@pytest.mark.parametrize("command", OPTIONS)
def test_the_options_are_these(command):
    options = [name for action in parser_of(command)._actions for name in action.option_strings]
    assert sorted(options) == sorted(OPTIONS[command]), "a new field of a config is an option: enter it in OPTIONS"


@pytest.mark.parametrize("command", OPTIONS)
def test_every_option_says_what_it_does(command):
    for action in parser_of(command)._actions:
        assert action.help and not action.help.startswith(" "), action.option_strings


@pytest.mark.parametrize("command", ["train", "plan", "memory", "comms"])
def test_the_help_has_the_usual_options_and_examples_that_are_right(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = run([command, "--help"], capsys)
    assert status == 0 and len(out.splitlines()) < 60
    assert [run(["help", command], capsys)[1], run([command, "-h"], capsys)[1]] == [out, out]
    usual, known = re.findall(r"^  (--[a-z-]+)", out, re.MULTILINE), [*OPTIONS[command], "--init"]
    assert {*usual} <= {*known} and 20 <= len(usual) <= 25
    examples = re.findall(rf"^  zero-jax {command} ?([^#\n]*)", out, re.MULTILINE)
    for example in examples:
        cli.parse([command, *shlex.split(example)])
    assert len(examples) == (4 if command in ("train", "plan") else 1)
    assert max(map(len, out.partition("examples:")[0].splitlines())) <= 80


@pytest.mark.parametrize("command", OPTIONS)
def test_the_whole_help_has_every_option_and_no_python(command, capsys):
    status, out, _ = run([command, "--help", "all"], capsys)
    assert status == 0 and run(["help", command, "all"], capsys)[1] == out
    assert all(name in out for name in OPTIONS[command])
    assert not re.findall(r"None|True|False|\bzero\.|Config\b|`[A-Z]", out)


def test_the_version(capsys):
    assert run(["-V"], capsys)[1] == run(["--version"], capsys)[1] == f"zero-jax {zero_jax.__version__}\n"


def test_what_would_be_used_is_shown_as_a_config_file_and_nothing_is_run(tmp_path, capsys):
    out = tmp_path / "runs"
    shape = SMALL[: SMALL.index("--steps")]
    arguments = ["--out", str(out), *shape, "--stage", "2", "--optimizer", "lion", "--steps", "40"]
    status, text, _ = run(["train", *arguments, "--show-config"], capsys)
    assert status == 0 and not out.exists()
    shown = tomllib.loads(text)
    assert shown["optimizer"] | {"learning_rate": 5e-4, "warmup_steps": 10, "beta2": 0.99} == shown["optimizer"]
    assert (shown["zero"]["stage"], shown["zero"]["skip_nonfinite"], shown["run"]["devices"]) == (2, True, 8)
    assert shown["model"]["d_model"] == 32
    (tmp_path / "a.toml").write_text(text)
    status, again, _ = run(["train", "--config", str(tmp_path / "a.toml"), "--show-config"], capsys)
    assert status == 0 and again == text
    shown = tomllib.loads(run(["train", "--epochs", "2", "--show-config"], capsys)[1])["run"]
    assert shown["epochs"] == 2 and "steps" not in shown  # how many these are depends on the text


def test_words_of_other_systems_are_answered_with_an_option():
    options = {name for command in ("train", "plan") for name in OPTIONS[command]}
    for theirs, ours in names_elsewhere().items():
        option = f"--{ours.replace('_', '-')}"
        assert option in options and f"--{theirs.replace('_', '-')}" not in options, theirs
        assert did_you_mean(f"--{theirs}", TRAIN_OPTIONS, "{}") == option


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("train --early-stopping-patience 3", "a callback of zero.Trainer ends a run"),
        ("train --save-every 3 --dropout=0.1", "a loss of your own has what these models lack"),
        ("train --hf_token abc", "`hf download` and `hf upload`"),
        ("train --num-workers 2", "did you mean --prefetch-batches?"),
        ("train --tensorboard true", "unknown argument 'true': --tensorboard takes no value."),
        ("train --name true --tensorboard true", "unknown argument 'true': --tensorboard takes no value."),
        ("train --name true --seed 1 true", "unknown argument 'true': `zero-jax train --help` lists"),
        ("plan --loss-scale 1024", "in Python zero.Precision(loss_scale=...)"),
        ("train --tensorboard --lr 1", "unknown argument '--lr': did you mean --learning-rate?"),
        ("export runs/a --output b", "unknown argument '--output': did you mean --out?"),  # before what is missing
    ],
)
def test_what_there_is_instead_of_an_option(command, hint, capsys):
    assert hint in run(command.split(), capsys)[2]


def test_what_there_is_instead_of_a_field():
    with pytest.raises(TypeError, match=r"has no field 'patience': a callback of zero\.Trainer"):
        zero_jax.TrainConfig(patience=3)


@pytest.mark.slow
def test_json_is_one_object_and_the_log_goes_elsewhere(tmp_path, capsys):
    status, out, err = run(["train", *SMALL, "--out", str(tmp_path), "--name", "a", "--stage", "2", "--json"], capsys)
    assert status == 0
    result = json.loads(out)
    assert (result["stage"], result["num_steps"], result["num_devices"]) == (2, 4, 8)
    assert result["directory"] == str(tmp_path / "a")
    assert "step 4/4" in err
    saved = json.loads((tmp_path / "a" / "config.json").read_text())
    assert saved["model"]["d_model"] == 32
    assert saved["zero"]["precision"] == "bf16"
    assert saved["optimizer"]["warmup_steps"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stagee", "3"], "unknown argument '--stagee': did you mean --stage?"),
        (["--num_microbatches=2"], "did you mean --num-microbatches?"),
        (["--lr", "1e-3"], "unknown argument '--lr': did you mean --learning-rate?"),
        (["--num-epochs", "2"], "did you mean --epochs?"),
        (["--epochs", "2", "--steps", "2"], "--steps and --epochs both say how long: leave out one of them"),
        (["--per_device_train_batch_size=8"], "did you mean --batch-size?"),
        (["--optimizer", "lamb"], "muon; in Python zero.Trainer and zero.plan take any optax optimizer, as tx"),
        (["--steps", "many"], "invalid int value: 'many': give a whole number, such as 100"),
        (
            ["--model", "gpt-smal"],
            "argument --model: invalid choice: 'gpt-smal': did you mean 'gpt-small'? Choose one of gpt-tiny",
        ),
        (["--optimizer", "adamv"], "did you mean 'adamw'? Choose one of"),
        (["--precision", "bf61"], "did you mean 'bf16'?"),
        (["--stage", "4"], "argument --stage: invalid choice: 4: Choose one of 0, 1, 2, 3"),
        (["--batch-size", "12"], "multiple of 8, for example 16"),
        (
            ["--loss", "a:b", "--init", "a:b", "--batches", "a:b", "--eval-loss", "a:b"],
            "--eval-loss is for the validation: give its batches, --validation",
        ),
        (["--num-heads", "3"], "multiple of num_heads"),
        (["--data", "nowhere"], "'stdlib' for the source code of Python's standard library"),
        (["--devices", "9"], "there are 8"),
        (["--remat", "full_sharded"], "shards residuals over `model`, but the mesh is"),
        (["--paper-config", "C6"], "invalid choice: 'C6'"),
        (["--quantize-gathers", "int4"], "--quantize-gathers: invalid choice: 'int4': did you mean 'int8'?"),
        (["--quantize-block-size", "64"], "block_size=64 without anything to quantize"),
        (["--quantize-grads-over", "replica"], "quantize_grads_over='replica' without anything to quantize"),
        (["--quantize-error-feedback"], "quantize_error_feedback=True without anything to quantize"),
        (["--quantize-grads", "int8", "--stage=0"], "stage=0 scatters no gradients"),
        (["--paper-config", "C3", "--stage=3"], "--paper-config C3 is --stage 2, not 3: leave out one of the two"),
        (["--remat", "full", "--paper-config", "C4"], "C4 is --remat full_sharded, not full"),
    ],
)
def test_errors_name_the_value_and_the_remedy(arguments, message, capsys, tmp_path):
    status, out, err = run(["train", "--out", str(tmp_path / "runs"), *arguments], capsys)
    assert status == 2
    assert not out
    assert err.startswith("zero-jax train: error: ")
    assert message in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_a_row_of_the_papers_table_stands_for_its_options(tmp_path):
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbf[zero]\r\nstage = 3\r\nclip_norm = 2.0\r\n")  # as Windows writes it
    for command, *arguments in (["train", "--config", str(tmp_path / "a.toml")], ["plan", "--stage", "2"]):
        options = cli.parse([command, *arguments, "--paper-config", "C5", "--precision", "fp16"])
        zero = cli_zero.read_zero(options, default=ZeroConfig())
        told = (zero.stage, zero.remat, zero.combine_bytes, zero.precision, zero.clip_norm)
        clip_norm = 2.0 if command == "train" else 1.0
        assert told == (2, "full_offloaded", PAPER_CONFIGS["C5"].combine_bytes, "fp16", clip_norm)


def test_compiler_options_are_given_one_by_one(tmp_path):
    (tmp_path / "a.toml").write_text('[zero]\noverlap = false\ncompiler_options = {xla_a = 1, xla_b = "none"}\n')
    arguments = ["--compiler-option", "xla_c=true", "--compiler-option=xla_a=x=y"]
    train = cli.parse(["train", "--config", str(tmp_path / "a.toml"), *arguments])
    zero = cli_zero.read_zero(train, default=ZeroConfig())
    assert not zero.overlap and zero.compiler_options == {"xla_a": "x=y", "xla_b": None, "xla_c": "true"}
    for command in ("plan", "memory", "comms"):
        zero = cli_zero.read_zero(cli.parse([command, "--no-overlap", *arguments]), default=ZeroConfig())
        assert not zero.overlap and zero.compiler_options == {"xla_a": "x=y", "xla_c": "true"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--compiler-option", "xla_a"], "argument --compiler-option: 'xla_a' is not of the form NAME=VALUE"),
        (["plan", "--compiler-option", "--xla_a=1"], "argument --compiler-option: expected one argument"),
        (["train", "--resume"], "argument --resume: expected one argument: one of never, auto"),
        (["plan", "--compiler-option=--xla_a=1"], "'--xla_a' is no name of an option: give one without dashes"),
        (["plan", "--auto", "--num-microbatches", "2"], "--num-microbatches: --auto chooses that by itself"),
        (["sample", "--from-hf", "a"], "'--from-hf': a run, or a folder of the hub, goes as PATH: leave out --from-hf"),
        (["evaluate", "--model", "a", "--data", "b"], "goes as PATH: leave out --model"),
        (["plan", "--max-compiles=2"], "--max-compiles: it is for --auto"),
        (["plan", "--host-memory-bytes=2"], "--host-memory-bytes: it is for --auto"),
        (["plan", "--auto", "--verify"], "--verify: it runs one step: leave out --auto and --layouts"),
        (["plan", "--layouts", "--data-layout", "4x4"], "--data-layout: --layouts compiles all of them"),
        (["plan", "--layouts", "--tokens", "1e9"], "--tokens: it is for one plan: leave out --layouts"),
        (["inspect", "runs/a", "--lora-rank", "4"], "--lora-rank: that is of a model: give --model or --from-hf"),
        (["memory", "--plot", "a.png", "--stage", "3"], "--stage: --plot draws all stages"),
        (
            ["memory", "--paper", "--stage", "3", "--model", "gpt-7b"],
            "--model and --stage: --paper prints the paper's own",
        ),
        (["memory", "--plot", "a.txt"], "cannot draw 'a.txt': give a name that ends in .png"),
        (["memory", "--plot", "none/a.png"], "cannot draw 'none/a.png': there is no such folder, make it first"),
        (
            ["plan", "--write-config", "none/a.toml"],
            "--write-config none/a.toml: there is no such folder, make it first",
        ),
    ],
)
def test_options_that_would_say_nothing_are_refused(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where what is not refused would be written
    status, out, err = run(arguments, capsys)
    assert (status, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("content", ["[zero]\nstage = 3\n", "", None])
def test_a_plan_is_written_over_no_file_of_others(content, tmp_path, capsys):
    path = tmp_path / "own.toml"
    path.mkdir() if content is None else path.write_text(content)
    status, out, err = run(["plan", "--model", "gpt-tiny", "--quick", "--write-config", str(path)], capsys)
    assert (status, out) == (2, "")
    assert f"{path} exists, and `zero-jax plan` did not write it: give another name, or remove it" in err
    assert content is None or path.read_text() == content


@pytest.mark.parametrize("target", ["planned.toml", "gone.toml"])
def test_a_plan_takes_the_place_of_no_link(target, tmp_path, capsys):
    (tmp_path / "planned.toml").write_text("# planned for v5p:2x2x1 by zero-jax plan\n")
    (link := tmp_path / "link.toml").symlink_to(target)
    status, out, err = run(["plan", "--model", "gpt-tiny", "--quick", "--write-config", str(link)], capsys)
    assert (status, out) == (2, "")
    assert f"--write-config {link} is a link, which would be replaced: give the path that it leads to" in err
    assert link.is_symlink()


def test_none_is_a_value_where_it_may_be(capsys):
    options = cli.build_parser().parse_args(["train", "--clip-norm", "none", "--top-k", "none"])
    assert getattr(options, "ZeroConfig.clip_norm") is None
    assert getattr(options, "TrainConfig.top_k") is None
    status, _, err = run(["train", "--steps", "none"], capsys)
    assert status == 2
    assert "invalid int value" in err


@pytest.mark.slow
@pytest.mark.parametrize(("words", "first"), [("--paper", "Figure 1"), ("--help all", "usage: zero-jax memory")])
def test_a_reader_that_has_seen_enough_is_no_error(words, first):
    command = f"{sys.executable} -m zero_jax memory {words} | (read -r line; echo $line)"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.startswith(first)
    assert not done.stderr


def test_an_unknown_command_is_told_the_known_ones(capsys):
    status, _, err = run(["tran"], capsys)
    assert status == 2
    assert "'tran'" in err
    assert "train" in err.split("Choose one of")[1]
    assert "did you mean 'train'?" in err
    assert run([], capsys)[1].startswith("usage: zero-jax")


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "num_devices"), [([], 8), (["--devices", "2"], 2)])
def test_a_cpu_stands_in_for_devices(arguments, num_devices, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    command = [
        sys.executable,
        "-m",
        "zero_jax",
        "train",
        *SMALL,
        "--out",
        str(tmp_path),
        "--json",
        *arguments,
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_devices"] == num_devices


@pytest.mark.slow
@pytest.mark.parametrize("closing", ["1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_stream_that_is_closed_is_none_to_write_to_and_no_file_takes_its_place(closing, tmp_path):
    config, out = tmp_path / "ds.json", tmp_path / "out"
    config.write_text('{"train_batch_size": 8}')
    program = (
        f"import os, sys; from zero_jax.cli import main; status = main(['from-deepspeed', {str(config)!r}]); "
        f"file = open({str(out)!r}, 'w'); os.system('echo from another program'); "
        "file.write(f'{file.fileno() > 2} {status}')"
    )
    subprocess.run(["sh", "-c", f'"$0" -c "$1" {closing}', sys.executable, program], check=True, capture_output=True)
    assert out.read_text() == "True 0"


def test_what_the_encoding_of_stdout_lacks_is_written_as_escapes(tmp_path, monkeypatch):
    config = tmp_path / "ds.json"
    config.write_text('{"train_batch_size": 8, "a caf\u00e9": 1}', encoding="utf-8")
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert cli.main(["from-deepspeed", str(config)]) == 1
    assert b"a caf\\xe9" in written.getvalue()

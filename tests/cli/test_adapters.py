"""`zero-jax train --lora`: adapters of a base that another run has trained, resumed, on conversations."""

import dataclasses
import json
import re

import pytest

from zero_jax.cli import commands as cli
from zero_jax.cli.models.adapters import _rules
from zero_jax.cli.models.presets import PRESETS

SMALL = (
    "--vocab-size 256 --seq-len 64 --num-layers 2 --d-model 64 --num-heads 2 --warmup-steps 0 --eval-batches 1 "
    "--sample-tokens 0 --log-every 1"
).split()
LORA = "--lora blocks/query,blocks/up --lora-rank 2 --lora-base nf4_double".split()


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    path = tmp_path_factory.mktemp("chat") / "chat.jsonl"
    turns = [({"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}!"}) for i in range(60)]
    path.write_text("".join(json.dumps({"messages": pair}) + "\n" for pair in turns), encoding="utf-8")
    return str(path)


def train(folder, *options):
    return cli.main(["train", *SMALL, "--out", str(folder), "--json", *options])


@pytest.mark.slow
def test_adapters_are_trained_on_the_base_of_another_run_and_resumed(tmp_path, chat, capsys):
    data = ["--data", chat, "--format", "chat"]
    assert train(tmp_path, *data, "--steps", "1", "--name", "base") == 0
    base = json.loads(capsys.readouterr().out)
    options = [*data, *LORA, "--init-from", str(tmp_path / "base"), "--name", "lora", "--save-every", "2"]
    options += ["--model-axis", "2"]
    assert train(tmp_path, *options, "--steps", "2") == 0
    out, log = capsys.readouterr()
    first = json.loads(out)
    rank, width, layers = 2, 64, 2
    assert first["num_params"] == layers * rank * ((width + width) + (width + 4 * width))
    assert first["num_params"] < base["num_params"] / 10
    assert f"params of step 1 of {tmp_path / 'base'}" in log
    # The base of the new run has the loss that the other run ended with, up to the rounding of NF4.
    assert first["first_validation_loss"] == pytest.approx(base["final_validation_loss"], abs=0.05)
    assert train(tmp_path, *options, "--steps", "4", "--resume", "auto", "--lora-alpha", "4") == 0
    out, log = capsys.readouterr()
    assert "changed since: model.adapters.lora_alpha: 16.0 -> 4.0" in log  # another function of the same shapes
    assert "resuming after step 2" in log and json.loads(out)["num_steps"] == 4
    saved = (tmp_path / "lora" / "config.toml").read_text()
    assert 'lora = "blocks/query,blocks/up"' in saved and 'lora_base = "nf4_double"' in saved


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lora", "blocks/quary"], "'blocks/quary' matches the path of no leaf that is left: the nearest is"),
        (["--lora", "blocks/query=io"], "leaf 'blocks/query' of shape [2, 64, 64] and dtype float32 cannot be adapted"),
        (["--lora", "qproj"], "'qproj' is the name of no module with a matrix: did you mean 'q_proj'?"),
        (["--lora-rank", "4"], "--lora-rank and its like need --lora"),
        (["--lora", "blocks/*", "--lora-rank", "0"], "lora_rank=0: give at least 1"),
        (["--lora", "blocks/*", "--lora-train", "heads"], "train: 'heads' matches the path of no leaf"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as status:
        train(tmp_path / "runs", *options)
    error = capsys.readouterr().err
    assert status.value.code == 2 and message in error and len(error.splitlines()) == 1
    assert not (tmp_path / "runs").exists() and re.match("zero-jax train: error: ", error)


def test_patterns_of_stacked_blocks_are_for_their_matrices():
    paths = ["blocks/query", "blocks/norm", "head", "embed"]
    rules = _rules("*/query, blocks/* head, embed=oi, */norm=io", PRESETS["gpt-tiny"], paths)
    assert rules == {"*/query": "sio", "blocks/*": "sio", "head": "io", "embed": "oi", "*/norm": "io"}
    unrolled = dataclasses.replace(PRESETS["gpt-tiny"], scan=False)
    assert _rules("*/query", unrolled, ["blocks/0/query"]) == {"*/query": "io"}
    assert _rules("all-linear", unrolled, ["blocks/0/query"]) == {"blocks/*": "io"}
    assert _rules("q_proj", unrolled, ["blocks/0/query"]) == {"*/query": "io"}  # as on the hub
    names = "v_proj,down_proj,embed_tokens"
    assert _rules(names, PRESETS["gpt-tiny"], paths) == {"*/value": "sio", "*/down": "sio", "embed": "io"}
    assert _rules("all-linear", PRESETS["gpt-tiny"], paths) == {"blocks/*": "sio"}

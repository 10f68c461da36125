"""The completion scripts know every command and option, and bash completes with them."""

import shutil
import subprocess

import pytest

from zero_jax.cli import commands as cli


def script(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_commands_and_options_are_in_the_script(shell, capsys):
    text = script(shell, capsys)
    options = ["num-microbatches", "write-config", "max-shard-size", "grace-seconds"]
    assert all(word in text for word in ["from-deepspeed", "tokenize", "completion", *options])
    if shutil.which(shell) and shell != "fish":
        subprocess.run([shell, "-n"], input=text, text=True, check=True)


def completed(text, *words):
    """Returns what bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in words)
    ask = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _shtab_zero_jax; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", f"{text}\n{ask}"], capture_output=True, text=True, check=True)
    return {word.strip() for word in done.stdout.splitlines()}


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_commands_options_words_and_files(capsys, tmp_path):
    text = script("bash", capsys)
    assert completed(text, "zero-jax", "t") == {"train", "tokenize"}
    assert completed(text, "zero-jax", "train", "--num-m") == {"--num-microbatches"}
    words = {"attention": "own fused", "model": "gpt-tiny llama-3-8b", "remat": "own full_sharded dots"}
    words |= {"offload": "optimizer state all", "optimizer": "adamw sgd muon", "precision": "bf16", "stage": "0 3"}
    for option, expected in words.items():
        assert {*expected.split()} <= completed(text, "zero-jax", "train", f"--{option}", "")
    (tmp_path / "ds_config.json").touch()
    assert f"{tmp_path}/ds_config.json" in completed(text, "zero-jax", "from-deepspeed", f"{tmp_path}/ds")


def test_an_unknown_shell_is_an_error_of_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["completion", "tcsh"])
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1

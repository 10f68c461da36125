"""The help of the commands: the usual options with examples, or all of them (`--help all`)."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping
from typing import Any

from zero_jax.core.text_tables import aligned

# The options that most runs need, each in a line; the sizes of a mesh and the hardware are those of `plan` alone.
_MODEL = """
--model NAME: a preset, such as gpt-small, llama-3-8b, qwen-3-0.6b
--from-hf FOLDER: a checkpoint of the Hugging Face hub instead
--seq-len N: tokens in a sequence
--loss REF: a model of your own, as file.py:function
--init REF: the function that makes its params from a key
--batches REF: its batches: a function, an iterable
"""
_STEP = """
--batch-size N: examples of a step, over all devices
--num-microbatches N: parts that a batch is computed in, one by one
--optimizer NAME: adamw, sgd, lion, adafactor, muon
--learning-rate X: after the warm-up
--stage N: ZeRO: 0 none, 1 optimizer, 2 + gradients, 3 + params
--precision NAME: bf16, fp16, fp32, bf16-stochastic
--remat NAME: recompute instead of store: own, full, dots, none, ...
--offload WHAT: keep in host memory: optimizer, state, all
"""
_USUAL: Mapping[str, str] = {
    "train": _MODEL
    + """
--lora LEAVES: train low-rank adapters of these leaves alone
--data PATH: a text file, a folder of them, .jsonl, .parquet, tokens
--steps N: updates
--epochs X: passes over the data, instead of --steps
"""
    + _STEP
    + """
--devices N: devices to use
--name NAME: the run's folder, in --out
--eval-every N: steps between two validations
--save-every N: steps between two checkpoints
--resume auto: go on where the run of that name stopped
--config FILE: take options from a TOML file
--show-config: print what would be used, and end
""",
    "plan": """
--topology NAME: hardware, such as v5p:4x4x4, 2xv5e:16x16, h100:2x8
--auto: search for the best settings
--max-compiles N: settings that --auto compiles
--tokens N: also show the days of training on so many tokens
--write-config FILE: write the result for `zero-jax train --config`
--verify: also compare the numbers of the step with one device
"""
    + _MODEL
    + _STEP
    + """
--model-axis N: devices of tensor parallelism
--replica N: full copies of the sharded state
--json: print the result as one JSON object
""",
}
EXAMPLES: Mapping[str, str] = {
    "train": """
zero-jax train                                 # a small GPT on Python's source code
zero-jax train --data texts/ --model gpt-small --batch-size 64 --epochs 1 --name a
zero-jax train --from-hf Llama-3.2-1B --lora 'layers/query' --data chats.jsonl
zero-jax train --loss my.py:loss --init my.py:init --batches my.py:batches
""",
    "plan": """
zero-jax plan --model llama-3-8b --topology v5p:4x4x4 --batch-size 64
zero-jax plan --auto --model gpt-7b --topology h100:2x8 --tokens 100e9
zero-jax plan --auto --from-hf Llama-3.2-1B --topology v5e:4x4 --write-config a.toml
zero-jax plan --loss my.py:loss --init my.py:init --batches my.py:batches
""",
    "sample": """
zero-jax sample runs/gpt-tiny-stage3 --prompt "def "
zero-jax sample Llama-3.2-1B --prompt "Once upon a time" --num-tokens 200
""",
    "evaluate": """
zero-jax evaluate runs/gpt-tiny-stage3
zero-jax evaluate Llama-3.2-1B --data held_out.jsonl --batch-size 16
""",
    "tokenize": """
zero-jax tokenize --data texts/ --vocab-size 32000
zero-jax tokenize --data texts/ --tokenizer tokenizer.json --tokens tokens/
""",
    "export": """
zero-jax export runs/a --out safetensors/ --dtype bfloat16
zero-jax export runs/a --to-hf model/ --merged
""",
    "launch": """
zero-jax launch -n 2 -- train --data texts/
zero-jax launch -n 4 --min-processes 2 -- train --name a --resume auto
""",
    "plot": "zero-jax plot runs/a runs/b --out curves.png",
    "inspect": "zero-jax inspect runs/a --verify",
    "memory": "zero-jax memory --model gpt-7b --topology v5p:2x2x4 --stage 2",
    "comms": "zero-jax comms --model gpt-7b --topology v5p:2x2x4",
    "from-deepspeed": "zero-jax from-deepspeed ds_config.json --devices 64 --out train.toml",
    "completion": "zero-jax completion bash > ~/.local/share/bash-completion/completions/zero-jax",
}


def usual_options(command: str) -> dict[str, tuple[str, str]]:
    """Returns the usual options of a command, each with its argument and a line; none of a command with few."""
    lines = filter(None, _USUAL.get(command, "").splitlines())
    words = (line.partition(": ") for line in lines)
    return {head.split(" ")[0]: (head, text) for head, _, text in words}


class Help(argparse.Action):
    """`--help` shows the usual options of a command, if it has many, and `--help all` all of them."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Prints the help, and ends the program."""
        print(help_text(parser, everything=values == "all"))
        parser.exit()


def help_text(parser: argparse.ArgumentParser, *, everything: bool) -> str:
    """Returns the help of a command, or of `zero-jax` itself."""
    command = parser.prog.partition(" ")[2]
    usual, examples = usual_options(command), EXAMPLES.get(command, "").strip()
    shown = f"\nexamples:\n{_indented(examples)}\n" if examples else ""
    if everything or not usual:
        return f"{parser.format_help()}{shown}"
    by_name = {name: action for action in parser._actions for name in action.option_strings}
    rows = [(f"  {head}", f"{text}{_default(by_name[name], text)}") for name, (head, text) in usual.items()]
    num_more = len([action for action in parser._actions if action.option_strings]) - len(usual)
    usage = parser.format_usage().strip()
    more = f"`{parser.prog} --help all` has {num_more} more options."
    parser_help = parser.formatter_class(prog=parser.prog)
    parser_help.add_text(parser.description)
    return f"{usage}\n\n{parser_help.format_help()}{shown}\nthe usual options:\n{aligned(rows)}\n\n{more}"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _default(action: argparse.Action, text: str) -> str:
    is_shown = action.default not in (None, argparse.SUPPRESS, False) and "instead" not in text
    return f" ({shown_value(action.default)})" if is_shown else ""


def shown_value(value: Any) -> str:
    """Returns a value as a command line has it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def without_python(text: str, fields: Collection[str]) -> str:
    """Returns the line of a docstring on a field as help: options instead of `fields`, none instead of None."""
    text = re.sub(r"([.,;]? [Oo]r| and)? an? `[A-Z]\w+`", "", text)  # a class stands for what an option cannot say
    text = re.sub(r" \(`zero\.[^)]*\)", "", text)
    text = text.replace("None", "none").replace("`", "")
    named = lambda found: f"--{found[0].replace('_', '-')}" if found[0] in fields else found[0]  # noqa: E731
    return re.sub(r"(?<![-/.\w])[a-z]+(_[a-z0-9]+)+\b", named, text)

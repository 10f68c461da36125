"""The command `zero-jax from-deepspeed`."""

import argparse
import json
import pathlib

from zero_jax.cli.config_file import format_config, write_file
from zero_jax.cli.deepspeed.reading import read_json, translate
from zero_jax.cli.deepspeed.rows import Translation
from zero_jax.cli.options import add_json, add_path, one_line_errors, reader
from zero_jax.core.text_tables import printable_lines


def add_from_deepspeed_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `zero-jax from-deepspeed`."""
    parser.description = (
        "Prints the config file that `zero-jax train --config` takes for a DeepSpeed config, and key by key what was "
        "translated, what was not and why. Exit status: 0 done, 1 the file has unknown keys, and nothing is written, 2 "
        "it cannot be read."
    )
    add_path(parser, "path", metavar="DS_CONFIG", help="the JSON file, such as ds_config.json")
    add_path(parser, "--out", help="write the config file there, and print the list")
    parser.add_argument("--force", action="store_true", help="write over an existing file")
    parser.add_argument(
        "--devices",
        type=reader(int, lowest=1),
        metavar="N",
        help="number of devices that the DeepSpeed config is for, from which it infers its batch size",
    )
    add_json(parser)
    parser.set_defaults(run=one_line_errors(_from_deepspeed))


def _from_deepspeed(options: argparse.Namespace) -> int:
    if options.force and not options.out:
        raise ValueError("--force is for --out: give --out FILE too")
    out = pathlib.Path(options.out) if options.out else None
    if out is not None and out.exists() and not (options.force and out.is_file()):
        raise ValueError(f"--out {out} exists: give another name" + (", or --force" if out.is_file() else ""))
    if out is not None and not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no such folder, make it first")
    translation = translate(read_json(options.path), devices=options.devices)
    has_unknown = bool(translation.of("unknown"))
    if out is not None and not has_unknown:
        write_file(out, translation.sections, title=_title(options.path, translation))
    written = str(out) if out is not None and not has_unknown else None
    if options.json:
        print(json.dumps(translation.to_json() | {"written": written}))
    elif out is None:
        text = format_config(translation.sections, title=f"translated from {options.path} by zero-jax from-deepspeed")
        print(printable_lines("\n".join([text, *(f"# {line}" for line in str(translation).splitlines())])))
    else:
        print(printable_lines(translation))
        print(f"\nwrote {out}: zero-jax train --config {out}" if written else f"\nunknown keys: {out} is not written")
    return 1 if has_unknown else 0


def _title(path: str, translation: Translation) -> str:
    """Returns the comment at the head of the file: what its reader has to decide."""
    lines = [f"translated from {path} by zero-jax from-deepspeed"]
    if translation.undecided:
        lines += ["", "Not translated, decide yourself:", *(f"  {line}" for line in translation.undecided)]
    return "\n".join(lines)

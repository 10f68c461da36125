"""The command `zero-jax from-deepspeed`."""

import argparse
import json
import pathlib

from zero_jax.cli.config_file import format_config, write_file
from zero_jax.cli.deepspeed.reading import read_json, translate
from zero_jax.cli.deepspeed.rows import Translation
from zero_jax.core.text_tables import printable_lines


def from_deepspeed(options: argparse.Namespace) -> int:
    """Runs `zero-jax from-deepspeed`."""
    if options.force and not options.out:
        raise ValueError("--force is for --out: give --out FILE too")
    out = pathlib.Path(options.out) if options.out else None
    if out is not None and out.exists() and not (options.force and out.is_file()):
        raise ValueError(f"--out {out} exists: give another name" + (", or --force" if out.is_file() else ""))
    if out is not None and not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no such folder, make it first")
    translation = translate(
        read_json(options.path), devices=options.devices, per_device_batch_size=options.per_device_batch_size
    )
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
        print(f"\nwrote {out}: {translation.command(out)}" if written else f"\nunknown keys: {out} is not written")
    return 1 if has_unknown else 0


def _title(path: str, translation: Translation) -> str:
    """Returns the comment at the head of the file: what its reader has to decide."""
    lines = [f"translated from {path} by zero-jax from-deepspeed"]
    if translation.undecided:
        lines += ["", "Not translated, decide yourself:", *(f"  {line}" for line in translation.undecided)]
    return "\n".join(lines)

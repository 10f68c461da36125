"""Config files in TOML, with a section for each config dataclass and a key for each of its fields."""

import json
import pathlib
import tomllib
from collections.abc import Collection, Mapping
from typing import Any

from zero_jax.cli.command_options import SECTIONS, model_keys
from zero_jax.cli.config_classes import option_fields
from zero_jax.cli.options import limits_of, read_value
from zero_jax.core.close_match import did_you_mean, missing_here
from zero_jax.core.files.json_lines import write_text
from zero_jax.core.files.untrusted import read_text
from zero_jax.core.text_tables import printable, quoted

_MAX_BYTES = 1 << 16  # of a file that a person writes: anything larger is something else, such as a checkpoint


def read_file(path: str | pathlib.Path) -> dict[str, Any]:
    """Reads a config file; returns its values by the destinations of the options for the same fields."""
    values: dict[str, Any] = {}
    for section, entries in _read_toml(path).items():
        _check_known(f"{path}: section", section, SECTIONS)
        if not isinstance(entries, dict):
            raise ValueError(f"{path}: {quoted(section)} is a value: write a section [{printable(section)}] of values")
        keys = _keys_of(section)
        for name, value in entries.items():
            _check_known(f"{path}: key of [{section}]", name, keys)
            destination, kind = keys[name]
            try:
                values[destination] = read_value(value, kind, **limits_of(destination))
            except ValueError as error:
                raise ValueError(f"{path}: {section}.{name} = {error}") from error
    return values


def _keys_of(section: str) -> dict[str, tuple[str, Any]]:
    """Returns the destination of the option, and the kind of its value, for each key of a section."""
    config = SECTIONS[section]
    kinds = {f"{config}.{name}": field.kind for name, field in option_fields(config).items()}
    kinds |= model_keys() if section == "model" else {}
    return {destination.rpartition(".")[2]: (destination, kind) for destination, kind in kinds.items()}


def _check_known(label: str, name: str, names: Collection[str]) -> None:
    if name not in names:
        homes = [f"[{section}]" for section in SECTIONS if name in _keys_of(section)]
        hint = f"it is a key of {' and '.join(homes)}. " if homes else missing_here(name) or did_you_mean(name, names)
        raise ValueError(f"{label} {quoted(name)} is unknown: {hint}Known are {', '.join(names)}")


def _read_toml(path: str | pathlib.Path) -> dict[str, Any]:
    text = read_text(path, "the config file", remedy="give a TOML file", limit_bytes=_MAX_BYTES)
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError(f"the config file {path} is nested too deeply: write sections of values") from error
    except ValueError as error:  # an integer of too many digits raises no TOMLDecodeError
        other = pathlib.Path(path).with_suffix(".toml")
        hint = f"; did you mean {other}?" if other != pathlib.Path(path) and other.is_file() else ""
        raise ValueError(f"the config file {path} is no TOML: {str(error).splitlines()[0]}; mend that{hint}") from error


def write_file(path: str | pathlib.Path, sections: Mapping[str, Mapping[str, Any]], *, title: str) -> None:
    """Writes a config file that `read_file` reads, with the lines of `title` as comments before it."""
    write_text(pathlib.Path(path), format_config(sections, title=title))


def format_config(sections: Mapping[str, Mapping[str, Any]], *, title: str) -> str:
    """Returns the text of a config file; None is written as "none"."""
    # The title names files, and a line break in a name would begin a line of TOML.
    lines = [f"# {''.join(x if x.isprintable() else '?' for x in line)}".rstrip() for line in title.splitlines()]
    for section, entries in sections.items():
        lines += ["", f"[{section}]"]
        lines += [f"{name} = {_toml(value)}" for name, value in entries.items()]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_toml(name)} = {_toml(entry)}' for name, entry in value.items())}}}"
    # TOML has no surrogates, by which JSON escapes an emoji, and no bare DEL.
    return json.dumps("none" if value is None else value, ensure_ascii=False).replace("\x7f", "\\u007f")

"""The fields of the config dataclasses, read from their source: `zero-jax train --help` imports neither them nor JAX.

A field is a line `name: annotation = default` of the class, and its help is in the class's docstring.
"""

import ast
import dataclasses
import functools
import inspect
import pathlib
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from zero_jax.cli.help import CONFIGS
from zero_jax.core.field_checks import FieldKind, read_kind

_PACKAGE = pathlib.Path(__file__).parent.parent
# The module of each config whose fields are options, and keys of config files.
CONFIG_MODULES: Mapping[str, str] = CONFIGS["modules"]
_NOT_OPTIONS = frozenset(CONFIGS["fields"]["no_option"].split())


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptionField:
    """A field of a config that has an option: what it may hold, its default, a line about it, and words to offer."""

    kind: FieldKind  # what it may hold
    default: Any  # its default
    help: str  # a line about it
    words: tuple[Any, ...] = ()  # the words that it may hold, where these are known
    is_open: bool = False  # whether it may hold others, too


@functools.cache
def _assignments(module: str) -> dict[str, ast.expr]:
    """Returns the values of the names that a module of zero_jax defines."""
    values: dict[str, ast.expr] = {}
    for node in _source(module).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            values |= {target.id: node.value for target in targets if isinstance(target, ast.Name)}
    return values


@functools.cache
def _source(module: str) -> ast.Module:
    return ast.parse(_PACKAGE.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8"))


def _class_of(config: str) -> ast.ClassDef:
    classes = (node for node in _source(CONFIG_MODULES[config]).body if isinstance(node, ast.ClassDef))
    return next(node for node in classes if node.name == config)


def _text_of(module: str, name: str) -> str | None:
    """Returns the text that a name in an annotation stands for, such as `Literal["auto", "text"]`."""
    value = _assignments(module).get(name)
    if value is not None:
        return ast.unparse(value)
    # Else it is imported, of zero_jax's own modules alone: others have no words.
    for node in _source(module).body:
        source = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if source.startswith("zero_jax.") and name in [alias.name for alias in node.names]:  # type: ignore[union-attr]
            source = source.removeprefix("zero_jax.")
            is_module = _PACKAGE.joinpath(*source.split(".")).with_suffix(".py").is_file()
            return _text_of(source, name) if is_module else None
    return None


@functools.cache
def option_fields(config: str) -> dict[str, OptionField]:
    """Returns the fields of a config class that have an option."""
    node, module = _class_of(config), CONFIG_MODULES[config]
    helps, fields = _field_help(node), {}
    for line in node.body:
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name) or line.value is None:
            continue
        name = line.target.id
        kind = read_kind(ast.unparse(line.annotation), functools.partial(_text_of, module))
        if kind.base is not None and not {name, f"{config}.{name}"} & _NOT_OPTIONS:
            field, default = f"{config}.{name}", ast.literal_eval(line.value)  # so defaults have to be literals
            table, suggested = CONFIGS["words"].get(field, ""), CONFIGS["suggested"].get(field, "").split()
            words = suggested or kind.words or (keys_of(*table.split()) if table else ())
            fields[name] = OptionField(
                kind=kind,
                default=default,
                help=CONFIGS["help"].get(field) or helps.get(name, ""),
                words=tuple(words),
                is_open=bool(suggested),
            )
    return fields


def defaults_of(config: str) -> dict[str, Any]:
    """Returns the defaults of a config's fields, as a part of `TrainConfig` with what that changes of them."""
    defaults = {name: field.default for name, field in option_fields(config).items()}
    # Such as `data: DataConfig = DataConfig(...)`.
    for line in _class_of("TrainConfig").body:
        call = line.value if isinstance(line, ast.AnnAssign) else None
        if isinstance(call, ast.Call) and ast.unparse(call.func) == config:
            defaults |= {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg}
    return defaults


def keys_of(module: str, name: str) -> list[Any]:
    """Returns the keys of a dict that a module, or a TOML file of the package, defines, or the items of a tuple."""
    if module.endswith(".toml"):
        return [*tomllib.loads(_PACKAGE.joinpath(module).read_text(encoding="utf-8"))[name]]
    value = _assignments(module)[name]
    assert isinstance(value, ast.Dict | ast.Tuple)
    keys = value.keys if isinstance(value, ast.Dict) else value.elts
    texts = (_text_of(module, key.id) if isinstance(key, ast.Name) else ast.unparse(key) for key in keys if key)
    return [ast.literal_eval(text) for text in texts if text is not None]


def _field_help(node: ast.ClassDef) -> dict[str, str]:
    """Returns the lines on the fields in the section `Attributes:` of a class's docstring."""
    section = inspect.cleandoc(ast.get_docstring(node) or "").partition("Attributes:\n")[2].partition("\nExample:")[0]
    entries = re.split(r"^  (\w+): ", section, flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()).rstrip(".") for name, text in zip(entries[::2], entries[1::2], strict=True)}

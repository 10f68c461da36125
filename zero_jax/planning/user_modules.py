"""Imports the user's Python files by path, each as a module with a unique name.

The name contains the folder that the file's imports start from: two files of the same name are two modules, and any
process after `install()` can import them again, so that functions can be pickled by reference. Imports in such a file
look in its folder first. `sys.path` is not changed, and no module of the standard library is replaced.
"""

import builtins
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pathlib
import re
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

from zero_jax.core.close_match import did_you_mean
from zero_jax.core.files.untrusted import user_path
from zero_jax.planning.errors import user_lines

_PREFIX = "zero_jax_user_"  # followed by the folder's path in hexadecimal
_FILE = "file_"  # followed by the file's name in hexadecimal, if that is no identifier


def install() -> None:
    """Adds the finder of user modules to `sys.meta_path`, so that this process can import them by name."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def resolve(option: str, reference: str) -> Any:
    """Imports what `module:name` (from the current folder first) or `path/to/file.py:name` refers to.

    A name with dots is an attribute, as `model.loss_fn` is. A `ValueError` has the `option`, and the file's line where
    importing failed.
    """
    where, _, name = reference.rpartition(":")
    if not where or not name:
        raise ValueError(f"{option} {reference!r}: write module:function, such as my_model:loss_fn")
    install()
    label = f"{option} {reference!r}"
    is_path = where.endswith(".py") or "/" in where or "\\" in where
    try:
        module = _from_file(label, pathlib.Path(where)) if is_path else _from_name(label, where)
    except OSError as error:
        raise ValueError(f"{label}: cannot read {where!r} ({error.strerror})") from error
    value, known = module, ""
    for part in name.split("."):
        if not hasattr(value, part):
            names = [known + attribute for attribute in dir(value) if not attribute.startswith("_")]
            hint = did_you_mean(known + part, names, "; did you mean {!r}?")
            raise ValueError(f"{label}: {where!r} has no function {name!r}{hint}")
        value, known = getattr(value, part), f"{known}{part}."
    return value


def _from_file(label: str, path: pathlib.Path) -> types.ModuleType:
    path = user_path(path)
    if path.is_dir():
        raise ValueError(f"{label}: {str(path)!r} is a folder: name a Python file in it, such as {path / 'model.py'}")
    if path.exists() and not path.is_file():
        raise ValueError(f"{label}: cannot import {str(path)!r}: it is no regular file: name a Python file")
    if not path.exists():
        files = [file for file in path.parent.glob("*.py") if file.is_file()] if path.parent.is_dir() else []
        hint = did_you_mean(path, files, "; did you mean {!r}?")
        raise ValueError(f"{label}: cannot import {str(path)!r}: it does not exist{hint}")
    if path.suffix != ".py":
        raise ValueError(f"{label}: {str(path)!r} is no Python file: its name has to end in .py")
    return _import(label, str(path), _module_name(path.resolve()))


def _from_name(label: str, name: str) -> types.ModuleType:
    """Imports a module by its dotted name, from the current folder first."""
    parts = name.split(".")
    if all(part.isidentifier() for part in parts):
        local_spec = importlib.machinery.PathFinder.find_spec(parts[0], [str(pathlib.Path.cwd())])
        if local_spec and not _is_same(local_spec, _ordinary(parts[0])):
            local_name = f"{_root(pathlib.Path.cwd())}.{name}"
            if local_spec.loader or _ordinary(local_name):
                return _import(label, name, local_name)
    return _import(label, name, name)


def _import(label: str, where: str, name: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except SystemExit as error:
        raise ValueError(f"{label}: {where!r} ends the program when it is imported{_at(error)}") from error
    except Exception as error:
        text = f"{error}" if isinstance(error, ImportError | SyntaxError) else f"{type(error).__name__}: {error}"
        text = re.sub(rf"{_PREFIX}[0-9a-f]+\.?", "", text.splitlines()[0] if text else type(error).__name__)
        raise ValueError(f"{label}: cannot import {where!r} ({text}){_at(error)}") from error


def _at(error: BaseException) -> str:
    """Returns the last line of the user's code in the traceback, or ''; the message of a `SyntaxError` has it."""
    lines = [] if isinstance(error, SyntaxError) else user_lines(error)[1]
    return next((f" at {line}" for line in reversed(lines) if "site-packages" not in line), "")


def _module_name(path: pathlib.Path) -> str:
    """Returns the name of a file's module, relative to the folder of its outermost package."""
    stem = path.stem if path.stem.isidentifier() else f"{_FILE}{os.fsencode(path.stem).hex()}"
    parts, folder = [] if stem == "__init__" else [stem], path.parent
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join([_root(folder), *parts])


def _root(folder: pathlib.Path) -> str:
    return f"{_PREFIX}{os.fsencode(folder.resolve()).hex()}"


def _folder(root: str) -> str:
    return os.fsdecode(bytes.fromhex(root.removeprefix(_PREFIX)))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules whose names contain a folder, in that folder."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        root, *parts = fullname.split(".")
        if not root.startswith(_PREFIX):
            return None
        if not parts:
            spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [_folder(root)]
            return spec
        stem = parts[-1]
        if stem.startswith(_FILE) and path:
            file = pathlib.Path(next(iter(path)), os.fsdecode(bytes.fromhex(stem.removeprefix(_FILE))) + ".py")
            return importlib.util.spec_from_file_location(fullname, file, loader=_Loader(fullname, str(file)))
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    """Executes a file with imports that look in its folder first."""

    def exec_module(self, module: types.ModuleType) -> None:
        beside = functools.partial(_import_beside, module.__name__)
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": beside}
        super().exec_module(module)


def _import_beside(
    importing: str,
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """Imports as `__import__` does in a user's module, the first argument."""
    package = _beside(importing, name.partition(".")[0]) if level == 0 else None
    if package is None:
        return builtins.__import__(name, globals, locals, fromlist or (), level)
    module = importlib.import_module(f"{package}.{name}")
    if fromlist:
        return builtins.__import__(f"{package}.{name}", globals, locals, fromlist, 0)
    return sys.modules[f"{package}.{name.partition('.')[0]}"] if "." in name else module


def _beside(importing: str, name: str) -> str | None:
    """Returns the user's package to import a name from, or None to import it as Python does.

    As for a script, modules beside a file come before installed packages, but not before the standard library and
    zero_jax. A file that Python finds too is imported by Python. In a package, its own folder comes last.
    """
    if name in sys.stdlib_module_names or name == "zero_jax":
        return None
    root = importing.partition(".")[0]
    package = importing if hasattr(sys.modules.get(importing), "__path__") else importing.rpartition(".")[0]
    spec = importlib.machinery.PathFinder.find_spec(name, [_folder(root)])
    ordinary = _ordinary(name)
    if spec and spec.loader:
        return None if _is_same(spec, ordinary) else root
    if ordinary is not None or name in sys.modules:
        return None
    while package != root:
        if importlib.machinery.PathFinder.find_spec(name, list(sys.modules[package].__path__)):
            return package
        package = package.rpartition(".")[0]
    return root if spec else None


def _ordinary(name: str) -> importlib.machinery.ModuleSpec | None:
    """Returns the spec that Python's own import finds for a name."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None


def _is_same(spec: importlib.machinery.ModuleSpec, other: importlib.machinery.ModuleSpec | None) -> bool:
    """Returns whether two specs are of the same file, or of the same folder without an `__init__.py`."""
    return other is not None and bool(_paths(spec) & _paths(other))


def _paths(spec: importlib.machinery.ModuleSpec) -> set[pathlib.Path]:
    files = [spec.origin] if spec.origin and spec.has_location else list(spec.submodule_search_locations or ())
    return {pathlib.Path(file).resolve() for file in files}

"""Optional dependencies: a missing package names the command that installs it."""

import contextlib
import importlib.util
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator


class MissingPackage(ModuleNotFoundError):
    """A package that only an extra of zero-jax installs is not installed."""


def pip_install(requirement: str) -> str:
    """Returns the command that installs a requirement for the running Python, as it can be typed here.

    It is `pip install` where that is the pip of this Python, as in an activated environment, and names the Python
    elsewhere. For `zero-jax[EXTRA]` pip takes the zero-jax that is installed, a checkout too, and adds what is missing.
    """
    python = pathlib.Path(sys.executable)
    pip = shutil.which("pip")
    if pip and pathlib.Path(pip).parent.resolve() == python.parent.resolve():
        command = "pip install"
    else:
        name = os.path.relpath(python) if python.is_relative_to(pathlib.Path.cwd()) else str(python)
        has_pip = importlib.util.find_spec("pip") is not None
        command = f"{name} -m pip install" if has_pip else f"uv pip install --python {name}"
    # Unquoted, zsh takes brackets and stars for a pattern of file names, and refuses the line.
    return f'{command} "{requirement}"' if set("[*") & set(requirement) else f"{command} {requirement}"


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Surrounds the imports of packages of the extra `name`; the `MissingPackage` has the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        command = pip_install(f"zero-jax[{name}]")
        raise MissingPackage(f"needs {package}: {command}", name=error.name) from error

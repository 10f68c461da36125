"""Optional dependencies: a missing package names the extra of zero-jax that installs it."""

import contextlib
from collections.abc import Iterator


class MissingPackage(ModuleNotFoundError):
    """A package that only an extra of zero-jax installs is not installed."""


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Surrounds the imports of packages that the extra `name` installs.

    Raises:
      MissingPackage: one of them is not installed; the message has the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise MissingPackage(f'needs {package}: pip install "zero-jax[{name}]"', name=error.name) from error

"""ZeRO for JAX: sharded optimizer states, gradients and parameters as `PartitionSpec` rules over a device mesh."""

import importlib
from typing import Any

__version__ = "0.2.0"

# The module of each public name, imported when the name is first used: `import zero_jax` costs only what is used of it.
# They are those of the stub beside this file, which is what type checkers read: `from MODULE import NAME as NAME`.
with open(f"{__file__}i", encoding="utf-8") as _stub:
    _MODULES = {words[3]: words[1] for line in _stub if (words := line.split())[:1] == ["from"]}

__all__ = sorted(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "launch":  # `launch.join` was the documented name of `cluster.join`
        name = "cluster"
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if module == __name__:
        return importlib.import_module(f"{__name__}.{name}")
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]

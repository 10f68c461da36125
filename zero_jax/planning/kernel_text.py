"""The text of compiled programs with large constants, and the bodies of Pallas kernels, decoded from bytecode."""

from __future__ import annotations

import importlib
import re
from typing import Any

from jax.extend.mlir import ir

from zero_jax.program.jaxprs import hlo_text

_CONSTANT = re.compile(r" = (?P<dtype>[a-z]\w*)\[[^=\n]*? constant\((?P<value>\{[^\n]*?\})\)(?=, |\n)")
_INTEGERS = re.compile(r"[su]\d+")
_MAX_CHARACTERS, _SHORT = 2**20, 2**6


def program_text(compiled: Any) -> str:
    """Returns a program's text with its arrays of integers, by which block-sparse kernels skip blocks."""
    try:
        text = hlo_text(compiled)
    except ValueError:  # another release, or backend
        return compiled.as_text()
    return _CONSTANT.sub(_shortened, text)


def _shortened(match: re.Match) -> str:
    """Elides a constant that cannot be a kernel's block mask."""
    longest = _MAX_CHARACTERS if _INTEGERS.fullmatch(match["dtype"]) else _SHORT
    return match[0] if len(match["value"]) <= longest else match[0].replace(match["value"], "{...}")


def kernel_module(body: bytes | str) -> ir.Module | None:
    """Decodes the body of a Pallas TPU kernel, MLIR bytecode (or text); None if that fails."""
    context = ir.Context()
    context.allow_unregistered_dialects = True
    try:
        importlib.import_module("jaxlib.mosaic.python.tpu").register_dialect(context)
    except (ImportError, AttributeError):
        pass
    try:
        with context, ir.Location.unknown():
            return ir.Module.parse(body)
    except (ValueError, RuntimeError, ir.MLIRError):
        return None

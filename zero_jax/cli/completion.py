"""The command `zero-jax completion`: completes commands, options and files in a shell, by shtab."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from zero_jax.cli.commands import build_parser
from zero_jax.cli.options import is_path
from zero_jax.core.extras import extra


def complete(options: argparse.Namespace) -> int:
    """Runs `zero-jax completion`."""
    with extra("completion"):
        import shtab

    parser = build_parser()
    for action in _actions(parser):
        if is_path(action):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, options.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yields the options and arguments of a parser and its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command.with_options())

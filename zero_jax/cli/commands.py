"""The command line `zero-jax`; its options are the fields of the config dataclasses.

The `cli` modules are the only ones that change process-wide settings, such as the platform and the number of devices.
"""

import argparse
import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import zero_jax
from zero_jax.cli.command_options import add_options
from zero_jax.cli.help import COMMANDS, help_text
from zero_jax.cli.options import Parser, is_path, with_config_file
from zero_jax.core.extras import MissingPackage, extra
from zero_jax.core.files.system_errors import with_remedy
from zero_jax.core.text_tables import printable_lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    _prepare_streams()
    _prepare_interrupts()
    name, status = "zero-jax", 0
    try:
        options = parse(arguments)
        name = options.parser.prog
        status = options.run(options)
        sys.stdout.flush()  # here, where a pipe that is gone is caught
    except MissingPackage as error:
        options.parser.error(str(error))
    except BrokenPipeError:  # the reader, such as `head`, ended
        _silence()
        # 128 + SIGPIPE, as shells report it.
        return status or 141
    except OSError as error:
        _silence()
        with contextlib.suppress(OSError):  # a terminal that is gone
            print(f"{name}: error: {printable_lines(with_remedy(error))}", file=sys.stderr)
        return status or 1
    return status


@functools.cache
def _prepare_interrupts() -> None:
    """Shows a Ctrl-C as one line, and repeats one that Python swallowed in a callback, as of JAX's at collections."""
    # `cache` makes this run once: hooks of hooks would repeat a Ctrl-C several times.
    uncaught, ignored = sys.excepthook, sys.unraisablehook

    def report(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            return uncaught(kind, error, trace)
        with contextlib.suppress(OSError):
            print("\nzero-jax: stopped by Ctrl-C", file=sys.stderr)

    def repeat(event: Any) -> None:
        if not issubclass(event.exc_type, KeyboardInterrupt):
            return ignored(event)
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))  # when the callback has ended
        timer.daemon = True
        timer.start()

    sys.excepthook, sys.unraisablehook = report, repeat


def _prepare_streams() -> None:
    """Opens closed streams (`>&-`) on the null device, and escapes characters that a terminal's encoding lacks."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        stream: Any = getattr(sys, name)
        if stream is None:
            try:
                os.fstat(descriptor)
            except OSError:  # or the next file to be opened would have what libraries print
                os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
            setattr(sys, name, open(os.devnull, "r+"))
        elif name == "stdout" and hasattr(stream, "reconfigure") and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _silence() -> None:
    """Discards the buffer of stdout, which Python would try to write again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line and its config file; ends the program with a line on an error, or after the help."""
    parser = build_parser()
    try:
        words = sys.argv[1:] if arguments is None else arguments
        return with_config_file(lambda: parser.parse_args(words or ["--help"]))
    except SystemExit:
        sys.stdout.flush()  # or Python would write the help at exit, and say that its reader is gone
        raise


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser of `zero-jax` and its commands."""
    parser = Parser(prog="zero-jax", description="ZeRO for JAX: sharded training as PartitionSpec rules.")
    parser.add_argument("-V", "--version", action="version", version=f"zero-jax {zero_jax.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, table in COMMANDS.items():
        options, usage = functools.partial(add_options, command=name), f"zero-jax {name} {table['usage']}"
        command = commands.add_parser(name, usage=usage, help=table["help"], options=options)
        # A command has its own parser for its errors, and those of the others to read the options of a run.
        command.set_defaults(parser=command, known=commands.choices)
    return parser


def show(options: argparse.Namespace) -> int:
    """Runs `zero-jax help`."""
    parser: Any = build_parser()
    if options.topic not in (None, "all"):
        parser = options.known[options.topic].with_options()
    print(help_text(parser, everything="all" in (options.topic, options.all)))
    return 0


def complete(options: argparse.Namespace) -> int:
    """Runs `zero-jax completion`: prints a shell's script, made by shtab."""
    with extra("completion"):
        import shtab

    parser = build_parser()
    for action in _actions(parser):
        action.choices = action.choices or getattr(action, "suggested", None)  # nothing is parsed with this parser
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

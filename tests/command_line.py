"""Runs commands of `zero-jax` within the process of a test."""

from zero_jax.cli import commands as cli


def run(arguments, capsys):
    """Returns exit status, output and error output of a command."""
    try:
        status = cli.main(arguments)
    except SystemExit as error:
        status = error.code
    return status, *capsys.readouterr()

"""Starts a test's worker in several processes that join each other, and collects what each reports."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

RESULT = "ZERO_JAX_TEST_RESULT"
"""The environment variable with the file that a worker writes its result to."""


def free_address() -> str:
    """Returns an address of this machine that no server has."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def report(result: Any) -> None:
    """Hands a worker's result to the test that has started it.

    Stdout would not do: Gloo writes lines of its own to it, from other threads and as late as a process's end.
    """
    pathlib.Path(os.environ[RESULT]).write_text(json.dumps(result))


def results_of(worker: pathlib.Path, arguments: Sequence[Sequence[object]], timeout_seconds: float = 240) -> list[Any]:
    """Runs a worker once with each list of arguments, all at the same time; returns what each has reported.

    A worker gets the address of process 0 before its arguments. Raises if any process fails.
    """
    address = free_address()
    with tempfile.TemporaryDirectory() as folder:
        files = [pathlib.Path(folder, str(index)) for index in range(len(arguments))]
        processes = [
            subprocess.Popen(
                [sys.executable, str(worker), address, *map(str, words)],
                env={**os.environ, RESULT: str(file)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for file, words in zip(files, arguments, strict=True)
        ]
        try:
            outputs = [process.communicate(timeout=timeout_seconds) for process in processes]
        finally:
            for process in processes:
                process.kill()
        for process, (_, errors) in zip(processes, outputs, strict=True):
            assert process.returncode == 0, errors[-3000:]
        return [json.loads(file.read_text()) for file in files]

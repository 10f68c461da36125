"""The commands `zero-jax train`, and `plot` for the curves of its runs."""

import argparse
import collections
import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import sys
import traceback
from collections.abc import Iterator

from zero_jax.cli.config_file import format_config
from zero_jax.cli.models.adapters import adapted_model, refuse_lora
from zero_jax.cli.models.own import import_own_model, read_own_model
from zero_jax.cli.models.presets import hub_data, preset_model
from zero_jax.cli.options import print_result
from zero_jax.cli.run_config import choose_platform, read_config, resolved_sections, save_options
from zero_jax.cluster import NotJoined, OtherProcessFailed, join, let_others_end_first
from zero_jax.core.agreement import Agreement
from zero_jax.core.files.system_errors import with_remedy
from zero_jax.core.output import unstalled
from zero_jax.core.text_tables import plain, printable_lines
from zero_jax.planning import ModelError, explain
from zero_jax.trainer import ResumeError, execute, plot_runs, prepare, read_run

_PACKAGE = pathlib.Path(__file__).parent.parent


def train(options: argparse.Namespace) -> int:
    """Runs `zero-jax train`."""
    stream = unstalled(sys.stderr if options.json else sys.stdout)

    def log(text: str) -> None:
        print(printable_lines(text), file=stream, flush=True)

    try:
        config = read_config(options)
        own = read_own_model(options)
        model = adapted_model(preset_model(options), options) if own is None else None
        if own is not None:
            refuse_lora(options)
        if model is not None and options.from_hf is not None:
            data = hub_data(config.data, options.from_hf, vocab_size=model.vocab_size)
            config = dataclasses.replace(config, data=data)
        if options.show_config:
            choose_platform(config.devices)
            sections = resolved_sections(config, model, options)
            text = format_config(sections, title="what `zero-jax train` would use with these options")
            print_result(options, text, sections)
            return 0
        place = join()
    except ValueError as error:
        options.parser.error(str(error))
    except NotJoined as error:
        print(f"{options.parser.prog}: error: {printable_lines(error)}", file=sys.stderr)
        return 1
    is_begun = False
    try:
        choose_platform(config.devices)
        with Agreement() if place.num_processes > 1 else contextlib.nullcontext():
            if own is not None:  # whose files may use JAX when they are imported
                model = import_own_model(own)
            assert model is not None
            run = prepare(config, model=model, log=log if place.is_first else lambda _: None)
        is_begun = True
        with _failed_saves_in_a_line():
            result = execute(run, log=log, terminal=stream, save_options=lambda: save_options(run, options, log=log))
    except Exception as error:
        is_own = own is not None and not is_begun and not isinstance(error, OSError | OtherProcessFailed)
        refusal = explain(error) if is_own else error
        status = _refused_status(refusal, is_begun=is_begun)
        if status is None:
            raise
        text = with_remedy(refusal) if isinstance(refusal, OSError) else str(refusal)
        print(f"{options.parser.prog}: error: {printable_lines(text)}", file=sys.stderr)
        let_others_end_first(refusal)
        return place.leave(status)
    status = result.exit_status
    if place.is_first:
        with contextlib.suppress(*[OSError] if status else []):  # the status says it, if a terminal that is gone cannot
            print(json.dumps(plain(result)), flush=True) if options.json else log(str(result))
    return place.leave(status)


@contextlib.contextmanager
def _failed_saves_in_a_line() -> Iterator[None]:
    """Filters out orbax's traceback of a failed save, for which the `Checkpointer` logs a line."""

    def is_shown(record: logging.LogRecord) -> bool:
        # By the module that logs: others log to `absl`, too.
        return not (record.exc_info and f"{os.sep}orbax{os.sep}" in record.pathname)

    logger = logging.getLogger("absl")
    logger.addFilter(is_shown)
    try:
        yield
    finally:
        logger.removeFilter(is_shown)


def _refused_status(error: Exception, *, is_begun: bool) -> int | None:
    """Returns the exit status of an error that is shown as a line, or None for one with a traceback, maybe a bug."""
    if isinstance(error, OtherProcessFailed):
        return 2 if error.is_refusal and not is_begun else 1
    if isinstance(error, ResumeError):
        return 2
    if isinstance(error, OSError):
        return None if isinstance(error, BrokenPipeError) and is_begun else 1
    if not is_begun:
        return 2 if isinstance(error, ValueError | ModelError) else None
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    is_ours = isinstance(error, ValueError) and pathlib.Path(raised_in).is_relative_to(_PACKAGE)
    return 1 if is_ours else None


def plot(options: argparse.Namespace) -> int:
    """Runs `zero-jax plot`."""
    try:
        runs = [(path, read_run(path)) for path in options.runs]
        counts = collections.Counter(run.name for _, run in runs)  # those of the same name go by their paths
        named = [dataclasses.replace(run, name=path) if counts[run.name] > 1 else run for path, run in runs]
        plot_runs(options.out, named, metric=options.metric, x=options.x, title=options.title)
    except OSError as error:
        raise ValueError(f"cannot draw {options.out!r}: {with_remedy(error)}") from error
    print(printable_lines(f"drew {options.out}"))
    return 0

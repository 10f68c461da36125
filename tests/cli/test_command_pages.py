"""The site's pages of commands and config files have every option and every key."""

import importlib.util
import pathlib

from zero_jax.cli.command_options import SECTIONS
from zero_jax.cli.commands import build_parser
from zero_jax.cli.config_classes import option_fields

PATH = pathlib.Path(__file__).parents[2] / "docs" / "command_pages.py"


def test_the_pages_have_every_option_and_key():
    spec = importlib.util.spec_from_file_location("command_pages", PATH)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    pages = made.pages()
    (commands,) = (action.choices for action in build_parser()._actions if action.choices)
    for name, parser in commands.items():
        text = pages[name]
        assert all(option in text for x in parser.with_options()._actions for option in x.option_strings), name
        assert f"({name}.md)" in pages["index"]
    for section, config in SECTIONS.items():
        text = pages[f"config-{section}"]
        assert all(f"| `{key}` |" in text for key in option_fields(config)), section

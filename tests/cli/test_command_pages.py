"""The site's pages of commands and config files have every option and every key."""

import importlib.util
import pathlib

from zero_jax.cli.command_options import SECTIONS
from zero_jax.cli.commands import build_parser
from zero_jax.cli.config_classes import option_fields

PATH = pathlib.Path(__file__).parents[2] / "docs" / "command_pages.py"


def test_the_pages_have_every_option_and_key(tmp_path):
    spec = importlib.util.spec_from_file_location("command_pages", PATH)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    made.write(tmp_path)
    (commands,) = (action.choices for action in build_parser()._actions if action.choices)
    for name, parser in commands.items():
        text = (tmp_path / f"{name}.md").read_text()
        assert all(option in text for x in parser.with_options()._actions for option in x.option_strings), name
        assert f"({name}.md)" in (tmp_path / "index.md").read_text()
    for section, config in SECTIONS.items():
        text = (tmp_path / f"config-{section}.md").read_text()
        assert all(f"| `{key}` |" in text for key in option_fields(config)), section

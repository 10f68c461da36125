"""The command `zero-jax from-deepspeed`: a DeepSpeed config becomes a config file of zero_jax, key by key.

`reading` reads the JSON file and checks it against the table of `keys`; `settings` and `optimizer` translate the keys
that have a counterpart; `rows` collects what became of each key; `command` prints or writes the result. A key is
translated only where it means the same here; what differs, is off, or is unknown has a row that says so.
"""

from zero_jax.cli.deepspeed.command import add_from_deepspeed_options
from zero_jax.cli.deepspeed.rows import KeyRow, Translation
from zero_jax.cli.deepspeed.settings import translate

__all__ = ["KeyRow", "Translation", "add_from_deepspeed_options", "translate"]

"""The command `zero-jax from-deepspeed`: a DeepSpeed config becomes a config file of zero_jax, key by key.

`keys.toml` is a table: for each key the kind of its values, and why it means nothing here or is not translated. The
keys with a counterpart have their rules in `rules`; `command` reads the JSON file, applies both, and prints or writes
the rows, which `rows` has beside the table. A key is translated only where it means the same here; what differs, is
off, or is unknown has a row that says so.
"""

from zero_jax.cli.deepspeed.command import translate
from zero_jax.cli.deepspeed.rows import KeyRow, Translation

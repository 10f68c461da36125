"""Opens data sets of the Hugging Face hub, and folders of them, by the package `datasets`."""

from __future__ import annotations

import re
from typing import Any

from zero_jax.core.extras import extra
from zero_jax.core.files.untrusted import user_path
from zero_jax.core.text_tables import printable

HUB = "hf:"  # begins the name of such a data set
_FORM = re.compile(r"(?P<name>[^:@]+)(:(?P<subset>[^@]+))?(@(?P<split>.+))?")


def open_hub(data: str, *, is_streamed: bool) -> Any:
    """Opens a data set: a `datasets.Dataset`, or a `datasets.IterableDataset` that is read as it is needed.

    Args:
      data: `hf:` and the name on the hub, or a folder of files or one that `Dataset.save_to_disk` wrote, with
        `:SUBSET` and `@SPLIT` (train without that) if they are needed.
      is_streamed: whether to read it as it is needed.

    Raises:
      ValueError: there is no such data set, subset or split, or it cannot be read.
    """
    with extra("hf"):
        import datasets  # pyright: ignore[reportMissingImports]

    place = data.removeprefix(HUB)
    match = None if user_path(place).is_dir() else _FORM.fullmatch(place)
    name, subset, split = match.group("name", "subset", "split") if match else (place, None, None)
    folder = user_path(name)
    try:
        if (folder / "state.json").is_file():
            table = datasets.Dataset.load_from_disk(str(folder))
            return table.to_iterable_dataset(num_shards=min(64, len(table)) or 1) if is_streamed else table
        path = str(folder) if folder.is_dir() else name
        return datasets.load_dataset(path, subset, split=split or "train", streaming=is_streamed)
    except Exception as error:  # of any library that it reads with
        why = (str(error).splitlines() or [""])[0]
        raise ValueError(
            f"{data} cannot be read by `datasets` ({type(error).__name__}: {printable(why)}): give hf:NAME, or "
            "hf:NAME:SUBSET@SPLIT, of the hub or of a folder"
        ) from error

"""A summary says of each leaf of a sharded tree what it is, where it lies and what it takes, as text and as a page."""

import html.parser
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import zero_jax as zero


def init_fn(key):
    return {"layers": {"kernel": jnp.zeros((4, 64, 128)), "<bias>": jnp.zeros(128)}, "embed": jnp.zeros((96, 64))}


def make(**settings):
    mesh = zero.make_mesh(data=4, replica=2)
    config = zero.ZeroConfig(**settings)
    return zero.init_state(init_fn, optax.adam(0.1), jax.random.key(0), mesh=mesh, config=config)


@pytest.mark.parametrize(
    ("stage", "precision", "offload"), [(3, "bf16", "optimizer"), (1, "bf16", None), (0, "fp32", None)]
)
def test_bytes_are_those_of_the_arrays(stage, precision, offload):
    state = make(stage=stage, precision=precision, offload=offload)
    summary = zero.summary(state)
    measured = zero.memory.measure_arrays(state)
    assert summary.device_bytes == measured.device_bytes
    for group in ("params", "opt_state"):
        device_bytes, host_bytes = (
            sum(getattr(leaf, name) for leaf in summary.groups[group]) for name in ("device_bytes", "host_bytes")
        )
        assert device_bytes == measured.groups[group]
        assert host_bytes == measured.host.get(group, 0)
    assert bool(summary.host_bytes) == (offload is not None) == ("in pinned_host" in str(summary))
    leaf = next(leaf for leaf in summary.leaves if leaf.path == "opt_state/0/mu/layers/kernel")
    shards = 1 if stage == 0 else 4
    assert (np.prod(leaf.parts), leaf.num_copies) == (shards, 8 // shards)
    assert leaf.global_bytes == 4 * 4 * 64 * 128


def test_the_text_is_a_tree_with_totals():
    text = str(zero.summary(make(stage=3, precision="fp32")))
    heading, columns, *rows = text.splitlines()
    assert heading.startswith("TrainState on mesh replica=2 x data=4 (8 devices): 13 leaves, ")
    assert columns.split() == ["shape", "dtype", "spec", "global", "per", "device"]
    names = [re.match(r"( *)(\S+)", row).groups() for row in rows]
    at = names.index(("", "params"))
    assert names[at : at + 5] == [("", "params"), ("  ", "embed"), ("  ", "layers"), ("    ", "<bias>"),
                                  ("    ", "kernel")]  # fmt: skip
    assert re.search(r"embed +96 x 64 +float32 +\[-, data\] +24\.58 KB +6\.14 KB", rows[at + 1])
    assert "156.16 KB  39.42 KB" in re.sub(" {2,}", "  ", rows[at])


class Parsed(html.parser.HTMLParser):
    """Checks that tags are closed in order, and collects them."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta",) and not self.get_starttag_text().endswith("/>"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_stands_alone(tmp_path):
    summary = zero.summary(make(stage=3, precision="bf16"))
    summary.save_html(tmp_path / "state.html")
    text = (tmp_path / "state.html").read_text(encoding="utf-8")
    parsed = Parsed(text)
    assert not parsed.open and "script" not in parsed.tags and "link" not in parsed.tags
    assert not [value for name, value in parsed.attributes if name in ("src", "href")] and "http" not in text
    assert "&lt;bias&gt;" in text and "<bias>" not in text
    assert parsed.tags.count("tr") == len(summary.leaves) + 3
    assert [path.name for path in tmp_path.iterdir()] == ["state.html"]
    assert summary._repr_html_() in text


def test_a_drawing_has_a_cell_for_each_shard():
    mesh = zero.make_mesh(data=4, model=2)
    sharding = NamedSharding(mesh, PartitionSpec(None, "data", "model"))
    leaf = jax.ShapeDtypeStruct((2, 8, 6), jnp.float32, sharding=sharding)
    summary = zero.summary({"a": leaf})
    (found,) = summary.leaves
    assert (found.parts, found.num_copies, found.spec) == ((1, 4, 2), 1, "[-, data, model]")
    drawing = summary._repr_html_()
    _, *titles = re.findall(r"<title>(.*?)</title>", drawing)  # the first one is that of the bar of groups
    assert len(titles) == 8 and titles[0] == "a[:, 0:2, 0:3], 48 bytes" and titles[-1] == "a[:, 6:8, 3:6], 48 bytes"
    assert "8 shards" in drawing


def test_other_trees(tmp_path):
    summary = zero.summary({"a": np.zeros((2, 2)), "b": 1.0, "c": jax.random.key(0), "d": jnp.zeros((0, 3))})
    by_path = {leaf.path: leaf for leaf in summary.leaves}
    assert by_path["a"].spec == "on the host" and by_path["c"].spec == "one device"
    assert by_path["c"].global_bytes == 8 and by_path["d"].global_bytes == 0
    assert summary.mesh == {} and json.dumps(summary.to_json())
    Parsed(summary.to_html())
    many = jax.ShapeDtypeStruct((4096, 4096), jnp.float32, sharding=None)
    assert zero.summary(many).leaves[0].path == "value"
    with pytest.raises(ValueError, match="tree leaf 'a' is 'text' of type str, no array: summarize"):
        zero.summary({"a": "text"})

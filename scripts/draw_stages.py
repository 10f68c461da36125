"""Draws where every byte of a train state is at stages 0 to 3, from the shards of real arrays on 8 simulated devices.

python scripts/draw_stages.py --out docs/pictures

A small model in bf16 with adamw takes a step at each stage; `addressable_shards` of every leaf say which device has
which part. Gradients exist only within a step: they are computed here by the same transform, and placed where a step
with microbatches accumulates them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import jax
import jax.numpy as jnp
import optax

import zero_jax as zero
from zero_jax.analysis.figures import new_figure, save_figure, tidy
from zero_jax.core.tree import leaf_names
from zero_jax.training import make_placement

# Colours of Okabe and Ito's palette, those of the memory figures; a group is a row of the stage table.
COLORS: Mapping[str, str] = {
    "params": "#0072B2",
    "master": "#56B4E9",
    "grads": "#E69F00",
    "opt_state": "#009E73",
}
NAMES = {
    "params": "params",
    "master": "master params",
    "grads": "gradients (within a step)",
    "opt_state": "optimizer state",
}
SHARDED = {
    0: "nothing is sharded",
    1: "master params and optimizer state are sharded",
    2: "gradients are sharded too",
    3: "params are sharded too",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """The part of a leaf on a device: the fraction of each dim where it starts and ends, and its bytes."""

    device: int
    spans: tuple[tuple[float, float], ...]
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """A leaf of the state, and its part on each device."""

    group: str
    path: str
    dtype: str
    dims: tuple[int, ...]
    parts: tuple[Part, ...]


def init_fn(key: jax.Array) -> dict[str, Any]:
    keys = jax.random.split(key, 3)
    shapes = {"embed": (512, 64), "up": (64, 256), "down": (256, 64)}
    weights = {name: 0.1 * jax.random.normal(k, s) for k, (name, s) in zip(keys, shapes.items(), strict=True)}
    return weights | {"norm": jnp.ones(64)}


def loss_fn(params: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
    x = params["embed"][batch["tokens"]] * params["norm"]
    x = x + jax.nn.relu(x @ params["up"]) @ params["down"]
    logits = (x @ params["embed"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def leaves_of(group: str, tree: Any) -> list[Leaf]:
    """Returns the array leaves of a tree with at least one dim, and what `addressable_shards` say of them."""
    found = []
    for path, x in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True):
        if not x.ndim:
            continue
        parts = []
        for shard in x.addressable_shards:
            ranges = [s.indices(size) for s, size in zip(shard.index, x.shape, strict=True)]
            spans = tuple((start / size, stop / size) for (start, stop, _), size in zip(ranges, x.shape, strict=True))
            parts.append(Part(device=shard.device.id, spans=spans, num_bytes=shard.data.nbytes))
        found.append(Leaf(group=group, path=path, dtype=str(x.dtype), dims=x.shape, parts=tuple(parts)))
    return found


def state_at(stage: int) -> list[Leaf]:
    """Takes a step at a stage and returns the leaves of the new state and of the gradients that led to it."""
    mesh, tx = zero.make_mesh(data=8), optax.adamw(1e-3)
    config = zero.ZeroConfig(stage=stage, precision="bf16")
    state = zero.init_state(init_fn, tx, jax.random.key(0), mesh=mesh, config=config)
    tokens = jax.random.randint(jax.random.key(1), (16, 8), 0, 512)
    batch = zero.shard_batch({"tokens": tokens, "targets": tokens}, mesh=mesh)
    placement = make_placement(state.params, mesh=mesh, config=config)
    own = jax.tree.map(lambda x: x.sharding, state.masters)
    take = jax.jit(
        jax.grad(zero.gather_on_use(loss_fn, own, mesh=mesh)), out_shardings=placement.param_shardings("grads")
    )
    grads = take(state.masters, batch)
    state, _ = zero.make_train_step(loss_fn, tx, mesh=mesh, config=config)(state, batch)
    groups = {"params": state.params, "master": state.master, "grads": grads, "opt_state": state.opt_state}
    return [leaf for group, tree in groups.items() for leaf in leaves_of(group, tree)]


def bytes_by_device(leaves: Sequence[Leaf]) -> dict[int, int]:
    """Adds up the bytes of each device."""
    sums: dict[int, int] = {}
    for leaf in leaves:
        for part in leaf.parts:
            sums[part.device] = sums.get(part.device, 0) + part.num_bytes
    return sums


def draw_map(path: pathlib.Path, stage: int, leaves: Sequence[Leaf]) -> None:
    """Draws a row for each leaf and a column for each device: the part of the leaf that the device has."""
    from matplotlib.patches import Patch, Rectangle

    devices = sorted(bytes_by_device(leaves))
    figure = new_figure(path, width=9.2, height=1.7 + 0.3 * len(leaves))
    panel = figure.subplots()
    for row, leaf in enumerate(leaves):
        for part in leaf.parts:
            column = devices.index(part.device)
            panel.add_patch(
                Rectangle((column + 0.06, row + 0.12), 0.88, 0.76, facecolor="#F2F2F2", edgecolor="#BBBBBB", lw=0.6)
            )
            # The last dim from left to right, the one before it from top to bottom.
            (top, bottom), (left, right) = ((0.0, 1.0), *part.spans)[-2:]
            corner = column + 0.06 + 0.88 * left, row + 0.12 + 0.76 * top
            panel.add_patch(
                Rectangle(corner, 0.88 * (right - left), 0.76 * (bottom - top), facecolor=COLORS[leaf.group])
            )
        most = max(part.num_bytes for part in leaf.parts)
        panel.text(len(devices) + 0.12, row + 0.5, f"{_kb(most)} a device", va="center", fontsize=9.5)
        if row and leaf.group != leaves[row - 1].group:
            panel.axhline(row, color="#666666", lw=0.8)
    short = {"bfloat16": "bf16", "float32": "f32"}
    labels = [f"{leaf.path}  {list(leaf.dims)} {short[leaf.dtype]}" for leaf in leaves]
    panel.set_yticks([row + 0.5 for row in range(len(leaves))], labels, fontsize=9.5)
    panel.set_xticks([i + 0.5 for i in range(len(devices))], [f"device {i}" for i in devices], fontsize=9)
    panel.xaxis.tick_top()
    panel.tick_params(length=0)
    panel.set(xlim=(0, len(devices) + 1.8), ylim=(len(leaves), 0))
    for side in ("top", "right", "bottom", "left"):
        panel.spines[side].set_visible(False)
    total = max(bytes_by_device(leaves).values())
    figure.suptitle(f"Stage {stage}: {SHARDED[stage]}. {_kb(total)} on each device", fontsize=12)
    shown = [group for group in COLORS if any(leaf.group == group for leaf in leaves)]
    handles = [Patch(facecolor=COLORS[group], label=NAMES[group]) for group in shown]
    handles.append(Patch(facecolor="#F2F2F2", edgecolor="#BBBBBB", label="on other devices only"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    save_figure(figure, path)


def draw_bars(path: pathlib.Path, stages: Mapping[int, Sequence[Leaf]]) -> None:
    """Draws the bytes of every device at every stage, by group, each leaf a block."""
    from matplotlib.patches import Patch

    figure = new_figure(path, width=9.2, height=4.4)
    panels = figure.subplots(1, len(stages), sharey=True, squeeze=False)[0]
    for panel, (stage, leaves) in zip(panels, stages.items(), strict=True):
        bottoms: dict[int, float] = {}
        for leaf in leaves:
            for part in leaf.parts:
                bottom, size = bottoms.get(part.device, 0.0), part.num_bytes / 1e3
                panel.bar(part.device, size, 0.86, bottom, color=COLORS[leaf.group], edgecolor="white", linewidth=0.4)
                bottoms[part.device] = bottom + size
        panel.set_title(f"stage {stage}: {max(bottoms.values()):,.0f} KB", fontsize=10.5)
        panel.set_xticks(sorted(bottoms))
        panel.set_xlabel("device")
        tidy(panel)
        panel.grid(axis="x", visible=False)
    panels[0].set_ylabel("bytes on the device (KB = 10³ bytes)")
    handles = [Patch(facecolor=color, label=NAMES[group]) for group, color in COLORS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    save_figure(figure, path)


def _kb(num_bytes: float) -> str:
    return f"{num_bytes / 1e3:,.2f} KB" if num_bytes < 1e4 else f"{num_bytes / 1e3:,.1f} KB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the pictures")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    stages = {stage: state_at(stage) for stage in range(4)}
    for stage, leaves in stages.items():
        draw_map(out / f"stage_{stage}.png", stage, leaves)
    draw_bars(out / "stages.png", stages)
    for stage, leaves in stages.items():
        print(f"stage {stage}: {_kb(max(bytes_by_device(leaves).values()))} a device")


if __name__ == "__main__":
    main()

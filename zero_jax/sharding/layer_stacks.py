"""Finds the params that are stacks of layers, by their paths and shapes: what a pipeline's stages have parts of.

Whether a model scans over them is known only when its loss is traced. A leaf that is taken for a stack, or is not taken
for one, costs a movement of it in each step, never a wrong result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def is_stack(shape: Sequence[int]) -> bool:
    """Tells whether the leading dim of a shape counts layers, rather than features, by how small it is.

    Kernels `[features, heads, head_dim]` of attention are no stacks: there are more features than in one head.
    """
    rest = max(shape[1:], default=0)
    return 2 * rest > shape[0] if len(shape) >= 3 else len(shape) == 2 and 4 * shape[0] <= rest


def stacked_layers(shapes: Mapping[str, Sequence[int]]) -> frozenset[str]:
    """Returns the paths of the leaves that are stacks of layers: the leaves of a subtree have the same leading dim.

    One of them has to look like a stack, and to be one of several or to have three dims.

    Args:
      shapes: the shape of each leaf, by its path.
    """
    leading: dict[str, set[int]] = {}
    members: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        parts = name.split("/")
        for i in range(len(parts) + 1):
            subtree = "/".join(parts[:i])
            leading.setdefault(subtree, set()).add(shape[0] if shape else 0)
            members.setdefault(subtree, []).append(name)
    found: set[str] = set()
    for name in shapes:
        parts = name.split("/")
        subtrees = ("/".join(parts[:i]) for i in range(len(parts) + 1))
        largest = next(subtree for subtree in subtrees if len(leading[subtree]) == 1)
        group = [shapes[other] for other in members[largest]]
        if any(is_stack(shape) and (len(shape) > 2 or len(group) > 1) for shape in group):
            found.add(name)
    return frozenset(found)

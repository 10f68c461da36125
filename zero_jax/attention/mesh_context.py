"""The mesh that a function is traced for, where no argument says so."""

from __future__ import annotations

import jax
from jax.sharding import Mesh

# A part of the keys of JAX's own caches: a jitted function within a loss is traced again for another mesh.
mesh_context = jax.make_user_context(default_value=None)


def current_mesh(mesh: Mesh | None = None) -> Mesh | None:
    """Returns `mesh`, else that of `mesh_context`, else that of `jax.set_mesh`; None for a single device."""
    mesh = mesh_context.value if mesh is None else mesh
    if mesh is None:
        mesh = jax.sharding.get_mesh()
    return None if mesh.empty else mesh

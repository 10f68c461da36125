"""Compiler options that bound how many bytes of collectives XLA combines into one (the paper's C_B).

The ZeRO paper, section 6.2: small messages are slow, so they are combined, but into buffers of a constant size and not,
as in early versions of most frameworks, into one buffer for the entire model.
"""

from __future__ import annotations

_GPU = tuple(f"xla_gpu_{kind}_combine_threshold_bytes" for kind in ("all_gather", "reduce_scatter", "all_reduce"))
# XLA:TPU combines all-reduces (libtpu: cross-replica sums). It combines reduce-scatters of one layer whatever the
# options are, all-gathers never.
_TPU = ("xla_jf_crs_combiner_threshold_in_bytes",)
# XLA:CPU combines nothing.
_OPTIONS: dict[str, tuple[str, ...]] = {"gpu": _GPU, "cuda": _GPU, "rocm": _GPU, "tpu": _TPU, "cpu": ()}
_MAX_BYTES = 2**63 - 1


def compiler_options(platform: str, combine_bytes: int | None) -> dict[str, str | int | bool]:
    """Returns the compiler options of a backend that combine collectives up to `combine_bytes`.

    They are for `jax.jit(..., compiler_options=...)` or `lowered.compile(compiler_options=...)`. A single array that is
    larger than the buffer is still moved by one collective.

    Args:
      platform: That of the mesh's devices, `mesh.devices.flat[0].platform`: `tpu`, `gpu`, `cuda`, `rocm` or `cpu`.
      combine_bytes: The largest buffer in bytes: on GPUs of all-gathers, reduce-scatters and all-reduces; on TPUs of
        all-reduces, the only ones with an option; it has no effect on CPUs. 0 combines nothing. None leaves the
        compiler's default.

    Raises:
      ValueError: A size below 0 or not an integer, or a platform whose options are not known.
    """
    if combine_bytes is None:
        return {}
    if isinstance(combine_bytes, bool) or not isinstance(combine_bytes, int) or not 0 <= combine_bytes <= _MAX_BYTES:
        raise ValueError(
            f"combine_bytes={combine_bytes!r} is not a number of bytes: give an integer of at least 0, "
            "such as 64 * 2**20, or None for the compiler's own"
        )
    if platform not in _OPTIONS:
        raise ValueError(
            f"combine_bytes={combine_bytes} is not known to apply to {platform!r}, only to {', '.join(_OPTIONS)}: "
            "leave it None"
        )
    return dict.fromkeys(_OPTIONS[platform], combine_bytes)

"""The windows of convolutions and of reductions: which elements of the input each output meets."""

import dataclasses
import re

import numpy as np


@dataclasses.dataclass(frozen=True)
class Window:
    """A window along one dim: its size, stride, padding, dilations of base and window, and whether it is reversed."""

    size: int = 1
    stride: int = 1
    low: int = 0
    high: int = 0
    base: int = 1
    dilation: int = 1
    is_reversed: bool = False

    def inputs(self, length: int, num_outputs: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns which input an output meets at an element of the window, and whether it is there: `[outputs, size]`.

        Else it meets padding, or a gap of the dilated base.
        """
        at = np.arange(num_outputs)[:, None] * self.stride + np.arange(self.size) * self.dilation - self.low
        return at // self.base, (at >= 0) & (at <= (length - 1) * self.base) & (at % self.base == 0)


def read_windows(text: str | None, rank: int) -> list[Window]:
    """Reads {size=3x3 stride=2x2 pad=1_1x0_0 lhs_dilate=1x1 rhs_dilate=1x1 rhs_reversal=1x0}."""
    fields = dict(re.findall(r"(\w+)=(\S+)", (text or "").strip("{}")))
    values = {name: value.split("x") for name, value in fields.items()}
    windows = []
    for dim in range(rank):
        at = {name: value[dim] for name, value in values.items()}
        low, high = at.get("pad", "0_0").split("_")
        windows.append(
            Window(
                size=int(at.get("size", 1)), stride=int(at.get("stride", 1)), low=int(low), high=int(high),
                base=int(at.get("lhs_dilate", 1)), dilation=int(at.get("rhs_dilate", 1)),
                is_reversed=at.get("rhs_reversal", "0") == "1",
            )
        )  # fmt: skip
    return windows

"""Where a param is in a checkpoint of the Hugging Face hub: the names of its tensors, and its part of them."""

import dataclasses
import string


@dataclasses.dataclass(frozen=True)
class TensorName:
    """Where a param is in a checkpoint: in one tensor, or in several of which each is a slice of its leading dims.

    Attributes:
      template: the tensor's name; each placeholder, such as `{layer}`, stands for the index of a leading dim of the
        param, in order.
      is_transposed: whether the tensor's dims are in reverse order, as PyTorch's `Linear` has `[out, in]`.
      shape: the tensor's shape where it has fewer dims than the (rest of the) param: `[out, in]` for a param of
        `[in, heads, head]`. None: it has the same ones.
      part: `(start, stop, period)` for a param that shares its tensor with others: of each `period` features along the
        param's last dim the tensor has those from `start` to `stop` for this param. None: the tensor is of this param.
      first: what the first index of the leading dims is called: the first layer of a stack.

    Example:
      >>> zero.pretrained.TensorName("model.layers.{layer}.mlp.up_proj.weight", is_transposed=True).template
      'model.layers.{layer}.mlp.up_proj.weight'
    """

    template: str
    is_transposed: bool = False
    shape: tuple[int, ...] | None = None
    part: tuple[int, int, int] | None = None
    first: int = 0

    @property
    def num_indices(self) -> int:
        """How many leading dims of the param are spread over several tensors."""
        return len(self._fields)

    @property
    def _fields(self) -> list[str]:
        return [field for _, field, _, _ in string.Formatter().parse(self.template) if field is not None]

    def of(self, index: tuple[int, ...]) -> str:
        """Returns the name of the tensor at an index of the leading dims: the layer, and the expert if there is one."""
        fields, index = self._fields, (*(i + self.first for i in index[:1]), *index[1:])
        if not all(fields):  # of `{}`, which take the indices in order
            return self.template.format(*index)
        return self.template.format(**dict(zip(fields, index, strict=True)))

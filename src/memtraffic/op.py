"""What is computed, as an object. Meters, assertions and benchmarks take an `Op`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from memtraffic import names


def row_tolerance(reference: Tensor, dtype: torch.dtype, roundings: float = 4) -> Tensor:
    """How far each element of a row may be from `reference`: a few ulps of the row's largest value.

    Half of the dtype's smallest subnormal number is added, because the best result may be that far.
    reference: float64, of shape (..., N). Returns a tensor of shape (..., 1).
    """
    finfo = torch.finfo(dtype)
    largest = reference.abs().amax(dim=-1, keepdim=True)
    return roundings * finfo.eps * largest + finfo.smallest_normal * finfo.eps / 2


@dataclass(frozen=True)
class Op:
    """An operation: the inputs it takes, the result it must have, and the least traffic it needs.

    name: as on the command line. sizes: the names of the numbers that make a shape, such as `("M",
    "N")`. make_inputs: from such numbers and the keywords `dtype`, `layout` and `device` to a tuple
    of tensors. reference: the result, computed from inputs that are float64. least_bytes: of given
    inputs, each element read once and each element of the result written once. roundings: how many
    ulps of its row's largest element a result may be off. checks_row_sums: whether the sum of each
    row is checked as well.
    """

    name: str
    sizes: tuple[str, ...]
    make_inputs: Callable[..., tuple[Tensor, ...]]
    reference: Callable[..., Tensor]
    least_bytes: Callable[..., int]
    roundings: float = 4
    checks_row_sums: bool = False

    def inputs(
        self,
        shape: tuple[int, ...],
        dtype: str = "float32",
        layout: str = "packed",
        device: torch.device | str | None = None,
    ) -> tuple[Tensor, ...]:
        """Inputs of this shape, the same ones each time. Arguments as those of `tensors.matrix`.

        Raises ValueError unless `shape` has one number for each of `sizes`.
        """
        if len(shape) != len(self.sizes):
            raise ValueError(f"{self.name}: a shape is {', '.join(self.sizes)}, not {tuple(shape)}")
        return self.make_inputs(*shape, dtype=dtype, layout=layout, device=device)

    def tolerance(self, reference: Tensor, dtype: torch.dtype) -> Tensor:
        """How far a result of `dtype` may be from the float64 `reference`, of shape (..., 1)."""
        return row_tolerance(reference, dtype, self.roundings)


def find_op(name: str | Op) -> Op:
    """The operation called `name`: one of `names.OPS`, or `module:attribute`.

    >>> find_op("softmax").sizes
    ('M', 'N')

    An `Op` returns itself. Raises LookupError for a name that leads to no `Op`.
    """
    if isinstance(name, Op):
        return name
    names.check_name(name, names.OPS, "operation")
    op = names.import_attribute(names.OPS.get(name, name))
    if not isinstance(op, Op):
        raise LookupError(f"{name!r} is {type(op).__name__}, not an Op")
    return op

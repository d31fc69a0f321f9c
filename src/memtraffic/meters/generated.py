"""The kernels that `torch.compile` generates for a GPU, as a function that a meter can count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memtraffic.errors import CountError
from memtraffic.torch_adapter import load_generated


def generated(fn: Callable[..., Any], *tensors: Tensor) -> Callable[..., Any]:
    """What `torch.compile` makes of `fn` for the GPU that stands in, for arguments like `tensors`.

    The function runs the generated kernels, which are interpreted while they are counted:

        with stand_in():
            print(count(generated(fn, x), x))

    fn: a function of tensors that returns a tensor or a tuple of them. A kernel is taken in the
    first of the configurations that a GPU would choose from. Raises CountError if nothing stands in
    for a GPU, and what the compiler raises.
    """
    if not torch.cuda.is_available():
        raise CountError("generated: there is no GPU to compile for: call it in `stand_in()`")
    return load_generated(fn, tensors)

"""What kernels of others do beside an ordinary launch, for Triton's interpreter.

They launch what a launch has compiled, and pass arguments of a package's own kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memtraffic.triton_adapter.launch import CompiledKernel, Kernel


class Relaunched:
    """Stands for the compiled kernel that a launch returns: launching it is interpreted.

    It is given the arguments in the kernel's order, with or without the constants among them.
    kernel: a jitted function. args, options: of the launch.
    """

    def __init__(self, kernel: Kernel, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        self.kernel = kernel
        self.launched = dict(zip(kernel.arg_names, args, strict=False)) | dict(options)
        for option in ("grid", "warmup"):
            self.launched.pop(option, None)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        parameters = self.kernel.params
        variable = [parameter.name for parameter in parameters if not parameter.is_constexpr]

        def launch(*args: Any, stream: object = None) -> None:
            names = variable if len(args) == len(variable) else self.kernel.arg_names
            named = dict(zip(names, args, strict=True))
            self.kernel.run(grid=grid, warmup=False, **self.launched | named)

        return launch


def relaunch(compiled: CompiledKernel, grid: Any) -> Callable[..., None]:
    """What launches a compiled kernel: stands for its `__getitem__`."""
    kernel, constants, chosen = compiled.src.fn, compiled.src.constants, compiled.metadata
    named = {kernel.arg_names[path[0]]: constants[path] for path in constants if len(path) == 1}
    options = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
    return Relaunched(kernel, (), options | named)[grid]


@dataclass
class Pointer:
    """An argument that is no tensor but has an address, such as a view of a package's own kind.

    The compiler takes whatever has `data_ptr` and `dtype`; the interpreter needs the memory, too.
    base: the tensor that the argument holds, in which the address lies.
    """

    address: int
    type: Any
    base: torch.Tensor

    def at(self, copy: torch.Tensor) -> Pointer:
        """The same place in a copy of the tensor."""
        return Pointer(copy.data_ptr() + self.address - self.base.data_ptr(), self.type, copy)


def as_pointer(value: Any) -> Any:
    """A `Pointer` for an argument of another kind than the interpreter knows.

    Raises NotImplementedError if the argument holds no tensor with its address.
    """
    from triton.runtime.jit import TensorWrapper, mangle_type

    if not hasattr(value, "data_ptr") or isinstance(value, (torch.Tensor, TensorWrapper)):
        return value
    address = value.data_ptr()
    for base in vars(value).values():
        if isinstance(base, torch.Tensor) and not base.is_meta:
            start = base.untyped_storage().data_ptr()
            if start <= address <= start + base.untyped_storage().nbytes():
                return Pointer(address, mangle_type(value), base)
    raise NotImplementedError(f"an argument is a {type(value).__name__}, of unknown memory")

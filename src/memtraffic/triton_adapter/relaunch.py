"""What kernels of others do beside an ordinary launch, for Triton's interpreter.

They launch what a launch has compiled, as Triton's own fused softmax and FlagGems do, and pass
arguments of a package's own kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        self.known = dict(zip(kernel.arg_names, args, strict=False)) | dict(options)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        every = self.kernel.arg_names
        variable = [it.name for it in self.kernel.params if not it.is_constexpr]

        def launch(*args: Any, stream: object = None) -> None:
            names = variable if len(args) == len(variable) else every
            self.kernel.run(grid=grid, **self.known | dict(zip(names, args, strict=True)))

        return launch


def relaunch(compiled: CompiledKernel, grid: Any) -> Callable[..., None]:
    """What launches a compiled kernel: stands for its `__getitem__`."""
    kernel, constants, chosen = compiled.src.fn, compiled.src.constants, compiled.metadata
    known = {kernel.arg_names[path[0]]: constants[path] for path in constants if len(path) == 1}
    known |= {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
    return Relaunched(kernel, (), known)[grid]


def as_tensor(value: Any) -> Any:
    """A tensor at the address of an argument that only has `data_ptr` and `dtype`.

    The compiler takes such views of a package's own kind; the interpreter needs the memory, too. A
    dimension without a stride says that the kernel may go as far as the memory does.

    Raises NotImplementedError if the argument holds no tensor with its address.
    """
    from triton.runtime.jit import TensorWrapper

    if not hasattr(value, "data_ptr") or isinstance(value, (torch.Tensor, TensorWrapper)):
        return value
    for held in vars(value).values():
        if isinstance(held, torch.Tensor) and not held.is_meta:
            memory = held.untyped_storage()
            start = value.data_ptr() - memory.data_ptr()
            if 0 <= start < max(memory.nbytes(), 1):
                own = torch.empty(0, dtype=value.dtype, device=held.device)
                size = (2 * bool(memory.nbytes()),)
                return own.set_(memory, start // value.dtype.itemsize, size, (0,))
    raise NotImplementedError(f"an argument is a {type(value).__name__}, of unknown memory")

"""A launch that is planned once, and then costs the host as little as a launch can."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from memtraffic import device
from memtraffic.gpus import Gpu
from memtraffic.triton_adapter.launch import compile_kernel, starter

T = TypeVar("T")

CACHE_SIZE = 4096  # kinds of calls


def takes_ptx(gpu: Gpu) -> bool:
    """Whether kernels may hold instructions of NVIDIA's; not where interpreted."""
    compiled = device.runs_on_gpu() or device.captured_gpu() is not None
    return compiled and gpu.vendor == "nvidia"


class Launch:
    """A planned launch of a Triton kernel: only its tensors change from call to call.

    A call costs one look-up of the current stream, and the launch. It specialises
    nothing, so its tensors must be like those of the plan: of the same dtypes and
    strides, on the same GPU, and aligned to 16 bytes where those were. That GPU must be
    the current one.

    kernel: its last parameters are the constants. grid: of programs. arguments: for all
    parameters before the constants; its tensors stand for those of the calls.
    constants: by name, in the kernel's order. words: gives a call, by its stream, the address
    of the last tensor, and one that holds its memory. options: of a launch, such as `num_warps`.

    Attributes: `run`, what a call calls, and `compiled`, the compiled kernel; None where
    kernels are interpreted or captured.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: Sequence[Any],
        constants: dict[str, Any],
        words: Callable[[int], tuple[int, Tensor]] | None = None,
        **options: Any,
    ) -> None:
        tensors = {i: it for i, it in enumerate(arguments) if isinstance(it, Tensor)}
        self.kernel, self.grid, self.constants, self.options = kernel, grid, constants, options
        self._arguments = [0 if i in tensors else it for i, it in enumerate(arguments)]
        self._places = list(tensors)
        if words:
            self._arguments[self._places.pop()] = words
        self.compiled: Any = None
        self.run: Callable[..., None] = self._run
        if device.runs_on_gpu():
            self.compiled = compile_kernel(kernel, *arguments, **constants, **options)
            every = [*self._arguments, *constants.values()]
            index = tensors[self._places[0]].get_device()
            self.run = starter(self.compiled, grid, every, self._places, index)

    def __call__(self, *tensors: Tensor) -> None:
        """Launches the kernel on the current stream of the current GPU."""
        self.run(*tensors)

    def _run(self, *tensors: Tensor) -> None:
        """A launch that is interpreted, or seen by a meter."""
        arguments = [it(0)[1] if callable(it) else it for it in self._arguments]
        for place, tensor in zip(self._places, tensors, strict=True):
            arguments[place] = tensor
        with device.device_guard(tensors[0]):
            self.kernel[self.grid](*arguments, **self.constants, **self.options)


_plans: dict[tuple[object, ...], Any] = {}
find_plan = _plans.get


def keep_plan(key: tuple[object, ...], plan: T) -> T:
    """Keeps a plan for later calls of its kind, which `find_plan(key)` returns; returns it."""
    if len(_plans) >= CACHE_SIZE:
        _plans.clear()
    _plans[key] = plan
    return plan


def cached(plan: Callable[..., T]) -> Callable[..., T]:
    """`plan(x, y, **options)`, which returns what it returned to an earlier call like this one.

    The key holds everything that a compiled kernel depends on, where `y` is a new tensor like `x`.
    """

    @functools.wraps(plan)
    def find(x: Tensor, y: Tensor, **options: Any) -> T:
        facts = x.dtype, x.shape, x.stride(), x.data_ptr() & 15, x.get_device()
        key = plan, device.capture(), *facts, *options.items()
        found: T | None = find_plan(key)
        return keep_plan(key, plan(x, y, **options)) if found is None else found

    return find

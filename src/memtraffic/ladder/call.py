"""Launches that are planned once, and then cost the host as little as a launch can."""

import threading
from typing import Any

import torch
from torch import Tensor

from memtraffic import runtime
from memtraffic.gpus import Gpu
from memtraffic.triton_internals import compile_kernel, starter

SUPPLY = 2**18  # words of 0, 2 MiB, which last for many launches
SECTOR_WORDS = 4  # of 32 bytes: no two launches share a sector

_supplies: dict[int, tuple[Tensor, int]] = {}  # by GPU: words of 0, and how many are taken
_taking = threading.Lock()


def zero_words(n: int, device: torch.device, stream: int) -> tuple[int, Tensor]:
    """The address of `n` words of 0 that no other launch is given, and the tensor they are part of.

    The tensor has to live until the launch. Words for the default stream (0) are zeroed many at a
    time: a launch on that stream comes after it, and is not captured into a CUDA graph, which would
    find them written when it is replayed. On other streams each call zeroes its own.
    """
    if stream != 0 or n > SUPPLY // 8:
        words = torch.zeros(n, dtype=torch.int64, device=device)
        return words.data_ptr(), words
    with _taking:
        words, taken = _supplies.get(device.index, (None, SUPPLY))
        if words is None or taken + n > SUPPLY:
            words, taken = torch.zeros(SUPPLY, dtype=torch.int64, device=device), 0
        _supplies[device.index] = words, taken + n + -n % SECTOR_WORDS
    return words.data_ptr() + taken * words.element_size(), words


def takes_ptx(gpu: Gpu) -> bool:
    """Whether kernels may hold instructions of NVIDIA's; not where interpreted."""
    compiled = runtime.runs_on_gpu() or runtime.captured_gpu() is not None
    return compiled and gpu.vendor == "nvidia"


class Call:
    """A planned launch of a Triton kernel: only its tensors change from call to call.

    A call costs one look-up of the current stream, and the launch. It specialises
    nothing, so its tensors must be like those of the plan: of the same dtypes, strides
    and device, and aligned to 16 bytes where those were.

    kernel: its last parameters are the constants. grid: of programs. arguments: for all
    parameters before the constants; its tensors stand for those of the calls.
    constants: by name, in the kernel's order. slots: if not 0, each call passes so many
    words of 64 bits, which are 0, after the tensors. Programs may wait for what others
    write there; in the interpreter they take turns.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int],
        arguments: tuple[Any, ...],
        constants: dict[str, Any],
        *,
        num_warps: int,
        slots: int = 0,
    ) -> None:
        self._places = [i for i, it in enumerate(arguments) if isinstance(it, Tensor)]
        self._device = arguments[self._places[0]].device
        self._arguments = [0 if isinstance(it, Tensor) else it for it in arguments]
        self._kernel, self._grid, self._slots = kernel, grid, slots
        self._constants = constants
        self._options: dict[str, Any] = {"num_warps": num_warps}
        if slots and not runtime.runs_on_gpu():
            # The interpreter's sign that programs run side by side, as on a GPU.
            self._options["launch_cooperative_grid"] = True
        self._start: Any = None
        if runtime.runs_on_gpu():
            compiled = compile_kernel(kernel, *arguments, **constants, **self._options)
            self._start = starter(compiled, grid)
            self._arguments += constants.values()

    def __call__(self, *tensors: Tensor) -> None:
        """Launches the kernel on the current stream of the tensors' GPU."""
        if self._start is None:
            self._run(*tensors)
            return
        index = self._device.index
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                self(*tensors)
            return
        stream = torch._C._cuda_getCurrentRawStream(index)
        addresses = [tensor.data_ptr() for tensor in tensors]
        if self._slots:
            address, owner = zero_words(self._slots, self._device, stream)
            addresses.append(address)
        arguments = self._arguments.copy()
        for place, address in zip(self._places, addresses, strict=True):
            arguments[place] = address
        self._start(stream, arguments)

    def _run(self, *tensors: Tensor) -> None:
        """A launch that is interpreted, or seen by a meter."""
        if self._slots:
            zeros = torch.zeros(self._slots, dtype=torch.int64, device=self._device)
            tensors = (*tensors, zeros)
        arguments = self._arguments.copy()
        for place, tensor in zip(self._places, tensors, strict=True):
            arguments[place] = tensor
        with runtime.device_guard(tensors[0]):
            self._kernel[self._grid](*arguments, **self._constants, **self._options)

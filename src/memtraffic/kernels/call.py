"""Launches that are planned once, and then cost the host as little as a launch can."""

from typing import Any

import torch
from torch import Tensor

from memtraffic import runtime
from memtraffic.gpus import Gpu
from memtraffic.tensors import SECTOR_BYTES
from memtraffic.triton_adapter.launch import compile_kernel, starter

WORD_BYTES = 8
SUPPLY = 2**18  # words that are zeroed at once, 2 MiB
LAUNCHES = 512  # that they are for, at most

# By GPU and number of words, a power of two: those that nobody was given yet, as their
# address and the tensor that owns them. Several threads may take from a list at once.
_supplies: dict[tuple[int | None, int], list[tuple[int, Tensor]]] = {}


def zero_words(n: int, device: torch.device, stream: int) -> tuple[int, Tensor]:
    """The address of `n` words of 0 for one launch, and the tensor that owns them.

    The tensor has to live until the launch. Words for the default stream (0) are zeroed
    for many launches at once: a launch on that stream comes after that, and is not
    captured into a CUDA graph, whose second replay would find them written. On other
    streams each call zeroes its own.
    """
    if stream != 0 or n > SUPPLY // 8:
        owner = torch.zeros(n, dtype=torch.int64, device=device)
        return owner.data_ptr(), owner
    kind = device.index, 1 << (n - 1).bit_length()
    try:
        return _supplies[kind].pop()
    except (KeyError, IndexError):
        _supplies[kind] = supply = _zeroed(kind[1], device)
        return supply.pop()


def _zeroed(n: int, device: torch.device) -> list[tuple[int, Tensor]]:
    """What `zero_words` gives to many launches; no two have words in one sector."""
    size = max(n * WORD_BYTES, SECTOR_BYTES)
    launches = min(LAUNCHES, SUPPLY * WORD_BYTES // size)
    owner = torch.zeros(launches * size // WORD_BYTES, dtype=torch.int64, device=device)
    first = owner.data_ptr()
    return [(first + i * size, owner) for i in range(launches)]


def takes_ptx(gpu: Gpu) -> bool:
    """Whether kernels may hold instructions of NVIDIA's; not where interpreted."""
    compiled = runtime.runs_on_gpu() or runtime.captured_gpu() is not None
    return compiled and gpu.vendor == "nvidia"


class Call:
    """A planned launch of a Triton kernel: only its tensors change from call to call.

    A call costs one look-up of the current stream, and the launch. It specialises
    nothing, so its tensors must be like those of the plan: of the same dtypes and
    strides, on the same GPU, and aligned to 16 bytes where those were. That GPU must be
    the current one.

    kernel: its last parameters are the constants. grid: of programs. arguments: for all
    parameters before the constants; its tensors stand for those of the calls.
    constants: by name, in the kernel's order. maxnreg: registers of a lane, at most, an
    option of NVIDIA's GPUs. slots: if not 0, each call passes so many words of 64 bits,
    which are 0, after the tensors. Programs may wait for what others write there; in
    the interpreter they take turns.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int],
        arguments: tuple[Any, ...],
        constants: dict[str, Any],
        *,
        num_warps: int,
        maxnreg: int | None = None,
        slots: int = 0,
    ) -> None:
        self._places = [i for i, it in enumerate(arguments) if isinstance(it, Tensor)]
        self._device = arguments[self._places[0]].device
        self._arguments = [0 if isinstance(it, Tensor) else it for it in arguments]
        self._kernel, self._grid, self._slots = kernel, grid, slots
        self._constants = constants
        self._options: dict[str, Any] = {"num_warps": num_warps}
        if maxnreg:
            self._options["maxnreg"] = maxnreg
        if slots and not runtime.runs_on_gpu():
            # The interpreter's sign that programs run side by side, as on a GPU.
            self._options["launch_cooperative_grid"] = True
        self._start: Any = None
        if runtime.runs_on_gpu():
            compiled = compile_kernel(kernel, *arguments, **constants, **self._options)
            every = [*self._arguments, *constants.values()]
            self._start = starter(compiled, grid, every, self._places)

    def __call__(self, *tensors: Tensor) -> None:
        """Launches the kernel on the current stream of the current GPU."""
        if self._start is None:
            self._run(*tensors)
            return
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        addresses = [tensor.data_ptr() for tensor in tensors]
        if self._slots:
            address, _owner = zero_words(self._slots, self._device, stream)
            addresses.append(address)
        self._start(stream, addresses)

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

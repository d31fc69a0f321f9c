"""Launches that are planned once, and then cost the host as little as a launch can."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from memtraffic import device as runtime
from memtraffic.device import capture
from memtraffic.gpus import Gpu
from memtraffic.residency import Resources, loaded_resources, resident_programs
from memtraffic.tensors import SECTOR_BYTES
from memtraffic.torch_adapter import raw_stream
from memtraffic.triton_adapter.launch import compile_kernel, shared_bytes, starter

T = TypeVar("T")

INTERPRETED_PROGRAMS = 4  # where no GPU says how many fit: enough to see them stride
CACHE_SIZE = 4096  # kinds of calls
WORD_BYTES = 8
SUPPLY = 2**18  # words that are zeroed at once, 2 MiB
LAUNCHES = 512  # that they are for, at most


# ---- one launch


def takes_ptx(gpu: Gpu) -> bool:
    """Whether kernels may hold instructions of NVIDIA's; not where interpreted."""
    compiled = runtime.runs_on_gpu() or runtime.captured_gpu() is not None
    return compiled and gpu.vendor == "nvidia"


class Launch:
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
    the interpreter they take turns. cooperative: all programs run at once, or none.

    Attributes, beside these: `compiled`, the compiled kernel; `used`, its `Resources`,
    and `per_sm`, how many programs an SM holds at once, where a launcher asked for them.
    All are None where kernels are interpreted or captured.
    """

    used: Resources | None = None
    per_sm: int | None = None

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
        cooperative: bool = False,
    ) -> None:
        places = [i for i, it in enumerate(arguments) if isinstance(it, Tensor)]
        self.kernel, self.grid, self.constants = kernel, grid, constants
        self.options: dict[str, Any] = {"num_warps": num_warps}
        if maxnreg:
            self.options["maxnreg"] = maxnreg
        if cooperative or (slots and not runtime.runs_on_gpu()):
            # In the interpreter the sign that programs run side by side, as on a GPU.
            self.options["launch_cooperative_grid"] = True
        self._arguments = [0 if isinstance(it, Tensor) else it for it in arguments]
        self._device = arguments[places[0]].device
        self._places, self._slots = places, slots
        self.compiled: Any = None
        self._start: Any = None
        self._stream: Any = raw_stream
        if runtime.runs_on_gpu():
            self.compiled = compile_kernel(kernel, *arguments, **constants, **self.options)
            every = [*self._arguments, *constants.values()]
            # With slots it is given addresses; without, the tensors, which costs the host less.
            gpu = None if slots else arguments[places[0]].get_device()
            self._start = starter(self.compiled, grid, every, places, gpu)

    def __call__(self, *tensors: Tensor) -> None:
        """Launches the kernel on the current stream of the current GPU.

        Raises TypeError for fewer or more tensors than those of the plan.
        """
        if self._start is None:
            self._run(*tensors)
        elif not self._slots:
            self._start(*tensors)
        else:
            stream = self._stream(self._device.index)
            address, _owner = zero_words(self._slots, self._device, stream)
            self._start(stream, *[tensor.data_ptr() for tensor in tensors], address)

    def unwrapped(self) -> Callable[..., None]:
        """A function that does what a call does, and costs the host less where that is possible."""
        return self if self._start is None or self._slots else self._start

    def _run(self, *tensors: Tensor) -> None:
        """A launch that is interpreted, or seen by a meter."""
        wanted = len(self._places) - bool(self._slots)
        if len(tensors) != wanted:  # as the compiled launch, a function of so many, says
            raise TypeError(f"{self.kernel.__name__}: {wanted} tensors, not {len(tensors)}")
        if self._slots:
            zeros = torch.zeros(self._slots, dtype=torch.int64, device=self._device)
            tensors = (*tensors, zeros)
        arguments = self._arguments.copy()
        for place, tensor in zip(self._places, tensors, strict=True):
            arguments[place] = tensor
        with runtime.device_guard(tensors[0]):
            self.kernel[self.grid](*arguments, **self.constants, **self.options)


def resident_launch(
    kernel: Any,
    arguments: tuple[Any, ...],
    constants: dict[str, int],
    n_tiles: int,
    gpu: Gpu,
    *,
    num_warps: int,
    min_stages: int = 1,
    programs: int | None = None,
    team: int = 1,
) -> Launch:
    """The launch of as many programs as `gpu` holds at once, each over many tiles.

    kernel, arguments, constants: of a `Launch`; among the constants are STAGES. If it
    needs more shared memory than a program may have, it is compiled again with one
    stage less, down to `min_stages`. programs: instead of what fits. team: programs that
    share a tile, all of which run at once; they get a word of 64 bits each for each tile,
    see `Launch`.

    Raises RuntimeError where a program needs too much shared memory, and where not a
    single one fits an SM.
    """
    used, per_sm, fitting = None, None, INTERPRETED_PROGRAMS
    options = {"num_warps": num_warps}
    if team > 1:
        options["launch_cooperative_grid"] = True
    if runtime.runs_on_gpu():
        compiled = compile_kernel(kernel, *arguments, **constants, **options)
        while (shared := shared_bytes(compiled)) > gpu.shared_per_program:
            if constants["STAGES"] <= min_stages:
                raise RuntimeError(
                    f"{kernel.__name__}: a program needs {shared} bytes of shared "
                    f"memory, {gpu.product} has {gpu.shared_per_program}"
                )
            constants = constants | {"STAGES": constants["STAGES"] - 1}
            compiled = compile_kernel(kernel, *arguments, **constants, **options)
        used = loaded_resources(compiled, gpu)
        per_sm = resident_programs(used, gpu)
        fitting = per_sm * gpu.num_sms
        if fitting < team:
            raise RuntimeError(
                f"{kernel.__name__}: {num_warps} warps of {used.registers} "
                f"registers do not fit an SM of {gpu.product}"
            )
    grid = min(n_tiles, max(1, (programs or fitting) // team)) * team, 1
    launch = Launch(
        kernel, grid, arguments, constants,
        num_warps=num_warps, slots=n_tiles * team if team > 1 else 0, cooperative=team > 1,
    )  # fmt: skip
    launch.used, launch.per_sm = used, per_sm
    return launch


# ---- words of 0

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


# ---- plans that are kept


class Plans:
    """What was planned for the kinds of calls that came last.

    A call looks its key up in `latest`, and only where that has none asks `find`. Once
    `latest` is full, all of it is `before`, from which a call that comes again takes its
    plan along; what did not come again until `latest` is full once more is forgotten.
    """

    def __init__(self) -> None:
        self.latest: dict[tuple[object, ...], Any] = {}
        self.before: dict[tuple[object, ...], Any] = {}

    def find(self, key: tuple[object, ...], make: Callable[[], T]) -> T:
        """The plan of `key`; `make` makes one that is not kept."""
        plan = self.latest.get(key)
        if plan is None:
            plan = self.before.get(key)
            plan = make() if plan is None else plan
            if len(self.latest) >= CACHE_SIZE // 2:
                self.before = self.latest.copy()
                self.latest.clear()
            self.latest[key] = plan
        return plan

    def forget(self) -> None:
        """Forgets them all."""
        self.before = {}
        self.latest.clear()


def facts(x: Tensor | None) -> tuple[object, ...] | None:
    """What a compiled kernel depends on of a tensor that it is given."""
    return None if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() & 15)


_launches = Plans()


def cached_launch(
    make: Callable[..., Launch], y: Tensor, x: Tensor, **options: int | None
) -> Launch:
    """`make(x, y, **options)`, or what it returned to an earlier call like this one.

    The key holds everything that a compiled kernel depends on, so that a call costs one
    look-up.
    """
    key = make, capture(), x.device, facts(x), facts(y), *options.values()
    return _launches.find(key, lambda: make(x, y, **options))

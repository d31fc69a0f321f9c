"""A GPU of the table answers for one that is absent, so that code written for a GPU runs.

Published kernels ask for their GPU when they are imported or launched: they take its number of SMs
for their grid, make tensors on it, and refuse tensors that are elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from memtraffic import device
from memtraffic.compile.sass import read
from memtraffic.errors import CountError
from memtraffic.gpus import DEFAULT_GPU, Gpu, find_gpu
from memtraffic.torch_adapter import STREAM_OF_NO_GPU, TensorBase
from memtraffic.triton_adapter.driver import driver_of

_IS_CUDA, _IS_CPU, _DEVICE_OF = (
    vars(TensorBase)[name].__get__ for name in ("is_cuda", "is_cpu", "device")
)
_DEVICE, _CPU = torch.device("cuda", 0), torch.device("cpu")


@contextmanager
def stand_in(gpu: str | Gpu = DEFAULT_GPU) -> Iterator[None]:
    """Context manager: `torch.cuda` and Triton's driver answer as if `gpu` were here.

    >>> x = torch.ones(2, 3)
    >>> with stand_in():
    ...     print(torch.cuda.get_device_properties(0).multi_processor_count, x.device)
    132 cuda:0

    Tensors stay in the memory of the CPU, and say that they are on the GPU; what is made on the
    GPU, or moved there, is made on the CPU. Kernels run only while they are counted. Code that
    looks for Triton's own classes of kernels, or compiles one before it launches it, needs the
    setting TRITON_INTERPRET=0. Kernels are compiled in a process that answers like this one.
    gpu: one of NVIDIA's, or its name.

    Raises RuntimeError where there is a GPU, which can answer itself; ValueError for a GPU that is
    not NVIDIA's.
    """
    gpu = find_gpu(gpu)
    if device.HAS_GPU:
        raise RuntimeError(f"{gpu.product} cannot stand in: there is a GPU on this machine")
    if gpu.vendor != "nvidia":
        raise ValueError(f"{gpu.product} ({gpu.target}) cannot stand in: give a GPU of NVIDIA")
    with ExitStack() as stack:
        generator = _Generator()
        objects = {
            "default_generators": (generator,),
            "get_rng_state": lambda device=0: generator.get_state(),
            "set_rng_state": lambda state, device=0: generator.set_state(state),
            "manual_seed": torch.default_generator.manual_seed,  # what is random is so on the CPU
            "manual_seed_all": torch.default_generator.manual_seed,
            "Stream": _Done,
            "Event": _Done,
            "stream": nullcontext,
            "nvtx": SimpleNamespace(
                **dict.fromkeys(("mark", "range_push", "range_pop"), lambda *text: 0),
                range=lambda *text, **options: nullcontext(),
            ),
        }
        patches: list[tuple[Any, str, Any]]
        patches = [(torch.cuda, name, value) for name, value in (_answers(gpu) | objects).items()]
        patches += [(Tensor, "record_stream", lambda *it: None), STREAM_OF_NO_GPU]
        # A mode does not see what its handler does, and the whole backward pass would be that.
        patches += [(torch.autograd, "has_torch_function", lambda tensors: False)]
        for owner, name, value in patches:
            # Builds of PyTorch without CUDA lack those with an underscore.
            created = name.startswith("_")
            stack.enter_context(mock.patch.object(owner, name, value, create=created))
        stack.enter_context(
            driver_of(gpu, lambda cubin: read({"cubin": cubin}, "", gpu)[0]["registers"])
        )
        stack.enter_context(_OnGpu())
        again = functools.partial(stand_in, gpu)
        stack.enter_context(device.having(device.standing_in, again))
        yield


class _Generator:
    """A GPU's generator of random numbers, of which launchers take the state: seed and offset."""

    state = bytes(16)

    def get_state(self) -> Tensor:
        return torch.frombuffer(bytearray(self.state), dtype=torch.uint8)

    def set_state(self, state: Tensor) -> None:
        self.state = bytes(state.untyped_storage())


class _Done:
    """A stream, or an event, of a GPU that has done everything already."""

    cuda_stream, device, priority = 0, _DEVICE, 0

    def __init__(self, *args: object, **options: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: object) -> float:
        return 0.0

    def record_event(self, event: Any = None) -> Any:
        return event or _Done()

    def synchronize(self, *args: object) -> None:
        pass

    wait = record = wait_stream = wait_event = synchronize


class _Properties(SimpleNamespace):
    """What `torch.cuda` says of a GPU."""

    multi_processor_count = property(lambda it: device.num_sms(it.gpu))


def _answers(gpu: Any) -> dict[str, Callable[..., Any]]:
    """What `torch.cuda` has in place of its functions, by their names. gpu: one of NVIDIA's."""
    major, minor = divmod(int(gpu.architecture), 10)
    properties = _Properties(
        gpu=gpu,
        name=gpu.driver_name,
        gcnArchName=gpu.driver_name,  # which PyTorch has on every GPU
        major=major,
        minor=minor,
        warp_size=gpu.warp_size,
        max_threads_per_multi_processor=gpu.max_threads_per_sm,
        regs_per_multiprocessor=gpu.registers_per_sm,
        shared_memory_per_multiprocessor=gpu.shared_per_sm,
        shared_memory_per_block_optin=gpu.shared_per_program,
        L2_cache_size=gpu.last_level_bytes,
    )
    nothing = dict.fromkeys(("_lazy_init", "set_device", "synchronize", "empty_cache"))
    answers = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "_exchange_device": 0,  # the class torch.cuda.device calls these two
        "_maybe_exchange_device": 0,
        "current_stream": _Done(),
        "default_stream": _Done(),
        "is_current_stream_capturing": False,
        "get_device_name": gpu.driver_name,
        "get_device_capability": (major, minor),
        "get_device_properties": properties,
        "_get_device_properties": properties,  # of what took the function before
        "is_bf16_supported": major >= 8,
    }
    return {
        name: lambda *args, value=value, **options: value
        for name, value in (nothing | answers).items()
    }


class _OnGpu(TorchFunctionMode):
    """Tensors say that they are on the GPU, and what is asked of the GPU is done by the CPU."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func == _IS_CUDA:
            return args[0].device == _CPU
        if func == _IS_CPU:
            return False
        if func is Tensor.get_device:
            return 0
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.backward:
            options = dict(kwargs or {})
            with self:
                return torch.autograd.backward(args[0], options.pop("gradient", None), **options)
        if torch.is_autocast_enabled("cuda"):
            raise CountError("autocast of a GPU casts nothing here: cast in the function itself")
        result = func(
            *(_on_cpu(value) for value in args),
            **{
                name: _CPU if name == "device" and isinstance(value, int) else _on_cpu(value)
                for name, value in (kwargs or {}).items()
            },
        )
        return _DEVICE if func == _DEVICE_OF and result == _CPU else result


def _on_cpu(value: Any) -> Any:
    """An argument that names the GPU names the CPU instead."""
    named = isinstance(value, str) and value.partition(":")[0] == "cuda"
    return _CPU if named or (isinstance(value, torch.device) and value.type == "cuda") else value

"""Triton's driver, as a GPU that is not here would have it answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, NoReturn

import torch

from memtraffic import device
from memtraffic.triton_adapter.compile import target_of
from memtraffic.triton_adapter.patching import replaced

if TYPE_CHECKING:
    from memtraffic.gpus import Gpu


@contextmanager
def driver_of(gpu: Gpu, registers: Callable[[bytes], int]) -> Iterator[None]:
    """Context manager: Triton's driver, which needs a GPU, answers as if `gpu` were here.

    It compiles and loads kernels, but runs none. registers: those per thread of a binary.
    """
    if not device.HAS_TRITON:
        yield
        return
    from triton.runtime import driver

    fixed = {
        "warpSize": gpu.warp_size,
        "max_num_regs": getattr(gpu, "registers_per_sm", 0),
        "max_shared_mem": gpu.shared_per_program,
        # Whoever asks for these two multiplies them, by 2 transfers of a cycle: the bandwidth.
        "mem_bus_width": 8000,  # bits
        "mem_clock_rate": gpu.datasheet_bytes_per_s / 2e6,  # kHz
    }

    def properties(index: int) -> dict[str, float]:
        return fixed | {"multiprocessor_count": device.num_sms(gpu)}

    def refuse(*args: object, **options: object) -> NoReturn:
        raise RuntimeError(f"{gpu.product} only stands in for a GPU: it runs no kernel")

    def load(name: str, binary: bytes, shared: int, index: int) -> tuple[object, ...]:
        return None, None, registers(binary), 0, gpu.max_threads_per_program

    answers = SimpleNamespace(
        launcher_cls=lambda source, metadata: refuse,
        get_benchmarker=lambda: refuse,
        get_current_device=lambda: 0,
        set_current_device=lambda index: None,
        get_current_stream=lambda index: 0,
        get_current_target=lambda: target_of(gpu),
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_capability=lambda index=0: divmod(int(gpu.architecture), 10),
        utils=SimpleNamespace(get_device_properties=properties, load_binary=load),
    )
    with replaced((driver, "_active", answers)):
        yield

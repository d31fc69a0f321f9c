"""Watches launches: which kernels a function launches, and an autotuned kernel's configurations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memtraffic import device
from memtraffic.errors import CountError
from memtraffic.torch_adapter import disable_current_modes
from memtraffic.triton_adapter.launch import Kernel, check_arguments, check_launch
from memtraffic.triton_adapter.patching import replaced_here, watching
from memtraffic.triton_adapter.relaunch import Relaunched, relaunch


@contextmanager
def capturing(record: Callable[[Kernel, tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Context manager: `record(kernel, args, options)` is called in place of each kernel launch.

    Other threads launch theirs. An autotuned kernel is recorded once for each of its
    configurations. `warmup` compiles, in a process that does: what it returns may then be launched.
    """
    if not device.HAS_TRITON:
        yield
        return
    from triton.compiler import CompiledKernel
    from triton.runtime import interpreter, jit

    compile_only = jit.JITFunction.run

    def run(kernel: Kernel, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        compiles = isinstance(kernel, jit.JITFunction)
        if warmup and compiles:
            return compile_only(kernel, *args, grid=grid, warmup=True, **options)
        if not warmup:
            check_launch(kernel.fn.__name__, grid)
            check_arguments(kernel.fn, args, options)
            record(kernel, args, options)
        return Relaunched(kernel, args, options) if compiles else None

    def run_autotuned(tuner: Kernel, *args: Any, **options: Any) -> Any:
        launches = configurations_of(tuner, args, options)
        for launch in launches:
            launch()
        return launches[0].compiled

    with (
        watching(),
        replaced_here(
            (jit.JITFunction, "run", run),
            (interpreter.InterpretedFunction, "run", run),
            (CompiledKernel, "__getitem__", relaunch),
            *((tuner, "run", run_autotuned) for tuner in autotuners()),
        ),
    ):
        yield


class Configuration:
    """The launch of an autotuned kernel in one of its configurations."""

    def __init__(
        self, tuner: Kernel, config: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self.tuner, self.config, self.args = tuner, config, args
        self.options = options | config.all_kwargs()
        # Its index, unless what leaves some out has made it.
        self.number = next((i for i, it in enumerate(tuner.configs) if it is config), None)
        self.compiled: Any = None  # what the launch returned

    def __call__(self) -> None:
        if self.config.pre_hook is not None:
            self.config.pre_hook(
                dict(zip(self.tuner.arg_names, self.args, strict=False)) | self.options
            )
        self.compiled = self.tuner.fn.run(*self.args, **self.options)

    def __str__(self) -> str:
        chosen = self.config.all_kwargs().items()
        return ", ".join(f"{k}={v}" for k, v in chosen if k in self.tuner.arg_names)


def configurations_of(
    tuner: Kernel, args: Any, options: dict[str, Any], chosen: bool = False, only: int | None = None
) -> list[Configuration]:
    """The launches that an autotuned kernel would time.

    chosen: the one that it would make, if it has timed them for such arguments before. only: the
    index of the one configuration that is launched. Raises CountError if there is none.
    """
    if only is not None and (n := len(tuner.configs)) > 1:
        if only not in range(n):
            found = f"{tuner.base_fn.__name__} has {n} autotuning configurations, 0 to {n - 1}"
            raise CountError(f"{found}: config={only} is none of them")
        return [Configuration(tuner, tuner.configs[only], args, options)]
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    if chosen and isinstance(cache := getattr(tuner, "cache", None), dict):
        named = {k: v for k, v in (tuner.nargs | options).items() if k in tuner.arg_names}
        key = [named[name] for name in tuner.keys if name in named]
        key += [str(value.dtype) for value in named.values() if hasattr(value, "dtype")]
        if (config := cache.get(tuple(key))) is not None:
            return [Configuration(tuner, config, args, options)]
    configs = tuner.prune_configs(options) if len(tuner.configs) > 1 else tuner.configs
    return [Configuration(tuner, config, args, options) for config in configs]


def autotuners() -> list[type[Any]]:
    """Triton's class of autotuned kernels, and those derived from it that run in their own way."""
    from triton.runtime.autotuner import Autotuner

    found: list[type[Any]] = [Autotuner]
    for owner in found:
        found += owner.__subclasses__()
    return [owner for owner in dict.fromkeys(found) if "run" in vars(owner)]


def from_equal_values(
    launches: Iterable[Configuration], tensors: list[torch.Tensor]
) -> Iterator[Configuration]:
    """Yields `launches`, and restores `tensors` before each: a kernel may change its input."""
    with disable_current_modes():  # no meter counts these copies
        saved = [(x.untyped_storage(), x.untyped_storage().clone()) for x in tensors]
    for launch in launches:
        with disable_current_modes():
            for storage, values in saved:
                storage.copy_(values)
        yield launch

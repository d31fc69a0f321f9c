"""Every private name of PyTorch that this package uses, for PyTorch 2.11 to 2.13.

What a launch asks is bound when this module is imported: a call costs no more than under PyTorch's
own name. What `torch.compile` consists of is imported where it is used: that takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._library.triton import set_wrap_triton_enabled
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

__all__ = [
    "OPDEFS",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "disable_current_modes",
    "set_wrap_triton_enabled",
]

ScriptMethod = torch._C.ScriptMethod
TensorBase = torch._C.TensorBase

# ---- what a launch asks

is_autocast = torch._C._is_any_autocast_enabled  # for any device
is_transformed = torch._C._are_functorch_transforms_active
active_modes = torch._C._len_torch_dispatch_stack
has_storage = torch._C._has_storage
# The next three are None where PyTorch is built without CUDA.
current_gpu: Callable[[], int] | None = getattr(torch._C, "_cuda_getDevice", None)
raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
# How the code that torch.compile generates allocates: it costs less than torch.empty_like.
empty_on_current_gpu: Callable[..., Tensor] | None = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", None
)


# ---- what runs on a GPU


def softmax_backward(dy: Tensor, y: Tensor, dim: int) -> Tensor:
    """The gradient of `torch.softmax`, as PyTorch's autograd computes it."""
    return torch._softmax_backward_data(dy, y, dim, y.dtype)


def sleep_on_gpu(cycles: int) -> None:
    """Queues a kernel that keeps the current GPU busy for so many of its clock's cycles."""
    torch.cuda._sleep(cycles)


def stream_of_no_gpu() -> AbstractContextManager[object]:
    """Context manager in which the stream of a GPU that is not here is 0, as by default."""
    return mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, create=True)


# ---- torch.compile


def refuse_to_recompile(limit: int) -> None:
    """Lets a compiled function that meets more than `limit` shapes fail, not run uncompiled."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = limit
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def load_generated(fn: Callable[..., Any], tensors: Iterable[Tensor]) -> Callable[..., Any]:
    """What `torch.compile` makes of `fn` for the GPU that answers, for arguments like `tensors`.

    The function launches the generated kernels, each in the first of the configurations that a GPU
    would choose from. Raises what the compiler raises.
    """
    code = _inductor_code(fn, tensors)
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.runtime import triton_helpers, triton_heuristics

    made: dict[str, Any] = {"__name__": "generated"}
    with (
        mock.patch.object(AsyncCompile, "triton", _load_kernel),
        mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None),
        stream_of_no_gpu(),
    ):
        exec(compile(code, "<generated>", "exec"), made)
    made["empty_strided_cuda"] = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype
    )
    made["assert_size_stride"] = made["copy_if_misaligned"] = lambda x, *args: x

    def run(*args: Tensor) -> Any:
        with (
            mock.patch.object(triton_heuristics.CachingAutotuner, "run", _run_kernel),
            mock.patch.object(torch.cuda, "_DeviceGuard", nullcontext),
        ):
            results = made["call"](list(args))
        return results[0] if len(results) == 1 else results

    return run


def _inductor_code(fn: Callable[..., Any], tensors: Iterable[Tensor]) -> str:
    """The Python code that inductor writes for `fn`."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._subclasses import fake_tensor
    from torch.fx.experimental.proxy_tensor import make_fx

    class Written(Exception):
        pass

    written: list[str] = []

    def stop(code: str) -> None:
        written.append(code)
        raise Written

    def listed(*args: Tensor) -> Any:
        result = fn(*args)
        return result if isinstance(result, tuple) else (result,)

    no_context = mock.patch.object(fake_tensor, "init_gpu_context", lambda device: None)
    # The mode of `stand_in` would make the tensors on the CPU.
    with torch._C.DisableTorchFunction(), no_context:
        with FakeTensorMode():
            fakes = [
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
                for x in tensors
            ]
            graph = make_fx(listed, decomposition_table=select_decomp_table())(*fakes)
        with mock.patch.object(GraphLowering, "save_output_code", staticmethod(stop)):
            try:
                compile_fx_inner(graph, fakes)
            except Exception:
                if not written:
                    raise
    return written[0]


def _load_kernel(compiler: Any, name: str, source: str, device_str: str = "cuda") -> Any:
    from torch._inductor.codecache import PyCodeCache

    return getattr(PyCodeCache.load(source), name)


def _run_kernel(tuner: Any, *args: Any, stream: object = None, **options: Any) -> None:
    from torch._inductor.runtime.triton_heuristics import GridExpr

    config = tuner.configs[0]
    names = [name for name in tuner.fn.arg_names if name not in config.kwargs]
    sizes = dict(zip(names, args, strict=False))
    grid = GridExpr.from_meta(tuner.inductor_meta, config).eval_slow(sizes | config.kwargs)
    tuner.fn.run(*args, grid=grid, warmup=False, **config.kwargs)

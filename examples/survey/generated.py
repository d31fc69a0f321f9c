"""The kernels that `torch.compile` generates for a GPU, as a function that a meter can count."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from memtraffic.errors import CountError
from torch import Tensor


def generated(fn: Callable[..., Any], *tensors: Tensor) -> Callable[..., Any]:
    """What `torch.compile` makes of `fn` for the GPU that stands in, for arguments like `tensors`.

    The function runs the generated kernels, which are interpreted while they are counted:

        with stand_in():
            print(count(generated(fn, x), x))

    fn: a function of tensors that returns a tensor or a tuple of them. A kernel is taken in the
    first of the configurations that a GPU would choose from. Raises CountError if nothing stands in
    for a GPU, and what the compiler raises.
    """
    if not torch.cuda.is_available():
        raise CountError("generated: there is no GPU to compile for: call it in `stand_in()`")
    code = _source(fn, tensors)
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.runtime import triton_helpers, triton_heuristics

    made: dict[str, Any] = {"__name__": "generated"}
    with (
        mock.patch.object(AsyncCompile, "triton", _load_kernel),
        mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, create=True),
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


def _source(fn: Callable[..., Any], tensors: Iterable[Tensor]) -> str:
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
        with fake_tensor.FakeTensorMode():
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

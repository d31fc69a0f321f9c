"""Every private name of PyTorch that this package uses, for PyTorch 2.11 to 2.13.

What a launch asks is bound when this module is imported: a call costs no more than under PyTorch's
own name. What `torch.compile` consists of is imported where it is used: that takes seconds.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._functorch.autograd_function import (  # type: ignore[attr-defined]
    enable_single_level_autograd_function,
)
from torch._library.custom_ops import OPDEFS as OPDEFS
from torch._library.triton import set_wrap_triton_enabled as set_wrap_triton_enabled
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.autograd import forward_ad
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_map_only

map_tensors = functools.partial(tree_map_only, Tensor)  # of a function, and of nested values
ScriptMethod = torch._C.ScriptMethod
TensorBase = torch._C.TensorBase
disable_current_modes = _python_dispatch._disable_current_modes

# ---- what a launch asks

is_transformed = torch._C._are_functorch_transforms_active
active_modes = torch._C._len_torch_dispatch_stack
has_storage = torch._C._has_storage  # not so: a gradient under `is_grads_batched=True`
is_tracing = torch._C._is_tracing
_is_grad_enabled, _is_inference = torch.is_grad_enabled, torch.is_inference_mode_enabled
_alive = torch._C._functorch.unwrap_if_dead  # another tensor if it has left its transform
# Forward mode computes derivatives together with the values: outside, FORWARD_MODE[LEVEL] is -1.
FORWARD_MODE, LEVEL = vars(forward_ad), "_current_level"
# Where PyTorch is built without CUDA, the first is None, and the second says the default stream.
current_gpu: Callable[[], int] | None = getattr(torch._C, "_cuda_getDevice", None)
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda gpu: 0)


def is_recorded(x: Tensor) -> bool:
    """Whether autograd records what is computed from a tensor that requires a gradient."""
    return _is_grad_enabled() and not _is_inference() and not x.is_inference() and _alive(x) is x


def has_left_vmap(x: Tensor) -> bool:
    return torch._C._functorch.is_batchedtensor(x) and not is_transformed()


def bare_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` for tensors that no transform wrapped, while none is active.

    What `torch.autograd.Function` does for transforms in Python costs the host more than a launch.
    """
    bare: Any = super(torch.autograd.Function, function)
    apply: Callable[..., Any] = bare.apply
    return apply


def level_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` in one level of a transform, of tensors that lower levels may have wrapped.

    From PyTorch 2.14 on, a `Function` asks for all levels itself, and its base does not.
    """
    parts = {name: it for name, it in vars(function).items() if isinstance(it, staticmethod)}
    bases = (torch.autograd.function._SingleLevelFunction,)
    single: Any = type(function.__name__, bases, parts)
    return cast("Callable[..., Any]", single.apply)


# ---- operators

_LIBRARY = torch.library.Library("memtraffic", "FRAGMENT")
OPERATORS: dict[str, Callable[..., Any]] = {}  # what runs them, by their names


def define_operator(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any], batch: Callable[..., Any]
) -> Callable[..., Tensor]:
    """Defines an operator of `torch.ops.memtraffic` that `run` computes, on CPU and GPU.

    fake: what it returns, of the right shape, where tensors have no memory. batch: the rule of
    `torch.func.vmap`, as of `torch.library.register_vmap`.
    """
    name = schema.split("(")[0]
    OPERATORS[f"memtraffic::{name}"] = run
    _LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, run, key)
    torch.library.register_fake(f"memtraffic::{name}", fake, lib=_LIBRARY)
    torch.library.register_vmap(f"memtraffic::{name}", batch, lib=_LIBRARY)
    return cast("Callable[..., Tensor]", getattr(torch.ops.memtraffic, name).default)


def _uncompiled(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, whose frames `torch.compile` leaves alone, also where it gave up those around it."""
    disabled = _disable_dynamo(run)  # it imports torch.compile
    return lambda *arguments: (disabled if "torch._dynamo" in sys.modules else run)(*arguments)


def at_autograd(
    operator: Any, rule: Callable[..., Any], of_level: Callable[..., Any] | None = None
) -> None:
    """Makes `rule` what autograd does with an operator, also in each level of a transform.

    rule: its first argument is what computes the result, below autograd, from the others. of_level:
    what does so in a level of a transform; by default, `rule`.
    """

    def in_level(*arguments: Any) -> Any:
        if not is_transformed():
            return rule(below, *arguments)
        with enable_single_level_autograd_function():
            return (of_level or rule)(below, *arguments)

    def below(*arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd(), of_other_levels():
            return operator(*arguments)

    _LIBRARY.impl(operator._schema.name.split("::")[1], _uncompiled(in_level), "Autograd")


def primals(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Tensors without the derivatives of forward mode that they have in this level."""
    return [torch._VF._unpack_dual(x, level=0)[0] for x in tensors]


def has_derivatives(x: Tensor) -> bool:
    """Whether derivatives of what is computed from `x` are asked for in this level."""
    dual: bool = torch._VF._unpack_dual(x, level=0)[1] is not None
    return dual or (x.requires_grad and torch.is_grad_enabled())


@contextmanager
def of_other_levels() -> Iterator[None]:
    """Context manager in a function of autograd: the other levels of transforms have derivatives.

    Autograd turns derivatives off while it runs such a function, for all levels and not its own.
    """
    if not is_transformed():
        yield
        return
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        yield


def composite_kernel(operation: Any) -> Callable[..., Any] | None:
    """What calls the operations of which one consists for autograd; None if it is one itself."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    if torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), key):
        return functools.partial(operation._op_dk, key)
    return None


# ---- what runs on a GPU


def softmax_backward(y: Tensor, dy: Tensor) -> Tensor:
    """PyTorch's own backward of a row softmax `y`, from the gradient `dy` of it."""
    return torch._softmax_backward_data(dy, y, 1, y.dtype)


def sleep_on_gpu(cycles: int) -> None:
    """Queues a kernel that keeps the current GPU busy for so many of its clock's cycles."""
    torch.cuda._sleep(cycles)


# What to replace, and by what, so that the stream of a GPU that is not here is 0, as by default:
# launchers take it when they are imported.
STREAM_OF_NO_GPU: tuple[Any, str, Any] = torch._C, "_cuda_getCurrentRawStream", lambda index: 0


# ---- torch.distributed


def all_gather(result: Tensor, mine: Tensor, group: Any) -> None:
    """Gathers `mine` of each rank of a group into `result`, in the order of the ranks."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(result, mine, group=group)


def symmetric_words(n: int, device: torch.device, group: Any) -> tuple[object, tuple[Tensor, ...]]:
    """`n` words of 64 bits on the GPU of each rank, all 0, which each rank reads and writes.

    Returns what owns them, and those of each rank in turn. All ranks of the group call it together.
    Raises RuntimeError where PyTorch has no symmetric memory for the device, or a GPU no access to
    that of another.
    """
    from torch.distributed import _symmetric_memory as symmetric

    mine = symmetric.empty(n, dtype=torch.int64, device=device)
    mine.zero_()
    torch.accelerator.synchronize()  # before another rank writes
    all_ranks: Any = dist.group.WORLD
    link = symmetric.rendezvous(mine, group or all_ranks)
    ranks = range(dist.get_world_size(group))
    return (mine, link), tuple(link.get_buffer(rank, (n,), torch.int64) for rank in ranks)


# ---- torch.compile


def in_compiled_functions(call: Callable[..., Any]) -> list[tuple[Any, str, Callable[..., Any]]]:
    """What to replace, as of `patching.replaced`, so that compiled functions run `call` instead."""
    # Where it is not imported, no function is compiled yet; to import it takes two seconds.
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        return []
    start = frames._callback_from_stance
    return [(frames, "_callback_from_stance", lambda given: call if given else start(given))]


def refuse_to_recompile(limit: int) -> None:
    """Lets a compiled function that meets more than `limit` shapes fail, not run uncompiled."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = limit
    torch._dynamo.config.fail_on_recompile_limit_hit = True

"""What an operation of PyTorch reads and writes: each operand and each result once, whole.

Views and allocations are free. An operation with an index touches the elements that its index
names. An operation that this module does not know is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from memtraffic import device
from memtraffic.errors import CountError
from memtraffic.inputs import tensors_in
from memtraffic.meters.collectives import Number, Side, collective
from memtraffic.tensors import held
from memtraffic.torch_adapter import OPDEFS

Move: TypeAlias = tuple[Side, Number, int]  # elements, and bytes of each

_ALLOCATIONS = frozenset(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided".split()
)
_ALIASES = frozenset("_unsafe_view _reshape_alias lift_fresh alias detach".split())
# Make a tensor from nothing; a tensor argument, as in zeros_like, only lends its shape.
_FILLS = frozenset(
    "zeros ones full arange linspace eye rand randn randint scalar_tensor zeros_like ones_like "
    "full_like rand_like randn_like randint_like new_zeros new_ones new_full fill_ zero_ normal_ "
    "uniform_ random_ bernoulli_ exponential_".split()
)
_OVERWRITES = _FILLS | {"copy_"}  # whatever `self` holds
# Not elementwise, but they need each element of each operand once, and make each of each
# result.
_WHOLE = frozenset(
    "amax amin max min sum mean prod any all argmax argmin aminmax logsumexp var var_mean std "
    "std_mean norm linalg_vector_norm cumsum cumprod cummax cummin logcumsumexp sort topk _softmax "
    "_log_softmax _softmax_backward_data _log_softmax_backward_data native_layer_norm "
    "native_layer_norm_backward mm bmm addmm baddbmm mv dot convolution convolution_backward cat "
    "stack flip roll tril triu constant_pad_nd _to_copy clone copy repeat repeat_interleave "
    "floor_divide _local_scalar_dense log_sigmoid_forward log_sigmoid_backward bernoulli addmv "
    "addr addbmm vdot complex polar glu glu_backward mse_loss mse_loss_backward huber_loss "
    "huber_loss_backward smooth_l1_loss smooth_l1_loss_backward binary_cross_entropy "
    "binary_cross_entropy_backward binary_cross_entropy_with_logits native_group_norm "
    "native_group_norm_backward masked_select pixel_shuffle pixel_unshuffle rot90".split()
)
_CPU_BUFFERED = frozenset({"log_sigmoid_forward", "log_sigmoid_backward"})  # none on a GPU
# Read the elements that an index names, and make a result of them.
_PICKS = frozenset({"embedding", "gather", "index", "index_select", "take"})
# Write elements where an index says, and the argument that holds what they write.
_PUTS = {
    "index_add": "source",
    "index_copy": "source",
    "index_put": "values",
    "_index_put_impl": "values",
    "scatter": "src",
    "scatter_add": "src",
}
_ADDS = frozenset({"index_add", "scatter_add"})  # to what is there, and so they read it, too
# One element per target, except where the target is the one to ignore, and the way back.
_LOSSES = frozenset({"nll_loss_forward", "nll_loss2d_forward"})
_LOSSES_BACKWARD = frozenset({"nll_loss_backward", "nll_loss2d_backward"})
_INDEXED = _LOSSES | _LOSSES_BACKWARD | {*_PICKS, *_PUTS, "embedding_dense_backward"}


def python_function(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any] | None:
    """The Python function of a custom operation, for the device of its tensors; None if none."""
    if (definition := OPDEFS.get(func._schema.name)) is None:
        return None
    functions = definition._backend_fns
    devices = [tensor.device.type for tensor in tensors_in([*args, *kwargs.values()])]
    if device.is_standing_in():
        devices.insert(0, "cuda")
    return next((functions[each] for each in (*devices, None) if each in functions), None)


def operation_name(func: Any) -> str:
    """The name of an operation of PyTorch, in place or not."""
    return _name(func).removesuffix("_")


def perform(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, str, list[Move] | None]:
    """The result of an operation, its name, and what it moved; None if it moves nothing.

    Raises CountError for an operation whose traffic is not known.
    """
    if "c10d" in func.namespace:  # of torch.distributed
        return collective(func, args, kwargs)
    name, (read, written) = operation_name(func), _operands(func, args, kwargs)
    result = func(*args, **kwargs)
    if read is None:
        return result, name, None
    results = result if len(func._schema.returns) > 1 else (result,)
    if name in _INDEXED:
        return result, name, list(_indexed(func, args, kwargs, results))
    if name in _CPU_BUFFERED:
        results = results[:1]
    for spec, tensor in zip(func._schema.returns, results, strict=False):
        if spec.alias_info is None:
            written += tensors_in([tensor])
    return result, name, _moves("read", read) + _moves("written", written)


def _moves(side: Side, tensors: Iterable[Tensor]) -> list[Move]:
    """The move of each tensor as a whole."""
    return [(side, held(tensor), tensor.element_size()) for tensor in tensors]


def _operands(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor] | None, list[Tensor]]:
    """The tensors that `func` reads and the arguments it writes; (None, []) if it moves nothing."""
    name = _name(func)
    moves_nothing = (
        name in _ALLOCATIONS | _ALIASES or func.is_view or torch.Tag.inplace_view in func.tags
    )
    known = moves_nothing or (
        name in _FILLS
        or name in _WHOLE
        or operation_name(func) in _WHOLE | _INDEXED
        or _is_elementwise(func)
    )
    operands = tensors_in([*args, *kwargs.values()])
    if func.namespace != "aten" or not known or any(x.layout != torch.strided for x in operands):
        raise CountError(f"{func} is not an operation whose traffic is known")
    if moves_nothing:
        return None, []
    read: list[Tensor] = []
    written: list[Tensor] = []
    for position, spec in enumerate(func._schema.arguments):
        if spec.name == "buffer" and name in _CPU_BUFFERED:
            continue
        by_position = position < len(args) and not spec.kwarg_only
        tensors = list(tensors_in([args[position] if by_position else kwargs.get(spec.name)]))
        if spec.alias_info is not None and spec.alias_info.is_write:
            written += tensors
        added = "add" not in name or kwargs.get("beta") != 0  # addmm and its like ignore 0 times it
        if spec.is_out or (spec.name == "self" and (name in _OVERWRITES or not added)):
            continue
        read += tensors
    return read, written


def _is_elementwise(func: Any) -> bool:
    """Whether PyTorch marks an operation so, or, as it often does, only that out of place."""
    packet = getattr(torch.ops.aten, operation_name(func), func.overloadpacket)
    marked = (getattr(packet, overload).tags for overload in packet.overloads())
    return any(torch.Tag.pointwise in tags for tags in marked)


def _name(func: Any) -> str:
    """The name of an operation, of several tensors or one, with a `_` at its end if in place."""
    return str(func.overloadpacket.__name__).removeprefix("_foreach_")


def _indexed(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Sequence[Tensor]
) -> Iterator[Move]:
    """What an operation of `_INDEXED` moved: the elements that its index names, and the index.

    Raises CountError if that needs values, and the tensors have none.
    """
    values = {spec.name: spec.default_value for spec in func._schema.arguments if not spec.is_out}
    values |= dict(zip(values, args, strict=False)) | kwargs
    name, result = operation_name(func), results[0]
    index = tensors_in(values.get(key) for key in ("index", "indices", "target"))
    yield from _moves("read", index)
    if name in _PICKS:
        yield "read", result.numel(), result.element_size()
        yield "written", result.numel(), result.element_size()
    elif name in _PUTS:
        yield from _put(name, values, result, in_place=_name(func).endswith("_"))
    elif name == "embedding_dense_backward":
        gradient = values["grad_output"]
        named = _unlike(values["indices"], values["padding_idx"])
        yield "read", named * gradient.shape[-1], gradient.element_size()
        yield "written", result.numel(), result.element_size()
    else:
        yield from _loss(values, results, backward=name in _LOSSES_BACKWARD)


def _put(name: str, values: dict[str, Any], result: Tensor, in_place: bool) -> Iterator[Move]:
    """What an operation of `_PUTS` moved besides its index; out of place, it copies first."""
    source, itemsize = values.get(_PUTS[name]), result.element_size()
    if "index_put" in name:
        places = torch.ops.aten.index.Tensor(result, values["indices"]).numel()
    else:
        places = values["index" if name.startswith("scatter") else "source"].numel()
    if isinstance(source, Tensor):  # not a number
        yield "read", min(places, held(source)), source.element_size()
    if not in_place:
        yield "read", result.numel(), itemsize
        yield "written", result.numel(), itemsize
        return
    if name in _ADDS or values.get("accumulate") or values.get("reduce"):
        yield "read", places, itemsize
    yield "written", places, itemsize


def _loss(values: dict[str, Any], results: Sequence[Tensor], backward: bool) -> Iterator[Move]:
    """What a negative log likelihood, or its backward pass, moved besides its targets."""
    named = _unlike(values["target"], values["ignore_index"])
    x, weight = values["self"], values["weight"]
    if weight is not None:
        yield "read", named, weight.element_size()
    if backward:
        gradient = values["grad_output"]
        yield "read", min(named, held(gradient)), gradient.element_size()
        if values["reduction"] == 1:  # a mean, over the sum of the weights
            yield "read", 1, x.element_size()
    else:
        yield "read", named, x.element_size()
    for result in results:
        yield "written", result.numel(), result.element_size()


def _unlike(index: Tensor, ignored: int) -> int:
    """How many elements of an index are not `ignored`. Raises CountError if it has no values."""
    if index.is_meta:
        raise CountError("what an index names depends on its values: count it on tensors with them")
    return int((index != ignored).sum())

"""What an operation of PyTorch reads and writes: each operand and each result once, whole.

Views and allocations are free. An operation with an index touches the elements that its index
names. An operation that this module does not know is an error that names it, and `rule`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from memtraffic import device
from memtraffic.errors import CountError
from memtraffic.inputs import tensors_in
from memtraffic.tensors import held
from memtraffic.torch_adapter import OPDEFS, OPERATORS, composite_kernel

Side: TypeAlias = Literal["read", "written"]
SIDES: tuple[Side, Side] = "read", "written"
Moved: TypeAlias = Tensor | tuple[int, torch.dtype]  # a tensor as a whole, or some elements
Sides: TypeAlias = tuple[Iterable[Moved], Iterable[Moved]]  # what is read, and what is written
Rule: TypeAlias = Callable[..., Sides]

# Allocations, and what only renames memory.
_FREE = frozenset(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided _unsafe_view "
    "_reshape_alias lift_fresh alias detach".split()
)
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
    "amax amin max min sum mean prod any all argmax argmin aminmax logsumexp var var_mean std norm "
    "linalg_vector_norm cumsum cumprod sort topk _softmax _log_softmax _softmax_backward_data "
    "_log_softmax_backward_data native_layer_norm native_layer_norm_backward mm bmm addmm baddbmm "
    "mv dot convolution convolution_backward cat stack flip roll tril triu constant_pad_nd "
    "_to_copy clone copy repeat repeat_interleave floor_divide _local_scalar_dense "
    "bernoulli complex polar mse_loss".split()
)
_rules: dict[str, Rule] = {}  # by the name of an operation's schema


@dataclass
class OpTraffic:
    """What one operation moved: a PyTorch operation, or one launch of a Triton kernel."""

    name: str
    read_elements: int = 0
    written_elements: int = 0
    read_bytes: int = 0
    written_bytes: int = 0

    def add(self, side: Side, elements: int, itemsize: int) -> None:
        """Adds `elements` of `itemsize` bytes each to what was read or written."""
        for unit, more in (("elements", elements), ("bytes", elements * itemsize)):
            name = f"{side}_{unit}"
            setattr(self, name, getattr(self, name) + more)


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Decorator: the function says what operations move, in every count from now on.

    >>> from memtraffic import count
    >>> @rule("aten::histc")
    ... def histogram(result, self, **options):
    ...     return [self], [result]
    >>> print(count(torch.histc, torch.ones(3, 5)))
    reads 15 elements, writes 100 elements, in 1 operation

    names: as schemas of PyTorch have them, `aten::mul_` for `mul` in place. The function is called
    with what the operation returned, and with its arguments by the names of its schema, such as
    `self`. It returns what is read and what is written: tensors that are moved whole, and pairs of
    a number of elements and their dtype.
    """

    def register(function: Rule) -> Rule:
        _rules.update(dict.fromkeys(names, function))
        return function

    return register


def parts_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """What calls the operations that an operation consists of; None if it is one itself.

    Of a custom operation that is its Python function for the device of its tensors. Others of
    several parts, such as `contiguous`, are seen whole below autograd: in inference mode, or within
    a custom operation.
    """
    name = func._schema.name
    if (definition := OPDEFS.get(name)) is None:
        return OPERATORS.get(name) or (None if name in _rules else composite_kernel(func))
    functions = definition._backend_fns
    devices = ["cuda"] if device.is_standing_in() else []
    devices += [tensor.device.type for tensor in tensors_in([*args, *kwargs.values()])]
    return next((functions[each] for each in (*devices, None) if each in functions), None)


def perform(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, OpTraffic | None]:
    """The result of an operation, and what it moved; None if it moves nothing.

    Raises CountError for an operation whose traffic is not known.
    """
    own = _rules.get(func._schema.name)
    free = own is None and _moves_nothing(func, args, kwargs)
    result = func(*args, **kwargs)
    if free:
        return result, None
    named = {spec.name: spec.default_value for spec in func._schema.arguments}
    named |= dict(zip(named, args, strict=False)) | kwargs
    op = OpTraffic(_name(func).removesuffix("_"))
    for side, moved in zip(SIDES, (own or _whole(func))(result, **named), strict=True):
        for it in moved:
            elements, dtype = (held(it), it.dtype) if isinstance(it, Tensor) else it
            op.add(side, elements, dtype.itemsize)
    return result, op


def _moves_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation is a view or an allocation. Raises CountError if it is not known."""
    name = _name(func)
    free = name in _FREE or func.is_view or torch.Tag.inplace_view in func.tags
    whole = name in _FILLS or name.removesuffix("_") in _WHOLE or _is_elementwise(func)
    strided = all(x.layout == torch.strided for x in tensors_in([*args, *kwargs.values()]))
    if func.namespace != "aten" or not (free or whole) or not strided:
        raise CountError(
            f"{func} is not an operation whose traffic is known: say what it moves with "
            f"memtraffic.meters.operations.rule({func._schema.name!r})"
        )
    return free


def _whole(func: Any) -> Rule:
    """The rule of an operation that reads each operand, and writes each result, as a whole."""
    name, schema = _name(func), func._schema

    def moves(result: Any, /, **arguments: Any) -> Sides:
        read: list[Moved] = []
        written: list[Moved] = []
        added = "add" not in name or arguments.get("beta") != 0  # addmm ignores 0 times it
        for spec in schema.arguments:
            tensors = list(tensors_in([arguments[spec.name]]))
            if spec.alias_info is not None and spec.alias_info.is_write:
                written += tensors
            overwritten = spec.name == "self" and (name in _OVERWRITES or not added)
            read += [] if spec.is_out or overwritten else tensors
        results = result if len(schema.returns) > 1 else (result,)
        for spec, made in zip(schema.returns, results, strict=False):
            written += tensors_in([] if spec.alias_info else [made])
        return read, written

    return moves


def _is_elementwise(func: Any) -> bool:
    """Whether PyTorch marks an operation so, or, as it often does, only that out of place."""
    packet = getattr(torch.ops.aten, _name(func).removesuffix("_"), func.overloadpacket)
    marked = (getattr(packet, overload).tags for overload in packet.overloads())
    return any(torch.Tag.pointwise in tags for tags in marked)


def _name(func: Any) -> str:
    """The name of an operation, of several tensors or one, with a `_` at its end if in place."""
    return str(func.overloadpacket.__name__).removeprefix("_foreach_")


# A CPU has a buffer that no GPU has.
rule("aten::log_sigmoid_forward")(lambda result, self, **_: ([self], result[:1]))
rule("aten::log_sigmoid_backward")(
    lambda result, grad_output, self, **_: ([grad_output, self], [result])
)

# ---- operations with an index: they touch the elements that it names, and read it once


def _index(arguments: dict[str, Any]) -> list[Moved]:
    return [*tensors_in(arguments.get(key) for key in ("index", "indices", "target"))]


@rule("aten::embedding", "aten::gather", "aten::index", "aten::index_select", "aten::take")
def _picked(result: Tensor, **arguments: Any) -> Sides:
    return [*_index(arguments), result], [result]


# Of those that write, the argument that holds what they write.
_PUTS = {
    "index_add": "source",
    "index_copy": "source",
    "index_put": "values",
    "_index_put_impl": "values",
    "scatter": "src",
    "scatter_add": "src",
}
_ADDS = frozenset({"index_add", "scatter_add"})  # to what is there, and so they read it, too


def _put(name: str, result: Tensor, /, **arguments: Any) -> Sides:
    """Out of place, `name` copies first."""
    in_place, base = name.endswith("_"), name.removesuffix("_")
    source = arguments.get(_PUTS[base])
    if "index_put" in name:
        places = torch.ops.aten.index.Tensor(result, arguments["indices"]).numel()
    else:
        places = arguments["index" if name.startswith("scatter") else "source"].numel()
    read = _index(arguments)
    if isinstance(source, Tensor):  # not a number
        read.append((min(places, held(source)), source.dtype))
    if not in_place:
        return [*read, result], [result]
    if base in _ADDS or arguments.get("accumulate") or arguments.get("reduce"):
        read.append((places, result.dtype))
    return read, [(places, result.dtype)]


for _each in (*_PUTS, *(f"{name}_" for name in _PUTS)):
    rule(f"aten::{_each}")(functools.partial(_put, _each))


# A loss reads one element per target, except where the target is the one to ignore.
@rule("aten::nll_loss_forward", "aten::nll_loss2d_forward")
def _loss(
    result: tuple[Tensor, Tensor], target: Tensor, ignore_index: int, **arguments: Any
) -> Sides:
    x, weight = arguments["self"], arguments["weight"]
    named = _unlike(target, ignore_index)
    weights = [] if weight is None else [(named, weight.dtype)]
    return [target, *weights, (named, x.dtype)], [*result]


@rule("aten::nll_loss_backward", "aten::nll_loss2d_backward")
def _loss_backward(
    result: Tensor, grad_output: Tensor, target: Tensor, ignore_index: int, **arguments: Any
) -> Sides:
    weight, named = arguments["weight"], _unlike(target, ignore_index)
    read: list[Moved] = [target, (min(named, held(grad_output)), grad_output.dtype)]
    read += [] if weight is None else [(named, weight.dtype)]
    if arguments["reduction"] == 1:  # a mean, over the sum of the weights
        read.append((1, result.dtype))
    return read, [result]


def _unlike(index: Tensor, ignored: int) -> int:
    """How many elements of an index are not `ignored`. Raises CountError if it has no values."""
    if index.is_meta:
        raise CountError("what an index names depends on its values: count it on tensors with them")
    return int((index != ignored).sum())

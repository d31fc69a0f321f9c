"""What a collective of `torch.distributed` moves: in the memory of its rank, and over its link.

In memory, a rank reads once what it gives, and writes once what it gets. What goes over the links
depends on the algorithm. Counted is the least, over all ranks together, if ranks send one another
whole numbers, and nothing on the way adds or copies them, as an NVSwitch can. A rank's part of it
is that of the algorithms that reach the least and load the ranks alike: a ring; for `broadcast`
and `reduce`, a chain of ranks from the root or to it. Where a group does not divide what all ranks
share, the part is a fraction: the mean over the ranks.

Sources: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations,
2009, for `all_reduce`; the bus bandwidths in PERFORMANCE.md of NVIDIA's nccl-tests for the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any, Literal, TypeAlias

from torch import Tensor

from memtraffic.errors import CountError
from memtraffic.inputs import tensors_in
from memtraffic.torch_adapter import FakeTensor, process_group

Side: TypeAlias = Literal["read", "written", "sent", "received"]
Number: TypeAlias = int | Fraction

# Kinds by the begin of an operation's name, in PyTorch's two namespaces.
_KINDS = {
    "_allgather_base": "all_gather", "_reduce_scatter_base": "reduce_scatter",
    "allgather": "all_gather", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "allreduce": "all_reduce", "all_reduce": "all_reduce", "alltoall": "all_to_all",
    "all_to_all": "all_to_all", "broadcast": "broadcast", "reduce_": "reduce", "gather": "gather",
    "scatter": "scatter", "send": "send", "isend": "send", "recv": "recv", "irecv": "recv",
}  # fmt: skip
_FREE = ("barrier", "monitored_barrier_", "wait_tensor", "check_for_nan")  # move nothing


def over_link(
    kind: str, given: int, got: int, ranks: int, at: int = 0, own: Number = 0
) -> tuple[Number, Number]:
    """Elements that one of `ranks` sends and receives.

    >>> over_link("all_gather", 10, 40, ranks=4), over_link("all_reduce", 10, 10, ranks=4)
    ((30, 30), (15, 15))

    given, got: elements of its operands and its results. at: how many ranks after the root it is.
    own: elements that it gives itself in an `all_to_all`.
    """
    follows, leads = at > 0, at < ranks - 1
    shared = Fraction(2 * (ranks - 1) * given, ranks)
    links: dict[str, tuple[Number, Number]] = {
        "all_gather": ((ranks - 1) * given, got - given),
        "reduce_scatter": (given - got, (ranks - 1) * got),
        "all_reduce": (shared, shared),
        "all_to_all": (given - own, got - own),
        "broadcast": (given * leads, given * follows),
        "reduce": (given * follows, given * leads),
        "gather": (given * follows, 0 if follows else got - given),
        "scatter": (0 if follows else given - got, got * follows),
        "send": (given, 0),
        "recv": (0, got),
    }
    sent, received = links[kind]
    return _whole(sent), _whole(received)


def _whole(number: Number) -> Number:
    return int(number) if number == int(number) else number


def collective(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, str, list[tuple[Side, Number, int]] | None]:
    """The result of a collective, its kind, and what it moved; None if it moves nothing.

    Each move is a number of elements, and the bytes of each. Raises CountError for a collective
    that is not known, for tensors without values, and for several dtypes.
    """
    name = str(func.overloadpacket.__name__)
    if name in _FREE:
        return func(*args, **kwargs), name, None
    kind = next((kind for begin, kind in _KINDS.items() if name.startswith(begin)), None)
    values = dict(zip((spec.name for spec in func._schema.arguments), args, strict=False)) | kwargs
    if kind is None:
        raise CountError(f"{func} moves data between processes, and what it moves is not known")
    given, got = (
        list(tensors_in(value for key, value in values.items() if key.startswith(begin)))
        for begin in (("input", "tensor"), "out")
    )
    if any(x.is_meta or isinstance(x, FakeTensor) for x in (*given, *got)):
        raise CountError(f"{kind} sends values: count it on tensors that have some")
    result = func(*args, **kwargs)
    if not got:  # a functional collective returns its results, the others work in place
        got = list(tensors_in([result])) if "functional" in func.namespace else given
    dtypes = {x.dtype for x in (*given, *got)}
    if len(dtypes) > 1:
        raise CountError(f"{kind} of several dtypes, {dtypes}, is not counted: call one for each")
    itemsize = dtypes.pop().itemsize if dtypes else 1
    group = process_group(values.get("process_group", values.get("group_name")))
    root = values.get("root_rank", values.get("src", 0))
    moves = _moves(kind, given, got, group, (group.rank() - root) % group.size(), values)
    return result, kind, [(side, elements, itemsize) for side, elements in moves]


def _moves(
    kind: str, given: list[Tensor], got: list[Tensor], group: Any, at: int, values: dict[str, Any]
) -> Iterator[tuple[Side, Number]]:
    n_given, n_got = (sum(x.numel() for x in each) for each in (given, got))
    own: Number = Fraction(n_given, group.size())
    if splits := values.get("input_split_sizes"):
        own = splits[group.rank()] * (n_given // max(1, given[0].shape[0]))
    elif len(given) > 1:
        own = given[group.rank()].numel()
    sent, received = over_link(kind, n_given, n_got, group.size(), at, own)
    if kind != "recv" and not (kind == "broadcast" and at):
        yield "read", n_given
    if kind != "send" and not (kind == "broadcast" and not at) and not (kind == "reduce" and at):
        yield "written", n_got
    yield "sent", sent
    yield "received", received

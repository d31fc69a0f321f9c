"""Counts, element by element, what a function reads from memory and writes to it.

A function may mix three kinds of work, and all are counted:

- A PyTorch operation reads each of its operands once and writes each of its results once. Views and
  allocations are free. An expanded operand counts the elements it really holds. This is what the
  operation must move; what a library's kernel moves beyond that, only a hardware counter sees. Of
  which operations a function consists is PyTorch's choice, by device: on a GPU `rms_norm` is one,
  on a CPU it is six.
- A PyTorch operation with an index, such as `gather` or an embedding, touches only the elements
  that its index names: each of them as often as it is named, and the index itself once. So its
  traffic depends on the index, and is what a loop that goes through it one by one would move.
- A Triton kernel runs in Triton's interpreter. Each element that a load or store touches counts
  each time its mask is true: a kernel that reads a row three times counts it three times. An atomic
  operation reads and writes; one that only loads or stores (`tl.atomic_load` and `tl.atomic_store`
  of Triton 3.9) does that alone. A program that waits for another one reads each time it looks,
  also in `tl.atomic_poll`; it looks again when the other programs had their turn.

An operation that `torch.library.custom_op` or `triton_op` defines is what its Python function does.

Nothing is guessed: an operation that `operations` does not know is an error that names it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from memtraffic import device, torch_adapter
from memtraffic.errors import CountError
from memtraffic.functions import as_function, check_finished, function_name
from memtraffic.gpus import Gpu
from memtraffic.inputs import Arguments, tensors_in
from memtraffic.meters.operations import OpTraffic, parts_of, perform
from memtraffic.op import AnyInputs, find_op
from memtraffic.progress import progress_bar
from memtraffic.tensors import held
from memtraffic.triton_adapter import interpret
from memtraffic.triton_adapter.capture import Configuration
from memtraffic.triton_adapter.launch import Grid
from memtraffic.triton_adapter.patching import replaced_here
from memtraffic.triton_adapter.reach import Block, Reach

_counting: ContextVar[bool] = ContextVar("counting", default=False)
allowance: ContextVar[Work | None] = ContextVar("allowance", default=None)  # of a count


@dataclass(frozen=True)
class Access:
    """One load or store of one Triton program: the elements of one argument whose mask was true.

    program: its three indices in the grid. offsets: elements from the first element of the
    argument, one for each unmasked element of the program's block, so an element that is touched
    several times is there several times.
    """

    program: tuple[int, int, int]
    kind: Literal["read", "written"]
    argument: str
    offsets: tuple[int, ...]


def nothing_ran() -> str:
    """Says of a function that it moved nothing, and why that may be."""
    hint = device.stand_in_hint()
    return f"no operation of PyTorch ran that moves anything, and no Triton kernel{hint}"


def _total(field_name: str, about: str) -> Any:
    """A property of `Traffic`: the sum of a field of its operations."""
    return property(lambda traffic: sum(getattr(op, field_name) for op in traffic.ops), doc=about)


@dataclass
class Traffic:
    """What a function moved, operation by operation, with totals in elements and bytes.

    An element is one of its tensor's dtype: a number of complex64 is one, of 8 bytes.
    accesses: of its kernels, if they were traced. backward: what the backward pass moved, which is
    not in the totals; None if it was not counted.
    """

    ops: list[OpTraffic] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    backward: Traffic | None = None

    read_elements = _total("read_elements", "Elements read by all operations.")
    written_elements = _total("written_elements", "Elements written by all operations.")
    read_bytes = _total("read_bytes", "Bytes read by all operations.")
    written_bytes = _total("written_bytes", "Bytes written by all operations.")

    def __str__(self) -> str:
        if not self.ops:
            return f"reads 0 elements, writes 0 elements: {nothing_ran()}"
        operations = "1 operation" if len(self.ops) == 1 else f"{len(self.ops)} operations"
        text = f"reads {self.read_elements} elements, writes {self.written_elements} elements, "
        text += f"in {operations}"
        return f"forward: {text}\nbackward: {self.backward}" if self.backward else text


def count(
    fn: Callable[..., object],
    inputs: AnyInputs = None,
    shape: Sequence[int] | None = None,
    *,
    dtype: str = "float32",
    layout: str = "packed",
    backward: bool = False,
    trace: bool = False,
    config: int | None = None,
) -> Traffic:
    """Runs `fn` once and returns the `Traffic` that it caused.

    >>> print(count(lambda x: x.exp(), torch.ones(3, 5, device=device.default())))
    reads 15 elements, writes 15 elements, in 1 operation
    >>> print(count(torch.mul, "M,N N", (3, 5)))
    reads 20 elements, writes 15 elements, in 1 operation

    fn: any function of PyTorch operations and Triton kernels, or what else `functions.as_function`
    takes; the parameters of an `nn.Module` are memory as any tensor is. Its kernels are
    interpreted, also where there is a GPU. inputs: what `fn` is called with, as of `op.find_op`: a
    tensor, a tuple of arguments, a specification such as "M,N N:bf16", or an `Op`; by default one
    matrix M,N. On tensors of the device "meta", PyTorch operations are counted without arithmetic.
    shape: a number for each size of a specification, an `Op` or a function. dtype, layout: of the
    tensors that are made, as of `Op.arguments`. backward: counts the backward pass, too, which is
    given the gradient of each result and makes that of each floating-point tensor and parameter:
    `Traffic.backward`. trace: keep every load and store of every Triton program in
    `Traffic.accesses`. config: of each autotuned kernel that has several configurations, the index
    in its `configs` of the one that is counted; without it, all must move the same.

    Raises CountError for an operation whose traffic is not known, a compiled or scripted function
    (it hides its kernels), a tensor that becomes a NumPy array, a thread that is started, a result
    whose work is still to be done, such as a generator, a kernel that reaches outside the
    tensors it was given, a kernel launched on meta tensors, an autotuned kernel whose
    configurations differ in traffic or that has no such `config`, or a backward pass that does not
    exist. What `fn` itself raises is passed on.

    Counts in several threads wait for each other. What other threads do meanwhile is not counted,
    and runs as it would without, one kernel at a time. A thread belongs to `fn` if it runs in a
    copy of its context (`contextvars.copy_context`), and then its kernels are counted.
    """
    function, arguments = as_function(fn), find_op(inputs).arguments(shape, dtype, layout)
    forward, after = TrafficMeter(trace, config), TrafficMeter(trace, config)
    if backward:
        arguments = differentiable(arguments)
    with metered(fn, forward), torch.set_grad_enabled(backward or torch.is_grad_enabled()):
        result = arguments.call(function)
        check_finished(result, CountError)
    if not backward:
        return forward.traffic
    backward_pass = backward_of(result)
    with metered(fn, after):
        backward_pass()
    return replace(forward.traffic, backward=after.traffic)


@contextmanager
def metered(fn: object, meter: TrafficMeter, gpu: Gpu | None = None) -> Iterator[None]:
    """Context manager in which `meter` watches what runs.

    fn: what messages name. gpu: what launchers plan for; None for their default. Raises what
    `count` raises.
    """
    if _counting.get():
        raise CountError("a function that is being counted cannot count")
    with (
        device.capturing_launches(gpu),
        interpret.interpreting(meter),
        _nothing_hidden(meter, fn),
        torch_adapter.set_wrap_triton_enabled(False),  # it hides a launch in an operation
        meter,
        device.having(_counting, True),
    ):
        try:
            yield
        except Exception as error:
            raise interpret.interpreter_cause(error) from None


@dataclass
class _Kernel:
    """One launch of a kernel: what it moved, what memory it has, what shows how far it is."""

    op: OpTraffic
    reach: Reach
    show: Callable[[int, int], object]
    accesses: int = 0
    before: int = field(default_factory=interpret.operations)  # those that are not its own

    @property
    def operated(self) -> int:
        """How many operations on blocks its programs have made so far."""
        return interpret.operations() - self.before


class TooMuchWork(CountError):
    """A count was given up, because its kernels have too many programs or accesses."""


@dataclass
class Work:
    """The kernels that a count launched, and how much of them is interpreted.

    programs, accesses, operations: how many more there may be; operations are those on blocks,
    which take the time. operated: how many there were. launches: the kernel and the grid of each.
    exceeded: whether they were too many, also where the counted function caught the error.
    """

    programs: float = math.inf
    accesses: float = math.inf
    operations: float = math.inf
    operated: int = 0
    launches: list[tuple[str, Grid]] = field(default_factory=list)
    exceeded: bool = False

    def see(self, kernel: _Kernel, program: Grid, grid: Grid) -> None:
        """An access is made. Raises TooMuchWork if all those to come would be too many."""
        programs = math.prod(grid)
        kernel.accesses += 1
        self.accesses -= 1
        if kernel.accesses == 1:
            self.programs -= programs
            self.launches.append((kernel.op.name, grid))
        to_come = programs - 1 if program == (0, 0, 0) else 0
        accesses, operated = kernel.accesses * to_come, kernel.operated * (to_come + 1)
        most = self.operations - self.operated
        if self.programs < 0 or self.accesses < accesses or most < operated:
            self.exceeded = True
            raise TooMuchWork("the kernels of this count have too many programs or operations")


def differentiable(arguments: Arguments) -> Arguments:
    """The same arguments, whose floating-point and complex tensors want a gradient."""

    def leaf(x: Tensor) -> Tensor:
        has_gradient = x.is_floating_point() or x.is_complex()
        return x.detach().requires_grad_() if has_gradient else x

    return arguments.map(leaf)


def backward_of(result: object) -> Callable[[], object]:
    """The backward pass from a result. Raises CountError if there is none."""
    outputs = [x for x in tensors_in([result]) if x.requires_grad]
    if not outputs:
        raise CountError("no result has a gradient, so there is no backward pass to count")
    options: Any = {"allow_unused": True, "grad_outputs": gradients_of(outputs)}
    return partial(torch.autograd.grad, outputs, leaves_of(outputs), **options)


def leaves_of(outputs: Iterable[Tensor]) -> list[Tensor]:
    """The tensors, parameters among them, whose gradients a backward pass from `outputs` makes."""
    edge = torch.autograd.graph.get_gradient_edge
    seen = {x.grad_fn or edge(x).node for x in outputs}
    nodes: list[Any] = [*seen]
    for node in nodes:
        following = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= following
        nodes += following
    return [node.variable for node in nodes if hasattr(node, "variable")]


def gradients_of(outputs: Iterable[Tensor]) -> list[Tensor]:
    """A random gradient for each tensor, with its dtype and strides: the same ones each time."""
    generator = torch.Generator().manual_seed(0)  # the caller's own numbers are not used up
    return [torch.empty_like(x).copy_(torch.randn(x.shape, generator=generator)) for x in outputs]


@contextmanager
def _nothing_hidden(meter: TrafficMeter, fn: object) -> Iterator[None]:
    """Context manager: what a meter does not see is an error.

    That is a compiled or scripted function, a tensor that becomes a NumPy array, and a thread that
    is started. A tensor that becomes a list is read.
    """

    def refuse(maker: str) -> Callable[..., NoReturn]:
        def call(*args: object, **kwargs: object) -> NoReturn:
            advice = "count it before that, or measure it"
            raise CountError(f"a function made by {maker} hides its kernels: {advice}")

        return call

    def tolist(tensor: Tensor) -> Any:
        if meter.kernel is None:
            op = OpTraffic("tolist")
            op.add("read", held(tensor), tensor.element_size())
            meter.traffic.ops.append(op)
        with torch_adapter.disable_current_modes():  # that see the copy of what is on a GPU
            return original(tensor)

    def to_numpy(tensor: Tensor, *args: Any, **options: Any) -> Any:
        if meter.kernel is not None:  # the interpreter's own
            return convert(tensor, *args, **options)
        raise CountError(
            f"{function_name(fn)} makes a tensor a NumPy array, and what NumPy moves is not "
            "counted: use PyTorch's operations, or measure it with `counters`"
        )

    def start(thread: threading.Thread) -> None:
        # One of the interpreter, of a bar that shows progress.
        if meter.kernel is not None or type(thread).__module__.startswith("tqdm."):
            return start_thread(thread)
        raise CountError(
            f"{function_name(fn)} starts a thread, and what another thread moves is not counted"
        )

    original, convert = torch.Tensor.tolist, torch.Tensor.numpy
    start_thread = threading.Thread.start
    scripted = torch.jit.ScriptFunction, torch_adapter.ScriptMethod
    hidden: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        (torch, "compile", refuse("torch.compile")),
        *torch_adapter.in_compiled_functions(refuse("torch.compile")),
        *((kind, "__call__", refuse("torch.jit.script")) for kind in scripted),
        (threading.Thread, "start", start),
        (Tensor, "tolist", tolist),
        *((Tensor, name, to_numpy) for name in ("numpy", "__dlpack__")),
    )
    with replaced_here(*hidden):
        yield


class TrafficMeter(torch_adapter.TorchDispatchMode):
    """Sees each PyTorch operation, as a dispatch mode, and each access of an interpreted kernel."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to keep Dynamo away is not needed here, and imports it, which takes a second."""
        return False

    def __init__(self, trace: bool, config: int | None = None) -> None:
        super().__init__()
        self.traffic = Traffic()
        self.trace, self.config = trace, config
        self.work = allowance.get() or Work()
        self.kernel: _Kernel | None = None

    # ---- PyTorch operations

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # The interpreter copies arguments; a tensor without values is asked for its device; and a
        # profiler is told where a step begins and ends, as each optimizer does.
        if self.kernel is not None or func.namespace in ("prim", "profiler"):
            return func(*args, **kwargs)
        if (parts := parts_of(func, args, kwargs)) is not None:
            with self:
                return parts(*args, **kwargs)
        result, op = perform(func, args, kwargs)
        self.traffic.ops += [op] if op else []
        return result

    # ---- Triton kernels, as `Meter`

    @contextmanager
    def launch(self, kernel: str, tensors: list[Tensor]) -> Iterator[None]:
        if any(tensor.is_meta for tensor in tensors):
            raise CountError(f"{kernel} is a Triton kernel: count it on tensors that have values")
        with progress_bar(f"{kernel}, program") as show:
            self.kernel = _Kernel(OpTraffic(kernel), Reach(kernel), show)
            try:
                yield
            except Exception as error:
                interpret.name_kernel(kernel, error)
                raise
            finally:
                launched, self.kernel = self.kernel, None
                self.work.operated += launched.operated
        self.traffic.ops.append(launched.op)

    def bind(self, argument: str, tensor: Tensor) -> None:
        assert self.kernel is not None
        self.kernel.reach.bind(argument, tensor)

    def access(self, kind: Literal["read", "written"], block: Block) -> None:
        assert self.kernel is not None
        (x, y, z), (size_x, size_y, size_z) = block.program, block.grid
        self.kernel.show((x * size_y + y) * size_z + z, size_x * size_y * size_z)
        self.work.see(self.kernel, block.program, block.grid)
        self.kernel.op.add(kind, int(block.mask.sum()), block.itemsize)
        for argument, offsets in self.kernel.reach.split(kind, block):
            if self.trace:
                touched = tuple((offsets // block.itemsize).tolist())
                self.traffic.accesses.append(Access(block.program, kind, argument, touched))

    def autotuned(self, kernel: str, launches: Iterable[Configuration]) -> None:
        total, found = self.traffic, dict[str, Traffic]()
        try:
            for launch in launches:
                self.traffic = Traffic()
                launch()
                found[f"config={launch.number}, {launch}"] = self.traffic
        finally:
            self.traffic = total
        [first, *others] = found.values()
        if any(other.ops != first.ops for other in others):
            counts = "; ".join(f"with {config} it {traffic}" for config, traffic in found.items())
            raise CountError(
                f"{kernel}: its {len(found)} autotuning configurations differ in traffic, so "
                f"choose one, as config=0 counts the first of {len(launch.tuner.configs)}: {counts}"
            )
        total.ops += first.ops
        total.accesses += first.accesses

"""Counts, element by element, what a function reads from memory and writes to it.

Two kinds of work are counted, and a function may mix them:

- a PyTorch operation reads each of its operands once and writes each of its results once. Views and allocations are free.
  An expanded operand counts the elements it really holds. This is what the operation has to move; what a library's kernel
  moves beyond that, only a hardware counter sees.
- a Triton kernel is run in Triton's interpreter, and each lane of a load or store whose mask is true counts one element,
  as often as it happens: a kernel that reads a row three times counts it three times.

Nothing is guessed: an operation this module does not know is an error that names it.
"""

import functools
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memtraffic import machine
from memtraffic.progress import Progress

_ALLOCATIONS = {
    "empty",
    "empty_like",
    "empty_strided",
    "empty_permuted",
    "new_empty",
    "new_empty_strided",
}
_ALIASES = {"_unsafe_view", "_reshape_alias", "lift_fresh", "alias", "detach"}
# Make a tensor from nothing; a tensor argument, as in zeros_like, only lends its shape.
_FILLS = set(
    "zeros ones full arange linspace eye rand randn randint scalar_tensor zeros_like ones_like full_like rand_like randn_like "
    "randint_like new_zeros new_ones new_full fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_".split()
)
# Not elementwise, but every element of every operand is needed once and every element of every result is produced.
_WHOLE = set(
    "amax amin max min sum mean prod any all argmax argmin aminmax logsumexp var var_mean std std_mean norm "
    "linalg_vector_norm cumsum cumprod cummax cummin logcumsumexp sort topk _softmax _log_softmax _softmax_backward_data "
    "_log_softmax_backward_data native_layer_norm native_layer_norm_backward mm bmm addmm baddbmm mv dot cat stack flip "
    "roll tril triu constant_pad_nd _to_copy clone copy repeat _local_scalar_dense".split()
)


class CountError(Exception):
    """What a function does cannot be counted exactly; the message says why."""


@dataclass
class Op:
    """What one operation moved: a PyTorch operation, or one launch of a Triton kernel. Elements and bytes."""

    name: str
    read_elements: int = 0
    written_elements: int = 0
    read_bytes: int = 0
    written_bytes: int = 0

    def add(self, kind, elements, itemsize):
        """Adds `elements` of `itemsize` bytes to what was `read` or `written`."""
        setattr(self, f"{kind}_elements", getattr(self, f"{kind}_elements") + elements)
        setattr(
            self, f"{kind}_bytes", getattr(self, f"{kind}_bytes") + elements * itemsize
        )


@dataclass(frozen=True)
class Access:
    """One load or store of one Triton program: which elements of which argument its unmasked lanes touched."""

    program: tuple
    kind: str
    argument: str
    offsets: tuple


@dataclass
class Traffic:
    """What a function moved, operation by operation, with totals over them in elements and bytes."""

    ops: list[Op] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)

    read_elements = property(lambda self: sum(op.read_elements for op in self.ops))
    written_elements = property(
        lambda self: sum(op.written_elements for op in self.ops)
    )
    read_bytes = property(lambda self: sum(op.read_bytes for op in self.ops))
    written_bytes = property(lambda self: sum(op.written_bytes for op in self.ops))

    def __str__(self):
        return f"reads {self.read_elements} elements, writes {self.written_elements} elements, in {len(self.ops)} operations"


def count(fn, *tensors, trace=False):
    """Runs `fn(*tensors)` and returns the `Traffic` it caused.

    >>> x = torch.ones(3, 5, device=machine.device())
    >>> print(count(lambda x: x.exp(), x))
    reads 15 elements, writes 15 elements, in 1 operations

    fn: any function of PyTorch operations and Triton kernels. Its kernels are interpreted, also where there is a GPU.
    trace: keep every load and store of every Triton program in `Traffic.accesses`.

    Raises CountError for an operation whose traffic is not known, a compiled or scripted function (it hides its kernels),
    a kernel that reaches outside the tensors it was given, or an autotuned kernel whose configurations differ in traffic.
    What `fn` itself raises is passed on.
    """
    if isinstance(fn, (torch.jit.ScriptFunction, torch.jit.ScriptModule)):
        raise CountError(
            "a function made by torch.jit.script hides its kernels: count it before it is "
            "scripted, or measure it"
        )
    meter = _Meter(trace)
    with (
        machine.metered(),
        meter.interpreting(),
        torch.compiler.set_stance("fail_on_recompile"),
        meter,
    ):
        try:
            fn(*tensors)
        except Exception as error:
            raise _cause(error) from None
    return meter.traffic


def _cause(error):
    """What a kernel really raised, out of the interpreter's wrapping."""
    if "fail_on_recompile" in str(error):
        return CountError(
            "a function made by torch.compile hides its kernels: count it before it is "
            "compiled, or measure it"
        )
    while type(error).__name__ == "InterpreterError" and error.__cause__ is not None:
        error = error.__cause__
    return error


class _Meter(TorchDispatchMode):
    """Sees each PyTorch operation (as a dispatch mode) and each memory access of the interpreter (as its memory)."""

    def __init__(self, trace):
        super().__init__()
        self.traffic = Traffic()
        self.trace = trace
        self.launch = None

    # ---- PyTorch operations

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if (
            self.launch is not None
        ):  # the interpreter's own copies of a kernel's arguments
            return func(*args, **kwargs)
        read, written = _operands(func, args, kwargs)
        result = func(*args, **kwargs)
        returned = result if isinstance(result, (tuple, list)) else (result,)
        for spec, tensor in zip(func._schema.returns, returned, strict=False):
            if isinstance(tensor, torch.Tensor) and spec.alias_info is None:
                written.append(tensor)
        op = Op(func.overloadpacket.__name__.removesuffix("_"))
        for tensor in read or ():
            op.add("read", _elements(tensor), tensor.element_size())
        if read is not None:
            for tensor in written:
                op.add("written", _elements(tensor), tensor.element_size())
            self.traffic.ops.append(op)
        return result

    # ---- Triton kernels

    @contextmanager
    def interpreting(self):
        """Every Triton kernel launched inside runs in the interpreter, over a memory that reports to this meter."""
        if not machine.HAS_TRITON:
            yield
            return
        from triton.runtime import autotuner, interpreter, jit

        saved = [(o, dict(vars(o))) for o in _language_objects()]
        real_call, real_args = (
            interpreter.GridExecutor.__call__,
            interpreter.GridExecutor._init_args_hst,
        )
        patches = [
            (interpreter, "_interpreter", _Memory(interpreter._interpreter, self)),
            (
                interpreter,
                "_patch_lang_tensor",
                functools.partial(_patch_tensor, interpreter._patch_lang_tensor),
            ),
            (
                interpreter.GridExecutor,
                "__call__",
                lambda executor, *a, **k: self._launch(real_call, executor, a, k),
            ),
            (
                interpreter.GridExecutor,
                "_init_args_hst",
                lambda executor, a, k: self._bind(real_args, executor, a, k),
            ),
            (
                autotuner.Autotuner,
                "run",
                lambda tuner, *a, **k: self._autotuned(tuner, a, k),
            ),
            # In a process that compiles kernels, kernels and the functions they call are interpreted on the spot.
            (
                jit.JITFunction,
                "run",
                lambda fn, *a, **k: interpreter.InterpretedFunction(fn.fn).run(*a, **k),
            ),
            (
                jit.JITFunction,
                "__call__",
                lambda fn, *a, **k: interpreter.InterpretedFunction(fn.fn)(*a, **k),
            ),
        ]
        originals = [(owner, name, vars(owner)[name]) for owner, name, _ in patches]
        for owner, name, value in patches:
            setattr(owner, name, value)
        try:
            yield
        finally:
            for owner, name, value in originals:
                setattr(owner, name, value)
            for (
                owner,
                attributes,
            ) in saved:  # the interpreter leaves parts of triton.language patched
                for name in set(vars(owner)) - set(attributes):
                    delattr(owner, name)
                for name, value in attributes.items():
                    if vars(owner)[name] is not value:
                        setattr(owner, name, value)

    def _launch(self, real_call, executor, args, kwargs):
        self.launch = _Launch(Op(executor.fn.__name__))
        try:
            result = real_call(executor, *args, **kwargs)
        finally:
            launch, self.launch = self.launch, None
            launch.progress.end()
        self.traffic.ops.append(launch.op)
        return result

    def _bind(self, real_args, executor, args, kwargs):
        host_args, host_kwargs = real_args(executor, args, kwargs)
        named = dict(zip(executor.arg_names, host_args, strict=False)) | host_kwargs
        for name, value in named.items():
            self.launch.bind(name, value)
        return host_args, host_kwargs

    def _autotuned(self, tuner, args, kwargs):
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        total, first = self.traffic, None
        configs = tuner.prune_configs(kwargs)
        for config in configs:
            self.traffic = Traffic()
            tuner.fn.run(*args, **kwargs | config.all_kwargs())
            first = first or self.traffic
            if self.traffic.ops != first.ops:
                raise CountError(
                    f"{tuner.base_fn.__name__}: its {len(configs)} autotuning configurations "
                    "differ in traffic"
                )
        self.traffic = total
        total.ops += first.ops
        total.accesses += first.accesses

    def access(self, kind, pointers, mask, itemsize):
        """Records one load or store of the program that is running."""
        from triton.runtime.interpreter import interpreter_builder

        program = tuple(interpreter_builder.grid_idx)
        grid = tuple(interpreter_builder.grid_dim)
        self.launch.progress.at(np.ravel_multi_index(program, grid), np.prod(grid))
        touched = np.asarray(pointers)[np.asarray(mask, dtype=bool)]
        self.launch.op.add(kind, int(touched.size), itemsize)
        for argument, addresses in self.launch.owners(kind, touched):
            if self.trace:
                offsets = tuple(int(offset) // itemsize for offset in addresses)
                self.traffic.accesses.append(Access(program, kind, argument, offsets))


class _Launch:
    """One kernel launch: its `Op` and where its arguments lie."""

    def __init__(self, op):
        self.op = op
        self.arguments = []  # name, address of the first byte and of the one past the last
        self.holds_pointers = False
        self.progress = Progress(f"{op.name}, program")

    def bind(self, name, value):
        if isinstance(value, tuple):
            for part in value:
                self.bind(name, part)
            return
        # A tensor descriptor, or a tensor seen in another dtype, stands for its base.
        tensor = getattr(value, "base", value)
        if not isinstance(tensor, torch.Tensor):
            return
        last = sum(
            (n - 1) * stride
            for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        size = (last + 1) * tensor.element_size() if tensor.numel() else 0
        self.arguments.append((name, tensor.data_ptr(), tensor.data_ptr() + size))
        self.holds_pointers |= tensor.dtype in (torch.int64, torch.uint64)

    def owners(self, kind, addresses):
        """Splits `addresses` by the argument they lie in, the first of several, as bytes from its first element."""
        addresses = addresses.astype(np.int64)
        left = np.ones(addresses.shape, dtype=bool)
        for name, start, end in self.arguments:
            inside = left & (addresses >= start) & (addresses < end)
            if inside.any():
                left &= ~inside
                yield name, addresses[inside] - start
        if left.any() and not self.holds_pointers:  # an int64 tensor may hold addresses
            verb = "reads" if kind == "read" else "writes"
            outside = f"{int(left.sum())} elements outside the tensors it was given"
            raise CountError(f"{self.op.name} {verb} {outside}")


class _Memory:
    """Stands for the interpreter's memory: reports each access to a meter, then makes it."""

    def __init__(self, real, meter):
        self._real, self._meter = real, meter

    def __getattr__(self, name):
        return getattr(self._real, name)

    def load(self, pointers, mask, other, dtype):
        self._meter.access("read", pointers, mask, np.dtype(dtype).itemsize)
        return self._real.load(pointers, mask, other, dtype)

    def store(self, pointers, value, mask):
        self._meter.access("written", pointers, mask, value.dtype.itemsize)
        return self._real.store(pointers, value, mask)

    def atomic_rmw(self, op, pointers, value, mask, semantics):
        for kind in ("read", "written"):
            self._meter.access(kind, pointers, mask, value.dtype.itemsize)
        return self._real.atomic_rmw(op, pointers, value, mask, semantics)

    def atomic_cas(self, pointers, expected, value, semantics):
        self._meter.access(
            "read", pointers, np.ones(pointers.shape, dtype=bool), value.dtype.itemsize
        )
        found = self._real.atomic_cas(pointers, expected, value, semantics)
        self._meter.access("written", pointers, found == expected, value.dtype.itemsize)
        return found


def _patch_tensor(real_patch, tensor, scope):
    real_patch(tensor, scope)
    # Triton 3.6 with NumPy 2.4 or later cannot use a scalar as a loop bound (triton-lang/triton issue 9171).
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))


def _language_objects():
    import triton.language as tl

    return [tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base]


def _elements(tensor):
    """The elements a tensor really holds: a dimension of stride 0 repeats the same ones."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= 1 if stride == 0 and size else size
    return elements


def _tensors(values):
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _operands(func, args, kwargs):
    """The tensors that `func` reads, and those arguments that it writes; (None, []) where it moves nothing."""
    name = func.overloadpacket.__name__
    known = func.namespace == "aten" and (
        name in _ALLOCATIONS | _ALIASES | _FILLS | _WHOLE
        or func.is_view
        or torch.Tag.inplace_view in func.tags
        or torch.Tag.pointwise in func.tags
        or name.removesuffix("_") in _WHOLE
    )
    operands = list(_tensors([*args, *kwargs.values()]))
    if not known or any(tensor.layout != torch.strided for tensor in operands):
        raise CountError(f"{func} is not an operation whose traffic is known")
    if (
        name in _ALLOCATIONS | _ALIASES
        or func.is_view
        or torch.Tag.inplace_view in func.tags
    ):
        return None, []
    read, written = [], []
    for position, spec in enumerate(func._schema.arguments):
        value = (
            args[position]
            if position < len(args) and not spec.kwarg_only
            else kwargs.get(spec.name)
        )
        tensors = list(_tensors([value]))
        writes = spec.alias_info is not None and spec.alias_info.is_write
        if writes:
            written += tensors
        if name in _FILLS or spec.is_out or (name == "copy_" and spec.name == "self"):
            continue
        read += tensors
    return read, written

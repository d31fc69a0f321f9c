"""Proofs of one line each: every function checks something and prints it as a sentence.

- `traffic` counts what a function reads and writes;
- `correct` judges its results against float64;
- `resources` compiles its kernels, for any GPU;
- `counters` compares what an experiment's hardware counters saw with the count;
- `exam` examines a function that a learner wrote. It prints nothing.

What does not hold is an AssertionError that says what was found, what was expected, and at which
shape. `fn` is any function of tensors that PyTorch operations and Triton kernels are made of, also
one that is defined in a notebook's cell.
"""

from __future__ import annotations

import functools
import inspect
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast
from unittest import mock

import torch
from torch import Tensor

from memtraffic import device, testing
from memtraffic.compile import capture_launches, compile_launches
from memtraffic.errors import AccessError, FormulaError
from memtraffic.gpus import Gpu
from memtraffic.kernels.softmax.definitions import SOFTMAX
from memtraffic.meters.counts import Counts, shape_text
from memtraffic.meters.polynomials import SYMBOLS, evaluate, parse
from memtraffic.names import import_path
from memtraffic.op import Op, find_op
from memtraffic.residency.resources import Resources
from memtraffic.tensors import MEMORY_LAYOUTS, SECTOR_BYTES
from memtraffic.triton_adapter.interpret import interpreter_cause
from memtraffic_book import units
from memtraffic_book.catalog import find_experiments
from memtraffic_book.recording import experiment
from memtraffic_book.text import claim

WIDTHS = (1, 2, 127, 128, 129, 781, 1000, 4096, 5000)
DTYPES = ("float32", "float16", "bfloat16")
ROWS, MANY_ROWS, HARD_ROW = 5, 67, 3  # of the matrices that are judged; the row with hard numbers
# What the first columns of one row hold.
HARD = {"1e30": (1e30, -1e30)} | {each: (float(each),) for each in ("-inf", "inf", "NaN")}

Function = Callable[..., Tensor]
Operation = str | Op | Callable[[Tensor], Tensor]


def traffic(
    fn: Callable[..., object],
    reads: str = "MN",
    writes: str = "MN",
    *,
    op: Operation = SOFTMAX,
    widths: Sequence[int] = (),
) -> None:
    """Counts what `fn` reads and writes at several shapes, and compares it with two formulas.

    >>> from memtraffic.kernels.softmax import naive
    >>> traffic(naive.softmax, reads="5MN + 2M", writes="3MN + 2M")
    ✓ Counted at 17 shapes: naive reads 5MN + 2M elements and writes 3MN + 2M.

    reads, writes: elements, for M rows and N columns. op: what makes the inputs; see `exam`.
    widths: numbers of columns to count at, in place of those of `memtraffic.formula`. A shape that
    `fn` refuses with a ValueError is left out, and the sentence says how many are.

    Raises AssertionError if `fn` moves another number of elements at any shape.
    """
    counts = _counted(fn, _operation(op), reads, writes, widths)
    others = f" It refuses {len(counts.refused)} other shapes." if counts.refused else ""
    claim(
        f"Counted at {len(counts.traffic)} shapes: {_name(fn)} reads {reads} elements and writes "
        f"{writes}.{others}",
        True,
    )


def correct(
    fn: Function,
    widths: Sequence[int] = WIDTHS,
    *,
    op: Operation = SOFTMAX,
    layouts: Sequence[str] = tuple(MEMORY_LAYOUTS),
    dtypes: Sequence[str] = DTYPES,
) -> None:
    """Judges the results of `fn` on hard inputs against float64, as `testing.assert_correct` does.

    >>> from memtraffic.kernels.softmax import fused
    >>> correct(fused.softmax, widths=(1, 64, 1024), layouts=["packed"])
    ✓ Correct on 10 inputs: fused agrees with float64 at 1, 64 and 1024 columns; in float32, float16
    and bfloat16; with 1e30, -inf, inf and NaN in a row.

    widths: numbers of columns. One of them stands for all in the inputs with 67 rows, with a row of
    hard numbers, and in each of `layouts` and `dtypes` after the first. Hard numbers are left out
    where the right result is infinite, or where `op` takes several inputs.

    Raises AssertionError for the first input whose result is wrong, or at which `fn` fails.
    """
    op = _operation(op)
    hard, judged = [], 0
    for label, inputs, numbers in _cases(op, widths, layouts, dtypes):
        _judge(fn, op, label, inputs)
        judged += 1
        hard += [numbers] if numbers else []
    on = [f"at {_list(widths)} columns"]
    if len(layouts) > 1:
        also = ", also transposed" if "transposed" in layouts else ""
        on.append(f"in {len(layouts)} memory layouts{also}")
    on.append(f"in {_list(dtypes)}")
    if hard:
        on.append(f"with {_list(hard)} in a row")
    claim(f"Correct on {judged} inputs: {_name(fn)} agrees with float64 {'; '.join(on)}.", True)


def exam(
    fn: Function,
    reads: str = "MN",
    writes: str = "MN",
    op: Operation = SOFTMAX,
    *,
    widths: Sequence[int] = (),
) -> bool:
    """Examines a function: what it moves, as `traffic` does, then its results, as `correct` does.

    The results are those of packed float32 matrices.

    It is the judge of an exercise: `check_exercise("1: a kernel", answer_1, prove.exam)`.

    >>> exam(lambda x: torch.softmax(x, dim=1))
    True
    >>> exam(lambda x: x.relu(), op="lambda x: torch.relu(x)")
    True
    >>> exam(lambda x: (x - x.amax(dim=1, keepdim=True)).softmax(dim=1))
    Traceback (most recent call last):
    AssertionError: memtraffic_book.prove.<lambda> reads 3MN + M, not MN: at 4 x 2, 28 elements,
    not 8
      by operation: amax 8, sub 12, _softmax 8
    memtraffic_book.prove.<lambda> writes 2MN + M, not MN: at 4 x 2, 20 elements, not 8
      by operation: amax 4, sub 8, _softmax 8

    op: an operation, its name, or a function of one matrix, which says in float64 what is right;
    also as text, such as "lambda x: torch.softmax(x / 2, dim=1)", which the page's own judge reads
    too. The other arguments are those of `traffic` and `correct`. Returns True.

    Raises AssertionError, with a reason that a learner can act on.
    """
    if not callable(fn):
        raise AssertionError(f"the answer is {fn!r}: a function of tensors is examined here")
    if type(fn).__module__.startswith("triton."):
        raise AssertionError("the answer is a kernel: give the function that launches it")
    op = _operation(op)
    _counted(fn, op, reads, writes, widths)
    for label, inputs, _ in _cases(op, widths or WIDTHS, ["packed"], ["float32"]):
        _judge(fn, op, label, inputs)
    return True


def resources(
    fn: Callable[..., object],
    x: Tensor,
    *,
    target: str | Sequence[str] = "sm_90",
    load_bits: int | None = None,
) -> None:
    """Compiles the kernels that `fn(x)` launches: none spills a register.

    >>> from memtraffic.kernels.softmax import fused
    >>> resources(fused.softmax, torch.empty(1, 4096, device=device.default()), load_bits=128)
    ✓ Compiled for sm_90: fused spills 0 bytes per thread and moves 128 bits per load.

    target: one GPU or several, such as "sm_90" or "MI300X"; none of them need be here.
    load_bits: what every load from global memory moves per thread. None is not compared.

    Raises AssertionError, which says what was found, and what `memtraffic.resources` raises: where
    there is no GPU, a kernel must be in a file, not in a cell.
    """
    targets = [target] if isinstance(target, str) else target
    testing.assert_resources(fn, (x,), target=targets, load_bits=load_bits)
    moves = "" if load_bits is None else f" and moves {load_bits} bits per load"
    said = f"{_name(fn)} spills 0 bytes per thread{moves}"
    claim(f"Compiled for {_list(targets)}: {said}.", True)


def counters(id: str, reads: str = "MN", writes: str = "MN", *, within: float = 0.01) -> None:
    """Compares what hardware counters saw the SMs and L2 exchange with formulas of the traffic.

    >>> counters("fused_counters", within=0)  # doctest: +SKIP
    Recorded on NVIDIA H200 (PyTorch 2.11.0+cu130, Triton 3.6.0).
    ✓ Measured at 4096 x 16384: fused reads 268.4 MB from L2, exactly the bytes of MN elements, and
    writes 268.4 MB to L2, exactly the bytes of MN elements.

    id: an experiment whose columns are those of `memtraffic.counters`, on a matrix of float32.
    reads, writes: elements.
    within: how far a measured number may be from its formula, relatively; at 0 it must be equal.

    Raises AssertionError with both numbers, and what `experiment` raises.
    """
    [subject] = find_experiments([id])
    (m, n), [name] = subject.arguments["shape"], subject.arguments["impls"]
    frame, parts = experiment(id), []
    ways = {
        "reads {} from L2": (reads, frame["l1_l2_read_bytes"].sum()),
        "writes {} to L2": (writes, SECTOR_BYTES * frame["l2_write_sectors"].sum()),
    }
    for way, (elements, found) in ways.items():
        counted = int(4 * evaluate(parse(elements, SYMBOLS), SYMBOLS, (m, n)))  # of float32
        if abs(found - counted) > within * counted:
            moved = way.format(f"{found:,} bytes")
            raise AssertionError(
                f"{name} {moved} at {m} x {n}, and {elements} elements are {counted:,} bytes"
            )
        share = "exactly" if within == 0 else f"{found / counted:.3f}x"
        size = way.format(units.format_bytes(found))
        parts.append(f"{size}, {share} the bytes of {elements} elements")
    claim(f"Measured at {m} x {n}: {name} {', and '.join(parts)}.", True)


# ---- what is counted


def _counted(
    fn: Callable[..., object], op: Op, reads: str, writes: str, widths: Sequence[int]
) -> Counts:
    """Counts what `fn` moves: these formulas must come of it.

    Raises AssertionError for whatever `fn` raises: it is the answer of a learner.
    """
    counts, shapes = Counts(fn, op), [(m, n) for n in widths for m in (2, 3, 5)]
    run = functools.partial(counts.run, shapes, (), testing.MIN_SHAPES) if widths else counts.run
    with testing.traffic_asserted(counts, [(reads, writes)]):
        try:
            with device.device_guard(op.arguments((2, 8)).positional[0]):
                run()
        except (AssertionError, AccessError, FormulaError):
            raise
        except Exception as error:
            raise _failure(fn, shape_text(counts.shape), error) from error
    return counts


# ---- what is judged


def _cases(
    op: Op, widths: Sequence[int], layouts: Sequence[str], dtypes: Sequence[str]
) -> Iterator[tuple[str, tuple[Tensor, ...], str]]:
    """(label, inputs, the hard numbers in them or "") of everything that is judged."""
    probe = 781 if 781 in widths else max(widths)
    even = max((n for n in widths if n % 2 == 0), default=probe)  # odd rows are `odd` when packed
    shapes = [(ROWS, n) for n in widths] + [(MANY_ROWS, probe)]
    layout, dtype = layouts[0], dtypes[0]
    wanted = [(shape, dtype, layout) for shape in shapes]
    wanted += [((ROWS, even), dtype, other) for other in layouts[1:]]
    wanted += [((ROWS, probe), other, layout) for other in dtypes[1:]]
    for shape, dtype_, layout_ in wanted:
        label = ", ".join([shape_text(shape), layout_, dtype_])
        yield label, op.arguments(shape, dtype_, layout_).positional, ""
    for name, numbers in HARD.items():
        first, *others = op.arguments((ROWS, probe), "float32", layout).positional
        head = first[HARD_ROW, : len(numbers)]
        head.copy_(torch.tensor(numbers[: len(head)]))
        if not others and not op.judged(first.double()).isinf().any():
            yield f"{shape_text((ROWS, probe))} with {name} in row {HARD_ROW}", (first,), name


def _judge(fn: Function, op: Op, label: str, inputs: tuple[Tensor, ...]) -> None:
    try:
        with device.device_guard(inputs[0]), testing.bounds_checked():
            testing.assert_correct(op, fn, *inputs)
    except Exception as error:
        cause = interpreter_cause(error)
        if isinstance(cause, AssertionError):
            raise AssertionError(f"{_name(fn)} is wrong at {label}: {cause}") from error
        raise _failure(fn, label, error) from error


def _failure(fn: Callable[..., object], label: str, error: Exception) -> AssertionError:
    cause = interpreter_cause(error)
    return AssertionError(f"{_name(fn)} fails at {label}: {type(cause).__name__}: {cause}")


# ---- words


def _operation(op: Operation) -> Op:
    """An operation as `exam` takes it."""
    if isinstance(op, str) and op.startswith("lambda"):
        op = cast("Function", eval(op, {"torch": torch}))
    name = getattr(op, "__name__", "operation")
    return find_op(op) if isinstance(op, (str, Op)) else Op(name, reference=op)


def _name(fn: Callable[..., object]) -> str:
    """What a sentence calls a function: a rung's name, or its own."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    try:
        name = import_path(fn).rpartition(":")[2]
    except LookupError:
        name = getattr(fn, "__name__", type(fn).__name__)
    return "the function" if "<" in name else name


def _list(parts: Sequence[object]) -> str:
    """Things as a sentence lists them.

    >>> _list([1, 2, 781])
    '1, 2 and 781'
    """
    *most, last = map(str, parts)
    return f"{', '.join(most)} and {last}" if most else last


def compiled_answer(fn: Function, x: Tensor, gpu: Gpu) -> Resources:
    """What the one kernel that a learner's function of `x` launches uses on a GPU.

    The kernels of its cells are copied into a file, from which any process can compile them.
    Raises AssertionError if `fn` launches another number of kernels.
    """
    launches, known = capture_launches(fn, x, gpu=gpu), fn.__globals__
    assert len(launches) == 1, f"the function launches {len(launches)} Triton kernels, not 1"
    kind = type(known[launches[0].qualname])
    sources = [inspect.getsource(it.fn) for it in known.values() if isinstance(it, kind)]
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(sys, "path", [*sys.path]):
        file = Path(folder, f"{Path(folder).name}.py")
        file.write_text("\n".join(["import triton, triton.language as tl", *sources]), "utf-8")
        sys.path.insert(0, folder)
        return compile_launches([(replace(launches[0], module=file.stem, function=None), gpu)])[0]

"""The same questions to every meter: what it takes, refuses, changes, leaves behind and repeats.

A new meter is one more line of METERS. What a meter finds is asked in the tests of its own.
"""

import os
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial

import kernels
import numpy as np
import pytest
import torch
from triton import language
from triton.compiler import CompiledKernel
from triton.language.extra import libdevice
from triton.runtime import autotuner, driver, interpreter, jit

import memtraffic
from memtraffic import benchmark, device
from memtraffic.compile import worker
from memtraffic.errors import MemtrafficError
from memtraffic.meters import counters as hardware
from memtraffic.meters.count import count
from memtraffic.meters.formula import formula
from memtraffic.names import import_function
from memtraffic.op import find_op
from memtraffic.tensors import matrix
from memtraffic.testing import assert_traffic
from memtraffic.torch_adapter import active_modes
from memtraffic.triton_adapter.capture import capturing

pytestmark = pytest.mark.usefixtures("timed", "quick")
FIT = [(1, 8), (2, 4), (3, 16), (4, 1), (5, 2), (6, 3)]
HELD_OUT = [(7, 5), (4, 8)]
AT = 4, 8


@pytest.fixture
def quick(monkeypatch):
    """Compiles a launch once for all questions, and counts in place of `ncu`."""

    def compiled_once(folders, job, *args):
        key = repr(args)
        if key not in COMPILED:
            COMPILED[key] = call(folders, job, *args)
        return COMPILED[key]

    def profile(code, job):
        inputs = find_op(job["inputs"]), job["shape"]
        moved = count(import_function(job["fn"]), *inputs, dtype=job["dtype"], layout=job["layout"])
        cells = ["Kernel Name", *hardware.METRICS.values()], [], [moved.read_bytes] * 8
        return "\n".join(",".join(f'"{cell}"' for cell in row or [""]) for row in cells)

    call = worker.WORKER.call
    monkeypatch.setattr(worker.WORKER, "call", compiled_once)
    monkeypatch.setattr(hardware, "profile", profile)


COMPILED = {}


SMALL = {"fit": FIT, "held_out": HELD_OUT}


def ask_formula(fn, inputs=None, shape=AT, **options):
    if shape != AT:
        return formula(fn, inputs, fit=[shape], **options)
    found = formula(fn, inputs, **options, **(SMALL if find_op(inputs).sizes else {}))
    at = shape if found.symbols else ()
    passes = [found, found.backward] if found.backward else [found]
    return [(each.elements(*at), each.bytes(*at)) for each in passes]


def ask_traffic(fn, inputs=None, shape=AT, *, dtype="float32", backward=False):
    one, two = ("MN", "2MN") if find_op(inputs).sizes else ("32", "64")
    options = {"backward": (two, one)} if backward else {}
    options |= SMALL if find_op(inputs).sizes else {}
    assert_traffic(fn, one, one, inputs, dtype=dtype, **options)
    return "as it should be"


def ask_counters(*args, **options):
    return rows(memtraffic.counters(*args, **options))


def ask_bench(fn, inputs=None, shape=None, **options):
    return rows(benchmark.bench({"fn": fn}, inputs, [() if shape is None else shape], **options))


def rows(frame):
    sizes = [name for name in ("m", "n") if name in frame]
    return frame.drop(columns=sizes).to_dict("records")


@dataclass(frozen=True)
class Meter:
    """A meter under contract.

    ask: of a function, inputs, a shape and options; what it returns can be compared. takes: its
    options, with spaces between them. shaped: it is asked at one shape, which it needs. elsewhere:
    another process calls the function, so that it and the inputs need names.
    """

    name: str
    ask: Callable
    takes: str
    shaped: bool = True
    elsewhere: bool = False

    def __str__(self):
        return self.name


METERS = [
    Meter("count", count, "dtype layout backward"),
    Meter("formula", ask_formula, "dtype backward", shaped=False),
    Meter("assert_traffic", ask_traffic, "dtype backward", shaped=False),
    Meter("counters", ask_counters, "dtype layout", elsewhere=True),
    Meter("bench", ask_bench, "dtype layout"),
    Meter("sectors", memtraffic.sectors, "dtype layout target"),
    *(
        Meter(it.__name__, partial(it, target="sm_90"), "dtype layout target")
        for it in (memtraffic.resources, memtraffic.occupancy)
    ),
]
each = pytest.mark.parametrize("it", METERS, ids=str)


def those(condition):
    return pytest.mark.parametrize("it", [it for it in METERS if condition(it)], ids=str)


def masked(x):
    return kernels.masked(x)


@cache
def expected(it):
    """What the meter finds of `masked`, a copy by one kernel."""
    return it.ask(masked, "M,N", AT)


def x():
    return matrix(*AT)


# ---- what it takes


class Layer(torch.nn.Module):
    def forward(self, x):
        return kernels.masked(x)


def second(_, x):
    return kernels.masked(x)


KINDS = {  # of a call, and what a meter raises for it that has another process call the function
    "module-class": ((Layer, "M,N", AT), None),
    "autograd-function": ((kernels.Copy, "M,N", AT), None),
    "default": ((masked, None, AT), None),
    "op": ((masked, find_op("softmax"), AT), None),
    "function": ((masked, matrix, AT), None),
    "numbers": ((masked, "4,8"), None),
    "module": ((Layer(), "M,N", AT), LookupError),
    "partial": ((partial(second, None), "M,N", AT), LookupError),
    "tuple": ((masked, (x(),)), TypeError),
    "keywords": ((masked, {"x": x()}), TypeError),
}


@each
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_function_and_inputs_gives_the_same(it, kind):
    call, error = KINDS[kind]
    if it.elsewhere and error:
        with pytest.raises(error, match=r"another process (makes the|can)|Layer\(\)"):
            it.ask(*call)
        return
    assert it.ask(*call) == expected(it)


@each
def test_dtype_is_that_of_the_tensors(it):
    """What the caller says is what a specification that names it says."""
    found = it.ask(masked, "M,N", AT, dtype="bfloat16")
    named = it.ask(masked, "M,N:bf16", AT)
    if it.name == "bench":  # it has a column for what the caller says
        assert found[0]["gb_per_s"] == named[0]["gb_per_s"] == expected(it)[0]["gb_per_s"] / 2
    else:
        assert found == named
        assert found != expected(it) or it.name in ("assert_traffic", "occupancy")


@those(lambda it: "layout" in it.takes and not it.elsewhere)
def test_layout_is_that_of_the_matrices(it):
    seen = []

    def fn(x):
        seen.append(x.stride())
        return kernels.masked(x)

    it.ask(fn, "M,N", AT, layout="every other")
    assert set(seen) == {(16, 2)}


# ---- what it refuses


async def later(x):
    return x


CALL = {"fn": masked, "inputs": "M,N", "shape": AT}
BAD = {
    "number-for-fn": ({"fn": 7}, TypeError, "int"),
    "coroutine": ({"fn": later}, TypeError, "later"),
    "class": ({"fn": torch.Tensor}, TypeError, "Tensor"),
    "kernel": ({"fn": kernels._masked_kernel}, TypeError, "^_masked_kernel is a Triton kernel"),
    "generator": ({"fn": lambda x: (y for y in x)}, (TypeError, MemtrafficError), "generator"),
    "lower-case": ({"inputs": "M,n"}, ValueError, "inputs: 'M,n'"),
    "unknown-op": ({"inputs": "sofmax"}, LookupError, "sofmax"),
    "array-for-inputs": ({"inputs": np.ones((99, 99))}, TypeError, r"inputs: .*not array\(.{,40}$"),
    "short": ({"shape": (4,)}, ValueError, r"a shape is M, N, not \(4,\)"),
    "number-for-shape": ({"shape": 8}, ValueError, "shape"),
    "tensor-for-shape": ({"shape": torch.ones(4, 8)}, ValueError, "several inputs are a tuple"),
    "text-for-shape": ({"shape": "48"}, ValueError, "not of type str"),
    "no-shape": ({"shape": None}, ValueError, "shape"),
    "shape-of-tensors": ({"inputs": [torch.ones(4, 8)]}, (ValueError, TypeError), "shape|inputs"),
    "negative": ({"shape": (4, -8)}, ValueError, "N=-8"),
    "text": ({"shape": ("a", "b")}, ValueError, "N=b"),
    "dtype": ({"dtype": "float31"}, ValueError, "float31"),
    "layout": ({"layout": "od"}, LookupError, "'od'"),
    "target": ({"target": "sm_91"}, LookupError, "'sm_91'"),
}


def asked(it, case):
    """Not of an option that it lacks; nor of what it never sees, or does not look at."""
    if case in ("no-shape", "shape-of-tensors", "negative", "text") and not it.shaped:
        return False  # it chooses shapes, and leaves out what is refused
    if case == "generator" and it.name in ("bench", "counters"):
        return False
    if "shape" in BAD[case][0] and it.name == "assert_traffic":
        return False  # as of `formula`
    return set(BAD[case][0]) <= {"fn", "inputs", "shape", *it.takes.split()}


@pytest.mark.parametrize(
    ("it", "case"),
    [pytest.param(it, case, id=f"{case}-{it}") for case in BAD for it in METERS if asked(it, case)],
)
def test_bad_call_is_refused_by_name(it, case):
    changed, error, message = BAD[case]
    with pytest.raises(error, match=message):
        it.ask(**CALL | changed)


# ---- what it changes


@those(lambda it: not it.elsewhere)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_inputs_are_as_they_were(it, requires_grad):
    given = x().requires_grad_(requires_grad)
    values, version = given.detach().clone(), given._version
    it.ask(kernels.Copy, given, **every_pass(it))
    assert torch.equal(given, values)
    assert (given.requires_grad, given.grad, given._version) == (requires_grad, None, version)


def every_pass(it):
    return {"backward": True} if "backward" in it.takes else {}


def parts():
    """What a meter may replace for a while, by name, and what it may set."""
    owners = (
        torch, torch.Tensor, torch.cuda, torch.autograd, torch.jit.ScriptFunction,
        threading.Thread, jit.JITFunction, CompiledKernel, autotuner.Autotuner, driver, interpreter,
        interpreter.InterpretedFunction, interpreter.InterpreterBuilder,
        interpreter.FunctionRewriter, language, language.core, language.math, language.tensor,
        language.dtype, libdevice,
    )  # fmt: skip
    found = {
        f"{getattr(owner, '__name__', owner)}.{name}": value
        for owner in owners
        for name, value in vars(owner).items()
    }
    settings = {
        "modes": active_modes(), "grad": torch.is_grad_enabled(), "numpy": np.geterr(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": threading.active_count(), "path": list(sys.path), "stdout": sys.stdout,
        "environment": dict(os.environ), "folder": os.getcwd(), "warnings": list(warnings.filters),
        "random": torch.get_rng_state().tolist(), "standing in": device.is_standing_in(),
        "capturing": device.capture() is not None,
    }  # fmt: skip
    return found, settings


AS_WRITTEN = dict(vars(kernels))  # before any meter prepared it for the interpreter


class Failing(kernels.Copy):
    @staticmethod
    def forward(ctx, x):
        kernels.masked(x)
        raise ZeroDivisionError


@each
@pytest.mark.parametrize("fn", [kernels.Copy, Failing])
def test_nothing_is_left_behind(it, fn):
    options = every_pass(it)

    def ask():
        with pytest.raises(ZeroDivisionError) if fn is Failing else nullcontext():
            it.ask(fn, "M,N", AT, **options)

    ask()  # which imports what it needs
    (before, settings), _, (after, set_to) = parts(), ask(), parts()
    replaced = [name for name in before | after if before.get(name) is not after.get(name)]
    assert (replaced, set_to) == ([], settings)
    assert [name for name, value in AS_WRITTEN.items() if vars(kernels)[name] is not value] == []


# ---- when and where it is asked


def test_meters_in_threads_take_turns():
    at_once = [it for it in METERS if it.name != "bench"]
    with ThreadPoolExecutor(len(at_once)) as pool:
        found = list(pool.map(lambda it: it.ask(masked, "M,N", AT), at_once))
    assert found == [expected(it) for it in at_once]


def test_meter_that_waits_for_a_capture_sees_what_is_launched_after_it():
    found, captured = {}, []
    thread = threading.Thread(target=lambda: found.update(count=count(masked, "M,N", AT)))
    with capturing(lambda *launch: captured.append(launch)):
        thread.start()
        thread.join(0.3)  # it has come to the lock
        assert thread.is_alive()
    thread.join()
    assert found["count"].read_elements == 32 and captured == []


@each
def test_answer_is_the_same_whatever_the_caller_does_with_gradients(it):
    options = every_pass(it)
    outside = it.ask(kernels.Copy, "M,N", AT, **options)
    with torch.inference_mode():
        assert it.ask(kernels.Copy, "M,N", AT, **options) == outside

import json
import os
import subprocess
import sys

import pytest
import torch

from memtraffic import machine
from memtraffic.traffic.count import CountError, Op, count

pytest.importorskip("triton", reason="Triton is not installed")

import kernels

deprecated = pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")


def matrix(m=3, n=12, dtype=torch.float32):
    return (
        torch.arange(m * n, dtype=torch.float32)
        .reshape(m, n)
        .to(machine.device(), dtype)
    )


def moved(fn, *tensors):
    """The elements that `fn(*tensors)` reads and writes."""
    traffic = count(fn, *tensors)
    return traffic.read_elements, traffic.written_elements


# ---- PyTorch operations


@pytest.mark.parametrize(
    ("fn", "reads", "writes"),
    [
        pytest.param(lambda x: x.exp(), 36, 36, id="elementwise"),
        pytest.param(lambda x: x + 1, 36, 36, id="python-scalar"),
        pytest.param(lambda x: x + x, 72, 36, id="same-operand-twice"),
        pytest.param(lambda x: x - x[:, :1], 39, 36, id="broadcast-operand-read-once"),
        pytest.param(
            lambda x: x - x[:, :1].expand_as(x), 39, 36, id="expanded-operand-read-once"
        ),
        pytest.param(lambda x: x.sum(), 36, 1, id="reduction"),
        pytest.param(lambda x: x.sum(dim=1), 36, 3, id="row-reduction"),
        pytest.param(lambda x: x.max(dim=1), 36, 6, id="maximum-and-index"),
        pytest.param(lambda x: x.topk(2, dim=1), 36, 12, id="topk"),
        pytest.param(lambda x: torch.softmax(x, dim=1), 36, 36, id="library-softmax"),
        pytest.param(lambda x: x.T[2:].reshape(-1, 3)[None], 0, 0, id="views"),
        pytest.param(lambda x: x.T.contiguous(), 36, 36, id="copy-of-a-view"),
        pytest.param(lambda x: x.contiguous(), 0, 0, id="copy-of-nothing"),
        pytest.param(torch.empty_like, 0, 0, id="allocation"),
        pytest.param(torch.zeros_like, 0, 36, id="fill"),
        pytest.param(lambda x: torch.ones(5), 0, 5, id="fill-without-operand"),
        pytest.param(lambda x: x.mul_(2), 36, 36, id="in-place"),
        pytest.param(lambda x: x.zero_(), 0, 36, id="in-place-fill"),
        pytest.param(lambda x: x.copy_(x.clone()), 72, 72, id="in-place-copy"),
        pytest.param(lambda x: x[0].add_(x[1]), 24, 12, id="in-place-on-a-view"),
        pytest.param(lambda x: x.unsqueeze_(0), 0, 0, id="in-place-view"),
        pytest.param(lambda x: torch.exp(x, out=torch.empty_like(x)), 36, 36, id="out"),
        pytest.param(lambda x: torch.cat([x, x[:1]]), 48, 48, id="list-of-operands"),
        pytest.param(lambda x: x.half(), 36, 36, id="cast"),
        pytest.param(lambda x: x @ x.T, 72, 9, id="matrix-product"),
        pytest.param(lambda x: x[:0].exp(), 0, 0, id="no-rows"),
        pytest.param(lambda x: x.sum().item(), 37, 1, id="to-python"),
    ],
)
def test_torch_operations(fn, reads, writes):
    assert moved(fn, matrix()) == (reads, writes)


def test_bytes_follow_the_dtype():
    [op] = count(lambda x: x.max(dim=1), matrix(dtype=torch.float16)).ops
    assert op == Op("max", 36, 6, 36 * 2, 3 * 2 + 3 * 8)
    [op] = count(lambda x: x.half(), matrix()).ops
    assert (op.read_bytes, op.written_bytes) == (36 * 4, 36 * 2)


def test_operations_are_listed_in_order():
    traffic = count(kernels.mixed, matrix())
    assert [op.name for op in traffic.ops] == ["exp", "_masked_kernel", "sum"]
    assert str(traffic) == "reads 108 elements, writes 75 elements, in 3 operations"
    assert traffic.accesses == []


def test_several_tensors_and_no_tensor():
    assert moved(lambda x, y: x + y, matrix(), matrix()) == (72, 36)
    assert moved(lambda: torch.ones(4).exp()) == (4, 8)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        pytest.param(
            lambda x: x[torch.tensor([0, 2], device=x.device)],
            "aten.index.Tensor",
            id="gather",
        ),
        pytest.param(lambda x: torch.fft.fft(x), "aten._fft", id="fft"),
        pytest.param(lambda x: x.nonzero(), "aten.nonzero", id="data-dependent"),
        pytest.param(
            lambda x: x.to_sparse().sum(),
            "is not an operation whose traffic is known",
            id="sparse",
        ),
    ],
)
def test_an_unknown_operation_is_named(fn, message):
    with pytest.raises(CountError, match=message):
        count(fn, matrix())


def test_a_compiled_function_hides_its_kernels():
    with pytest.raises(CountError, match=r"made by torch.compile hides its kernels"):
        count(torch.compile(torch.exp, backend="eager"), matrix())


# ---- Triton kernels


@deprecated
@pytest.mark.parametrize(
    "shape",
    [(3, 16), (5, 12), (1, 4)],
    ids=["power-of-two", "partial-block", "smallest"],
)
@pytest.mark.parametrize("name", kernels.KNOWN)
def test_known_kernels(name, shape):
    fn, expected = kernels.KNOWN[name]
    assert moved(fn, matrix(*shape)) == expected(*shape)


def test_counting_runs_the_function():
    found = []
    count(lambda x: found.append(kernels.three_passes(x)), matrix())
    assert torch.allclose(found[0], torch.softmax(matrix(), dim=1))


def test_bytes_of_a_kernel_follow_the_dtype():
    [op] = count(kernels.twice, matrix(dtype=torch.bfloat16)).ops
    assert op == Op("_twice_kernel", 72, 36, 144, 72)


def test_no_access_for_a_lane_that_is_masked():
    assert moved(kernels.shortened_store, matrix(3, 12)) == (36, 33)
    assert moved(kernels.skipped_row, matrix(3, 12)) == (24, 24)


def test_a_trace_names_program_argument_and_elements():
    traffic = count(kernels.masked, matrix(2, 3), trace=True)
    assert [(a.program, a.kind, a.argument, a.offsets) for a in traffic.accesses] == [
        ((0, 0, 0), "read", "x_ptr", (0, 1, 2)),
        ((0, 0, 0), "written", "y_ptr", (0, 1, 2)),
        ((1, 0, 0), "read", "x_ptr", (3, 4, 5)),
        ((1, 0, 0), "written", "y_ptr", (3, 4, 5)),
    ]


def test_a_trace_counts_from_the_first_element_of_a_view():
    traffic = count(kernels.masked, matrix(4, 3)[2:], trace=True)
    assert [access.offsets for access in traffic.accesses if access.kind == "read"] == [
        (0, 1, 2),
        (3, 4, 5),
    ]


def test_a_trace_of_a_lock_shows_who_took_it():
    traffic = count(kernels.atomic_cas, matrix(2, 4), trace=True)
    assert [(access.program[0], access.kind) for access in traffic.accesses] == [
        (0, "read"),
        (0, "written"),
        (1, "read"),
    ]


def test_a_kernel_that_leaves_its_tensors():
    with pytest.raises(
        CountError,
        match=r"^_unmasked_kernel reads 4 elements outside the tensors it was given$",
    ):
        count(kernels.dropped_mask, matrix(5, 12))
    with pytest.raises(
        CountError,
        match=r"^_unmasked_kernel reads 16 elements outside the tensors it was given$",
    ):
        count(kernels.over_reads, matrix(1, 16))


def test_autotuning_that_changes_the_traffic():
    with pytest.raises(
        CountError,
        match=r"_masked_kernel: its 2 autotuning configurations differ in traffic",
    ):
        count(kernels.differing, matrix())


def test_what_a_function_raises_is_passed_on_and_nothing_stays_behind():
    with pytest.raises(TypeError, match=r"cannot take"):
        count(kernels.raises, matrix())
    with pytest.raises(CountError):
        count(kernels.dropped_mask, matrix(5, 12))
    assert moved(kernels.mixed, matrix()) == (108, 75)


def test_counts_do_not_see_the_outside():
    x = matrix()
    first = count(kernels.masked, x)
    x.exp()
    kernels.masked(x)
    assert len(first.ops) == 1


def test_a_kernel_runs_as_before_once_it_was_counted():
    x = matrix()
    before = kernels.three_passes(x)
    count(kernels.three_passes, x)
    assert torch.equal(kernels.three_passes(x), before)


COMPILING = """
import json, sys, warnings
import torch
import triton.language as tl
import triton.runtime.interpreter
from memtraffic import machine
from memtraffic.targets import resources
from memtraffic.traffic.count import count
import kernels

assert not machine.INTERPRETED
warnings.filterwarnings("ignore", "tl.make_block_ptr is deprecated")
x = torch.arange(60, dtype=torch.float32).reshape(5, 12).to(machine.device())
language = [tl, tl.core, tl.math, tl.tensor, tl.dtype]
before = [dict(vars(part)) for part in language]
found = {}
for name, (fn, _) in kernels.KNOWN.items():
    traffic = count(fn, x)
    found[name] = [traffic.read_elements, traffic.written_elements]
try:
    count(kernels.dropped_mask, x)
except Exception as error:
    found["error"] = type(error).__name__
assert [dict(vars(part)) for part in language] == before
[kernel] = resources(kernels.strided, "sm_90", torch.empty(1, 4096, device=machine.device()))
found["bits"] = list(kernel.load_bits)
print(json.dumps(found))
"""


def test_a_process_that_compiles_kernels_counts_the_same_and_can_still_compile():
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPILING],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    known = {
        name: list(expected(5, 12)) for name, (_, expected) in kernels.KNOWN.items()
    }
    assert found == known | {"error": "CountError", "bits": [128]}


def test_a_scripted_function_is_refused():
    class Scripted(torch.jit.ScriptModule):
        """What torch.jit.script would return for a module; the call itself is deprecated."""

    with pytest.raises(CountError, match=r"torch\.jit\.script hides its kernels"):
        count(Scripted.__new__(Scripted), torch.ones(2, 3))

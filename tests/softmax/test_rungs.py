"""What holds for every rung of the ladder."""

import functools
import re
import subprocess
import sys

import kernels
import pytest
import torch

from memtraffic import runtime
from memtraffic.compile import resources
from memtraffic.errors import CountError
from memtraffic.kernels.softmax import masked, online, persistent, split, tiled
from memtraffic.meters.count import count
from memtraffic.meters.formula import formula
from memtraffic.names import RUNGS, import_function, import_path
from memtraffic.tensors import matrix
from memtraffic.testing import assert_softmax, assert_touches_once

DEVICE = runtime.device()


@pytest.fixture(params=RUNGS)
def softmax(request):
    """The softmax of each rung."""
    return import_function(request.param)


def test_rungs_are_in_the_order_of_the_book():
    assert list(RUNGS) == [*("naive", "fused", "masked", "tiled", "persistent", "online", "split")]
    assert [import_path(import_function(name)) for name in RUNGS] == list(RUNGS)


def test_rungs_load_no_compiler_for_other_gpus():
    """Its worker process would be ended by a hook, and each fork of the reader's watched."""
    script = "import sys; from memtraffic.kernels.softmax import persistent, split, op; " + (
        "sys.exit(str([name for name in sys.modules if 'memtraffic.compile' in name] or 0))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr.strip() == "0", done.stderr


# ---- what the rungs move


def test_formula_is_that_of_the_docstring(softmax):
    docstring = sys.modules[softmax.__module__].__doc__
    [traffic] = re.findall(r"Traffic: (reads .*?, writes .*?)\.\s", docstring)
    one_program = [(9, 8), (4, 2), (2, 700)]  # a row; of longer ones, split takes several
    assert str(formula(softmax, held_out=one_program)) == traffic


def assert_moves_least(softmax, x):
    """Each element of `x` is read once, each of the result written once, and nothing else."""
    result = []
    traffic = count(lambda x: result.append(softmax(x)), x, trace=True)
    assert_touches_once(traffic, "x_ptr", x)
    assert_touches_once(traffic, "y_ptr", result[0])
    assert (traffic.read_elements, traffic.written_elements) == (x.numel(), x.numel())
    assert len(traffic.ops) == 1


@pytest.mark.parametrize(
    "name",
    ["dropped_mask", "shortened_store", "skipped_row", "twice", "three_passes", "tuned"],
)
def test_assert_touches_once_finds_a_fault(name):
    assert_moves_least(kernels.masked, matrix(5, 12))
    with pytest.raises((AssertionError, CountError)):
        assert_moves_least(getattr(kernels, name), matrix(5, 12))


# ---- every launcher with an `out`

LAUNCHERS = {
    "masked": masked.softmax,
    "two-blocks": masked.softmax_two_blocks,
    "tiled": tiled.softmax,
    "persistent": persistent.softmax,
    "online": online.softmax,
    "split": split.softmax,
    "split-in-two": functools.partial(split.softmax, block=512, chunks=1),
}
EACH = pytest.mark.parametrize("fn", LAUNCHERS.values(), ids=LAUNCHERS)


@EACH
@pytest.mark.parametrize("n", [5, 6, 13])
def test_softmax_where_rows_of_both_end_between_vectors(fn, n):
    x, out = matrix(5, 16)[:, :n], torch.empty(5, 16, device=DEVICE)
    assert_softmax(lambda x: fn(x, out[:, :n]), x)


@EACH
def test_softmax_into_an_out_that_autograd_has_saved(fn):
    x = matrix(3, 4).requires_grad_()
    out = x.exp()  # its gradient is computed from its result
    with torch.no_grad():
        fn(out, out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.slow
@EACH
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_softmax_compiles_without_spills(fn, name):
    n_cols = 100_003 if fn is split.softmax else 781  # it plans for long rows
    [kernel] = resources(fn, matrix(2, n_cols, name), target="sm_90")
    assert kernel.spill_bytes == 0

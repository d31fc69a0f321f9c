"""The proofs of one line: what they accept, what they refuse, and what they say."""

import dataclasses
import functools

import kernels
import pytest
import torch
from cases import cases

from memtraffic import device
from memtraffic.benchmark.baselines import torch_softmax as pytorch
from memtraffic.gpus import find_gpu
from memtraffic.kernels.softmax import fused, masked, naive, online
from memtraffic.kernels.softmax.definitions import SOFTMAX_BACKWARD, backward_reference
from memtraffic.meters.formula import formula
from memtraffic_book import exhibits, prove, yours

pytestmark = pytest.mark.slow  # together they take half as long as all quick tests


def wrong_where(wrong, spoil=torch.zeros_like):
    """A softmax that is spoiled for some inputs."""

    def fn(x):
        return spoil(x) if wrong(x) else pytorch(x)

    return fn


def finite(x):
    return pytorch(x.nan_to_num(neginf=0))


def without_maximum(x):
    numerator = x.exp()
    return numerator / numerator.sum(dim=1, keepdim=True)


def only_powers_of_two(x):
    if x.shape[1] & (x.shape[1] - 1):
        raise ValueError(f"{x.shape[1]} columns")
    return pytorch(x)


def refuses_all(x):
    raise ValueError("not today")


# ---- exam


@cases(
    ("fn", "options"),
    {
        "kernel": (masked.softmax, {}),
        "what-is-asked": (online.softmax, {"reads": "2MN", "widths": (3, 781)}),
        "other-order": (naive.softmax, {"reads": "2M+5MN", "writes": "3MN+2M"}),
        "widths": (only_powers_of_two, {"widths": (1, 4, 64, 256)}),
        "infinite-result": (lambda x: x.exp(), {"op": torch.exp}),
    },
)
def test_exam_accepts(fn, options):
    assert prove.exam(fn, **options) is True


def test_exam_of_another_operation():
    moved = formula(backward_reference, SOFTMAX_BACKWARD).text.removeprefix("reads ")
    exam = functools.partial(prove.exam, backward_reference, *moved.split(", writes "))
    assert exam(op="softmax_backward", widths=(128, 781))
    other = dataclasses.replace(SOFTMAX_BACKWARD, reference=lambda y, dy: y * dy)
    with pytest.raises(AssertionError, match="backward_reference is wrong at 5 x 128,"):
        exam(op=other, widths=(128, 781))


@cases(
    ("fn", "reason"),
    {
        "reads-twice": (online.softmax, r"reads 2MN, not MN: at 4 x 2, 16 elements, not 8\n"),
        "drops-the-mask": (kernels.dropped_mask, r"dropped_mask is wrong at 3 x 5: .*_kernel"),
        "skips-a-row": (
            lambda x: pytorch(x[: max(3, len(x) - 1)]),
            r"writes MN - N at all but 7 of 25 .*: at 4 x 2, 6 elements, not 8",
        ),
        "operations": (naive.softmax, r"reads 5MN \+ 2M, not MN: .*\n.*: amax 8, sub 12,"),
        "error": (lambda x: x.exp() and None, r"^the function fails at 2 x 8: Runt"),
        "no-sum": (lambda x: x.exp(), r"is wrong at 5 x 1, packed, float32: 5 of 5"),
        "refuses-widths": (only_powers_of_two, r"^only.* fails at 5 x 127, .*: 127 columns"),
        "refuses": (refuses_all, "refuses every shape, 2 x 8 with: not today"),
        "a-kernel": (exhibits._no_other_kernel, "is a kernel: give the function that launches it"),
        "number": (5, "the answer is 5: a function"),
    },
)
def test_exam_refuses(fn, reason):
    with pytest.raises(AssertionError, match=reason):
        prove.exam(fn)


# ---- correct


@cases(
    ("fn", "where"),
    {
        "1e30": (without_maximum, "with 1e30 in row 3"),
        "-inf": (wrong_where(lambda x: x.isneginf().any(), finite), "with -inf in row 3"),
        "inf": (wrong_where(lambda x: x.isposinf().any(), finite), "with inf in row 3"),
        "nan": (wrong_where(lambda x: x.isnan().any(), finite), "with NaN in row 3"),
        "many-rows": (wrong_where(lambda x: x.shape == (67, 781)), "at 67 x 781,"),
        "one-width": (wrong_where(lambda x: x.shape[1] == 129), "at 5 x 129,"),
        "layout": (wrong_where(lambda x: x.stride() == (1, 5)), "5000, transposed"),
        "dtype": (
            wrong_where(lambda x: x.dtype == torch.bfloat16, lambda x: pytorch(x.float())),
            "at 5 x 781, packed, bfloat16: dtype torch.float32",
        ),
    },
)
def test_correct_refuses(fn, where, capsys):
    with pytest.raises(AssertionError, match=f"is wrong .*{where}"):
        prove.correct(fn)
    assert not capsys.readouterr().out


@pytest.mark.skipif(not device.INTERPRETED, reason="a GPU reads on")
def test_correct_refuses_what_reads_outside():
    with pytest.raises(AssertionError, match=r"at 5 x 127.*_kernel reads 1 elem"):
        prove.correct(kernels.dropped_mask, op=torch.clone)


# ---- resources


def test_resources_says_what_was_compiled(capsys):
    x = torch.empty(1, 4096, device=device.default())
    prove.resources(fused.softmax, x, target=("sm_90", "gfx942"), load_bits=128)
    assert capsys.readouterr().out == (
        "✓ Compiled for sm_90 and gfx942: fused spills 0 bytes per thread and moves 128 bits per "
        "load.\n"
    )
    with pytest.raises(AssertionError, match=r"not for sm_90: .* Found: _softmax_fused_ker"):
        prove.resources(fused.softmax, x, load_bits=64)
    with pytest.raises(AssertionError, match="spill"):
        wide = x.new_empty(32, 32768)
        prove.resources(lambda x: yours.rms_norm_loop(x, x[0]), wide)


# ---- counters


@cases(
    ("options", "reason"),
    {
        "reads": ({"reads": "2MN"}, r"fused reads \S+ bytes from L2 at 4096 x 16384, and 2MN elem"),
        "writes": ({"writes": "2MN"}, r"fused writes 268,435,456 bytes to L2 .* 536,870,912 bytes"),
        "exactly": ({"reads": "MN + M", "within": 0}, r"MN \+ M elements are 268,451,840 bytes"),
    },
)
def test_counters_refuses(options, reason, capsys):
    prove.counters("fused_counters", "MN + M", "MN - M", within=1e-4)
    assert "from L2, 1.000x the bytes of MN + M elements, and writes" in capsys.readouterr().out
    with pytest.raises(AssertionError, match=reason):
        prove.counters("fused_counters", **options)
    assert "✓" not in capsys.readouterr().out


def test_compiled_answer_is_of_the_one_kernel_that_is_launched():
    gpu, softmax = find_gpu("H200"), exhibits.softmax_no_other
    kernel = prove.compiled_answer(softmax, torch.empty(4, 1024), gpu)
    assert (kernel.target, kernel.num_warps) == ("sm_90", 4) and kernel.registers > 0
    assert prove.compiled_answer(softmax, torch.empty(4, 32768), gpu).registers > kernel.registers
    with pytest.raises(AssertionError, match="launches 2 Triton kernels, not 1"):
        prove.compiled_answer(lambda x: softmax(softmax(x)), torch.empty(4, 64), gpu)


@pytest.mark.gpu
def test_proofs_on_a_gpu():
    assert prove.exam(masked.softmax)
    with pytest.raises(AssertionError, match="NaN in"):
        prove.correct(torch.empty_like)

"""What the folded cells of `book/your-kernel.ipynb` say, and the judges of its exercises."""

import pytest
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton is not installed")

from memtraffic_book import yours
from memtraffic_book.chapters import your_kernel as page


@pytest.mark.slow
def test_keep_reads_refuses_another_kernel():
    page.keep_reads(yours.rms_norm)
    with pytest.raises(AssertionError, match=r"3\.00 times"):
        page.keep_reads(lambda x, w: yours.rms_norm(x.clone(), w))


def test_judges_refuse_what_reads_too_much():
    def two_reads(x, w):
        return F.layer_norm(x, x.shape[1:], eps=1e-6) * w

    with pytest.raises(AssertionError):
        page.judge_layer_norm(two_reads)
    with pytest.raises(AssertionError):
        page.judge_add_and_norm(lambda x, r, w: (x + r, yours.rms_norm(x + r, w)))


@pytest.mark.slow
def test_judge_of_spills_wants_the_loop_where_it_fits():
    def answer(x, w):
        return yours.rms_norm(x, w) if x.shape[1] > 16384 else yours.rms_norm_loop(x, w)

    assert page.judge_spills(answer)
    with pytest.raises(AssertionError, match="_rms_norm_kernel"):
        page.judge_spills(yours.rms_norm)


def test_judge_of_padding_counts_what_is_read():
    def reads_all(x, target):
        loss = F.cross_entropy(x, target, reduction="none")
        return loss, page._padded_gradient(x, target)

    with pytest.raises(AssertionError, match="rows to read"):
        page.judge_padding(reads_all)

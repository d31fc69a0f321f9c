"""What the folded cells of `book/cdna.ipynb` do, on kernels where a claim is false, too."""

from dataclasses import replace

import pytest
import torch

from memtraffic import resources
from memtraffic.kernels.softmax import tiled
from memtraffic_book import exhibits
from memtraffic_book.chapters import cdna

pytestmark = pytest.mark.slow  # it compiles


@pytest.fixture(scope="module")
def kernels():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cdna, "glue", lambda name, value: None)
        return cdna.compile_kernels()


def test_hip_branch_counts_registers_that_an_mi100_does_not_have(kernels):
    wide = kernels["gfx908", 16384, 8]
    made_up = replace(wide, registers=128, shared_bytes=1024)
    assert cdna.hip_branch(made_up, cdna.MI100) == 16 // 8  # of 131072 registers
    assert cdna.nvidia_branch(made_up, cdna.MI100) == 1


def test_check_by_hand_refuses_a_file_that_is_counted_twice():
    cdna.check_by_hand(3, 5, 3)
    with pytest.raises(AssertionError, match="5 waves on an MI300X"):
        cdna.check_by_hand(3, 5, 5)


def test_check_units_refuses_a_kernel_with_too_few_registers(kernels):
    x = torch.empty(8, 16384)
    [three] = resources(tiled.softmax, x, target="gfx942", num_warps=2, waves_per_eu=3)
    cdna.check_units(three, kernels)
    with pytest.raises(AssertionError, match="more than 160"):
        cdna.check_units(replace(three, vgprs=160), kernels)


def test_transpose_needs_lds_that_the_compiler_does_not_count():
    x = torch.arange(128.0 * 128).view(128, 128)
    assert torch.equal(exhibits.transpose(x), x.T)
    [kernel] = resources(exhibits.transpose, x, target="gfx942")
    cdna.draw_packing(kernel)
    with pytest.raises(AssertionError, match="LDS leaves room"):
        cdna.draw_packing(replace(kernel, shared_bytes=4096))


def test_compare_stages_refuses_two_that_are_the_same():
    x = torch.empty(8, 16384)
    [one] = resources(cdna.persistent.softmax, x, target="gfx942", num_stages=1, num_warps=8)
    with pytest.raises(AssertionError, match="LDS more"):
        cdna.compare_stages(one, one)

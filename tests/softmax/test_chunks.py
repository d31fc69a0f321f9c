"""What is special about the rung `chunks`: the chunks that a row of some width takes."""

from dataclasses import replace

import pytest
import torch

from memtraffic import device
from memtraffic.compile.launches import capture_launches
from memtraffic.gpus import find_gpu
from memtraffic.kernels.softmax import chunks

CONSTANTS = "ROWS", "BLOCK", "CHUNKS", "WHOLE", "ALIGN", "VECTOR"
H200 = find_gpu("H200")


def empty(m, n, dtype=torch.float32):
    return torch.empty(m, n, dtype=dtype, device=device.default())


@pytest.mark.parametrize(
    ("x", "constants", "num_warps"),
    [
        pytest.param(empty(8, 12672), (1, 2048, 7, 6, 4, 1), 8, id="wide"),
        pytest.param(empty(8, 8320, torch.bfloat16), (1, 1024, 9, 8, 8, 1), 4, id="little-past"),
        pytest.param(empty(8, 8321, torch.bfloat16), (1, 1024, 9, 8, 1, 8), 4, id="odd"),
        pytest.param(empty(8, 8320).t(), (64, 8, 1, 0, 1, 1), 1, id="transposed"),
        pytest.param(empty(80, 128), (4, 128, 1, 0, 4, 1), 1, id="narrow"),
    ],
)
def test_softmax_takes_the_chunks_of_the_rule(x, constants, num_warps):
    [launch] = capture_launches(chunks.softmax, x, gpu=H200)
    assert tuple(launch.constants[name] for name in CONSTANTS) == constants
    assert launch.options["num_warps"] == num_warps


def test_softmax_of_rows_that_no_program_holds():
    small = replace(H200, max_threads_per_program=256)
    with pytest.raises(ValueError, match=r"^chunks: 32768 columns do not fit .* an H200$"):
        capture_launches(chunks.softmax, empty(2, 32768), gpu=small)

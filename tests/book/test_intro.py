"""The kernel on the first page, run as it is printed."""

import re
import runpy

import pytest
import torch
from cases import assert_softmax, assert_touches_once
from notebooks import BOOK

from memtraffic import count, device

INTRO = (BOOK / "intro.md").read_text("utf-8")


@pytest.mark.parametrize("shape", [(3, 8), (5, 1024)], ids=["narrow", "wide"])
def test_kernel_of_the_intro_is_a_softmax_that_touches_each_element_once(tmp_path, shape):
    _, code = re.findall(r"^```python\n(.*?)^```$", INTRO, re.M | re.S)
    path = tmp_path / "intro_kernel.py"
    path.write_text(f"import triton\nimport triton.language as tl\n\n\n{code}", "utf-8")
    kernel = runpy.run_path(str(path))["softmax_kernel"]

    def softmax(x):
        y = torch.empty_like(x)
        kernel[(x.shape[0],)](y, x, x.shape[1])
        return y

    x = torch.randn(shape, device=device.default())
    assert_softmax(softmax, x)
    assert_touches_once(count(softmax, x, trace=True), "x_ptr", x)

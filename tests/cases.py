"""Tables of cases, and what several test files assert."""

import ast
from collections import Counter
from functools import partial

import pytest
import torch

from memtraffic import device
from memtraffic.gpus import find_gpu
from memtraffic.tensors import span
from memtraffic.testing import assert_correct

DEVICE, H200 = device.default(), find_gpu("H200")
INF, NAN = float("inf"), float("nan")
assert_softmax = partial(assert_correct, "softmax")  # of a function, and a matrix


def cases(names, table):
    """Parametrises a test: names of its parameters, and a dict from ids to their values."""
    return pytest.mark.parametrize(names, list(table.values()), ids=list(table))


def assert_touches_once(traffic, argument, elements, times=1):
    """Assert that Triton kernels touched each element of `argument` exactly once, and no others.

    traffic: what `count(..., trace=True)` returned. argument: the name of the kernel's pointer,
    such as `x_ptr`. elements: the tensor that they lie in. times: how often each was to be touched.
    """
    touched = Counter(
        offset
        for access in traffic.accesses
        if access.argument == argument
        for offset in access.offsets
    )
    offsets = torch.arange(span(elements)).as_strided(elements.shape, elements.stride())
    expected = Counter(times * offsets.flatten().tolist())
    missing, extra = expected - touched, touched - expected
    assert not missing and not extra, (
        f"{argument}: {missing.total()} elements missed, {extra.total()} touched too often or "
        f"outside, the first at {min(missing or extra, default=None)}"
    )


def far(x, strides):
    """The same numbers gigabytes apart; the memory between is never touched."""
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def laid_out(x, row_step=1, col_step=1, transposed=False, offset=0):
    """The same numbers with other strides, and NaN between them. A step of 0 repeats the first."""
    m, n = x.shape
    height, width = max(1, m * row_step), max(1, n * col_step)
    strides = (row_step, col_step * height) if transposed else (row_step * width, col_step)
    memory = torch.full((offset + height * width + 64,), NAN, dtype=x.dtype, device=x.device)
    kept = x[: None if row_step else 1, : None if col_step else 1]
    return memory.as_strided(kept.shape, strides, offset).copy_(kept).expand(m, n)


def put_command(folder, name, script):
    """A command that the system finds there."""
    (folder / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    (folder / name).chmod(0o755)


def dotted(node):
    """The names of a chain of attributes, such as ["tl", "core"]; [] for any other node."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return [*before, node.attr] if before else []
    return [node.id] if isinstance(node, ast.Name) else []

"""Which elements of a block the registers, lanes and warps hold, by Triton's own algebra."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Sequence
from typing import Any, TypeAlias

from memtraffic.errors import CompileError

Shape: TypeAlias = tuple[int, ...]


@functools.cache
def _builder() -> tuple[Any, Any]:
    """What makes layouts, and the context that they live in."""
    from triton._C.libtriton import gluon_ir, ir

    context = ir.context()
    ir.load_dialects(context)
    return gluon_ir.GluonOpBuilder(context), context


def linear_layouts(ttgir: str, blocks: Sequence[tuple[Shape, str]]) -> list[Any]:
    """The linear layout of each block: a `DistributedLinearLayout` of Gluon.

    ttgir: a kernel in Triton's GPU dialect, which says what aliases stand for. blocks: the shape
    and the layout of each, as it is written there. Raises CompileError for one that Triton cannot
    read.
    """
    from triton._C.libtriton import ir

    aliases = re.findall(r"^#\w+ = #ttg\..*$", ttgir, re.MULTILINE)
    module = re.search(r"^module attributes .*\{$", ttgir, re.MULTILINE)
    names = [
        f"%{n}: tensor<{'x'.join(map(str, it))}xi1, {text}>" for n, (it, text) in enumerate(blocks)
    ]
    lines = *aliases, module[0] if module else "module {", f"tt.func @blocks({', '.join(names)}) {{"
    builder, context = _builder()
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir", encoding="utf-8") as file:
        file.write("\n".join([*lines, "tt.return", "}", "}"]))
        file.flush()
        try:
            parsed = ir.parse_mlir_module(file.name, context)
        except RuntimeError as error:
            raise CompileError(
                f"the layout of a load or store is not known here: {error}"
            ) from error
    function = parsed.get_function("blocks")
    found = []
    for number, (shape, _) in enumerate(blocks):
        layout = builder.get_gluon_layout_from_tensor(function.args(number))
        found.append(builder.to_linear_layout(layout._to_ir(builder), list(shape)))
    return found

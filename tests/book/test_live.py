"""The engine of the live kernels counts and computes what memtraffic and Triton do."""

import json
import random
import re
from collections import Counter

import live
import numpy as np
import pytest
import torch
from live_texts import (
    FUSED,
    HEAD,
    MASKED,
    MODULES,
    NAIVE,
    OPTIONS,
    PAGES,
    SHOWN,
    of_masked,
)

from memtraffic import count
from memtraffic.testing import is_correct, poisoned_memory

POWERS = "fused softmax", "exhibits first_copy"  # take rows of a power of two alone
SOFTMAX, SHAPES = {"reference": live.SOFTMAX}, [(4, 8), (3, 5), (2, 70)]


def program_of(text, **options):
    options = {"modules": MODULES, **options}
    with live.Imports(text, options):
        return live.Program(text, options)


def imported(text, folder):
    """What a text defines, with PyTorch and Triton."""
    path, names = folder / f"text_{len(list(folder.iterdir()))}.py", {"__name__": "text"}
    path.write_text(text, "utf-8")
    exec(compile(text, path, "exec"), names)
    return names


def compared(program, function, tensors, rtol=2e-6):
    """Runs both on the same numbers; what they return, move and touch must be equal."""
    there = [
        torch.tensor(x.numbers(), dtype=getattr(torch, x.dtype.name)).reshape(x.shape)
        for x in tensors
    ]
    with live.Imports("", program.options):
        returned, meter = program.call(tensors, True)
    expected = []
    with poisoned_memory():
        traffic = count(lambda *xs: expected.append(function(*xs)), tuple(there), trace=True)
    for got, right in zip(live.sizes_in(returned), live.sizes_in(*expected), strict=True):
        assert got.shape == tuple(right.shape) and got.dtype.name == str(right.dtype)[6:]
        numbers, wanted = np.array(got.numbers(), float), right.double().numpy().ravel()
        room = rtol * np.abs(wanted[np.isfinite(wanted)]).max(initial=0)
        np.testing.assert_allclose(numbers, wanted, rtol, room)
    moved = [(it["name"].strip("_"), it["reads"], it["writes"]) for it in meter.operations]
    ops = [(op.name.strip("_"), op.read_elements, op.written_elements) for op in traffic.ops]
    assert moved == ops
    steps = [it for it in meter.steps if it["program"]]
    steps = [[*it["program"], it["kind"], it["argument"], *it["offsets"]] for it in steps]
    assert steps == [[*it.program, it.kind, it.argument, *it.offsets] for it in traffic.accesses]


def stages(text, **options):
    """The results of a run by stage, through JSON."""
    found = list(live.run(text, {"modules": MODULES, **options}))
    assert json.loads(json.dumps(found)) == found
    return {it["stage"]: it for it in found}


# ---- the same as Triton's interpreter


@pytest.mark.parametrize("name", PAGES)
def test_run_as_triton_a_page(name, tmp_path):
    text, program = PAGES[name], program_of(PAGES[name], **OPTIONS[name])
    there = imported(text, tmp_path)[OPTIONS[name]["function"]]
    for shape in SHAPES[:1] if "BLOCK=x.shape[1]" in text or name in POWERS else SHAPES:
        compared(program, there, program.tensors(shape))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", SHOWN)
def test_run_as_triton_what_the_library_shows(name, dtype):
    function, text = SHOWN[name]
    program = program_of(text, function=function.__name__, dtype=dtype)
    rtol = {"float32": 2e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    for shape in SHAPES[:1] if name in POWERS else (*SHAPES, (2, 521)):
        compared(program, function, program.tensors(shape), rtol)


VIEW = """
@triton.jit
def copy(y_ptr, x_ptr, row_stride, col_stride, shift):
    row, col = tl.program_id(0), tl.program_id(1)
    x = tl.load(x_ptr + row * row_stride + col * col_stride + shift)
    tl.store(y_ptr + row * tl.num_programs(1) + col, x)

def f(x):
    x = x{0}
    y = torch.empty(x.shape)
    copy[x.shape](y, x, *x.stride(), {1})
    return y
"""


@pytest.mark.parametrize("view", ["", ".T", "[:, 1:]", "[1:, ::2]", "[:-1, 1:3].T"])
def test_run_a_view(view):
    """By a grid of two axes; one element before a view or after it is refused."""
    [x] = (program := program_of(HEAD + VIEW.format(view, 0))).tensors((4, 7))
    with live.Imports("", program.options):
        returned, meter = program.call([x])
    right = eval(f"x{view}", {"x": torch.tensor(x.numbers()).reshape(4, 7)})
    assert returned.numbers() == right.flatten().tolist()
    assert meter.total("reads") == meter.total("writes") == right.numel()
    for shift in (-1, 1):
        assert "reads element" in refusal(HEAD + VIEW.format(view, shift))[0]


def test_run_a_nan(tmp_path):
    """It wins in PyTorch; a copy is made of what is not contiguous."""
    text = "x.amax(1), x.amin(1), *x.max(1), x.relu(), x.T.contiguous(), x.contiguous()"
    program = program_of(text := f"def f(x):\n    return {text}")
    [x] = program.tensors((4, 8))
    x.memory.cells[:3] = live.NAN, live.INF, live.NAN
    compared(program, imported(text, tmp_path)["f"], [x])


# ---- kernels by chance


KERNEL = """
@triton.jit
def kernel(y_ptr, x_ptr, k_ptr, h_ptr, n_rows, n_cols, s, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK > 0)
    cols = tl.arange(0, BLOCK){row}
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS){column}
    mask, at = (rows < n_rows) & (cols < n_cols), rows * n_cols + cols
    x = tl.load(x_ptr + at, mask=mask{other})
    k = tl.load(k_ptr + at, mask=mask, other=0)
    h = tl.load(h_ptr + at, mask=mask, other=0.5)
    {body}
    tl.store(y_ptr + at, {result}, mask=mask)

def launched(x, k, h):
    y = torch.empty_like({like})
    kernel[lambda META: (-(-x.shape[0] // META["ROWS"]),)](y, x, k, h, *x.shape, 0.1, {n}, 8)
    return y
"""
# In which pool the result goes, the names of operations, and an expression of them.
EXPRESSIONS = """
floats +,-,*,/ {a} {0} {n}
floats sqrt,sqrt_rn,floor,ceil tl.{0}({f})
floats maximum,minimum tl.{0}({a}, {n})
floats abs tl.abs(-{a})
floats where tl.where({m}, {a}, {n})
floats cast tl.cast({a}, tl.{type})
floats max,min tl.{0}(tl.where({m}, {a}, float("nan")), axis={axis}){again}
floats zeros tl.zeros(({rows}BLOCK,), tl.float32) - {a}
floats full tl.full((1,), 0.3, tl.{type}) * {a} * s
floats gather tl.load(x_ptr + k)
floats range,static_range {a} + 1;for i in tl.{0}(1, {end}, 2): {v} = {v} * 0.5 + i
floats branch {a} * 1;if tl.program_id(0) % 2 == {axis} and tl.max({i}) > 1: {v} = {b} - {v}
floats debug_barrier {a};tl.debug_barrier()
floats assume {a};tl.assume(n_cols > 0)
ints argmax,argmin tl.{0}({k}, {axis}){again}
ints sum {i}.sum({axis}){again}
ints zeros_like tl.zeros_like({i}) - {j}
ints num_programs {i} + tl.num_programs(0)
ints &,|,^ {i} {0} {j}
ints //,% ({i} - 2) {0} ({j} * {j} + {few})
ints <<,>> {i} {0} {few}
ints cdiv tl.cdiv({i}, {few})
ints multiple_of,max_contiguous tl.{0}({i}, {ones})
ints integer {a}.to(tl.int32)
masks <,<=,>,>=,==,!= {a} {0} {n}
masks invert ~(mask & (h > 0.1))
"""
TABLE = [line.split(maxsplit=2) for line in EXPRESSIONS.strip().splitlines()]
TABLE = [(name, pool, text) for pool, names, text in TABLE for name in names.split(",")]
LAST = "exp exp2 log log2 sin cos sigmoid rsqrt softmax".split()  # not exact in every digit


def kernel_of(chosen, last, pick):
    """(text, inputs) of a kernel by chance that does what was chosen of TABLE, and then `last`."""
    two = pick([0, 1]) if last != "softmax" else 0
    pools, lines = {"floats": ["x", "h"], "ints": ["k"], "masks": ["mask"]}, []
    for number, (name, pool, text) in enumerate(chosen):
        a, b, i, j = (pick(pools[it]) for it in ("floats", "floats", "ints", "ints"))
        axis, v = pick([0, 1]) if two else 0, f"v{number}"
        values = {"v": v, "a": a, "b": b, "i": i, "j": j, "f": f"{a}.to(tl.float32)", "axis": axis}
        values["n"] = pick([*pools["floats"] * 2, j, "0.5", "-1.5", "3"])
        values |= {"m": pick(pools["masks"]), "k": pick(["x", i]), "few": pick("1237")}
        values |= {"rows": "ROWS, " * two, "ones": "(1, 1)" if two else 1}
        values |= {"type": pick(["float16", "bfloat16", "float32"]), "end": pick(["3", "BLOCK"])}
        values["again"] = ("[None, :]", "[:, None]")[axis] * two  # what was reduced
        lines += f"{v} = {text}".format(name, **values).split(";")
        pools[pool].append(v)
    result = pick(pools["floats"][-2:] + pools["ints"][-1:])
    x, half = pick(["float32", "float16", "bfloat16"]), pick(["float16", "bfloat16"])
    parts = {"body": "\n    ".join(lines), "like": pick("xkh"), "n": 1 + two}
    parts |= {"row": "[None, :]" * two, "column": "[:, None]" * two}
    parts["other"] = pick(["", ", other=0.0", ', other=-float("inf")', ", other=1"])
    parts["result"] = f"tl.{last}({result}.to(tl.float32))" if last else result + pick(["", " * s"])
    return HEAD + KERNEL.format(**parts), f"M,N:{x} M,N:int32<N M,N:{half}"


@pytest.mark.slow
def test_run_as_triton_200_kernels_by_chance(tmp_path):
    """What differs is refused by name; each operation occurs twenty times."""
    chance, refused = random.Random(0), Counter()
    names = {*(name for name, *_ in TABLE), *LAST, *re.findall(r"tl\.(\w+)", KERNEL)}
    assert {*live.BINARY, *live.TL} <= {*names, *live.DTYPES}
    deck = chance.sample(TABLE * 20, 20 * len(TABLE))
    for number in range(200):
        last = LAST[number // 2 % len(LAST)] if number % 2 else ""
        text, inputs = kernel_of(deck[number::200], last, chance.choice)
        program = program_of(text, inputs=inputs)
        there, tensors = imported(text, tmp_path)["launched"], program.tensors((3, 7))
        try:
            compared(program, there, tensors, 2e-6 * bool(last))
        except live.LiveError as error:
            refused[re.sub(r"-?(nan|inf|\d+)", "", str(error))[:40]] += 1
    assert refused.total() <= 40, refused


# ---- the results of a run


def test_run_the_five_lines():
    found, lines = stages(NAIVE, **SOFTMAX), NAIVE.splitlines()
    counts = found["counts"]
    assert counts["text"] == "reads 168 elements, writes 104 elements, in 5 operations"
    for operation, reads in zip(counts["operations"], (32, 36, 32, 32, 36), strict=True):
        name = {"sub": "-", "div": "/"}.get(operation["name"], operation["name"])
        assert name in lines[operation["line"] - 1] and operation["reads"] == reads
    assert counts["tensors"][0]["name"] == "x" and counts["tensors"][0]["reads"] == [2] * 32


TWICE = of_masked("    numerator", "    x = tl.load(x_ptr + offsets, mask=mask)\n    numerator")
FORMULAS = {
    NAIVE: "reads 5MN + 2M, writes 3MN + 2M",
    FUSED: "reads MN, writes MN, at powers of two alone",
    MASKED: "reads MN, writes MN",
    TWICE: "reads 2MN, writes MN",
    PAGES["persistent answer_3"]: "reads MN + 3N, writes MN",
    "def f(x):\n    return x.max(1).values": "reads MN, writes 2M",
    "def f(x):\n    return x[:, ::2].exp()": "reads (1/2)MN, writes (1/2)MN, at powers of two",
    "def f(x):\n    return x[:, :9].exp()": "no formula in M and N: at 3 × 32 it reads 27",
    HEAD + "def f(x):\n    return torch.ones(x.shape[1] ** 2)": "no formula in M and N: at 3 ×",
}


@pytest.mark.parametrize("text", FORMULAS, ids=range(len(FORMULAS)))
def test_run_formula(text):
    inputs = "M,N N" if "_rms" in text else "M,N"
    assert stages(text, inputs=inputs)["formula"]["text"].startswith(FORMULAS[text])


def refusal(text):
    *_, last = live.run(text, {"modules": MODULES})
    assert last["stage"] == "error" and last["message"][-1] == "." and "\n" not in last["message"]
    return last["message"], last["line"]


# What is changed in the masked kernel, and what is said of the line that changed.
REFUSED = [
    ("x_ptr + offsets, mask=mask, other", "x_ptr + 8 + offsets, mask=mask, other",
     "program 3 reads element 32 of x_ptr, whose tensor of shape (4, 8) ends at element 31"),
    ("y_ptr + offsets", "y_ptr + offsets - 1", "program 0 writes element -1 of y_ptr"),
    ("tl.max(", "tl.maxx(", "tl.maxx is not modelled here. Known are: abs, arange, argmax,"),
    ("tl.store(", "tl.atomic_add(", "tl.atomic_add is not modelled"),
    ("tl.arange(0, BLOCK)", "tl.arange(0, 12)", "a power of two of elements, not 12"),
    ("tl.arange(0, BLOCK)", "tl.arange(0, n_cols)", "known to the compiler: use tl.constexpr"),
    ("cols < n_cols", "0 <= cols < n_cols", "masked_rows compares as in a < b < c: write"),
    ("cols < n_cols", "cols + tl.arange(0, 4)", "shapes (8,) and (4,) do not fit together"),
    ("cols < n_cols", "cols * 2147483647 < n_cols", "overflow is not modelled: convert with .to"),
    ("mask=mask, other", "other", "give a mask"),
    ("    numerator =", "    $ numerator =", "this is no Python: "),
    ("mask=mask, other", "mask=cols * 0.5, other", "a mask is made of comparisons"),
    ("tl.exp(x ", "tl.max(x, axis=1) + tl.exp(x ", "tl.max: axis 1 is out of range for 1 dim"),
    ("tl.exp(x ", "masked_rows[(1,)](y_ptr) + tl.exp(x ", "a kernel launches no kernel"),
    ("BLOCK=triton", "BLOCK=x if x.dim() else triton", "BLOCK is tl.constexpr, and gets a tensor"),
    ("tl.exp(x ", "torch.exp(x ", "takes a tensor, not a block"),
    ("tl.exp(x ", "tl.exp(x.to(tl.float16)) - (0 ", "float32 or float64, not float16"),
    ("mask=mask, other", "mask=masc, other", "NameError: name 'masc' is not defined"),
    ("import torch", "import numpy", "only torch, triton"),
    ("[(x.shape[0],)]", "", "launch it as masked_rows[(programs,)](...)"),
    ("numerator = tl.exp(", "print(x); numerator = tl.exp(", "print shows nothing here"),
    ("x.shape[1], BLOCK", "BLOCK", "missing 1 required positional argument: 'n_cols'"),
    ("torch.empty_like(x)", "launched(x)", "the functions call one another without end"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "expected"), REFUSED)
def test_run_refuses_an_edit(old, new, expected):
    message, line = refusal(of_masked(old, new))
    assert expected in message
    assert ("@triton.jit" if "a < b < c" in expected else old) in MASKED.splitlines()[line - 1]
    assert stages(MASKED)["counts"]["reads"] == 32  # the next run works


TEXTS = {
    "": "there is no function",
    NAIVE.replace("(x: Tensor)", "()"): "softmax takes 0 arguments",
    **{
        NAIVE.replace("shifted = x", f"{it}; shifted = x"): "x = x - m, not x -= m"
        for it in ("x += x", "x -= x", "x.sub_(x)", "x **= 2", "x[0] = 1")
    },
    NAIVE.replace("x - ", "x.minus - "): "relu, requires_grad, rsqrt, shape, softmax,",
    NAIVE.replace("x - ", "x[:, ::-1] - "): "numbers in range, slices forward, None",
    MASKED.replace("(x.shape[1]))", "(x.shape[1]), num_warps=3)"): "num_warps is 1, 2, 4,",
    "import math\n" + MASKED.replace("tl.exp(x", "math.exp(x"): "and a block needs tl.exp",
    MASKED.replace("@triton.jit\n", ""): "'function' object is not subscriptable: is @triton.jit",
    MASKED.replace("[(x.shape[0],)]", "[x.shape[0]]"): "a grid is a tuple such as (n_rows,), not 4",
}


def test_run_refuses():
    assert all(expected in refusal(text)[0] for text, expected in TEXTS.items())


def test_run_forgets_the_mask():
    text = of_masked('mask=mask, other=-float("inf")', "").replace(", mask=mask", "")
    found = stages(text, **SOFTMAX)
    assert found["formula"]["note"].startswith("at 3 × 5: program 2 reads element 15 of x_ptr")
    assert "at 5 × 7, program 4 reads element 35 of x_ptr" in found["verdict"]["text"]
    assert not found["verdict"]["right"]


# ---- the judge

WRONG = [
    "torch.zeros_like(x)", "torch.full_like(x, 0.2)", "torch.empty_like(x)", "x.sum()", "'text'",
    "x.exp() / x.exp().sum(dim=1, keepdim=True)", "torch.softmax(x, dim=0)",
    "x.softmax(1)[1:]", "x.softmax(1).to(torch.float64)", "torch.softmax(x.relu(), 1)",
    "x.softmax(1) * 1.00001", "x.softmax(1) + 1e-8",
    "(y := x.softmax(1)) + (y.mean(1, True) - y) * 2e-7",  # small elements, by a little
    "(y := x.softmax(1)) + (y - y * y / (y * y).sum(1, True)) * 3e-6",  # and its rows add up to 1
]  # fmt: skip


@pytest.mark.parametrize("expression", WRONG)
def test_verdict_refuses(expression):
    found = stages(HEAD + f"def f(x):\n    return {expression}\n", **SOFTMAX)["verdict"]
    assert not found["right"] and found["text"].startswith("Not a softmax: at ")


@pytest.mark.parametrize(
    ("expression", "right"),
    [
        ("x * 2.00001", "x * 2"),
        ("torch.zeros_like(x)", "x * 0"),
        ("torch.empty_like(x)", "torch.zeros_like(x)"),
        ("x.new_empty(x.shape)", "torch.zeros_like(x)"),
    ],
)
def test_verdict_by_another_reference_refuses(expression, right):
    """Where a reference has NaN, a number is wrong; nothing that was not written is right."""
    text = f"def f(x):\n    return {expression}"
    options = {"reference": f"lambda x: {right}", "name": "the same"}
    assert stages(HEAD + text, **options)["verdict"]["text"].startswith("Not the same: at ")
    assert stages(HEAD + f"def f(x):\n    return {right}", **options)["verdict"]["right"]


def test_verdict_refuses_what_elements_do_not_show():
    changed = stages(of_masked("torch.empty_like(x)", "x"), **SOFTMAX)["verdict"]["text"]
    text = "def f(x):\n    return (x.to(torch.float32).softmax(1) * 1.003).to(torch.float16)"
    found = stages(HEAD + text, dtype="float16", **SOFTMAX)["verdict"]["text"]
    assert "row 0 adds up to 1.00" in found and "it changes its input x" in changed


@pytest.mark.parametrize("name", SHOWN)
def test_verdict_is_that_of_the_library(name):
    function, text = SHOWN[name]
    verdict = stages(text, function=function.__name__, **SOFTMAX)["verdict"]
    widths = [1024] if name in POWERS else [781, 1024]
    right = all(is_correct("softmax", function, torch.rand(3, n)) for n in widths)
    assert verdict["right"] == right, verdict["text"]
    assert ("of powers of two alone" in verdict["text"]) == (right and name in POWERS)

import threading
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import cases

from memtraffic import device
from memtraffic.compile import capture_launches, compile_launches, worker
from memtraffic.compile.launches import Launch
from memtraffic.device import this_gpu
from memtraffic.errors import CountError, LaunchError, MemtrafficError
from memtraffic.gpus import find_gpu
from memtraffic.inputs import Arguments
from memtraffic.names import import_function
from memtraffic.triton_adapter import compile as compile_module
from memtraffic.triton_adapter import launch as launching
from memtraffic.triton_adapter.capture import capturing
from memtraffic.triton_adapter.compile import specialize

pytest.importorskip("triton", reason="Triton is not installed")

import kernels
import triton
import triton.language as tl
from triton.runtime import interpreter

from memtraffic.kernels.softmax import masked, persistent, split
from memtraffic.meters.count import count
from memtraffic.tensors import matrix
from memtraffic.triton_adapter.turns import FEW


def zeros(m, n, dtype=torch.float32):
    return torch.zeros(m, n, dtype=dtype, device=device.default())


# ---- interpreting


REFUSED = {
    "negative": ((-1,), {}, r"a grid of -1 programs: along axis 0"),
    "number": (8, {}, r"a grid is a tuple, such as \(8,\), not 8"),
    "division": ((1, 1.5), {}, "a grid of 1.5 programs, which is no whole"),
    "numpy": ((np.float32(2),), {}, "a grid of 2.0 programs, which"),
    "first-axis": ((2**31,), {}, "up to 2147483647"),
    "second-axis": ((1, 65536), {}, "1 x 65536 programs: along axis 1.* 65535"),
    "function": (lambda constants: (1, 1, 10**6), {}, "along axis 2"),
    "warps": ((1,), {"num_warps": 64}, "64 warps per program are 2048 threads"),
    "three-warps": ((1,), {"num_warps": 3}, "a power of 2 as num_warps, not 3"),
    "no-warps": ((1,), {"num_warps": 0}, "a power of 2 as num_warps, not 0"),
}


@cases(("grid", "options", "message"), REFUSED)
def test_interpreting_refuses_launches_that_no_gpu_makes(grid, options, message):
    x = torch.ones(16)

    def launch():
        kernels._masked_kernel[grid](x.clone(), x, 16, BLOCK=16, STORED=16, **options)

    with pytest.raises(LaunchError, match=f"^_masked_kernel: .*{message}"):
        count(launch, ())
    if not callable(grid) and not options:
        with pytest.raises(LaunchError, match=message):
            capture_launches(launch)


def test_interpreting_takes_an_empty_grid_and_as_many_warps_as_there_are():
    x = torch.ones(16)

    def launch(programs):
        kernels._masked_kernel[(programs,)](x, x, 16, BLOCK=16, STORED=16, num_warps=32)

    assert [count(launch, inputs=Arguments((n,))).read_elements for n in (0, 1)] == [0, 16]
    grid = 2**31 - 1, 65535, 65535
    assert launching.check_launch("k", grid, 32) == launching.check_launch("k", [*grid]) == grid


@triton.jit
def _live_kernel(y_ptr, x_ptr, n, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    mask = (n > 0) & (cols < n)  # of a scalar and a vector
    tl.atomic_add(y_ptr + cols, tl.load(x_ptr + cols, mask=mask, other=0.0), mask=mask)
    tl.store(y_ptr + cols, tl.load(y_ptr + cols, mask=mask), mask=mask)


def test_interpreting_masks_are_boolean(monkeypatch):
    """Triton 3.9 refuses others."""
    from triton.runtime import interpreter

    seen, real = [], interpreter._interpreter.real

    class Strict:
        def __getattr__(self, name):
            def access(*args):
                seen.append((name, args[{"load": 1, "store": 2, "atomic_rmw": 3}[name]].dtype))
                return getattr(real, name)(*args)

            return access

    monkeypatch.setattr(interpreter._interpreter, "real", Strict())
    x = zeros(1, 8)[0] + 2
    y = torch.zeros_like(x)
    traffic = count(lambda: _live_kernel[(1,)](y, x, 5, BLOCK=8), ())
    assert (traffic.read_elements, traffic.written_elements) == (15, 10)
    assert y.tolist() == [*x[:5].tolist(), 0, 0, 0]
    assert seen == [(name, np.dtype(bool)) for name in ("load", "atomic_rmw", "load", "store")]


def test_interpreting_binds_what_tuples_and_descriptors_hold():
    from triton.tools.tensor_descriptor import TensorDescriptor

    @triton.jit
    def copy_kernel(pointers, box, BLOCK: tl.constexpr):
        cols = tl.arange(0, BLOCK)
        tl.store(pointers[1] + cols, tl.load(pointers[0] + cols))
        box.store([0, 0], box.load([0, 0]))

    x, y, z = zeros(1, 4), zeros(1, 4), zeros(1, 4)

    def launch():
        copy_kernel[(1,)]((x, y), TensorDescriptor.from_tensor(z, [1, 4]), BLOCK=4)

    found = count(launch, (), trace=True).accesses
    whole = (0, 1, 2, 3)
    assert [(it.kind, it.argument, it.offsets) for it in found] == [
        (kind, argument, whole) for argument in ("pointers", "box") for kind in ("read", "written")
    ]


def test_interpreting_configurations_that_are_left_with_their_hooks():
    """Those that differ in launch options alone are one."""
    told = []

    def hook(arguments):
        told.append(arguments["STORED"])

    each = (1, 4), (1, 8), (2, 4), (3, 4)
    configs = [triton.Config({"STORED": n}, num_warps=warps, pre_hook=hook) for n, warps in each]
    pruned = {"early_config_prune": lambda configs, arguments, **_: configs[: arguments["n_cols"]]}
    tuned = triton.autotune(configs, key=["n_cols"], prune_configs_by=pruned)
    tuned = tuned(kernels._masked_kernel)
    x, y = zeros(1, 4), zeros(1, 4)
    message = r"2 .* of 4: .*=0, STORED=1 .* writes 1 .*=2, STORED=2 .* writes 2 "
    with pytest.raises(CountError, match=message):
        count(lambda: tuned[(1,)](y, x, 3, BLOCK=4), ())
    assert count(lambda: tuned[(1,)](y, x, 3, BLOCK=4), (), config=3).written_elements == 3
    assert told == [1, 2, 3]


# ---- bfloat16, of which the interpreter has the bits


@triton.jit
def _bfloat16_kernel(y_ptr, x_ptr, OF: tl.constexpr):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    x = tl.load(x_ptr + at)
    if OF == "where":
        x = tl.where(x > tl.trans(x), x, 0.3)
    elif OF == "of int":
        x = (x * 100).to(tl.int32).to(tl.bfloat16)
    elif OF == "fma":
        x = tl.fma(x, x, x)
    elif OF == "row sums":
        least = tl.min(x * 0, axis=1, keep_dims=True)  # -0, as each row holds negative numbers
        x = tl.where(1 / least < 0, tl.sum(x, axis=1, keep_dims=True), x)
    elif OF == "dot":
        x = (3 * tl.dot(x, x)).to(tl.bfloat16)
    tl.store(y_ptr + at, x)


BFLOAT16 = {
    "where": lambda x: torch.where(x > x.T, x, 0.3),
    "of int": lambda x: (x * 100).int(),
    "fma": lambda x: x.double() * x.double() + x.double(),
    "row sums": lambda x: x.float().sum(1, keepdim=True).expand(16, 16),
    "dot": lambda x: 3 * (x.float() @ x.float()),
}


@pytest.mark.parametrize("of", BFLOAT16)
def test_interpreting_bfloat16_computes_and_rounds_as_a_gpu(of):
    generator = torch.Generator().manual_seed(0)
    # A few bits each, so that sums and products of them are exact before they are rounded.
    x = (torch.randint(-40, 40, (16, 16), generator=generator) / 16).bfloat16()
    y = torch.empty_like(x, device=device.default())
    count(lambda: _bfloat16_kernel[(1,)](y, x.to(y.device), of), ())
    assert torch.equal(y.cpu(), BFLOAT16[of](x).bfloat16())


# ---- programs that wait for one another


@triton.jit
def _look(word_ptr, expected, WAIT: tl.constexpr):
    """What a word holds, in one of the ways in which a program may look at it."""
    lanes = tl.arange(0, 4)
    if WAIT == "load":
        words = tl.load(word_ptr + lanes, mask=lanes < 1, other=0, volatile=True)
        found = tl.sum(words, axis=0)
    elif WAIT == "atomic_add":
        words = tl.atomic_add(word_ptr + lanes, lanes, mask=lanes < 1)
        found = tl.sum(tl.where(lanes < 1, words, 0), axis=0)
    elif WAIT == "atomic_cas":
        found = tl.atomic_cas(word_ptr, -1, -1)
    elif WAIT == "atomic_poll":
        tl.atomic_poll(word_ptr, expected)
        found = expected
    return found


@triton.jit
def _relay_kernel(y_ptr, words_ptr, n, WAIT: tl.constexpr):
    """Program i waits until program i + 1, the last one for nobody, has said how many there are."""
    i = tl.program_id(0)
    found = tl.zeros((), tl.int32)
    if i < n - 1:
        while found == 0:
            found = _look(words_ptr + i + 1, n - 1 - i, WAIT)
    tl.store(y_ptr + i, found + 1)
    tl.atomic_xchg(words_ptr + i, found + 1)


@triton.jit
def _failing_kernel(words_ptr, FAILS: tl.constexpr):
    """Program FAILS divides by zero; the others wait for it, before or after it starts."""
    i = tl.program_id(0)
    if i == FAILS:
        tl.atomic_xchg(words_ptr + 1, 1)  # all others have started
        rows = 1 // (FAILS - FAILS)
        tl.store(words_ptr, rows)
    while tl.load(words_ptr, volatile=True) == 0:
        pass


POLLS = [("atomic_poll", 1), ("atomic_poll", FEW + 1)] if hasattr(tl, "atomic_poll") else []
WAITS = pytest.mark.parametrize(
    ("wait", "programs"),
    [("load", 1), ("load", 5), ("atomic_add", 2), ("atomic_cas", 3), *POLLS],
)


def launch_by_turns(kernel, *args, programs=4, **constants):
    """Interprets a cooperative launch; returns the programs of its accesses, in their order."""
    options = constants | {"launch_cooperative_grid": True}
    found = count(lambda: kernel[(programs,)](*args, **options), (), trace=True)
    return [access.program[0] for access in found.accesses]


def words(n):
    return torch.zeros(n, dtype=torch.int32, device=device.default())


@contextmanager
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(5)  # it may be about to end
    assert set(threading.enumerate()) <= before


@WAITS
def test_turns_let_a_program_wait_for_a_later_one(wait, programs):
    """In the same order each time."""
    y = words(programs)
    with no_thread_is_left():
        orders = [kernels.ended(launch_by_turns_of_relay, y, wait) for _ in range(2)]
    assert y.tolist() == list(range(programs, 0, -1))
    assert set(orders[0]) == set(range(programs)) and orders[0] == orders[1]
    assert programs == 1 or orders[0] != sorted(orders[0])  # they did wait


def launch_by_turns_of_relay(y, wait, absent=0):
    """absent: programs at the end that are waited for and do not run, 0 or 1."""
    programs = y.numel()
    said = words(programs + 4)
    said[programs + 1 :] = 7  # at which nobody looks
    n = programs + absent
    return launch_by_turns(_relay_kernel, y, said, n, programs=programs, WAIT=wait)


@WAITS
def test_turns_where_all_wait_for_what_none_writes(wait, programs):
    with no_thread_is_left():
        error = kernels.ended(lambda: launch_by_turns_of_relay(words(programs), wait, absent=1))
    assert isinstance(error, RuntimeError)
    assert f"{programs} programs wait" in str(error)


@pytest.mark.skipif(not POLLS, reason="Triton has it from 3.9 on")
def test_polling_outside_of_a_cooperative_launch():
    """What is there already is found at once; what another program would write is refused."""

    def polled(said):
        launch = _relay_kernel[(2,)]
        return kernels.ended(count, lambda: launch(words(2), said, 2, WAIT="atomic_poll"), ())

    assert polled(words(2) + 1).read_elements == 1 + 2  # and two by atomic operations
    error = polled(words(2))
    assert isinstance(error, CountError) and "atomic_poll in program (0, 0, 0)" in str(error)


@pytest.mark.parametrize("fails", [0, 1, 3], ids=["the-first", "one-between", "the-last"])
def test_turns_pass_on_what_a_program_raises(fails):
    with no_thread_is_left():
        error = kernels.ended(lambda: launch_by_turns(_failing_kernel, words(4), FAILS=fails))
    assert isinstance(error, ZeroDivisionError)
    y = words(3)  # and the next launch is not disturbed
    kernels.ended(launch_by_turns_of_relay, y, "load")
    assert y.tolist() == [3, 2, 1]


softmax_by_turns = partial(split.softmax, block=128, chunks=1)


@pytest.mark.parametrize(("rows", "parts"), [(50, 3), (3, FEW), (1, 3 * FEW)])
def test_turns_of_many_programs_take_few_threads(rows, parts, monkeypatch):
    """Also where more wait for one another than begin at first. Each looks once at each word."""
    threads, prepared, start = [], [], threading.Thread.start
    prepare, x = interpreter._patch_builtin, matrix(rows, 128 * parts)
    monkeypatch.setattr(interpreter, "_patch_builtin", lambda *it: prepared.append(prepare(*it)))
    with monkeypatch.context() as patch:
        patch.setattr(
            threading.Thread,
            "start",
            lambda it: [threads.append(threading.active_count()), start(it)],
        )
        torch.testing.assert_close(softmax_by_turns(x), torch.softmax(x, 1))
    assert len(threads) == rows * parts  # a program each
    assert max(threads) - min(threads) <= max(FEW, 2 * parts)
    assert len(prepared) < 20  # parts of the language, for a launch and not for each call
    traffic, words = count(softmax_by_turns, x), rows * parts
    # Who writes a word finds it empty before.
    assert traffic.read_elements == x.numel() + words * (1 + parts)
    assert traffic.written_elements == x.numel() + 2 * words


def test_turns_are_those_of_a_cooperative_launch_alone():
    """An ordinary launch runs one program after the other, also after a cooperative one failed."""
    kernels.ended(lambda: launch_by_turns(_failing_kernel, words(4), FAILS=3))
    found = count(kernels.atomic_add, zeros(3, 4), trace=True)
    assert [access.program[0] for access in found.accesses] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


# ---- capturing


def captured(fn, *tensors):
    found = []
    with device.capturing_launches(), capturing(lambda *launch: found.append(launch)):
        fn(*tensors)
    return found


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e8m0fnu])
def test_capturing_refuses_a_dtype_that_triton_does_not_know(dtype):
    x = zeros(1, 4)
    for given in (x.to(dtype), (x, x.to(dtype))):
        with pytest.raises(LaunchError, match=f"^_scaled_kernel: x_ptr is of {dtype}, which"):
            captured(lambda given=given: kernels._scaled_kernel[(1,)](x, given, BLOCK=4))


def test_capturing_takes_a_pointer_of_another_dtype_than_its_tensor():
    x = triton.reinterpret(zeros(1, 4).to(torch.complex64), tl.float32)
    assert len(captured(lambda: kernels._scaled_kernel[(1,)](x, x, BLOCK=8))) == 1
    assert count(lambda: kernels._scaled_kernel[(1,)](x, x, BLOCK=8), ()).read_elements == 8


def test_capturing_a_warmup_is_no_launch():
    x = zeros(1, 4)
    assert not captured(lambda: kernels._scaled_kernel.warmup(x, x, BLOCK=4, grid=(1,)))


# ---- specialising


@triton.jit
def _any_kernel(first, second, BLOCK: tl.constexpr = 4):
    pass


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["second"])
def _unspecialized_kernel(first, second):
    pass


def specialized_by_a_launch(gpu):
    """Compares `specialize` with what Triton's own launch compiles for, on a made-up driver."""
    from triton.runtime import driver

    device.HAS_GPU = False  # in this process, which nobody else uses: rungs then take x on the CPU
    target = compile_module.target_of(gpu)
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: target,
        )
    )
    x = torch.zeros(64, 2048)
    large = torch.empty(2**30, dtype=torch.float16, device="meta")  # 2 GiB: a byte too many
    rungs = masked.softmax, persistent.softmax, kernels.tuned
    launches = [
        *(partial(fn, x[:, columns]) for columns in COLUMNS for fn in rungs),
        *(partial(_any_kernel[(1,)], value, 3) for value in (*VALUES, x, x[0, 1:])),
        partial(_any_kernel[(1,)], 2, 3, tl.constexpr("text")),
        partial(_any_kernel[(1,)], large, large[:-1].clone()),
        partial(_unspecialized_kernel[(1,)], 1, 16),
    ]
    every = [found for launch in launches for found in captured(launch)]
    for kernel, args, options in every:
        signature, constants, attributes, _ = specialize(kernel, args, options)
        source = launching.compile_kernel(kernel, *args, **options).src
        assert source.signature == signature
        names = list(signature)
        named = {path: names[path[0]] if len(path) == 1 else path for path in source.constants}
        assert {named[path]: it for path, it in source.constants.items()} == constants
        if gpu.vendor == "nvidia":
            attributes = compile_module._without_pointer_range(attributes)
        assert {path: facts for path, facts in source.attrs.items() if facts} == attributes
    return len(every)


COLUMNS = slice(None), slice(1, None, 2), slice(781)
VALUES = (
    *(True, None, 0.5, (781, 0.5), (2, 1), (2, None)),
    *(0, 1, 24, 32, 781, -(2**31), 2**31 - 1, 2**31, 2**64 - 1),
)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_specialize_as_a_launch_does(target):
    root = str(Path(__file__).parents[1])
    assert worker.WORKER.call([root], specialized_by_a_launch, find_gpu(target)) == 12 + 20


# ---- compiled kernels, with a stand-in for one


class Compiled:
    """A compiled kernel that knows its registers once it is loaded."""

    name, packed_metadata = "made_up", "metadata"
    src = SimpleNamespace(signature=dict.fromkeys("xyz"))

    def __init__(self, run=None):
        self.run = run

    def _init_handles(self):
        self.n_regs, self.n_spills, self.function = 40, 2, 781


@pytest.mark.parametrize("scratch", [0, 16])
def test_starter_passes_what_the_installed_triton_passes(scratch, monkeypatch):
    """Its launcher here, with a function that writes down what it is called with."""
    from triton import runtime
    from triton.backends.nvidia.driver import CudaLauncher

    launcher, started = CudaLauncher.__new__(CudaLauncher), []
    scratch_facts = "global_scratch_size profile_scratch_size global_scratch_align "
    vars(launcher).update(dict.fromkeys(f"{scratch_facts}profile_scratch_align".split(), 0))
    for name in ("launch_cooperative_grid", "launch_pdl", "arg_annotations", "kernel_signature"):
        setattr(launcher, name, name)
    monkeypatch.setattr(runtime, "driver", SimpleNamespace(active=None))
    launcher.gsan_enabled = False
    launcher.num_ctas, launcher.launch = 1, lambda *args: started.append([*args])
    launcher(5, 2, 1, 7, 781, "metadata", None, None, None, "x7", "y", 4)
    if scratch:  # which the launcher itself allocates
        launcher = partial(launcher)
        launcher.global_scratch_size, launcher.profile_scratch_size = 16, 0
    monkeypatch.setattr(launching, "raw_stream", lambda index: index)  # GPU 7 has stream 7
    x, y = (SimpleNamespace(data_ptr=lambda it=it: it) for it in ("x7", "y"))
    start = launching.starter(Compiled(launcher), (5, 2), [0, 0, 4], [0, 1], 7)
    start(x, y)
    by_triton, by_us = ([[*it] if isinstance(it, tuple) else it for it in one] for one in started)
    assert by_triton == by_us
    launching.starter(Compiled(launcher), (5, 2), [0, 0, float("inf")], [0, 1], 7)(x, y)
    assert "inf" in str(started.pop())
    launching.starter(Compiled(launcher), (5, 2), [0, lambda stream: ("y", stream), 4], [0], 7)(x)
    assert str(started.pop()) == str(started.pop())  # a function gives an address
    with pytest.raises(TypeError):
        start(x)
    with pytest.raises(TypeError, match="made_up takes 3 arguments, not 2"):
        launching.starter(Compiled(launcher), (5, 2), [0, 4], [0], 7)


LACKING = {
    "count": ("triton.runtime.interpreter", "_implicit_cvt", lambda fn, x: count(fn, x)),
    "launch": ("triton.runtime.jit", "create_function_from_signature", capture_launches),
}


@pytest.mark.parametrize("meter", LACKING)
def test_a_triton_that_lacks_a_private_name_is_told_from_an_error_of_the_users(meter, monkeypatch):
    module, name, ask = LACKING[meter]
    with pytest.raises(AttributeError, match="no attribute 'mine'"):
        ask(lambda x: x.mine, matrix(2, 3))
    monkeypatch.delattr(import_module(module), name)
    message = rf"^Triton 3\.\d+\.\d+ lacks what memtraffic asks it for \(.*{name}.*3\.6 to 3\.9"
    with pytest.raises(MemtrafficError, match=message):
        ask(masked.softmax, matrix(2, 3))


SPELLINGS = {
    "quoted": ('"tl.constexpr"', ""),
    "text": ("tl.constexpr", "from __future__ import annotations"),
    "quoted-text": ('"tl.constexpr"', "from __future__ import annotations"),
    "whole": ("triton.language.constexpr", "from __future__ import annotations"),
}
COPYING = """
{}
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, smid

@triton.jit
def copying(y, x, BLOCK: {}, LAST: {} = False):
    cols = tl.arange(0, BLOCK)
    gdc_wait()
    tl.store(y + cols, tl.load(x + cols))
    if LAST:
        tl.store(y, smid())
    tl.extra.cuda.gdc_launch_dependents()
"""


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_kernel_is_counted_however_it_says_what_is_a_constant(spelling, module):
    """And what waits for the launch before it, or lets the next one begin, moves nothing."""
    kind, future = SPELLINGS[spelling]
    module(COPYING.format(future, kind, kind))
    kernel, x = import_function("mine:copying"), matrix(1, 16)
    assert "reads 16 elements, writes 16" in str(count(lambda x: kernel[(1,)](x, x, 16), x))
    with pytest.raises(CountError, match=r"copying cannot be interpreted: inline_asm: .*smid"):
        count(lambda x: kernel[(1,)](x, x, 16, LAST=True), x)


# ---- and with real ones


@pytest.mark.gpu
def test_loaded_usage_is_what_the_disassembler_says():
    for launch_options in ({}, {"maxnreg": 32}):
        x = torch.rand(1, 2048, device="cuda")
        options = {"BLOCK": 2048, "num_warps": 1} | launch_options
        compiled = launching.compile_kernel(kernels._scaled_kernel, x, x, **options)
        facts = specialize(kernels._scaled_kernel, (x, x), options)
        launch = Launch("kernels", "_scaled_kernel", *facts)
        [kernel] = compile_launches([(launch, this_gpu())])
        assert launching.loaded_usage(compiled)["registers"] == kernel.registers
        spilled = launching.loaded_usage(compiled)["spill_bytes"]
        assert (spilled > 0) == (kernel.spill_bytes > 0) == bool(launch_options)

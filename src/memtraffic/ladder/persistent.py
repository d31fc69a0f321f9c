"""Row softmax by programs that stay: as many as the GPU holds at once, each striding over the tiles of the matrix.

Traffic: reads MN, writes MN. Ends where a row outgrows one program's registers.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from memtraffic import machine, occupancy, targets
from memtraffic.ladder.fused import MAX_COLS
from memtraffic.ladder.operands import output
from memtraffic.ladder.warps import _softmax_tile, align, choose
from memtraffic.occupancy import amd, nvidia

MOST_STAGES = 3  # a third tile in flight gains nothing more
PIECE_BYTES = 16  # a copy in smaller pieces is slower than a load
INTERPRETED_PROGRAMS = 4  # where no GPU says how many fit, enough to see them stride
INTERPRETED_TARGET = "sm_90"  # and whose stages the plan has there


@triton.jit
def _persistent_kernel(
    y_ptr,
    x_ptr,
    y_row_stride,
    y_col_stride,
    x_row_stride,
    x_col_stride,
    n_rows,
    n_cols,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
):
    first, stride = tl.program_id(0), tl.num_programs(0)
    for tile in tl.range(first, tl.cdiv(n_rows, ROWS), stride, num_stages=STAGES):
        _softmax_tile(
            y_ptr, x_ptr, y_row_stride, y_col_stride, x_row_stride, x_col_stride,
            n_rows, n_cols, tile, ROWS, BLOCK, ALIGN,
        )  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """How a call runs: its constants, the compiled kernel (None where kernels are interpreted), programs in all.

    registers (a thread), shared_bytes (a program) and resident (programs an SM) are 0 where nothing is compiled.
    """

    constants: dict
    num_warps: int
    kernel: object
    programs: int
    registers: int = 0
    shared_bytes: int = 0
    resident: int = 0


def stages(tile_bytes, piece_bytes, shared_bytes, target):
    """Stages of the loop: one, and one more for each tile that fits in a program's `shared_bytes`, MOST_STAGES at most.

    tile_bytes: of one tile. piece_bytes: what one access may move; below PIECE_BYTES there is one stage. So there is on
    AMD (target `gfx...`), where tiles on their way wait in registers, in the place of other programs.
    """
    if piece_bytes < PIECE_BYTES or target.startswith("gfx"):
        return 1
    scratch = 1024  # bytes that the reductions of 32 warps may need
    return 1 + max(0, min(MOST_STAGES - 1, (shared_bytes - scratch) // tile_bytes))


def plan(x, y, num_warps=None, num_stages=None, programs=None, rows=None):
    """The `Plan` of the softmax of `x` into `y`, made anew. The arguments after them are those of `softmax`.

    Raises ValueError for programs or stages below 1 and for options as `warps.choose` does; RuntimeError where a program asks
    for more shared memory than there is, or not one fits an SM; LookupError for an AMD GPU that `occupancy` does not know.
    """
    for name, value in (("programs", programs), ("num_stages", num_stages)):
        if value is not None and value < 1:
            raise ValueError(f"persistent: {name} is {value}, not 1 or more")
    constants = choose(x.shape[1], x.element_size(), rows, num_warps, rung="persistent")
    constants["ALIGN"] = align(x, y)
    num_warps = constants.pop("num_warps")
    tiles = triton.cdiv(x.shape[0], constants["ROWS"])
    tile_bytes = constants["ROWS"] * constants["BLOCK"] * x.element_size()
    piece_bytes = constants["ALIGN"] * x.element_size()
    if not machine.compiles():
        target = machine.target() or INTERPRETED_TARGET
        shared = occupancy.shared_per_program(occupancy.processor(target))
        few = stages(tile_bytes, piece_bytes, shared, target)
        constants["STAGES"] = num_stages or few
        programs = min(tiles, programs or INTERPRETED_PROGRAMS)
        return Plan(constants, num_warps, None, programs)
    sm = machine.limits(x.device.index)
    wanted = num_stages or stages(
        tile_bytes, piece_bytes, sm.shared_per_block, sm.target
    )
    least = wanted if num_stages else 1  # what was asked for is not made less
    for constants["STAGES"] in range(wanted, least - 1, -1):
        kernel = _persistent_kernel.warmup(
            y, x, *y.stride(), *x.stride(), *x.shape,
            **constants, num_warps=num_warps, grid=(1,),
        )  # fmt: skip
        shared = kernel.metadata.shared
        if shared <= sm.shared_per_block:
            break
    else:
        raise RuntimeError(
            f"persistent: a program needs {shared} bytes of shared memory, {sm.name} has {sm.shared_per_block}"
        )
    registers, fits = _resident(kernel, num_warps, sm)
    if fits < 1:
        raise RuntimeError(
            f"persistent: {num_warps} warps of {registers} registers do not fit an SM of {sm.name}"
        )
    programs = min(tiles, programs or sm.sms * fits)
    return Plan(constants, num_warps, kernel, programs, registers, shared, fits)


def _resident(kernel, num_warps, sm):
    """Registers a thread of a compiled kernel, and how many of its programs one SM, or compute unit, of `sm` holds."""
    shared = kernel.metadata.shared
    if not sm.target.startswith("gfx"):
        kernel.run  # noqa: B018  loads it, so that its registers are known
        fits = nvidia.resident(kernel.n_regs, shared, num_warps, sm)
        return kernel.n_regs, fits
    used = targets.amd_usage(kernel.asm["amdgcn"])
    registers = (used["allocated_vgprs"], 0, used["allocated_sgprs"])
    cu = occupancy.processor(sm.target)
    return used["registers"], amd.resident(*registers, shared, num_warps, cu)


_held = {}  # plans, by all that a compiled kernel depends on
_MOST_HELD = 4096


def held_plan(x, y, *options):
    """The `plan` of a call, kept from the first one of its like."""
    key = (
        machine.compiles(), machine.target(), x.device, x.dtype, x.shape, x.stride(), y.stride(),
        x.data_ptr() % 16, y.data_ptr() % 16, options,
    )  # fmt: skip
    if key not in _held:
        if len(_held) >= _MOST_HELD:
            _held.clear()
        _held[key] = plan(x, y, *options)
    return _held[key]


def launch(chosen, y, x):
    """Runs `chosen`, a `Plan`, on `x`, into `y`."""
    arguments = (y, x, *y.stride(), *x.stride(), *x.shape)
    if chosen.kernel is None:
        _persistent_kernel[(chosen.programs,)](
            *arguments, **chosen.constants, num_warps=chosen.num_warps
        )
    else:
        chosen.kernel[(chosen.programs, 1, 1)](*arguments, *chosen.constants.values())


def softmax(x, out=None, num_warps=None, num_stages=None, programs=None, rows=None):
    """Softmax of each row of `x`, of any width to MAX_COLS. Told in book/persistent.ipynb.

    x: tensor of shape (M, N), float32, float16 or bfloat16, of any strides, on a GPU
    or, interpreted, on the CPU. num_warps, num_stages and rows of a program, and
    programs in all: instead of what fits. Returns `out`, or a new tensor of x's shape
    and dtype.
    Raises TypeError for another dtype or device, ValueError for another shape, and
    what `plan` raises.
    """
    y = output("persistent", x, out, MAX_COLS)
    if x.numel():
        with machine.on(x):
            launch(held_plan(x, y, num_warps, num_stages, programs, rows), y, x)
    return y


def softmax_looked_up(x):
    """The same, its plan made anew at each call: what holding it saves. Takes `x` alone, raises as `softmax`."""
    y = output("persistent", x, None, MAX_COLS)
    if x.numel():
        with machine.on(x):
            launch(plan(x, y), y, x)
    return y

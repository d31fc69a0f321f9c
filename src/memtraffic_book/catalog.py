"""The experiments of the book: what is measured, with what arguments, into which columns.

A recording is keyed by an experiment's id, its arguments, and its columns with their units.
Arguments are JSON and say what is run: `"fn": "tiled"`, or `{"fn": "persistent", "num_stages": 1}`;
`impls` has labels, under which pages show what they name. The function that measures is no part of
the key. Who renames a function that arguments name renames it in `machine.json` as well.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from memtraffic import benchmark, gpus
from memtraffic.benchmark.roof import roof
from memtraffic.meters.counters import count_layouts
from memtraffic_book import marked_counters, measurements, timings

NOISE_BYTES = 2.0**20  # what page tables, and a kernel's own code and arguments, come to


@dataclass(frozen=True)
class Column:
    """One column of an experiment, and how far it may be from its recording when measured again.

    tolerance: relative to the recorded number, doubled in rows under 20 µs; 0 where the value must
    be equal; None where it is not compared. noise: what any number may differ by, in its unit.
    """

    name: str
    unit: str = ""
    tolerance: float | None = 0.0
    noise: float = 0.0


@dataclass(frozen=True)
class Needs:
    """What a machine must have for an experiment, besides a GPU.

    commands: on the PATH. vendor: of the GPU, such as "nvidia"; "" for any. gpus: how many. gib: of
    memory, of one GPU.
    """

    commands: tuple[str, ...] = ()
    vendor: str = ""
    gpus: int = 1
    gib: float = 0

    def lacking(self) -> str:
        """What of it this machine does not have, as text; "" if it has all. Needs a GPU."""
        lacks = [f"the command `{name}`" for name in self.commands if not shutil.which(name)]
        if self.vendor and (gpu := gpus.this_gpu()).vendor != self.vendor:
            lacks.append(f"a GPU of {self.vendor}, not an {gpu.product}")
        if self.gpus > 1 and self.gpus > (count := torch.cuda.device_count()):
            lacks.append(f"{self.gpus} GPUs, not {count}")
        if self.gib and self.gib > (gib := torch.cuda.mem_get_info()[1] / 2**30):
            lacks.append(f"{self.gib} GiB of GPU memory, not {gib:.1f}")
        return ", ".join(lacks)


@dataclass(frozen=True)
class Experiment:
    """Something measured on a GPU: a function, its arguments as JSON has them, and its columns."""

    id: str
    measure: Callable[..., pd.DataFrame]
    arguments: dict[str, Any]
    columns: tuple[Column, ...]
    needs: Needs = Needs()

    @property
    def schema(self) -> dict[str, str]:
        """The unit of each column, by its name."""
        return {column.name: column.unit for column in self.columns}

    def run(self) -> pd.DataFrame:
        """Measures. Raises ValueError if the result has other columns than it should have."""
        frame = self.measure(**measurements.resolve(self.arguments))
        if list(frame.columns) != list(self.schema):
            wanted = list(self.schema)
            raise ValueError(f"{self.id}: measured columns {list(frame.columns)}, not {wanted}")
        return frame


# ---- columns

M, N, DTYPE = Column("m", "rows"), Column("n", "columns"), Column("dtype")
US = Column("us", "µs", 0.1)
SPREAD = (Column("us_p20", "µs", None), Column("us_p80", "µs", None))  # of one run
TIMES = (M, N, DTYPE, US, *SPREAD, Column("gb_per_s", "GB/s", 0.1))
BENCH = (Column("impl"), *TIMES)
LAYOUT = Column("layout")
ROOF = (
    Column("gpu"),
    Column("copy_gb_per_s", "GB/s", 0.1),
    Column("datasheet_gb_per_s", "GB/s"),
    Column("fp32_tflop_per_s", "TFLOP/s", 0.1),
    Column("l2_mib", "MiB"),
)
COUNTERS = (
    Column("kernel", tolerance=None),  # a compiler's name for it, or ours
    Column("load_instructions", "instructions", 0.1),
    Column("instruction_read_bytes", "bytes", 0.1, NOISE_BYTES),
    Column("l1_l2_read_bytes", "bytes", 0.1, NOISE_BYTES),
    Column("dram_read_bytes", "bytes", 0.1, NOISE_BYTES),
    Column("dram_write_bytes", "bytes", 0.1, NOISE_BYTES),
    Column("l2_write_sectors", "sectors", 0.1),
    Column("ns", "ns", 0.1),
)
# Inductor times several configurations and takes the fastest. How much of the second read the
# caches answer, and how long it takes, therefore differs from run to run.
COMPILED_COUNTERS = tuple(
    dataclasses.replace(column, tolerance=0.5)
    if column.name in ("l1_l2_read_bytes", "dram_read_bytes", "ns")
    else column
    for column in COUNTERS
)
# How much of a second read L2 answers depends on which programs happen to run at the same time.
LONG_COUNTERS = tuple(
    dataclasses.replace(column, tolerance=0.25)
    if column.name in ("dram_read_bytes", "dram_write_bytes", "ns")
    else column
    for column in (Column("impl"), M, N, *COUNTERS)
)
SURVEYED = (
    *(Column(name) for name in ("package", "version", "kernel", "direction", "at")),
    Column("launches", "launches"),
    *(column for column in COMPILED_COUNTERS if column.name in marked_counters.AMOUNTS),
    Column("missing"),  # why a kernel did not run
)
SHAPES_COUNTERS = (
    *(M, N, DTYPE),
    Column("launches", "launches"),
    *(column for column in LONG_COUNTERS if column.name in marked_counters.AMOUNTS),
)
RATES = (
    Column("what"),
    Column("sms", "processors"),
    Column("clock_ghz", "GHz", 0.1),
    US,
    *SPREAD,
    Column("t_per_s", "T/s", 0.1),
    Column("per_clock", "per clock", 0.1),
)
IN_FLIGHT = (
    Column("access"),
    Column("kib_per_sm", "KiB"),
    Column("sms", "processors"),
    US,
    *SPREAD,
    Column("gb_per_s", "GB/s", 0.1),
    Column("latency_ns", "ns", 0.1),
)
L2_READ = (Column("cache"), Column("mib", "MiB"), US, *SPREAD, Column("gb_per_s", "GB/s", 0.1))
FLOOR = (
    Column("what"),
    Column("programs", "programs"),
    Column("us", "µs", 0.25),  # a fraction of a microsecond is much of it
    *SPREAD,
)
STARTS = (Column("programs", "programs"), Column("warps", "warps"), US, *SPREAD)
ELEMENTWISE = (Column("what"), US, *SPREAD, Column("gb_per_s", "GB/s", 0.1))
CALLER = (
    *(Column("impl"), M, N, DTYPE, US, *SPREAD),
    Column("host_us", "µs", None),
    Column("host_wait_us", "µs", None),
)
COMPARED = (
    *(Column("impl"), M, N, DTYPE, US, *SPREAD),
    Column("us_reversed", "µs", None),
    Column("gb_per_s", "GB/s", 0.1),
    Column("version", tolerance=None),
    Column("note", tolerance=None),  # in place of a time; a peer may be absent, see drift.py
)
ROUNDS = (Column("rounds", "rows"), Column("extra", "rows"), *BENCH)
REPEATS = (Column("repeat"), *BENCH)
# Which turn is slow depends on what ran before.
TURNS = (
    Column("impl"),
    M,
    N,
    Column("launches", "launches"),
    Column("turn"),
    Column("turn_us", "µs", None),
)
RESIDENT = (
    Column("impl"),
    Column("warps", "warps"),
    Column("registers", "registers", 0.1),  # compilers differ
    Column("shared_bytes", "bytes", 0.1),
    Column("resident", "programs"),
)
OVERHEAD = (Column("impl"), M, N, DTYPE, Column("host_us", "µs", None))  # as busy as the host is
TUNING = (M, N, DTYPE, Column("host_first_ms", "ms", None), US, Column("tuned_us", "µs", 0.1))
FAR = (Column("who"), Column("found"))
PLANS = (
    N,
    Column("warps", "warps"),
    Column("stages", "stages"),
    Column("registers", "registers", 0.1),  # compilers differ
    Column("shared_bytes", "bytes", 0.1),
    Column("resident", "programs"),
    Column("programs", "programs"),
)
LOSS = Column("loss", "squared error", 0.05)
TRAINED = (Column("softmax"), Column("step", "steps"), LOSS)
TRAINED_COUNTERS = (Column("softmax"), Column("kernels", "kernels", 0.2), *COUNTERS[1:])
TRAINED_TIMES = (
    *(Column("softmax"), Column("launch"), LOSS),
    Column("host_us", "µs", None),
    Column("host_wait_us", "µs", None),
)
DRIVER = (
    Column("kernels"),
    Column("asked", "configurations", 0.1),
    Column("equal", "configurations", 0.1),
)
LATENCY = (Column("hops", "loads"), US, Column("latency_ns", "ns", 0.1))
GRIDS = (
    Column("target"),
    Column("gpu"),
    N,
    Column("resident", "programs"),
    Column("processors", "processors"),
    Column("programs", "programs"),
)


def _option(name: str) -> tuple[Column, ...]:
    """The columns of a sweep over the values of an option."""
    return (Column(name), *TIMES, Column("copy_us", "µs", 0.1))


# ---- shapes and values

WIDE = [4096, 16384]
COPIES = [[2**k, 16384] for k in range(5, 14)]
WIDTHS = [[4096, 2**k] for k in range(8, 16)]
PADDED = [[4096, n] for n in (8192, 8320, 12672, 16384)]
NARROW = [[65536, 2**k] for k in range(6, 11)]
LARGE = [[max(4096, 2**24 // 2**k), 2**k] for k in range(8, 16)]  # 16 million elements or more
BIG = [[4096, 4096], [4096, 32768]]
COMPILED = ["torch.softmax", "compile(naive)", "compile(persistent reduction)"]
LOOPS = ["copy", "tiled", "persistent"]


def _named(*names: str) -> dict[str, str]:
    """Labels that are names of a rung or of a baseline."""
    return {name: name for name in names}


def _looped(**options: int) -> dict[str, Any]:
    return {"fn": "persistent", **options}


def _counted(id: str, impl: Any, columns: Any = COUNTERS, **more: Any) -> Any:
    """The row of an experiment that reads the hardware counters of one implementation."""
    impls = impl if isinstance(impl, dict) else [impl]
    return id, measurements.counters, columns, dict(impls=impls, **more), _NCU


_NVIDIA = Needs(vendor="nvidia")
_NCU = Needs(commands=("ncu",), vendor="nvidia")
_EXHIBITS, _YOURS = "memtraffic_book.exhibits:", "memtraffic_book.yours:"
BLOCKS = {
    **_named("copy", "masked"),
    "few warps": f"{_EXHIBITS}softmax_few_warps",
    "two blocks": "memtraffic.kernels.softmax.masked:softmax_two_blocks",
}
CHEATS = {**_named("fused", "masked"), "block of 512": f"{_EXHIBITS}softmax_block_of_512"}
CALLS = {
    **_named("torch.softmax", "tiled"),
    "uncached": f"{_EXHIBITS}softmax_uncached",
    "persistent": "persistent",
}
STAGES = {
    **_named("copy", "tiled"),
    "1 stage": _looped(num_stages=1),
    "2 stages": _looped(num_stages=2),
    "3 stages": _looped(num_stages=3),
}
EACH_TILE = 2**20  # programs: more than there are tiles, so each takes one
SUSPECTS = {
    "tiled copy": f"{_EXHIBITS}copy_tiled",
    **{
        f"copy, {n} stage{'s' * (n > 1)}": {"fn": f"{_EXHIBITS}copy_persistent", "num_stages": n}
        for n in (1, 2, 3)
    },
    "tiled": "tiled",
    "tiled, 8 warps": {"fn": "tiled", "num_warps": 8},
    "1 stage": STAGES["1 stage"],
    "1 stage, 8 warps": _looped(num_warps=8, num_stages=1),
    "1 stage, 8 warps, program per tile": _looped(num_warps=8, num_stages=1, programs=EACH_TILE),
    "1 stage, 8 warps, dynamic order": f"{_EXHIBITS}softmax_dynamic",
    "2 stages": STAGES["2 stages"],
    "2 stages, twice the programs": f"{_EXHIBITS}softmax_2_stages_twice",
    "2 stages, program per tile": _looped(num_stages=2, programs=EACH_TILE),
    "3 stages": STAGES["3 stages"],
}
LADDER = ["copy", "naive", "fused", "masked", "tiled", "persistent"]  # as it was recorded

READ_MIB = [0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
COPIED = [[4096, 512], [4096, 4096], WIDE, [32768, 16384]]
NARROW_AND_WIDE = [[4096, 512], WIDE]
FILLED = [WIDE, [16384, 16384]]  # four times the work to fill and drain a pipeline for
STRIDED = [it for it in LARGE if it[1] in (256, 1024, 4096, 16384, 32768)]
# Widths that the rule of `tiled` was not read from; 16 million elements or more.
UNSEEN = [[-(-(2**24) // n), n] for n in (384, 768, 781, 1536, 3072)]
UNSEEN += [[4096, n] for n in (5003, 6144, 12288, 24576)]

# 67 million elements each, so that the bytes take far longer than a launch.
GRADIENTS = [[2**26 // n, n] for n in (256, 1024, 4096, 16384, 65536, 131072)]
TORCH_BACKWARD = {"PyTorch's backward": f"{_EXHIBITS}backward_torch"}
OUR_BACKWARD = {"our backward": f"{_EXHIBITS}backward_ours"}
RACED = {
    "copy": "copy",
    "one line of PyTorch": f"{_EXHIBITS}backward_lines",
    **TORCH_BACKWARD,
    **OUR_BACKWARD,
}
BOTH = ["torch.softmax", "memtraffic.softmax"]
# The widths of the table in Triton's documentation, some odd ones, and rows that are ever longer.
PRINTED = [[4096, 128 * i] for i in range(2, 100)]
ODD = [[4096, n] for n in (781, 1000, 4097, 12673)]
LONGEST = [
    [min(4096, 2**27 // n), n] for n in (2**14, 2**15, 3 * 2**14, 2**16, 2**17, 2**18, 2**19, 2**20)
]
SCORED_AT = sorted(PRINTED + ODD + LONGEST, key=lambda shape: shape[1])
RIVALS = ["copy", "torch.softmax", "memtraffic.softmax", "Liger", "FlagGems", "QuACK", "tutorial"]
BACKWARDS = [f"{name} backward" for name in RIVALS[1:6]]
COMPILERS = ["compile(torch.softmax)", *COMPILED[1:]]
COMPILED_AT = [[4096, n] for n in (256, 1024, 2176, 4096, 8320, 12672, 16384, 32768)]
CALLERS = {
    **_named("torch.softmax", "memtraffic.softmax"),
    "torch.softmax, gradient": "memtraffic_book.measurements:torch_gradient",
    "memtraffic.softmax, gradient": "memtraffic_book.measurements:own_gradient",
}

_POWERS = [1, 2, 4, 8, 16, 32]
TILED = dict(fn="tiled", shape=[4096, 4096])
STARTED = dict(programs=[4096, 16384, 65536, 262144], warps=[1, 4, 16])
TILED_ROWS = dict(fn="tiled", shapes=NARROW, option="rows", values=_POWERS)
TILED_WARPS = dict(fn="tiled", shapes=LARGE, option="num_warps", values=_POWERS)
RULE = dict(fn="tiled", shapes=UNSEEN, option="num_warps", values=_POWERS)
TUNED = dict(
    fn="tiled",
    tuned=f"{_EXHIBITS}softmax_autotuned",
    shapes=[[65536, 512], [8192, 4096], [4096, 32768]],
)
WARPS = dict(fn="persistent", shapes=[WIDE], option="num_warps", values=[8, 16, 32])
PROGRAMS = dict(
    fn="persistent", shape=[65536, 4096], programs_per_sm=[0.25, 0.5, 1, 2, 3, 4, 6, 8, 12, 24]
)

FAR_ROW = dict(row=70000, row_stride=32768)
IN_FLIGHT_OF = dict(kib_per_sm=[1, 2, 4, 8, 12, 16, 24, 32, 48, 64], gib=2)
REPEATED = dict(impls=["copy", "naive", "tiled"], shapes=NARROW_AND_WIDE, repeats=15)
COUNTED_OFF = dict(
    impls=["tiled"], shapes=[[4096, 512], [4096, 8192]], launches=[3, 4, 5, 6], cycles=100
)
CALLED = dict(impls=["torch.softmax", "tiled", "persistent"], shapes=NARROW_AND_WIDE)
WHOLE_ROUNDS = dict(impls=STAGES, n=16384, rounds=[30, 31, 62], extra=[0, 4])
SUSPECTED = dict(impls={"copy": "copy", **SUSPECTS}, shapes=FILLED)
SCORED = dict(impls=[*RIVALS, *LADDER[1:]], shapes=SCORED_AT, compiled=COMPILERS, budget=0.008)
SCORED_F32 = dict(**SCORED, compiled_shapes=COMPILED_AT)
SCORED_BF16 = dict(**SCORED, compiled_shapes=COMPILED_AT[1::2])
SCORED_BACKWARD = dict(
    impls={"add": "copy", **_named(*BACKWARDS)},  # the roof of what reads two matrices
    inputs="softmax_backward",
    shapes=SCORED_AT,
    budget=0.008,
)
SCORED_COUNTERS = dict(fn="memtraffic.softmax", shapes=SCORED_AT, dtypes=["float32", "bfloat16"])
SCORED_HOST = dict(impls=CALLERS, shapes=[[4096, 2**k] for k in range(6, 12)], calls=100)
CASES = [
    dict(dtype=dtype, layout=layout, shapes=LARGE if layout == "packed" else STRIDED)
    for dtype, layout in itertools.product(
        ("float32", "bfloat16"), ("packed", "transposed", "every other")
    )
]
WINNERS = dict(
    impls=["copy", "torch.softmax", COMPILED[2], "tiled", "persistent"], cases=CASES, budget=0.1
)

LONG = [[2**27 // n, n] for n in (8192, 32768, 65536, 131072, 262144, 2**20)]
EIGHT_ROWS = [[8, 2**k] for k in range(12, 19)]
ONLINE = "memtraffic.kernels.softmax.online:softmax"
THREE_PASSES = "memtraffic.kernels.softmax.online:softmax_three_passes"
SPLIT = f"{_EXHIBITS}softmax_split"
SPLIT_1024 = {"split, 1024 columns": {"fn": SPLIT, "columns": 1024}}
LONG_RACE = dict(
    impls={
        **_named("copy", "torch.softmax"),
        "three passes": THREE_PASSES,
        "online": ONLINE,
        "split": SPLIT,
    },
    shapes=LONG,
)
LONG_HALF = dict(
    impls={"copy": "copy", "online": ONLINE, "split": SPLIT}, shapes=LONG[2:], dtype="bfloat16"
)
LONG_FEW = dict(
    impls={**_named("copy", "torch.softmax"), "online": ONLINE, **SPLIT_1024}, shapes=EIGHT_ROWS
)
LONG_WHOLE = dict(impls={"tiled": "tiled", **SPLIT_1024}, shapes=EIGHT_ROWS[:4])  # tiled takes them
LONG_PARTS = dict(
    fn=SPLIT, shapes=[[8, 65536]], option="columns", values=[512, 1024, 2048, 4096, 8192]
)
LONG_COUNTED = dict(
    impls={"torch.softmax": "torch.softmax", "online": ONLINE, "split": SPLIT},
    cases=[
        [label, [2**27 // n, n]]
        for label, n in (
            ("torch.softmax", 131072),
            *(("online", n) for n in (4096, 16384, 32768, 131072)),
            ("split", 131072),
        )
    ],
)
BACKWARD = dict(inputs="softmax_backward", shape=WIDE)
RACE = dict(inputs="softmax_backward", dtypes=["float32", "bfloat16"], budget=0.1)
RECOMPUTED = dict(
    impls={**OUR_BACKWARD, "backward from x": f"{_EXHIBITS}backward_from_x"},
    shapes=[[2**26 // n, n] for n in (2048, 4096, 16384)],
    **RACE,
)
STEPS = dict(softmaxes=BOTH, shape=[2, 4096, 512], heads=8, lr=0.003, steps=20)
STEP = dict(softmaxes=BOTH, shape=STEPS["shape"])
SMALL_STEPS = dict(softmaxes=BOTH, shape=[8, 128, 256], heads=8, lr=0.003, steps=20)
# Of each package, kernels with a formula that no autotuner changes.
_LIGER = "liger_kernel.transformers.functional:liger"
PUBLISHED_KERNELS = [
    *(f"{_LIGER}_softmax {direction}" for direction in ("forward", "backward")),
    *(f"{_LIGER}_{name} forward" for name in ("rms_norm", "layer_norm", "cross_entropy")),
    f"{_LIGER}_group_norm forward N=512",  # wider groups spill registers, which is traffic, too
    *(f"flag_gems.ops:{name} forward" for name in ("softmax", "log_softmax")),
    "flag_gems.fused:silu_and_mul forward",
    "fla.modules.l2norm:l2norm forward",
    "conch.ops.normalization.rms_norm:rms_norm forward",
    "torch:softmax forward",
    "02-fused-softmax:softmax forward",
]
SURVEYED_AT = dict(kernels=PUBLISHED_KERNELS, sizes={"M": 1024, "N": 8192})

# A reader's kernels, and what they are called with.
RMS_NORM = dict(inputs="M,N N", shape=[8192, 8192])
CROSS_ENTROPY = dict(inputs="M,N M:int64<N", shape=[4096, 32768])
CROSS_ENTROPY_OURS = {"cross-entropy": f"{_YOURS}cross_entropy"}
RMS_NORMS = dict(
    impls={
        "RMS norm, PyTorch": f"{_YOURS}torch_rms_norm",
        "RMS norm, row": f"{_YOURS}rms_norm",
        "RMS norm, loop": f"{_YOURS}rms_norm_loop",
    },
    inputs=RMS_NORM["inputs"],
    shapes=[RMS_NORM["shape"]],
)
CROSS_ENTROPIES = dict(
    impls={
        "cross-entropy, PyTorch": f"{_YOURS}torch_cross_entropy",
        **CROSS_ENTROPY_OURS,
    },
    inputs=CROSS_ENTROPY["inputs"],
    shapes=[CROSS_ENTROPY["shape"]],
    dtypes=["float32", "bfloat16"],
)
ONLINE_AND_SPLIT = dict(impls={"online": ONLINE, "split": SPLIT}, shape=[64, 131072])

_bench = benchmark.bench
_layouts, _sweep = timings.bench_layouts, timings.bench_option
_dtypes, _compare = measurements.bench_dtypes, measurements.compare
_beside_copy = measurements.bench_beside_copy
_plans, _residents = measurements.launch_plans, measurements.resident_plans
_F32, _BF16 = "float32", "bfloat16"

# Id, function, columns, arguments and needs, in the order of the book.
_ROWS: tuple[tuple[Any, ...], ...] = (
    ("roof", roof, ROOF, {}),
    ("copy", _bench, BENCH, dict(impls=["copy"], shapes=[WIDE])),
    ("copy_cold", _bench, BENCH, dict(impls=["copy"], shapes=COPIES)),
    ("copy_warm", _bench, BENCH, dict(impls=["copy"], shapes=COPIES, cold=False)),
    ("copies", measurements.bench_copies, BENCH, dict(shapes=COPIED)),
    ("arithmetic", measurements.arithmetic, RATES, dict(trips=256)),
    ("bytes_in_flight", measurements.bytes_in_flight, IN_FLIGHT, IN_FLIGHT_OF),
    ("launch_floor", measurements.launch_floor, FLOOR, dict(rows=4096)),
    ("l2_read", measurements.l2_read, L2_READ, dict(mib=READ_MIB)),
    ("timing_repeats", measurements.bench_repeats, REPEATS, REPEATED),
    ("timing_turns", measurements.times_by_turn, TURNS, COUNTED_OFF),
    ("timing_host", timings.caller_times, CALLER, CALLED),
    ("naive_elementwise", measurements.elementwise, ELEMENTWISE, dict(shape=WIDE)),
    _counted("naive_counters", "naive", shape=WIDE),
    _counted("compiled_counters", "compile(naive)", COMPILED_COUNTERS, shape=WIDE),
    _counted("persistent_reduction_counters", COMPILED[2], shape=WIDE),
    _counted("torch_softmax_counters", "torch.softmax", shape=WIDE),
    _counted("fused_counters", "fused", shape=WIDE),
    ("fused_race", _bench, BENCH, dict(impls=["copy", "naive", "fused"], shapes=[WIDE])),
    ("fused_widths", _bench, BENCH, dict(impls=["copy", "fused", *COMPILED], shapes=WIDTHS)),
    _counted("masked_counters_12672", "masked", shape=[4096, 12672]),
    _counted("masked_counters_8320", "masked", shape=[4096, 8320]),
    _counted("masked_counters_781", "masked", shape=[4096, 781]),
    ("masked_widths", _bench, BENCH, dict(impls=BLOCKS, shapes=PADDED)),
    ("masked_widths_bfloat16", _bench, BENCH, dict(impls=BLOCKS, shapes=PADDED, dtype=_BF16)),
    ("masked_narrow", _bench, BENCH, dict(impls=CHEATS, shapes=[[32768, 4096]])),
    ("masked_far", measurements.reach_far_row, FAR, FAR_ROW, Needs(gib=10)),
    ("tiled_starts", measurements.idle_programs, STARTS, STARTED),
    ("tiled_counters", count_layouts, (LAYOUT, *COUNTERS), TILED, _NCU),
    ("tiled_layouts_float32", _layouts, (LAYOUT, *TIMES), dict(**TILED, dtype=_F32)),
    ("tiled_layouts_bfloat16", _layouts, (LAYOUT, *TIMES), dict(**TILED, dtype=_BF16)),
    ("tiled_rows_float32", _sweep, _option("rows"), dict(**TILED_ROWS, dtype=_F32)),
    ("tiled_rows_bfloat16", _sweep, _option("rows"), dict(**TILED_ROWS, dtype=_BF16)),
    ("tiled_narrow", _bench, BENCH, dict(impls=["copy", "masked", "tiled"], shapes=NARROW)),
    ("tiled_map_float32", _sweep, _option("num_warps"), dict(**TILED_WARPS, dtype=_F32)),
    ("tiled_map_bfloat16", _sweep, _option("num_warps"), dict(**TILED_WARPS, dtype=_BF16)),
    ("tiled_rule_float32", _sweep, _option("num_warps"), dict(**RULE, dtype=_F32)),
    ("tiled_rule_bfloat16", _sweep, _option("num_warps"), dict(**RULE, dtype=_BF16)),
    ("tiled_tuning", timings.autotune_cost, TUNING, TUNED),
    _counted("persistent_counters", "persistent", shape=[4096, 12672]),
    ("persistent_host", timings.launch_overhead, OVERHEAD, dict(impls=CALLS, shape=[64, 256])),
    ("persistent_float32", _bench, BENCH, dict(impls=LOOPS, shapes=LARGE, dtype=_F32)),
    ("persistent_bfloat16", _bench, BENCH, dict(impls=LOOPS, shapes=LARGE, dtype=_BF16)),
    ("persistent_stages_bfloat16", _bench, BENCH, dict(impls=STAGES, shapes=BIG, dtype=_BF16)),
    ("persistent_rounds", measurements.bench_rounds, ROUNDS, WHOLE_ROUNDS),
    ("persistent_suspects", _bench, BENCH, SUSPECTED),
    ("persistent_suspects_plans", _residents, RESIDENT, dict(impls=SUSPECTS, shape=WIDE)),
    ("winners", measurements.bench_cases, (LAYOUT, *BENCH), WINNERS),
    ("ladder", _bench, BENCH, dict(impls=LADDER, shapes=[WIDE])),
    ("occupancy_plans", _plans, PLANS, dict(m=65536, ns=[2**k for k in range(8, 16)])),
    ("occupancy_driver", measurements.compare_with_driver, DRIVER, dict(m=4096), _NVIDIA),
    ("occupancy_programs", measurements.bench_programs, _option("programs"), PROGRAMS),
    ("occupancy_latency", measurements.pointer_latency, LATENCY, dict(hops=4096, distance=520)),
    ("occupancy_warps", _sweep, _option("num_warps"), WARPS),
    ("survey_counters", marked_counters.count_surveyed, SURVEYED, SURVEYED_AT, _NCU),
    ("cdna_grids", measurements.grid_sizes, GRIDS, dict(ns=[1024, 4096, 16384], num_warps=8)),
    ("long_race", _bench, BENCH, dict(**LONG_RACE, budget=0.1)),
    ("long_race_bfloat16", _bench, BENCH, dict(**LONG_HALF, budget=0.1)),
    ("long_counters", measurements.count_cases, LONG_COUNTERS, LONG_COUNTED, _NCU),
    ("long_plans", _residents, RESIDENT, ONLINE_AND_SPLIT),
    ("long_few", _bench, BENCH, dict(**LONG_FEW, budget=0.05)),
    ("long_few_whole", _bench, BENCH, dict(**LONG_WHOLE, budget=0.05)),
    ("long_parts", _sweep, _option("columns"), LONG_PARTS),
    _counted("backward_torch_counters", TORCH_BACKWARD, **BACKWARD),
    _counted("backward_counters", OUR_BACKWARD, **BACKWARD),
    ("backward_race", _dtypes, BENCH, dict(impls=RACED, shapes=GRADIENTS, **RACE)),
    ("backward_recompute", _dtypes, BENCH, RECOMPUTED),
    ("backward_steps", measurements.training_losses, TRAINED, STEPS),
    ("backward_step_counters", measurements.step_counters, TRAINED_COUNTERS, STEP, _NCU),
    ("backward_host", measurements.step_times, TRAINED_TIMES, SMALL_STEPS),
    ("scoreboard_float32", _compare, COMPARED, dict(**SCORED_F32, dtype=_F32)),
    ("scoreboard_bfloat16", _compare, COMPARED, dict(**SCORED_BF16, dtype=_BF16)),
    ("scoreboard_backward_float32", _compare, COMPARED, dict(**SCORED_BACKWARD, dtype=_F32)),
    ("scoreboard_backward_bfloat16", _compare, COMPARED, dict(**SCORED_BACKWARD, dtype=_BF16)),
    ("scoreboard_counters", marked_counters.count_calls, SHAPES_COUNTERS, SCORED_COUNTERS, _NCU),
    ("scoreboard_host", timings.caller_times, CALLER, SCORED_HOST),
    ("your_kernel_rms", _beside_copy, BENCH, RMS_NORMS),
    _counted("your_kernel_rms_counters", {"RMS norm, both": f"{_YOURS}rms_norms"}, **RMS_NORM),
    ("your_kernel_race", _beside_copy, BENCH, CROSS_ENTROPIES),
    _counted("your_kernel_counters", CROSS_ENTROPY_OURS, **CROSS_ENTROPY),
)

EXPERIMENTS: dict[str, Experiment] = {
    id: Experiment(id, measure, arguments, columns, *needs)
    for id, measure, columns, arguments, *needs in _ROWS
}


def find_experiments(ids: Sequence[str] = ()) -> list[Experiment]:
    """The experiments with these ids, or all of them. Raises LookupError for an unknown id."""
    for id in ids:
        if id not in EXPERIMENTS:
            known = ", ".join(EXPERIMENTS)
            raise LookupError(f"no experiment is named {id!r}: give one of {known}")
    return [EXPERIMENTS[id] for id in ids or EXPERIMENTS]

"""The experiments of the book: what is measured, with what arguments, into which columns.

A recording is keyed by an experiment's id, arguments and columns with their units. The function
that measures is no part of the key, nor is what a label stands for: renaming either of them needs
no GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from memtraffic import benchmark
from memtraffic.benchmark.roof import roof
from memtraffic_book import marked_counters, measurements

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
class Experiment:
    """Something measured on a GPU: a function, its arguments as JSON has them, and its columns."""

    id: str
    measure: Callable[..., pd.DataFrame]
    arguments: dict[str, Any]
    columns: tuple[Column, ...]

    @property
    def schema(self) -> dict[str, str]:
        """The unit of each column, by its name."""
        return {column.name: column.unit for column in self.columns}

    def run(self) -> pd.DataFrame:
        """Measures. Raises ValueError if the result has other columns than it should have."""
        frame = self.measure(**self.arguments)
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
    """The columns of `bench_option`."""
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
BLOCKS = ["copy", "masked", "few warps", "two blocks"]
CHEATS = ["fused", "masked", "block of 512"]
CALLS = ["torch.softmax", "tiled", "uncached", "persistent"]
STAGES = ["copy", "tiled", "1 stage", "2 stages", "3 stages"]
SUSPECTS = [
    *("tiled copy", "copy, 1 stage", "copy, 2 stages", "copy, 3 stages"),
    *("tiled", "tiled, 8 warps", "1 stage", "1 stage, 8 warps"),
    *("1 stage, 8 warps, program per tile", "1 stage, 8 warps, dynamic order"),
    *("2 stages", "2 stages, twice the programs", "2 stages, program per tile", "3 stages"),
]
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
RACED = ["copy", "one line of PyTorch", "PyTorch's backward", "our backward"]
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
CALLERS = ["torch.softmax", "memtraffic.softmax"]

_POWERS = [1, 2, 4, 8, 16, 32]
TILED = dict(impl="tiled", shape=[4096, 4096])
STARTED = dict(programs=[4096, 16384, 65536, 262144], warps=[1, 4, 16])
TILED_ROWS = dict(impl="tiled", shapes=NARROW, option="rows", values=_POWERS)
TILED_WARPS = dict(impl="tiled", shapes=LARGE, option="num_warps", values=_POWERS)
RULE = dict(impl="tiled", shapes=UNSEEN, option="num_warps", values=_POWERS)
TUNED = dict(impl="tiled", tuned="autotuned", shapes=[[65536, 512], [8192, 4096], [4096, 32768]])
WARPS = dict(impl="persistent", shapes=[WIDE], option="num_warps", values=[8, 16, 32])
PROGRAMS = dict(
    impl="persistent", shape=[65536, 4096], programs_per_sm=[0.25, 0.5, 1, 2, 3, 4, 6, 8, 12, 24]
)

IN_FLIGHT_OF = dict(kib_per_sm=[1, 2, 4, 8, 12, 16, 24, 32, 48, 64], gib=2)
REPEATED = dict(impls=["copy", "naive", "tiled"], shapes=NARROW_AND_WIDE, repeats=15)
COUNTED_OFF = dict(
    impls=["tiled"], shapes=[[4096, 512], [4096, 8192]], launches=[3, 4, 5, 6], cycles=100
)
CALLED = dict(impls=["torch.softmax", "tiled", "persistent"], shapes=NARROW_AND_WIDE)
WHOLE_ROUNDS = dict(impls=STAGES, n=16384, rounds=[30, 31, 62], extra=[0, 4])
SUSPECTED = dict(impls=["copy", *SUSPECTS], shapes=FILLED)
SCORED = dict(impls=[*RIVALS, *LADDER[1:]], shapes=SCORED_AT, compiled=COMPILERS, budget=0.008)
SCORED_BACKWARD = dict(
    impls=["add", *BACKWARDS], shapes=SCORED_AT, op="softmax_backward", budget=0.008
)
SCORED_COUNTERS = dict(impl="memtraffic.softmax", shapes=SCORED_AT, dtypes=["float32", "bfloat16"])
SCORED_HOST = dict(
    impls=[*CALLERS, *(f"{name}, gradient" for name in CALLERS)],
    shapes=[[4096, 2**k] for k in range(6, 12)],
    calls=100,
)
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
LONG_RACE = dict(impls=["copy", "torch.softmax", "three passes", "online", "split"], shapes=LONG)
LONG_HALF = dict(impls=["copy", "online", "split"], shapes=LONG[2:], dtype="bfloat16")
LONG_FEW = dict(impls=["copy", "torch.softmax", "online", "split, 1024 columns"], shapes=EIGHT_ROWS)
LONG_WHOLE = dict(impls=["tiled", "split, 1024 columns"], shapes=EIGHT_ROWS[:4])  # tiled takes them
LONG_PARTS = dict(
    impl="split", shapes=[[8, 65536]], option="columns", values=[512, 1024, 2048, 4096, 8192]
)
LONG_COUNTED = [
    dict(impl=impl, shape=[2**27 // n, n])
    for impl, n in (
        ("torch.softmax", 131072),
        *(("online", n) for n in (4096, 16384, 32768, 131072)),
        ("split", 131072),
    )
]
BACKWARD = dict(shape=WIDE, op="softmax_backward")
RACE = dict(op="softmax_backward", dtypes=["float32", "bfloat16"], budget=0.1)
RECOMPUTED = dict(
    impls=["our backward", "backward from x"],
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
RMS_NORMS = dict(
    impls=["RMS norm, PyTorch", "RMS norm, row", "RMS norm, loop"],
    inputs=RMS_NORM["inputs"],
    shapes=[RMS_NORM["shape"]],
)
CROSS_ENTROPIES = dict(
    impls=["cross-entropy, PyTorch", "cross-entropy"],
    inputs=CROSS_ENTROPY["inputs"],
    shapes=[CROSS_ENTROPY["shape"]],
    dtypes=["float32", "bfloat16"],
)

_bench, _counters = measurements.bench, measurements.counters
_layouts, _sweep = benchmark.bench_layouts, benchmark.bench_option
_dtypes, _compare = measurements.bench_dtypes, measurements.compare
_beside_copy = measurements.bench_beside_copy
_plans, _residents = measurements.launch_plans, measurements.resident_plans
_F32, _BF16 = "float32", "bfloat16"

# Id, function, columns, arguments; in the order of the book.
_ROWS: tuple[tuple[str, Callable[..., pd.DataFrame], tuple[Column, ...], dict[str, Any]], ...] = (
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
    ("timing_host", measurements.caller_times, CALLER, CALLED),
    ("naive_elementwise", measurements.elementwise, ELEMENTWISE, dict(shape=WIDE)),
    ("naive_counters", _counters, COUNTERS, dict(impl="naive", shape=WIDE)),
    ("compiled_counters", _counters, COMPILED_COUNTERS, dict(impl="compile(naive)", shape=WIDE)),
    ("persistent_reduction_counters", _counters, COUNTERS, dict(impl=COMPILED[2], shape=WIDE)),
    ("torch_softmax_counters", _counters, COUNTERS, dict(impl="torch.softmax", shape=WIDE)),
    ("fused_counters", _counters, COUNTERS, dict(impl="fused", shape=WIDE)),
    ("fused_race", _bench, BENCH, dict(impls=["copy", "naive", "fused"], shapes=[WIDE])),
    ("fused_widths", _bench, BENCH, dict(impls=["copy", "fused", *COMPILED], shapes=WIDTHS)),
    ("masked_counters_12672", _counters, COUNTERS, dict(impl="masked", shape=[4096, 12672])),
    ("masked_counters_8320", _counters, COUNTERS, dict(impl="masked", shape=[4096, 8320])),
    ("masked_counters_781", _counters, COUNTERS, dict(impl="masked", shape=[4096, 781])),
    ("masked_widths", _bench, BENCH, dict(impls=BLOCKS, shapes=PADDED)),
    ("masked_widths_bfloat16", _bench, BENCH, dict(impls=BLOCKS, shapes=PADDED, dtype=_BF16)),
    ("masked_narrow", _bench, BENCH, dict(impls=CHEATS, shapes=[[32768, 4096]])),
    ("masked_far", measurements.reach_far_row, FAR, dict(row=70000, row_stride=32768)),
    ("tiled_starts", measurements.idle_programs, STARTS, STARTED),
    ("tiled_counters", measurements.count_layouts, (LAYOUT, *COUNTERS), TILED),
    ("tiled_layouts_float32", _layouts, (LAYOUT, *TIMES), dict(**TILED, dtype=_F32)),
    ("tiled_layouts_bfloat16", _layouts, (LAYOUT, *TIMES), dict(**TILED, dtype=_BF16)),
    ("tiled_rows_float32", _sweep, _option("rows"), dict(**TILED_ROWS, dtype=_F32)),
    ("tiled_rows_bfloat16", _sweep, _option("rows"), dict(**TILED_ROWS, dtype=_BF16)),
    ("tiled_narrow", _bench, BENCH, dict(impls=["copy", "masked", "tiled"], shapes=NARROW)),
    ("tiled_map_float32", _sweep, _option("num_warps"), dict(**TILED_WARPS, dtype=_F32)),
    ("tiled_map_bfloat16", _sweep, _option("num_warps"), dict(**TILED_WARPS, dtype=_BF16)),
    ("tiled_rule_float32", _sweep, _option("num_warps"), dict(**RULE, dtype=_F32)),
    ("tiled_rule_bfloat16", _sweep, _option("num_warps"), dict(**RULE, dtype=_BF16)),
    ("tiled_tuning", measurements.autotune_cost, TUNING, TUNED),
    ("persistent_counters", _counters, COUNTERS, dict(impl="persistent", shape=[4096, 12672])),
    ("persistent_host", measurements.launch_overhead, OVERHEAD, dict(impls=CALLS, shape=[64, 256])),
    ("persistent_float32", _bench, BENCH, dict(impls=LOOPS, shapes=LARGE, dtype=_F32)),
    ("persistent_bfloat16", _bench, BENCH, dict(impls=LOOPS, shapes=LARGE, dtype=_BF16)),
    ("persistent_stages_bfloat16", _bench, BENCH, dict(impls=STAGES, shapes=BIG, dtype=_BF16)),
    ("persistent_rounds", measurements.bench_rounds, ROUNDS, WHOLE_ROUNDS),
    ("persistent_suspects", _bench, BENCH, SUSPECTED),
    ("persistent_suspects_plans", _residents, RESIDENT, dict(impls=SUSPECTS, shape=WIDE)),
    ("winners", measurements.bench_cases, (LAYOUT, *BENCH), WINNERS),
    ("ladder", _bench, BENCH, dict(impls=LADDER, shapes=[WIDE])),
    ("occupancy_plans", _plans, PLANS, dict(m=65536, ns=[2**k for k in range(8, 16)])),
    ("occupancy_driver", measurements.compare_with_driver, DRIVER, dict(m=4096)),
    ("occupancy_programs", measurements.bench_programs, _option("programs"), PROGRAMS),
    ("occupancy_latency", measurements.pointer_latency, LATENCY, dict(hops=4096, distance=520)),
    ("occupancy_warps", _sweep, _option("num_warps"), WARPS),
    ("survey_counters", marked_counters.count_surveyed, SURVEYED, SURVEYED_AT),
    ("cdna_grids", measurements.grid_sizes, GRIDS, dict(ns=[1024, 4096, 16384], num_warps=8)),
    ("long_race", _bench, BENCH, dict(**LONG_RACE, budget=0.1)),
    ("long_race_bfloat16", _bench, BENCH, dict(**LONG_HALF, budget=0.1)),
    ("long_counters", measurements.count_cases, LONG_COUNTERS, dict(cases=LONG_COUNTED)),
    ("long_plans", _residents, RESIDENT, dict(impls=["online", "split"], shape=[64, 131072])),
    ("long_few", _bench, BENCH, dict(**LONG_FEW, budget=0.05)),
    ("long_few_whole", _bench, BENCH, dict(**LONG_WHOLE, budget=0.05)),
    ("long_parts", measurements.bench_option, _option("columns"), LONG_PARTS),
    ("backward_torch_counters", _counters, COUNTERS, dict(impl="PyTorch's backward", **BACKWARD)),
    ("backward_counters", _counters, COUNTERS, dict(impl="our backward", **BACKWARD)),
    ("backward_race", _dtypes, BENCH, dict(impls=RACED, shapes=GRADIENTS, **RACE)),
    ("backward_recompute", _dtypes, BENCH, RECOMPUTED),
    ("backward_steps", measurements.training_losses, TRAINED, STEPS),
    ("backward_step_counters", measurements.step_counters, TRAINED_COUNTERS, STEP),
    ("backward_host", measurements.step_times, TRAINED_TIMES, SMALL_STEPS),
    (
        "scoreboard_float32",
        _compare,
        COMPARED,
        dict(**SCORED, compiled_shapes=COMPILED_AT, dtype=_F32),
    ),
    (
        "scoreboard_bfloat16",
        _compare,
        COMPARED,
        dict(**SCORED, compiled_shapes=COMPILED_AT[1::2], dtype=_BF16),
    ),
    ("scoreboard_backward_float32", _compare, COMPARED, dict(**SCORED_BACKWARD, dtype=_F32)),
    ("scoreboard_backward_bfloat16", _compare, COMPARED, dict(**SCORED_BACKWARD, dtype=_BF16)),
    ("scoreboard_counters", marked_counters.count_calls, SHAPES_COUNTERS, SCORED_COUNTERS),
    ("scoreboard_host", measurements.caller_times, CALLER, SCORED_HOST),
    ("your_kernel_rms", _beside_copy, BENCH, RMS_NORMS),
    ("your_kernel_rms_counters", _counters, COUNTERS, dict(impl="RMS norm, both", **RMS_NORM)),
    ("your_kernel_race", _beside_copy, BENCH, CROSS_ENTROPIES),
    ("your_kernel_counters", _counters, COUNTERS, dict(impl="cross-entropy", **CROSS_ENTROPY)),
)

EXPERIMENTS: dict[str, Experiment] = {
    id: Experiment(id, measure, arguments, columns) for id, measure, columns, arguments in _ROWS
}


def find_experiments(ids: Sequence[str] = ()) -> list[Experiment]:
    """The experiments with these ids, or all of them. Raises LookupError for an unknown id."""
    for id in ids:
        if id not in EXPERIMENTS:
            known = ", ".join(EXPERIMENTS)
            raise LookupError(f"no experiment is named {id!r}: give one of {known}")
    return [EXPERIMENTS[id] for id in ids or EXPERIMENTS]

"""The experiments of the book: what is measured, with what arguments, into which columns.

A recording is keyed by an experiment's id, its arguments, and its columns with their units.
Arguments are JSON and say what is run: `"fn": "tiled"`, or `{"fn": "persistent", "num_stages": 1}`;
`impls` has labels, under which pages show what they name. The function that measures is no part of
the key. Who renames a function that arguments name renames it in `machine.json` as well.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from memtraffic import benchmark, device
from memtraffic.benchmark.roof import roof
from memtraffic.meters.sectors import COUNTERS as SECTORS
from memtraffic.tensors import MEMORY_LAYOUTS
from memtraffic_book import many_gpus
from memtraffic_book import measurements as m
from memtraffic_book.marked_counters import AMOUNTS as AMOUNT_NAMES
from memtraffic_book.marked_counters import count_sectors, count_surveyed, count_surveyed_sectors

Measure = Callable[..., pd.DataFrame]


@dataclass(frozen=True)
class Column:
    """One column of an experiment, and how far it may be from its recording when measured again.

    tolerance: relative to the recorded number, doubled in rows under 20 µs; 0 where the value must
    be equal; None where it is not compared.
    """

    name: str
    unit: str = ""
    tolerance: float | None = 0.0


@dataclass(frozen=True)
class Needs:
    """What a machine must have for an experiment, besides a GPU.

    commands: on the PATH. vendor: of the GPU, such as "nvidia"; "" for any. gib: of its memory.
    gpus: how many. threads: that an SM of NVIDIA's holds. gb_per_s: of its memory, or a reader
    would wait for longer than a minute.
    """

    commands: tuple[str, ...] = ()
    vendor: str = ""
    gib: float = 0
    gpus: int = 1
    threads: int = 0
    gb_per_s: float = 0

    def lacking(self, reader: bool = False) -> str:
        """What of it this machine does not have, as text; "" if it has all. Needs a GPU.

        reader: whether somebody waits.
        """
        lacks = [f"the command `{name}`" for name in self.commands if not shutil.which(name)]
        if self.vendor and (gpu := device.this_gpu()).vendor != self.vendor:
            lacks.append(f"a GPU of {self.vendor}, not an {gpu.product}")
        if self.gib and self.gib > (gib := torch.cuda.mem_get_info()[1] / 2**30):
            lacks.append(f"{self.gib:.3g} GiB of GPU memory, not {gib:.1f}")
        if self.gpus > 1 and self.gpus > (there := torch.cuda.device_count()):
            lacks.append(f"{self.gpus} GPUs, not {there}")
        if self.threads:
            held = getattr(device.this_gpu(), "max_threads_per_sm", self.threads)
            lacks += [f"SMs of {self.threads} threads, not {held}"] * (held < self.threads)
        if reader and self.gb_per_s:
            speed = device.this_gpu().datasheet_bytes_per_s * 1e-9
            slow = f"a memory of {self.gb_per_s:.0f} GB/s, not {speed:.0f}, or patience"
            lacks += [slow] * (0 < speed < self.gb_per_s)
        return ", ".join(lacks)


@dataclass(frozen=True)
class Experiment:
    """Something measured on a GPU: a function, its arguments as JSON has them, and its columns."""

    id: str
    measure: Measure
    arguments: dict[str, Any]
    columns: tuple[Column, ...]
    needs: Needs = Needs()

    @property
    def schema(self) -> dict[str, str]:
        """The unit of each column, by its name."""
        return {column.name: column.unit for column in self.columns}

    def run(self) -> pd.DataFrame:
        """Measures.

        Raises NoGpuError without a GPU, ValueError if the result has other columns than it should.
        """
        device.require_gpu(self.id)
        frame = self.measure(**m.resolve(self.arguments))
        if list(frame.columns) != list(self.schema):
            wanted = list(self.schema)
            raise ValueError(f"{self.id}: measured columns {list(frame.columns)}, not {wanted}")
        return frame


# ---- columns


def _of_sectors(unit: str) -> str:
    """The counters of this unit, and the columns of what is predicted of them."""
    return " ".join(f"{name} predicted_{name}" for name in SECTORS if name.endswith(unit))


BYTES = "instruction_read_bytes l1_l2_read_bytes dram_read_bytes dram_write_bytes"
CALLED = "eager_us eager_us_p20 eager_us_p80 graph_us graph_us_p20 graph_us_p80"
# Columns by their unit and tolerance. What is not here is text, which must be equal.
NUMBERS: dict[tuple[str, float | None], str] = {
    ("rows", 0): "m",
    ("columns", 0): "n",
    ("µs", 0.1): "us copy_us",
    ("µs", None): f"us_p20 us_p80 us_reversed {CALLED}",  # of one run, or of a host
    ("ns", 0.1): "ns latency_ns",
    ("GB/s", 0.1): "gb_per_s copy_gb_per_s",
    ("GB/s", 0): "datasheet_gb_per_s",
    ("TFLOP/s", 0.1): "fp32_tflop_per_s",
    ("T/s", 0.1): "t_per_s",
    ("per clock", 0.1): "per_clock",
    ("GHz", 0.1): "clock_ghz",
    ("MiB", 0): "mib l2_mib",
    ("KiB", 0): "kib_per_sm",
    ("instructions", 0.1): "load_instructions",
    ("bytes", 0.1): BYTES,
    ("sectors", 0.1): "l2_write_sectors",
    **{(unit, 0): _of_sectors(unit) for unit in ("requests", "sectors")},
    ("launches", 0): "launches",
    ("processors", 0): "sms",
    ("programs", 0): "programs",
    ("warps", 0): "warps slots",
    ("configurations", 0.1): "asked equal",
    ("loads", 0): "hops loads",
    ("bytes", 0): "load_bytes flight_bytes",
}
_COLUMNS = {name: Column(name, *how) for how, names in NUMBERS.items() for name in names.split()}


def columns(names: str, **tolerances: float | None) -> tuple[Column, ...]:
    """The columns with these names; some may have another tolerance than usual."""
    known = [_COLUMNS.get(name, Column(name)) for name in names.split()]
    return tuple(
        dataclasses.replace(it, tolerance=tolerances.get(it.name, it.tolerance)) for it in known
    )


SPREAD = "us us_p20 us_p80"
TIMES = f"m n dtype {SPREAD} gb_per_s"
BENCH = columns(f"impl {TIMES}")
JUDGED = f"impl m n dtype {SPREAD} us_reversed gb_per_s"
COMPARED = columns(f"{JUDGED} note", note=None)  # in place of a time
# A package may be absent, see drift.py.
DECIDED = columns(f"{JUDGED} version note {CALLED}", version=None, note=None)
AMOUNTS = " ".join(AMOUNT_NAMES)
PREDICTED = " ".join((*SECTORS, *(f"predicted_{name}" for name in SECTORS)))
COUNTERS = columns(f"kernel {AMOUNTS} ns", kernel=None)  # a compiler's name for it, or ours
# Inductor times several configurations and takes the fastest. How much of the second read the
# caches answer, and how long it takes, therefore differs from run to run.
_TUNED = dict.fromkeys(("l1_l2_read_bytes", "dram_read_bytes", "ns"), 0.5)
# How much of a second read L2 answers depends on which programs happen to run at the same time.
_SHARED = dict.fromkeys(("dram_read_bytes", "dram_write_bytes", "ns"), 0.25)

# ---- shapes and values

WIDE = [4096, 16384]
NARROW = [[65536, 2**k] for k in range(6, 11)]
NARROW_AND_WIDE = [[4096, 512], WIDE]
# 67 million elements each, so that the bytes take far longer than a launch.
GRADIENTS = [[2**26 // n, n] for n in (256, 1024, 4096, 16384, 65536, 131072)]
# Of as many elements each; odd widths, and those of patches, vocabularies and windows, among them.
MAP = [
    [2**26 // n, n]
    for n in (
        *(16, 20, 33, 49, 64, 77, 100, 128, 197, 256, 257, 384, 511, 512, 577, 768, 1000, 1024),
        *(1027, 1500, 2048, 2053, 3001, 4096, 4099, 5003, 6144, 8192, 8320, 10007, 12672, 16384),
        *(20001, 24576, 32000, 32768, 40003, 50257, 50304, 65536, 100003, 128256, 151936, 2**18),
        *(500009, 2**20),
    )
]
DECIDED_AT = [
    [m, n]
    for n in (49, 77, 128, 197, 1024, 4096, 8192, 50257, 128256, 151936)
    for m in (8, 64, 4096, 65536, 2**20)
    if m * n < 2**30
]
IN_FLIGHT = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]  # KiB
SLOTS = [  # programs per SM, warps, elements that a lane loads before it waits
    *([8, 8, 1], [32, 2, 1], [8, 8, 4]),  # every slot of 64
    *([3, 1, 1], [3, 1, 4], [3, 1, 16], [3, 1, 32], [3, 1, 64], [3, 1, 128]),
    *([1, 1, 64], [1, 1, 128], [2, 1, 64], [2, 1, 128], [4, 1, 64]),
]

# ---- what is run, by its label


def _named(*names: str) -> dict[str, str]:
    """Labels that are names of a rung or of a baseline."""
    return {name: name for name in names}


_EXHIBITS, _YOURS = "memtraffic_book.exhibits:", "memtraffic_book.yours:"
COMPILED = ["torch.softmax", "compile(naive)", "compile(persistent reduction)"]
BOTH = ["torch.softmax", "memtraffic.softmax"]
CHEATS = {**_named("fused", "masked"), "block of 512": f"{_EXHIBITS}softmax_block_of_512"}
SUSPECTS = {  # a program per tile: where more are asked for than there are tiles
    "tiled": "tiled",
    "1 stage": {"fn": "persistent", "num_stages": 1},
    "1 stage, 8 warps": {"fn": "persistent", "num_warps": 8, "num_stages": 1},
    "2 stages": {"fn": "persistent", "num_stages": 2},
    "2 stages, program per tile": {"fn": "persistent", "num_stages": 2, "programs": 2**20},
    "3 stages": {"fn": "persistent", "num_stages": 3},
}
REPEATED = ["copy", "naive", "tiled"]
MAPPED = _named(
    *("copy", "torch.softmax", "naive", "fused", "masked", "tiled", "chunks", "persistent"),
    *("online", "split", "memtraffic.softmax"),
)
LONG_FEW = {
    **_named("copy", "torch.softmax", "online"),
    "split, 1024 columns": {"fn": "split", "block": 512, "chunks": 2},
}
TORCH_BACKWARD = {"PyTorch's backward": "torch.softmax backward"}
OUR_BACKWARD = {"our backward": f"{_EXHIBITS}backward_ours"}
RACED = {
    "copy": "copy",
    "one line of PyTorch": f"{_EXHIBITS}backward_lines",
    **TORCH_BACKWARD,
    **OUR_BACKWARD,
}
# Of each package, kernels with a formula that no autotuner changes.
_LIGER = "liger_kernel.transformers.functional:liger"
PUBLISHED = [
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
_ATTENTION = "memtraffic_book.attention:"
ATTENTIONS = {
    f"{name}{', with gradient' * (what == 'gradient')}": f"{_ATTENTION}{what}_{how}"
    for what in ("attend", "gradient")
    for name, how in {
        "torch.softmax": "with_torch",
        "memtraffic.softmax": "with_ours",
        "scaled_dot_product_attention": "fused",
    }.items()
}
RMS_NORMS = {
    "RMS norm, PyTorch": f"{_YOURS}torch_rms_norm",
    "RMS norm, row": f"{_YOURS}rms_norm",
    "RMS norm, loop": f"{_YOURS}rms_norm_loop",
}
BOTH_NORMS = {"RMS norm, both": f"{_YOURS}rms_norms"}
CROSS_ENTROPY = {"cross-entropy": f"{_YOURS}cross_entropy"}
CROSS_ENTROPIES = {"cross-entropy, PyTorch": f"{_YOURS}torch_cross_entropy", **CROSS_ENTROPY}

# ---- arguments that several experiments share

DTYPES = ["float32", "bfloat16"]
TILED = dict(fn="tiled", shape=[4096, 4096])
TILE_ROWS = dict(fn="tiled", shapes=NARROW, option="rows", values=[1, 2, 4, 8, 16, 32])
NUM_WARPS = dict(option="num_warps", values=[8, 16, 32])
PROGRAMS = dict(
    fn="persistent", shape=[65536, 4096], programs_per_sm=[0.25, 0.5, 1, 2, 3, 4, 6, 8, 12, 24]
)
LLAMA = [2**26 // 128256, 128256]  # as the map has it
LONG_COUNTED = dict(
    impls=_named("torch.softmax", "online", "split"),
    cases=[
        ["torch.softmax", LLAMA],
        *(["online", [2**26 // n, n]] for n in (4096, 16384, 32768, 128256)),
        ["split", LLAMA],
    ],
)
BACKWARD = dict(inputs="softmax_backward", shape=WIDE)
RACE = dict(inputs="softmax_backward", dtypes=DTYPES, budget=0.1)
SHARDED = dict(n_rows=8192, widths=[16384, 32768, 65536], dtypes=DTYPES, ranks=2)
# Whose sectors are predicted; at widths that are wide, odd, a power of two, and long.
_METERED = ("fused", "masked", "tiled", "online", "persistent", "memtraffic:softmax")
METERED = dict.fromkeys(_METERED, "softmax")
OTHERS_METERED = dict.fromkeys(OUR_BACKWARD.values(), "softmax_backward")
SURVEYED = dict(sizes={"M": 160, "N": 128}, dtype="float32")
MIXED = [[70, 781], [64, 1000], [70, 1024], [17, 4097], [16, 8320]]
# A reader's kernels, and what they are called with.
SQUARE, WEIGHTED = [8192, 8192], dict(inputs="M,N N")
# M heads, of texts of N words.
ATTENDED = dict(inputs="M,N,64 M,N,64 M,N,64", dtype="bfloat16", budget=0.1)
LOGITS = [4096, 32768]
LABELLED = "M,N M:int64<N"
LOSSES = dict(inputs=LABELLED, shapes=[LOGITS], dtypes=DTYPES)

# ---- the experiments

_NCU = Needs(commands=("ncu",), vendor="nvidia")
# The columns of what each function measures, and of experiments that have their own.
COLUMNS: dict[Measure | str, tuple[Column, ...]] = {
    roof: columns("gpu copy_gb_per_s datasheet_gb_per_s fp32_tflop_per_s l2_mib"),
    **dict.fromkeys((benchmark.bench, m.bench_dtypes), BENCH),
    m.bench_repeats: columns(f"repeat impl {TIMES}"),
    m.bench_layouts: columns(f"layout {TIMES}"),
    # The option comes before these.
    **dict.fromkeys((m.bench_option, m.bench_programs), columns(f"{TIMES} copy_us")),
    m.compare: COMPARED,
    m.decide: DECIDED,
    m.arithmetic: columns(f"what sms clock_ghz {SPREAD} t_per_s per_clock"),
    m.bytes_in_flight: columns(f"access kib_per_sm sms {SPREAD} gb_per_s latency_ns"),
    m.slots_in_flight: columns(
        "access programs warps slots load_bytes loads flight_bytes sms "
        f"{SPREAD} gb_per_s copy_gb_per_s"
    ),
    m.l2_read: columns(f"cache mib {SPREAD} gb_per_s"),
    m.idle_programs: columns(f"programs warps {SPREAD}"),
    "launch_floor": columns(f"programs warps {SPREAD}", us=0.25),  # of which a fraction is much
    m.pointer_latency: columns("hops us latency_ns"),
    m.compare_with_driver: columns("kernels asked equal"),
    m.step_counters: (Column("softmax"), Column("kernels", "kernels", 0.2), *COUNTERS[1:]),
    many_gpus.sharded_times: columns(f"impl m n dtype {SPREAD}"),
    m.counters: COUNTERS,
    "compiled_counters": columns(f"kernel {AMOUNTS} ns", kernel=None, **_TUNED),
    m.count_cases: columns(f"impl m n kernel {AMOUNTS} ns", kernel=None, **_SHARED),
    m.count_layouts: (Column("layout"), *COUNTERS),
    count_surveyed: columns(
        f"package version kernel direction at launches {AMOUNTS} missing", **_TUNED
    ),
    **dict.fromkeys(
        (count_sectors, count_surveyed_sectors),
        columns(f"fn inputs shape dtype layout {PREDICTED} refused", refused=None),
    ),
}
NEEDS: dict[Measure | str, Needs] = {
    "decision_attention": Needs(gib=16),  # 2 GiB of scores a head's words, and what is made of them
    "occupancy_warps": Needs(threads=2048),  # a page says how much of an H200's SM it fills
    m.compare_with_driver: Needs(vendor="nvidia"),
    roof: Needs(gib=10),
    # Of full SMs; or set beside what an H200 holds.
    m.bytes_in_flight: Needs(threads=2048, gib=10),
    m.slots_in_flight: Needs(threads=2048, gib=10, gb_per_s=400),
    m.bench_programs: Needs(threads=2048, gib=17),
    m.bench_repeats: Needs(gb_per_s=600),
    m.compare: Needs(gib=5, gb_per_s=8000),
    m.decide: Needs(gib=40, gb_per_s=10_000),
    many_gpus.sharded_times: Needs(vendor="nvidia", gpus=2),
    **dict.fromkeys((m.counters, m.count_cases, m.count_layouts, m.step_counters), _NCU),
    **dict.fromkeys((count_surveyed, count_sectors, count_surveyed_sectors), _NCU),
}


def _one(id: str, measure: Measure, /, **arguments: Any) -> Experiment:
    named = {m.bench_option: arguments.get("option"), m.bench_programs: "programs"}.get(measure)
    measured = COLUMNS.get(id, COLUMNS[measure])
    wanted = NEEDS.get(id, NEEDS.get(measure, Needs()))
    return Experiment(
        id, measure, arguments, (*((Column(named),) if named else ()), *measured), wanted
    )


def _typed(id: str, measure: Measure, /, **arguments: Any) -> Iterator[Experiment]:
    """An experiment in both types."""
    for dtype in DTYPES:
        yield _one(f"{id}_{dtype}", measure, dtype=dtype, **arguments)


def _raced(id: str, impls: Any, shapes: Any, **more: Any) -> Experiment:
    """Times implementations beside one another."""
    return _one(id, benchmark.bench, impls=impls, shapes=shapes, **more)


def _counted(id: str, impl: Any, **more: Any) -> Experiment:
    """Reads the hardware counters of one implementation."""
    return _one(id, m.counters, impls=impl if isinstance(impl, dict) else [impl], **more)


def _sectors(id: str, calls: Any, shapes: Any, layouts: Any = ("packed",)) -> Experiment:
    """Counts what the warps of kernels touch, beside what is predicted."""
    how = dict(shapes=shapes, dtypes=DTYPES, layouts=list(layouts))
    return _one(id, count_sectors, calls=calls, **how)


_ALL = (  # in the order of the book
    _one("roof", roof),
    _raced("first_copy", {"copy": "copy", "copy_rows": f"{_EXHIBITS}first_copy"}, [WIDE]),
    _one("arithmetic", m.arithmetic, trips=256),
    _one("bytes_in_flight", m.bytes_in_flight, kib_per_sm=IN_FLIGHT, gib=2),
    _one("slots_in_flight", m.slots_in_flight, configurations=SLOTS, gib=2),
    _one("launch_floor", m.idle_programs, programs=[0, 1, 4096], warps=[4]),
    _one("l2_read", m.l2_read, mib=[0.5, *(2**k for k in range(10))]),
    _one("timing_repeats", m.bench_repeats, impls=REPEATED, shapes=NARROW_AND_WIDE, repeats=15),
    _counted("naive_counters", "naive", shape=WIDE),
    _counted("compiled_counters", "compile(naive)", shape=WIDE),
    _counted("persistent_reduction_counters", COMPILED[2], shape=WIDE),
    _counted("torch_softmax_counters", "torch.softmax", shape=WIDE),
    _counted("fused_counters", "fused", shape=WIDE),
    _raced("fused_race", ["copy", "naive", "fused"], [WIDE]),
    _raced("fused_widths", ["copy", "fused", *COMPILED], [[4096, 2**k] for k in range(8, 16)]),
    _counted("masked_counters_8320", "masked", shape=[4096, 8320]),
    _raced("masked_narrow", CHEATS, [[32768, 4096]]),
    _one("tiled_starts", m.idle_programs, programs=[4**k for k in (6, 7, 8, 9)], warps=[1, 4, 16]),
    _one("tiled_counters", m.count_layouts, **TILED),
    _sectors("sectors_packed", METERED, MIXED),
    _sectors("sectors_layouts", METERED, MIXED[:3:2], layouts=[*MEMORY_LAYOUTS][1:]),
    _sectors("sectors_others", OTHERS_METERED, MIXED),
    _one("sectors_blind", count_surveyed_sectors, **SURVEYED, table="blind.csv"),
    *_typed("tiled_layouts", m.bench_layouts, **TILED),
    _one("tiled_rows_float32", m.bench_option, **TILE_ROWS, dtype="float32"),
    _raced("tiled_narrow", ["copy", "masked", "tiled"], NARROW),
    _counted("persistent_counters", "persistent", shape=WIDE),
    _raced("persistent_suspects", {"copy": "copy", **SUSPECTS}, [WIDE]),
    _raced("ladder", ["copy", "naive", "fused", "masked", "tiled", "persistent"], [WIDE]),
    *_typed("map", m.compare, impls=MAPPED, shapes=MAP, budget=0.02),
    *_typed("decision", m.decide, shapes=DECIDED_AT, budget=0.02),
    *_typed("decision_gradient", m.decide, shapes=DECIDED_AT, gradient=True, budget=0.02),
    _raced("decision_attention", ATTENTIONS, [[64, 1024], [64, 4096]], **ATTENDED),
    _one("occupancy_driver", m.compare_with_driver, m=4096),
    _one("occupancy_programs", m.bench_programs, **PROGRAMS),
    _one("occupancy_latency", m.pointer_latency, hops=4096, distance=520),
    _one("occupancy_warps", m.bench_option, fn="persistent", shapes=[WIDE], **NUM_WARPS),
    _one("survey_counters", count_surveyed, kernels=PUBLISHED, sizes={"M": 1024, "N": 8192}),
    _one("long_counters", m.count_cases, **LONG_COUNTED),
    _raced("long_few", LONG_FEW, [[8, 2**k] for k in range(12, 19)], budget=0.05),
    _counted("backward_torch_counters", TORCH_BACKWARD, **BACKWARD),
    _counted("backward_counters", OUR_BACKWARD, **BACKWARD),
    _one("backward_race", m.bench_dtypes, impls=RACED, shapes=GRADIENTS, **RACE),
    _one("backward_step_counters", m.step_counters, softmaxes=BOTH, shape=[2, 4096, 512]),
    _one("many_gpus", many_gpus.sharded_times, **SHARDED),
    _raced("your_kernel_rms", RMS_NORMS, [SQUARE], **WEIGHTED, beside_copy=True),
    _counted("your_kernel_rms_counters", BOTH_NORMS, shape=SQUARE, **WEIGHTED),
    _one("your_kernel_race", m.bench_dtypes, impls=CROSS_ENTROPIES, **LOSSES, beside_copy=True),
)
EXPERIMENTS = {subject.id: subject for subject in _ALL}


def find_experiments(ids: Sequence[str] = ()) -> list[Experiment]:
    """The experiments with these ids, or all of them. Raises LookupError for an unknown id."""
    for id in ids:
        if id not in EXPERIMENTS:
            known = ", ".join(EXPERIMENTS)
            raise LookupError(f"no experiment is named {id!r}: give one of {known}")
    return [EXPERIMENTS[id] for id in ids or EXPERIMENTS]

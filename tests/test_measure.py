from types import SimpleNamespace

import pytest
import torch

from memtraffic import machine, measure
from memtraffic.judge import assert_close
from memtraffic.ladder import naive
from memtraffic.matrices import LAYOUTS
from memtraffic.measure import (
    DATASHEET,
    PEERS,
    against_driver,
    bench,
    everywhere,
    grids,
    host,
    layouts,
    plans,
    published,
    roof,
    seconds,
    summary,
    sweep,
    tuning,
)

needs_gpu = pytest.mark.skipif(not machine.HAS_GPU, reason="needs a GPU")
ON_CPU = ("copy", "torch.softmax")


def test_summary_is_median_fifths_and_bandwidth():
    samples = [5e-6, 1e-6, 2e-6, 4e-6, 3e-6, 6e-6]
    found = summary(samples, 7000)
    assert found == pytest.approx(
        {"us": 3.5, "us_p20": 2.0, "us_p80": 5.0, "gb_per_s": 2.0}
    )
    assert list(found) == ["us", "us_p20", "us_p80", "gb_per_s"]


def test_summary_of_equal_samples():
    assert summary([1e-3] * 20, 10**9) == pytest.approx(
        {"us": 1e3, "us_p20": 1e3, "us_p80": 1e3, "gb_per_s": 1e3}
    )


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("seconds", lambda: seconds([lambda: None])),
        ("bench", lambda: bench(["copy"], [(8, 8)])),
        ("sweep", lambda: sweep("naive", [(8, 8)], "rows", [1])),
        ("layouts", lambda: layouts("naive", 8, 8)),
        ("tuning", lambda: tuning("naive", "naive", [(8, 8)])),
        ("host", lambda: host(["copy"], 8, 8)),
        ("plans", lambda: plans(8, [8])),
        ("against_driver", lambda: against_driver(8)),
        ("roof", roof),
    ],
)
def test_no_gpu(what, call, monkeypatch):
    monkeypatch.setattr(machine, "HAS_GPU", False)
    with pytest.raises(
        RuntimeError,
        match=f"^{what} needs a GPU, and PyTorch finds none on this machine$",
    ):
        call()


def test_an_unknown_name_is_found_before_anything_is_timed(monkeypatch):
    monkeypatch.setattr(machine, "HAS_GPU", True)
    monkeypatch.setattr(measure, "seconds", None)
    with pytest.raises(LookupError, match=r"no rung is named 'torch\.softmux'"):
        bench(["copy", "torch.softmux"], [(8, 8)])


def test_bench_gives_a_row_for_each_shape_and_name(monkeypatch):
    monkeypatch.setattr(machine, "require_gpu", lambda what: None)
    monkeypatch.setattr(
        measure,
        "seconds",
        lambda fns, cold: [[1e-6 * (i + 1)] * 20 for i, fn in enumerate(fns) if [fn()]],
    )
    frame = bench(["copy", "naive"], [(4, 8), (2, 16)], dtype="bfloat16")
    assert list(frame.columns) == list(bench.columns)
    assert [tuple(row)[:5] for row in frame.itertuples(index=False)] == [
        ("copy", 4, 8, "bfloat16", pytest.approx(1)),
        ("naive", 4, 8, "bfloat16", pytest.approx(2)),
        ("copy", 2, 16, "bfloat16", pytest.approx(1)),
        ("naive", 2, 16, "bfloat16", pytest.approx(2)),
    ]
    assert list(frame["gb_per_s"]) == pytest.approx([0.128, 0.064, 0.128, 0.064])


@pytest.fixture
def timed(monkeypatch):
    """What was timed: lists of functions, the first of which took 1 µs, the second 2, and so on."""
    found = []

    def seconds(fns, **options):
        found.append(list(fns))
        for fn in fns:
            fn()
        return [[1e-6 * (i + 1)] * 20 for i in range(len(fns))]

    monkeypatch.setattr(machine, "require_gpu", lambda what: None)
    monkeypatch.setattr(measure, "seconds", seconds)
    return found


@pytest.fixture
def events(monkeypatch, timed):
    """What happened, in order: functions called, the GPU waited for, the clock read. It goes one second a reading."""
    found = []

    def perf_counter():
        found.append("clock")
        return float(found.count("clock"))

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=perf_counter))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: found.append("wait"))
    monkeypatch.setattr(
        measure, "resolve", lambda name: lambda x: found.append((name, tuple(x.shape)))
    )
    return found


def test_bench_takes_functions_by_name(timed):
    frame = bench({"half": lambda x: x / 2, "naive": naive.softmax}, [(4, 8)])
    assert frame["impl"].tolist() == ["half", "naive"]
    assert [fn.func for fn in timed[0]][1] is naive.softmax
    assert timed[0][0].args[0] is timed[0][1].args[0]


def test_a_sweep_has_a_row_for_each_value_that_is_not_refused(timed):
    pytest.importorskip("triton", reason="Triton is not installed")
    shapes = [(4, 64), (2, 4096)]
    frame = sweep("warps", shapes, "num_warps", [1, 3, 4], dtype="bfloat16")
    assert list(frame.columns) == list(sweep.columns)
    assert [tuple(row)[:6] for row in frame.itertuples(index=False)] == [
        ("copy", 0, 4, 64, "bfloat16", pytest.approx(1)),
        ("warps", 1, 4, 64, "bfloat16", pytest.approx(2)),
        ("warps", 4, 4, 64, "bfloat16", pytest.approx(3)),
        ("copy", 0, 2, 4096, "bfloat16", pytest.approx(1)),
        ("warps", 4, 2, 4096, "bfloat16", pytest.approx(2)),
    ]
    assert [fn.keywords for fn in timed[0]] == [{}, {"num_warps": 1}, {"num_warps": 4}]
    assert frame["gb_per_s"].tolist()[0] == pytest.approx(4 * 64 * 2 * 2 / 1e3)


def test_a_sweep_of_what_is_no_option(timed):
    with pytest.raises(TypeError, match="rows"):
        sweep("naive", [(4, 64)], "rows", [1])


def test_layouts_has_a_row_for_each_layout(timed):
    frame = layouts("naive", 4, 6, dtype="float16")
    assert list(frame.columns) == list(layouts.columns)
    assert frame["layout"].tolist() == list(LAYOUTS)
    assert frame["us"].tolist() == pytest.approx([1, 2, 3, 4])
    assert frame["gb_per_s"].tolist()[0] == pytest.approx(4 * 6 * 2 * 2 / 1e3)
    strides = [LAYOUTS[layout](4, 6) for layout in frame["layout"]]
    assert [fn.args[0].stride() for fn in timed[0]] == strides
    assert {fn.args[0].dtype for fn in timed[0]} == {torch.float16}


def test_tuning_times_the_first_call_on_the_clock_of_the_host(events):
    frame = tuning("fixed", "tuned", [(4, 8), (2, 16)], dtype="float16")
    assert list(frame.columns) == list(tuning.columns)
    assert frame.to_dict("records") == [
        {"m": m, "n": n, "dtype": "float16", "host_first_ms": pytest.approx(1e3)}
        | {"us": pytest.approx(1), "tuned_us": pytest.approx(2)}
        for m, n in ((4, 8), (2, 16))
    ]
    once = ["wait", "clock", ("tuned", (4, 8)), "wait", "clock"]
    assert events[:7] == [*once, ("fixed", (4, 8)), ("tuned", (4, 8))]


def test_host_times_calls_that_are_not_waited_for(events):
    frame = host(["ours", "theirs"], 4, 8, calls=3)
    assert list(frame.columns) == list(host.columns)
    assert frame["impl"].tolist() == ["ours", "theirs"]
    assert frame["host_us"].tolist() == pytest.approx([1e6 / 3] * 2)
    rounds = [
        [(name, (4, 8)), "wait", "clock", *[(name, (4, 8))] * 3, "clock", "wait"]
        for name in ("ours", "theirs")
    ]
    assert events == 20 * (rounds[0] + rounds[1])


def test_host_is_the_median_of_its_rounds(events, monkeypatch):
    readings = iter([0.0, 900.0] + 19 * [0.0, 3.0])
    clock = SimpleNamespace(perf_counter=lambda: next(readings))
    monkeypatch.setattr(measure, "time", clock)
    assert host(["ours"], 4, 8, calls=3)["host_us"].tolist() == pytest.approx([1e6])


@pytest.fixture
def asked(monkeypatch):
    """What the driver was asked, (kernel, warps, shared bytes); it answers by the rules, and one more about kernel 2."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from memtraffic.ladder import persistent
    from memtraffic.occupancy import nvidia

    found, sm = [], nvidia.SMS["sm_90"]

    def plan(x, y, num_warps, num_stages):
        if num_warps > 4:
            refusals = {8: ValueError, 16: RuntimeError}
            raise refusals.get(num_warps, ValueError)("more than a lane can hold")
        return SimpleNamespace(kernel=num_warps, registers=32, shared_bytes=64)

    def driver(kernel, num_warps, shared_bytes):
        found.append((kernel, num_warps, shared_bytes))
        answer = nvidia.resident(32, shared_bytes, num_warps, sm)
        return answer + (kernel == 2)

    monkeypatch.setattr(machine, "require_gpu", lambda what: None)
    monkeypatch.setattr(machine, "limits", lambda: sm)
    monkeypatch.setattr(persistent, "plan", plan)
    monkeypatch.setattr(nvidia, "driver", driver)
    return found


def test_the_driver_is_asked_about_each_kernel_and_at_other_sizes(asked):
    frame = against_driver(1)
    assert list(frame.columns) == list(against_driver.columns)
    kernels = 2 * 10 * 3 * 3  # types, widths, numbers of warps that fit, stages
    assert frame.to_dict("records") == [
        {"kernels": "as compiled", "asked": kernels, "equal": kernels * 2 // 3},
        {"kernels": "other sizes", "asked": 32 * kernels, "equal": 32 * kernels * 2 // 3},
    ]  # fmt: skip
    assert len(asked) == 33 * kernels
    assert asked[0] == (1, 1, 64)
    assert {warps for _, warps, _ in asked} == set(range(1, 33))
    sizes = {(warps, shared) for _, warps, shared in asked}
    others = {(w, 1237 * w * s) for w in range(1, 33) for s in (1, 2, 3)}
    assert sizes == others | {(1, 64), (2, 64), (4, 64)}


# ---- GPUs that are not there

SEEN_FROM_HERE = ("gfx942", "gfx1100", "sm_86", "sm_90")


@pytest.fixture(scope="module")
def from_here():
    """The persistent kernel on GPUs with little and with much shared memory."""
    pytest.importorskip("triton", reason="Triton is not installed")
    return everywhere(SEEN_FROM_HERE, (1024, 16384), (None, 8))


def test_everywhere_has_a_kernel_for_each_target_width_and_number_of_warps(from_here):
    from memtraffic.ladder.warps import choose

    assert list(from_here) == [
        (target, n, num_warps)
        for target in SEEN_FROM_HERE
        for n in (1024, 16384)
        for num_warps in (None, 8)
    ]
    for (target, n, num_warps), kernel in from_here.items():
        assert (kernel.kernel, kernel.target) == ("_persistent_kernel", target)
        assert kernel.num_warps == (num_warps or choose(n, 4)["num_warps"])
        assert {"for", "store", "end"} <= set(kernel.schedule)


@pytest.mark.parametrize(
    ("target", "n", "tiles"),
    [
        pytest.param("gfx942", 16384, 0, id="gfx942-holds-no-tile-more"),
        pytest.param("gfx1100", 16384, 0, id="gfx1100-holds-no-tile-more"),
        pytest.param("sm_86", 16384, 1, id="sm_86-holds-one"),
        pytest.param("sm_90", 16384, 2, id="sm_90-holds-two"),
        pytest.param("gfx942", 1024, None, id="gfx942-narrow"),
        pytest.param("sm_86", 1024, 2, id="sm_86-narrow"),
    ],
)
def test_stages_fit_the_shared_memory_of_each_gpu(from_here, target, n, tiles):
    from memtraffic import occupancy
    from memtraffic.ladder.warps import choose

    tile_bytes = choose(n, 4)["ROWS"] * n * 4
    for num_warps in (None, 8):
        kernel = from_here[target, n, num_warps]
        most = occupancy.shared_per_program(occupancy.processor(target))
        assert kernel.shared_bytes <= most
        if tiles is not None:  # and the scratch of the reductions
            assert 0 <= kernel.shared_bytes - tiles * tile_bytes <= 1024
        if target.startswith("sm_"):
            assert kernel.schedule[: tiles + 1] == ("copy",) * tiles + ("for",)


def test_grids_are_as_many_programs_as_fit_on_all_processors(monkeypatch, from_here):
    from memtraffic import occupancy
    from memtraffic.targets import TARGETS

    asked = []

    def compiled(targets, ns, warps):
        asked.append((targets, ns, warps))
        return {key: it for key, it in from_here.items() if key[2] == 8}

    monkeypatch.setattr(measure, "everywhere", compiled)
    frame = grids([1024, 16384], 8)
    assert asked == [(TARGETS, [1024, 16384], (8,))]
    assert list(frame.columns) == list(grids.columns)
    found = {(row["target"], row["n"]): row for row in frame.to_dict("records")}
    assert list(found) == [(it, n) for it in SEEN_FROM_HERE for n in (1024, 16384)]
    for (target, n), row in found.items():
        kernel, unit = from_here[target, n, 8], occupancy.processor(target)
        assert row["gpu"] == unit.name
        count = unit.sms if target.startswith("sm_") else unit.cus
        assert row["processors"] == count
        assert row["resident"] == occupancy.resident(kernel) >= 1
        assert row["programs"] == row["processors"] * row["resident"]


def test_grids_of_every_target():
    pytest.importorskip("triton", reason="Triton is not installed")
    from memtraffic.targets import TARGETS

    frame = grids([256], 4)
    assert frame["target"].tolist() == list(TARGETS)
    assert set(frame["n"]) == {256}
    assert (frame["programs"] == frame["processors"] * frame["resident"]).all()
    assert (frame["resident"] >= 1).all()


def test_what_others_published():
    frame = published()
    key = ["source", "series", "n_rows", "n_cols"]
    assert list(frame.columns) == [*key, "gb_per_s"]
    assert not frame.duplicated(key).any()
    assert frame["gb_per_s"].between(100, 5000).all()  # in GB/s, of one GPU
    assert not frame.isna().any().any()


@needs_gpu
@pytest.mark.skipif(torch.version.cuda is None, reason="needs a GPU of NVIDIA's")
def test_the_driver_of_this_gpu_agrees():
    frame = against_driver(64)
    assert (frame["asked"] == frame["equal"]).all()
    assert frame["asked"].tolist()[1] == 32 * frame["asked"].tolist()[0] > 1000


@needs_gpu
def test_options_layouts_and_calls_on_a_gpu():
    swept = sweep("warps", [(4096, 4096)], "num_warps", [1, 4, 8])
    assert swept["value"].tolist() == [0, 4, 8]
    laid = layouts("warps", 4096, 4096).set_index("layout")["us"]
    assert laid["packed"] < laid["every other"]
    tuner = "memtraffic.ladder.warps:softmax_tuned"
    [tuned] = tuning("warps", tuner, [(4096, 64)]).to_dict("records")
    assert tuned["host_first_ms"] * 1e3 > tuned["tuned_us"] > 1
    called = host(["torch.softmax", "persistent"], 64, 1024).set_index("impl")
    assert called["host_us"].between(1, 1000).all()


@pytest.mark.filterwarnings("ignore")  # compilers warn of what they do
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ON_CPU else needs_gpu) for name in PEERS],
)
def test_peers_compute_what_they_are_named_for(name):
    x = torch.randn(64, 2048, generator=torch.Generator().manual_seed(0)).to(
        machine.device()
    )
    y = PEERS[name](x)
    assert_close(
        y, x.double() if name == "copy" else torch.softmax(x.double(), dim=1), x.dtype
    )
    assert y.data_ptr() != x.data_ptr()


@needs_gpu
def test_bench_on_a_gpu():
    frame = bench(
        ["copy", "torch.softmax", "naive", "fused"], [(4096, 1024), (4096, 4096)]
    )
    assert list(frame["impl"]) == ["copy", "torch.softmax", "naive", "fused"] * 2
    assert (frame["us"] > 1).all()
    assert (frame["us_p20"] <= frame["us"]).all()
    assert (frame["us"] <= frame["us_p80"]).all()
    assert frame["gb_per_s"].tolist() == pytest.approx(
        (2 * frame["m"] * frame["n"] * 4 / frame["us"] * 1e-3).tolist()
    )
    large = frame[frame["n"] == 4096].set_index("impl")["us"]
    assert large["fused"] < large["naive"]


@needs_gpu
def test_seconds_makes_twenty_rounds_and_more():
    a, b = seconds([lambda: None, lambda: None], budget=0)
    assert len(a) == len(b) == 20
    assert max(a) < 1


@needs_gpu
def test_roof_on_a_gpu():
    precision = torch.get_float32_matmul_precision()
    frame = roof()
    assert torch.get_float32_matmul_precision() == precision
    assert list(frame.columns) == list(roof.columns)
    [row] = frame.to_dict("records")
    assert row["gpu"] == machine.gpu_name()
    top = DATASHEET.get(row["gpu"], 0) * 1e-9
    assert row["datasheet_gb_per_s"] == top
    if not top:
        pytest.skip(f"no datasheet of {row['gpu']}")
    assert 0.6 * top < row["copy_gb_per_s"] < top
    assert 1 < row["fp32_tflop_per_s"] < 200


def test_datasheets_are_in_bytes_a_second():
    assert all(0.2e12 < value < 10e12 for value in measure.DATASHEET.values())
    assert measure.DATASHEET["NVIDIA H200"] == 4.8e12

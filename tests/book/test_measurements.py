import dataclasses
from types import SimpleNamespace

import pytest

from memtraffic import benchmark, gpus, residency, runtime
from memtraffic.benchmark import baselines
from memtraffic.book import measurements
from memtraffic.book.measurements import (
    EXHIBITS,
    compare_with_driver,
    compile_for_targets,
    grid_sizes,
    implementation,
    launch_plans,
)
from memtraffic.ladder import RUNGS, naive


def test_implementation_of_labels():
    assert implementation("copy") is baselines.copy
    assert implementation("naive") is naive.softmax
    assert not set(EXHIBITS) & ({*RUNGS} | {*benchmark.BASELINES})
    with pytest.raises(LookupError, match="few wraps"):
        implementation("few wraps")
    pytest.importorskip("triton", reason="Triton is not installed")
    assert all(implementation(label).__module__.startswith("memtraffic.") for label in EXHIBITS)


NEED_A_GPU = {
    "bench": lambda: measurements.bench(["copy"], [[8, 8]]),
    "launch_overhead": lambda: measurements.launch_overhead(["copy"], [8, 8]),
    "autotune_cost": lambda: measurements.autotune_cost("copy", "copy", [[8, 8]]),
    "bench_programs": lambda: measurements.bench_programs("naive", [8, 8], [1]),
    "reach_far_row": lambda: measurements.reach_far_row(8, 8),
    "pointer_latency": lambda: measurements.pointer_latency(8, 8),
    "launch_plans": lambda: launch_plans(8, [8]),
    "compare_with_driver": lambda: compare_with_driver(8),
    "counters": lambda: measurements.counters("naive", [8, 8]),
    "count_layouts": lambda: measurements.count_layouts("naive", [8, 8]),
}


@pytest.mark.parametrize("name", NEED_A_GPU)
def test_measurements_without_a_gpu(name, monkeypatch):
    monkeypatch.setattr(runtime, "HAS_GPU", False)
    with pytest.raises(RuntimeError, match="GPU"):
        NEED_A_GPU[name]()


def test_bench_programs_are_those_of_this_gpu(monkeypatch):
    calls = []
    gpu = dataclasses.replace(gpus.find_gpu("H200"), num_sms=10)
    monkeypatch.setattr(gpus, "this_gpu", lambda: gpu)
    monkeypatch.setattr(benchmark, "bench_option", lambda *arguments: calls.append(arguments))
    measurements.bench_programs("naive", [64, 8], [0.25, 1, 24])
    assert calls == [(naive.softmax, [[64, 8]], "programs", [2, 10, 240])]


def test_counters_are_of_functions_that_another_process_can_import(monkeypatch):
    from memtraffic.names import import_path

    calls = []
    monkeypatch.setattr(measurements.hardware, "counters", lambda *a: calls.append(a))
    monkeypatch.setattr(measurements.hardware, "count_layouts", lambda *a: calls.append(a))
    for label in benchmark.BASELINES:
        measurements.counters(label, [4, 8])
    measurements.count_layouts("naive", [4, 8])
    assert [shape for _, shape in calls] == [(4, 8)] * 6
    assert [import_path(fn) for fn, _ in calls[-2:]] == [
        "memtraffic.benchmark.baselines:compiled_persistent_reduction",
        "naive",
    ]


def fake_plan(x, y, *, num_warps=None, num_stages=None):
    if num_warps and num_warps > 4:
        refusals = {8: ValueError, 16: RuntimeError}
        raise refusals.get(num_warps, ValueError)("more than a lane can hold")
    tiling = SimpleNamespace(num_warps=num_warps or x.shape[1], stages=2)
    plan = {"tiling": tiling, "kernel": num_warps, "registers": 32, "shared_bytes": 64}
    return SimpleNamespace(**plan, programs_per_sm=5, programs=x.shape[0])


@pytest.fixture
def planned(monkeypatch):
    """A launcher of `persistent` that plans without compiling, for an H200."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from memtraffic.ladder import persistent

    monkeypatch.setattr(runtime, "require_gpu", lambda what: None)
    monkeypatch.setattr(gpus, "this_gpu", lambda: gpus.find_gpu("H200"))
    monkeypatch.setattr(persistent, "plan", fake_plan)


def test_launch_plans(planned):
    frame = launch_plans(7, [8, 16], "bfloat16")
    same = {"stages": 2, "registers": 32, "shared_bytes": 64, "resident": 5, "programs": 7}
    assert frame.to_dict("records") == [{"n": n, "warps": n} | same for n in (8, 16)]


def test_compare_with_driver_asks_about_each_kernel_and_other_sizes(planned, monkeypatch):
    """The fake driver answers by the rules, and one more for the kernels of 2 warps."""
    asked, gpu = [], gpus.find_gpu("H200")

    def driver(kernel, num_warps, shared_bytes):
        asked.append((kernel, num_warps, shared_bytes))
        ours = residency.nvidia.resident_programs(32, shared_bytes, num_warps, gpu)
        return ours + (kernel == 2)

    monkeypatch.setattr(residency.nvidia, "driver_resident_programs", driver)
    kernels = 2 * 10 * 3 * 3  # types, widths, numbers of warps that fit, stages
    assert compare_with_driver(1).to_dict("records") == [
        {"kernels": "as compiled", "asked": kernels, "equal": kernels * 2 // 3},
        {"kernels": "other sizes", "asked": 32 * kernels, "equal": 32 * kernels * 2 // 3},
    ]
    assert len(asked) == 33 * kernels
    assert asked[0] == (1, 1, 64)
    others = {(w, 1237 * w * stages) for w in range(1, 33) for stages in (1, 2, 3)}
    assert {(warps, shared) for _, warps, shared in asked} == others | {(1, 64), (2, 64), (4, 64)}


def test_compare_with_driver_on_amd(planned, monkeypatch):
    monkeypatch.setattr(gpus, "this_gpu", lambda: gpus.find_gpu("MI300X"))
    with pytest.raises(RuntimeError, match="MI300X"):
        compare_with_driver(1)


# ---- GPUs that are not here

TARGETS = ("gfx942", "gfx1100", "sm_86", "sm_90")


@pytest.fixture(scope="module")
def compiled():
    """The persistent kernel on GPUs with little and with much shared memory."""
    pytest.importorskip("triton", reason="Triton is not installed")
    return compile_for_targets(TARGETS, (1024, 16384), (None, 8))


def tile(target, n):
    from memtraffic.ladder.tiling import tile_shape

    return tile_shape(n, 4, gpus.find_gpu(target))


@pytest.mark.slow
def test_compile_for_targets_has_a_kernel_for_each_combination(compiled):
    keys = [(t, n, warps) for t in TARGETS for n in (1024, 16384) for warps in (None, 8)]
    assert list(compiled) == keys
    for (target, n, num_warps), kernel in compiled.items():
        assert (kernel.kernel, kernel.target) == ("_softmax_persistent_kernel", target)
        assert kernel.num_warps == (num_warps or tile(target, n).num_warps)
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
@pytest.mark.slow
def test_compile_for_targets_prefetches_what_shared_memory_holds(compiled, target, n, tiles):
    gpu = gpus.find_gpu(target)
    for num_warps in (None, 8):
        kernel = compiled[target, n, num_warps]
        assert kernel.shared_bytes <= gpu.shared_per_program
        if tiles is not None:  # and the scratch of the reductions
            assert 0 <= kernel.shared_bytes - tiles * tile(target, n).rows * n * 4 <= 1024
        if gpu.vendor == "nvidia":
            assert kernel.schedule[: tiles + 1] == ("copy",) * tiles + ("for",)


@pytest.mark.slow
def test_grid_sizes_fill_all_processors(compiled, monkeypatch):
    calls = []

    def compile_for_targets(targets, ns, num_warps):
        calls.append((list(targets), ns, num_warps))
        return {key: kernel for key, kernel in compiled.items() if key[2] == 8}

    monkeypatch.setattr(measurements, "compile_for_targets", compile_for_targets)
    frame = grid_sizes([1024, 16384], 8)
    assert calls == [(list(gpus.TARGETS), [1024, 16384], (8,))]
    rows = {(row["target"], row["n"]): row for row in frame.to_dict("records")}
    assert list(rows) == [(target, n) for target in TARGETS for n in (1024, 16384)]
    for (target, n), row in rows.items():
        gpu = gpus.find_gpu(target)
        assert (row["gpu"], row["processors"]) == (gpu.product, gpu.num_sms)
        assert row["resident"] == residency.resident_programs(compiled[target, n, 8]) >= 1
        assert row["programs"] == row["processors"] * row["resident"]


@pytest.mark.gpu
def test_measurements_on_a_gpu():
    assert len(measurements.pointer_latency(64, 520)) == 1
    plans = launch_plans(4096, [256, 32768])
    assert (plans["registers"] > 0).all() and (plans["resident"] >= 1).all()
    assert len(measurements.bench_programs("persistent", [4096, 1024], [0.5, 2])) == 2
    first, after = measurements.autotune_cost("tiled", "autotuned", [[4096, 64]]).loc[
        0, ["host_first_ms", "tuned_us"]
    ]
    assert first > 0 and after > 0


@pytest.mark.gpu
def test_compare_with_driver_on_a_gpu():
    if not isinstance(gpus.this_gpu(), gpus.NvidiaGpu):
        pytest.skip("needs a GPU of NVIDIA's")
    frame = compare_with_driver(64)
    assert (frame["asked"] == frame["equal"]).all()
    assert frame["asked"].tolist()[1] == 32 * frame["asked"].tolist()[0] > 1000

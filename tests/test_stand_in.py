"""A GPU that answers for one that is absent."""

import pytest
import torch
from another_process import run_python
from triton.runtime import driver
from triton.testing import get_dram_gbps

from memtraffic import device
from memtraffic.errors import CountError
from memtraffic.gpus import find_gpu
from memtraffic.meters.count import count
from memtraffic.stand_in import stand_in

pytestmark = pytest.mark.skipif(device.HAS_GPU, reason="a GPU answers itself")


@pytest.mark.parametrize("name", ["H200", "T4"])
def test_stand_in_answers_what_launchers_ask(name):
    gpu = find_gpu(name)
    with stand_in(name):
        properties = torch.cuda.get_device_properties(0)
        assert properties.multi_processor_count == gpu.num_sms
        assert properties.L2_cache_size == gpu.last_level_bytes
        assert properties.shared_memory_per_block_optin == gpu.shared_per_program
        assert 10 * properties.major + properties.minor == gpu.architecture
        assert torch.cuda.get_device_capability() == (properties.major, properties.minor)
        assert torch.cuda.is_bf16_supported() == (name != "T4")
        assert (torch.cuda.is_available(), torch.cuda.device_count()) == (True, 1)
        assert not torch.cuda.is_current_stream_capturing()
        streams = torch.cuda.current_stream().cuda_stream, torch._C._cuda_getCurrentRawStream(0)
        assert streams == (0, 0)
        assert driver.active.get_current_target().arch == gpu.architecture
        found = driver.active.utils.get_device_properties(driver.active.get_current_device())
        assert found["multiprocessor_count"] == gpu.num_sms
        assert get_dram_gbps(0) == pytest.approx(gpu.datasheet_bytes_per_s / 1e9)
        assert driver.active.get_active_torch_device() == torch.device("cuda", 0)


def test_stand_in_runs_the_function_that_a_custom_operation_has_for_a_gpu():
    name = "memtraffic_tests::tripled_on_a_gpu"

    @torch.library.custom_op(name, mutates_args=(), device_types="cuda")
    def tripled(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    with stand_in():
        assert [op.name for op in count(tripled, "M,N", (2, 3)).ops] == ["mul"]


def test_stand_in_tensors_are_on_the_gpu():
    x = torch.ones(2, 3)
    with stand_in():
        assert (x.is_cuda, x.is_cpu, x.get_device()) == (True, False, 0)
        assert x.device == torch.device("cuda:0")
        made = [
            torch.zeros(2, device="cuda"),
            torch.empty(2, device=x.device),
            torch.full((2,), 1.0, device=0),
            x.to("cuda:0"),
            x.to(torch.device("cuda")),
            x.cuda(),
            x.new_empty(2, device="cuda"),
            torch.nn.Linear(2, 2, device="cuda").weight,
        ]
        assert all(tensor.is_cuda for tensor in made)
        with torch.cuda.device(x.device), torch.cuda.device_of(x):
            torch.cuda.synchronize()
        assert torch.empty(2, device="meta").device.type == "meta"
    assert not any(tensor.is_cuda for tensor in made)
    assert not x.is_cuda and not torch.cuda.is_available()


def test_stand_in_during_a_backward_pass():
    devices = []

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            devices.append(gradient.device.type)
            return torch.ones(gradient.shape, device=gradient.device)

    x = torch.ones(3, requires_grad=True)
    with stand_in():
        torch.autograd.grad(Identity.apply(x).sum(), [x])
        Identity.apply(x).sum().backward()
    assert devices == ["cuda"] * 2


def test_stand_in_refuses_to_be_cast_for():
    """On a GPU, both operands would become half as large."""

    def product(x):
        with torch.autocast("cuda", dtype=torch.float16, enabled=x.shape[0] > 2):
            return x @ x.T

    with stand_in():
        assert count(product, torch.ones(2, 3)).read_bytes == 4 * 12
        with pytest.raises(CountError, match="autocast"):
            count(product, torch.ones(3, 3))


def test_stand_in_has_a_generator():
    with stand_in():
        [generator] = torch.cuda.default_generators
        state = generator.get_state()
        before = state.view(torch.int64).tolist()
        state.view(torch.int64)[1] += 4
        generator.set_state(state)
        seed, offset = generator.get_state().view(torch.int64).tolist()
    assert [seed, offset - 4] == before


def on_a_side_stream(x):
    """As code for a GPU overlaps, times and marks its work."""
    stream, begin, end = torch.cuda.Stream(), *(torch.cuda.Event(enable_timing=True) for _ in "be")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.nvtx.range("adding"):
        torch.cuda.nvtx.range_push("one")
        begin.record()
        y = x + 1
        end.record(stream)
        torch.cuda.nvtx.range_pop()
    x.record_stream(stream)
    torch.cuda.current_stream().wait_event(stream.record_event())
    torch.cuda.default_stream().synchronize()
    assert end.query() and begin.elapsed_time(end) == 0
    return y


def test_stand_in_has_streams_events_and_seeds():
    with stand_in():
        assert str(count(on_a_side_stream, torch.ones(3, 5))).startswith("reads 15 elements")
        drawn = []
        for seed in (7, 8, 7):
            torch.cuda.manual_seed(seed)
            drawn.append(torch.rand(2, device="cuda").tolist())
    assert drawn[0] == drawn[2] != drawn[1]


def test_stand_in_refuses_amd_and_where_there_is_a_gpu(monkeypatch):
    with pytest.raises(ValueError, match=r"MI300X \(gfx942\)"), stand_in(find_gpu("MI300X")):
        pass
    monkeypatch.setattr(device, "HAS_GPU", True)
    with pytest.raises(RuntimeError, match="there is a GPU"), stand_in():
        pass


COMPILING = """
import torch
from memtraffic.stand_in import stand_in
from memtraffic.compile import resources
from memtraffic.meters.count import count
import kernels

x, results = torch.randn(3, 12), []

def planned(x):
    y, options = torch.empty_like(x), {"grid": (1,), "num_warps": 8}
    kernel = kernels._masked_kernel.warmup(x, x, x.shape[1], BLOCK=16, STORED=12, **options)
    kernel._init_handles()
    assert kernel.n_regs > 0 and kernel.metadata.shared >= 0
    kernel[x.shape[0], 1, 1](y, x, x.shape[1], 16, 12)
    results.append(y)

def twice(x):
    y = torch.empty_like(x)
    launched = kernels._masked_kernel[(3,)](y, x, 12, 16, STORED=12)
    launched[3, 1, 1](y, x, 12, 16, 12)
    launched[3, 1, 1](y, x, 12)
    launched = kernels._tuned_kernel[(3,)](y, x, x.shape[1], BLOCK=16)
    launched[3, 1, 1](y, x, 12)

with stand_in():
    for call in (planned, kernels.three_passes, planned, twice):
        print(count(call, x))
    assert all(torch.equal(x, y) for y in results)
    for call in (planned, twice):
        print([kernel.num_warps for kernel in resources(call, x, target="sm_80")])
    try:
        kernels.masked(x)
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.slow
def test_stand_in_compiles_kernels_and_runs_none():
    """A kernel that is compiled before it is launched is interpreted, as others are."""
    done = run_python("-W", "ignore", "-c", COMPILING, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "reads 36 elements, writes 36 elements, in 1 operation",
        "reads 108 elements, writes 36 elements, in 1 operation",
        "reads 36 elements, writes 36 elements, in 1 operation",
        f"reads {3 * 36 + 2 * 72} elements, writes {5 * 36} elements, in 5 operations",
        "[8]",
        "[4, 4, 4, 4, 8, 4]",
        "H200 only stands in for a GPU: it runs no kernel",
    ]

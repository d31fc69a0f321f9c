import pytest

from memtraffic.compile.ttgir import first_load_layout, schedule
from memtraffic.residency import BlockedLayout

TTGIR = """
#blocked = #ttg.blocked<{sizePerThread = [1, 4], threadsPerWarp = [2, 16], warpsPerCTA = [4, 1], order = [1, 0]}>
#blocked1 = #ttg.blocked<{sizePerThread = [1, 1], threadsPerWarp = [1, 32], warpsPerCTA = [1, 4], order = [1, 0]}>
#mma = #ttg.nvidia_mma<{versionMajor = 2}>
    %0 = tt.load %n_cols : !tt.ptr<i32> loc(#loc1)
    %1 = ttg.async_copy_global_to_local %p, %q mask %m other %c : tensor<8x64x!tt.ptr<f32>, #blocked> -> <8x64xf32> loc(#loc2)
    %2 = ttg.async_wait %1 {num = 3 : i32} loc(#loc3)
    scf.for %i = %a to %b step %s  : i32 {
      %3 = tt.load %p, %m, %c : tensor<8x64x!tt.ptr<f32>, #blocked1> loc(#loc4)
      scf.for %j = %a to %b step %s  : i32 {
        %4 = "tt.reduce"(%3) <{axis = 1 : i32}> ({
        ^bb0(%x: f32, %y: f32):
          %z = arith.addf %x, %y : f32
          tt.reduce.return %z : f32
        }) : (tensor<8x64xf32, #blocked1>) -> tensor<8xf32>
      } loc(#loc5)
      %5 = math.exp2 %3 : tensor<8x64xf32, #blocked1>
      %6 = math.exp %3 : tensor<8x64xf32, #blocked1>
      %7 = math.exp %w : f32
      scf.if %ok {
        tt.store %p, %5, %m : tensor<8x64x!tt.ptr<f32>, #blocked1>
      }
    } {tt.num_stages = 3 : i32} loc(#loc6)
    tt.store %o, %w : !tt.ptr<f32>
"""  # noqa: E501


def test_first_load_layout_is_that_of_a_block():
    """The first load is one of a single number; of the blocks, an asynchronous copy is first."""
    assert first_load_layout(TTGIR) == BlockedLayout((1, 4), (2, 16), (4, 1))
    loads = TTGIR.replace("async_copy_global_to_local", "other")
    assert first_load_layout(loads) == BlockedLayout((1, 1), (1, 32), (1, 4))
    amd = loads.replace("tt.load %p", "amdg.buffer_load %p")
    assert first_load_layout(amd) == BlockedLayout((1, 1), (1, 32), (1, 4))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="no-load"),
        pytest.param("%0 = tt.load %n : !tt.ptr<i32>", id="no-block"),
        pytest.param(TTGIR.replace(", #blocked>", ", #mma>"), id="not-blocked"),
    ],
)
def test_first_load_layout_none(text):
    assert first_load_layout(text) is None


def test_schedule_is_in_the_order_of_the_text():
    assert " ".join(schedule(TTGIR)) == ("copy wait 3 for load for reduce end exp exp store end")
    assert schedule("") == ()

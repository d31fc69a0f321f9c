"""How programs that share a row tell each other two numbers.

The maximum and the sum of a part share a word of 64 bits, which is written and read
whole: who finds it has both, without a fence. It is 0 before the launch, and never
afterwards: the sum is at least 1 where the maximum is a finite number.

A program that waits needs the others of its row to run. GPUs start the programs of a
launch in their order, so the first row that is not finished has all of its programs
running, or next in line. But nothing promises this order, and programs of another
launch may take their places. So nobody waits for ever: a program that has looked LOOKS
times reads what is missing itself, and publishes it. It adds in the order in which the
missing program would, so its word has the same bits.
"""

import triton
import triton.language as tl


@triton.jit
def publish(slot_ptr, high, low):
    high = high.to(tl.int32, bitcast=True).to(tl.int64)
    low = low.to(tl.int32, bitcast=True).to(tl.int64)
    word = (high << 32) | (low & 0xFFFFFFFF)
    tl.atomic_cas(slot_ptr, tl.zeros_like(word), word, sem="relaxed")


@triton.jit
def high_of(words):
    return (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def low_of(words):
    return words.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def look(slots_ptr, used, LOOKS: tl.constexpr, PTX: tl.constexpr):
    # The words of a row; 0 where not used, or where none came in time.
    if PTX:
        # Each lane looks on its own. A loop in Triton would need a barrier per turn.
        return tl.inline_asm_elementwise(
            """{
            .reg .pred again;
            .reg .s32 looks;
            mov.s32 looks, $2;
            mov.u64 $0, 0;
            setp.gt.s32 again, looks, 0;
            LOOK:
            @again ld.relaxed.gpu.global.u64 $0, [$1];
            sub.s32 looks, looks, 1;
            setp.eq.and.u64 again, $0, 0, again;
            setp.gt.and.s32 again, looks, 0, again;
            @again bra LOOK;
            }""",
            "=&l,l,r",
            [slots_ptr, tl.where(used, LOOKS, 0)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    words = tl.load(slots_ptr, mask=used & (LOOKS > 0), other=0, volatile=True)
    looks = 1
    while (looks < LOOKS) & (tl.max((used & (words == 0)).to(tl.int32), axis=0) > 0):
        words = tl.load(slots_ptr, mask=used, other=0, volatile=True)
        looks += 1
    return words


@triton.jit
def first_missing(words, used, SLOTS: tl.constexpr):
    return tl.min(tl.where(used & (words == 0), tl.arange(0, SLOTS), SLOTS), axis=0)

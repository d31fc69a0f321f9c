"""The rungs of the ladder, one module each, in the order of the book.

Each offers `softmax(x)`, the softmax of each row of a 2-D tensor. They are named here
and not imported: the first rung also works where Triton is not installed.
"""

RUNGS = {
    name: f"memtraffic.ladder.{name}:softmax"
    for name in ("naive", "fused", "masked", "tiled", "persistent")
}

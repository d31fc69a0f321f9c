"""The operations that the meters know by name: `OPS`."""

from memtraffic.names import import_attribute
from memtraffic.ops.op import Op
from memtraffic.ops.softmax import SOFTMAX, SOFTMAX_BACKWARD

__all__ = ["OPS", "SOFTMAX", "SOFTMAX_BACKWARD", "Op", "find_op"]

OPS = {op.name: op for op in (SOFTMAX, SOFTMAX_BACKWARD)}


def find_op(name: str | Op) -> Op:
    """The operation called `name`: one of `OPS`, or `module:attribute`. An `Op` returns itself.

    >>> find_op("softmax").sizes
    ('M', 'N')

    Raises LookupError for a name that leads to no `Op`.
    """
    if isinstance(name, Op):
        return name
    if name in OPS:
        return OPS[name]
    if ":" not in name:
        known = f"{', '.join(OPS)}, or module:attribute"
        raise LookupError(f"no operation is named {name!r}: give one of {known}")
    op = import_attribute(name)
    if not isinstance(op, Op):
        raise LookupError(f"{name!r} is {type(op).__name__}, not an Op")
    return op

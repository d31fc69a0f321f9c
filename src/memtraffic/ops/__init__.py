"""The operations that the meters know by name: `OPS`."""

from memtraffic import names
from memtraffic.ops.definitions import SOFTMAX, SOFTMAX_BACKWARD
from memtraffic.ops.op import Op

__all__ = ["OPS", "SOFTMAX", "SOFTMAX_BACKWARD", "Op", "find_op"]

OPS: dict[str, Op] = {name: names.import_attribute(path) for name, path in names.OPS.items()}


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
    names.check_name(name, names.OPS, "operation")
    op = names.import_attribute(name)
    if not isinstance(op, Op):
        raise LookupError(f"{name!r} is {type(op).__name__}, not an Op")
    return op

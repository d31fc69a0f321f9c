"""How many programs of a kernel one processor of a GPU holds at once, by the rules of its maker."""

from memtraffic.occupancy import amd, nvidia


def processor(target):
    """The SM or compute unit of `target`: of `nvidia.SMS` or `amd.CUS`. Raises LookupError for one that neither knows."""
    known = nvidia.SMS | amd.CUS
    if target not in known:
        raise LookupError(
            f"no target is named {target!r}: give one of {', '.join(known)}"
        )
    return known[target]


def limits(kernel, unit=None):
    """The programs that each limit of one processor allows: a dict by limit.

    kernel: the `targets.Resources` of a compiled kernel. unit: the processor, that of the kernel's target by default.
    """
    unit = unit or processor(kernel.target)
    if isinstance(unit, amd.CU):
        registers = (kernel.vgprs, kernel.agprs, kernel.sgprs)
        return amd.limits(*registers, kernel.shared_bytes, kernel.num_warps, unit)
    return nvidia.limits(kernel.registers, kernel.shared_bytes, kernel.num_warps, unit)


def resident(kernel, unit=None):
    """Programs that one processor holds at once: the least of `limits`, 0 where not even one fits."""
    return min(limits(kernel, unit).values())

"""How many programs of a kernel one processor of a GPU holds at once, by the rules of its maker."""

import json
from dataclasses import asdict

from memtraffic.occupancy import amd, nvidia


def processor(target):
    """The SM or compute unit of `target`: of `nvidia.SMS` or `amd.CUS`. Raises LookupError for one that neither knows."""
    known = nvidia.SMS | amd.CUS
    if target not in known:
        raise LookupError(
            f"no target is named {target!r}: give one of {', '.join(known)}"
        )
    return known[target]


def shared_per_program(unit):
    """Bytes of shared memory, or LDS, that one program may have on `unit`, of `processor`."""
    return unit.lds_per_group if isinstance(unit, amd.CU) else unit.shared_per_block


def limits(kernel, unit=None):
    """The programs that each limit of one processor allows: a dict by limit.

    kernel: the `targets.Resources` of a compiled kernel. unit: the processor, that of the kernel's target by default. Raises
    LookupError for a target that `processor` does not know.
    """
    unit = unit or processor(kernel.target)
    if isinstance(unit, amd.CU):
        registers = (kernel.allocated_vgprs, 0, kernel.allocated_sgprs)
        return amd.limits(*registers, kernel.shared_bytes, kernel.num_warps, unit)
    return nvidia.limits(kernel.registers, kernel.shared_bytes, kernel.num_warps, unit)


def resident(kernel, unit=None):
    """Programs that one processor holds at once: the least of `limits`, 0 where not even one fits."""
    return min(limits(kernel, unit).values())


def report(kernel):
    """All of it for one kernel, a `targets.Resources`, as a dict.

    Keys: `kernel`, `target`, `gpu`, `num_warps`; `limits`, programs by limit; `binding`, the first of the least; `resident`,
    that least; `processors`, how many one GPU has; `programs`, the grid of a persistent launch, as many as fit on all.
    """
    unit, found = processor(kernel.target), limits(kernel)
    binding = min(found, key=found.get)
    processors = unit.cus if isinstance(unit, amd.CU) else unit.sms
    return {
        "kernel": kernel.kernel,
        "target": kernel.target,
        "gpu": unit.name,
        "num_warps": kernel.num_warps,
        "limits": found,
        "binding": binding,
        "resident": found[binding],
        "processors": processors,
        "programs": found[binding] * processors,
    }


def script():
    """The processors as JavaScript, for the chart of the book: what `book/_static/occupancy-data.js` holds."""
    tables = {
        "amd": {target: asdict(cu) for target, cu in amd.CUS.items()},
        "nvidia": {target: asdict(sm) for target, sm in nvidia.SMS.items()},
        "rules": {
            "partitions": nvidia.PARTITIONS,
            "registerUnit": nvidia.REGISTER_UNIT,
            "registersPerBlock": nvidia.REGISTERS_PER_BLOCK,
            "registersPerThread": nvidia.REGISTERS_PER_THREAD,
            "sharedUnits": {
                target: nvidia.shared_unit(sm) for target, sm in nvidia.SMS.items()
            },
            "threadsPerBlock": nvidia.THREADS_PER_BLOCK,
            "threadsPerGroup": amd.THREADS_PER_GROUP,
        },
    }
    return f"window.occupancyData = {json.dumps(tables, indent=1)};"

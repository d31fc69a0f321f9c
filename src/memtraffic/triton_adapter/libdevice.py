"""The functions of CUDA's libdevice and AMD's ocml, for Triton's interpreter."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from memtraffic.triton_adapter.patching import replaced, restored


@contextmanager
def prepared_once(interpreter: Any) -> Iterator[Callable[[], None]]:
    """Context manager in which functions are prepared for the interpreter, with libdevice, once.

    Gives a function that undoes what was prepared until then.

    The compiler replaces the functions of libdevice, which do nothing, by those of the GPU's
    library, wherever a kernel's globals hold one or a module of them. The interpreter does not.
    Here they become CUDA's, whose values `call_library` computes. A function of the language that
    a kernel's globals hold becomes the interpreter's, as those of the module `tl` do. The
    interpreter itself prepares the language anew for each call of a function: that takes
    milliseconds, and it leaves parts of the language prepared.
    """
    import triton.language as tl
    from triton.language.extra import cuda, libdevice
    from triton.language.extra.cuda import libdevice as cuda_libdevice
    from triton.language.extra.hip import libdevice as hip_libdevice

    libraries = {module.__name__: module for module in (libdevice, cuda_libdevice, hip_libdevice)}
    libraries |= {f"{cuda.__name__}.{part}": cuda for part in ("gdc", "utils")}
    language = (tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base)
    new_scope = interpreter._LangPatchScope
    patch_language = getattr(interpreter._patch_lang, "original", interpreter._patch_lang)
    prepared: dict[int, dict[str, Any]] = {}

    def prepare(function: Any) -> Any:
        names, scope = function.__globals__, new_scope()
        if not prepared:
            undo.callback(prepared.clear)
            undo.enter_context(restored(*language, *set(libraries.values())))
            for library in (cuda, cuda_libdevice, hip_libdevice):
                interpreter._patch_builtin(library, interpreter.interpreter_builder, scope)
            for name in set(vars(libdevice)) & set(vars(cuda_libdevice)):
                if not name.startswith("__"):
                    scope.set_attr(libdevice, name, getattr(cuda_libdevice, name))
            # A constant is compiled as a constexpr.
            scope.set_attr(tl.dtype, "value", property(lambda dtype: dtype))
        if id(names) not in prepared:
            prepared[id(names)] = names
            if any(value is tl or value is tl.core for value in names.values()):
                patch_language(function)
            for name, value in list(names.items()):
                owner = libraries.get(getattr(value, "__module__", None) or "")
                is_function = owner is None and inspect.isfunction(value)
                if is_function and tl.core.is_builtin(value):  # cast = tl.cast
                    owner = tl if hasattr(tl, value.__name__) else tl.math
                if owner is not None and hasattr(owner, value.__name__):
                    undo.callback(names.__setitem__, name, value)
                    names[name] = getattr(owner, value.__name__)
        return new_scope()

    prepare.original = patch_language  # type: ignore[attr-defined]  # one meter inside another
    with replaced((interpreter, "_patch_lang", prepare)), ExitStack() as undo:
        yield undo.close


# What CUDA's libdevice and AMD's ocml compute, by PyTorch's function of the same name, or another.
_LIBRARY: dict[str, Callable[..., torch.Tensor]] = {
    name: getattr(torch, name)
    for name in (
        "acos acosh add asin asinh atan atan2 atanh ceil copysign cos cosh div erf erfc erfinv exp "
        "exp2 expm1 floor fmod hypot isfinite isinf isnan ldexp lgamma log log10 log1p log2 mul "
        "nextafter pow rsqrt signbit sin sinh sqrt sub tan tanh trunc"
    ).split()
} | {
    "fabs": torch.abs,
    "finite": torch.isfinite,
    "powi": torch.pow,
    "rint": torch.round,
    "round": lambda x: torch.trunc(x + torch.copysign(torch.full_like(x, 0.5), x)),
}


def call_library(
    builder: Any, library: str, path: str, symbol: str, args: list[Any], dtype: Any, pure: bool
) -> Any:
    """The values of a function that the compiler would link in, such as `__nv_tanhf`.

    >>> import triton.language as tl
    >>> three, two = (SimpleNamespace(data=np.array([n], np.float32)) for n in (3, 2))
    >>> call_library(None, "", "", "__nv_powif", [three, two], tl.float32, True).data
    array([9.], dtype=float32)

    Raises NotImplementedError for a function that is not known here.
    """
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype

    name = re.sub(r"^__(?:nv|ocml)_(?:fast_)?|(?:_r[nzdu])?(?:_f(?:32|64))?$", "", symbol)
    spellings = (name, re.sub("[fd]$", "", name), re.sub("^[fd]", "", name))  # tanhf, isnand, fsqrt
    compute = next((_LIBRARY[name] for name in spellings if name in _LIBRARY), None)
    if compute is None:
        raise NotImplementedError(f"there is no value for the library function {symbol}")
    values = compute(*(torch.from_numpy(np.ascontiguousarray(arg.data)) for arg in args))
    return TensorHandle(values.numpy().astype(_get_np_dtype(dtype)), dtype.scalar)


def call_assembly(
    builder: Any, code: str, constraints: str, args: list[Any], types: Any, pure: bool, pack: int
) -> Any:
    """What inline assembly computes that only moves its argument, which hides it from a compiler.

    Also that which waits for the launch before, or lets the next one begin: it moves nothing.
    Raises NotImplementedError for other assembly.
    """
    if code.startswith("griddepcontrol."):
        args = [builder.get_int32(0)]
    elif len(args) != 1 or not re.fullmatch(r"mov\.\w+ \$0, \$1;", code.strip()):
        raise NotImplementedError(f"inline_asm: {code.strip()}")
    return SimpleNamespace(get_result=lambda index: args[0])

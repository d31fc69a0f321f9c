"""From planned kernels to an operation of PyTorch: autograd, torch.compile, vmap and `out`.

An operation is two operators, its forward and its backward, each of which is planned once per kind
of call. `operator` makes one of them, `operation` joins them:

    FORWARD = operator("scale", "(Tensor x, float factor) -> Tensor", plan_forward, results)
    BACKWARD = operator("scale_backward", "(Tensor dy, float factor) -> Tensor", plan_backward, ...)
    SCALE = operation(FORWARD, BACKWARD, save, reference, in_pytorch)

    def scale(x, factor):
        return SCALE.apply(x, (factor,))

Arguments are always tensors first, then options; both as the schema says. An option is hashable,
and a plan is made for its value.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from memtraffic import device as runtime
from memtraffic import torch_adapter
from memtraffic.device import capture
from memtraffic.kernels.launch import Launch, Plans, facts
from memtraffic.kernels.operands import check_memory
from memtraffic.torch_adapter import (
    FORWARD_MODE,
    LEVEL,
    active_modes,
    bare_apply,
    is_differentiated,
    is_indirect,
    is_tracing,
    is_transformed,
    is_wrapped,
)

PLAIN = (Tensor, torch.nn.Parameter)
is_compiling = torch.compiler.is_dynamo_compiling
is_grad_enabled = torch.is_grad_enabled
# With a single GPU, none other can be the current one.
current_gpu = torch_adapter.current_gpu if torch.cuda.device_count() > 1 else None

Run = Callable[..., None]
Results = list[tuple[Sequence[int], torch.dtype]]


@dataclass(frozen=True)
class Operator:
    """What `operator` makes: a planned function that `torch.ops.memtraffic` has by its name.

    tensors: the names of its arguments that are tensors; they come first. single: whether it
    has one result; otherwise it returns a tuple. launch: `launch(first, rest, out=None)` runs
    it on plain tensors, without autograd and without PyTorch's dispatcher; `rest` is a tuple
    of its other arguments, as a call with `*rest` costs the host more, and `out` is what the
    first result is written to. registered: the same, of all arguments one by one, by way of
    the dispatcher.
    """

    name: str
    tensors: tuple[str, ...]
    single: bool
    results: Callable[..., Results]
    plans: Plans
    launch: Callable[..., Any]
    registered: Any


def operator(
    name: str,
    schema: str,
    plan: Callable[..., Run],
    results: Callable[..., Results],
    check: Callable[..., None] = lambda *arguments: None,
    batch: Callable[..., Any] | None = None,
) -> Operator:
    """Registers `memtraffic::name`, a function of tensors that is planned once per kind of call.

    schema: as PyTorch writes it, without default values, such as
        "(Tensor x, Tensor? weight, float eps) -> (Tensor, Tensor)".
    plan: `plan(results, tensors, *options)` returns what writes the results, as
        `run(*results, *tensors)`: such as a `Launch`. A tensor that may be absent is None in
        `tensors` and for `run`. It is asked for empty tensors as well.
    results: `results(*tensors, *options)` returns shape and dtype of each result; they are
        allocated packed, on the device of the first tensor.
    check: `check(*tensors, *options)` raises what the kernels do not take. It may not look at
        memory, which meta tensors do not have. Of a call that is planned, it is not asked.
    batch: the rule of `torch.func.vmap`, as of `torch.library.register_vmap`; by default, the
        operator runs on one sample after the other.

    An error of `check` or `plan` is remembered by nobody.
    """
    arguments, returns = schema.split("->")
    every = [it.strip("() ").split() for it in arguments.split(",")]
    names = tuple(name for kind, name in every if kind.startswith("Tensor"))
    several = returns.strip().startswith("(")
    more, plans = len(names) - 1, Plans()
    latest = plans.latest

    def launch(first: Tensor, rest: tuple[Any, ...], out: Tensor | None = None) -> Any:
        index = first.get_device()
        if current_gpu and index != -1 and index != current_gpu():
            with torch.cuda.device(index):
                return launch(first, rest, out)
        try:
            key: tuple[object, ...] = (
                first.dtype, first.shape, first.stride(), (first.data_ptr() or -1) & 15,
                index, capture(), rest[more:] if more else rest,
            )  # fmt: skip
            if more:
                tensors = rest[:more]
                for x in tensors:  # `facts` in line; of a null address, 15
                    key += (None,) if x is None else (
                        x.dtype, x.shape, x.stride(), (x.data_ptr() or -1) & 15,
                    )  # fmt: skip
            if out is not None:
                key += (facts(out),)
        except RuntimeError as error:  # there is no address
            _check_tensors(name, names, (first, *rest))
            if not any(map(is_indirect, (first, *rest[:more]))):
                raise RuntimeError(f"{name}: a tensor has left its torch.vmap") from error
            return overload(first, *rest)
        planned = latest.get(key)
        if planned is None:
            planned = find(key, first, rest, out)
        run, allocate = planned
        if several:
            made = allocate() if out is None else (out, *allocate())
            run(*made, first, *rest[:more])
            return made
        made = allocate() if out is None else out
        if more:
            run(made, first, *tensors)
        else:
            run(made, first)
        return made

    def find(key: Any, first: Tensor, rest: tuple[Any, ...], out: Tensor | None) -> Any:
        # Apart from `launch`, whose variables would be slower if a lambda there used them.
        tensors = first, *rest[:more]
        if is_tracing() or any(map(is_indirect, tensors)):  # a trace has operators alone
            return (lambda *tensors: None), (lambda: overload(first, *rest))
        return plans.find(key, lambda: prepare(tensors, rest[more:], out))

    def prepare(
        tensors: tuple[Any, ...], options: tuple[Any, ...], out: Tensor | None
    ) -> tuple[Run, Callable[[], Any]]:
        makers = [_allocator(*like) for like in checked(*tensors, *options)]
        device = tensors[0].device
        if device.type != "cuda" and not (runtime.INTERPRETED or runtime.is_capturing()):
            raise RuntimeError(f"{name}: the tensor is on the {device.type}, not on a GPU")
        if any(it is not None and it.numel() and not it.data_ptr() for it in tensors):
            raise RuntimeError(f"{name}: the memory of a tensor was freed")
        made = [make() for make in makers]
        if out is not None:
            made[0] = out
        run = plan(tuple(made), tensors, *options)
        if isinstance(run, Launch):
            run = run.unwrapped()
        new = makers if out is None else makers[1:]
        return run, (lambda: tuple(make() for make in new)) if several else makers[0]

    def checked(*arguments: Any) -> list[tuple[Sequence[int], torch.dtype, torch.device]]:
        """Shape, dtype and device of each result."""
        check(*arguments)
        device = arguments[0].device
        for it in arguments[1 : more + 1]:
            if it is not None and it.device != device:
                raise RuntimeError(f"{name}: tensors on {device} and on {it.device}")
        return [(*like, device) for like in results(*arguments)]

    def fake(*arguments: Any) -> Any:
        like = checked(*arguments)
        made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in like]
        return tuple(made) if several else made[0]

    def one_by_one(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        n = info.batch_size  # of none, a sample of zeros has the shape
        samples = [
            registered(*(
                it if at is None else it.select(at, i) if n else it.sum(at)
                for it, at in zip(arguments, in_dims, strict=True)
            ))
            for i in range(n or 1)
        ]  # fmt: skip
        if not several:
            return torch.stack(samples)[:n], 0
        stacked = tuple(torch.stack(each)[:n] for each in zip(*samples, strict=True))
        return stacked, (0,) * len(stacked)

    registered = torch.library.custom_op(
        f"memtraffic::{name}",
        lambda first, *rest: launch(first, rest),
        mutates_args=(),
        schema=schema,
    )
    registered.register_fake(fake)
    registered.register_vmap(batch or one_by_one)
    overload = getattr(torch.ops.memtraffic, name)
    return Operator(name, names, not several, results, plans, launch, overload)


def _allocator(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Callable[[], Tensor]:
    """What allocates a packed tensor, on the current GPU if on any."""
    strides = torch.empty(shape, device="meta").stride()
    empty = torch_adapter.empty_on_current_gpu
    if empty and runtime.runs_on_gpu() and device.type == "cuda":
        return functools.partial(empty, tuple(shape), strides, dtype)
    return functools.partial(torch.empty_strided, tuple(shape), strides, dtype=dtype, device=device)


def are_plain(tensors: Iterable[Tensor | None]) -> bool:
    """Whether each is absent, or has its values in its memory, if it has memory."""
    for x in tensors:
        # The memory of a negative tensor holds minus what it stands for.
        if x is not None and (type(x) not in PLAIN or x.is_neg()):
            return False
    return True


def is_watched() -> bool:
    """Whether derivatives come along, or a transform or a mode that is no meter's looks on."""
    seen = FORWARD_MODE[LEVEL] >= 0 or is_transformed()
    return seen or (active_modes() > 0 and not runtime.is_capturing())


@dataclass(frozen=True)
class Operation:
    """What `operation` makes.

    apply: `apply(first, rest)` is the operation of tensors and options, by the cheapest way that is
        right for them. Raises TypeError for what is no tensor, and NotImplementedError for what is
        not dense.
    into: `into(out, *arguments)` is the same written into `out`. Raises RuntimeError where a
        gradient is required, and for an `out` of another dtype, shape or device, whose memory was
        freed, that repeats its elements, or that overlaps a part of a tensor.
    """

    apply: Callable[[Tensor, tuple[Any, ...]], Tensor]
    into: Callable[..., Tensor]


def operation(
    forward: Operator,
    backward: Operator,
    save: Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]],
    reference: Callable[..., Any],
    in_pytorch: Callable[..., Any],
) -> Operation:
    """Joins an operator with the one that computes its gradients.

    forward: its first result is that of the operation; any others are only saved.
    backward: of `(dy, *saved)` and options of its own, to a gradient for each tensor of `forward`,
        in their order; with as many results. That of an absent tensor is not looked at.
    save: `save(arguments, results)` returns `(saved, options)`, which backward is given.
    reference: what backward computes, in lines of PyTorch and of the same arguments: its gradients
        are those of the gradient. It computes anew what `forward` saves beside its first result.
    in_pytorch: what forward computes, so; in forward mode both stand for the kernels.
    """
    name, names, single = forward.name, forward.tensors, forward.single
    more = len(names) - 1
    forward, backward = _differentiable(forward, backward, save, reference, in_pytorch)
    launch, registered = forward.launch, forward.registered
    function = _function(forward, backward, save)
    run_and_save, bare = function.apply, bare_apply(function)

    def apply(first: Tensor, rest: tuple[Any, ...]) -> Tensor:
        if (
            is_compiling()
            or is_watched()
            or type(first) not in PLAIN  # `are_plain` in line, as a call costs the host
            or first.is_neg()
            or (more and not are_plain(rest[:more]))
        ):
            _check_tensors(name, names, (first, *rest[:more]))
            made = registered(first, *rest)
        elif (first.requires_grad or (more and _requires_gradient(rest[:more]))) and (
            is_grad_enabled() and not is_tracing()
        ):
            if more or is_wrapped(first):
                return run_and_save(first, *rest[:more], rest[more:])
            return bare(first, rest)
        else:
            made = launch(first, rest)
        return made if single else made[0]

    def into(out: Tensor, *arguments: Any) -> Tensor:
        tensors = arguments[: more + 1]
        _check_tensors(name, names, tensors)
        _check_tensors(name, ("out",), (out,))
        for argument, x in zip(("out", *names), (out, *tensors), strict=True):
            if x is not None and x.requires_grad and is_grad_enabled():
                raise RuntimeError(
                    f"{name}: out= does not work with autograd: {argument} requires a gradient"
                )
        [(shape, dtype), *_] = forward.results(*arguments)
        device = tensors[0].device
        if out.dtype != dtype or out.device != device or out.shape != shape:
            raise RuntimeError(
                f"{name}: out is {out.dtype} {tuple(out.shape)} on {out.device}, and the "
                f"result is {dtype} {tuple(shape)} on {device}"
            )
        odd = is_compiling() or is_tracing() or is_watched() or not are_plain((out, *tensors))
        if odd or any(map(is_indirect, (out, *tensors))):
            made = registered(*arguments)
            return out.copy_(made if single else made[0])
        check_memory(name, RuntimeError, out, dict(zip(names, tensors, strict=True)))
        # Autograd may have saved what is about to be overwritten.
        increment_version(out)
        launch(arguments[0], arguments[1:], out)
        return out

    return Operation(apply, into)


def _requires_gradient(tensors: Iterable[Tensor | None]) -> bool:
    for x in tensors:  # a generator would cost the host more
        if x is not None and x.requires_grad:
            return True
    return False


def _check_tensors(name: str, names: tuple[str, ...], tensors: Sequence[Any]) -> None:
    """Raises TypeError for what is no tensor, and NotImplementedError for one that is not dense."""
    for argument, x in zip(names, tensors, strict=False):
        if not isinstance(x, Tensor) and (x is not None or argument == names[0]):
            raise TypeError(f"{name}: {argument} is a {type(x).__name__}, not a tensor")
        if x is not None and x.layout is not torch.strided:
            raise NotImplementedError(f"{name}: {argument} is {x.layout}: a dense one is needed")


def _function(forward_: Operator, backward_: Operator, save: Callable[..., Any]) -> Any:
    """The operation in eager mode: cheaper than the registered operators, and equal to them."""
    launch, run, single = forward_.launch, backward_.launch, forward_.single

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, first: Tensor, *others: Any) -> Tensor:
            rest = others[:-1] + others[-1]  # tensors, and all options in one
            made = launch(first, rest)
            results = (made,) if single else made
            saved, ctx.options = save((first, *rest), results)
            ctx.save_for_backward(*saved)
            return results[0]

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            saved = ctx.saved_tensors
            # A gradient of the gradient is asked for; and what is saved may be replaced by hooks.
            watched = (
                is_compiling() or is_grad_enabled() or is_watched() or not are_plain((dy, *saved))
            )
            if watched:
                found = backward_.registered(dy, *saved, *ctx.options)
            else:
                found = run(dy, saved + ctx.options)
            if backward_.single:
                return found, None  # it is the only tensor's, and wanted
            return _wanted(ctx, found)

    return Function


def _wanted(ctx: Any, gradients: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """A gradient, or None, for each argument of the forward."""
    wanted = zip_longest(gradients, ctx.needs_input_grad)
    return tuple(it if needed else None for it, needed in wanted)


def _differentiable(
    forward: Operator,
    backward: Operator,
    save: Callable[..., Any],
    reference: Callable[..., Any],
    in_pytorch: Callable[..., Any],
) -> tuple[Operator, Operator]:
    """Registers the gradients of both; transforms, which take no registered one, get a function."""
    n_saved = len(backward.tensors)

    def transformable(
        of: Operator, save: Callable[..., Any], gradient: Callable[..., Any], in_pytorch: Any
    ) -> Operator:
        def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            results = (output,) if of.single else output
            saved, ctx.options = save(inputs, results)
            ctx.save_for_backward(*saved)
            if of is forward:
                ctx.mark_non_differentiable(*results[1:])

        class Function(torch.autograd.Function):
            generate_vmap_rule = True
            forward = staticmethod(lambda *arguments: of.registered(*arguments))
            setup_context, backward = staticmethod(setup), staticmethod(gradient)

        def call(*arguments: Any) -> Any:
            if is_compiling() or not (FORWARD_MODE[LEVEL] >= 0 or is_differentiated()):
                return of.registered(*arguments)
            return (in_pytorch if FORWARD_MODE[LEVEL] >= 0 else Function.apply)(*arguments)

        torch.library.register_autograd(f"memtraffic::{of.name}", gradient, setup_context=setup)
        return replace(of, registered=call)

    def gradient(ctx: Any, dy: Tensor, *ignored: Any) -> tuple[Tensor | None, ...]:
        found = of_gradient.registered(dy, *ctx.saved_tensors, *ctx.options)
        return _wanted(ctx, (found,) if backward.single else found)

    def second(ctx: Any, *ddx: Tensor) -> tuple[Tensor | None, ...]:
        every = range(n_saved)
        given = {i: it for i, it in enumerate(ctx.saved_tensors) if it is not None}
        pull: Any = torch.func.vjp(
            lambda tensors: reference(*map(tensors.get, every), *ctx.options), given
        )[1]
        [found] = pull(ddx[0] if backward.single else ddx)
        return _wanted(ctx, tuple(map(found.get, every)))

    of_gradient = transformable(
        backward, lambda inputs, results: (inputs[:n_saved], inputs[n_saved:]), second, reference
    )
    return transformable(forward, save, gradient, in_pytorch), of_gradient

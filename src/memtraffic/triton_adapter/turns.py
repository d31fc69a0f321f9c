"""Programs of a cooperative launch take turns in Triton's interpreter."""

from __future__ import annotations

import contextvars
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from memtraffic.triton_adapter.launch import Grid
from memtraffic.triton_adapter.patching import replaced
from memtraffic.triton_adapter.reach import NUMBER

FEW = 32  # programs that have begun and not ended, as long as these do not wait for later ones
MAX_IDLE_TURNS = 100  # a program may also look at memory several times without waiting


class _Abandoned(BaseException):
    """Ends the program of a launch in which another program failed."""


class Turns:
    """Runs the programs of one cooperative launch by turns, each in a thread, one at a time.

    A program hands over before it reads what others may write: at a volatile load, and at an atomic
    operation. So programs that wait for one another get what they wait for, in the same order each
    time. Raises RuntimeError if none of them writes in MAX_IDLE_TURNS turns of each.

    On a GPU all of them run side by side. Here FEW begin, and another one whenever one ends; twice
    as many where a turn of the oldest leads to nothing. A volatile load that it made too early, and
    makes again, is reported once, as if all had begun before.
    """

    current: Turns | None = None

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self._waiting: list[tuple[Grid, bool, threading.Semaphore]] = []
        self._main = threading.Semaphore(0)
        self._failure: BaseException | None = None
        self.writes = 0  # how often a program wrote to memory
        self._most, self.early = FEW, True  # whether there are programs that have not begun
        self.looks: dict[Grid, list[bytes]] = {}  # where a program has looked early, at last

    def start(self, run: Callable[[], None]) -> None:
        """Runs a program until it hands over or ends, once there is room for it.

        Raises what a program raised.
        """
        index = self._builder.grid_idx
        while len(self._waiting) >= self._most:
            if not self._turn():
                self._most *= 2
        self._builder.set_grid_idx(*index)
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(self._run, run), daemon=True).start()
        self._main.acquire()
        self._check()

    def finish(self) -> None:
        """Runs all programs to their end."""
        for _ in range(sum(not looks for _, looks, _ in self._waiting)):  # those that began late
            self._turn()
        self.early, idle = False, 0  # turns since a program wrote or ended
        while count := len(self._waiting):
            if idle > MAX_IDLE_TURNS * count:
                self._failure = RuntimeError(f"{count} programs wait for what none of them writes")
            idle = 0 if self._turn() else idle + 1

    def hand_over(self, looks: bool) -> None:
        """Called by a program: lets the others take their turns first.

        looks: whether it is about to load, and so will not write.
        """
        turn = threading.Semaphore(0)
        self._waiting.append((tuple(self._builder.grid_idx), looks, turn))
        self._main.release()
        turn.acquire()
        if self._failure is not None:
            raise _Abandoned

    def _run(self, run: Callable[[], None]) -> None:
        try:
            run()
        except _Abandoned:
            pass
        except BaseException as error:
            self._failure = error
        self._main.release()

    def _turn(self) -> bool:
        """Resumes the program that waits longest. Returns whether it wrote, or ended.

        Early, one that may write: what it writes may be what another one looks for.
        """
        before = self.writes, len(self._waiting)
        writers = (i for i, (_, looks, _) in enumerate(self._waiting) if self.early and not looks)
        self._resume(next(writers, 0))
        self._check()
        return before != (self.writes, len(self._waiting))

    def _resume(self, place: int = 0) -> None:
        index, _, turn = self._waiting.pop(place)
        self._builder.set_grid_idx(*index)
        turn.release()
        self._main.acquire()

    def _check(self) -> None:
        if self._failure is None:
            return
        while self._waiting:
            self._resume()
        raise self._failure


class _Program:
    """A kernel's function for the interpreter, which calls it once for each program of the grid."""

    def __init__(self, fn: Any, turns: Turns, builder: Any) -> None:
        self._fn, self._turns, self._builder = fn, turns, builder
        self.__signature__ = inspect.signature(fn)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fn, name)

    def __call__(self, **arguments: Any) -> None:
        index = tuple(self._builder.grid_idx)
        self._turns.start(functools.partial(self._fn, **arguments))
        if index == tuple(size - 1 for size in self._builder.grid_dim):
            self._turns.finish()


def cooperative_executor(executor: Any) -> type:
    """The class that runs the programs of one launch, those of a cooperative one by turns.

    Its constants are those that the compiler sees, also by an annotation in quotes.
    """

    class CooperativeExecutor(executor):
        def __init__(self, fn: Any, arg_names: list[str], *args: Any, **options: Any) -> None:
            super().__init__(fn, arg_names, *args, **options)
            kinds = inspect.get_annotations(fn)  # text, it may be, as the compiler takes it
            self.constexprs = [it for it in arg_names if "constexpr" in str(kinds.get(it))]

        def __call__(self, *args: Any, **options: Any) -> None:
            if not options.get("launch_cooperative_grid"):
                super().__call__(*args, **options)
                return
            from triton.runtime.interpreter import interpreter_builder

            turns = Turns(interpreter_builder)
            self.fn: Any = _Program(self.fn, turns, interpreter_builder)
            with replaced((Turns, "current", turns)):
                super().__call__(*args, **options)

    return CooperativeExecutor


# Of each access of the interpreter, which argument is the mask; 0 for none.
ACCESSES = {
    "create_masked_load": 1,
    "create_masked_store": 2,
    "create_atomic_rmw": 3,
    "create_atomic_cas": 0,
}


def taking_turns(name: str, method: Callable[..., Any], memory: Any) -> Callable[..., Any]:
    """An access of the interpreter, where the programs of a cooperative launch take turns.

    `&` of a scalar and a vector makes a mask of integers, which Triton 3.9 refuses: they become
    boolean.

    An atomic operation has written if it left something else than it found: programs may wait with
    atomic operations, too.
    """
    is_load, is_atomic = name == "create_masked_load", name.startswith("create_atomic")
    mask_at, pointers_at = ACCESSES[name], int(name == "create_atomic_rmw")

    def leaves_as_found(found: Any, *args: Any) -> bool:
        pointers = args[pointers_at].data
        mask = args[mask_at].data if mask_at else np.ones(pointers.shape, dtype=bool)
        return bool(
            memory.real.load(pointers, mask, found, found.dtype).tobytes() == found.tobytes()
        )

    @functools.wraps(method)
    def access(builder: Any, *args: Any, **options: Any) -> Any:
        mask = args[mask_at]  # that of a descriptor is the boolean array itself
        if mask_at and isinstance(mask.data, np.ndarray) and mask.data.dtype != bool:
            mask.data = mask.data.astype(bool)
        turns = Turns.current
        number = args[pointers_at].attr.get(NUMBER, 0)
        if turns is None:
            memory.numbers = number
            return method(builder, *args, **options)
        looks = is_load and options.get("is_volatile", args[-1])
        where = [args[0].data.tobytes(), mask.data.tobytes()] if looks else []
        before = turns.looks.pop(tuple(builder.grid_idx), None)
        if is_atomic or looks:
            turns.hand_over(looks)
        if looks and turns.early:
            turns.looks[tuple(builder.grid_idx)] = where
        known = [(memory, "meter", None)] if where == before else []
        with replaced(*known, (memory, "numbers", number)):
            result = method(builder, *args, **options)
        if not is_load and not (is_atomic and leaves_as_found(result.data, *args)):
            turns.writes += 1
        return result

    return access


def polling(poll: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter's `tl.atomic_poll`, which waits where the other programs take turns.

    Elsewhere it raises NotImplementedError in place of waiting forever. Triton 3.9 has an empty
    value where there is no timeout, and its interpreter takes that for one.
    """

    def create(builder: Any, pointers: Any, expected: Any, timeout: Any, *how: Any) -> Any:
        timeout = timeout if hasattr(timeout, "data") else None
        if timeout is not None or Turns.current is not None:
            return poll(builder, pointers, expected, timeout, *how)
        once = poll(builder, pointers, expected, builder.get_int64(0), *how)
        if not once.data.all():
            raise NotImplementedError(
                f"atomic_poll in program {tuple(builder.grid_idx)} waits for what no program "
                "before it has written: launch_cooperative_grid=True lets programs take turns"
            )
        return once

    return create

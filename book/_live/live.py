"""The engine of a live kernel: runs what a reader edits, and says which elements it touches.

A page ships this file as it is, and a Python for browsers runs it; the tests run it in CPython.
It imports nothing. A host gives it three things: in MATH functions of a float that behave as those
of JavaScript do, where log(0) is -inf and sqrt(-1) is NaN (the names of HOSTED); in MODULES
`sys.modules`, some of whose entries are replaced during a run; in FRAME "get", `sys._getframe`.

`run(text, options)` is a generator of dicts, in this order. They are made of ints, text, booleans,
None and lists, which JSON takes.

- {"stage": "counts", "shape": [4, 8], "text": "reads 32 elements, writes 32 elements, in 1
  operation", "reads": 32, "writes": 32, "operations", "tensors", "steps"}. An operation is {"name",
  "line", "reads", "writes", "kernel": whether it is one}. A tensor is {"name", "shape", "reads",
  "writes"}, where the last two say how often each element in memory was read and written. A step is
  one load or store of a program, or an operand or a result of an operation of PyTorch: {"program":
  [0, 0, 0] or None, "line", "kind": "read" or "written", "argument": its name, "tensor": an index
  of "tensors", "offsets": the elements, counted from the first one of that tensor}.
- {"stage": "formula", "text": "reads 5MN + 2M, writes 3MN + 2M", "reads", "writes", "solved",
  "checked": lists of shapes, "powers": whether it is of powers of two alone, "note": why, or ""}.
  The text says so where there is no formula; then "reads" and "writes" are "".
- {"stage": "verdict", "right": True, "text": "A softmax: right at 6 matrices."}, where the options
  have a reference.
- {"stage": "error", "line": a line of the text or 0, "message": what is wrong, as the end of a
  sentence}, which ends it.

options: a dict, of which all may be left out. "function": the name of what is called, by default
the last function of the text. "inputs": the sizes of each argument, such as
"M,N N M:int64<N", by default as many matrices M,N as the function needs. "dtype": of the others.
"reference": a function of these arguments in PyTorch, such as SOFTMAX, and "name": what it is, such
as "a softmax". "moves": what it has to move, such as "reads MN, writes MN".
"modules": the text of further modules that may be imported, by name; of a package, too, before what
it holds. Where only powers of two run, these are tried, and the texts say so.

What is not modelled is refused by name: atomics, block pointers, `tl.dot`, random numbers,
autotuning, whole numbers that outgrow their type, changes in place. Numbers are rounded to their
type after each operation; exp, log and sums are computed in float64 first, and may differ from a
GPU's in the last digits. A masked load without `other` gives 0, as Triton's interpreter does.
"""

MATH, MODULES, FRAME = {}, {}, {}
HOSTED = "exp exp2 log log2 sqrt sin cos floor ceil fround".split()  # fround: to float32

USER = "__live__"  # the __name__ of the reader's text
INF, NAN = float("inf"), float("nan")
SHAPE = (4, 8)
SOLVED = ((2, 4), (2, 16), (5, 4), (5, 16))
CHECKED = {"any": ((3, 5), (4, 21), (9, 8)), "powers": ((3, 32), (4, 64), (7, 2))}
JUDGED = {
    "any": ((5, 7), (3, 1), (4, 32), (2, 521), (19, 5), (5, 13)),
    "powers": ((5, 8), (3, 1), (4, 32), (2, 1024), (19, 4), (5, 16)),
}
HARD = ((1e30, -1e30), (-INF,), (INF,), (NAN,))  # what rows of the last matrix begin with
SOFTMAX = "lambda x: torch.softmax(x, dim=1)"


class LiveError(Exception):
    """What a reader can act on, as a sentence."""


class Outside(LiveError):
    """A load or a store beyond a tensor."""


REFUSALS = (LiveError, ValueError, AssertionError, NotImplementedError)  # of a shape


def need(holds, message):
    if not holds:
        raise LiveError(message)


# ---- numbers


class Dtype:
    """A type of numbers, of `torch` and `tl` both. rank: 0 bool, 1 whole, 2 floating, 3 pointer."""

    def __init__(self, name, rank, bits, digits=0, least=0, element_ty=None):
        self.name, self.rank, self.primitive_bitwidth = name, rank, bits
        # digits: of the significand. least: the exponent of the least normal number.
        self.digits, self.least, self.element_ty = digits, least, element_ty
        self.signed, self.itemsize = rank > 0 and name[0] != "u", max(1, bits // 8)
        self.low = -(2 ** (bits - 1)) if self.signed else 0
        self.high = 2 ** (bits - 1) - 1 if self.signed else 2**bits - 1

    def __repr__(self):
        return self.name


DTYPES = {
    f"{sign}int{n}": Dtype(f"{sign}int{n}", 1, n) for sign in ("", "u") for n in (8, 16, 32, 64)
}
DTYPES["int1"] = int1 = Dtype("int1", 0, 1)
DTYPES["float16"] = float16 = Dtype("float16", 2, 16, 11, -14)
DTYPES["bfloat16"] = bfloat16 = Dtype("bfloat16", 2, 16, 8, -126)
DTYPES["float32"] = float32 = Dtype("float32", 2, 32, 24, -126)
DTYPES["float64"] = float64 = Dtype("float64", 2, 64, 53, -1022)
int32, int64, uint32 = DTYPES["int32"], DTYPES["int64"], DTYPES["uint32"]
POINTERS = {it: Dtype(f"pointer<{it}>", 3, 64, element_ty=DTYPES[it]) for it in DTYPES}


def nearest(value, dtype):
    """The number of a 16-bit type that is nearest to a float; of two, the even one."""
    size = abs(value)
    if not 0 < size < INF:
        return value  # 0, infinite or NaN
    exponent = max(int(MATH["floor"](MATH["log2"](size))), dtype.least)
    step = 2.0 ** (exponent - dtype.digits + 1)
    steps = value / step + 6755399441055744.0 - 6755399441055744.0  # float64 rounds the sum
    found = steps * step
    largest = 2.0 ** (16 if dtype is float16 else 128)
    return found if abs(found) < largest else found * INF


def rounded(values, dtype):
    """Numbers of a computation as its type has them. Whole ones that outgrow it are refused."""
    if dtype is float32:
        to = MATH["fround"]
        return [to(value) for value in values]
    if dtype.rank == 2 and dtype is not float64:
        return [nearest(value, dtype) for value in values]
    if dtype.rank == 1 and values:
        hint = ": convert with .to(tl.int64) before" if dtype is int32 else ""
        for value in (max(values), min(values)):
            fits = dtype.low <= value <= dtype.high
            need(fits, f"{value} does not fit {dtype}, and overflow is not modelled{hint}")
    return values


def converted(values, source, target):
    """Numbers of one type as numbers of another."""
    if source is target:
        return values
    if source.rank == 3 or target.rank == 3:
        raise LiveError(f"{source} is not converted to {target} here")
    if target.rank == 2:
        return rounded([float(value) for value in values], target)
    if target.rank == 0:
        return [value != 0 for value in values]
    for value in values if source.rank == 2 else ():
        need(-INF < value < INF, f"{value} is no whole number, and {target} has no place for it")
    return rounded([int(value) for value in values], target)


def divide(a, b):
    if b:
        return a / b
    if a != a or b != b or not a:
        return NAN
    return INF if (a > 0) == (str(b)[0] != "-") else -INF


def whole_divide(a, b):
    need(b, "a whole number is divided by 0")
    found = abs(a) // abs(b)
    return found if (a < 0) == (b < 0) else -found


BINARY = {it: eval(f"lambda a, b: a {it} b") for it in "+ - * & | ^ << >> < <= > >= == !=".split()}
BINARY.update({"/": divide, "//": whole_divide, "%": lambda a, b: a - b * whole_divide(a, b)})
BINARY["max"] = lambda a, b: b if a != a or b > a else a  # a NaN loses
BINARY["min"] = lambda a, b: b if a != a or b < a else a
KIND_OF_SIGN = {it: "compare" for it in "< <= > >= == !=".split()}
KIND_OF_SIGN.update({it: "divide" for it in "/ // %".split()})
KIND_OF_SIGN.update({it: "bits" for it in "& | ^ << >>".split()})


# ---- shapes


def numel_of(shape):
    count = 1
    for n in shape:
        count *= n
    return count


def sizes_in(shape):
    return tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)


def packed(shape):
    return tuple([numel_of(shape[i + 1 :]) for i in range(len(shape))])


def together(shapes):
    """The shape that several broadcast to."""
    found = [1] * max([len(shape) for shape in shapes])
    for shape in shapes:
        for i in range(1, len(shape) + 1):
            if found[-i] == 1:
                found[-i] = shape[-i]
            elif shape[-i] not in (1, found[-i]):
                each = " and ".join([str(it) for it in shapes])
                raise LiveError(
                    f"shapes {each} do not fit together: {shape[-i]} is not {found[-i]}"
                )
    return tuple(found)


def walk(shape, strides, start=0):
    """The offset of each element of a shape in order, for these strides."""
    offsets = [start]
    for d in range(len(shape)):
        n, step = shape[d], strides[d]
        offsets = [base + i * step for base in offsets for i in range(n)]
    return offsets


def spread(values, shape, to):
    """Values of a shape broadcast to another."""
    if shape == to:
        return values
    if len(values) == 1:
        return values * numel_of(to)
    steps, strides = packed(shape), [0] * (len(to) - len(shape))
    strides += [0 if shape[i] == 1 else steps[i] for i in range(len(shape))]
    return [values[at] for at in walk(to, strides)]


def axis_of(axis, ndim, what):
    inside = type(axis) is int and -ndim <= axis < ndim
    need(inside, f"{what}: axis {axis!r} is out of range for {ndim} dimensions")
    return axis % ndim


def known(values):
    return [value for value in values if value == value] or values


FOLDS = {
    "sum": lambda values: sum(values[1:], values[0]),
    "max": lambda values: max(known(values)),
    "min": lambda values: min(known(values)),
    "argmax": lambda values: values.index(max(known(values))),
    "argmin": lambda values: values.index(min(known(values))),
}


# ---- what is counted


class Meter:
    """What a run has moved so far. kernel: what runs now moved. traced: whether steps are kept."""

    def __init__(self, traced=False):
        self.operations, self.steps, self.tensors, self.traced = [], [], [], traced
        self.kernel = self.program = self.grid = None

    def index_of(self, memory):
        if memory not in self.tensors:
            self.tensors.append(memory)
        return self.tensors.index(memory)

    def step(self, kind, argument, memory, offsets, line):
        if self.traced and offsets:
            for at in offsets:
                memory.times[kind][at] += 1
            step = {"program": self.program, "line": line, "kind": kind, "argument": argument}
            self.steps.append({**step, "tensor": self.index_of(memory), "offsets": offsets})

    def operation(self, name, operands, results):
        """One of PyTorch: it reads each operand once, and writes each result once."""
        line, moved = line_now(), {"read": 0, "written": 0}
        for kind, tensors in (("read", operands), ("written", results)):
            for x in tensors:
                x.memory.name = x.memory.name or name
                held = x.places()
                moved[kind] += len(held)
                self.step(kind, x.memory.name, x.memory, held, line)
        self.add(name, line, moved, False)

    def add(self, name, line, moved, kernel):
        counted = {"reads": moved["read"], "writes": moved["written"], "kernel": kernel}
        self.operations.append({"name": name, "line": line, **counted})

    def total(self, side):
        return sum([it[side] for it in self.operations])


meter = Meter()


def line_now():
    """The line of the reader's text that runs; 0 where none does."""
    frame = FRAME["get"](1) if FRAME else None
    while frame and frame.f_globals.get("__name__") != USER:
        frame = frame.f_back
    return frame.f_lineno if frame else 0


# ---- blocks


def operator(sign):
    """The method of an operator, and that of its reflection."""
    return lambda x, other: x.compute(sign, x, other), lambda x, other: x.compute(sign, other, x)


IN_PLACE = "a change in place is not modelled: make a new one, as in x = x - m, not x -= m"


class Arithmetic:
    """What blocks and tensors have in common."""

    __hash__ = None
    __add__, __radd__ = operator("+")
    __sub__, __rsub__ = operator("-")
    __mul__, __rmul__ = operator("*")
    __truediv__, __rtruediv__ = operator("/")
    __floordiv__, __rfloordiv__ = operator("//")
    __mod__, __rmod__ = operator("%")
    __and__, __rand__ = operator("&")
    __or__, __ror__ = operator("|")
    __xor__, __rxor__ = operator("^")
    __lshift__, __rlshift__ = operator("<<")
    __rshift__, __rrshift__ = operator(">>")
    __lt__, __gt__ = operator("<")[0], operator(">")[0]
    __le__, __ge__ = operator("<=")[0], operator(">=")[0]
    __eq__, __ne__ = operator("==")[0], operator("!=")[0]

    def __repr__(self):
        one = self.shape == () and self.word == "block"
        return f"one {self.dtype}" if one else f"a {self.word} of {self.dtype}, shape {self.shape}"

    def __bool__(self):
        branch = f"a branch (if, and, or, not, a < b < c) takes one number, not {self!r}"
        need(self.shape == (), f"{branch}: combine masks with & and |, or use tl.where")
        return bool(self.numbers()[0])

    def __getattr__(self, name):
        if name in self.methods:
            return lambda *args, **options: self.methods[name](self, *args, **options)
        need(name[-1] != "_" or name[0] == "_", IN_PLACE)
        refuse(name, f"a {self.word} has no .{name} here", [*self.methods, *self.facts])

    def __setitem__(self, *_):
        raise LiveError(IN_PLACE)


class Block(Arithmetic):
    """What a kernel computes with: numbers, or pointers into one argument, in a shape.

    data: a list of numbers; of pointers, elements from the first one of `argument`.
    """

    word, methods, facts = "block", {}, ("dtype", "shape")

    def __init__(self, data, shape, dtype, argument=None):
        self.data, self.shape, self.dtype, self.argument = data, shape, dtype, argument

    def shaped(self, shape, data=None):
        return Block(self.data if data is None else data, shape, self.dtype, self.argument)

    def spread_to(self, shape):
        return self.shaped(shape, spread(self.data, self.shape, shape))

    def __index__(self):
        need(self.shape == () and self.dtype.rank < 2, f"a whole number is needed, not {self!r}")
        return int(self.data[0])

    def __getitem__(self, keys):
        shape, at = [], 0
        for key in sizes_in(keys):
            if key is None:
                shape.append(1)
            elif isinstance(key, slice) and at < len(self.shape) and key.start is None is key.stop:
                shape.append(self.shape[at])
                at += 1
            else:
                raise LiveError(f"{self!r} takes : and None in [], and tl.load reads memory")
        return self.shaped(tuple(shape) + self.shape[at:])

    def __neg__(self):
        return binary("-", 0, self)

    def __invert__(self):
        return binary("^", self, True if self.dtype is int1 else -1)


Block.numbers = lambda self: self.data
Block.compute = lambda self, sign, a, b: binary(sign, a, b)


def dtype_of(number):
    """The type that Triton gives a number of Python."""
    if isinstance(number, Block):
        return number.dtype
    if isinstance(number, bool):
        return int1
    if isinstance(number, int):
        for dtype in (int32, uint32, int64):
            if dtype.low <= number <= dtype.high:
                return dtype
    if isinstance(number, float):
        size = abs(number)
        return float32 if not 0 < size < INF or 2.0**-126 <= size < 2.0**128 else float64
    raise LiveError(f"a kernel computes with blocks and numbers up to 64 bits, not with {number!r}")


def block_of(value, dtype=None):
    """A block, of a type if it is given, also of a number."""
    if not isinstance(value, Block):
        natural = dtype_of(value)
        value = Block([value], (), natural)
        if natural.rank == 2:
            value = Block(rounded([float(value.data[0])], dtype or natural), (), dtype or natural)
    if dtype is None or value.dtype is dtype:
        return value
    return Block(converted(value.data, value.dtype, dtype), value.shape, dtype)


def promoted(a, b, dividing=False):
    """The type that Triton computes two operands in. A number of Python gives way to a block."""
    left, right = dtype_of(a), dtype_of(b)
    if isinstance(a, Block) != isinstance(b, Block):
        strong, weak = (left, right) if isinstance(a, Block) else (right, left)
        if weak.rank <= strong.rank:
            return float32 if dividing and strong in (float16, bfloat16) else strong
    for dtype in (float64, float32):
        if left is dtype or right is dtype:
            return dtype
    if left is float16 or right is float16:
        return float32 if dividing else float16
    if left is bfloat16 or right is bfloat16:
        return bfloat16 if left is right and not dividing else float32
    alike = left.signed == right.signed or not dividing
    need(alike, f"{left} and {right} are divided: convert one, so that both have a sign")
    return max(left, right, key=lambda it: (it.primitive_bitwidth, not it.signed))


def binary(sign, a, b):
    """The result of an operator on two blocks, or on a block and a number."""
    if 3 in (dtype_of(a).rank, dtype_of(b).rank):
        a, b = (b, a) if dtype_of(a).rank != 3 and sign == "+" else (a, b)
        what = f"{dtype_of(a)} {sign} {dtype_of(b)}: a pointer takes + and - of whole numbers alone"
        need(sign in ("+", "-") and dtype_of(a).rank == 3 and dtype_of(b).rank < 2, what)
        data, shape = paired(sign, a, block_of(b))
        return a.shaped(shape, data)
    kind = KIND_OF_SIGN.get(sign)
    dtype = promoted(a, b, kind == "divide")
    dtype = float32 if sign == "/" and dtype.rank < 2 else dtype
    whole = kind == "bits" or sign in ("//", "%")
    need(dtype.rank < 2 or not whole, f"{sign} is for whole numbers, not for {dtype}")
    need(dtype.rank or kind in ("bits", "compare"), f"{sign} of masks: combine them with & and |")
    data, shape = paired(sign, block_of(a, dtype), block_of(b, dtype))
    dtype = int1 if kind == "compare" else dtype
    return Block(rounded(data, dtype), shape, dtype)


def paired(sign, a, b):
    shape, apply = together((a.shape, b.shape)), BINARY[sign]
    left, right = spread(a.data, a.shape, shape), spread(b.data, b.shape, shape)
    return [apply(left[i], right[i]) for i in range(len(left))], shape


def refuse(name, what, names):
    if name[:2] == "__":  # Python asks
        raise AttributeError(name)
    listed = sorted([it for it in names if it[0] != "_"])
    raise LiveError(f"{what}. Known are: {', '.join(listed)}")


# ---- tl


def constant(value, what):
    """A whole number that Triton needs when it compiles."""
    need(not isinstance(value, Block), f"{what} must be known to the compiler: use tl.constexpr")
    need(type(value) is int, f"{what} must be a whole number, not {value!r}")
    return value


def block_shape(shape, what):
    found = tuple([constant(n, f"{what}: a size") for n in sizes_in(shape)])
    for n in found:
        need(n > 0 and not n & (n - 1), f"{what}: a block has a power of two of elements, not {n}")
    need(numel_of(found) <= 2**20, f"{what}: more than Triton's 1048576 elements")
    return found


def tl_arange(start, end):
    start, end = constant(start, "tl.arange: its start"), constant(end, "tl.arange: its end")
    shape = block_shape(end - start, f"tl.arange({start}, {end})")
    return Block(list(range(start, end)), shape, int32)


def tl_full(shape, value, dtype):
    need(block_of(value).shape == (), f"tl.full takes one number, not {value!r}")
    return block_of(value, dtype).spread_to(block_shape(shape, "tl.full"))


def tl_program_id(axis):
    return Block([meter.program[axis_of(axis, 3, "tl.program_id")]], (), int32)


def tl_num_programs(axis):
    return Block([meter.grid[axis_of(axis, 3, "tl.num_programs")]], (), int32)


def tl_cast(input, dtype):
    need(isinstance(dtype, Dtype), f"a type such as tl.float32 is needed, not {dtype!r}")
    return block_of(block_of(input), dtype)


def touched(kind, pointer, mask):
    """The elements of a load or a store, as places in memory or None; each is checked, counted."""
    argument, found = pointer.argument, []
    for i in range(len(mask.data)):
        at = pointer.data[i]
        if mask.data[i] and not 0 <= at < argument.end:
            program = meter.program[0] if meter.grid[1:] == [1, 1] else tuple(meter.program)
            verb = "reads" if kind == "read" else "writes"
            raise Outside(
                f"program {program} {verb} element {at} of {argument.name}, whose tensor of shape "
                f"{argument.tensor.shape} ends at element {argument.end - 1}: a mask may be missing"
            )
        found.append(at + argument.tensor.offset if mask.data[i] else None)
    places = [at for at in found if at is not None]
    meter.step(kind, argument.name, argument.tensor.memory, places, line_now())
    meter.kernel[kind] += len(places)
    return found


def fitted(what, pointer, mask, value):
    """A pointer, a mask and a value in one shape."""
    need(dtype_of(pointer).rank == 3, f"{what} takes a pointer first, not {pointer!r}")
    mask = block_of(True if mask is None else mask)
    need(mask.dtype.rank < 2, f"{what}: a mask is made of comparisons, not of {mask.dtype}")
    mask, value = block_of(mask, int1), block_of(value, pointer.dtype.element_ty)
    shape = together((pointer.shape, value.shape, mask.shape))
    fits = shape == pointer.shape or (pointer.shape != () and what == "tl.load")
    need(fits, f"{what}: the pointer has shape {pointer.shape}, the others {shape}")
    return pointer.spread_to(shape), mask.spread_to(shape), value.spread_to(shape)


def tl_load(pointer, mask=None, other=None, cache_modifier="", eviction_policy="", volatile=False):
    need(mask is not None or other is None, "tl.load: `other` is for masked elements: give a mask")
    pointer, mask, dead = fitted("tl.load", pointer, mask, 0 if other is None else other)
    places, cells = touched("read", pointer, mask), pointer.argument.tensor.memory.cells
    data = [dead.data[i] if places[i] is None else cells[places[i]] for i in range(len(places))]
    return Block(data, pointer.shape, dead.dtype)


def tl_store(pointer, value, mask=None, cache_modifier="", eviction_policy=""):
    pointer, mask, value = fitted("tl.store", pointer, mask, value)
    places, cells = touched("written", pointer, mask), pointer.argument.tensor.memory.cells
    for i in range(len(places)):
        if places[i] is not None:
            cells[places[i]] = value.data[i]


def tl_where(condition, x, y):
    need(dtype_of(x).rank < 3 > dtype_of(y).rank, "tl.where: choose offsets, not pointers")
    dtype, chosen = promoted(x, y), block_of(block_of(condition), int1)
    x, y = block_of(x, dtype), block_of(y, dtype)
    shape = together((chosen.shape, x.shape, y.shape))
    chosen, x, y = (it.spread_to(shape).data for it in (chosen, x, y))
    return Block([x[i] if chosen[i] else y[i] for i in range(len(x))], shape, dtype)


def widened(x):
    """A block, where `max` and `maximum` compute numbers of bfloat16 in float32."""
    return block_of(block_of(x), float32) if dtype_of(x) is bfloat16 else block_of(x)


def tl_abs(x):
    return block_of(x).shaped(block_of(x).shape, [abs(value) for value in block_of(x).data])


def unary(name):
    def compute(x):
        x, apply = block_of(x), MATH[name.removesuffix("_rn")]
        wide = x.dtype in (float32, float64)
        need(wide, f"tl.{name} takes float32 or float64, not {x.dtype}: convert with .to")
        return x.shaped(x.shape, rounded([apply(value) for value in x.data], x.dtype))

    return compute


def reduce(name, x, axis=None, keep_dims=False, dtype=None):
    """A block that is reduced by one of FOLDS along an axis, or whole."""
    x = block_of(x)
    need(x.dtype.rank < 3 and x.shape, f"tl.{name} takes a block of numbers, not {x!r}")
    kept = "arg" in name or (name == "sum" and x.dtype.rank == 2) or x.dtype.primitive_bitwidth > 31
    small = float32 if x.dtype.rank == 2 else int32 if x.dtype.signed or name != "sum" else uint32
    x = block_of(x, dtype or (x.dtype if kept else small))
    ndim, shape = len(x.shape), x.shape if axis is not None else (len(x.data),)
    axis = axis_of(0 if axis is None else axis, len(shape), f"tl.{name}")
    strides, length = packed(shape), shape[axis]
    starts = walk(shape[:axis] + shape[axis + 1 :], strides[:axis] + strides[axis + 1 :])
    step, past = strides[axis], (length - 1) * strides[axis] + 1
    to, data = int32 if "arg" in name else x.dtype, x.data
    data = [FOLDS[name](data[at : at + past : step]) for at in starts]
    left = shape[:axis] + ((1,) if keep_dims else ()) + shape[axis + 1 :]
    return Block(rounded(data, to), left * ndim if keep_dims and len(shape) < ndim else left, to)


def reduction(name):
    return lambda input, axis=None, keep_dims=False, **dtype: reduce(
        name, input, axis, keep_dims, **dtype
    )


def softmax(x, dim=0, keep_dims=True):
    numerator = UNARY["exp"](x - reduce("max", x, dim, True))
    return numerator / reduce("sum", numerator, dim, True)


def ends_of(first, second, step):
    return (0, first, step) if second is None else (first, second, step)


def tl_range(first, second=None, step=1, num_stages=None, **hints):
    """The numbers of a loop: in a kernel they are computed with, as blocks."""
    ends = ends_of(first, second, step)
    dtype = int64 if int64 in [dtype_of(it) for it in ends] else int32
    ends = [it.__index__() if isinstance(it, Block) else it for it in ends]
    return map(lambda i: Block([i], (), dtype), range(*ends))


def tl_static_range(first, second=None, step=1):
    ends = ends_of(first, second, step)
    return range(*[constant(it, "tl.static_range: a bound") for it in ends])


UNARY = {name: unary(name) for name in "exp exp2 log log2 sqrt sqrt_rn sin cos floor ceil".split()}
TL = {name[3:]: value for name, value in list(globals().items()) if name[:3] == "tl_"}
TL.update({**UNARY, **DTYPES, **{name: reduction(name) for name in FOLDS}})
TL.update(
    constexpr=lambda value: value,
    cdiv=lambda x, div: (x + (div - 1)) // div,
    zeros=lambda shape, dtype: tl_full(shape, 0, dtype),
    zeros_like=lambda input: tl_full(input.shape, 0, input.dtype),
    maximum=lambda x, y: binary("max", widened(x), widened(y)),
    minimum=lambda x, y: binary("min", widened(x), widened(y)),
    rsqrt=lambda x: 1.0 / UNARY["sqrt"](x),
    sigmoid=lambda x: 1 / (1 + UNARY["exp"](-block_of(x))),
    softmax=softmax,
    **dict.fromkeys(("multiple_of", "max_contiguous"), lambda input, values: input),
    **dict.fromkeys(("assume", "debug_barrier"), lambda *condition: None),
    static_assert=lambda holds, message="": need(
        holds, f"tl.static_assert does not hold: {message}"
    ),
)
Block.methods.update({name: TL[name] for name in (*UNARY, *FOLDS, "abs", "cdiv")}, to=tl_cast)


class Names:
    """A module of a few names, which refuses others."""

    def __init__(self, name, names):
        self.__name__, self.__path__, self._names = name, [], names
        for key in names:
            setattr(self, key, names[key])

    def __getattr__(self, name):
        refuse(name, f"{self.__name__}.{name} is not modelled here", self._names)


# ---- tensors


class Memory:
    """What was allocated at once. times: how often each element was read and written."""

    def __init__(self, cells, shape):
        self.cells, self.shape, self.name = cells, shape, ""
        self.times = {"read": [0] * len(cells), "written": [0] * len(cells)}


class Tensor(Arithmetic):
    """A small tensor of PyTorch: a view of a memory, whose operations are counted."""

    word, methods, device, is_cuda, requires_grad = "tensor", {}, "cpu", False, False
    facts = "T device dtype is_contiguous is_cuda requires_grad shape transpose".split()

    def __init__(self, memory, dtype, shape, strides=None, offset=0):
        self.memory, self.dtype, self.shape, self.offset = memory, dtype, tuple(shape), offset
        self.strides = packed(self.shape) if strides is None else tuple(strides)

    T = property(lambda self: self.transpose(0, 1))

    def places(self):
        return walk(self.shape, self.strides, self.offset)

    def numbers(self):
        return [self.memory.cells[at] for at in self.places()]

    def block(self):
        """Its numbers, those of 16 bits as float32."""
        block = Block(self.numbers(), self.shape, self.dtype)
        return block_of(block, float32) if self.dtype in (float16, bfloat16) else block

    def is_contiguous(self):
        ahead = packed(self.shape)
        return not [i for i, n in enumerate(self.shape) if n > 1 and self.strides[i] != ahead[i]]

    def transpose(self, one, two):
        order = list(range(self.dim()))
        order[one], order[two] = order[two], order[one]
        shape, strides = [self.shape[d] for d in order], [self.strides[d] for d in order]
        return Tensor(self.memory, self.dtype, shape, strides, self.offset)

    def __getitem__(self, keys):
        shape, strides, offset, at = [], [], self.offset, 0
        for key in sizes_in(keys):
            if key is None:
                shape.append(1)
                strides.append(0)
            elif at < self.dim() and isinstance(key, slice) and (key.step or 1) > 0:
                first, last, every = key.indices(self.shape[at])
                shape.append(max(0, -((first - last) // every)))
                strides.append(self.strides[at] * every)
                offset += first * self.strides[at]
            elif at < self.dim() and type(key) is int and -self.shape[at] <= key < self.shape[at]:
                offset += self.strides[at] * (key % self.shape[at])
            else:
                raise LiveError(f"{self!r} is indexed with numbers in range, slices forward, None")
            at += key is not None
        shape, strides = shape + list(self.shape[at:]), strides + list(self.strides[at:])
        return Tensor(self.memory, self.dtype, shape, strides, offset)

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ipow__ = __iand__ = Arithmetic.__setitem__

    def compute(self, sign, a, b):
        """An operation on two tensors that broadcast, or on a tensor and a number."""
        need(sign in ATEN, f"{sign} of tensors is not modelled here")
        if sign == "/" and not isinstance(a, Tensor):
            sign, a, b = "*", self.reciprocal(), a
        operands = [it for it in (a, b) if isinstance(it, Tensor)]
        dtypes = [it.dtype for it in operands] + ([float32] if sign == "/" else [])
        dtype = max(dtypes, key=lambda it: it.rank)
        for it in operands:
            if it.dtype.rank == dtype.rank and it.dtype is not dtype:
                raise LiveError(f"tensors of {dtype} and {it.dtype}: convert one with .to")
        sides = [it.block() if isinstance(it, Tensor) else it for it in (a, b)]
        found = binary(sign, *sides)
        name = "rsub" if sign == "-" and a is not self else ATEN[sign]
        return counted(name, operands, found, int1 if found.dtype is int1 else dtype)

    def __neg__(self):
        return self.neg()

    def __pow__(self, power):
        need(power == 2, "of powers, ** 2 alone is modelled here")
        return counted("pow", [self], self.block() * self.block(), self.dtype)

    def max(self, dim=None, keepdim=False):
        if dim is None:
            return operation("max", OPERATIONS["amax"])(self)
        places = reduce("argamax", self.block(), dim, keepdim)
        values = reduce("amax", self.block(), dim, keepdim)
        values = made(block_of(values, self.dtype).data, values.shape, self.dtype)
        places = made(places.data, places.shape, int64)
        meter.operation("max", [self], [values, places])
        return Extremes((values, places))


class Extremes(tuple):
    values, indices = property(lambda self: self[0]), property(lambda self: self[1])


ATEN = {"+": "add", "-": "sub", "*": "mul", "/": "div", "&": "bitwise_and", "==": "eq", "!=": "ne"}
ATEN.update({"<": "lt", "<=": "le", ">": "gt", ">=": "ge"})


def made(values, shape, dtype):
    return Tensor(Memory(list(values), tuple(shape)), dtype, shape)


def counted(name, operands, block, dtype):
    """A new tensor, counted as what one operation makes of others."""
    need(meter.kernel is None, f"{name} of a tensor is PyTorch's, and a kernel has tl alone")
    found = made(block_of(block, dtype).data, block.shape, dtype)
    meter.operation(name, operands, [found])
    return found


def worst(extreme):
    """An extreme as PyTorch has it, where a NaN wins."""
    return lambda values: NAN if [it for it in values if it != it] else extreme(values)


def greatest(values):
    return max(range(len(values)), key=lambda i: (values[i] != values[i], values[i]))


FOLDS.update(amax=worst(max), amin=worst(min), argamax=greatest)


def operation(name, compute):
    """An operation on a tensor. compute: of its block and the arguments."""

    def call(x, *args, **options):
        need(isinstance(x, Tensor), f"torch.{name} takes a tensor, not {x!r}")
        floating = x.dtype.rank == 2 or name in ("abs", "neg", "sum", "amax", "amin")
        dtype = options.pop("dtype", None) or (x.dtype if floating else float32)
        block = x.block() if floating else block_of(x.block(), float32)
        return counted(name, [x], compute(block, *args, **options), dtype)

    return call


def mean(x, dim=None, keepdim=False):
    return reduce("sum", x, dim, keepdim) / (len(x.data) if dim is None else x.shape[dim])


def folded(name):
    return lambda x, dim=None, keepdim=False: reduce(name, x, dim, keepdim)


OPERATIONS = {
    "abs": tl_abs,
    "neg": lambda x: 0 - x,
    "reciprocal": lambda x: 1.0 / x,
    "rsqrt": TL["rsqrt"],
    "relu": lambda x: tl_where(x < 0, 0.0, x),  # which keeps a NaN
    "mean": mean,
    "_softmax": lambda x, dim: softmax(x, dim),
    **{name: UNARY[name] for name in ("exp", "log", "sqrt")},
    **{name: folded(name) for name in ("sum", "amax", "amin")},
}
Tensor.methods.update({name: operation(name, OPERATIONS[name]) for name in OPERATIONS})
Tensor.methods.update(
    max=Tensor.max,
    softmax=Tensor.methods["_softmax"],
    clone=lambda x: counted("clone", [x], x.block(), x.dtype),
    contiguous=lambda x: x if x.is_contiguous() else x.clone(),
    dim=lambda x: len(x.shape),
    element_size=lambda x: x.dtype.itemsize,
    new_empty=lambda x, *shape, dtype=None, device=None: new_tensor(
        "empty", shape, NAN, dtype or x.dtype
    ),
    numel=lambda x: numel_of(x.shape),
    stride=lambda x, dim=None: x.strides if dim is None else x.strides[dim],
    to=lambda x, to: x if to in (x.dtype, "cpu") else counted("_to_copy", [x], x.block(), to),
)


def new_tensor(name, shape, value, dtype=None, device=None, memory_format=None):
    """An allocation, which is free, or a filling. What nobody has written is NaN."""
    shape = sizes_in(shape[0]) if len(shape) == 1 else tuple(shape)
    cell = block_of(0.0 if value != value and dtype and dtype.rank < 2 else value, dtype or float32)
    found = made(cell.data * numel_of(shape), shape, cell.dtype)
    if "empty" not in name:
        meter.operation(name, [], [found])
    return found


def allocator(name, value):
    return lambda *shape, **options: new_tensor(name, shape, value, **options)


def like(name, value):
    return lambda x, **options: new_tensor(name, [x.shape], value, **{"dtype": x.dtype, **options})


def tensor(values, dtype=None, device=None):
    shape, flat = [], [values]
    while flat and isinstance(flat[0], (list, tuple)):
        shape.append(len(flat[0]))
        flat = [it for row in flat for it in row]
    whole = all([isinstance(it, int) for it in flat])
    dtype = dtype or (int64 if whole else float32)
    return made(converted([float(it) for it in flat], float64, dtype), shape, dtype)


CELLS = {"empty": NAN, "zeros": 0.0, "ones": 1.0}
TORCH = {
    **DTYPES,
    **Tensor.methods,
    **{name: allocator(name, CELLS[name]) for name in CELLS},
    **{f"{name}_like": like(f"{name}_like", CELLS[name]) for name in CELLS},
    "full_like": lambda x, value, **options: like("full_like", float(value))(x, **options),
    "Tensor": Tensor,
    "tensor": tensor,
    "inf": INF,
}


# ---- kernels


class Argument:
    """A tensor that a kernel was given. end: how far its pointer reaches, from its first."""

    def __init__(self, name, tensor):
        self.name, self.tensor = name, tensor
        dims = [(tensor.shape[i], tensor.strides[i]) for i in range(tensor.dim())]
        self.end = 1 + sum([(n - 1) * step for n, step in dims]) if tensor.numel() else 0


PLAIN = [("<<", ""), (">>", ""), ("->", ""), *[(it, "<") for it in ("<=", ">=", "==", "!=", ">")]]
PLAIN += [(it, ",") for it in (" and ", " or ", " if ", " else ", ":", "=", "\n")]


def chained(text):
    """Whether code compares as in a < b < c: not every Python asks for the truth of a < b."""
    for old, new in PLAIN:
        text = text.replace(old, new)
    inside = [0]  # comparisons in each bracket that is open
    for letter in text:
        if letter in "([{":
            inside.append(0)
        elif letter in ")]}":
            inside = inside[:-1] or [0]
        elif letter in ",<":
            inside[-1] = inside[-1] + 1 if letter == "<" else 0
        if inside[-1] > 1:
            return True
    return False


class Kernel:
    """A function under @triton.jit."""

    def __init__(self, fn):
        self.fn, self.__name__ = fn, fn.__name__
        self.names = list(fn.__code__.co_varnames[: fn.__code__.co_argcount])
        # Annotations are read as text: a browser's Python has no values of them.
        lines = fn.__globals__["__text__"].split("\n")[fn.__code__.co_firstlineno - 1 :]
        first = [it.lstrip()[:4] for it in lines].index("def ")
        after = [i for i in range(first + 1, len(lines)) if lines[i][:1] not in ("", " ", ")", "#")]
        text = "\n".join([it.split("#")[0] for it in lines[first : (after or [None])[0]]])
        head = text.split("(", 1)[1].split("):")[0]
        each = [it.split("=")[0].split(":") for it in head.split(",")]
        need(not chained(text), f"{fn.__name__} compares as in a < b < c: write (a < b) & (b < c)")
        self.constants = [it[0].strip() for it in each if it[-1].strip()[-9:] == "constexpr"]

    def __call__(self, *args, **options):
        name = self.__name__
        need(meter.kernel is not None, f"{name} is a kernel: launch it as {name}[(programs,)](...)")
        return self.fn(*args, **options)

    def __getitem__(self, grid):
        return lambda *args, **options: launch(self, grid, args, options)

    def value(self, key, given):
        """An argument as the kernel has it."""
        if key in self.constants:
            need(not isinstance(given, Tensor), f"{key} is tl.constexpr, and gets a tensor")
            return given
        if isinstance(given, Tensor):
            given.memory.name = given.memory.name or key
            meter.index_of(given.memory)
            return Block([0], (), POINTERS[given.dtype.name], Argument(key, given))
        if given is None or isinstance(given, (Dtype, tuple, str)):
            return given
        return block_of(given, float32 if isinstance(given, float) else None)


LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")


def launch(kernel, grid, args, options):
    """Runs the programs of a grid one after the other."""
    need(meter.kernel is None, "a kernel launches no kernel: call it without a grid")
    need("launch_cooperative_grid" not in options, "programs that wait for others are not modelled")
    need(options.get("num_warps", 4) in (1, 2, 4, 8, 16, 32), "num_warps is 1, 2, 4, 8, 16 or 32")
    options = {key: options[key] for key in options if key not in LAUNCH_OPTIONS}
    named = {kernel.names[i]: args[i] for i in range(min(len(args), len(kernel.names)))}
    grid = grid({**named, **options}) if callable(grid) else grid
    need(isinstance(grid, (tuple, list)), f"a grid is a tuple such as (n_rows,), not {grid!r}")
    whole = [n for n in grid if type(n) is int and n >= 0]
    need(len(whole) == len(grid) < 4, f"a grid is 1 to 3 whole numbers of programs, not {grid}")
    meter.grid = [*grid, 1, 1, 1][:3]
    args = [*map(kernel.value, named, named.values()), *args[len(named) :]]
    options = {key: kernel.value(key, options[key]) for key in options}
    line, meter.kernel = line_now(), {"read": 0, "written": 0}
    try:
        for at in range(numel_of(meter.grid)):
            _, y, z = meter.grid
            meter.program = [at // (y * z), at // z % y, at % z]
            kernel.fn(*args, **options)
        meter.add(kernel.__name__, line, meter.kernel, True)
    finally:
        meter.kernel = meter.program = None


def jit(fn=None, **options):
    return Kernel(fn) if fn is not None else jit


TRITON = {"jit": jit, "cdiv": lambda x, y: -(-x // y)}
TRITON["next_power_of_2"] = lambda n: 1 << (n - 1).bit_length() if n > 0 else 0


def of_number(name):
    """A function of Python's math."""
    what = f"math.{name} takes a number of Python, and a block needs tl.{name}"
    return lambda x: need(isinstance(x, (int, float)), what) or MATH[name](x)


def replacements():
    """The modules that any text may import, by name."""
    tl = Names("tl", TL)
    tl.math = Names("tl.math", {**UNARY, "abs": tl_abs, "rsqrt": TL["rsqrt"]})
    found = {"torch": Names("torch", TORCH), "triton": Names("triton", {**TRITON, "language": tl})}
    numbers = {it: of_number(it) for it in MATH}
    return {**found, "triton.language": tl, "math": Names("math", {**numbers, "inf": INF})}


# ---- a run


class Program:
    """The reader's text, loaded: its function, and what that takes."""

    def __init__(self, text, options):
        names = {"__name__": USER, "__text__": text}
        names["range"] = lambda *ends: (tl_range if meter.kernel else range)(*ends)
        names["print"] = lambda *_, **to: need(False, "print shows nothing here: look at the steps")
        exec(text, names)
        self.options, name = options, options.get("function")
        name = name or ("\n" + text).rpartition("\ndef ")[2].split("(")[0].strip()
        what = f"there is no function {name}".rstrip() + " beside the kernels: write one"
        need(hasattr(names.get(name), "__code__"), f"{what} of a tensor that returns one")
        self.function = names[name]
        code, given = self.function.__code__, options.get("inputs")
        needed = code.co_argcount - len(self.function.__defaults__ or ())
        self.arguments = list(code.co_varnames[:needed])
        self.inputs = given.split() if given else ["M,N"] * needed
        gets = f"{needed} arguments, and here gets {len(self.inputs) or 1}"
        need(len(self.inputs) == needed > 0, f"{self.function.__name__} takes {gets}")

    def tensors(self, shape):
        """Its arguments for M rows and N columns, the same ones each time."""
        sizes, seed, found = {"M": shape[0], "N": shape[1]}, 1, []
        for i in range(len(self.inputs)):
            dims, _, kind = self.inputs[i].partition(":")
            kind, _, below = kind.partition("<")
            dtype, values = DTYPES[kind or self.options.get("dtype", "float32")], []
            each = [sizes[it] if it in sizes else int(it) for it in dims.split(",") if it]
            for _ in range(numel_of(each)):
                seed = (seed * 75 + 74) % 65537
                values.append(seed % sizes[below] if below else (seed - 32768) / 8192.0)
            found.append(made(rounded(values, dtype), each, dtype))
            found[-1].memory.name = self.arguments[i]
        return found

    def call(self, tensors, traced=False):
        """What its function returns, and the meter of what it moved."""
        global meter
        meter = Meter(traced)
        for x in tensors:
            meter.index_of(x.memory)
        return self.function(*tensors), meter

    def moved(self, shape):
        _, seen = self.call(self.tensors(shape))
        return seen.total("reads"), seen.total("writes")


def counts_of(program, tensors):
    """The stage "counts" for these arguments."""
    _, seen = program.call(tensors, True)
    reads, writes, number = seen.total("reads"), seen.total("writes"), len(seen.operations)
    text = f"reads {reads} elements, writes {writes} elements, in {number} operation"
    each = [
        {"name": it.name, "shape": list(it.shape), "reads": it.times["read"]}
        | {"writes": it.times["written"]}
        for it in seen.tensors
    ]
    found = {"stage": "counts", "shape": list(tensors[0].shape), "text": text + "s" * (number != 1)}
    found.update(reads=reads, writes=writes, operations=seen.operations, tensors=each)
    return {**found, "steps": seen.steps}


# ---- the formula


def solve(numbers):
    """The coefficients of MN, M, N and 1 through four numbers, all times the second result."""
    (m, n), (_, o), (p, _) = SOLVED[0], SOLVED[1], SOLVED[2]
    a, b, c, d = numbers
    mn = d - c - b + a
    by_m, by_n = (c - a) * (o - n) - mn * n, (b - a) * (p - m) - mn * m
    area = (o - n) * (p - m)
    return [mn, by_m, by_n, a * area - mn * m * n - by_m * m - by_n * n], area


def polynomial(coefficients, area):
    """As text, such as "(5/2)MN - M + 3"."""
    text = ""
    for i in range(4):
        value, name = coefficients[i], ("MN", "M", "N", "")[i]
        if value:
            common = max([it for it in range(1, area + 1) if value % it == 0 == area % it])
            text += (" - " if value < 0 else " + ") if text else ("-" if value < 0 else "")
            top, bottom = abs(value) // common, area // common
            size = str(top) if bottom == 1 else f"({top}/{bottom})"
            text += name if size == "1" and name else size + name
    return text or "0"


def contradiction(program, sides, shapes):
    """Where the coefficients do not hold, or why a shape does not run; "" if they hold."""
    for m, n in shapes:
        try:
            found = program.moved((m, n))
        except REFUSALS as error:
            return f"at {m} × {n}: {error}"
        for side in (0, 1):
            (mn, by_m, by_n, one), area = sides[side]
            if mn * m * n + by_m * m + by_n * n + one != found[side] * area:
                return f"at {m} × {n} it {('reads', 'writes')[side]} {found[side]} elements"
    return ""


def formula_of(program, _):
    """The stage "formula"."""
    at = [program.moved(shape) for shape in SOLVED]
    sides = [solve([it[side] for it in at]) for side in (0, 1)]
    reads, writes = polynomial(*sides[0]), polynomial(*sides[1])
    note = contradiction(program, sides, CHECKED["any"])
    wrong = contradiction(program, sides, CHECKED["powers"]) if note else ""
    found = {"stage": "formula", "text": f"reads {reads}, writes {writes}", "reads": reads}
    found.update(writes=writes, solved=[list(it) for it in SOLVED], powers=bool(note), note=note)
    found["checked"] = [list(it) for it in CHECKED["powers" if note else "any"]]
    if wrong:
        found.update(text=f"no formula in M and N: {wrong}", reads="", writes="", powers=False)
    elif note:
        found["text"] += ", at powers of two alone"
    return found


# ---- the judge


def differences(got, right, dtype, length, softmax):
    """What is wrong with numbers in rows of a length, as a clause; "" if nothing is."""
    eps, least, wrong = 2.0 ** (1 - dtype.digits), 2.0**dtype.least, []
    for start in range(0, len(right), length):
        largest = max([abs(it) for it in right[start : start + length] if it == it] or [0.0])
        for i in range(start, start + length):
            room = 4 * eps * largest + least * eps / 2
            if softmax and right[i] > 0:  # a rounding of x - max moves exp as much as that is large
                room = 4 * eps * right[i] * (1 + MATH["log"](largest / right[i]) / 3) + least
            if (right[i] != right[i]) != (got[i] != got[i]) or abs(got[i] - right[i]) > room:
                wrong.append(i)
        total, target = sum(got[start : start + length]), sum(right[start : start + length])
        room = (2 * eps + 2.0**-20) * abs(target) + length * least * eps / 2
        if softmax and not wrong and abs(total - target) > room:
            return f"row {start // length} adds up to {total:.6g}, not {target:.6g}"
    if not wrong:
        return ""
    i = wrong[0]
    hint = "; nothing wrote it, or it came from inf / inf or a NaN" if got[i] != got[i] else ""
    at = f"({i // length}, {i % length}): {got[i]:.6g}, not {right[i]:.6g}{hint}"
    return f"{len(wrong)} of {len(right)} elements are wrong, the first at {at}"


def fault(program, tensors, kept, reference):
    """What is wrong with the result for these tensors, as a clause; "" if nothing is."""
    returned, _ = program.call(tensors)
    dtype = kept[0].dtype
    if not isinstance(returned, Tensor):
        return f"the result is {returned!r}, not a tensor"
    if returned.shape != reference.shape or returned.dtype is not dtype:
        return f"the result is {returned!r}, not of {dtype}, shape {reference.shape}"
    softmax, length = program.options["reference"] == SOFTMAX, max(1, reference.shape[-1])
    found = differences(returned.numbers(), reference.numbers(), dtype, length, softmax)
    for i in range(len(tensors)):
        now, before = tensors[i].numbers(), kept[i].numbers()
        if [j for j in range(len(now)) if now[j] != before[j] and before[j] == before[j]]:
            return f"it changes its input {program.arguments[i]}"
    return found


def judged_matrix(program, shape, hard):
    """Arguments, copies of them, and the reference. hard: rows begin with the numbers of HARD."""
    tensors, kept = program.tensors(shape), program.tensors(shape)
    for x in (tensors[0], kept[0]) if hard and len(kept) == 1 else ():
        for row in range(len(HARD)):
            first, numbers = row * shape[1], rounded(list(HARD[row]), x.dtype)
            x.memory.cells[first : first + len(numbers)] = numbers
    exact = [it.to(float64) if it.dtype.rank == 2 else it for it in kept]
    reference = eval(program.options["reference"], {"torch": MODULES["torch"]})(*exact)
    if hard and [it for it in reference.numbers() if abs(it) == INF]:
        return judged_matrix(program, shape, False)
    return tensors, kept, reference


def verdict_of(program, formula):
    """The stage "verdict". formula: that stage."""
    name, refused = program.options.get("name", "a softmax"), ""
    for shapes in JUDGED.values():
        for i in range(len(shapes)):
            hard = i == len(shapes) - 1
            tensors, kept, reference = judged_matrix(program, shapes[i], hard)
            where = "{} × {}".format(*shapes[i])
            where += " with 1e30, infinities and NaN in rows" if hard else ""
            try:
                wrong = fault(program, tensors, kept, reference)
            except Outside as error:
                wrong = str(error)
            except REFUSALS as error:
                refused = f"at {where}: {error}"
                break
            if wrong:
                text = f"Not {name}: at {where}, {wrong}."
                return {"stage": "verdict", "right": False, "text": text}
        else:
            text = f"{name[0].upper()}{name[1:]}: right at {len(shapes)} matrices"
            text += f" of powers of two alone; {refused}." if refused else "."
            moves = "reads {reads}, writes {writes}".format(**formula)
            asked = program.options.get("moves", moves)
            text = text if asked == moves else f"Right, but the exercise asks for one that {asked}."
            return {"stage": "verdict", "right": asked == moves, "text": text}
    return {"stage": "verdict", "right": False, "text": f"Not {name}: {refused}."}


# ---- errors


def error_of(error, text):
    """The stage "error"."""
    trace, line, message = error.__traceback__, 0, str(error)
    while trace:
        if trace.tb_frame.f_globals.get("__name__") == USER:
            line = trace.tb_lineno
        trace = trace.tb_next
    if isinstance(error, SyntaxError):
        line = min(error.lineno or 1, len(text.rstrip().split("\n")))
        message = f"this is no Python: {error.msg}"
    elif isinstance(error, RecursionError) or "call stack" in message:  # of JavaScript
        message = "the functions call one another without end"
    elif isinstance(error, ImportError):
        message = "only torch, triton, triton.language and math can be imported here"
    elif not isinstance(error, LiveError):
        jit = ": is @triton.jit missing?" if "'function' object is not subs" in message else ""
        message = f"{type(error).__name__}: {error}{jit}".replace("tl_", "tl.")
    return {"stage": "error", "line": line, "message": f"{message}."}


class Imports:
    """A context in which the small modules stand in MODULES, and nothing else can be imported."""

    def __init__(self, text, options):
        self.text, self.options, self.before = text, options, {}

    def __enter__(self):
        for name, value in replacements().items():
            self.put(name, value)
        for name, source in (self.options.get("modules") or {}).items():
            names = {"__name__": name, "__text__": source}
            exec(source, names)
            self.put(name, Names(name, names))
        for line in self.text.split("\n"):  # a word too many does no harm
            words = line.replace(",", " ").split()
            for word in words[1:] if words[:1] in (["import"], ["from"]) else ():
                for part in (word, word.split(".")[0]):
                    if part not in self.before:
                        self.put(part, None)
        return self

    def put(self, name, value):
        if name not in self.before:
            self.before[name] = MODULES.get(name, self)  # itself: there was none
        MODULES[name] = value

    def __exit__(self, *error):
        for name, value in self.before.items():
            MODULES[name] = value
            if value is self:
                del MODULES[name]
        return False


def run(text, options=None):
    """Runs a reader's text; yields one stage after the other, as the head of this file says."""
    options = options or {}
    try:
        with Imports(text, options):
            program = Program(text, options)
            found = counts_of(program, program.tensors(SHAPE))
        yield found
        for stage in [formula_of, verdict_of] if options.get("reference") else [formula_of]:
            with Imports(text, options):
                found = stage(program, found)
            yield found
    except Exception as error:
        yield error_of(error, text)

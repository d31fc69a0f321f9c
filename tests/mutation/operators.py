"""One-line faults that people make, as operators of Cosmic Ray: its own, and four of names."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator

ITS_OWN = (
    *("AddNot", "NumberReplacer", "ZeroIterationForLoop"),
    *("ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak"),
    *(f"ReplaceUnaryOperator_Delete_{name}" for name in ("Not", "USub", "Invert")),
    *(
        f"ReplaceComparisonOperator_{names}"
        for names in "Lt_LtE LtE_Lt Gt_GtE GtE_Gt Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is".split()
    ),
    *(
        f"ReplaceBinaryOperator_{names}"
        for names in "Add_Sub Sub_Add Mul_Add Mul_FloorDiv Div_Mul FloorDiv_Mul FloorDiv_Div "
        "Mod_FloorDiv BitAnd_BitOr".split()
    ),
)


class _OfNodes(Operator):
    """An operator with one mutation for each of `pick(node)`, which `change` makes."""

    def pick(self, node: Any) -> list[Any]:
        raise NotImplementedError

    def change(self, node: Any, picked: Any) -> None:
        raise NotImplementedError

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        return ((node.start_pos, node.end_pos) for _ in self.pick(node))

    def mutate(self, node: Any, index: int) -> Any:
        self.change(node, self.pick(node)[index])
        return node

    @classmethod
    def examples(cls) -> tuple[Any, ...]:
        return ()


def _arguments(node: Any) -> list[Any]:
    """The arguments of a call of several."""
    if node.type != "arglist" or node.parent.type != "trailer":
        return []
    return [child for child in node.children if child.type != "operator"]


class DropArgument(_OfNodes):
    """`f(a, b=1)` becomes `f(a)`: each argument but the first that is by position."""

    def pick(self, node: Any) -> list[Any]:
        return _arguments(node)[1:]

    def change(self, node: Any, picked: Any) -> None:
        place = node.children.index(picked)
        del node.children[place - 1 : place + 1]  # with the comma before it


class SwapArguments(_OfNodes):
    """`f(a, b)` becomes `f(b, a)`, where both are by position."""

    def pick(self, node: Any) -> list[Any]:
        given = _arguments(node)
        return [two for two in pairwise(given) if all(it.type != "argument" for it in two)]

    def change(self, node: Any, picked: Any) -> None:
        one, other = map(node.children.index, picked)
        _swap_code(node.children[one], node.children[other])
        node.children[one], node.children[other] = node.children[other], node.children[one]


class SwapOperands(_OfNodes):
    """`a - b` becomes `b - a`, for operations that are not symmetrical."""

    def pick(self, node: Any) -> list[Any]:
        if node.type not in ("arith_expr", "term") or len(node.children) != 3:
            return []
        return [node] if node.children[1].value in ("-", "/", "//", "%") else []

    def change(self, node: Any, picked: Any) -> None:
        _swap_code(node.children[0], node.children[2])
        node.children[0], node.children[2] = node.children[2], node.children[0]


class SwapNames(_OfNodes):
    """A parameter in the body of a function becomes the next parameter."""

    def pick(self, node: Any) -> list[Any]:
        if node.type != "name" or node.is_definition():
            return []
        if node.parent.type in ("trailer", "argument") and node is not node.parent.children[-1]:
            return []
        if node.get_previous_leaf() and node.get_previous_leaf().value == ".":
            return []
        function = node.search_ancestor("funcdef")
        if function is None or node.start_pos < function.children[-1].start_pos:
            return []
        names = [it.name.value for it in function.get_params() if it.name.value != "self"]
        if node.value not in names or len(names) < 2:
            return []
        return [names[(names.index(node.value) + 1) % len(names)]]

    def change(self, node: Any, picked: Any) -> None:
        node.value = picked


def _swap_code(one: Any, other: Any) -> None:
    """Lets two nodes have each other's space before them, so that they can change places."""
    first, second = one.get_first_leaf(), other.get_first_leaf()
    first.prefix, second.prefix = second.prefix, first.prefix


OF_NAMES = (DropArgument, SwapArguments, SwapOperands, SwapNames)
OPERATORS = {name: get_operator(f"core/{name}") for name in ITS_OWN}
OPERATORS |= {operator.__name__: operator for operator in OF_NAMES}

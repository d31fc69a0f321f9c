"""One-line faults that people make with names and arguments, as an operator of Cosmic Ray."""

from functools import partial

from cosmic_ray.operators.operator import Operator


class Names(Operator):
    """Drops an argument, swaps two arguments or operands, or takes the next parameter for one."""

    def mutation_positions(self, node):
        return [(node.start_pos, node.end_pos) for _ in _changes(node)]

    def mutate(self, node, index):
        [*_changes(node)][index]()
        return node

    @classmethod
    def examples(cls):
        return ()


def _changes(node):
    """Yields what makes each of the mutations of a node."""
    if node.type == "arglist" and node.parent.type == "trailer":
        for comma in range(1, len(node.children) - 1, 2):
            yield partial(node.children.__delitem__, slice(comma, comma + 2))
            if all(node.children[i].type != "argument" for i in (comma - 1, comma + 1)):
                yield partial(_swap, node.children, comma)
    elif node.type in ("arith_expr", "term") and node.children[1].value in ("-", "/", "//", "%"):
        yield partial(_swap, node.children, 1)
    elif node.type == "name" and (following := _next_parameter(node)):
        yield partial(setattr, node, "value", following)


def _swap(children, i):
    """Lets what is before and after change places, but not the space before them."""
    one, other = children[i - 1].get_first_leaf(), children[i + 1].get_first_leaf()
    one.prefix, other.prefix = other.prefix, one.prefix
    children[i - 1], children[i + 1] = children[i + 1], children[i - 1]


def _next_parameter(name):
    """The parameter after that which is named in the body of a function; None if there is none."""
    function, parent = name.search_ancestor("funcdef"), name.parent
    inner = parent.type in ("trailer", "argument") and name is not parent.children[-1]
    if inner or name.is_definition() or not function or name.get_previous_leaf() == ".":
        return None
    names = [it.name.value for it in function.get_params() if it.name.value != "self"]
    following = dict(zip(names, [*names[1:], *names[:1]], strict=True))
    inside = name.start_pos >= function.children[-1].start_pos and len(names) > 1
    return following.get(name.value) if inside else None

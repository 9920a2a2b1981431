"""Mutants by rule: the places of a pure module where one small change gives another valid program.

The rules are the usual ones: a comparison, a boolean or an arithmetic operator becomes its neighbour; a condition is
negated; a number grows by one; a flag flips; a statement is left out; a function returns nothing.

The rules leave alone annotations, docstrings, the text of messages, ``__repr__``, ``__slots__`` and logging. A change
there is not a mistake in the state machine.

A module has some hundred such places, and each run tries a sample of them. The sample depends on the text of each place
and on a seed, and not on its line: an edit elsewhere in the file leaves the sample as it is.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from typing import NamedTuple

_SIGNS = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
}
_OTHER_SIGN = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "is": "is not",
    "is not": "is",
    "in": "not in",
    "not in": "in",
}
_ARITHMETIC = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "+",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.LShift: ">>",
    ast.RShift: "<<",
    ast.Pow: "*",
}


class Change(NamedTuple):
    """One mutant of a module."""

    line: int
    function: str  # qualified, or "" at the level of the module
    before: str  # the source text of what is changed, on one line
    after: str
    source: str  # of the whole module, changed

    @property
    def key(self) -> str:
        """The place and the change, without the line."""
        return f"{self.function}: {self.before} -> {self.after}"


class _Text:
    """The source of a module, by the positions that `ast` gives: lines from 1, columns in bytes."""

    def __init__(self, source: str) -> None:
        self._bytes = source.encode()
        self._starts = [0]
        for line in self._bytes.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def _span(self, node: ast.expr | ast.stmt) -> slice:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = self._starts[node.lineno - 1] + node.col_offset
        return slice(begin, self._starts[node.end_lineno - 1] + node.end_col_offset)

    def of(self, node: ast.expr | ast.stmt) -> str:
        return self._bytes[self._span(node)].decode()

    def replaced(self, node: ast.expr | ast.stmt, new: str) -> str:
        """The whole source with another text for the node."""
        span = self._span(node)
        return (self._bytes[: span.start] + new.encode() + self._bytes[span.stop :]).decode()


def changes_of(source: str) -> list[Change]:
    """All mutants of a module, in the order of its source."""
    text = _Text(source)
    found = []
    for function, node, new in _places(ast.parse(source), text):
        changed = text.replaced(node, new)
        try:
            compile(changed, "mutant", "exec")
        except SyntaxError:  # such as a generator whose only `yield` is left out
            continue
        before, after = (" ".join(piece.split()) for piece in (text.of(node), new))
        found.append(Change(node.lineno, function, before, after, changed))
    return found


def sample(changes: list[Change], count: int, seed: int) -> list[Change]:
    """``count`` of these changes, chosen by the text of each and the seed."""

    def draw(change: Change) -> bytes:
        return hashlib.sha256(f"{seed} {change.key}".encode()).digest()

    return sorted(sorted(changes, key=draw)[:count], key=lambda change: change.line)


def _places(tree: ast.Module, text: _Text) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """Each changed node, the function around it, and its new text."""
    for function, statement in _statements(tree.body, ""):
        if not function.endswith("__init__"):  # a missing attribute is noticed by any test
            for new in _of_statement(statement, text):
                yield function, statement, new
        if isinstance(statement, ast.If | ast.While) and isinstance(
            statement.test, ast.Name | ast.Attribute | ast.Call
        ):
            yield function, statement.test, f"(not {text.of(statement.test)})"
        for expression in _own_expressions(statement):
            for node in _expressions(expression):
                for new in _of_expression(node, text):
                    yield function, node, new


def _statements(body: list[ast.stmt], function: str) -> Iterator[tuple[str, ast.stmt]]:
    """The statements that a rule may change or look into, with the function around each."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if statement.name != "__repr__":
                yield from _statements(statement.body, f"{function}.{statement.name}".lstrip("."))
            continue
        if _is_declaration(statement):
            continue
        yield function, statement
        for field in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(statement, field, []), function)
        for part in [*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]:
            yield from _statements(part.body, function)


def _is_declaration(statement: ast.stmt) -> bool:
    """Whether it is an import, a docstring, ``__slots__``, logging, or code for the type checker only."""
    if isinstance(statement, ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal | ast.Pass | ast.Assert):
        return True
    if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
        return True
    if isinstance(statement, ast.Expr):
        call = ast.unparse(statement.value)
        return isinstance(statement.value, ast.Constant) or call.startswith(("_log.", "logger.", "log."))
    if isinstance(statement, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id.startswith("__") for target in statement.targets)
    return isinstance(statement, ast.AnnAssign) and statement.value is None


def _own_expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """The expressions of a statement, without those of statements inside it, annotations and texts of errors."""
    if isinstance(statement, ast.Raise):
        return
    for field, value in ast.iter_fields(statement):
        if field in ("annotation", "type_comment", "targets", "target"):
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.expr):
                yield each
            elif isinstance(each, ast.withitem):
                yield each.context_expr


def _expressions(node: ast.expr) -> Iterator[ast.expr]:
    """The node and the expressions in it, except for the texts of messages."""
    if isinstance(node, ast.JoinedStr):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield from _expressions(child)
        elif isinstance(child, ast.comprehension):
            for each in (child.iter, *child.ifs):
                yield from _expressions(each)
        elif isinstance(child, ast.keyword):
            yield from _expressions(child.value)


def _of_statement(statement: ast.stmt, text: _Text) -> Iterator[str]:
    match statement:
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Delete() | ast.Raise():
            yield "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript() | ast.Tuple()]):
            yield "pass"
        case ast.AugAssign(op=op) if type(op) in _ARITHMETIC:
            yield "pass"
            target, value = text.of(statement.target), text.of(statement.value)
            yield f"{target} {_ARITHMETIC[type(op)]}= {value}"
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "return None"
        case ast.Return(value=None):
            yield "pass"
        case ast.Break():
            yield "continue"
        case ast.Continue():
            yield "pass"


def _of_expression(node: ast.expr, text: _Text) -> Iterator[str]:
    match node:
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            signs = [_SIGNS[type(op)] for op in ops]
            for changed in range(len(ops)):
                pieces = [text.of(left)]
                for index, (sign, right) in enumerate(zip(signs, comparators, strict=True)):
                    pieces += [_OTHER_SIGN[sign] if index == changed else sign, text.of(right)]
                yield f"({' '.join(pieces)})"
        case ast.BoolOp(op=op, values=values):
            joint = " or " if isinstance(op, ast.And) else " and "
            yield f"({joint.join(f'({text.of(value)})' for value in values)})"
            for left_out in range(len(values)):
                kept = [f"({text.of(value)})" for index, value in enumerate(values) if index != left_out]
                yield f"({(' and ' if isinstance(op, ast.And) else ' or ').join(kept)})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield f"({text.of(operand)})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC and not _is_text(left):
            yield f"(({text.of(left)}) {_ARITHMETIC[type(op)]} ({text.of(right)}))"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield f"(({text.of(orelse)}) if ({text.of(test)}) else ({text.of(body)}))"
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value)) | ast.Constant(value=float(value)):
            yield repr(value + 1)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))

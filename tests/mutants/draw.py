"""Draw mutants of the rooms into `drawn.json`, by a fixed seed: `python tests/mutants/draw.py`, at the later revision.

It enumerates the changes of cosmic-ray, which only this script needs: `pip install cosmic-ray==8.7.0`. A place is drawn
first, then one of its changes, so that an operator with many changes has no more weight. `equivalent.json` lists drawn
changes that nobody can notice, each with the reason. The next place takes the turn of each.
"""

import ast
import random
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Final

import msgspec

from tests.mutants.mutant import HERE, ROOMS, ROOT, Mutant

SEED: Final = 20261128
COUNT: Final = 300
_OPERATORS: Final = {
    "ReplaceBinaryOperator_": "Add_Sub Sub_Add Mul_Add Mul_Div Div_Mul Div_FloorDiv FloorDiv_Div FloorDiv_Mul Mod_Mul "
    "Mod_FloorDiv Pow_Mul RShift_LShift LShift_RShift BitOr_BitAnd BitOr_BitXor BitAnd_BitOr BitXor_BitOr",
    "ReplaceComparisonOperator_": "Eq_NotEq NotEq_Eq Lt_LtE Lt_GtE LtE_Lt LtE_Gt Gt_GtE Gt_LtE GtE_Gt GtE_Lt Is_IsNot "
    "IsNot_Is",
    "ReplaceUnaryOperator_": "Delete_USub Delete_Not Delete_Invert",
    "": "AddNot ReplaceTrueWithFalse ReplaceFalseWithTrue ReplaceAndWithOr ReplaceOrWithAnd ReplaceBreakWithContinue "
    "ReplaceContinueWithBreak ExceptionReplacer NumberReplacer ZeroIterationForLoop",
}
"""Those that are used. Others would only raise a TypeError."""


def changes(source: str, used: Mapping[str, Any]) -> dict[tuple[int, int], list[tuple[str, int]]]:
    """Return the changes of a file by line and column: operators, each with the number of its occurrence."""
    nodes = import_module("cosmic_ray.ast")
    tree, found = nodes.get_ast(source), dict[tuple[int, int], list[tuple[str, int]]]()
    spans = [
        ((part.lineno, part.col_offset), (part.end_lineno or 0, part.end_col_offset or 0))
        for node in ast.walk(ast.parse(source))
        for part in _silent(node)
    ]
    for name, operator in used.items():
        starts = [start for node in nodes.ast_nodes(tree) for start, _ in operator.mutation_positions(node)]
        for number, start in enumerate(starts):
            if not any(begin <= start < end for begin, end in spans):
                found.setdefault(start, []).append((name, number))
    return found


def _silent(node: ast.AST) -> list[ast.expr | ast.stmt]:
    """Return the parts of a node without behaviour: types, decorators, texts, and what is logged or raised."""
    found: list[ast.expr | ast.stmt | None] = []
    match node:
        case ast.Raise() | ast.JoinedStr() | ast.Expr(value=ast.Constant()) | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            found = [node]
        case ast.Call(func=ast.Attribute(value=ast.Name(id="log")) | ast.Name(id="TypeVar")):
            found = [node]
        case ast.AnnAssign(annotation=ast.Name(id="TypeAlias")):
            found = [node]
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            found = [*node.decorator_list, getattr(node, "returns", None)]
        case ast.arg(annotation=part) | ast.AnnAssign(annotation=part):
            found = [part]
        case ast.Call(func=ast.Name(id="cast" | "isinstance" as name)):
            found = [node.args[0 if name == "cast" else 1]]
        case ast.keyword(arg="strict"):  # of zip
            found = [node.value]
        case _:
            pass
    return [each for each in found if each]


def changed(room: str, file: str, line: int, name: str, made: str) -> Mutant | None:
    """Describe a file that an operator has `made` of another. None if it is no Python."""
    source = (ROOT / file).read_text()
    try:
        ast.parse(made)
    except SyntaxError:
        return None
    old, new = source.split("\n"), made.split("\n")
    first = next(at for at, (one, other) in enumerate(zip(old, new, strict=False)) if one != other)
    last = next(at for at, (one, other) in enumerate(zip(old[::-1], new[::-1], strict=False)) if one != other)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    scopes = [each for each in ast.walk(ast.parse(source)) if isinstance(each, kinds)]
    around = sorted((each.lineno, each.name) for each in scopes if each.lineno <= line <= (each.end_lineno or 0))
    own, changed = old[first : len(old) - last], [each.rstrip() for each in new[first : len(new) - last]]
    return Mutant("", room, file, ".".join(scope for _, scope in around), first + 1, name, own, changed)


def drawn() -> Iterator[Mutant]:
    """Yield the mutants, of each room as many as its share of the lines."""
    equivalent = msgspec.json.decode((HERE / "equivalent.json").read_bytes(), type=dict[str, str])
    import_module("parso.python.tree")  # cosmic-ray's own order of imports fails without it
    provider, visitor = (
        import_module("cosmic_ray.operators.provider").OperatorProvider(),
        import_module("cosmic_ray.mutating"),
    )
    used = {kind + end: provider[kind + end]() for kind, ends in _OPERATORS.items() for end in ends.split()}
    files = {room: sorted((ROOT / path).rglob("*.py")) or [ROOT / path] for room, path in ROOMS.items()}
    lines = {room: sum(len(each.read_text().splitlines()) for each in own) for room, own in files.items()}
    exact = {room: COUNT * each / sum(lines.values()) for room, each in lines.items()}
    raised = sorted(exact, key=lambda room: -(exact[room] % 1))[: COUNT - sum(map(int, exact.values()))]
    for room, own in files.items():
        draw, found = random.Random(f"{SEED} {room}"), list[Mutant]()
        there = [(each, *some) for each in own for some in sorted(changes(each.read_text(), used).items())]
        draw.shuffle(there)
        while len(found) < int(exact[room]) + (room in raised):
            path, (line, column), some = there.pop(0)
            name, number = draw.choice(some)
            file = path.relative_to(ROOT).as_posix()
            made = changed(room, file, line, name, visitor.mutate_code(path.read_text(), used[name], number))
            key = f"{file.removeprefix('meshrl/').removesuffix('.py')}:{line}:{column} {name}"
            if made and key not in equivalent:
                found.append(msgspec.structs.replace(made, id=key))
        yield from sorted(found, key=lambda each: (each.file, each.line))


if __name__ == "__main__":
    (HERE / "drawn.json").write_bytes(msgspec.json.format(msgspec.json.encode(list(drawn())), indent=1) + b"\n")

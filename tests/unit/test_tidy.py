"""Reads our own source and holds the budgets of the design."""

import ast
import io
import re
import statistics
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "torchbft"
TESTS = ROOT / "tests"

FUNCTION_MEDIAN = 12
FUNCTION_ALARM = 70
FILE_ALARM = 800
BANNED = {"utils", "util", "common", "helpers", "helper", "core", "engine", "manager", "misc"}
PURE_ROOMS = ("primitives", "tensors", "protocols", "attacks", "sim")
CLOCKS_AND_SOCKETS = {"socket", "asyncio", "subprocess", "sqlite3", "ssl"}
HIDDEN_INPUTS = re.compile(
    r"\b(time\.(time|monotonic|sleep|perf_counter)|random\.random|np\.random)\b"
)


def python_files(folder: Path) -> list[Path]:
    """Ours: what ``make proto`` writes counts on neither side."""
    return sorted(path for path in folder.rglob("*.py") if not path.name.endswith("_pb2.py"))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first statement after the docstring to the end."""
    body = function.body
    if (
        isinstance(body[0], ast.Expr)
        and isinstance(body[0].value, ast.Constant)
        and isinstance(body[0].value.value, str)
    ):
        body = body[1:]
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def lines_of_code(text: str) -> int:
    """Lines that hold code: no blank lines, no comments, no strings that stand alone as
    documentation does. Lines inside another string count."""
    told = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return len(
        {
            line
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type not in NO_CODE
            for line in range(token.start[0], token.end[0] + 1)
        }
        - told
    )


def parsed(folder: Path) -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text())) for path in python_files(folder)]


MODULES = parsed(SOURCE)


def test_functions_are_short() -> None:
    sizes = [body_lines(function) for _, tree in MODULES for function in functions(tree)]
    assert statistics.median(sizes) <= FUNCTION_MEDIAN
    long = [
        f"{path.relative_to(ROOT)}:{function.lineno} {function.name} {body_lines(function)}"
        for path, tree in MODULES
        for function in functions(tree)
        if body_lines(function) > FUNCTION_ALARM
    ]
    assert long == []


def test_files_are_short() -> None:
    long = {
        p: n for p in python_files(SOURCE) if (n := len(p.read_text().splitlines())) > FILE_ALARM
    }
    assert long == {}


def test_there_are_at_least_as_many_lines_of_tests_as_of_source() -> None:
    """Lines of code on both sides, without blank lines, comments and docstrings: nearly a third of
    our source is those, and no test has to match them."""

    def lines(folder: Path) -> int:
        return sum(lines_of_code(path.read_text()) for path in python_files(folder))

    assert lines(TESTS) >= lines(SOURCE)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", 0),
        ('"""A module."""\n', 0),
        ("# a comment\n\n\nx = 1  # code with one\n", 1),
        ('def f():\n    """One line,\n    and another."""\n    return 1\n', 2),
        ('class C:\n    x: int = 1\n    """Of a field."""\n    # more\n    y: int = 2\n', 3),
        ("x = [\n    1,\n\n    # two\n    2,\n]\n", 4),
        ('x = """a\n\n# no comment\n"""\n', 4),
        ('f("""a\nb""")\n', 2),
    ],
)
def test_lines_of_code_are_those_that_hold_code(text: str, lines: int) -> None:
    assert lines_of_code(text) == lines


def test_no_room_or_file_has_a_name_that_says_nothing() -> None:
    named = {part for path in python_files(SOURCE) for part in path.relative_to(SOURCE).parts}
    assert {name.removesuffix(".py") for name in named} & BANNED == set()


def test_broad_excepts_stand_only_at_the_edges() -> None:
    def broad(handler: ast.ExceptHandler) -> bool:
        names = (
            [n.id for n in ast.walk(handler.type) if isinstance(n, ast.Name)]
            if handler.type
            else []
        )
        return handler.type is None or bool({"Exception", "BaseException"} & set(names))

    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, tree in MODULES
        if path.relative_to(SOURCE).parts[0] not in ("node", "cli")
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and broad(node)
    ]
    assert found == []


@pytest.mark.parametrize("room", PURE_ROOMS)
def test_pure_rooms_read_no_clock_and_open_no_socket(room: str) -> None:
    found = []
    for path, tree in MODULES:
        if path.relative_to(SOURCE).parts[0] != room:
            continue
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [
                f"{path.name} imports {n}" for n in names if n.split(".")[0] in CLOCKS_AND_SOCKETS
            ]
        if room == "protocols":
            found += [f"{path.name}: {m.group()}" for m in HIDDEN_INPUTS.finditer(path.read_text())]
    assert found == []


def test_nothing_is_unpickled() -> None:
    calls = re.compile(r"\b(pickle\.loads?|torch\.load|joblib\.load|marshal\.loads?|eval|exec)\(")
    found = [
        f"{path.relative_to(ROOT)}: {m.group()}"
        for path in python_files(SOURCE)
        for m in calls.finditer(re.sub(r"\w\.(eval|exec)\(", "", path.read_text()))
    ]
    assert found == []


def test_protocol_tests_do_not_sleep() -> None:
    """Protocols run in virtual time. A node's loop is real; its tests may poll, with a bound."""
    sleep = re.compile(r"\b(time|asyncio)\.sleep\(")
    rooms = [TESTS / "unit", TESTS / "property", TESTS / "simulation", TESTS / "conformance"]
    found = [
        f"{path.relative_to(ROOT)}: {m.group()}"
        for room in rooms
        for path in python_files(room)
        if path != Path(__file__) and path.parent != TESTS / "unit" / "node"
        for m in sleep.finditer(path.read_text())
    ]
    assert found == []


def test_every_module_says_what_it_is_for() -> None:
    silent = [str(path.relative_to(ROOT)) for path, tree in MODULES if not ast.get_docstring(tree)]
    assert silent == []


def test_the_fault_bound_is_computed_in_one_place() -> None:
    third = re.compile(r"//\s*3\b|\b2\s*\*\s*\w+\s*//\s*3|\*\s*2\s*/\s*3")
    found = [
        str(path.relative_to(ROOT))
        for path in python_files(SOURCE)
        if path.name != "faults.py" and third.search(path.read_text())
    ]
    assert found == []


def test_the_budget_checks_can_fail() -> None:
    tree = ast.parse("def f():\n    '''doc'''\n" + "    x = 1\n" * 71)
    assert body_lines(next(functions(tree))) == 71

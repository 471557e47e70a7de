"""Prose of docstrings: each opens with a noun phrase or a verb, so that it can be found by the
field's terms."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("models", "data", "parallel", "sim", "rl", "tools", "client", "tests")
OPENING = re.compile(r"(What|Who|Whose|How|Of|Those|Whether|Which|Where|When)\b")


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Docstrings of modules, classes, functions, and of what is assigned in the first two."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        assigned = isinstance(node, ast.Module | ast.ClassDef)
        for before, part in zip((None, *node.body), node.body, strict=False):
            documents = before is None or (
                assigned and isinstance(before, ast.Assign | ast.AnnAssign)
            )
            match part:
                case ast.Expr(ast.Constant(str()) as text) if documents:
                    yield text


def wrong(source: str) -> list[int]:
    """Lines of docstrings that open otherwise."""
    found = docstrings(ast.parse(source))
    return sorted(t.lineno for t in found if OPENING.match(t.value.lstrip()))


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_open_with_a_noun_or_a_verb(package):
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line in wrong(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_each_kind_of_docstring_is_read():
    source = '''"""What a module is."""
SIZE = 1
"""How large it is."""
sizes: int = 1
"""Those."""
whole = 1
"""Whole."""
"""Of nothing: no docstring."""
class One:
    """Whether it is one."""
    field: int
    """
    Of a field."""
    async def walk(self):
        """Where it goes."""
        here = 1
        """What is here: no docstring."""
def two():
    """Whatever."""
    return """How it ends."""
'''
    assert wrong(source) == [1, 3, 5, 10, 12, 15]

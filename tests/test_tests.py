"""What every test module keeps to: it imports no other, and it knows the product by its public names only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).parent.parent
#: Benchmarks measure parts from inside, beside a part that does the same without us; they are no tests.
MODULES = sorted(f for f in (ROOT / "tests").rglob("*.py") if "benchmarks" not in f.parts)
PRODUCT = [f for folder in ("gymdata", "cli", "sample_data") for f in sorted((ROOT / folder).rglob("*.py"))]
#: Private names of libraries that the product happens to use for its own, too.
THEIRS = {"_exit", "_get_num_items_in_batch", "_prepare_dataset", "_run", "_special_tokens_map", "_tokenizer"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_in(tree: ast.AST) -> Iterator[str]:
    """Names that a module, its classes and their instances define, private ones only."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        else:
            continue
        if is_private(name):
            yield name


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that is imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module or '.'}.{alias.name}") for alias in node.names)


def imported_tests(tree: ast.AST) -> list[tuple[int, str]]:
    return [(at, name) for at, name in imports(tree) if any(part.startswith("test_") for part in name.split(".")[1:])]


def private_names(tree: ast.AST, product: set[str]) -> list[tuple[int, str]]:
    """Where ``from gymdata.x import _y``, ``thing._y`` and ``setattr(thing, "_y", …)`` reach behind the public face."""
    found = [(at, name) for at, name in imports(tree) if name.startswith("gymdata") and is_private(name.split(".")[-1])]
    behind = product - set(defined_in(tree)) - THEIRS
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in behind:
            found.append((node.lineno, ast.unparse(node)))
        elif isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(name := node.args[1], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("setattr", "getattr", "delattr", "hasattr") and name.value in behind:
                found.append((node.lineno, ast.unparse(node)))
    return found


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in MODULES}


@pytest.fixture(scope="module")
def product() -> set[str]:
    return {name for file in PRODUCT for name in defined_in(ast.parse(file.read_text()))}


def test_test_modules_import_nothing_from_each_other(trees: dict[str, ast.Module]) -> None:
    """What two of them need lies in a conftest.py or in a helper module that is named for it."""
    assert [f"{file}:{at}: {name}" for file, tree in trees.items() for at, name in imported_tests(tree)] == []


def test_tests_know_no_private_name_of_the_product(trees: dict[str, ast.Module], product: set[str]) -> None:
    """What a test needs is public, or is seen through what is."""
    found = [f"{file}:{at}: {name}" for file, tree in trees.items() for at, name in private_names(tree, product)]
    assert found == []


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("from tests.a.test_b import c", ["tests.a.test_b.c"]),
        ("from tests.a import test_b", ["tests.a.test_b"]),
        ("import tests.test_b", ["tests.test_b"]),
        ("from tests.a.helpers import c", []),
    ],
)
def test_imports_of_tests_are_found(source: str, said: list[str]) -> None:
    """Whichever way another test module is named."""
    assert [name for _, name in imported_tests(ast.parse(source))] == said


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("from gymdata.a import _b", ["gymdata.a._b"]),
        ("thing._b", ["thing._b"]),
        ("patch.setattr(thing, '_b', 1)", ["patch.setattr(thing, '_b', 1)"]),
        ("self._b = 1\nself._b", []),
        ("thing._not_ours", []),
        ("from gymdata.engines._vllm import Sampler", []),
    ],
)
def test_private_names_are_found(source: str, said: list[str]) -> None:
    """A module that is named for its library is public; so is what the test module defines itself."""
    assert [name for _, name in private_names(ast.parse(source), {"_b"})] == said


def test_ci_draws_the_same_examples_each_time() -> None:
    """The ci profile is derandomized and keeps what holds everywhere: no deadline."""
    ci, usual = hypothesis.settings.get_profile("ci"), hypothesis.settings.get_profile("untimed")
    assert (ci.derandomize, ci.deadline, usual.derandomize) == (True, None, False)


def test_engine_and_wheel_tests_stay_together(request: pytest.FixtureRequest) -> None:
    """Every test has one group: what shares an engine or a wheel has that name, one of a spread file its own, another its
    file."""
    groups = [{mark.args[0] for mark in item.iter_markers("xdist_group")} for item in request.session.items]
    for item, (group,) in zip(request.session.items, groups, strict=True):
        costly = [name for name in ("engine", "wheel") if item.get_closest_marker(name)]
        if item.get_closest_marker("spread") and not costly:
            assert groups.count({group}) == 1, item.nodeid
        else:
            assert group == (costly[0] if costly else item.nodeid.partition("::")[0].partition("@")[0]), item.nodeid
        # What xdist goes by is the end of the name, which it writes itself.
        assert not request.config.getoption("loadgroup", False) or item.nodeid.endswith(f"@{group}"), item.nodeid

"""Fields of another package's dataclass, read from its source: importing the package would load torch for seconds.

Invariants: nothing of the other package runs; a class whose source is not understood is None, never a guess.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Set
from functools import cache
from importlib.util import find_spec
from pathlib import Path

Fields = Mapping[str, Set[type]]
_PLAIN: dict[str, type] = {kind.__name__: kind for kind in (int, float, bool, str, list, dict)}
_PLAIN |= {"List": list, "Dict": dict}
#: Packages that hand their classes out by a table of names instead of imports.
_HOMES = {("transformers", "TrainingArguments"): "transformers.training_args"}


@cache
def source_fields(module: str, name: str) -> Fields | None:
    """Field → the plain types that it takes (none: cannot be told) of the dataclass ``name``; inherited ones included.

    None when the package is not installed, or its source does not show the class.
    """
    tree = _parsed(module)
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _fields_of(node, module)
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return source_fields(_home(node, module, alias.name), alias.name)
        if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets) and isinstance(node.value, ast.Name):
            return source_fields(module, node.value.id)
    return None


def _fields_of(node: ast.ClassDef, module: str) -> Fields | None:
    fields: dict[str, Set[type]] = {}
    for base in reversed(node.bases):
        inherited = source_fields(module, base.id) if isinstance(base, ast.Name) else None
        if inherited is None:
            return None
        fields |= inherited
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            kind, value = ast.unparse(line.annotation), line.value
            hidden = isinstance(value, ast.Call) and any(
                k.arg == "init" and isinstance(k.value, ast.Constant) and k.value.value is False for k in value.keywords
            )
            if not hidden and "ClassVar" not in kind:
                fields[line.target.id] = _kinds(line.annotation)
    return fields


def _kinds(hint: ast.expr) -> set[type]:
    """As ``trainer_settings.kinds_of`` finds them in the type itself."""
    if isinstance(hint, ast.Constant) and isinstance(hint.value, str):
        return _kinds(ast.parse(hint.value, mode="eval").body)
    if isinstance(hint, ast.BinOp) and isinstance(hint.op, ast.BitOr):
        return _union([hint.left, hint.right])
    if isinstance(hint, ast.Subscript):
        outer = ast.unparse(hint.value).rpartition(".")[2]
        if outer in ("Optional", "Union"):
            return _union(hint.slice.elts if isinstance(hint.slice, ast.Tuple) else [hint.slice])
        return _kinds(hint.value)
    return {_PLAIN[hint.id]} if isinstance(hint, ast.Name) and hint.id in _PLAIN else set()


def _union(members: list[ast.expr]) -> set[type]:
    parts: list[set[type]] = []
    for member in members:
        if isinstance(member, ast.Constant) and member.value is None:
            continue
        parts.append(_kinds(member))
    return set().union(*parts) if all(parts) else set()


def _home(node: ast.ImportFrom, module: str, name: str) -> str:
    if node.level:
        above = module.split(".")[: -node.level]
        return ".".join([*above, *([node.module] if node.module else [])])
    return _HOMES.get((node.module or "", name), node.module or "")


@cache
def _parsed(module: str) -> ast.Module | None:
    package, *below = module.split(".")
    try:
        found = find_spec(package) if package else None
        if found is None or not found.submodule_search_locations:
            return None
        place = Path(next(iter(found.submodule_search_locations)), *below)
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None

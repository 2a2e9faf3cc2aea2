"""The text of gymdata/__init__.pyi: what an editor and a type checker know of ``gymdata``.

Functions that take their settings as keywords get one parameter per field of their settings class; everything else is
re-exported. Sources are read, nothing is imported: a build needs no package. ``python .ci/public_stub.py`` prints it.
"""

from __future__ import annotations

import ast
import builtins
import runpy
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEAD = '"""Written by the build from signatures and settings classes (.ci/public_stub.py)."""\n'
#: What pydantic accepts for a field is wider than its type.
WIDER = {"Path": "str | Path", "Names": "Sequence[str]", "list": "Sequence", "dict": "Mapping"}
#: Where the wider types come from.
HOMES = {"Sequence": "collections.abc", "Mapping": "collections.abc", "Path": "pathlib", "Any": "typing"}

#: Decorator of a settings class that adds the settings of registered functions → their folder.
REGISTERED: dict[str, str] = {
    "_with_loss_settings": "gymdata/commands/train/losses",
    "_with_estimator_settings": "gymdata/credit/estimators",
}


class Widened(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.parse(WIDER.get(node.id, node.id), mode="eval").body


@cache
def tree_of(module: str) -> ast.Module:
    base = ROOT.joinpath(*module.split("."))
    file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def imports_of(module: str) -> dict[str, tuple[str, str]]:
    """Name → (module, name there) of what a module imports, for type checking too."""
    nodes = [node for node in ast.walk(tree_of(module)) if isinstance(node, ast.ImportFrom) and node.module]
    return {a.asname or a.name: (str(node.module), a.name) for node in nodes for a in node.names}


@cache
def constant(name: str) -> object:
    """The value of a name at the top of gymdata/__init__.py, which imports nothing but the standard library."""
    return runpy.run_path(str(ROOT / "gymdata" / "__init__.py"))[name]


def definition(module: str, name: str) -> tuple[str, ast.stmt] | None:
    """The class or function of this name, with the module that defines it; None for anything else."""
    for node in tree_of(module).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return module, node
    home = imports_of(module).get(name)
    return definition(*home) if home and home[0].startswith("gymdata.") else None


def fields_of(module: str, name: str) -> Iterator[tuple[str, ast.AnnAssign]]:
    """The fields of a settings class, those of its bases first, each with the module that it is written in."""
    there = definition(module, name)
    if there is None or not isinstance(there[1], ast.ClassDef):
        return
    home, node = there
    for base in node.bases:
        if isinstance(base, ast.Name):
            yield from fields_of(home, base.id)
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            private = line.target.id.startswith("_") or "ClassVar" in ast.unparse(line.annotation)
            if not private:
                yield home, line
    for decorator in node.decorator_list:
        for name in sorted(keywords_in(REGISTERED.get(ast.unparse(decorator)))):
            yield home, ast.AnnAssign(ast.Name(name), ast.Name("Any"), ast.Constant(None), 1)


def keywords_in(folder: str | None) -> set[str]:
    """The keyword-only parameters of the registered functions of a folder."""
    files = [] if folder is None else (ROOT / folder).glob("[!_]*.py")
    nodes = [node for file in files for node in ast.parse(file.read_text(encoding="utf-8")).body]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.decorator_list]
    return {arg.arg for function in functions for arg in function.args.kwonlyargs}


def default_of(value: ast.expr | None) -> str | None:
    """The default as a stub shows it; None for a field that must be given."""
    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("Field"):
        named = next((word.value for word in value.keywords if word.arg == "default"), None)
        value = named or (value.args[0] if value.args else ast.Constant(...))
    plain = isinstance(value, ast.Constant) or (isinstance(value, ast.Tuple) and not value.elts)
    return None if value is None else ast.unparse(value) if plain else "..."


class Stub:
    def __init__(self) -> None:
        self.imports: set[str] = set()
        self.functions: list[str] = []
        homes, modules = constant("_HOME"), constant("_MODULES")
        assert isinstance(homes, dict)
        assert isinstance(modules, tuple)
        self.homes, self.modules, self.public = homes, modules, sorted((*homes, *modules))

    def add(self, name: str, module: str, attribute: str) -> None:
        there = definition(module, attribute)
        function = there[1] if there else None
        keywords = isinstance(function, ast.FunctionDef) and function.args.kwarg
        if there and isinstance(function, ast.FunctionDef) and keywords and keywords.arg == "settings":
            self.functions.append(self.signature(name, there[0], function))
        else:
            self.imports.add(f"from {module} import {attribute} as {name}")

    def signature(self, name: str, module: str, node: ast.FunctionDef) -> str:
        first = len(node.args.args) - len(node.args.defaults)
        defaults = [None] * first + node.args.defaults
        parameters = [self.parameter(a, d, module) for a, d in zip(node.args.args, defaults, strict=True)]
        keywords = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        more = "*" if node.args.vararg is None else f"*{self.parameter(node.args.vararg, None, module)}"
        parameters += [more, *(self.parameter(a, d, module) for a, d in keywords)]
        own = {arg.arg for arg in [*node.args.args, *node.args.kwonlyargs]}
        config = next(arg.annotation for arg in [*node.args.args, *node.args.kwonlyargs] if arg.arg == "config")
        assert config is not None
        kind = next(n.id for n in ast.walk(config) if isinstance(n, ast.Name) and n.id.endswith("Config"))
        fields = {str(line.target.id): (home, line) for home, line in fields_of(module, kind)}  # type: ignore[union-attr]  # fields have names
        for field, (home, line) in fields.items():
            if field not in own | {"trainer", "path"}:
                annotation = self.use(Widened().visit(line.annotation), home)
                parameters.append(f"{field}: {annotation} = {default_of(line.value) or '...'}")
        if "trainer" in fields:
            # The keys of the trainer's own config class, as learning_rate.
            parameters.append(f"**settings: {self.use(ast.Name('Any'), module)}")
        assert node.returns is not None
        inside = "".join(f"    {parameter},\n" for parameter in parameters)
        return f"def {name}(\n{inside}) -> {self.use(node.returns, module)}: ...\n"

    def parameter(self, arg: ast.arg, default: ast.expr | None, module: str) -> str:
        assert arg.annotation is not None
        return f"{arg.arg}: {self.use(arg.annotation, module)}" + (f" = {ast.unparse(default)}" if default else "")

    def use(self, annotation: ast.expr, module: str) -> str:
        """The text of an annotation; what it names is imported."""
        for node in ast.walk(annotation):
            if isinstance(node, ast.Name) and not hasattr(builtins, node.id):
                home, name = HOMES.get(node.id), node.id
                if home is None:
                    home, name = imports_of(module).get(node.id, (module, node.id))
                aliased = name != node.id or node.id in self.public
                self.imports.add(f"from {home} import {name}" + f" as {node.id}" * aliased)
        return ast.unparse(annotation)


def stub() -> str:
    made = Stub()
    for name in made.public:
        if name in made.modules:
            made.imports.add(f"from gymdata import {name} as {name}")
        else:
            module, _, attribute = made.homes[name].partition(":")
            made.add(name, f"gymdata.{module}", attribute or name)
    head = [HEAD, *sorted(made.imports), "", "__version__: str", f"__all__ = {made.public!r}", ""]
    return "\n".join([*head, *made.functions])


if __name__ == "__main__":
    sys.stdout.write(stub())

"""Pages of the site that are not files of gymdata/docs: README, CONTRIBUTING and others where they lie, and the reference of
commands and public names, made from the code. Links between files of the repository become links of the site."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / ".ci"))
import public_stub  # noqa: E402

#: File of the repository → its page.
FILES = {
    "README.md": "index.md",
    "sample_data/TUTORIAL.md": "tutorial.md",
    "schemas/README.md": "schemas.md",
    "tests/benchmarks/RESULTS.md": "results.md",
    "CHANGELOG.md": "changelog.md",
    ".github/CONTRIBUTING.md": "contributing.md",
    ".github/SECURITY.md": "security.md",
}
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]*)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, target in FILES.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text(encoding="utf-8")))
    for picture in (ROOT / "sample_data" / "pictures").glob("*.png"):
        files.append(File.generated(config, f"pictures/{picture.name}", content=picture.read_bytes()))
    for name, text in (("commands", commands()), ("api", api())):
        files.append(File.generated(config, f"{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links to files of the repository lead to their pages; a link to a file without a page becomes its text."""
    sources = {target: source for source, target in FILES.items()}
    source = sources.get(page.file.src_uri, f"gymdata/docs/{page.file.src_uri}")

    def linked(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        docs, pictures = "gymdata/docs/", "sample_data/pictures/"
        target = FILES.get(path) or (path.removeprefix(docs) if path.startswith(docs) else None)
        if path.startswith(pictures):
            target = f"pictures/{path.removeprefix(pictures)}"
        if target is None and (ROOT / path / "README.md").is_file():
            target = FILES.get(f"{path}/README.md")
        if target is None:
            return f"]({match[0][2:-1]})" if not (ROOT / path).exists() else "]()"
        return f"]({target}{match[2] or ''})"

    # A link without a page keeps its text.
    return re.sub(r"\[([^\]]*)\]\(\)", r"\1", LINK.sub(linked, markdown))


def commands() -> str:
    """The help of every command, as the terminal shows it."""
    from gymdata.cli.main import GROUPS, main

    lines = ["# Commands", "", "`gymdata COMMAND --help`, for each command.", ""]
    for group, names in GROUPS.items():
        lines += [f"## {group}", ""]
        for name in names:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                main([name, "--help"])
            lines += [f"### {name}", "", "```text", printed.getvalue().strip(), "```", ""]
    return "\n".join(lines)


def api() -> str:
    """Every public name with its signature and docstring, read from the sources: nothing is imported."""
    lines = ["# Public names", "", "What `import gymdata` offers. Settings are the keywords of each function.", ""]
    homes = public_stub.constant("_HOME")
    assert isinstance(homes, dict)
    for name in sorted(homes, key=str.lower):
        module, _, attribute = homes[name].partition(":")
        entry = public_stub.definition(f"gymdata.{module}", attribute or name)
        if entry is not None and isinstance(entry[1], (ast.ClassDef, ast.FunctionDef)):
            node: Any = entry[1]
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            lines += [f"## gymdata.{name}", "", f"{kind} in `{entry[0]}`", ""]
            lines += ["```text", inspect.cleandoc(ast.get_docstring(node) or ""), "```", ""]
    return "\n".join(lines)

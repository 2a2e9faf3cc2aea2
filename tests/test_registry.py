"""A registry finds the files of its folder and the entry points of other packages, and names what it does not know."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest

from gymdata.errors import UsageError
from gymdata.registry import Registry

SHIPPED = """
from shapes import SHAPES

@SHAPES.register("square", corners=4)
def square():
    '''Four equal sides.

    And no more.'''
"""
FOREIGN = """
from shapes import SHAPES

@SHAPES.register("circle")
def circle():
    '''No corners.'''
"""


@pytest.fixture
def shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry[Callable[[], None]]]:
    """A package ``shapes`` with one file, and an installed package that adds one through an entry point."""
    (tmp_path / "shapes").mkdir()
    (tmp_path / "shapes" / "__init__.py").write_text(
        "from gymdata.registry import Registry\nSHAPES = Registry('shape', 'shapes', 'example.shapes')\n"
    )
    (tmp_path / "shapes" / "square.py").write_text(SHIPPED)
    (tmp_path / "more_shapes.py").write_text(FOREIGN)
    installed = tmp_path / "more_shapes-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: more-shapes\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("[example.shapes]\ncircle = more_shapes:circle\n")
    monkeypatch.syspath_prepend(tmp_path)
    import shapes as package  # type: ignore[import-not-found]

    yield package.SHAPES
    for name in [name for name in sys.modules if name.partition(".")[0] in ("shapes", "more_shapes")]:
        del sys.modules[name]


def test_a_file_of_the_folder_and_an_entry_point_are_found_with_help_and_facts(shapes: Registry):
    assert [(entry.name, entry.help, entry.facts) for entry in shapes] == [
        ("circle", "No corners.", {}),
        ("square", "Four equal sides.", {"corners": 4}),
    ]
    assert get_args(shapes.literal()) == ("circle", "square")
    assert shapes["square"].object.__name__ == "square"


def test_an_unknown_name_lists_the_names_and_the_nearest(shapes: Registry):
    with pytest.raises(UsageError, match="shape: got 'sqare', expected one of circle, square") as caught:
        shapes["sqare"]
    assert "square" in str(caught.value.hint)


def test_a_name_belongs_to_one_object(shapes: Registry):
    shapes.names()
    with pytest.raises(UsageError, match="'square' is defined twice"):
        shapes.register("square")(lambda: None)

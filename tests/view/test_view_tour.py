"""The viewer on the folder of the tour."""

from __future__ import annotations

import urllib.request
from pathlib import Path

from gymdata.tour.run import prepare
from tests.view.conftest import Serve


def test_the_pages_that_the_questions_name_are_there(serve: Serve, tmp_path: Path) -> None:
    """The viewer opens the folder, and answers for each question's page."""
    toured = prepare(tmp_path / "out")
    base = serve(toured.output, tokenizer=toured.output / "tokenizer")
    for step in toured.steps:
        with urllib.request.urlopen(f"{base}{step.page}", timeout=60) as answer:
            assert answer.status == 200, step.page

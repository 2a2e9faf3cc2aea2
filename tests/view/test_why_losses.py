"""The losses that the viewer has sliders for are the registered ones, with their defaults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gymdata
from gymdata.train.losses import LOSSES

SCRIPT = (Path(gymdata.__file__).parent / "view" / "static" / "why.js").read_text(encoding="utf-8")
SHOWN = {loss.curve.title: loss for loss in LOSSES.values() if loss.curve is not None}


def test_the_viewer_shows_every_loss_with_a_curve() -> None:
    """A loss that says how it limits a ratio has a panel, and a panel has a loss."""
    assert set(re.findall(r'name: "([^"]+)"', SCRIPT)) == set(SHOWN)


@pytest.mark.parametrize("title", SHOWN)
def test_the_sliders_begin_at_the_defaults(title: str) -> None:
    """The bounds are 1 − clip_low and 1 + clip_high, or the cap."""
    settings = SHOWN[title].settings
    text = SCRIPT[SCRIPT.index(f'name: "{title}"') :]
    bounds = re.search(r"bounds: \[(\[.*?\])\],", text)
    assert bounds is not None
    starts = {key: float(row.split(",")[-1]) for key, row in re.findall(r'\["(\w+)",([^\]]*)\]', bounds[1])}
    expected = {"low": 1 - settings.get("clip_low", 0.0), "high": 1 + settings.get("clip_high", 0.0)}
    expected["cap"] = settings.get("tis_cap")
    assert starts == pytest.approx({key: expected[key] for key in starts})

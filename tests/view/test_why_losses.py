"""The losses that the viewer has sliders for are the registered ones, with their defaults."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import gymdata
from gymdata.commands.train.losses import LOSSES, Curve
from gymdata.commands.view.why import loss_panels

SCRIPT = (Path(gymdata.__file__).parent / "commands" / "view" / "static" / "why.js").read_text(encoding="utf-8")
SHOWN = {loss.curve.title: loss for loss in LOSSES.values() if loss.curve is not None}


def test_the_script_knows_every_way_to_limit_a_ratio() -> None:
    """It has no losses of its own, and a rule for each of the limits that a loss may name."""
    assert set(re.findall(r"^  (\w+): \{ what:", SCRIPT, re.MULTILINE)) == set(
        get_args(get_type_hints(Curve)["limits"])
    )


@pytest.mark.parametrize("panel", loss_panels(), ids=lambda panel: panel["name"])
def test_the_sliders_begin_at_the_defaults(panel: dict) -> None:  # type: ignore[type-arg]
    """The bounds are 1 − clip_low and 1 + clip_high, or the cap, within what the slider reaches."""
    settings = SHOWN[panel["name"]].settings
    expected = {"high": settings.get("tis_cap", 1 + settings.get("clip_high", 0.0))}
    expected |= {"low": 1 - settings["clip_low"]} if "clip_low" in settings else {}
    assert {bound["key"]: bound["start"] for bound in panel["bounds"]} == pytest.approx(expected)
    for bound in panel["bounds"]:
        assert bound["min"] <= bound["start"] < bound["max"]
        steps = (bound["start"] - bound["min"]) / bound["step"]
        assert steps == pytest.approx(round(steps), abs=1e-3)

"""Marks, made with keys and boxes in a real Chromium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gymdata.scores.marks import read_marks
from gymdata.view.marking import Marking
from tests.rollout_files import rollout, two_turns, write_run
from tests.view.conftest import Serve

pytestmark = [pytest.mark.browser, pytest.mark.full]
pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the dev extra)")


def test_a_rollout_is_tagged_compared_and_corrected(page: Any, serve: Serve, tmp_path: Path) -> None:
    """By keyboard: good, a tag of its own, a comment, a reward; by hand the better of two; a selection is saved."""
    run = write_run(tmp_path / "run", [rollout("a", k, float(k == 0), two_turns(20, 40 + k)) for k in range(2)])
    url = serve(run, annotate=True)
    page.goto(f"{url}/rollout?id=a-0")
    page.wait_for_selector("html[data-ready]")
    page.keyboard.press("+")
    page.locator(".tag", has_text="good").wait_for()
    page.keyboard.press("m")
    page.keyboard.type("short")
    page.keyboard.press("Enter")
    page.locator(".tag", has_text="short").wait_for()
    page.keyboard.press("n")
    page.keyboard.type("<i>why</i>")
    page.keyboard.press("Enter")
    page.get_by_text("<i>why</i>").wait_for()
    page.get_by_label("Reward").fill("0.25")
    page.keyboard.press("Enter")
    page.get_by_text("reward corrected to 0.25").wait_for()
    page.get_by_label("Better than").select_option("a-1")
    page.get_by_text("better than").wait_for()
    page.get_by_label("Remove the tag short").click()
    page.locator(".tag", has_text="short").wait_for(state="detached")
    marks = read_marks([run])
    assert marks.tags["a-0"] == ["good"]
    assert list(marks.comments["a-0"].values()) == ["<i>why</i>"]
    assert (marks.rewards, list(marks.choices)) == ({"a-0": 0.25}, [("a-0", "a-1")])
    page.goto(f"{url}/?where=reward+%3E+0")
    page.get_by_label("Save this selection as").fill("solved")
    page.get_by_role("button", name="Save", exact=True).click()
    page.get_by_role("link", name="solved").wait_for()
    assert read_marks([run]).selections == {"solved": "/?where=reward+%3E+0"}


def test_what_was_typed_stays_and_what_was_said_is_taken_back(chromium: Any, serve: Serve, tmp_path: Path) -> None:
    """What is no number is refused beside the box and stays in it, a comment that was not sent is there after leaving the
    page, and correction, comment and choice have a button that takes them back, the own ones alone."""
    run = write_run(tmp_path / "run", [rollout("a", k, float(k == 0), two_turns(20, 40 + k)) for k in range(2)])
    address = f"{serve(run, annotate=True)}/rollout?id=a-0"
    page = chromium.new_context().new_page()
    page.goto(address)
    page.get_by_label("Reward").fill("0.25")
    page.get_by_role("button", name="Correct").click()
    page.get_by_text("reward corrected to 0.25").wait_for()
    page.get_by_label("Reward").fill("0,5")
    page.keyboard.press("Enter")
    page.get_by_text("got '0,5', expected a finite number").wait_for()
    assert page.get_by_label("Reward").input_value() == "0,5"
    assert read_marks([run]).rewards == {"a-0": 0.25}
    page.get_by_role("button", name="Take the correction back").click()
    page.get_by_text("reward corrected").wait_for(state="detached")
    page.get_by_label("Comment", exact=True).fill("half a sent")
    page.goto(address)
    page.wait_for_selector("html[data-ready]")
    assert page.get_by_label("Comment", exact=True).input_value() == "half a sent"
    page.get_by_role("button", name="Save", exact=True).click()
    page.get_by_text("half a sent").wait_for()
    assert page.get_by_label("Comment", exact=True).input_value() == ""
    page.get_by_label("Better than").select_option("a-1")
    page.locator(".tag", has_text="better than").wait_for()
    page.fill("#who", "zoe")
    page.locator("#who").blur()
    assert page.get_by_role("button", name="Take the").count() == 0
    page.fill("#who", Marking([run], annotate=True).person)
    page.locator("#who").blur()
    page.get_by_role("button", name="Take the comment back").click()
    page.get_by_text("half a sent").wait_for(state="detached")
    page.get_by_role("button", name="Take the choice back").click()
    page.locator(".tag", has_text="better than").wait_for(state="detached")
    page.context.close()
    marks = read_marks([run])
    assert (marks.rewards, marks.preferred(), marks.of_rollout("a-0")["comments"]) == ({}, {}, {})


def test_menu_and_boxes_of_marks_fit_a_phone(page: Any, serve: Serve, tmp_path: Path) -> None:
    """No entry of the menu is cut, and no box or button of marks is beside the screen."""
    run = write_run(tmp_path / "run", [rollout("a", k, float(k), two_turns(20, 40 + k)) for k in range(2)])
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{serve(run, annotate=True)}/rollout?id=a-0")
    for element in page.locator(".top nav a, #marks input, #marks button, #marks select").all():
        box = element.bounding_box()
        assert 0 <= box["x"] < box["x"] + box["width"] <= 390
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_two_people_mark_at_once(chromium: Any, serve: Serve, tmp_path: Path) -> None:
    """Both tag and comment with the page open: nothing is lost, comments have a person, and both pages show both tags."""
    run = write_run(tmp_path / "run", [rollout("a", 0, 1.0, two_turns(20, 40))])
    address = f"{serve(run, annotate=True)}/rollout?id=a-0"
    people = {who: chromium.new_context().new_page() for who in ("ada", "ben")}
    for who, page in people.items():
        page.goto(address)
        page.wait_for_selector("html[data-ready]")
        page.fill("#who", who)
        page.locator("#who").blur()
    for who, page in people.items():
        page.fill("#tagbox", f"of-{who}")
        page.keyboard.press("Enter")
        page.locator(".tag", has_text=f"of-{who}").wait_for()
    for who, page in people.items():
        page.get_by_label("Comment", exact=True).fill(f"{who} says")
        page.keyboard.press("Enter")
        page.get_by_text(f"{who} says").wait_for()
        page.reload()
        assert page.locator("#marks .tag", has_text="of-").count() == 2
    for page in people.values():
        page.context.close()
    marks = read_marks([run])
    assert marks.tags["a-0"] == ["of-ada", "of-ben"]
    assert marks.comments["a-0"] == {"ada": "ada says", "ben": "ben says"}

"""Every kind of page in a real Chromium, in both color schemes, on a small laptop and on a phone: nothing is wider than the
window, every text can be read on its ground, and no page has an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import gymdata
from gymdata.commands.view.run import view
from gymdata.rollouts.schema import AUDIT
from tests.rollout_files import rollout, two_turns, write_run, write_table
from tests.view.conftest import Serve, judged, training

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
FAULTY = ROOT / "sample_data" / "rollouts" / "broken.jsonl"
MARKDOWN = """

# A heading

- **strong** and `code`, $a^2$

> quoted

| a | b |
|---|---|
| 1 | 2 |

```python
def f(x: int) -> str:  # a comment
    return "text" * 2
```
"""
LONG_PATH = "/home/somebody/projects/" + "a-judge-with-a-long-name/" * 3 + "checkpoint-00010"
SIZES = {"laptop": (1280, 720), "phone": (390, 844)}
#: Boxes of the page that scroll sideways.
SCROLLED = """[...document.querySelectorAll(".scroll, .wide")].filter((box) => box.scrollWidth > box.clientWidth)
    .map((box) => `${box.scrollWidth} > ${box.clientWidth}: ${box.innerText}`)"""
#: The lowest contrast of ordinary text (WCAG 2.2, AA).
LEAST = 4.5
#: What each text of the page has as contrast to what is below it, where that is less than ``least``. Colors are computed by
#: a canvas, for they can be mixed and see-through; disabled controls are exempt.
CONTRAST = """
(least) => {
  const ink = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    ink.clearRect(0, 0, 1, 1);
    ink.fillStyle = color;
    ink.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = ink.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], [x, y, z]) => [r * a + x * (1 - a), g * a + y * (1 - a), b * a + z * (1 - a)];
  const linear = (v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const ground = (node) => {
    const grounds = [];
    let opacity = 1;
    for (let at = node; at; at = at.parentElement) {
      const style = getComputedStyle(at);
      opacity *= Number(style.opacity);
      const rect = at.matches("g") ? at.querySelector(":scope > rect") : null;
      grounds.push(rgba(rect ? getComputedStyle(rect).fill : style.backgroundColor));
      if (grounds.at(-1)[3] === 1) break;
    }
    return [grounds.reduceRight((below, one) => over(one, below), [255, 255, 255]), opacity];
  };
  const faint = [];
  let seen = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim();
    const node = walker.currentNode.parentElement;
    if (!text || node.closest(":disabled, option, script, title, .skip")) continue;
    if (!node.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    seen += 1;
    const style = getComputedStyle(node);
    const [below, opacity] = ground(node);
    const [r, g, b, a] = rgba(node.closest("svg") ? style.fill : style.color);
    const found = ratio(over([r, g, b, a * opacity], below), below);
    const where = `${node.tagName} .${node.getAttribute("class")}`;
    if (found < least) faint.push(`${found.toFixed(2)} ${where}: ${text.slice(0, 30)}`);
  }
  return [seen, [...new Set(faint)]];
}
"""


def is_fit(page: Any, name: str) -> None:
    """In every size and scheme the page is not wider than its window, and no text on it is faint."""
    for size, (width, height) in SIZES.items():
        page.set_viewport_size({"width": width, "height": height})
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            here = f"{name}, {size}, {scheme}"
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{here}: too wide"
            seen, faint = page.evaluate(CONTRAST, LEAST)
            assert seen > 3, f"{here}: empty"
            assert not faint, f"{here}: {faint}"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two groups with rewards, a judge's verdicts of every kind, pairs, experiences and an audit."""
    long = "a long answer of many words, " * 12
    rows = [rollout("a", k, float(k % 2 == 0), two_turns(20, 40 + k), text=f"{k} {long}{MARKDOWN}") for k in range(4)]
    rows += [rollout("b" * 60, k, 0.5, two_turns(21, 50), status="truncated", stop_reason="length") for k in range(2)]
    folder = write_run(tmp_path / "run", rows)
    verdicts = ((0, 1, 5, 1), (1, 0, 1, 5), (0, 3, 5, 1), (3, 0, 5, 1), (0, 2, 4, 2), (2, 0, 3, 3), (1, 3, None, None))
    judged(folder, *verdicts, raw="x" * 400, judge=LONG_PATH)
    gymdata.pairs(folder, strategy="all")
    gymdata.experience(folder)
    audited = {"rollout_id": [f"a-{k}" for k in range(4)], "ref_logprobs": [[-1.1, -0.4, -5.0, -1.3, -2.0]] * 4}
    table = pa.table({**audited, "entropy": [[0.05, 0.2, 0.6, 1.1, 3.0]] * 4})
    write_table(table.cast(AUDIT.schema), folder / "audit-x" / "audit.parquet", AUDIT)
    (folder / "audit-x" / "run.json").write_text('{"stage": "audit", "model": {"path": "other"}}')
    return folder


def test_every_page_can_be_read(page: Any, serve: Serve, run: Path, tmp_path: Path) -> None:
    """Lists, groups, pairs, comparisons, curves, breaks, faults, and what is wrong or empty."""
    parents = [{"path": str(run / "pairs-reward")}, {"path": str(run)}]
    rows = [{"step": n, "loss": 1 / n, "rewards/chosen": n, "rewards/rejected": -n} for n in (1, 2, 3)]
    model = training(tmp_path / "model", "train-dpo", rows, steps=3, parents=parents)
    base, broken = serve(run, model), serve(FAULTY, tokenizer=ROOT / "sample_data" / "policy")
    page.goto(base + "/pairs")
    pair = page.locator("tr[data-href]").first.get_attribute("data-href")
    shown = ["/", "/?by=group", "/?min=0.5", "/?where=reward+%3E+5", "/?where=rewrd+%3E+1", "/pairs", pair,
             "/group?id=group-a", "/comparisons", "/comparisons?show=half", "/comparison?id=0-3", "/comparison?id=2-0",
             "/training", "/?text=strong", "/nothing",
             "/rollout?id=nobody"]  # fmt: skip
    faulty = ["/", "/?by=group", "/training", "/comparisons", "/pairs",
              "/rollout?id=3d3ca74d586f0eea4ffd9720f6a55325", "/rollout?id=f19f962238f9a4dbf67d58d0ae9719cc",
              "/break?id=8945e08efb4714d03534b8d76250e722&turn=1"]  # fmt: skip
    for address in [*(base + one for one in shown), *(broken + one for one in faulty)]:
        page.goto(address)
        assert page.locator("main").count() == 1, address
        is_fit(page, address)
    page.goto(base + "/training")
    is_fit(page, "curves")
    page.reload()
    current, (phone, _) = page.locator(".top nav [aria-current]").bounding_box(), SIZES["phone"]
    assert 0 <= current["x"] < current["x"] + current["width"] <= phone


@pytest.mark.full
def test_a_rollout_can_be_read_in_every_coloring(page: Any, serve: Serve, run: Path) -> None:
    """Tokens in each coloring, the note at a pointed token, why it is trained, and the keys of the keyboard."""
    page.goto(serve(run) + "/rollout?id=a-0")
    page.wait_for_selector("html[data-ready]")
    assert "1 of 4 in the group" in page.locator(".crumbs").inner_text()
    is_fit(page, "messages")
    # The last size is the phone's, which shows one side.
    page.click("#sides [data-side=tokens]")
    for button in page.locator("[data-color]:enabled").all():
        button.click()
        is_fit(page, f"tokens by {button.inner_text()}")
    page.locator(".t.g").nth(1).hover()
    page.wait_for_selector("#tip:not([hidden])")
    is_fit(page, "the note of a token")
    page.locator(".t.g").nth(1).click()
    page.wait_for_selector(".why .loss")
    is_fit(page, "why")
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    page.wait_for_selector("#help[open]")
    is_fit(page, "keys")


@pytest.mark.full
def test_an_exported_file_can_be_read(page: Any, run: Path, tmp_path: Path) -> None:
    """Rollouts, groups side by side with their cards, and pairs from the fork are in it, and lead to each other."""
    target = tmp_path / "x.html"
    view(run, export=target)
    page.goto(target.as_uri())
    is_fit(page, "exported rollout")
    page.locator("article:visible .chips a").click()
    page.wait_for_selector("article:visible .cardcol:visible")
    assert page.locator("article:visible .cardcol:visible").count() == 4
    is_fit(page, "exported group")
    page.locator("article:visible .cardhead a").nth(2).click()
    page.wait_for_selector("article:visible .tokenview .t.g:visible")
    assert page.locator("article:visible .tokenview .t.g:visible").count() == 5
    page.get_by_text("4 pairs").click()
    page.locator("[data-pick=p0]").click()
    page.wait_for_selector("article:visible .side-chosen .dif")
    assert page.locator("article:visible .side-chosen .dif").count() == 1
    is_fit(page, "exported pair")


@pytest.mark.full
def test_a_report_and_comparisons_can_be_read_on_a_phone(page: Any, serve: Serve, run: Path, tmp_path: Path) -> None:
    """A judge of a long path makes the report no wider than the window; no cell is a few letters wide, a heading stays in
    its box, and neither its tables nor that of comparisons are scrolled sideways."""
    target = tmp_path / "x.html"
    gymdata.report(run, output=target)
    page.goto(target.as_uri())
    for name, (width, height) in SIZES.items():
        page.set_viewport_size({"width": width, "height": height})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        narrow = """[...document.querySelectorAll("dd")]
            .filter((cell) => cell.innerText.length > 20 && cell.clientWidth < 120).map((cell) => cell.innerText)"""
        assert page.evaluate(narrow) == [], name
        outside = """[...document.querySelectorAll(".card h3")].filter((title) => title.scrollWidth > title.clientWidth)
            .map((title) => title.innerText)"""
        assert page.evaluate(outside) == [], name
        assert page.evaluate(SCROLLED) == [], name
    headings = page.locator("h2").all_inner_texts()
    assert headings.index("Rewards") < headings.index("What was run")
    page.goto(serve(run) + "/comparisons")
    assert page.locator("tr[data-href]").count() == 7
    assert page.evaluate(SCROLLED) == []


def test_labels_of_curves_are_whole(page: Any, serve: Serve, tmp_path: Path) -> None:
    """The longest label of an axis, such as -1.05e-4, is drawn within the chart, and not across its edge."""
    rows = [{"step": n, "learning_rate": -1.05e-4 * n, "num_tokens": 123_456.0 * n} for n in (1, 2, 3)]
    model = training(tmp_path / "model", "train-rl", rows)
    page.goto(serve(model) + "/training")
    for width, height in SIZES.values():
        page.set_viewport_size({"width": width, "height": height})
        beside = """[...document.querySelectorAll(".curve text")].filter((text) => {
            const [label, chart] = [text, text.closest(".curve")].map((one) => one.getBoundingClientRect());
            return label.left < chart.left || label.right > chart.right;
        }).map((text) => text.textContent)"""
        assert page.locator(".curve text").count() > 8
        assert page.evaluate(beside) == []

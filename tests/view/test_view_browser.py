"""The pages in a real headless Chromium: clicked, typed into, and watched for errors and requests to elsewhere."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import gymdata
from gymdata.commands.view.run import view
from gymdata.rollouts.schema import AUDIT
from tests.rollout_files import rollout, two_turns, write_run, write_table
from tests.view.conftest import HOSTILE, Serve, training

pytestmark = pytest.mark.browser
expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the dev extra)").expect

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_data" / "rollouts"


def ready(page: Any) -> None:
    """Until the tokens are drawn."""
    page.wait_for_selector("html[data-ready]")


def test_from_filter_to_rollout_to_token(page: Any, serve: Serve, monkeypatch: pytest.MonkeyPatch):
    """A condition narrows the table, a row opens, its tokens are colored, and pointing at one says what it is."""
    monkeypatch.chdir(ROOT)
    base = serve(SAMPLES / "clean.jsonl")
    page.goto(base)
    assert page.locator("table.rows tbody tr").count() == 24
    page.keyboard.press("/")
    page.keyboard.type("reward == 1 and n_turns == 2")
    page.keyboard.press("Enter")
    page.wait_for_url("**where=**")
    rows = page.locator("table.rows tbody tr")
    assert 0 < rows.count() < 24
    assert "gymdata filter" in page.locator(".command code").inner_text()
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    ready(page)
    sampled = page.locator(".t.g")
    assert "<|im_end|>" in page.locator("#tokenview").inner_text()
    sampled.nth(1).hover()
    page.wait_for_selector("#tip:not([hidden])")
    tip = page.locator("#tip").inner_text()
    assert "logprob" in tip
    assert "id" in tip
    page.click("[data-color=mask]")
    assert page.locator(".t.g.m1").count() == sampled.count()
    page.locator("#messages [data-turn='1']").click()
    assert page.url.endswith("#t=1")


def test_a_text_is_set_and_keeps_its_characters(page: Any, serve: Serve, tmp_path: Path):
    """Strong text and code are set with their marks, and HTML in it is text."""
    text = "**strong**\n\n```python\nx = 1\n```\n" + "<script>window.hit=1</script>"
    run = write_run(tmp_path / "run", [rollout("a", 0, 1.0, two_turns(20, 40), text=text)])
    page.goto(serve(run) + "/rollout?id=a-0")
    ready(page)
    answer = page.locator("#messages .message.assistant .text").last
    weight = "(node) => getComputedStyle(node.querySelector('strong')).fontWeight"
    assert (answer.text_content(), answer.evaluate(weight)) == (text, "700")
    assert page.evaluate("window.hit") is None


def test_texts_are_searched_values_clicked_and_columns_chosen(page: Any, serve: Serve, tmp_path: Path):
    """What was searched for is marked; a value keeps its rollouts; a column is shown and stays when the filter changes."""
    rows = [
        rollout(f"t{k}", 0, 1.0, two_turns(20, 40), text=f"{'long ' * 60}needle" if k == 3 else "hay")
        | {"task": json.dumps({"level": ("easy", "hard")[k % 2]})}
        for k in range(8)
    ]
    page.goto(serve(write_run(tmp_path / "run", rows)))
    page.fill("[name=text]", "needle")
    page.keyboard.press("Enter")
    page.wait_for_url("**text=needle**")
    assert page.locator("tr[data-href]").count() == 1
    assert page.locator("td.words mark").all_inner_texts() == ["needle"]
    page.get_by_role("link", name="Clear").click()
    page.get_by_role("link", name="hard 4").click()
    page.wait_for_url("**where=**")
    assert page.locator("tr[data-href]").count() == 4
    page.locator(".columns summary").click()
    page.get_by_role("link", name="task.level").click()
    page.wait_for_url("**columns=**")
    assert page.locator("thead th", has_text="task.level").count() == 1
    page.fill("[name=task]", "t3")
    page.keyboard.press("Enter")
    page.wait_for_url("**task=t3**")
    assert page.locator("tr[data-href] td").last.inner_text() == "hard"


@pytest.mark.full
def test_a_bar_of_the_histogram_filters(page: Any, serve: Serve):
    """Clicking a bar keeps the rollouts with its rewards."""
    page.goto(serve(SAMPLES / "clean.jsonl"))
    page.locator(".bars a").last.click()
    page.wait_for_url("**where=**")
    shown = set(page.locator("table.rows tbody .reward b").all_inner_texts())
    assert shown == {"1"}


@pytest.mark.full
def test_from_break_to_diff(page: Any, serve: Serve, monkeypatch: pytest.MonkeyPatch):
    """The filter for breaks leads to the broken rollout, and that to both sides of its break."""
    monkeypatch.chdir(ROOT)
    page.goto(serve(SAMPLES / "broken.jsonl"))
    page.locator("[name=breaks]").check()
    page.wait_for_url("**breaks=1**")
    page.locator("table.rows tbody tr").first.click()
    page.locator(".breaknote").click()
    page.wait_for_url("**/break?**")
    assert page.locator(".difftoks .dif").count() > 1
    assert "T200" in page.locator("main").inner_text()


@pytest.mark.matrix("dark")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_follow_the_color_scheme(chromium: Any, serve: Serve, scheme: str):
    """Light text on a dark ground where that is preferred, and until the button is pressed, which is kept."""
    base = serve(SAMPLES / "clean.jsonl")
    context = chromium.new_context(color_scheme=scheme)
    page = context.new_page()

    def is_light() -> bool:
        colors = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        ground, ink = page.evaluate(colors)
        return sum(map(int, ground[4:-1].split(","))) > sum(map(int, ink[4:-1].split(",")))

    page.goto(base)
    assert is_light() == (scheme == "light")
    page.click("#theme")
    assert is_light() != (scheme == "light")
    page.reload()
    assert is_light() != (scheme == "light")
    context.close()


def test_hostile_content_does_nothing(page: Any, serve: Serve, tmp_path: Path):
    """Scripts, handlers and terminal escapes inside a rollout are text: nothing runs, nothing is requested."""
    messages = [
        {"role": "user", "content": HOSTILE, "name": HOSTILE},
        {"role": "assistant", "content": HOSTILE, "turn": 1},
    ]
    row = rollout(HOSTILE, 0, 1.0, two_turns(20, 40), messages=messages, policy=HOSTILE, status=HOSTILE)
    base = serve(write_run(tmp_path / "run", [row]))
    for address in ("/", "/?by=group"):
        page.goto(base + address)
        assert page.evaluate("window.hit") is None
    page.goto(base)
    page.locator("tr[data-href]").first.click()
    ready(page)
    assert page.evaluate("window.hit") is None
    assert "<script>window.hit=1</script>" in page.locator("#messages").inner_text()
    assert "\\x1b[31m" in page.locator("#messages").inner_text()


def test_twenty_thousand_tokens_stay_fluid(page: Any, serve: Serve, tmp_path: Path):
    """A long rollout is drawn, recolored and scrolled with few elements laid out at a time."""
    calls = [([1, 20], list(range(100, 20_100)))]
    base = serve(write_run(tmp_path / "run", [rollout("t", 0, 1.0, calls)]))
    page.goto(base + "/rollout?id=t-0")
    ready(page)
    assert page.locator(".t.g").count() == 20_000
    assert page.locator(".chunk").count() >= 30
    page.click("[data-color=turn]")
    assert page.locator(".t.g.u0").count() == 20_000


def test_why_a_token_is_trained(page: Any, serve: Serve, tmp_path: Path):
    """A click on a token explains its mask and its group's arithmetic, as ``gymdata experience`` made it, and the sliders of
    a loss change what it keeps."""
    run = write_run(tmp_path / "run", [rollout("t", k, float(k == 0), two_turns(20, 40 + k)) for k in range(4)])
    gymdata.experience(run)
    ratios = [0.5, 1.0, 1.1, 1.3, 3.0]
    saved = [-1.0, -2.0, -3.0, -1.0, -2.0]
    audited = [s + math.log(r) for s, r in zip(saved, ratios, strict=True)]
    table = pa.table(
        {"rollout_id": [f"t-{k}" for k in range(4)], "ref_logprobs": [audited] * 4, "entropy": [[0.5] * 5] * 4}
    )
    write_table(table.cast(AUDIT.schema), run / "audit-other" / "audit.parquet", AUDIT)
    (run / "audit-other" / "run.json").write_text('{"stage": "audit", "model": {"path": "other"}}')
    page.goto(serve(run) + "/rollout?id=t-0")
    ready(page)
    page.click("[data-color=ratio]")
    page.locator(".t.g").nth(3).click()
    why = page.locator("#why")
    why.locator(".formula").wait_for()
    text = why.inner_text()
    # One reward of 1 and three of 0: mean 0.25, std 0.5.
    assert "(1 − 0.25) / 0.5 = 1.5" in text
    assert "Loss mask 1" in text
    assert "1.3" in why.locator("tr.this").last.inner_text()
    # 1.3 is beyond 1.2, and A > 0.
    verdict = why.locator(".loss", has_text="PPO-clip").locator(".verdict")
    assert verdict.inner_text() == "no gradient"
    slider = why.get_by_label("PPO-clip 1 + clip_high")
    slider.evaluate("(box) => { box.value = 2; box.dispatchEvent(new Event('input', { bubbles: true })); }")
    expect(verdict).to_have_text("kept")
    page.keyboard.press("Escape")
    assert not why.is_visible()


@pytest.mark.full
def test_from_the_group_to_a_rollout_and_back(page: Any, serve: Serve, run: Path):
    """A group stands side by side; a card opens its rollout, and ``u`` leads up again."""
    page.goto(serve(run) + "/?by=group")
    page.get_by_role("link", name="side by side").first.click()
    assert page.locator(".cardcol").count() == 4
    page.get_by_role("link", name="rollout 1", exact=True).click()
    ready(page)
    page.keyboard.press("u")
    page.wait_for_url("**/group?**")


@pytest.mark.full
def test_from_pairs_to_a_pair_to_its_verdicts(page: Any, serve: Serve, run: Path):
    """A pair shows both sides from the fork and what the judge said of the two, in either position."""
    gymdata.pairs(run, strategy="all")
    page.goto(serve(run))
    page.keyboard.press("g")
    page.keyboard.press("p")
    page.wait_for_url("**/pairs")
    page.locator("tr[data-href]").first.click()
    page.wait_for_url("**/pair?**")
    assert page.locator(".side-chosen .dif").count() == 1
    assert page.locator(".side-rejected .dif").count() == 1
    page.locator(".side-chosen .dif").click()
    expect(page.locator("#why")).to_contain_text("is pushed up")
    expect(page.locator("[data-slope]")).to_have_text("0.05")
    page.locator(".side-rejected [data-k='0']").click()
    expect(page.locator("#why")).to_contain_text("its gradients cancel")
    page.keyboard.press("Escape")
    page.get_by_role("link", name="raw output").first.click()
    page.wait_for_url("**/comparison?**")
    assert "raw of 0-1" in page.locator("main").inner_text()


def test_curves_grow_while_a_model_is_trained(page: Any, serve: Serve, tmp_path: Path):
    """Curves are drawn from metrics.jsonl, and again when a line has come, without a reload."""
    rows = [{"step": n, "loss": 1 / n, "kl": n} for n in range(1, 4)]
    model = training(tmp_path / "model", "train-dpo", rows)
    page.goto(serve(model) + "/training")
    page.evaluate("window.kept = true")
    assert page.locator("#steps").inner_text() == "3"
    assert page.locator(".curve svg").count() == 2
    assert page.locator(".curve circle").first.text_content() == "loss, 1: 1"
    with (model / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 0.1, "kl": 4, "ratio/mean": 1.0}\n')
    page.wait_for_selector("#curves[data-drawn='3']")
    assert page.locator("#steps").inner_text() == "4"
    assert page.locator(".curve svg").count() == 3
    assert page.evaluate("window.kept")


@pytest.mark.full
def test_an_exported_file_opens_offline(chromium: Any, run: Path, tmp_path: Path):
    """From the disk, without network: rollouts to pick, tokens to color and to point at, and no error."""
    target = tmp_path / "x.html"
    view(run, export=target)
    context = chromium.new_context(offline=True)
    page = context.new_page()
    faults: list[str] = []
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(target.as_uri())
    page.locator("[data-pick='r1']").click()
    page.locator("article:visible .t.g").first.hover()
    page.wait_for_selector("#tip:not([hidden])")
    page.locator("article:visible [data-color=turn]").click()
    assert page.locator("article:visible .t.g.u1").count() == 2
    page.keyboard.press("/")
    page.keyboard.type("CALLING")
    expect(page.locator("#count")).to_have_text("in 6 of 6 rollouts")
    page.locator("#find").fill("42 2")
    expect(page.locator("#count")).to_have_text("in 1 of 6 rollouts")
    assert page.locator("[data-pick^=r]:visible").count() == 1
    page.keyboard.press("Enter")
    page.locator("article:visible .text", has_text="42 2").wait_for()
    assert page.evaluate("CSS.highlights.get('match').size") > 0
    page.locator("#find").fill("")
    expect(page.locator("#count")).to_have_text("")
    assert page.locator("[data-pick^=r]:visible").count() == 6
    page.goto(f"{target.as_uri()}#r17")
    assert page.locator("article:visible").get_attribute("id") == "at-r0"
    assert not faults
    context.close()


@pytest.mark.full
def test_a_run_grows_in_the_page_while_it_is_collected(
    page: Any, serve: Serve, vllm_server: str, policy: str, tmp_path: Path
):
    """Rollouts of a real ``collect`` appear without a reload, and one of them opens while others are sampled."""
    run = tmp_path / "run"
    command = [sys.executable, "-m", "gymdata.cli", "collect", str(ROOT / "sample_data" / "tasks" / "train.jsonl"),
               "--endpoint", vllm_server, "-m", "sample-policy", "--tokenizer", policy, "--reward", "numeric",
               "--env", f"{ROOT / 'sample_data' / 'calculator.py'}:Calculator", "--max-tokens", "48", "-r", "8",
               "-c", "2", "-o", str(run)]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as collecting:
        try:
            while not (run / "run.json").exists() and collecting.poll() is None:
                page.wait_for_timeout(50)
            page.goto(serve(run))
            page.evaluate("window.kept = true")
            count = page.locator(".facts b").first
            expect(count).not_to_have_text("0", timeout=120_000)
            first = count.inner_text()
            expect(page.locator("#live")).to_be_visible()
            expect(count).not_to_have_text(first, timeout=120_000)
            assert int(count.inner_text().replace(",", "")) > int(first.replace(",", ""))
            assert page.evaluate("window.kept")
            assert collecting.poll() is None
            page.locator("tr[data-href]").first.click()
            ready(page)
            assert page.locator(".t.g").count() > 0
        finally:
            collecting.send_signal(signal.SIGINT)
            collecting.wait(60)


@pytest.mark.full
def test_the_menu_fits_a_phone(page: Any, serve: Serve, run: Path) -> None:
    """No entry of the menu is cut, and nothing is beside the screen."""
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{serve(run)}/rollout?id=a-0")
    for element in page.locator(".top nav a").all():
        box = element.bounding_box()
        assert 0 <= box["x"] < box["x"] + box["width"] <= 390
    assert page.evaluate("document.documentElement.scrollWidth") == 390

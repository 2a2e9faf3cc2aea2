"""Groups, pairs, comparisons, SQL, curves, an exported file, and a run that grows: clicked in a real Chromium."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import gymdata
from gymdata.rollouts.schema import COMPARISONS
from gymdata.store import write_table
from gymdata.view.run import view
from tests.rollout_files import rollout, two_turns, write_run
from tests.view.conftest import Serve

pytestmark = pytest.mark.browser
expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the dev extra)").expect

ROOT = Path(__file__).parents[2]


def judged(i: int, j: int, score_1: float, score_2: float) -> dict[str, Any]:
    return {
        "comparison_id": f"{i}-{j}", "group_id": "group-a", "task_id": "a", "rollout_i": f"a-{i}", "rollout_j": f"a-{j}",
        "response_i": i, "response_j": j, "judge_idx": 0, "score_1": score_1, "score_2": score_2, "ranking": 3.5,
        "status": "judged", "raw": f"I prefer the first ({i}-{j})", "judge": "tiny", "run_id": "r",
    }  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rows = [rollout("a", k, float(k == 0), two_turns(20, 40 + k)) for k in range(3)]
    folder = write_run(tmp_path / "run", rows)
    said = pa.Table.from_pylist([judged(0, 1, 5, 1), judged(1, 0, 5, 1)], COMPARISONS.schema)
    write_table(said, folder / "judge-tiny" / "comparisons.parquet", COMPARISONS)
    (folder / "judge-tiny" / "run.json").write_text('{"stage": "judge"}')
    gymdata.pairs(folder, strategy="all")
    return folder


@pytest.mark.full
def test_from_the_group_to_a_rollout_and_back(page: Any, serve: Serve, run: Path):
    """A group stands side by side; a card opens its rollout, and ``u`` leads up again."""
    page.goto(serve(run) + "/?by=group")
    page.get_by_role("link", name="side by side").click()
    assert page.locator(".cardcol").count() == 3
    page.get_by_role("link", name="rollout 1", exact=True).click()
    page.wait_for_selector("html[data-ready]")
    page.keyboard.press("u")
    page.wait_for_url("**/group?**")


@pytest.mark.full
def test_from_pairs_to_a_pair_to_its_verdicts(page: Any, serve: Serve, run: Path):
    """A pair shows both sides from the fork and what the judge said of the two, in either position."""
    base = serve(run)
    page.goto(base)
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
    assert "I prefer the first" in page.locator("main").inner_text()
    assert "flipped" in page.locator("main").inner_text()


def test_sql_runs_is_kept_and_becomes_a_selection(page: Any, serve: Serve, run: Path):
    """Ctrl-Enter runs a statement, its rollouts open as a selection, it can be kept by name, and a write is refused."""
    page.goto(serve(run) + "/sql")
    page.fill("#sql", "SELECT rollout_id, reward FROM rollouts WHERE reward = 1")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".sqlrows")
    assert page.locator(".sqlrows tbody tr").count() == 1
    page.click("#save")
    page.keyboard.type("the good ones")
    page.keyboard.press("Enter")
    page.reload()
    assert page.locator("#mine a").inner_text() == "the good ones"
    with page.expect_download() as download:
        page.get_by_role("link", name="CSV").click()
    assert Path(download.value.path()).read_text().splitlines() == ["rollout_id,reward", "a-0,1.0"]
    page.get_by_role("link", name="show these rollouts").click()
    page.wait_for_url("**where=**")
    assert page.locator("tr[data-href]").count() == 1
    page.goto(page.url.partition("/?")[0] + "/sql")
    page.fill("#sql", "DROP TABLE rollouts")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".problem")
    assert "expected a SELECT" in page.locator(".problem").inner_text()


def test_four_trainings_in_one_chart(page: Any, serve: Serve, tmp_path: Path):
    """Each has a curve in the panel of the loss; smoothing and logarithmic axes draw it again."""
    models = [tmp_path / name for name in ("w", "x", "y", "z")]
    for number, model in enumerate(models):
        model.mkdir()
        (model / "run.json").write_text('{"stage": "train-sft"}')
        rows = [{"step": step, "loss": (number + step % 2) / step} for step in range(20)[1:]]
        (model / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page.goto(serve(*models) + "/training")
    page.get_by_role("link", name="all, compared").click()
    page.wait_for_selector("#curves[data-drawn='1']")
    labels = page.locator(".u-legend .u-label").all_inner_texts()
    assert labels == ["step", "w", "x", "y", "z"]
    drawn = "document.querySelector('.curve canvas').toDataURL()"
    pictures = {page.evaluate(drawn)}
    for change in ("smooth.value = 0.9", "logx.checked = true", "logy.checked = true"):
        page.evaluate(f"{change}; {change.partition('.')[0]}.dispatchEvent(new Event('input'))")
        pictures.add(page.evaluate(drawn))
    assert len(pictures) == 4


def test_curves_grow_while_a_model_is_trained(page: Any, serve: Serve, tmp_path: Path):
    """Curves are drawn from metrics.jsonl, and again when a line has come."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "run.json").write_text(json.dumps({"stage": "train-dpo"}))
    metrics = model / "metrics.jsonl"
    metrics.write_text("".join(json.dumps({"step": n, "loss": 1 / n, "kl": n}) + "\n" for n in range(1, 4)))
    page.goto(serve(model) + "/training")
    page.wait_for_selector("#curves[data-drawn='2']")
    assert page.locator("#steps").inner_text() == "3"
    assert page.locator(".curve canvas").count() == 2
    with metrics.open("a") as file:
        file.write('{"step": 4, "loss": 0.1, "kl": 4, "ratio/mean": 1.0}\n')
    page.wait_for_selector("#curves[data-drawn='3']")
    assert page.locator("#steps").inner_text() == "4"


@pytest.mark.full
def test_lineage_is_a_graph_to_click(page: Any, serve: Serve, run: Path):
    """A node shows what its run.json says."""
    page.goto(serve(run) + "/lineage")
    page.locator(".node", has_text="pairs-reward").click()
    shown = page.locator(".nodefacts:visible")
    assert shown.count() == 1
    assert "pairs.parquet" in shown.inner_text()


def test_cells_of_a_notebook(page: Any, run: Path):
    """A rollout, a group, a pair and a report show their texts in frames; nothing runs in them and nothing is loaded."""
    gymdata.pairs(run, strategy="all")
    opened = gymdata.open(run)
    pair = gymdata.query("SELECT min(pair_id) AS id FROM pairs", run).to_pylist()[0]["id"]
    cells = [opened.rollout("a-0"), opened.group("group-a"), opened.pair(pair), gymdata.report(run, write=False)]
    page.set_content("".join(cell._repr_html_() for cell in cells))
    frames = page.locator("iframe")
    assert frames.count() == 4
    for number, text in enumerate(("question a", "Final answers", "Chosen", "Rewards of rollouts")):
        inside = frames.nth(number).content_frame
        inside.get_by_text(text).first.wait_for()
        assert inside.locator("script").count() == 0
    page.set_content(opened._repr_html_())
    assert page.locator("td", has_text="a-0").count() == 1


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
    expect(page.locator("#count")).to_have_text("in 3 of 3 rollouts")
    page.locator("#find").fill("42 2")
    expect(page.locator("#count")).to_have_text("in 1 of 3 rollouts")
    assert page.locator("[data-pick^=r]:visible").count() == 1
    page.keyboard.press("Enter")
    page.locator("article:visible .text", has_text="42 2").wait_for()
    assert page.evaluate("CSS.highlights.get('match').size") > 0
    page.locator("#find").fill("")
    expect(page.locator("#count")).to_have_text("")
    assert page.locator("[data-pick^=r]:visible").count() == 3
    page.goto(f"{target.as_uri()}#r7")
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
            page.wait_for_selector("html[data-ready]")
            assert page.locator(".t.g").count() > 0
        finally:
            collecting.send_signal(signal.SIGINT)
            collecting.wait(60)

"""The pages: what they answer, what they refuse, and that data is text in them and never more."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from gymdata.checks.violations import CODES
from gymdata.commands.tour.run import prepare
from tests.rollout_files import rollout, two_turns, write_run
from tests.view.conftest import BROKEN, HOSTILE, Open, Serve

PACKAGE = Path(__file__).parents[2] / "gymdata"
PAGES = ["/", "/?where=reward+%3E+0", "/rollout?id=plain-0", "/data/tokens?id=plain-0", "/break?id=none", "/pairs",
         "/data/why?id=plain-0&turn=0&k=0", "/group?id=group-plain", "/comparisons", "/training",
         "/static/view.css", "/static/app.js"]  # fmt: skip


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    called = json.dumps([{"function": {"name": HOSTILE, "arguments": {HOSTILE: HOSTILE}}}])
    messages = [
        {"role": "system", "content": HOSTILE},
        {"role": HOSTILE, "content": HOSTILE, "name": HOSTILE},
        {"role": "assistant", "content": HOSTILE, "reasoning": HOSTILE, "turn": 0, "tool_calls": called},
        {"role": "assistant", "content": HOSTILE, "turn": 1, "tool_calls": HOSTILE},
    ]
    row = rollout(HOSTILE, 0, 1.0, BROKEN, messages=messages, policy=HOSTILE, stop_reason=HOSTILE, status=HOSTILE,
                  rewards=[{"name": HOSTILE, "value": 1.0}, {"name": "b", "value": None}])  # fmt: skip
    plain = rollout("plain", 0, 0.0, two_turns(20, 40))
    return write_run(tmp_path / "run", [row, plain])


@pytest.mark.parametrize(
    ("address", "query"),
    [
        ("/", {}),
        ("/", {"by": "group"}),
        ("/", {"where": HOSTILE, "task": HOSTILE, "status": HOSTILE}),
        ("/rollout", {"id": f"{HOSTILE}-0"}),
        ("/break", {"id": f"{HOSTILE}-0", "turn": "1"}),
        ("/group", {"id": f"group-{HOSTILE}"}),
        ("/rollout", {"id": HOSTILE}),
        ("/" + urllib.parse.quote(HOSTILE), {}),
    ],
    ids=["list", "groups", "filter", "rollout", "break", "group", "no rollout", "no page"],
)
def test_what_comes_from_data_is_text_on_every_page(site: Open, hostile: Path, address: str, query: dict[str, str]):
    """Markup, attributes, terminal escapes, bidirectional marks and templates in data are shown, not acted on."""
    answer = site(hostile).get(address, **query)
    assert answer.status_code in (200, 404, 422)
    assert "<script>window" not in answer.text
    assert not re.search(r"<(img|svg)[^>]*on\w+=", answer.text)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", answer.text)
    assert "{{7*7}}" in answer.text
    assert not re.search(r"\son\w+=", re.sub(r'"[^"]*"', '""', re.sub(r">[^<]*<", "><", answer.text)))
    assert not re.search(r"<[^>]+\sstyle=", answer.text)
    assert "unsafe" not in answer.headers["content-security-policy"]


@pytest.mark.parametrize("address", ["/", "/data/state", "/static/app.js", "/static/nothing.js", "/nothing"])
def test_every_answer_forbids_what_the_pages_do_not_need(site: Open, hostile: Path, address: str):
    """Scripts and styles from the server itself only, nothing inline, no framing, no sniffing, no caching."""
    headers = site(hostile).get(address).headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", ""])
def test_a_request_that_names_another_machine_is_refused(site: Open, hostile: Path, host: str):
    """A page whose name was made to point here reads nothing."""
    answer = site(hostile).get("/data/state", {"host": host})
    assert answer.status_code == 403
    assert "rollouts" not in answer.text


def test_a_script_of_another_site_is_refused(site: Open, hostile: Path):
    """A link from elsewhere opens a page; a fetch from elsewhere gets nothing."""
    pages = site(hostile)
    for address, mode, status in (("/", "navigate", 200), ("/", "no-cors", 403), ("/data/state", "cors", 403)):
        headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": mode}
        assert pages.get(address, headers).status_code == status


def test_static_files_are_those_of_the_folder(serve: Serve, hostile: Path):
    """No address leads out of the folder of static files."""
    base = serve(hostile)
    for name in ("../app.py", "..%2fapp.py", "/etc/passwd", "vendor/../../run.py", "%2e%2e/pages.py", "%00", "a" * 300):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{base}/static/{name}", timeout=30)
        assert refused.value.code == 404, name
        assert b"import" not in refused.value.read(), name


def test_scripts_and_styles_are_small():
    """Less than 150 kB of JavaScript is installed, and it names no address but in comments of its authors."""
    static = PACKAGE / "commands" / "view" / "static"
    scripts = list(static.rglob("*.js"))
    assert sum(file.stat().st_size for file in scripts) < 150_000
    for file in [f for f in scripts if f.parent == static]:
        assert not re.search("https?://", file.read_text())


def test_tokens_are_the_recorded_ids(site: Open, tmp_path: Path):
    """The token view gets ids, log-probabilities and kinds of turns as they are on disk."""
    run = write_run(tmp_path / "run", [rollout("t", 0, 1.0, BROKEN)])
    first, second = site(run).get("/data/tokens", id="t-0").json()["turns"]
    assert (first["context"], first["ids"], first["logprob"]) == ([1, 20], [10, 11, 2], [-1.0, -2.0, -3.0])
    assert (second["kind"], second["prefix"], second["parent"]) == ("break", 3, 0)
    assert second["context"] == [99, 2, 30]


def test_changed_tokens_are_not_shown(site: Open, tmp_path: Path):
    """A rollout whose tokens do not match their digests shows its messages and the fault, and no tokens."""
    row = rollout("t", 0, 1.0, two_turns(20, 40))
    row["turns"][1]["generation_token_ids"] = [41, 2]
    pages = site(write_run(tmp_path / "run", [row]))
    answer = pages.get("/rollout", id="t-0")
    assert answer.status_code == 200
    assert "T209" in answer.text
    assert "question t" in answer.text
    answer = pages.get("/data/tokens", id="t-0")
    assert answer.status_code == 422
    assert "T209" in answer.json()["error"]


def test_a_break_shows_both_sides(site: Open, tmp_path: Path):
    """The page of a break has its code, the tokens of both sides, and the explanation of ``validate --explain``."""
    pages = site(write_run(tmp_path / "run", [rollout("t", 0, 1.0, BROKEN)]))
    answer = pages.get("/break", id="t-0", turn=1)
    assert answer.status_code == 200
    assert "T200" in answer.text
    assert CODES["T200"].explanation.split(";")[0] in answer.text.replace("&#39;", "'")
    marked = re.findall(r'class="t[^"]* dif" title="id (\d+) at (\d+)"', answer.text)
    assert {("11", "3"), ("99", "3")} <= set(marked)
    assert ">11 </span>" in answer.text  # without a tokenizer ids stand apart
    assert pages.get("/break", id="t-0", turn=0).status_code == 404


def test_the_pages_need_the_base_install_only(hostile: Path, tmp_path: Path):
    """Every page, style and script is there without torch, transformers or any library that only an extra brings, and in
    a package that is reached through a link, as in a linked home."""
    code = f"""
import sys
from gymdata.errors import BROUGHT_BY
sys.modules |= dict.fromkeys(BROUGHT_BY)
from pathlib import Path
from starlette.testclient import TestClient
from gymdata.commands.view.app import create_app
from gymdata.commands.view.settings import ViewConfig
with TestClient(create_app([Path({str(hostile)!r})], ViewConfig()), base_url="http://localhost") as client:
    for page in {PAGES!r}:
        print(page, client.get(page).status_code)
"""
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "gymdata").symlink_to(PACKAGE)
    environment = {"PYTHONPATH": str(tmp_path / "linked")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert answers == dict.fromkeys(PAGES, "200") | {"/break?id=none": "404"}


def test_a_rank_is_among_the_recorded_alternatives(site: Open, tmp_path: Path):
    """The likeliest token has rank 1; one that is not among the recorded ones comes after all of them."""
    row = rollout("t", 0, 1.0, [([1, 20], [10, 11, 2])])
    likely = [{"id": 5, "log_prob": -0.1}, {"id": 10, "log_prob": -1.0}]
    row["turns"][0]["top_log_probs"] = [likely, likely, [{"id": 2, "log_prob": -3.0}]]
    pages = site(write_run(tmp_path / "run", [row]))
    (turn,) = pages.get("/data/tokens", id="t-0").json()["turns"]
    assert (turn["rank"], turn["top"]) == ([2, 3, 1], 2)
    listed = pages.get("/data/token", id="t-0", turn=0, k=0).json()["alternatives"]
    assert [one["id"] for one in listed] == [5, 10]


def test_the_reward_of_a_turn_stands_with_its_message_and_its_tokens(site: Open, tmp_path: Path):
    """A turn that a step gave nothing has no reward there, and 0 is a reward."""
    row, other = (rollout(task, 0, 0.2, two_turns(20, 40)) for task in "ab")
    row["turns"][0]["reward"], other["turns"][1]["reward"] = 0.2, 0.0
    pages = site(write_run(tmp_path / "run", [row, other]))
    for name, of_turns, shown in (("a-0", [pytest.approx(0.2), None], ["0.2"]), ("b-0", [None, 0.0], ["0"])):
        data = pages.get("/data/tokens", id=name).json()
        assert [turn["reward"] for turn in data["turns"]] == of_turns
        assert re.findall(r'class="earned">reward ([^<]*)<', pages.page("/rollout", id=name)) == shown


def test_the_pages_that_the_questions_of_the_tour_name_are_there(site: Open, tmp_path: Path) -> None:
    """The viewer opens its folder, and answers for each question's page."""
    toured = prepare(tmp_path / "out")
    pages = site(toured.output, tokenizer=toured.output / "tokenizer")
    assert {step.page: pages.get(step.page).status_code for step in toured.steps} == {s.page: 200 for s in toured.steps}

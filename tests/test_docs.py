"""The README and the topics are true: their blocks run, their commands and flags exist, and every command is in them."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import duckdb
import jsonschema
import pytest
import yaml

from gymdata.cli.docs import TOPICS as TOPIC_NAMES
from gymdata.cli.docs import configurable, read_page
from gymdata.cli.examples import EXAMPLES
from gymdata.cli.main import COMMANDS, main
from tests.cli.parsers import help_of
from tests.docs_blocks import BLOCKS, PAGES, ROOT, RUN, TOPICS, Block, forked, prepare, run, stand_in
from tests.forks import TRAINING, forks

PAGES_MADE = runpy.run_path(str(ROOT / ".ci" / "docs_pages.py"))
README = (ROOT / "README.md").read_text(encoding="utf-8")


def light(page: Path) -> list[Block]:
    return [b for b in BLOCKS if b.page == page.stem and b.language in RUN and not b.reason and b.mark != "engine"]


def slow_or_quick(page: Path) -> Any:
    """Pages with the most commands are run by ``make test-full``."""
    return pytest.param(page, marks=pytest.mark.full) if page.stem in ("your-data", "installing") else page


def lines_of_gymdata() -> list[list[str]]:
    """Every call of gymdata in a block, run or not."""
    calls = [re.split(r" [|&#] ?", command)[0] for block in BLOCKS for command, _ in block.commands]
    return [shlex.split(call)[1:] for call in calls if call.startswith("gymdata ")]


@pytest.mark.parametrize("page", [slow_or_quick(p) for p in PAGES if light(p)], ids=lambda p: p.stem)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one folder: every command ends with the exit code that the page gives, and shown figures are its own."""
    monkeypatch.setenv("COLUMNS", "200")
    prepare(tmp_path)
    if any("runs/x" in block.text for block in light(page)):
        stand_in(tmp_path)
    sql = duckdb.connect()
    sql.execute(f"SET file_search_path = '{tmp_path}'")
    for block in light(page):
        if block.language == "sql":
            for statement in duckdb.extract_statements(block.text):
                sql.execute(statement).fetchall()
        else:
            run(block, tmp_path)


@pytest.mark.engine
@pytest.mark.timeout(1200)
@pytest.mark.matrix("README")
@pytest.mark.parametrize("pages", [["README"], [page.stem for page in PAGES]], ids=["README", "every page"])
def test_the_blocks_that_sample_and_train_run(
    pages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One scenario: the README collects, makes pairs and trains, and the topics go on from its run."""
    pytest.importorskip("vllm")
    pytest.importorskip("trl")
    prepare(tmp_path)
    first = ["README", "train-and-watch", "batch-rl"]
    scenario = sorted(
        (b for b in BLOCKS if b.mark == "engine" and b.page in pages),
        key=lambda b: (first.index(b.page) if b.page in first else 9, b.line),
    )
    # What a trainer's environment has is read when its libraries are loaded.
    for name in ("HF_HUB_OFFLINE", "TRL_EXPERIMENTAL_SILENCE"):
        monkeypatch.setenv(name, "1")
    with forks(*TRAINING) as processes:
        for block in scenario:
            run(block, tmp_path, forked(processes))


def test_a_mark_is_one_of_three() -> None:
    """A block runs, runs with an engine, or says why it does not."""
    for block in (b for b in BLOCKS if b.language in RUN):
        assert block.mark in ("", "engine") or block.reason or block.exits, block.name
        assert block.reason is None or len(block.reason.split()) >= 2, block.name


def test_every_block_has_a_language() -> None:
    """A block without one would never be run."""
    assert [b.name for b in BLOCKS if b.language not in RUN | {"text", "json"}] == []


def test_shown_commands_exist_with_their_flags() -> None:
    """Each shown command is known, and every long flag that it uses is in its help."""
    for command in lines_of_gymdata():
        flags = [word.split("=")[0] for word in command if word.startswith("--")]
        assert [flag for flag in flags if flag not in help_of(command[0])] == [], command


def test_the_readme_is_short_and_names_every_command() -> None:
    """At most 200 lines, and a command that it does not name is not documented."""
    assert len(README.splitlines()) <= 200
    assert [name for name in COMMANDS if f"`{name}`" not in README] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_links_and_sample_files_are_there(page: Path) -> None:
    """Every relative link leads to a file, and every named file of sample_data exists."""
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
    named = re.findall(r"sample_data/[\w./-]+", text)
    assert [name for name in named if not (ROOT / name.rstrip(".")).exists()] == []


def test_a_function_that_a_page_places_in_a_file_is_there() -> None:
    """``gymdata/FILE.py:NAME`` is defined at the top of that file."""
    named = re.findall(r"`(gymdata/[\w/]+\.py):(\w+)`", (ROOT / ".github" / "CONTRIBUTING.md").read_text())
    assert len(named) == 8
    for file, name in named:
        defined = {getattr(node, "name", None) for node in ast.parse((ROOT / file).read_text()).body}
        assert name in defined, f"{file} has no {name}"


def test_topics_are_the_files_and_the_readme_links_them() -> None:
    """The list of topics, the folder and the README's links agree."""
    written = sorted(f.stem for f in TOPICS.glob("*.md"))
    assert sorted(TOPIC_NAMES) == written
    assert [name for name in written if f"(gymdata/docs/{name}.md)" not in README] == []


def test_what_is_made_of_the_code_is_that_of_the_code() -> None:
    """The tables of codes, formats, losses, … in pages, and the files for agents: `make schemas` writes them."""
    stale = [path.name for path, text in PAGES_MADE["files"](TOPICS) if path.read_text("utf-8") != text]
    assert stale == []


def test_every_table_has_a_page() -> None:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    assert [name for name in PAGES_MADE["TABLES"] if sum(f"<!-- {name} -->\n" in text for text in texts) != 1] == []


def test_the_page_of_differences_names_those_of_published_systems() -> None:
    """Keys with another default, lists and classes that are read otherwise: each has a row that says what is done here."""
    rows = [line.split("|") for line in (TOPICS / "differences.md").read_text().splitlines() if line.startswith("|")]
    subjects = {row[1].strip() for row in rows if all(cell.strip() for cell in row[2:5])}
    assert {
        "`enabled`",
        "`output_dir`",
        "`reward_function`",
        "inner lists of trajectories",
        "`NaiveExperienceMaker` (LightRFT)",
        "prompt ids of a server (NeMo Gym)",
    } <= subjects


def test_the_page_of_credit_says_how_batches_move() -> None:
    """`to`, `to_device` and `pin_memory` of a batch are documented."""
    text = (TOPICS / "batch-rl.md").read_text()
    assert all(f"`{name}" in text for name in ("batch.to(device)", "to_device", "pin_memory()"))


def test_every_setting_is_on_the_page_of_settings() -> None:
    """`gymdata docs settings`: each setting of each command with its flag and default."""
    text = read_page("settings").text
    assert "- `min_margin` (`--min-margin`). Minimum score difference, exclusive (default: 0)." in text
    for command, (kind, _) in configurable().items():
        section = text.partition(f"\n## {command}\n")[2].partition("\n## ")[0]
        assert [name for name in kind.model_fields if f"\n- `{name}` (" not in section] == []


@pytest.mark.parametrize("name", ["sft", "dpo", "kto", "reward", "rl", "finetune"])
def test_the_shipped_config_files_fit_their_schemas(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An editor that has the schema from `gymdata docs --schema` marks nothing in them, and marks a wrong type."""
    command = name if name == "finetune" else f"train-{name}"
    assert main(["docs", "--schema", command]) == 0
    check = jsonschema.Draft202012Validator(json.loads(capsys.readouterr().out))
    settings = yaml.safe_load((ROOT / "sample_data" / f"{name}.yaml").read_text(encoding="utf-8"))
    assert [error.message for error in check.iter_errors(settings)] == []
    wrong = {"finetuning": 3} if name == "finetune" else {"max_length": "long"}
    assert [list(error.path) for error in check.iter_errors(settings | wrong)] == [list(wrong)]


def test_a_skill_names_every_command_and_topic(capsys: pytest.CaptureFixture[str]) -> None:
    """`docs --skill` is Markdown with the front matter of a skill, made from the commands, their examples and the topics."""
    assert main(["docs", "--skill"]) == 0
    _, front, body = capsys.readouterr().out.split("---\n", 2)
    assert yaml.safe_load(front)["name"] == "gymdata"
    assert len(yaml.safe_load(front)["description"]) < 1024
    assert [name for name in COMMANDS if f"- `{name}`: {COMMANDS[name][2]}" not in body] == []
    assert [name for name in TOPIC_NAMES if f"- `{name}`: {read_page(name).summary}" not in body] == []
    shown = [line.strip() for line in body.splitlines()]
    assert [
        lines[0] for lines in EXAMPLES.values() if not {part.strip() for part in lines[0].splitlines()} <= {*shown}
    ] == []


def test_llms_txt_links_every_topic(capsys: pytest.CaptureFixture[str]) -> None:
    """`docs --llms` has a title, a summary and a link to a file that is there for each topic that is a file."""
    assert main(["docs", "--llms"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("# gymdata\n\n> ")
    links = re.findall(r"^- \[.+\]\((.+)\): .+$", shown, re.MULTILINE)
    assert links == [f"gymdata/docs/{name}.md" for name in TOPIC_NAMES]
    assert [link for link in links if not (ROOT / link).is_file()] == []


@pytest.mark.parametrize(
    "words", [["--skill", "--llms"], ["audit", "--skill"], ["--schema", "pears"], ["--schema", "show"]]
)
def test_docs_takes_one_request_at_a_time(words: list[str]) -> None:
    """Two of them, and a command without a file of settings, are usage errors."""
    assert main(["docs", *words]) == 2


def test_docs_lists_topics_with_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a topic, each name is there with the first words of its summary."""
    assert main(["docs"]) == 0
    shown = capsys.readouterr().out
    for name in TOPIC_NAMES:
        assert f"{name}  " in shown
        assert " ".join(read_page(name).summary.split()[:3]) in shown


@pytest.mark.parametrize("name", TOPIC_NAMES)
def test_docs_knows_every_topic_by_its_title(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As README and the pages spell it, in one argument or in several."""
    page = read_page(name)
    for words in ([page.title], page.title.lower().split()):
        assert main(["docs", *words]) == 0
        assert capsys.readouterr().out == page.text


@pytest.mark.parametrize("words", ["your-data", "your data", "your-data.md", "data"])
def test_docs_prints_a_topic_as_it_is_when_piped(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By file name, or by a word that no other topic has; the marks of the tests are left out."""
    assert main(["docs", *words.split()]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("# Your data\n\nAnswers and preferences as text")
    assert "<!--" not in shown
    assert main(["docs", "your"]) == 2


def test_docs_leaves_lines_of_code_whole_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that is broken at the terminal's width would be copied as two."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)
    assert main(["docs", "scale"]) == 0
    shown = re.sub(r"\x1b(\[[0-9;]*m|\]8;.*?\x1b\\)", "", capsys.readouterr().out).splitlines()
    long = "accelerate launch --config_file fsdp.yaml -m gymdata train-rl runs/x/experiences-grpo -m MODEL -o runs/policy-rl"
    assert len(long) > 80
    assert f"  {long}" in shown
    assert max(len(line) for line in shown if not line.startswith("  ")) <= 80


def test_docs_shows_every_word_of_a_table_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A word that is wider than its column continues on the next line."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)
    for name in TOPIC_NAMES:
        assert main(["docs", name]) == 0
        shown = capsys.readouterr().out
        assert shown.count("…") == read_page(name).text.count("…"), name


def test_docs_answers_an_unknown_topic_with_what_explains_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and the nearest topic, the help of a command, or the explanation of a code."""
    assert main(["docs", "finetun"]) == 2
    assert "did you mean 'finetune'" in capsys.readouterr().err
    elsewhere_of = {
        "demo": "gymdata demo --help",
        "T209": "gymdata validate --explain T209",
        "xyz": "`gymdata docs` lists them with a line each",
    }
    for word, elsewhere in elsewhere_of.items():
        assert main(["docs", word]) == 2
        assert f"→ {elsewhere}\n" in capsys.readouterr().err


def test_docs_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    """One object: all topics, or one with its text."""
    assert main(["docs", "--json"]) == 0
    assert [t["name"] for t in json.loads(capsys.readouterr().out)["topics"]] == list(TOPIC_NAMES)
    assert main(["docs", "audit", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"].startswith("# Audit\n")

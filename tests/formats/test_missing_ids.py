"""A model call that lacks ids where others have them, and a wrong number of log-probabilities, make a row unusable:
imported, what the model sampled would be context, and ratios would be of other tokens."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

import gymdata
from gymdata.commands.validate.run import validate
from gymdata.store import read_table
from gymdata.store.columns import to_rows
from gymdata.store.reading import DataWarning
from tests.formats.trajectories import lines, rejected, verifiers_traces, write_lines
from tests.rollout_files import rollout, two_turns, write_run

PROMPTS, GENERATIONS = ([1, 2], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7]), ([3, 4], [6], [8, 9])


def nemo_gym() -> dict[str, Any]:
    output: list[dict[str, Any]] = []
    for prompt, generation in zip(PROMPTS, GENERATIONS, strict=True):
        output += [
            {
                "type": "function_call", "name": "f", "arguments": "{}", "call_id": f"c{len(output)}",
                "prompt_token_ids": prompt, "generation_token_ids": generation,
                "generation_log_probs": [-0.5] * len(generation),
            },
            {"type": "function_call_output", "call_id": f"c{len(output)}", "output": "r"},
        ]  # fmt: skip
    return {"responses_create_params": {"input": "q"}, "response": {"output": output}, "reward": 1.0}


def nat() -> dict[str, Any]:
    episode: list[dict[str, Any]] = [{"role": "user", "content": "q"}]
    for prompt, generation in zip(PROMPTS, GENERATIONS, strict=True):
        tokens = [{"token": f"token_id:{i}", "logprob": -0.5, "top_logprobs": []} for i in generation]
        ids = {"prompt_token_ids": prompt}
        episode.append({"role": "assistant", "content": "a", "logprobs": {"content": tokens}, "metadata": ids})
    return {"episode": episode, "reward": 1.0, "shaped_rewards": None, "metadata": {}}


def atif() -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"source": "user", "message": "q"}]
    for prompt, generation in zip(PROMPTS, GENERATIONS, strict=True):
        ids = {"prompt_token_ids": prompt, "completion_token_ids": generation, "logprobs": [-0.5] * len(generation)}
        steps.append({"source": "agent", "message": "a", "metrics": ids})
    return {"schema_version": "ATIF-v1.7", "agent": {"name": "a"}, "steps": steps}


ROWS = {"nemo-gym": nemo_gym, "nat-trajectories": nat, "atif": atif}
COLUMNS = {"nemo-gym": "response.output", "nat-trajectories": "episode", "atif": "steps"}
IDS = {"nemo-gym": "generation_token_ids", "atif": "completion_token_ids"}
#: What is changed in a row of each format, its code, and the reason: a wrong number of log-probabilities, or ids that are
#: missing where other calls have them.
PARTS: dict[str, list[tuple[tuple[Any, ...], Any, str, str]]] = {
    "nemo-gym": [
        (("response", "output", 0, "generation_log_probs"), [-0.5], "L301", "turn 0; expected 2; got 1"),
        (("response", "output", 2, "generation_log_probs"), [-0.5] * 3, "L301", "turn 1; expected 1; got 3"),
        (("response", "output", 4, "generation_log_probs"), [], "L301", "turn 2; expected 2; got 0"),
        (("response", "output", 2, "prompt_token_ids"), [], "T205", "prompt_token_ids missing, null or empty"),
        (("response", "output", 4, "prompt_token_ids"), None, "T205", "prompt_token_ids missing, null or empty"),
        (("response", "output", 2, "generation_token_ids"), [], "T205", "generation_token_ids missing, null or empty"),
        (("response", "output", 0, "generation_token_ids"), None, "T205", "generation_token_ids missing, null or empty"),
        (("response", "output", 0), {"type": "message", "role": "assistant", "content": "a"}, "T205", "no ids"),
    ],
    "nat-trajectories": [
        (("episode", 1, "logprobs", "content", 1, "logprob"), None, "L301",
         "episode[1].logprobs.content[1].logprob: got null"),
        (("episode", 2, "logprobs", "content", 0, "token"), "Hi", "T205",
         "episode[2].logprobs.content[0].token: got 'Hi', expected token_id:N"),
        (("episode", 3, "logprobs", "content", 1, "token"), "token_id:99999999999", "T205",
         "episode[3].logprobs.content[1].token: got 'token_id:99999999999'"),
        (("episode", 1, "metadata"), None, "T205", "episode[1].metadata.prompt_token_ids: missing"),
        (("episode", 1, "metadata", "prompt_token_ids"), [], "T205", "episode[1].metadata.prompt_token_ids"),
        (("episode", 2, "logprobs"), None, "T205", "episode[2].logprobs.content: missing or empty"),
        (("episode", 2, "logprobs"), [-0.5], "T205", "episode[2].logprobs.content: missing or empty"),
    ],
    "atif": [
        (("steps", 1, "metrics", "logprobs"), [-0.5], "L301", "steps[1].metrics.logprobs: got 1, expected 2"),
        (("steps", 2, "metrics", "logprobs"), [], "L301", "steps[2].metrics.logprobs: got 0, expected 1"),
        (("steps", 3, "metrics", "logprobs"), [-0.5] * 22, "L301", "steps[3].metrics.logprobs: got 22, expected 2"),
        (("steps", 1, "metrics", "prompt_token_ids"), [], "T205", "steps[1].metrics: expected prompt_token_ids and"),
        (("steps", 3, "metrics", "completion_token_ids"), None, "T205",
         "steps[3].metrics: expected prompt_token_ids and"),
        (("steps", 2, "metrics"), None, "T205", "steps[2].metrics: expected prompt_token_ids and"),
        (("steps", 2, "llm_call_count"), 2, "T205", "steps[2].metrics: expected prompt_token_ids and"),
    ],
}  # fmt: skip


def changed(name: str, path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The row of a format with another value at ``path``."""
    row = ROWS[name]()
    holder: Any = row
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return row


@pytest.mark.parametrize("name", ROWS)
def test_a_row_with_a_part_of_its_tokens_is_rejected_by_its_place(name: str, tmp_path: Path) -> None:
    """Alone: the rows around it are imported."""
    rows = [ROWS[name](), *(changed(name, path, value) for path, value, _, _ in PARTS[name]), ROWS[name]()]
    named = rejected(write_lines(tmp_path / "a.jsonl", rows), name)
    assert [bad["line"] for bad in named] == list(range(2, len(rows)))
    for bad, (_, _, code, reason) in zip(named, PARTS[name], strict=True):
        assert (bad["code"], reason in bad["reason"]) == (code, True), bad


@pytest.mark.parametrize("path", [PARTS["nemo-gym"][0][0], PARTS["nemo-gym"][3][0]])
def test_import_rejects_what_validate_finds_in_the_file(path: tuple[Any, ...], tmp_path: Path) -> None:
    """At the same turn, with the same code."""
    file = write_lines(tmp_path / "a.jsonl", [nemo_gym(), changed("nemo-gym", path, [])])
    (found,) = (v for v in validate(file).violations if v.severity == "error")
    (bad,) = rejected(file)
    assert (found.code, found.row) == (bad["code"], bad["line"] - 1)
    assert f"turn {found.turn}" in bad["reason"]


def ending(name: str, text: str) -> list[dict[str, Any]]:
    """The lines of a rollout in a format whose last answer is ``text`` and has no ids, as its first call has."""
    asked, said, answer = (
        {"role": role, "content": t} for role, t in (("user", "q"), ("assistant", "a"), ("assistant", text))
    )
    chat = [asked, said, asked, answer]
    if name == "rllm-traces":
        first = {"prompt_token_ids": [1, 2], "completion_token_ids": [3], "logprobs": [-0.5], "timestamp": 1.0}
        last = {"prompt_token_ids": [], "completion_token_ids": None, "timestamp": 2.0}
        calls = (chat[:1], said, first), (chat[:3], answer, last)
        return [{"trace_id": f"{n}", "session_id": "s", "messages": before, "response_message": made, **ids}
                for n, (before, made, ids) in enumerate(calls)]  # fmt: skip
    if name == "rllm":
        steps = [{"chat_completions": chat[:2], "prompt_ids": [1, 2], "response_ids": [3], "logprobs": [-0.5]},
                 {"chat_completions": chat, "prompt_ids": [], "response_ids": None}]  # fmt: skip
        return [{"id": "a:0", "trajectories": [{"steps": steps}]}]
    row = verifiers_traces(4) if name == "verifiers-traces" else ROWS[name]()
    if name == "verifiers-traces":
        row["traces"][0]["nodes"][-1] |= {"token_ids": [], "mask": [], "logprobs": [], "message": answer}
    elif name == "nemo-gym":
        row["response"]["output"][4:] = [{"type": "message", **answer}]
    elif name == "atif":
        row["steps"][-1] = {"source": "agent", "message": text}
    else:
        row["episode"][-1] = answer
    return [row]


@pytest.mark.parametrize("name", [*ROWS, "rllm", "rllm-traces", "verifiers-traces"])
def test_a_last_answer_without_ids_is_rejected_in_every_format(name: str, tmp_path: Path) -> None:
    """It would not be trained, although the reward is for it, too. An empty one lost nothing: its prompt was too long."""
    (bad,) = rejected(write_lines(tmp_path / "lost.jsonl", ending(name, "a")), name)
    assert (bad["code"], bad["reason"][-38:]) == ("T205", ", and other model calls have their ids"), bad
    summary = gymdata.import_rollouts(write_lines(tmp_path / "empty.jsonl", ending(name, " ")), tmp_path / "run")
    assert (summary.format, summary.rejected, summary.without_token_data) == (name, 0, 0)
    assert summary.turns == {"rllm": 1, "rllm-traces": 1, "verifiers-traces": 1}.get(name, 2)


def test_validate_and_import_agree_about_a_last_answer_without_ids(tmp_path: Path) -> None:
    """In a row of NeMo Gym as it is: text without ids is an error, and an empty answer is an empty generation."""
    file = write_lines(tmp_path / "a.jsonl", [*ending("nemo-gym", "a"), *ending("nemo-gym", "")])
    report = validate(file, select=["T205", "T212"])
    assert [(v.code, v.row, v.turn) for v in report.violations] == [("T205", 0, 2), ("T212", 1, 2)]
    assert (report.errors, report.trainable) == (1, 1)


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_which_no_call_has_all_its_ids_are_text(name: str, tmp_path: Path) -> None:
    """The summary counts them; ids that are there and are not read are a warning."""
    text = json.loads(json.dumps(ROWS[name]()).replace("prompt_token_ids", "prompt_ids"))
    with pytest.warns(DataWarning, match=f"{name}: token ids in the `{COLUMNS[name]}` of 1 row are not read"):
        summary = gymdata.import_rollouts(write_lines(tmp_path / "a.jsonl", [text]), tmp_path / "run")
    assert (summary.rejected, summary.without_token_data) == (0, 1)


@pytest.mark.parametrize("name", ROWS)
def test_log_probabilities_that_are_not_given_are_not_known(name: str, tmp_path: Path) -> None:
    """Null, or NaN where the format has one for each token: the ids are there, which each of the turns is told of once
    (L302), as a warning where no turn has any; ratios refuse the rollout, and SFT takes it."""
    text = json.dumps(ROWS[name]()).replace('"logprob": -0.5', '"logprob": NaN')
    for numbers in ("[-0.5, -0.5]", "[-0.5]"):
        text = text.replace(f'probs": {numbers}', 'probs": null')
    file = write_lines(tmp_path / "a.jsonl", [json.loads(text)])
    summary = gymdata.import_rollouts(file, tmp_path / "run")
    assert (summary.rejected, summary.turns) == (0, 3)
    report = validate(tmp_path / "run", select=["L3"])
    assert (report.by_code, report.errors, report.warnings) == ({"L302": 3}, 0, 3)


@pytest.mark.parametrize("name", ROWS)
def test_answers_that_are_no_turns_come_back(name: str, tmp_path: Path) -> None:
    """A run may have answers that were given, such as examples; as gymdata wrote them they are no missing ids."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "q"}]
    for n in (0, None, 1):
        messages += [{"role": "assistant", "content": f"a{n}", "turn": n}, {"role": "user", "content": "and"}]
    run = write_run(tmp_path / "run", [rollout("t", 0, 1.0, two_turns(5, 20), messages=messages)])
    gymdata.export(run, tmp_path / "a.jsonl", name)
    (row,) = lines(tmp_path / "a.jsonl")
    row["reward" if name != "atif" else "session_id"] = 0.25 if name != "atif" else "s"  # then it is read as theirs
    summary = gymdata.import_rollouts(write_lines(tmp_path / "b.jsonl", [row]), tmp_path / "again")
    assert (summary.rejected, summary.turns) == (0, 2)
    (before,), (after,) = (to_rows(read_table(path)) for path in (run, tmp_path / "again"))
    assert [(m["content"], m["turn"]) for m in after["messages"]] == [
        (m["content"], m["turn"]) for m in before["messages"]
    ]


def test_a_failed_attempt_with_a_part_of_its_ids_is_a_failed_attempt(tmp_path: Path) -> None:
    """As its writer says; its row is kept as it is."""
    row = changed("nemo-gym", ("response", "output", 2, "prompt_token_ids"), []) | {"error": "sandbox lost"}
    run = tmp_path / "run"
    summary = gymdata.import_rollouts(write_lines(tmp_path / "a.jsonl", [nemo_gym(), row]), run)
    assert (summary.rollouts, summary.rejected, summary.failed) == (1, 0, {"environment: sandbox lost": 1})
    (attempt,) = lines(run / "failures.jsonl")
    assert json.loads(attempt["task"])["response"] == row["response"]


def test_log_probabilities_that_are_no_list_are_named(tmp_path: Path) -> None:
    """Also where they look like none."""
    rows = [changed("nemo-gym", PARTS["nemo-gym"][0][0], numbers) for numbers in ("x", "", False, {}, 0)]
    named = rejected(write_lines(tmp_path / "a.jsonl", rows))
    expected = ("S102", "generation_log_probs; turn 0; expected a list; got")
    assert [(bad["code"], bad["reason"][:50]) for bad in named] == [expected] * 5


@pytest.mark.parametrize(
    ("name", "path", "reason"),
    [
        ("nemo-gym", ("response", "output", 0, "role"), "item 1: token ids"),
        ("nat-trajectories", ("episode", 1, "role"), "episode[1].role: got 'user' with token ids"),
        ("atif", ("steps", 1, "source"), "steps[1].source: got 'user' with token ids"),
    ],
)
def test_ids_that_no_model_sampled_are_named(name: str, path: tuple[Any, ...], reason: str, tmp_path: Path) -> None:
    """They are no turn, and those that read them as context would not say so."""
    row = changed(name, path, "user")
    if name == "nemo-gym":
        row["response"]["output"][0]["type"] = "message"
    (bad,) = rejected(write_lines(tmp_path / "a.jsonl", [row]))
    assert bad["code"] == "S102"
    assert reason in bad["reason"]


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("shaped_rewards",), [0.5], "shaped_rewards: got 1, expected 4, one per item"),
        (("episode", 1, "metadata", "prompt_token_ids"), "[1, 2]", "prompt_token_ids: got '[1, 2]', expected a valid list"),
        (("episode", 1, "logprobs", "content", 0, "top_logprobs"),
         [{"token": token, "logprob": -1.0} for token in ("token_id:3", "Hi")],
         "episode[1].logprobs.content: top_logprobs: 1 have an id"),
    ],
)  # fmt: skip
def test_a_list_of_another_length_or_type_is_named(
    path: tuple[Any, ...], value: Any, reason: str, tmp_path: Path
) -> None:
    """Rewards of steps, ids as text, and alternatives of which only some have an id."""
    file = write_lines(tmp_path / "a.jsonl", [nat(), changed("nat-trajectories", path, copy.deepcopy(value))])
    (bad,) = rejected(file)
    assert (bad["line"], bad["code"]) == (2, "S102")
    assert reason in bad["reason"]

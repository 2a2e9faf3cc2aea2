"""The recorder behind NeMo Gym's ``vllm_model``, which sends what it sends to vLLM in training, and as vLLM answers it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gymdata.rollouts.turns import expand_prompts
from tests.collect.fake_parts import END
from tests.record.scripted_engine import Recording, recording

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
#: What ``responses_api_models/vllm_model/app.py`` adds to a request with ``return_token_id_information``.
TRAINING = {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True}
FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
USER: dict[str, Any] = {"role": "user", "content": "x"}


def choice(r: Recording, messages: list[dict[str, Any]], path: str = "/s/k/v1", **more: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": messages, "tools": TOOLS, **TRAINING, **more}
    answer = r.client.post(f"{path}/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0])


@pytest.mark.parametrize("path", ["/s/k", ""], ids=["of a session", "of no session"])
def test_an_agent_of_nemo_gym_has_the_ids_that_the_rows_have(path: str, tmp_path: Path) -> None:
    """Its base URL names the session or none. Each message has the three fields, goes back with them, and /tokenize, which
    is called after an answer, gives the prompt that the engine has read."""
    call = 'CALL add {"a": 1}'
    with recording(tmp_path / "run", call, "done") as r:
        messages, saved = [USER], []
        for _ in range(2):
            one = choice(r, messages, f"{path}/v1")
            message = one["message"]
            saved.append([message[name] for name in FIELDS])
            tokens = [entry["token"] for entry in one["logprobs"]["content"]]
            assert tokens == [f"token_id:{i}" for i in message["generation_token_ids"]]
            assert [entry["top_logprobs"] for entry in one["logprobs"]["content"]] == [[]] * len(tokens)
            asked = {"model": "m", "messages": messages, "tools": TOOLS}
            answer = r.client.post(f"{path}/tokenize", json=asked)
            assert (answer.json()["tokens"], answer.json()["count"]) == (saved[-1][0], len(saved[-1][0]))
            result = {
                "role": "tool",
                "tool_call_id": (message.get("tool_calls") or [{"id": ""}])[0]["id"],
                "content": "1",
            }
            messages = [*messages, message, result]
        (key,) = r.recorder.sessions
        r.finish(key, reward=1.0)
    turns = r.row()["turns"]
    prompts = [prompt.tolist() for prompt in expand_prompts(turns)]
    assert saved == [
        [prompt, turn["generation_token_ids"], turn["generation_log_probs"]]
        for prompt, turn in zip(prompts, turns, strict=True)
    ]
    assert (saved[0][1], r.row()["n_breaks"]) == ([*call.encode(), END], 0)


def test_without_the_flag_a_message_has_none_of_these(tmp_path: Path) -> None:
    """And tokens are named by their text."""
    with recording(tmp_path / "run", "a", "b") as r:
        one = choice(r, [USER], return_tokens_as_token_ids=False)
        assert not set(FIELDS) & set(one["message"])
        assert one["logprobs"]["content"][0]["token"] == "a"
        top = choice(r, [{"role": "user", "content": "y"}], top_logprobs=1)["logprobs"]["content"][0]
        assert [other["token"] for other in top["top_logprobs"]] == [f"token_id:{ord('b')}"]


def test_ids_on_the_choice_and_on_the_message_agree(tmp_path: Path) -> None:
    """NeMo Gym compares them where it asks for both."""
    with recording(tmp_path / "run", "a") as r:
        body = {"model": "m", "messages": [USER], **TRAINING, "return_token_ids": True}
        answer = r.client.post("/s/k/v1/chat/completions", json=body).json()
        (one,) = answer["choices"]
        assert answer["prompt_token_ids"] == one["message"]["prompt_token_ids"]
        assert one["token_ids"] == one["message"]["generation_token_ids"]


def test_tokenize_takes_a_text_and_begins_no_session(tmp_path: Path) -> None:
    """As vLLM's does."""
    with recording(tmp_path / "run", context=99) as r:
        answer = r.client.post("/tokenize", json={"model": "m", "prompt": "ab"})
        assert answer.json() == {"count": 2, "max_model_len": 99, "tokens": [*b"ab"], "token_strs": None}
        assert not r.recorder.sessions


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": [USER], "add_generation_prompt": False}, "add_generation_prompt"),
        ({"messages": [USER], "chat_template": "{{ messages }}"}, "chat_template"),
        ({"messages": [USER], "color": 1}, "color"),
        ({"messages": []}, "messages"),
    ],
)
def test_what_tokenize_cannot_do_is_refused_by_its_name(body: dict[str, Any], field: str, tmp_path: Path) -> None:
    """Ids of another prompt than the engine would read are no answer."""
    with recording(tmp_path / "run") as r:
        answer = r.client.post("/s/k/tokenize", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)

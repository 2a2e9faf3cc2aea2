"""A row of each data set or log that other projects publish in a shape of its own, with the answer n.

The rows have the keys that the projects' own sources name: AlpacaFarm's and AlpacaEval's annotations; the cards of
HelpSteer, PKU-SafeRLHF, SHP, Chatbot Arena, UltraFeedback, Nectar, webgpt_comparisons and
summarize_from_feedback; RLHFlow's lists of responses; ``trajectory_to_dict`` of ART; ``Episode.to_dict`` of rLLM.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.formats.trajectories import ANSWER, QUESTION

_ASKED = QUESTION["content"]


def _said(n: int) -> dict[str, Any]:
    return ANSWER | {"content": str(n)}


def art(n: int) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": "stop", "message": _said(n)}
    return {"trajectories": [
        {"reward": 0.5, "metrics": {"exact": 1.0}, "metadata": {"level": 1}, "messages_and_choices": [QUESTION, choice],
         "tools": None, "additional_histories": [], "logs": []},
    ]}  # fmt: skip


def rllm(n: int) -> dict[str, Any]:
    said = [QUESTION, _said(n)]
    again = [*said, {"role": "user", "content": "Sure?"}, ANSWER]
    ids = ([1], [2], [-0.5]), ([1, 2, 3], [4, 5], [-0.25, -1.5])
    steps = [
        {"prompt_ids": prompt, "response_ids": response, "logprobs": numbers, "chat_completions": chat, "reward": 0.5}
        for chat, (prompt, response, numbers) in zip((said, again), ids, strict=True)
    ]
    return {
        "id": f"sum:{n}", "task": {"question": _ASKED}, "termination_reason": "env_done", "is_correct": True,
        "trajectories": [{"uid": "u", "name": "solver", "task": {"question": _ASKED}, "steps": steps, "reward": 1.0}],
        "metrics": {"turns": 2.0}, "info": {},
    }  # fmt: skip


def arena(n: int) -> dict[str, Any]:
    return {
        "question_id": "q", "model_a": "m", "model_b": "k", "winner": "model_b", "judge": "u", "turn": 1,
        "conversation_a": [QUESTION, ANSWER | {"content": "x"}], "conversation_b": [QUESTION, _said(n)],
    }  # fmt: skip


def arena_texts(n: int) -> dict[str, Any]:
    return {
        "id": 1, "model_a": "m", "model_b": "k", "prompt": json.dumps([_ASKED]), "response_a": json.dumps(["x"]),
        "response_b": json.dumps([str(n)]), "winner_model_a": 0, "winner_model_b": 1, "winner_tie": 0,
    }  # fmt: skip


def ultrafeedback(n: int) -> dict[str, Any]:
    rated = {
        "model": "m", "principle": "p", "custom_system_prompt": "Be.", "response": str(n), "critique": "Good.",
        "overall_score": 8.5,
        "annotations": {"honesty": {"Rating": "4", "Rationale": "r"}, "truthfulness": {"Rating": "N/A"}},
    }  # fmt: skip
    return {"source": "s", "instruction": _ASKED, "models": ["m"], "completions": [rated], "correct_answers": []}


#: Rows of each format.
PUBLISHED: dict[str, Callable[[int], dict[str, Any]]] = {
    "alpaca-farm": lambda n: {
        "instruction": _ASKED, "input": "", "output_1": "x", "output_2": str(n), "preference": 2, "raw_preference": 4,
    },
    "arena": arena,
    "art": art,
    "helpsteer-preference": lambda n: {
        "domain": "general", "language": "english", "context": [QUESTION], "response1": "x", "response2": str(n),
        "overall_preference": 2, "individual_preference": [{"score": 2, "reasoning": "r"}],
    },
    "nectar": lambda n: {
        "prompt": f"\n\nHuman: {_ASKED}\n\nAssistant: ", "turns": 1, "num_responses": 2, "source": ["s"],
        "good_natured": True,
        "answers": [{"answer": "x", "model": "m", "rank": 2.0}, {"answer": str(n), "model": "k", "rank": 1.0}],
    },
    "response-lists": lambda n: {"prompt": _ASKED, "responses": [str(n)], "rewards": [0.5]},
    "rllm": rllm,
    "judge-bench": lambda n: {
        "pair_id": "p", "original_id": "1", "source": "mmlu-pro", "question": _ASKED, "response_model": "m",
        "response_A": "x", "response_B": str(n), "label": "B>A",
    },
    "safe-rlhf": lambda n: {
        "prompt": _ASKED, "response_0": "x", "response_1": str(n), "is_response_0_safe": True, "is_response_1_safe": True,
        "better_response_id": 1, "safer_response_id": 0,
    },
    "shp": lambda n: {
        "post_id": "p", "domain": "askscience_train", "history": _ASKED, "score_A": 5, "score_B": 9, "human_ref_A": "x",
        "human_ref_B": str(n), "labels": 0, "score_ratio": 1.8,
    },
    "summarize-from-feedback": lambda n: {
        "info": {"id": "i", "post": "I add.", "title": "Sums", "subreddit": "math", "site": None, "article": None},
        "summaries": [{"text": " x", "policy": "sup2", "note": "ok"}, {"text": f" {n}", "policy": "ref", "note": None}],
        "choice": 1, "worker": "w", "batch": "batch3", "split": "train", "extra": {"confidence": 8},
    },
    "ultrafeedback": ultrafeedback,
    "webgpt": lambda n: {
        "question": {"dataset": "eli5", "id": "q", "full_text": _ASKED}, "quotes_0": {"title": [], "extract": []},
        "answer_0": "x", "tokens_0": {"prefix": [1], "completion": [2]}, "score_0": -0.5,
        "quotes_1": {"title": [], "extract": []}, "answer_1": str(n), "tokens_1": {"prefix": [1], "completion": [3]},
        "score_1": 0.5,
    },
}  # fmt: skip

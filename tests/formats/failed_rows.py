"""Rows of other projects whose writer masked them or says that they failed, in the shape in which its code writes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tests.formats.published_rows import art, rllm
from tests.formats.trajectories import QUESTION, ROWS

Rewarded = Callable[[float, int], dict[str, Any]]
CREATED = {"id": "r", "created_at": 1.0, "model": "m", "object": "response", "tools": [], "tool_choice": "auto"}


def nemo_gym(reward: float, n: int) -> dict[str, Any]:
    """A row of ``rollout_collection.py``, with the ids of its one model call."""
    item = {
        "type": "message", "role": "assistant", "id": "m", "status": "completed",
        "content": [{"type": "output_text", "text": str(n), "annotations": []}],
        "prompt_token_ids": [5, 6, 7], "generation_token_ids": [10 + n, 2], "generation_log_probs": [-0.5, -0.25],
    }  # fmt: skip
    return {
        "responses_create_params": {"input": [QUESTION]}, "reward": reward, "_ng_task_index": 0, "_ng_rollout_index": n,
        "response": {**CREATED, "output": [item], "status": "completed", "error": None},
    }  # fmt: skip


def responding(row: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A row of NeMo Gym with other fields of its response."""
    return row | {"response": row["response"] | fields}


def of_verifiers(reward: float, n: int) -> dict[str, Any]:
    return ROWS["verifiers"](n) | {"reward": reward}


def trace(reward: float, n: int) -> dict[str, Any]:
    (row,) = ROWS["verifiers-traces"](n)["traces"]
    return row | {"rewards": {"exact": {"score": reward, "weight": 1.0}}}


def of_skyrl(reward: float, n: int) -> dict[str, Any]:
    return ROWS["skyrl-dump"](n) | {"score": reward}


def of_rllm(reward: float, n: int) -> dict[str, Any]:
    row = rllm(n)
    return row | {"trajectories": [row["trajectories"][0] | {"reward": reward}]}


def of_art(reward: float, n: int) -> dict[str, Any]:
    row = art(n)
    return row | {"trajectories": [row["trajectories"][0] | {"reward": reward}], "exceptions": []}


def atif(reward: float, n: int) -> dict[str, Any]:
    steps = [{"source": "user", "message": QUESTION["content"]}, {"source": "agent", "message": str(n)}]
    return {"schema_version": "ATIF-v1.8", "agent": {"name": "a"}, "steps": steps, "extra": {"reward": reward}}


EXCEPTION = {"exception_type": "AgentTimeoutError", "exception_message": "900 s", "occurred_at": "2026-01-01T00:00:00Z"}
JUDGE = {"_ng_failure_class": "judge_failed", "_ng_failure_judge_error": "ConnectionError: refused"}
ROW = nemo_gym(1.0, 1)
#: (format, a rewarded row of it, the row that is masked, its kind and reason).
MASKED: list[tuple[str, Rewarded, dict[str, Any], str, str]] = [
    ("nemo-gym", nemo_gym, ROW | {"mask_sample": True}, "masked", "mask_sample"),
    ("nemo-gym", nemo_gym, ROW | {"mask_sample": True, "_ng_token_capture": {"n_calls": 0, "error": "nothing recorded"}},
     "masked", "mask_sample: nothing recorded"),
    ("nemo-gym", nemo_gym, ROW | {"instance_config": {"mask_sample": True}}, "masked", "instance_config.mask_sample"),
    ("nemo-gym", nemo_gym, responding(ROW, status="cancelled"), "cancelled", "response.status cancelled"),
    ("skyrl-dump", of_skyrl, of_skyrl(1.0, 1) | {"stop_reason": "abort"}, "cancelled", "stop_reason abort"),
]  # fmt: skip
#: The same of attempts that failed; its kind is what is at fault.
FAILED: list[tuple[str, Rewarded, dict[str, Any], str, str]] = [
    ("nemo-gym", nemo_gym, ROW | JUDGE, "judge", "judge_failed: ConnectionError: refused"),
    ("nemo-gym", nemo_gym, ROW | {"_ng_failure_class": "remote_agent_error", "error": "ClientOSError"}, "environment",
     "remote_agent_error: ClientOSError"),
    ("nemo-gym", nemo_gym, ROW | {"_ng_no_persist": True}, "environment", "_ng_no_persist"),
    ("nemo-gym", nemo_gym, ROW | {"reward": 3.0, "judge_failed": True, "judge_failure": "no verdict"}, "judge",
     "judge_failed: no verdict"),
    ("nemo-gym", nemo_gym, ROW | {"error": "sandbox lost", "mask_sample": True}, "environment", "sandbox lost"),
    ("nemo-gym", nemo_gym, responding(ROW, status="failed", error={"code": "server_error", "message": "boom"}),
     "environment", "server_error: boom"),
    ("nemo-gym", nemo_gym, responding(ROW, status="failed"), "environment", "response.status failed"),
    ("rllm", of_rllm, of_rllm(1.0, 1) | {"termination_reason": "error", "info": {"error": "ValueError: x"}}, "environment",
     "error: ValueError: x"),
    ("rllm", of_rllm, of_rllm(0.0, 1) | {"error": "ConnectError: refused"}, "environment", "ConnectError: refused"),
    *(("rllm", of_rllm, of_rllm(1.0, 1) | {"termination_reason": word}, kind, word)
      for word, kind in [("timeout", "environment"), ("verifier_timeout", "judge"), ("grading_error", "judge"),
                         ("model_error", "engine")]),
    ("skyrl-dump", of_skyrl, of_skyrl(0.0, 1) | {"stop_reason": "error"}, "environment", "stop_reason error"),
    ("skyrl-dump", of_skyrl, of_skyrl(0.0, 1) | {"exception_type": "TimeoutError"}, "environment", "TimeoutError"),
    ("verifiers", of_verifiers, of_verifiers(1.0, 1) | {"stop_condition": "has_error"}, "environment",
     "stop_condition has_error"),
    ("verifiers", of_verifiers, of_verifiers(0.0, 1) | {"completion": [], "error": {"error": "ModelError",
     "error_chain_repr": "ModelError('down')"}}, "engine", "ModelError: ModelError('down')"),
    ("verifiers-traces", trace, trace(1.0, 1) | {"ok": False, "errors": [{"type": "SandboxError", "message": "gone"}]},
     "environment", "ok false: SandboxError: gone"),
    ("verifiers-traces", trace, trace(1.0, 1) | {"ok": "no"}, "environment", "ok false"),
    ("verifiers-traces", trace, trace(1.0, 1) | {"ok": None, "errors": [{"type": "E", "message": "x"}, None]},
     "environment", "E: x"),
    ("art", of_art, {"trajectories": [], "exceptions": [{"type": "<class 'KeyError'>", "message": "'a'", "traceback": ""}]},
     "environment", "<class 'KeyError'>: 'a'"),
    ("atif", atif, atif(0.0, 1) | {"exception_info": EXCEPTION}, "environment", "AgentTimeoutError: 900 s"),
    ("atif", atif, atif(0.0, 1) | {"extra": {"reward": 0.0, "exception_info": EXCEPTION}}, "environment",
     "AgentTimeoutError: 900 s"),
]  # fmt: skip
#: Errors that say nothing: columns that a table has for every row.
NOTHING: tuple[Any, ...] = (
    {"code": None, "message": None}, {"error": None, "error_chain_repr": None}, {"message": ""}, [None],
    [{"type": None, "data": {"a": []}}], {}, math.nan, "NaN", " false", 0.0,
)  # fmt: skip
#: By format, rows whose rewards are measurements, although something ended early or went wrong on the way.
COUNTED: dict[str, list[dict[str, Any]]] = {
    "nemo-gym": [
        ROW | {"mask_sample": False, "instance_config": {"mask_sample": "no"}, "_ng_no_persist": "0.0", "error": None},
        responding(ROW, status="incomplete", incomplete_details={"reason": "max_output_tokens"}),
        *(ROW | {"error": nothing, "_ng_failure_class": nothing, "mask_sample": nothing} for nothing in NOTHING),
        responding(ROW, error=NOTHING[0]),
    ],
    "rllm": [of_rllm(1.0, 1) | {"termination_reason": word} for word in ("unknown", "max_prompt_length_exceeded")],
    "skyrl-dump": [of_skyrl(1.0, 1) | {"stop_reason": "length"}, of_skyrl(1.0, 1) | {"exception_type": "nan"}],
    "verifiers": [
        of_verifiers(1.0, 1) | {"stop_condition": "max_turns_reached", "error": no} for no in (NOTHING[1], math.nan)
    ],
    # A trace has the errors of all attempts, also where the last one succeeded.
    "verifiers-traces": [
        trace(1.0, 1) | {"ok": yes, "errors": [{"type": "TimeoutError", "message": "first try"}]} for yes in (True, "yes")
    ],
    "art": [of_art(1.0, 1) | {"exceptions": [None, {"type": None, "message": ""}]}],
    "atif": [atif(1.0, 1), atif(1.0, 1) | {"exception_info": {"exception_type": None}}],
}  # fmt: skip

"""A row of each format of other harnesses, with the answer n."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

QUESTION = {"role": "user", "content": "How much is 2+3?"}
ANSWER = {"role": "assistant", "content": "5"}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "5"}


def verifiers(n: int) -> dict[str, Any]:
    called = {
        "role": "assistant", "content": "", "reasoning_content": "Add.",
        "tool_calls": ['{"id": "c1", "name": "add", "arguments": "{\\"a\\": 2}"}'],
    }  # fmt: skip
    return {
        "example_id": 7, "prompt": [QUESTION], "completion": [called, RESULT, ANSWER | {"content": str(n)}],
        "answer": "5", "info": {"level": 1}, "reward": 0.75, "error": None,
        "timing": {"total_ms": 3.0}, "is_completed": True, "is_truncated": False, "stop_condition": "no_tools_called",
        "metrics": {"exact": 0.5, "num_turns": 2.0}, "exact": 0.5, "num_turns": 2.0,
        "tool_defs": [{"name": "add", "description": "Adds.", "parameters": {}}],
    }  # fmt: skip


def trl_completions(n: int) -> dict[str, Any]:
    return {
        "step": 3, "prompt": [QUESTION], "completion": [ANSWER | {"content": str(n)}], "exact": 0.5, "length": 2.0,
        "source": "sums", "advantage": -0.25,
    }  # fmt: skip


def verl_dump(n: int) -> dict[str, Any]:
    return {
        "input": "system\nBe brief.\nuser\nHow much is 2+3?\nassistant\n", "output": str(n), "gts": "5", "score": 1.0,
        "step": 4, "acc": True, "pred": "5",
    }  # fmt: skip


def skyrl_dump(n: int) -> dict[str, Any]:
    return {
        "input_prompt": "<|im_start|>user\nHow much is 2+3?<|im_end|>\n<|im_start|>assistant\n<think>\n",
        "output_response": f"Add.</think>{n}<|im_end|>", "score": [0.0, 0.25, 0.5], "stop_reason": "stop",
        "env_class": "sums", "env_extras": {"reward_spec": {"ground_truth": "5"}}, "data_source": "sums/test",
    }  # fmt: skip


def swe_agent(n: int) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    return {
        "environment": "sums",
        "trajectory": [{"action": "add 2", "observation": "5", "response": "", "thought": "", "state": {}, "query": []}],
        "history": [
            {"role": "assistant", "content": "A sum.", "agent": "main", "is_demo": True, "message_type": "demonstration"},
            {"role": "user", "content": [{"type": "text", "text": "How much is 2+3?"}], "message_type": "observation"},
            {"role": "assistant", "content": "", "thought": "", "action": "add 2", "agent": "main", "tool_calls": [call],
             "message_type": "action", "thinking_blocks": [{"type": "thinking", "thinking": "Add.", "signature": "s"}]},
            {"role": "tool", "content": "5", "tool_call_ids": ["c1"], "message_type": "observation"},
            {"role": "assistant", "content": str(n), "thought": "", "action": "submit", "tool_calls": None},
        ],
        "info": {"exit_status": "submitted", "submission": "diff", "model_stats": {"instance_cost": 0.5}},
        "replay_config": "{}",
    }  # fmt: skip


def mini_swe_agent(n: int) -> dict[str, Any]:
    return {
        "info": {"config": {"model": {"model_name": "m/one"}}, "exit_status": "Submitted", "submission": "diff"},
        "messages": [
            QUESTION | {"extra": {"timestamp": 1.5}},
            {"role": "assistant", "content": None, "extra": {"cost": 0.5}, "function_call": None, "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}]},
            RESULT | {"extra": {"returncode": 0}},
            ANSWER | {"content": str(n)},
            {"role": "exit", "content": "diff", "extra": {"exit_status": "Submitted"}},
        ],
        "trajectory_format": "mini-swe-agent-1.1",
    }  # fmt: skip


def tau_bench(n: int) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    return {
        "task_id": 3, "reward": 1.0, "trial": 0,
        "info": {"task": {"user_id": "u", "instruction": "Ask for a sum.", "outputs": []}, "user_cost": 0.5},
        "traj": [
            QUESTION, {"role": "assistant", "content": None, "function_call": None, "tool_calls": [call]},
            RESULT | {"name": "add"}, ANSWER | {"content": str(n)},
        ],
    }  # fmt: skip


def request_log(n: int) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": "stop", "message": ANSWER | {"content": str(n), "tool_calls": None}}
    return {
        "id": "chatcmpl-1", "call_type": "acompletion", "model": "one", "status": "success", "response_cost": 0.5,
        "messages": [QUESTION], "model_parameters": {"temperature": 0.5, "tools": [
            {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]},
        "response": {"id": "chatcmpl-1", "object": "chat.completion", "model": "one-1", "choices": [choice]},
    }  # fmt: skip


def inspect_ai(n: int) -> dict[str, Any]:
    sample = {
        "id": 1, "epoch": 1, "input": "How much is 2+3?", "target": "5", "metadata": {"level": 1},
        "messages": [
            {"id": "a", "role": "system", "content": "attachment://h"},
            QUESTION | {"id": "b", "source": "input"},
            {"id": "c", "role": "assistant", "source": "generate", "model": "one",
             "content": [{"type": "reasoning", "reasoning": "Add."}, {"type": "text", "text": ""}],
             "tool_calls": [{"id": "c1", "function": "add", "arguments": {"a": 2}, "type": "function"}]},
            RESULT | {"id": "d", "function": "add"},
            ANSWER | {"id": "e", "source": "generate", "content": str(n)},
        ],
        "output": {"model": "one", "choices": [{"message": ANSWER, "stop_reason": "stop"}]},
        "scores": {"match": {"value": "C", "answer": "5"}}, "attachments": {"h": "Be brief."}, "store": {},
        "events": [{"event": "model", "tools": [{"name": "add", "description": "Adds.", "parameters": {}}]}],
    }  # fmt: skip
    spec = {"task": "sums", "model": "m/one", "run_id": "r"}
    return {"version": 2, "status": "success", "eval": spec, "plan": {}, "samples": [sample]}


def verifiers_traces(n: int) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "name": "add", "arguments": '{"a": 2}'}
    said = [QUESTION, {"role": "assistant", "reasoning_content": "Add.", "tool_calls": [call]}, RESULT]
    nodes = [
        {"message": message, "sampled": message["role"] == "assistant", "timestamp": 1.5, "token_ids": [1],
         **({"parent": k - 1} if k else {})}
        for k, message in enumerate([*said, ANSWER | {"content": str(n)}])
    ]  # fmt: skip
    task = {"type": "Sum", "data": {"idx": 7, "answer": "5"}, "key": "sum-7"}
    trace = {
        "version": 1, "id": "t", "task": task, "agent": {"config": {}, "name": "agent", "trainable": True},
        "tools": [{"type": "function", "name": "add", "description": "Adds.", "parameters": {}}], "nodes": nodes,
        "calls": [{"node": 1, "model": "m"}], "rewards": {"exact": {"score": 1.0, "weight": 0.5}},
        "metrics": {"turns": 2.0}, "info": {}, "is_completed": True, "ok": True, "errors": [],
    }  # fmt: skip
    return {"id": "e", "env": {"id": "sums"}, "task": task, "ok": True, "errors": [], "traces": [trace]}


ROWS: dict[str, Callable[[int], dict[str, Any]]] = {
    "verifiers": verifiers,
    "verifiers-traces": verifiers_traces,
    "trl-completions": trl_completions,
    "verl-dump": verl_dump,
    "skyrl-dump": skyrl_dump,
    "swe-agent": swe_agent,
    "mini-swe-agent": mini_swe_agent,
    "tau-bench": tau_bench,
    "request-log": request_log,
    "inspect-ai": inspect_ai,
}

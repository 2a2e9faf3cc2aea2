"""A row of each data set or log that other projects publish in a shape of its own, with the answer n.

The rows have the keys that the projects' own sources name: AlpacaFarm's and AlpacaEval's annotations; the cards of
HelpSteer, PKU-SafeRLHF, SHP, Chatbot Arena, LIMA, Capybara, glaive-function-calling-v2, xLAM, UltraFeedback, Nectar,
webgpt_comparisons, summarize_from_feedback and oasst1; the pages on tuning data of Gemini and of Amazon Bedrock; RLHFlow's
lists of responses; ``event_to_dict`` and the SDK's events of OpenHands; ``ExportCommand`` and ``MessageV2`` of OpenCode;
``Results`` of tau2-bench; ``trajectory_to_dict`` of ART; ``Episode.to_dict`` of rLLM; OpenTelemetry's
``gen-ai-input-messages.json``; the hub's Session Trace format; sessions of Claude Code, Codex and pi.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.interop.trajectories import ANSWER, QUESTION

_ASKED = QUESTION["content"]
_RUN = {"name": "bash", "arguments": '{"command": "ls"}'}


def _said(n: int) -> dict[str, Any]:
    return ANSWER | {"content": str(n)}


def openhands(n: int) -> dict[str, Any]:
    calls = [{"id": "c1", "type": "function", "function": _RUN}]
    message = {"role": "assistant", "content": "I look.", "tool_calls": calls}
    response = {"id": "r1", "model": "m", "choices": [{"index": 0, "finish_reason": "tool_calls", "message": message}]}
    call = {"function_name": "bash", "tool_call_id": "c1", "model_response": response, "total_calls_in_response": 1}
    tools = [{"type": "function", "function": {"name": "bash", "description": "Runs.", "parameters": {}}}]
    return {
        "instance_id": "django-1", "instruction": "Fix it", "test_result": {"git_patch": "d", "report": {"resolved": True}},
        "metadata": {"llm_config": {"model": "m"}}, "metrics": {"accumulated_cost": 0.5}, "error": None,
        "history": [
            {"id": 0, "source": "agent", "action": "system", "args": {"content": "Be brief.", "tools": tools}},
            {"id": 1, "source": "user", "action": "message", "args": {"content": "Fix it", "image_urls": None}},
            {"id": 2, "source": "agent", "action": "run", "tool_call_metadata": call, "args": {"command": "ls"}},
            {"id": 3, "source": "agent", "observation": "run", "tool_call_metadata": call, "content": "a.py", "cause": 2},
            {"id": 4, "source": "environment", "observation": "agent_state_changed", "content": "", "extras": {}},
            {"id": 5, "source": "agent", "action": "finish", "args": {"thought": f"Fixed {n}", "final_thought": ""}},
        ],
    }  # fmt: skip


def openhands_events(n: int) -> list[dict[str, Any]]:
    """The same conversation as events of the SDK."""
    call = {"id": "c1", **_RUN, "origin": "completion"}
    return [
        {"kind": "SystemPromptEvent", "id": "e0", "source": "agent", "system_prompt": {"type": "text", "text": "Be brief."},
         "tools": [], "dynamic_context": None},
        {"kind": "MessageEvent", "id": "e1", "source": "user", "extended_content": [],
         "llm_message": {"role": "user", "content": [{"type": "text", "text": "Fix it"}]}},
        {"kind": "ActionEvent", "id": "e2", "source": "agent", "thought": [{"type": "text", "text": "I look."}],
         "tool_name": "bash", "tool_call_id": "c1", "tool_call": call, "llm_response_id": "r1", "reasoning_content": None},
        {"kind": "ObservationEvent", "id": "e3", "source": "environment", "tool_call_id": "c1", "action_id": "e2",
         "observation": {"kind": "TerminalObservation", "content": [{"type": "text", "text": "a.py"}]}},
        {"kind": "ConversationStateUpdateEvent", "id": "e4", "source": "environment", "key": "stats", "value": {}},
        {"kind": "MessageEvent", "id": "e5", "source": "agent", "llm_response_id": "r2",
         "llm_message": {"role": "assistant", "content": [{"type": "text", "text": f"Fixed {n}"}]}},
    ]  # fmt: skip


def opencode(n: int) -> dict[str, Any]:
    state = {"status": "completed", "input": {"command": "ls"}, "output": "a.py", "title": "ls", "metadata": {},
             "time": {"start": 1, "end": 2}}  # fmt: skip
    parts = [
        {"type": "step-start"}, {"type": "reasoning", "text": "Hm."}, {"type": "text", "text": "I look."},
        {"type": "tool", "callID": "c1", "tool": "bash", "state": state}, {"type": "step-finish", "reason": "tool-calls"},
        {"type": "step-start"}, {"type": "text", "text": f"Fixed {n}"}, {"type": "step-finish", "reason": "stop"},
    ]  # fmt: skip
    user = {"id": "msg_1", "role": "user", "agent": "build", "model": {"providerID": "p", "modelID": "m"}}
    return {
        "info": {"id": "ses_1", "directory": "/w", "title": "Fix", "version": "1.0"},
        "messages": [
            {"info": user, "parts": [{"type": "text", "text": "Fix it"}, {"type": "text", "text": "note", "ignored": True}]},
            {"info": {"id": "msg_2", "role": "assistant", "modelID": "m", "finish": "stop"}, "parts": parts},
        ],
    }  # fmt: skip


def tau2_bench(n: int) -> dict[str, Any]:
    call = {"id": "c1", "name": "add", "arguments": {"a": 2}, "requestor": "assistant"}
    messages = [
        {"role": "assistant", "content": "Hi!", "tool_calls": None},
        {"role": "user", "content": _ASKED, "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "id": "c1", "content": "5", "requestor": "assistant", "error": False},
        {"role": "user", "content": None, "tool_calls": [call | {"id": "u1", "requestor": "user"}]},
        {"role": "tool", "id": "u1", "content": "on", "requestor": "user", "error": False},
        {"role": "assistant", "content": str(n), "tool_calls": None},
    ]
    run = {
        "id": "s1", "task_id": "0", "termination_reason": "user_stop", "trial": 0, "seed": 1, "messages": messages,
        "reward_info": {"reward": 1.0, "reward_breakdown": {"DB": 1.0}}, "agent_cost": 0.5, "user_cost": 0.5,
    }  # fmt: skip
    return {
        "timestamp": "t", "info": {"agent_info": {"llm": "m"}, "environment_info": {"policy": "Be nice."}},
        "tasks": [{"id": "0", "user_scenario": {"instructions": "Ask for a sum."}}], "simulations": [run],
    }  # fmt: skip


def art(n: int) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": "stop", "message": _said(n)}
    return {"trajectories": [
        {"reward": 0.5, "metrics": {"exact": 1.0}, "metadata": {"level": 1}, "messages_and_choices": [QUESTION, choice],
         "tools": None, "additional_histories": [], "logs": []},
    ]}  # fmt: skip


def rllm(n: int) -> dict[str, Any]:
    said = [QUESTION, _said(n)]
    again = [*said, {"role": "user", "content": "Sure?"}, ANSWER]
    steps = [{"prompt_ids": [1], "response_ids": [2], "logprobs": [-0.5], "chat_completions": c} for c in (said, again)]
    return {
        "id": "sum:0", "task": {"question": _ASKED}, "termination_reason": "env_done", "is_correct": True,
        "trajectories": [{"uid": "u", "name": "solver", "task": {"question": _ASKED}, "steps": steps, "reward": 1.0}],
        "metrics": {"turns": 2.0}, "info": {},
    }  # fmt: skip


def otel(n: int) -> dict[str, Any]:
    asked = [
        {"role": "user", "parts": [{"type": "text", "content": _ASKED}]},
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "c1", "name": "add", "arguments": {"a": 2}}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "5"}]},
    ]  # fmt: skip
    answer = [{"role": "assistant", "parts": [{"type": "text", "content": str(n)}], "finish_reason": "stop"}]
    return {
        "name": "chat m", "context": {"trace_id": "0x1", "span_id": "0x2"}, "kind": "SpanKind.CLIENT", "attributes": {
            "gen_ai.operation.name": "chat", "gen_ai.response.model": "m", "gen_ai.input.messages": json.dumps(asked),
            "gen_ai.output.messages": json.dumps(answer),
            "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "Be brief."}])},
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


def glaive(n: int) -> dict[str, Any]:
    tool = json.dumps({"name": "add", "description": "Adds.", "parameters": {}}, indent=4)
    sentence = "You are a helpful assistant with access to the following functions. Use them if required -"
    chat = (
        f'USER: {_ASKED}\n\n\nASSISTANT: <functioncall> {{"name": "add", "arguments": \'{{"a": 2}}\'}} <|endoftext|>'
        f'\n\n\nFUNCTION RESPONSE: {{"sum": 5}}\n\n\nASSISTANT: {n} <|endoftext|>\n\n\n'
    )
    return {"system": f"SYSTEM: {sentence}\n{tool}\n", "chat": chat}


def swe_trajectories(n: int) -> dict[str, Any]:
    return {
        "instance_id": "i", "model_name": "m", "target": True, "exit_status": "submitted", "generated_patch": "d",
        "trajectory": [
            {"role": "system", "system_prompt": "Be brief.", "text": None, "mask": False},
            {"role": "user", "text": _ASKED, "system_prompt": None}, {"role": "ai", "text": str(n), "system_prompt": None},
        ],
    }  # fmt: skip


def oasst_messages(n: int) -> list[dict[str, Any]]:
    """The messages of a tree of OpenAssistant, as a flat file has them."""

    def message(name: str, parent: str | None, role: str, text: str, rank: int | None) -> dict[str, Any]:
        return {
            "message_id": name, "parent_id": parent, "user_id": "u", "created_date": "t", "text": text, "role": role,
            "lang": "en", "review_count": 3, "review_result": True, "deleted": False, "rank": rank, "synthetic": False,
            "model_name": None, "message_tree_id": f"tree {n}", "tree_state": "ready_for_export",
            "labels": {"name": ["spam"], "value": [0.0], "count": [3]},
        }  # fmt: skip

    return [
        message(f"a{n}", None, "prompter", _ASKED, None),
        message(f"b{n}", f"a{n}", "assistant", "x", 1),
        message(f"c{n}", f"a{n}", "assistant", str(n), 0),
        message(f"d{n}", f"a{n}", "assistant", "y", 2),
        message(f"e{n}", f"b{n}", "prompter", "Sure?", None),
        message(f"f{n}", f"c{n}", "prompter", "Sure?", None),
        message(f"g{n}", f"f{n}", "assistant", "Yes.", None),
        message(f"h{n}", f"g{n}", "prompter", "Thanks!", None),
    ]


def oasst(n: int) -> dict[str, Any]:
    """The same messages as a nested tree."""

    def nested(message: dict[str, Any]) -> dict[str, Any]:
        replies = [nested(reply) for reply in messages if reply["parent_id"] == message["message_id"]]
        kept = {name: value for name, value in message.items() if name not in ("message_tree_id", "tree_state")}
        return {**kept, "replies": replies}

    messages = oasst_messages(n)
    return {"message_tree_id": f"tree {n}", "tree_state": "ready_for_export", "prompt": nested(messages[0])}


def gemini(n: int) -> dict[str, Any]:
    properties = {"a": {"type": "NUMBER"}}
    declared = {"name": "add", "description": "Adds.", "parameters": {"type": "OBJECT", "properties": properties}}
    return {
        "systemInstruction": {"role": "system", "parts": [{"text": "Be brief."}]},
        "contents": [
            {"role": "user", "parts": [{"text": _ASKED}]},
            {"role": "model", "parts": [{"functionCall": {"name": "add", "args": {"a": 2}}}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "add", "response": {"sum": 5}}}]},
            {"role": "model", "parts": [{"text": "Add.", "thought": True}, {"text": str(n)}]},
        ],
        "tools": [{"functionDeclarations": [declared]}],
    }


def bedrock(n: int) -> dict[str, Any]:
    spec = {"name": "add", "description": "Adds.", "inputSchema": {"json": {"type": "object"}}}
    return {
        "schemaVersion": "bedrock-conversation-2024", "system": [{"text": "Be brief."}], "messages": [
            {"role": "user", "content": [{"text": _ASKED}]},
            {"role": "assistant", "content": [{"toolUse": {"toolUseId": "c1", "name": "add", "input": {"a": 2}}}]},
            {"role": "user", "content": [{"toolResult": {"toolUseId": "c1", "content": [{"text": "5"}]}}]},
            {"role": "assistant", "content": [{"text": str(n)}]},
        ],
        "toolConfig": {"tools": [{"toolSpec": spec}]},
    }  # fmt: skip


#: Rows of each format.
PUBLISHED: dict[str, Callable[[int], dict[str, Any]]] = {
    "alpaca-farm": lambda n: {
        "instruction": _ASKED, "input": "", "output_1": "x", "output_2": str(n), "preference": 2, "raw_preference": 4,
    },
    "arena": arena,
    "art": art,
    "bedrock": bedrock,
    "capybara": lambda n: {"source": "s", "conversation": [{"input": _ASKED, "output": str(n)}]},
    "gemini": gemini,
    "gemini-preference": lambda n: {
        "system_instruction": {"parts": [{"text": "Be brief."}]},
        "contents": [{"role": "user", "parts": [{"text": _ASKED}]}],
        "completions": [
            {"score": score, "completion": {"role": "model", "parts": [{"text": text}]}}
            for score, text in ((0, "x"), (1, str(n)))
        ],
    },
    "glaive": glaive,
    "helpsteer-preference": lambda n: {
        "domain": "general", "language": "english", "context": [QUESTION], "response1": "x", "response2": str(n),
        "overall_preference": 2, "individual_preference": [{"score": 2, "reasoning": "r"}],
    },
    "lima": lambda n: {"conversations": [_ASKED, str(n)], "source": "wikihow"},
    "nectar": lambda n: {
        "prompt": f"\n\nHuman: {_ASKED}\n\nAssistant: ", "turns": 1, "num_responses": 2, "source": ["s"],
        "good_natured": True,
        "answers": [{"answer": "x", "model": "m", "rank": 2.0}, {"answer": str(n), "model": "k", "rank": 1.0}],
    },
    "oasst": oasst,
    "opencode": opencode,
    "openhands": openhands,
    "otel-genai": otel,
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
    "swe-trajectories": swe_trajectories,
    "tau2-bench": tau2_bench,
    "ultrafeedback": ultrafeedback,
    "webgpt": lambda n: {
        "question": {"dataset": "eli5", "id": "q", "full_text": _ASKED}, "quotes_0": {"title": [], "extract": []},
        "answer_0": "x", "tokens_0": {"prefix": [1], "completion": [2]}, "score_0": -0.5,
        "quotes_1": {"title": [], "extract": []}, "answer_1": str(n), "tokens_1": {"prefix": [1], "completion": [3]},
        "score_1": 0.5,
    },
    "xlam": lambda n: {
        "id": n, "query": f"{_ASKED} {n}", "answers": '[{"name": "add", "arguments": {"a": 2}}]',
        "tools": '[{"name": "add", "description": "Adds.", "parameters": {}}]',
    },
}  # fmt: skip

BLOCKS = [
    {"type": "thinking", "thinking": "Add.", "signature": "s"},
    {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 2}},
]
OUTCOME = [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "5"}]}]


def claude_code() -> list[dict[str, Any]]:
    def line(n: int, role: str, content: Any, **more: Any) -> dict[str, Any]:
        message = {"role": role, "content": content, **({"id": more.pop("id"), "model": "m"} if "id" in more else {})}
        ids = {"uuid": f"u{n}", "parentUuid": f"u{n - 1}" if n else None, "sessionId": "s", "cwd": "/w"}
        return {"type": role, "isSidechain": False, "message": message, **ids, **more}

    return [
        {"type": "summary", "summary": "A sum", "leafUuid": "u4"},
        line(0, "user", _ASKED),
        line(1, "assistant", BLOCKS[:1], id="m1"),
        line(2, "assistant", BLOCKS[1:], id="m1"),
        line(3, "user", OUTCOME, toolUseResult={"stdout": "5"}),
        line(3, "user", "Other work.", isSidechain=True),
        line(4, "assistant", [{"type": "text", "text": "5"}], id="m2"),
    ]


def codex() -> list[dict[str, Any]]:
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": _ASKED}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Add."}], "encrypted_content": "x"},
        {"type": "function_call", "name": "add", "arguments": '{"a": 2}', "call_id": "c1"},
        {"type": "function_call_output", "call_id": "c1", "output": "5"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "5"}]},
    ]
    meta = {"type": "session_meta", "payload": {"id": "s", "cwd": "/w", "base_instructions": {"text": "Be brief."}}}
    event = {"type": "event_msg", "payload": {"type": "agent_message", "message": "5"}}
    turn = {"type": "turn_context", "payload": {"model": "m"}}
    return [meta, turn, *({"type": "response_item", "payload": item} for item in items), event]


#: Lines of sessions, of which a file is one rollout.
SESSIONS: dict[str, list[dict[str, Any]]] = {
    "claude-code": claude_code(),
    "codex": codex(),
    "openhands": openhands_events(5),
    "session-trace": [
        {"type": "session", "harness": "my-agent", "id": "s1", "name": "A sum"},
        {"type": "message", "message": QUESTION},
        {"type": "message", "message": {"role": "assistant", "content": "", "reasoningContent": "Add.", "toolCalls": [
            {"id": "c1", "function": {"name": "add", "arguments": '{"a": 2}'}}]}},
        {"type": "message", "message": {"role": "tool", "toolCallId": "c1", "content": "5"}},
        {"type": "message", "message": ANSWER | {"model": "m"}},
    ],
    "pi": [
        {"type": "session", "version": 3, "id": "s1", "timestamp": "t", "cwd": "/w"},
        {"type": "model_change", "id": "a0", "parentId": None, "timestamp": "t", "provider": "p", "modelId": "m"},
        {"type": "message", "id": "a1", "parentId": "a0", "timestamp": "t", "message": QUESTION},
        {"type": "message", "id": "a2", "parentId": "a1", "timestamp": "t", "message": {
            "role": "assistant", "model": "m", "stopReason": "toolUse", "content": [
                {"type": "thinking", "thinking": "Add."},
                {"type": "toolCall", "id": "c1", "name": "add", "arguments": {"a": 2}}]}},
        {"type": "message", "id": "a3", "parentId": "a2", "timestamp": "t", "message": {
            "role": "toolResult", "toolCallId": "c1", "toolName": "add", "content": [{"type": "text", "text": "5"}]}},
        {"type": "message", "id": "a4", "parentId": "a3", "timestamp": "t", "message": {
            "role": "assistant", "model": "m", "stopReason": "stop", "content": [{"type": "text", "text": "5"}]}},
    ],
}  # fmt: skip

"""Results of tau-bench and tau2-bench."""

from __future__ import annotations

from typing import Any

from gymdata.interop.formats import FORMATS, Format
from gymdata.interop.importing import BadItem, Importing, TableRow
from gymdata.interop.text_rows import conversation, rollout_row
from gymdata.interop.words import named_scores, score
from gymdata.rollouts.messages import JsonObject


@FORMATS.register("tau-bench")
class TauBench(Format):
    """Results of tau-bench: ``traj`` (messages), ``reward``, ``task_id``, the task in ``info``. Definitions of tools are not
    in the file; a run that ended with an error is refused, for its reward of 0 is none."""

    content = "results of tau-bench"
    item = "a result of tau-bench"
    marks = (b'"traj"', b'"task_id"')
    holds_text = holds_reward = True

    def recognise_row(self, row: JsonObject) -> bool:
        return row.keys() >= {"task_id", "reward", "info", "traj"} and isinstance(row["traj"], list)

    def row(self, item: Any, importing: Importing) -> TableRow:
        info = item["info"]
        reward = score(item["reward"], "reward")
        if reward is None:
            raise BadItem("S102", f"reward: got {item['reward']!r:.100}, expected a number")
        if "error" in info:
            raise BadItem("S103", f"info.error: the run ended with {info['error']!r:.200}")
        return rollout_row(
            item | {"task": info.get("task")},
            [],
            conversation(item["traj"], "traj"),
            importing,
            reward=reward,
            texts=("traj", "reward", "task_id"),
            about=("info", "trial"),
            group=str(item["task_id"]),
        )


@FORMATS.register("tau2-bench")
class Tau2Bench(Format):
    """Results of tau2-bench: a rollout per simulation, as the agent saw it, without the tools of the simulated user. The
    greeting that every conversation begins with is not trained; the agent's instructions and definitions of tools are not
    in the file. A simulation that an error outside of the agent ended is refused."""

    content = "results of tau2-bench"
    item = "a simulation of tau2-bench"
    several = "simulations"
    marks = (b'"simulations"', b'"termination_reason"')
    holds_text = holds_reward = True

    def recognise_row(self, row: JsonObject) -> bool:
        if isinstance(row.get("simulations"), list) and "tasks" in row:
            return True
        return {"task_id", "termination_reason", "reward_info", "messages"} <= row.keys()

    def item_of(self, part: Any, document: JsonObject) -> Any:
        name = str(part.get("task_id")) if isinstance(part, dict) else None
        tasks = (task for task in document.get("tasks") or () if isinstance(task, dict) and str(task.get("id")) == name)
        return {"simulation": part, "task": next(tasks, None), "info": document.get("info") or {}}

    def row(self, item: Any, importing: Importing) -> TableRow:
        results = item if "simulation" in item else self.item_of(item, {})
        run, end = results["simulation"], results["simulation"]["termination_reason"]
        if end in ("infrastructure_error", "unexpected_error", "user_error", "context_window_exceeded"):
            raise BadItem("S103", f"termination_reason: the run ended with {end}")
        if not isinstance(run.get("messages"), list):
            raise BadItem("S103", "messages: missing (simulations of speech have ticks)")
        messages = []
        for n, message in enumerate(run["messages"]):
            of_user = message["role"] == "user" and message.get("tool_calls")
            if of_user or (message["role"] == "tool" and message.get("requestor") == "user"):
                continue
            chat = {name: message.get(name) for name in ("role", "content", "tool_calls")}
            if message["role"] == "tool":
                chat |= {"content": message.get("content") or "", "tool_call_id": message.get("id")}
            messages.append(chat | ({"weight": 0} if n == 0 and message["role"] == "assistant" else {}))
        judged = run.get("reward_info") or {}
        parts = judged.get("reward_breakdown") or {}
        about = ("termination_reason", "trial", "seed", "agent_cost", "user_cost", "reward_info")
        row = {name: run[name] for name in about if name in run} | {"task": results["task"]}
        return rollout_row(
            row,
            [],
            conversation(messages, "messages"),
            importing,
            reward=score(judged.get("reward"), "reward"),
            rewards=named_scores(parts),
            about=about,
            group=str(run["task_id"]),
            policy=(results["info"].get("agent_info") or {}).get("llm"),
            truncated=end in ("max_steps", "timeout"),
        )

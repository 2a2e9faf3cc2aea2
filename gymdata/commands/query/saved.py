"""Saved statements for common questions, by name: ``gymdata query :hardest-tasks RUN``."""

from __future__ import annotations

from gymdata.errors import UsageError

SAVED = {
    "hardest-tasks": "SELECT task_id, run_id, count(*) AS rollouts, avg(reward) AS reward, "
    "avg(n_generated_tokens)::INT AS tokens\nFROM rollouts GROUP BY ALL ORDER BY reward, tokens DESC LIMIT 20",
    "mixed-tasks": "SELECT task_id, run_id, count(*) AS rollouts, avg(reward) AS reward, stddev(reward) AS std\n"
    "FROM rollouts GROUP BY ALL HAVING min(reward) < max(reward) ORDER BY round(std, 6) DESC, task_id, run_id LIMIT 50",
    "longest-rollouts": "SELECT rollout_id, task_id, reward, n_turns, n_context_tokens + n_generated_tokens AS tokens\n"
    "FROM rollouts ORDER BY tokens DESC LIMIT 20",
    "why-rollouts-stopped": "SELECT status, stop_reason, finish_reason, count(*) AS rollouts, avg(reward) AS reward\n"
    "FROM rollouts GROUP BY ALL ORDER BY rollouts DESC",
    "least-likely-turns": "SELECT rollout_id, turn, len(generation_log_probs) AS tokens, "
    "list_avg(generation_log_probs) AS mean_logprob\nFROM turns ORDER BY mean_logprob LIMIT 20",
    # A chat message may name its tool by the id of the call alone.
    "tools-called": "WITH calls AS (SELECT rollout_id, call->>'id' AS tool_call_id, any_value(call->'function'->>'name') AS "
    "called\nFROM (SELECT rollout_id, unnest(from_json(tool_calls, '[\"JSON\"]')) AS call FROM messages\n"
    "WHERE tool_calls LIKE '[%') GROUP BY ALL)\nSELECT coalesce(name, called) AS tool, count(*) AS results, "
    "count(DISTINCT rollout_id) AS rollouts\nFROM messages LEFT JOIN calls USING (rollout_id, tool_call_id) "
    "WHERE role = 'tool' GROUP BY 1 ORDER BY results DESC",
    "answers-that-differ-in-reward": "SELECT task_id, content, count(*) AS times, min(r.reward) AS least, "
    "max(r.reward) AS most\nFROM messages JOIN rollouts r USING (rollout_id, task_id)\nWHERE role = 'assistant' AND turn = "
    "n_turns - 1 GROUP BY ALL HAVING least < most LIMIT 50",
    "failures": "SELECT kind, place, count(*) AS attempts, min(message) AS message FROM failures\n"
    "GROUP BY 1, 2 ORDER BY 3 DESC",
}


def saved(name: str) -> str:
    """The statement of that name, with or without the colon. Raises UsageError for an unknown one."""
    name = name.removeprefix(":")
    if name not in SAVED:
        raise UsageError.unknown_choice("saved query", name, SAVED)
    return SAVED[name]

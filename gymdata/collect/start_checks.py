"""What of a start can be found without one: servers that do not answer, a context that holds no prompt.

Invariants: no engine is started, nothing is sampled for a rollout and nothing is written; what cannot be known beforehand is
not refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gymdata.collect.settings import CollectConfig
from gymdata.collect.setup import Parts
from gymdata.environments import server_url
from gymdata.errors import OutsideError, UsageError
from gymdata.rollouts.messages import Task

#: Prompts that are rendered to see whether the context holds them; rendering takes about a millisecond.
_PROMPTS = 200
_REACH_S = 10.0


def check_start(config: CollectConfig, parts: Parts, tasks: Iterable[Task]) -> list[str]:
    """Notes about a start that would succeed. Raises UsageError or OutsideError for one that would fail."""
    facts = asyncio.run(_ask_servers(config, parts))
    if parts.chat is None:
        return []
    limit = facts.get("max_model_len")
    if parts.sampler is not None and config.endpoint is None and config.chat_endpoint is None:
        if find_spec("vllm") is None:
            raise UsageError.missing_extra("vllm", "cpu' or 'gymdata[vllm]")
        limit = _engine_context(config, parts.model)
    limit = min((n for n in (limit, config.max_context) if n is not None), default=None)
    return [] if limit is None else _check_context(limit, config, parts, tasks)


async def _ask_servers(config: CollectConfig, parts: Parts) -> Mapping[str, Any]:
    """What the server that samples says of itself; every server of the run is reached once."""
    served = config.endpoint or config.chat_endpoint
    await _reach(served, "engine", "is the server up? `curl URL/v1/models` must answer")
    await _reach(config.workflow_url, "environment", "is the workflow's server up?")
    await _reach(server_url(config.env), "environment", "is the resource server up?")
    for reward in parts.rewards:
        kind, _, url = reward.function.source.partition(":")
        await _reach(url if kind == "url" else None, "environment", "is the reward server up?")
    if served is None or parts.sampler is None:
        return {}
    try:
        return await parts.sampler.start()
    finally:
        await parts.sampler.close()


async def _reach(url: str | None, system: str, hint: str) -> None:
    """Connect to ``url`` and hang up: whether anything listens, with nothing asked of it."""
    if url is None:
        return
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        _, writer = await asyncio.wait_for(asyncio.open_connection(parts.hostname, port), _REACH_S)
    except (OSError, ValueError, TimeoutError) as error:
        why = str(error) or f"no answer within {_REACH_S:g} s"
        raise OutsideError(
            system, f"{parts.hostname}:{parts.port or ''} cannot be reached: {why}", hint=hint
        ) from error
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


def _engine_context(config: CollectConfig, model: Mapping[str, Any]) -> int | None:
    """Tokens of a context of the engine in process; None where only the engine knows. Raises UsageError when the model has
    no such context."""
    folder = Path(model.get("base") or config.model or "")
    file = folder / "config.json"
    facts = json.loads(file.read_text()) if file.is_file() else {}
    facts = facts.get("text_config") or facts
    own, wanted = facts.get("max_position_embeddings"), config.engine.get("max_model_len")
    if not isinstance(own, int) or facts.get("rope_scaling") or config.engine.get("hf_overrides"):
        own = None
    if not isinstance(wanted, int) or wanted < 1:  # "auto" and texts such as 8k are vLLM's to read
        return own
    if own is not None and wanted > own and os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") != "1":
        raise UsageError.bad_value(
            "--set engine.max_model_len",
            wanted,
            f"at most {own:,}, the context of {folder}",
            hint="lower it, or leave it out",
        )
    return wanted


def _check_context(limit: int, config: CollectConfig, parts: Parts, tasks: Iterable[Task]) -> list[str]:
    """Prompts of the first tasks against the context. An environment may add to them, so these are the least they have."""
    assert parts.chat is not None
    lengths = [len(parts.chat.render(task.messages, task.tools)) for task in itertools.islice(tasks, _PROMPTS)
               if task.messages]  # fmt: skip
    if not lengths:
        return []
    if min(lengths) >= limit:
        raise UsageError(
            f"the context holds {limit:,} tokens, and the shortest of the first {len(lengths):,} prompts has "
            f"{min(lengths):,}: no rollout can begin",
            hint="raise --max-context or engine.max_model_len, or give a model with a longer context",
        )
    notes = []
    if too_long := sum(n >= limit for n in lengths):
        notes.append(f"{too_long:,} of the first {len(lengths):,} prompts do not fit the context of {limit:,} tokens: "
                     "their rollouts fail")  # fmt: skip
    if cut := sum(n < limit < n + config.max_tokens for n in lengths):
        notes.append(
            f"{cut:,} of the first {len(lengths):,} prompts and --max-tokens {config.max_tokens:,} are more than the "
            f"context of {limit:,} tokens: generations end where it ends"
        )
    return notes

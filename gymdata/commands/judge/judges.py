"""The judge that a configuration names, not started."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gymdata.commands.judge.port import Judge
from gymdata.commands.judge.settings import GenrmConfig
from gymdata.settings import Settings


def load_judge(config: GenrmConfig, say: Callable[[str], None]) -> Judge:
    """``say`` is called when servers of the judge go and return. Raises UsageError when the configuration names no judge."""
    from gymdata.commands.judge.prompt import Prompt, Roles

    config.checked()
    settings: Settings = {
        "form": Roles() if config.judge_prompt is None else Prompt.load(config.judge_prompt),
        "temperature": config.temperature,
        "top_p": config.top_p,
        "max_tokens": config.max_tokens,
        "constrain": config.constrain,
    }
    if config.genrm is None:
        from gymdata.commands.judge.http_judge import HttpJudge

        return HttpJudge(
            config.endpoint,
            str(config.model),
            request_timeout_s=config.request_timeout,
            max_retries=config.retries,
            pause_s=config.retry_pause,
            wait_s=config.wait_for_server,
            say=say,
            **settings,
        )
    from gymdata.commands.judge._vllm import EngineJudge

    on_ray = None
    if config.replicas is not None:
        from gymdata.engines.servers._ray import replicated

        on_ray = partial(replicated, config.replicas, config.ray, config.replica)
    return EngineJudge(config.genrm, engine_args=config.engine, seed=config.seed, on_ray=on_ray, **settings)

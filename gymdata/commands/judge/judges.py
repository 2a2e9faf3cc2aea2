"""The judge that a configuration names, not started."""

from __future__ import annotations

from functools import partial

from gymdata.commands.judge.port import Judge
from gymdata.commands.judge.settings import GenrmConfig
from gymdata.errors import UsageError
from gymdata.settings import Settings


def load_judge(config: GenrmConfig) -> Judge:
    """Raises UsageError when the configuration names no judge, or settings that its kind cannot honour."""
    from gymdata.commands.judge.prompt import Prompt, Roles

    config.checked()
    settings: Settings = {
        "form": Roles() if config.judge_prompt is None else Prompt.load(config.judge_prompt),
        "temperature": config.temperature,
        "top_p": config.top_p,
        "max_tokens": config.max_tokens,
        "constrain": config.constrain,
    }
    if config.endpoint:
        if config.engine:
            raise UsageError("--set engine.… is for a judge in process", hint="set it where the judge is served")
        from gymdata.commands.judge.http_judge import HttpJudge, HttpJudges

        make = partial(
            HttpJudge,
            model=config.model,
            request_timeout_s=config.request_timeout,
            pause_s=config.retry_pause,
            max_retries=config.retries,
            alone=len(config.endpoint) == 1,
            **settings,
        )
        judges = [make(endpoint=url) for url in config.endpoint]
        return judges[0] if len(judges) == 1 else HttpJudges(judges)
    from gymdata.commands.judge._vllm import EngineJudge

    assert config.genrm is not None
    settings |= {"engine_args": config.engine, "seed": config.seed}
    if config.replicas is None:
        return EngineJudge(config.genrm, **settings)
    from gymdata.engines.servers._ray import replicated

    on_ray = partial(replicated, config.replicas, config.ray, config.replica)
    return EngineJudge(config.genrm, on_ray=on_ray, **settings)

"""Trials of Harbor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gymdata.formats import FORMATS, Format
from gymdata.formats.conversion.importing import BadItem, Importing, TableRow
from gymdata.formats.conversion.models import Int32, Model, Number, OrEmpty, Sampled, Several, read, turns_of
from gymdata.formats.conversion.rows import foreign_row
from gymdata.formats.text.words import named_scores, score
from gymdata.rollouts.messages import JsonObject, object_of
from gymdata.store.lines import encode
from gymdata.store.run_json import moment


class Segment(Model):
    """A chat history: the ids of each of its calls."""

    prompt_token_ids: Several[list[Int32]]
    completion_token_ids: Several[list[Int32]]
    #: Empty where the sampler gave none.
    logprobs: Several[list[Number]]

    def calls(self, where: str, agent: str | None) -> Iterator[Sampled]:
        known: Sequence[Sequence[float] | None] = self.logprobs or [None] * len(self.prompt_token_ids)
        lists = self.prompt_token_ids, self.completion_token_ids, known
        lengths = [len(of) for of in lists]
        if len(set(lengths)) > 1:
            prompts, completions, numbers = lengths
            got = f"{prompts} prompts, {completions} completions and {numbers} lists of logprobs"
            raise BadItem("T205", f"{where}: got {got}, expected as many of each")
        for n, ids in enumerate(zip(*lists, strict=True)):
            yield Sampled(f"{where}, call {n}", *ids, {}, {"agent": agent})


class Context(Model):
    rollout_details: Several[Segment]


class Step(Model):
    agent_result: OrEmpty[Context]


class Verified(Model):
    rewards: OrEmpty[dict[str, Number | bool]]


class Named(Model):
    name: str | None = None


class Agent(Model):
    model_info: OrEmpty[Named]


class Trial(Model):
    task_name: str
    agent_info: OrEmpty[Agent]
    agent_result: OrEmpty[Context]
    verifier_result: OrEmpty[Verified]
    step_results: Several[Step]
    started_at: str | None = None
    finished_at: str | None = None


@FORMATS.register("harbor")
class Harbor(Format):
    """Harbor's trials, ``result.json`` of each: ``rollout_details`` of the agent (first the agent's, then those of subagents
    and summaries) and of steps, ``rewards`` by name, of which ``reward``, or the only one, is the total; a trial with
    ``exception_info`` is a failed attempt. There is no text."""

    content = "trials of Harbor"
    holds_ids = holds_logprobs = holds_reward = True
    keys = ({"task_name", "trial_name", "agent_info", "verifier_result"},)

    def items(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Trials of several steps have the exception at the step."""
        for place, trial in super().items(value):
            steps = object_of(trial).get("step_results")
            thrown = [object_of(step).get("exception_info") for step in steps] if isinstance(steps, list) else []
            thrown = [exception for exception in thrown if exception]
            is_whole = not thrown or trial.get("exception_info")
            yield place, trial if is_whole else trial | {"exception_info": thrown[0]}

    def row(self, item: Any, importing: Importing) -> TableRow:
        trial = read(Trial, item)
        places = {"agent_result": trial.agent_result}
        places |= {f"step_results[{n}].agent_result": step.agent_result for n, step in enumerate(trial.step_results)}
        calls = list[Sampled]()
        for place, context in places.items():
            for n, segment in enumerate(context.rollout_details):
                calls += segment.calls(f"{place}.rollout_details[{n}]", f"segment-{n}" if n else None)
        given = trial.verifier_result.rewards
        rewards, total = named_scores(given), given.get("reward") if len(given) != 1 else next(iter(given.values()))
        began, ended = moment(trial.started_at), moment(trial.finished_at)
        row = foreign_row(
            item,
            [],
            importing,
            turns=turns_of(calls, importing, "rollout_details"),
            known_as=item.get("id"),
            group=trial.task_name,
            policy=trial.agent_info.model_info.name or "unknown",
            reward=score(total, "verifier_result.rewards"),
            # Earlier trials have the local time of their machine, of which only the length is known.
            started_at=began.isoformat() if began is not None and began.tzinfo else None,
            duration_s=0.0 if began is None or ended is None else max(0.0, (ended - began).total_seconds()),
        )
        about: JsonObject = {key: value for key, value in item.items() if key not in ("agent_result", "step_results")}
        return row | {"rewards": rewards, "extra": encode(about).decode()}

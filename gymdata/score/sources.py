"""Where rewards come from: named ones, a user's functions, a reward model, a server, or a recipe of all of these.

Invariants: a reward model reads only ids that mean the same in its tokenizer; a server gets the text of the saved
ids; every source has a name of its own, and one that says what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from gymdata.errors import RefusedError, UsageError, option
from gymdata.models._transformers import load_reader, load_tokenizer
from gymdata.models.model_identity import check_tokenizer, hash_of_tokenizer, model_facts
from gymdata.models.vocabulary import find_tokenizer
from gymdata.progress import Progress
from gymdata.rewards import load_rewards
from gymdata.rewards.port import RewardFunction, refuse_total
from gymdata.rewards.recipe import Recipe, RewardSource, read_recipe
from gymdata.rewards.scheduler import Weighted
from gymdata.rollouts.messages import TaskRow
from gymdata.score.settings import ScoreConfig
from gymdata.store import hash_file
from gymdata.store.lineage import lineage

Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True)
class RewardSources:
    """What scores the rollouts. ``models``: folders of reward models, for lineage. ``of_rule``: rollouts per rule."""

    rewards: list[Weighted]
    recipe: Recipe | None = None
    recipe_hash: str | None = None
    models: list[str] = field(default_factory=list)
    of_rule: dict[str, int] = field(default_factory=dict)

    def names(self) -> dict[str, str]:
        return {reward.function.name: reward.function.source for reward in self.rewards}

    def count(self, task: TaskRow) -> None:
        """Count the rule that applies to a rollout."""
        if self.recipe is not None:
            rule = self.recipe.rule_of(task)
            name = "no rule fits" if rule is None else str(self.recipe.rules[rule])
            self.of_rule[name] = self.of_rule.get(name, 0) + 1

    def refuse_useless(self) -> None:
        """Raises OutsideError when a server was never reached, or a function does not return one value for each rollout:
        nothing of it is known to be right, so nothing is written."""
        for reward in self.rewards:
            if (fault := reward.function.useless) is not None:
                raise fault


def load_sources(
    config: ScoreConfig, progress: Progress, functions: Mapping[str, tuple[RewardFunction, float]] | None = None
) -> RewardSources:
    """The rewards that ``config`` names, nothing loaded for long yet. ``functions``: those of ``given_rewards``.

    Raises UsageError for an unknown or repeated reward or a faulty recipe; RefusedError for a reward model with another
    tokenizer than the rollouts.
    """
    loader = _Loader(config, progress)
    if config.recipe is None:
        decode = loader.decode if any(spec.startswith("http") for spec in config.reward) else None
        loaded = load_rewards(config.reward, decode, functions)
        rewards = [Weighted(function, weight) for function, weight in loaded]
        if config.reward_model is not None:
            rewards.append(Weighted(loader.model(config.reward_model, None)))
        urls = config.reward_url
        names = [None] if len(urls) == 1 else [f"remote_{k}" for k in range(1, len(urls) + 1)]
        rewards += [Weighted(loader.remote(url, name), 1 / len(urls)) for url, name in zip(urls, names, strict=True)]
        _refuse_names(rewards)
        return RewardSources(rewards, models=loader.models)
    recipe = read_recipe(config.recipe)
    rewards = []
    for source in recipe.sources():
        choose = partial(lambda source, view: recipe.weight(source, view["task"]), source)
        rewards.append(Weighted(loader.source(source), source.weight, choose))
    _refuse_names(rewards)
    of_rule = dict.fromkeys(map(str, recipe.rules), 0)
    return RewardSources(rewards, recipe, hash_file(config.recipe), loader.models, of_rule)


def _refuse_names(rewards: Sequence[Weighted]) -> None:
    names = [reward.function.name for reward in rewards]
    for name in names:
        refuse_total(name, "label", "give it another `label` in the recipe")
        if names.count(name) > 1:
            raise UsageError(f"two rewards are named {name!r}", hint="give one a `label` in a recipe")


class _Loader:
    """Makes reward functions; what they share (tokenizer, lineage) is found once."""

    def __init__(self, config: ScoreConfig, progress: Progress) -> None:
        self.models: list[str] = []
        self._config = config
        self._progress = progress

    def source(self, source: RewardSource) -> RewardFunction:
        kind, origin = source.what()
        if kind == "model":
            return self.model(origin, source.label)
        if kind == "url":
            return self.remote(origin, source.label)
        spec = origin if source.argument is None else f"{origin}:{source.argument}"
        # A spec may end in a weight, which is separate here.
        ((function, _),) = load_rewards([f"{spec}=1"], labelled=source.label is not None)
        if source.label is not None:
            function.name = source.label
        return function

    def model(self, folder: str, label: str | None) -> RewardFunction:
        from gymdata.rewards._torch import RewardModel

        facts = model_facts(folder)
        check_tokenizer(list(lineage(self._config.path)), facts, self._config.path, self._progress)
        self.models.append(folder)
        return RewardModel(folder, facts.policy_hash, name=label)

    def remote(self, url: str, label: str | None) -> RewardFunction:
        from gymdata.rewards.remote import RemoteReward

        config = self._config
        return RemoteReward(
            url,
            name=label or "remote",
            decode=self.decode,
            batch_size=config.request_batch,
            timeout_s=config.request_timeout,
            max_retries=config.retries,
            notice=self._progress.message,
        )

    @cached_property
    def decode(self) -> Decode | None:
        """Decodes the saved ids; None when no tokenizer is known, and the messages' text is sent."""
        if self._config.tokenizer is not None:
            return load_reader(self._config.tokenizer).decode
        for facts in lineage(self._config.path):
            if (file := find_tokenizer(facts)) is None:
                continue
            folder, sampled_with = str(file.parent), (facts.get("identity") or {}).get("tokenizer_hash")
            # Its tokenizer may have been replaced since.
            if sampled_with is not None and (now := hash_of_tokenizer(load_tokenizer(folder))) != sampled_with:
                raise RefusedError(
                    f"{folder}: its tokenizer is {now}, the rollouts were sampled with {sampled_with}",
                    hint=f"give the folder of that tokenizer with {option('tokenizer')}",
                )
            return load_reader(folder).decode
        self._progress.message(
            "the tokenizer of these rollouts is not known: the reward server gets their messages as text "
            f"({option('tokenizer', 'FOLDER')} sends the text of their tokens)"
        )
        return None

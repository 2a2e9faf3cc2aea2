"""Where rewards come from: named ones, a user's functions, a reward model, a server, or a recipe of all of these.

Invariants: a reward model reads only ids that mean the same in its tokenizer; a server gets the text of the saved
ids; every source has a name of its own, and one that says what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from gymdata.commands.score.settings import ScoreConfig
from gymdata.errors import RefusedError, UsageError, option
from gymdata.models._transformers import load_reader, load_tokenizer
from gymdata.models.model_identity import check_tokenizer, hash_of_tokenizer, model_facts
from gymdata.models.vocabulary import find_tokenizer
from gymdata.progress import Progress
from gymdata.rewards import URLS, load_rewards
from gymdata.rewards.port import RewardFunction, refuse_total
from gymdata.rewards.recipe import Recipe, read_recipe
from gymdata.rewards.scheduler import Weighted
from gymdata.rollouts.messages import TaskRow
from gymdata.store import hash_file
from gymdata.store.lineage import lineage

Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True)
class RewardSources:
    """What scores the rollouts. ``models``: folders of reward models, for lineage. ``of_label``: rollouts per label."""

    rewards: list[Weighted]
    recipe: Recipe | None = None
    recipe_hash: str | None = None
    models: list[str] = field(default_factory=list)
    of_label: dict[str, int] = field(default_factory=dict)

    def names(self) -> dict[str, str]:
        return {reward.function.name: reward.function.source for reward in self.rewards}

    def count(self, task: TaskRow) -> None:
        """Count the label that a rollout comes under."""
        if self.recipe is not None:
            label = self.recipe.label_of(task) or "none fits"
            self.of_label[label] = self.of_label.get(label, 0) + 1

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
            rewards.append(Weighted(loader.model(config.reward_model)))
        urls = config.reward_url
        names = [None] if len(urls) == 1 else [f"remote_{k}" for k in range(1, len(urls) + 1)]
        rewards += [Weighted(loader.remote(url, name), 1 / len(urls)) for url, name in zip(urls, names, strict=True)]
        _refuse_names(rewards)
        return RewardSources(rewards, models=loader.models)
    recipe = read_recipe(config.recipe)
    rewards = []
    for spec, weight in recipe.weights().items():
        choose = partial(lambda spec, view: recipe.weight(spec, view["task"]), spec)
        rewards.append(Weighted(loader.reward(spec, [reward.function.name for reward in rewards]), weight, choose))
    _refuse_names(rewards)
    of_label = dict.fromkeys(recipe.labels, 0)
    return RewardSources(rewards, recipe, hash_file(config.recipe), loader.models, of_label)


def _refuse_names(rewards: Sequence[Weighted]) -> None:
    names = [reward.function.name for reward in rewards]
    for name in names:
        refuse_total(name, "reward", "rename the function or the folder")
        if names.count(name) > 1:
            raise UsageError(f"two rewards are named {name!r}", hint="rename a function or a folder")


class _Loader:
    """Makes reward functions; what they share (tokenizer, lineage) is found once."""

    def __init__(self, config: ScoreConfig, progress: Progress) -> None:
        self.models: list[str] = []
        self._config = config
        self._progress = progress

    def reward(self, spec: str, names: Sequence[str]) -> RewardFunction:
        """Of a recipe; ``names``: those of the rewards before it."""
        if spec.startswith(URLS):
            return self.remote(spec, f"remote_{len(names) + 1}" if "remote" in names else None)
        if Path(spec).is_dir():
            return self.model(spec)
        # A spec may end in a weight, which is separate here.
        ((function, _),) = load_rewards([f"{spec}=1"])
        return function

    def model(self, folder: str) -> RewardFunction:
        from gymdata.rewards._torch import RewardModel

        facts = model_facts(folder)
        check_tokenizer(list(lineage(self._config.path)), facts, self._config.path, self._progress)
        self.models.append(folder)
        return RewardModel(folder, facts.policy_hash)

    def remote(self, url: str, name: str | None) -> RewardFunction:
        from gymdata.rewards.remote import RemoteReward

        config = self._config
        return RemoteReward(
            url,
            name=name or "remote",
            decode=self.decode,
            batch_size=config.request_batch,
            timeout_s=config.request_timeout,
            max_retries=config.retries,
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

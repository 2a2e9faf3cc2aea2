"""Where rewards come from: named ones, a user's functions, a reward model, a server, or a recipe of all of these.

Invariants: a reward model reads only ids that mean the same in its tokenizer; a server gets the text of the saved
ids; every source has a name of its own, and one that says what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from gymdata.commands.score.settings import ScoreConfig
from gymdata.errors import RefusedError, option
from gymdata.models._transformers import load_reader, load_tokenizer
from gymdata.models.model_identity import check_tokenizer, hash_of_tokenizer, model_facts
from gymdata.models.vocabulary import find_tokenizer
from gymdata.progress import Progress
from gymdata.rewards import load_reward, load_rewards, name_apart
from gymdata.rewards.port import RewardFunction
from gymdata.rewards.recipe import Recipe, read_recipe
from gymdata.rewards.scheduler import Weighted
from gymdata.store.lineage import lineage

Decode = Callable[[Sequence[int]], str]


class RewardSources:
    """What scores the rollouts. ``models``: folders of reward models, for lineage."""

    def __init__(
        self,
        config: ScoreConfig,
        progress: Progress,
        functions: Mapping[str, tuple[RewardFunction, float]] | None = None,
    ) -> None:
        """Nothing is loaded for long yet. ``functions``: those of ``given_rewards``. Raises UsageError for an unknown or
        repeated reward or a faulty recipe; RefusedError for a reward model with another tokenizer than the rollouts."""
        self._config = config
        self._progress = progress
        self.models: list[str] = []
        self.recipe = None if config.recipe is None else read_recipe(config.recipe)
        if self.recipe is not None:
            self.rewards = [
                self._of_recipe(self.recipe, spec, weight) for spec, weight in self.recipe.weights().items()
            ]
        else:
            loaded = load_rewards(config.reward, functions, self._remote)
            self.rewards = [Weighted(function, weight) for function, weight in loaded]
            if config.reward_model is not None:
                self.rewards.append(Weighted(self._model(config.reward_model)))
            self.rewards += [Weighted(self._remote(url), 1 / len(config.reward_url)) for url in config.reward_url]
        name_apart([reward.function for reward in self.rewards])

    def names(self) -> dict[str, str]:
        """The source of each reward, by its name."""
        return {reward.function.name: reward.function.source for reward in self.rewards}

    def _of_recipe(self, recipe: Recipe, spec: str, weight: float) -> Weighted:
        function = self._model(spec) if Path(spec).is_dir() else load_reward(spec, self._remote)
        return Weighted(function, weight, lambda view: recipe.weight(spec, view["task"]))

    def _model(self, folder: str) -> RewardFunction:
        from gymdata.rewards._torch import RewardModel

        facts = model_facts(folder)
        check_tokenizer(list(lineage(self._config.path)), facts, self._config.path, self._progress)
        self.models.append(folder)
        return RewardModel(folder, facts.policy_hash)

    def _remote(self, url: str) -> RewardFunction:
        from gymdata.rewards.remote import RemoteReward

        config = self._config
        return RemoteReward(
            url,
            decode=self._decode,
            batch_size=config.request_batch,
            timeout_s=config.request_timeout,
            max_retries=config.retries,
        )

    @cached_property
    def _decode(self) -> Decode | None:
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

"""Games of textarena for one player, turn by turn."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from gymdata.environments.named import ENVIRONMENTS, SEED, SIZE, NamedEnvironment
from gymdata.environments.python_tools import PythonTools, ToolEpisode
from gymdata.environments.step import Step
from gymdata.errors import UsageError, raised
from gymdata.rollouts.messages import Message, Task

#: Games draw from the generators that all of a process share.
_DRAWING = threading.Lock()
_TASKS = 100


class _Game:
    """One game. It draws as if it were alone, so that a seed and the moves decide how it ends."""

    def __init__(self, which: str, arguments: Mapping[str, Any]) -> None:
        self._which, self._arguments = which, arguments
        self._drawn: tuple[Any, Any] | None = None

    def reset(self, seed: int, **_: Any) -> None:
        self.first_observation(seed)

    def first_observation(self, seed: int) -> str:
        import nltk
        import numpy as np
        import textarena

        with self._own_generators():
            random.seed(seed)
            np.random.seed(seed % 2**32)
            # Some games would fetch word lists; those must have been installed before.
            fetch, nltk.download = nltk.download, lambda *_, **__: False
            try:
                self._game = textarena.make(env_id=self._which, **self._arguments)
                self._game.reset(num_players=1, seed=seed)
            finally:
                nltk.download = fetch
            return self._observation()

    def respond(self, message: Message) -> Step:
        with self._own_generators():
            done, _ = self._game.step(action=message.get("content") or "")
            if not done:
                return Step(self._observation())
            rewards, _ = self._game.close()
        return Step(None, reward=float(rewards[0]), done=True, stop_reason="game_over")

    def _observation(self) -> str:
        """What the game says since it was last asked. Its wrappers would say all again each turn, with the moves."""
        from textarena import ObservationType, Wrapper

        game = self._game
        while isinstance(game, Wrapper):
            game = game.env
        _, observations = game.get_observation()
        return "\n".join(text for _, text, kind in observations if kind is not ObservationType.PLAYER_ACTION)

    @contextlib.contextmanager
    def _own_generators(self) -> Iterator[None]:
        import numpy as np

        with _DRAWING:
            process_states = random.getstate(), np.random.get_state()
            if self._drawn is not None:
                _set_generators(self._drawn)
            try:
                yield
            finally:
                self._drawn = random.getstate(), np.random.get_state()
                _set_generators(process_states)


def _set_generators(states: tuple[Any, Any]) -> None:
    import numpy as np

    random.setstate(states[0])
    np.random.set_state(states[1])


@ENVIRONMENTS.register("textarena", example="textarena:GuessTheNumber-v0")
class TextArena(NamedEnvironment):
    """A game of textarena; ``env_args``: those of the game, ``seed`` (0) of the first task and ``size`` (100)."""

    module, extra = "textarena", "textarena"

    def __init__(self, which: str, arguments: Mapping[str, Any], timeout_s: float) -> None:
        super().__init__(which, arguments, timeout_s)
        from textarena.envs.registration import ENV_REGISTRY

        if which not in ENV_REGISTRY:
            raise UsageError.unknown_choice("--env textarena", which, sorted(ENV_REGISTRY))
        game_arguments = {key: value for key, value in self.arguments.items() if key not in (SEED, SIZE)}
        self._make = partial(_Game, which, game_arguments)
        try:
            self._make().reset(0)
        except Exception as error:  # games raise anything
            if game_arguments:
                text = f"--set env_args of textarena:{which}: the game cannot be set up: {raised(error)}"
                names = ", ".join([SEED, SIZE, *ENV_REGISTRY[which].kwargs])
                raise UsageError(text, hint=f"its arguments include {names}") from error
            text = f"--env textarena:{which}: the game cannot be set up for one player: {raised(error)}"
            raise UsageError(text, hint="games for several players are not played here") from error
        self._tools = PythonTools(_Game, self.identity, timeout_s=timeout_s, make=self._make, tools=False)

    def tasks(self) -> Iterator[dict[str, Any]]:
        first = int(self.arguments[SEED])
        for seed in itertools.islice(itertools.count(first), int(self.arguments.get(SIZE, _TASKS))):
            prompt = self._make().first_observation(seed)
            yield {"task_id": f"{self.which}-{seed}", "prompt": prompt, "seed": seed}

    async def start(self, task: Task, rollout_index: int) -> ToolEpisode:
        return await self._tools.start(task, rollout_index)

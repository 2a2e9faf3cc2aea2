"""Games for one player of the package textarena, turn by turn; what the game says is the user's.

Run this file with a game and its arguments to get a task for each seed, ``GuessTheNumber-v0 size=50 > games.jsonl``, and
play them with ``collect games.jsonl --env text_games.py:Game --max-turns 12``. The reward is the game's at its end, and 0
where a limit ended it before. Games that read word lists of nltk need these installed.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import textarena

from gymdata import Step

#: Games draw from the generators that all of a process share.
_DRAWING = threading.Lock()


class Game:
    """One game. It draws as if it were alone, so that a seed and the moves decide how it ends."""

    _drawn: tuple[Any, Any] | None = None

    def reset(self, game: str, settings: Mapping[str, Any], seed: int, **_: Any) -> None:
        self._begin(game, settings, seed)

    def respond(self, message: Mapping[str, Any]) -> Step:
        with self._own_generators():
            done, _ = self._game.step(action=message["content"] or "")
            if not done:
                return Step(self._observation())
            rewards, _ = self._game.close()
        return Step(reward=float(rewards[0]), done=True, stop_reason="game_over")

    def _begin(self, game: str, settings: Mapping[str, Any], seed: int) -> str:
        with self._own_generators():
            random.seed(seed)
            np.random.seed(seed % 2**32)
            self._game = textarena.make(env_id=game, **settings)
            self._game.reset(num_players=1, seed=seed)
            return self._observation()

    def _observation(self) -> str:
        """What the game says since it was last asked. Its wrappers would say all again each turn, with the moves."""
        game = self._game
        while isinstance(game, textarena.Wrapper):
            game = game.env
        _, observations = game.get_observation()
        return "\n".join(text for _, text, kind in observations if kind is not textarena.ObservationType.PLAYER_ACTION)

    @contextlib.contextmanager
    def _own_generators(self) -> Iterator[None]:
        with _DRAWING:
            of_the_process = random.getstate(), np.random.get_state()
            if self._drawn is not None:
                _set_generators(self._drawn)
            try:
                yield
            finally:
                self._drawn = random.getstate(), np.random.get_state()
                _set_generators(of_the_process)


def _set_generators(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def tasks(game: str, size: int = 100, seed: int = 0, **settings: Any) -> Iterator[dict[str, Any]]:
    """A row for each of ``size`` seeds from ``seed`` on; its prompt is what the game says first."""
    for number in range(seed, seed + size):
        row = {"task_id": f"{game}-{number}", "prompt": Game()._begin(game, settings, number)}
        yield row | {"game": game, "settings": settings, "seed": number}


if __name__ == "__main__":
    given = {name: json.loads(value) for name, _, value in (word.partition("=") for word in sys.argv[2:])}
    sys.stdout.writelines(json.dumps(row) + "\n" for row in tasks(sys.argv[1], **given))

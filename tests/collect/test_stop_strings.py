"""Ids that an engine gives behind a stop string, and generations that it ends because they repeat themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gymdata.engines.port import Generation, SampleRequest
from gymdata.engines.sampling import cut_at_stop
from gymdata.rollouts.turns import expand_prompts
from tests.collect.fake_parts import FakeSampler
from tests.definition import sequences

Play = Callable[..., tuple[Any, list[dict[str, Any]]]]
PIECES = {1: "1", 2: "2\n", 3: "No", 4: ", 9", 5: "9</", 6: "answer", 7: "> x", 8: "\n"}


def decode(ids: Any) -> str:
    return "".join(PIECES[i] for i in ids)


def stopped(ids: list[int], stop: str | int | None, reason: str = "stop") -> Generation:
    top = [[(i, -0.1 * i)] for i in ids]
    spans = [("a", 0, 2), ("b", 2, len(ids))]
    return Generation([1], ids, [-0.1 * i for i in ids], reason, stop, top_log_probs=top, weight_versions=spans)


@pytest.mark.parametrize(
    ("ids", "stop", "min_tokens", "expected"),
    [
        ([1, 2, 3, 4], "\n", 0, [1, 2]),
        ([1, 2], "\n", 0, [1, 2]),
        ([1, 5, 6, 7, 3, 3], "</answer>", 0, [1, 5, 6, 7]),
        ([2, 3, 8, 4], "\n", 2, [2, 3, 8]),
        ([2, 3, 8, 4], "\n", 0, [2]),
        ([1, 3, 4], "\n", 0, [1, 3, 4]),
        ([1, 2, 3], 3, 0, [1, 2, 3]),
        ([1, 2, 3], None, 0, [1, 2, 3]),
    ],
)
def test_a_generation_ends_with_the_token_that_completes_its_stop_string(ids, stop, min_tokens, expected) -> None:
    """Ids, log-probs, alternatives and weight versions are cut alike, with the number of ids that were; a text within the
    first --min-tokens ends nothing, and neither does one that is not in the ids."""
    generation = cut_at_stop(stopped(ids, stop), decode, min_tokens)
    n = len(expected)
    assert (list(generation.token_ids), generation.n_cut) == (expected, len(ids) - n)
    assert len(generation.log_probs) == len(generation.top_log_probs or ()) == n
    assert (generation.weight_versions or [("", 0, 0)])[-1][2] == n


def test_only_a_stop_cuts() -> None:
    """A generation that was cut by a limit keeps its ids, whatever the reason names."""
    whole = stopped([1, 2, 3], "\n", "length")
    assert cut_at_stop(whole, decode, 0) is whole
    assert cut_at_stop(replace(whole, finish_reason="repetition"), decode, 0).token_ids == [1, 2, 3]


class Speculative(FakeSampler):
    """Goes on behind the stop string, as servers with speculative decoding do."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(lambda prompt, rng: "12\nNo, 99 it is")
        self.changes = {"stop_reason": "\n", **changes}

    def _one(self, request: SampleRequest, index: int) -> Generation:
        return replace(super()._one(request, index), **self.changes)


def test_ids_behind_a_stop_string_are_neither_read_nor_trained(play: Play) -> None:
    """The rollout, its message and its reward end with the stop string. The row says how many ids were cut of which turn,
    and its turns expand and train as they are stored."""
    _, rows = play(1, Speculative(), num_rollouts=2, sampling={"stop": ["\n"]}, rewards=["regex:^12\n$"])
    for row in rows:
        (turn,) = row["turns"]
        assert (bytes(turn["generation_token_ids"]), row["reward"]) == (b"12\n", 1.0)
        assert row["messages"][-1]["content"] == "12\n"
        assert json.loads(row["extra"])["ids_behind_stop"] == [{"turn": 0, "ids": 13}]
        expand_prompts(row["turns"])
        (sequence,) = sequences(row["turns"])
        assert bytes(sequence.input_ids[sequence.loss_mask == 1].astype("uint8")) == b"12\n"


def test_a_generation_that_repeats_itself_is_truncated(play: Play) -> None:
    """vLLM's finish_reason repetition is the end of a rollout that is scored, not a failed attempt."""
    sampler = Speculative(finish_reason="repetition", stop_reason="repetition_detected")
    summary, (row,) = play(1, sampler)
    assert (row["status"], row["stop_reason"], row["finish_reason"]) == ("truncated", "repetition", "repetition")
    assert summary.failures == 0

"""Turns are encoded, rebuilt, told apart and cut into sequences exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymdata.errors import DataError, RefusedError
from gymdata.rollouts.next_prompt import bridge_ids, next_prompt
from gymdata.rollouts.turns import (
    Call,
    TurnEncoder,
    count_breaks,
    encode_turns,
    expand_prompts,
    kinds,
    prompts_of,
    turn_digest,
)
from tests.definition import sequences


def call(prompt: list[int], generation: list[int], agent: str | None = None) -> Call:
    log_probs = np.full(len(generation), -0.5, np.float32)
    return Call(np.array(prompt, np.int32), np.array(generation, np.int32), log_probs, "stop", agent)


def calls_of(*pairs: tuple[list[int], list[int]]) -> list[dict]:
    return encode_turns([call(p, g) for p, g in pairs])


def test_a_continuing_turn_stores_only_what_the_environment_added():
    """A prompt that extends prompt ++ generation is stored as the tokens after it."""
    turns = calls_of(([1, 2, 3], [4, 5]), ([1, 2, 3, 4, 5, 6], [7]))
    assert [t["parent"] for t in turns] == [-1, 0]
    assert turns[1]["prefix_length"] == 5
    assert turns[1]["prompt_delta_ids"].tolist() == [6]
    assert kinds(turns) == ["first", "continues"]


def test_a_break_is_stored_at_the_first_token_that_differs():
    """A re-tokenised generation shows as a prefix shorter than what came before."""
    turns = calls_of(([1, 2], [40, 41, 9]), ([1, 2, 4041, 9, 5], [6]))
    assert turns[1]["prefix_length"] == 2
    assert kinds(turns) == ["first", "break"]
    assert count_breaks(turns) == 1


def test_the_parent_is_the_turn_that_shares_most_and_the_latest_among_equals():
    """A prompt that returns to an earlier turn is stored against the turn it shares most with."""
    turns = calls_of(([1, 2], [3]), ([1, 2, 3, 4], [5]), ([1, 2, 9], [9]), ([1, 2, 3, 4, 5, 6], [7]))
    assert [t["parent"] for t in turns] == [-1, 0, 1, 1]
    assert turns[3]["prefix_length"] == 5


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.lists(st.integers(0, 2), max_size=3), st.lists(st.integers(0, 2), max_size=3))
    )
)
def test_a_prompt_that_is_known_to_continue_is_stored_as_any_other(
    steps: list[tuple[int, list[int], list[int]]],
) -> None:
    """By its new ids alone; also where an earlier turn shares more of it than the turn before."""
    whole, known = TurnEncoder(), TurnEncoder()
    context: list[int] = []
    for cut, new, generation in steps:
        continues = context != [] and cut > 0
        prompt = (context if continues else context[: len(context) // 2]) + new
        whole.add(call(prompt, generation))
        known.add(call(new if continues else prompt, generation), continues=continues)
        context = prompt + generation
    assert str(known.columns()) == str(whole.columns())


SAID = [50, 51, 52, 53, 54, 55, 2]
CHAIN = (([1, 2], [3]), ([1, 2, 3, 10, 11, 12], SAID))
SHORT = (([1, 2], [3]), ([1, 2, 3, 10, 11], [50, 2]))
FORK = (([1, 2], [3]), ([1, 2, 3, 10, 4], [5]))
RETRIED = (([1, 2], [3]), ([1, 2, 3, 4], [5]))


@pytest.mark.parametrize(
    ("before", "prompt", "kind"),
    [
        # A prompt sampled twice is a retry, and the conversation continues with one of them.
        (RETRIED, [1, 2, 3, 4], "retry"),
        ((*RETRIED, ([1, 2, 3, 4], [6])), [1, 2, 3, 4, 6, 7], "continues"),
        # Leaving the chain in environment tokens is a branch only when no later generation is claimed.
        (FORK, [1, 2, 3, 10, 9], "branch"),
        (FORK, [1, 2, 3, 10, 9, 5, 6], "break"),
        (FORK, [8, 8], "break"),
        # The last context token and the first sampled one became one id; the same over more of them.
        (CHAIN, [1, 2, 3, 10, 11, 1250, *SAID[1:], 20, 4], "break"),
        (CHAIN, [1, 2, 3, 10, 11, 1250, *SAID[2:], 20, 4], "break"),
        (CHAIN, [1, 2, 3, 10, 1150, *SAID[1:], 20, 4], "break"),
        # An edited tool result, and the generation after it without its first or last token.
        (CHAIN, [1, 2, 3, 99, 11, 12, *SAID[1:], 20, 4], "break"),
        (CHAIN, [1, 2, 3, 99, 11, 12, *SAID[:-1], 20, 4], "break"),
        # The opening of a reasoning block was dropped with the block.
        (CHAIN, [1, 2, 3, 10, 11, *SAID[-2:], 20, 4], "break"),
        # Another tool result, with tokens that the generation has as well.
        (CHAIN, [1, 2, 3, 10, 99, 50, 51, 2, 20, 11, 12], "branch"),
        (CHAIN, [1, 2, 3, 99, 2, 20, 11, 12], "branch"),
        (CHAIN, [1, 2, 3, 10, 11, 13], "branch"),
        (CHAIN, [1, 2, 3, 10], "branch"),
        # Of a generation of one token and an end only the end is left, right after the merged token.
        (SHORT, [1, 2, 3, 10, 1150, 2, 20, 11], "break"),
        (SHORT, [1, 2, 3, 10, 99], "branch"),
    ],
)
def test_a_prompt_that_rewrites_a_generation_is_a_break(before: tuple[Any, ...], prompt: list[int], kind: str):
    """One that holds most of a generation that it leaves the chain before rewrites it; every other one is none."""
    turns = calls_of(*before, (prompt, [7]))
    assert kinds(turns)[-1] == kind
    assert count_breaks(turns) == (kind == "break")


@given(st.lists(st.integers(20, 60), min_size=3, max_size=12), st.data())
def test_any_merge_across_the_border_is_a_break(said: list[int], data: st.DataObject):
    """One id for the last tokens of the context and the first of the generation is a break, however many of each."""
    context = data.draw(st.lists(st.integers(70, 90), min_size=2, max_size=6))
    left, right = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    prompt = [1, 2, 3, *context[:-left], 1000, *said[right:], 99, 4]
    assert kinds(calls_of(([1, 2], [3]), ([1, 2, 3, *context], said), (prompt, [7])))[2] == "break"


def test_another_agent_with_its_own_prompt_is_a_branch():
    """A call made by another agent never counts as a rewritten history."""
    turns = encode_turns([call([1, 2], [3], "planner"), call([7, 7], [8], "worker")])
    assert kinds(turns) == ["first", "branch"]


@st.composite
def rollouts(draw: st.DrawFn) -> list[Call]:
    """Conversations over a tiny alphabet whose turns continue, repeat, fork from or forget earlier ones."""
    ids = st.lists(st.integers(0, 3), min_size=0, max_size=4)
    calls = [call(draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)), draw(ids))]
    for _ in range(draw(st.integers(0, 5))):
        base = calls[draw(st.integers(0, len(calls) - 1))]
        whole = [*base.prompt_token_ids.tolist(), *base.generation_token_ids.tolist()]
        cut = draw(st.integers(0, len(whole)))
        calls.append(call(whole[:cut] + draw(ids) or [0], draw(ids)))
    return calls


@given(rollouts())
def test_expanding_is_the_inverse_of_encoding(calls: list[Call]):
    """Every prompt comes back token for token, whatever the turns do."""
    turns = encode_turns(calls)
    for prompt, original in zip(expand_prompts(turns), calls, strict=True):
        assert prompt.tolist() == original.prompt_token_ids.tolist()


@given(rollouts())
def test_a_turn_shares_the_longest_prefix_that_any_earlier_turn_offers(calls: list[Call]):
    """No earlier prompt ++ generation shares more with a prompt than its stored parent does."""
    turns = encode_turns(calls)
    wholes = [[*c.prompt_token_ids.tolist(), *c.generation_token_ids.tolist()] for c in calls]
    for k, (turn, c) in enumerate(zip(turns, calls, strict=True)):
        shared = [
            next((i for i, (a, b) in enumerate(zip(w, c.prompt_token_ids.tolist(), strict=False)) if a != b),
                 min(len(w), len(c.prompt_token_ids)))
            for w in wholes[:k]
        ]  # fmt: skip
        if k:
            assert turn["prefix_length"] == max(shared)
            assert turn["parent"] == max(i for i, s in enumerate(shared) if s == max(shared))


@given(rollouts())
def test_every_generated_token_is_trained_exactly_once(calls: list[Call]):
    """Over all sequences of a rollout, each generation has mask 1 in exactly one, with its own log-probabilities."""
    turns = encode_turns(calls)
    trained: list[int] = []
    for sequence in sequences(turns):
        assert (sequence.logprobs[sequence.loss_mask == 0] == 0).all()
        for turn, start, mine in zip(sequence.turns, sequence.turn_starts, sequence.trained, strict=True):
            generation = turns[turn]["generation_token_ids"]
            end = start + len(generation)
            assert sequence.input_ids[:start].tolist() == calls[turn].prompt_token_ids.tolist()
            assert sequence.input_ids[start:end].tolist() == generation.tolist()
            assert (sequence.loss_mask[start:end] == mine).all()
            if mine:
                trained.append(turn)
    assert sorted(trained) == list(range(len(turns)))


def test_a_chain_of_turns_is_one_sequence_with_context_masked():
    """Turns that continue are stitched once, with mask 1 on generated tokens only."""
    (sequence,) = sequences(calls_of(([1, 2], [3]), ([1, 2, 3, 9], [4, 5])))
    assert sequence.input_ids.tolist() == [1, 2, 3, 9, 4, 5]
    assert sequence.loss_mask.tolist() == [0, 0, 1, 0, 1, 1]
    assert sequence.turn_starts.tolist() == [2, 4]


def test_an_abandoned_retry_can_be_left_out_without_losing_what_came_before_it():
    """Dropping a retry that nothing continues keeps every other generation trained once."""
    turns = calls_of(([1, 2], [3]), ([1, 2, 3, 4], [5]), ([1, 2, 3, 4], [6]), ([1, 2, 3, 4, 6, 7], [8]))
    kept, dropped = sequences(turns), sequences(turns, "drop")
    assert [s.abandoned for s in kept] == [True, False]
    assert len(dropped) == 1
    assert dropped[0].input_ids.tolist() == [1, 2, 3, 4, 6, 7, 8]
    assert dropped[0].loss_mask.tolist() == [0, 0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("field", ["prompt_delta_ids", "generation_token_ids", "generation_log_probs"])
def test_a_changed_element_is_found_at_its_turn_and_no_other(field: str):
    """One changed id or log-probability fails the digest of exactly that turn."""
    turns = calls_of(([1, 2], [3]), ([1, 2, 3, 9], [4, 5]), ([1, 2, 3, 9, 4, 5, 8], [6]))
    turns[1][field] = turns[1][field].copy()
    turns[1][field][0] += 1
    with pytest.raises(DataError, match=r"T209: turn 1"):
        expand_prompts(turns)
    above = turns[1]["digest"]
    last = turns[2]
    assert turn_digest(above, last["prefix_length"], last["prompt_delta_ids"], last["generation_token_ids"],
                       last["generation_log_probs"]) == last["digest"]  # fmt: skip


def test_the_digest_tells_which_list_a_token_is_in():
    """Moving a token from the delta to the generation changes the digest."""
    one, two = np.array([1], np.int32), np.array([1, 2], np.int32)
    none = np.empty(0, np.float32)
    assert turn_digest(0, 0, two, one[:0], none) != turn_digest(0, 0, one, two[1:], none)


def test_a_delta_that_cannot_be_expanded_is_refused_with_its_turn():
    """A prefix longer than what came before, or a parent that comes later, names the turn."""
    turns = calls_of(([1, 2], [3]), ([1, 2, 3, 9], [4]))
    with pytest.raises(DataError, match=r"T210: turn 1: got prefix_length 7"):
        expand_prompts([turns[0], {**turns[1], "prefix_length": 7}])
    with pytest.raises(DataError, match=r"T210: turn 1: got parent 1"):
        expand_prompts([turns[0], {**turns[1], "parent": 1}])


def test_the_bridge_is_what_follows_the_end_of_turn_that_closes_the_assistant():
    """The bridge drops the conversation up to the closing token and keeps the rest with the generation prompt."""
    assert bridge_ids([5, 6, 7, 2, 10], [5, 6, 7, 2, 9, 21, 22, 40], {2}) == [9, 21, 22, 40]


@pytest.mark.parametrize("held", [[1, 7, 2], [1, 7]])
def test_the_next_prompt_closes_the_turn_once(held: list[int]):
    """A turn cut by its length limit gets the end-of-turn token; one that sampled it does not get it twice."""
    assert next_prompt(held, [9, 21, 22, 40], [2]) == [1, 7, 2, 9, 21, 22, 40]


def test_a_template_that_rewrites_the_past_is_refused_with_the_place():
    """The refusal names the first token that changes."""
    with pytest.raises(RefusedError, match="token 1 changes"):
        bridge_ids([5, 6, 7, 2], [5, 8, 7, 2, 9], {2})
    with pytest.raises(RefusedError, match="end-of-turn"):
        bridge_ids([5, 6, 7], [5, 6, 7, 9], {2})


def test_nan_log_probabilities_have_one_representation():
    """A NaN of any payload is stored as the one NaN, so that a digest survives a text file."""
    odd = np.array([0x7FC00123], np.uint32).view(np.float32)
    encoder = TurnEncoder()
    encoder.add(Call(np.array([1], np.int32), np.array([2], np.int32), odd, "stop"))
    stored = encoder.turns[0]["generation_log_probs"]
    assert stored.tobytes() == np.array([np.nan], np.float32).tobytes()


def test_a_changed_turn_is_named_with_its_rollout():
    """Of a whole row the error says whose turn it is."""
    turns = calls_of(([1, 2], [3]))
    turns[0]["digest"] += 1
    with pytest.raises(DataError, match=r"^T209: rollout r7, turn 0") as refused:
        prompts_of({"rollout_id": "r7", "turns": turns})
    assert "gymdata validate" in str(refused.value)

"""A splice keeps the sampled ids and takes the rest from a rendered conversation, or refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymdata.errors import EXIT_FAULTS
from gymdata.rollouts.next_prompt import SpliceRefusedError, splice, splice_published

EOS, HEAD, USER = 2, [40, 41], [30, 31]


def rendered(turns: list[tuple[list[int], list[int]]], end: int = EOS) -> list[int]:
    """User and assistant turns, each closed by the same token."""
    return [i for user, said in turns for i in [*USER, *user, end, *HEAD, *said, end]]


def test_the_published_splice_keeps_sampled_ids_before_a_merged_token():
    """220, 17 were sampled where the rendering has 1001."""
    got = splice_published(
        [11, 12, 13, 40, 41, 220, 17, 2],
        [11, 12, 13, 40, 41, 1001, 2],
        [11, 12, 13, 40, 41, 1001, 2, 21, 22, 40, 41],
        2,
    )
    assert got == [11, 12, 13, 40, 41, 220, 17, 2, 21, 22, 40, 41]


def test_the_published_splice_counts_ends():
    """The cut is after as many EOS as the rendered history has, wherever they are."""
    assert splice_published([100, 2], [9, 2, 9, 2], [9, 2, 9, 2, 77, 88], 2) == [100, 2, 77, 88]


def test_the_published_splice_closes_a_turn_that_was_cut():
    """A model cut off before EOS gets it from the template."""
    assert splice_published([11, 40, 220], [11, 40, 1001, 2], [11, 40, 1001, 2, 21], 2) == [11, 40, 220, 2, 21]


@pytest.mark.parametrize("form", [splice_published, lambda a, b, c, e: splice(a, b, c, {e})])
def test_without_sampled_ids_the_rendering_is_the_prompt(form):
    """An empty model prefix gives the template."""
    assert form([], [1, 2], [1, 2, 3], 2) == [1, 2, 3]


@pytest.mark.parametrize("template_prefix", [[11, 40, 1001], [11, 2, 40, 2]])
def test_the_published_splice_refuses_missing_ends(template_prefix: list[int]):
    """No EOS in the history, or more there than in the whole, is an error."""
    with pytest.raises(SpliceRefusedError):
        splice_published([11, 40, 220, 2], template_prefix, [11, 40, 1001, 2, 21], 2)


def test_the_splice_does_the_published_examples_that_can_be_proved():
    """The merged token and the cut turn are spliced; a history of another length is refused."""
    whole = [11, 12, 13, 40, 41, 1001, 2, 21, 22, 40, 41]
    assert splice([11, 12, 13, 40, 41, 220, 17, 2], whole[:7], whole, {2}) == [
        11, 12, 13, 40, 41, 220, 17, 2, 21, 22, 40, 41
    ]  # fmt: skip
    assert splice([11, 40, 220], [11, 40, 1001, 2], [11, 40, 1001, 2, 21], {2}) == [11, 40, 220, 2, 21]
    with pytest.raises(SpliceRefusedError, match="1 turns were closed"):
        splice([9, 100, 2], [9, 2, 9, 2], [9, 2, 9, 2, 77, 88], {2})


def test_another_end_of_turn_is_not_doubled():
    """A turn closed by one end-of-turn token is not closed again by the one that the template writes."""
    assert splice([11, 40, 220, 3], [11, 40, 1001, 2], [11, 40, 1001, 2, 21], {2, 3}) == [11, 40, 220, 3, 21]
    assert splice_published([11, 40, 220, 3], [11, 40, 1001, 2], [11, 40, 1001, 2, 21], 2) == [11, 40, 220, 3, 2, 21]


def test_a_turn_without_ids_is_refused():
    """A last assistant message that was never sampled here must not vanish."""
    history = rendered([([5], [6]), ([7], [8])])
    held = rendered([([5], [6])])
    with pytest.raises(SpliceRefusedError) as caught:
        splice(held, history, [*history, *USER, 9, EOS, *HEAD], {EOS})
    assert caught.value.position == len(held)
    assert caught.value.expected_ids == held[-8:]
    assert caught.value.got_ids == history[len(held) - 8 : len(held) + 8]
    assert caught.value.exit_code == EXIT_FAULTS


def test_stripped_reasoning_is_spliced_when_the_last_turn_is_certain():
    """The template took 50, 51 away from the front of the last turn; the cut after it is still provable."""
    held = [*USER, 5, EOS, *HEAD, 50, 51, 60, 61, EOS]
    whole = [*USER, 5, EOS, *HEAD, 60, 61, EOS, *USER, 9, EOS, *HEAD]
    assert splice(held, held, whole, {EOS}) == [*held, *USER, 9, EOS, *HEAD]


def test_text_that_moved_behind_the_cut_is_refused():
    """A template that writes what the model said again after the tool's answer would have it read twice."""
    held = [*USER, 5, EOS, *HEAD, 50, 60, 61, 3]
    whole = [*USER, 5, EOS, *HEAD, 50, 3, 70, 71, 60, 61, EOS]
    with pytest.raises(SpliceRefusedError):
        splice(held, held, whole, {EOS, 3})


def test_an_open_last_turn_is_refused():
    """A template that does not close the last turn would have its words taken for the environment's."""
    history = [*USER, 5, EOS, *HEAD, 60, 61]
    with pytest.raises(SpliceRefusedError):
        splice([*USER, 5, EOS, *HEAD, 6061], history, [*history, EOS, *USER, 9, EOS, *HEAD], {EOS})


def test_a_dropped_turn_is_refused():
    """A template that leaves out the first round shifts every end-of-turn token."""
    history = rendered([([5], [6]), ([7], [8])])
    whole = [*rendered([([7], [8])]), *USER, 9, EOS, *USER, 10, EOS, *HEAD]
    with pytest.raises(SpliceRefusedError):
        splice(history, history, whole, {EOS})
    assert splice_published(history, history, whole, EOS) != [*history, *USER, 9, EOS, *USER, 10, EOS, *HEAD]


words = st.lists(st.integers(100, 110), min_size=1, max_size=5)
turns = st.lists(st.tuples(words, words), min_size=1, max_size=4)
feeds = st.sampled_from([[], [10]])


@given(turns, words, st.booleans(), st.sampled_from([EOS, 3]), feeds, st.data())
def test_kept_histories_are_always_spliced(conversation, asked, cut, end, feed, data):
    """Whatever the sampled ids are, with several ends of turn and a line feed after each, the splice is the held ids,
    closed once, and what is new."""
    pieces, held = [], []
    for user, said in conversation:
        pieces += [*USER, *user, EOS, *feed, *HEAD, *said, EOS, *feed]
        held += [*USER, *user, EOS, *feed, *HEAD, *data.draw(words), end, *feed]
    last = held[: len(held) - len(feed) - cut]
    new = [*feed, *USER, *asked, EOS, *feed, *HEAD]
    whole = [*pieces, *new[len(feed) :]]
    got = splice(last, pieces, whole, {EOS, 3})
    assert got == [*last, *([EOS] if cut else []), *new]


@given(words, words, words, st.integers(0, 4))
def test_a_splice_begins_with_the_sampled_ids(held, history, whole, at):
    """On any ids at all the result begins with the sampled ones and closes them once, or there is a refusal."""
    held, history = [*held, EOS], [*history[:at], EOS, *history[at:]]
    try:
        got = splice(held, history, [*whole, EOS, *whole], {EOS})
    except SpliceRefusedError:
        return
    assert got[: len(held)] == held
    assert got[len(held) : len(held) + 1] != [EOS]

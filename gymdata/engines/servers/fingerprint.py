"""The data by which samplers of one policy are compared, over HTTP or in processes of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: Ids of short prompts that every vocabulary can read, a text and a conversation: what servers are compared by.
PRINTS = ((1, 2, 3, 4), (7, 5, 3), (11, 13, 17, 19, 23), (42, 6, 9, 21, 8, 3))
PRINT_TEXT = "Grüße, 世界! 3.14159 == x**2\n\tend"
ALTERNATIVES = 5


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What distinguishes a server of one policy from that of another: names or hashes of weights, hashes of the tokens
    of a fixed text and conversation (None: the server does not say), and of fixed prompts the likeliest next tokens
    with their log-probabilities, in nats."""

    url: str
    model: str | None
    mode: str
    tokens: str | None
    rendered: str | None
    next_tokens: tuple[Mapping[int, float], ...]

    def difference(self, other: Fingerprint) -> float | None:
        """Mean absolute difference of log-probabilities, over the tokens that both give; None where they name so different
        tokens that their weights cannot be the same."""
        deltas: list[float] = []
        for tokens, other_tokens in zip(self.next_tokens, other.next_tokens, strict=True):
            both = tokens.keys() & other_tokens.keys()
            # The last places of a list may be taken by others that are almost as likely.
            if 2 * len(both) <= min(len(tokens), len(other_tokens)):
                return None
            deltas += [abs(tokens[token] - other_tokens[token]) for token in both]
        return sum(deltas) / len(deltas) if deltas else None

"""Conversations on a real tokenizer, sampled in spellings that it would not choose, with one break planted in each.

A plant says where its break must be found, and which cause it has. Calls are (prompt, generation, log-probs).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from gymdata.rollouts import turns as tokens

Ids = list[int]
_WORDS = [
    "the", "tool", "says", "that", "seven", "boxes", "of", "blue", "paper", "were", "sent", "to", "Berlin", "on", "Monday",
    "and", "größe", "naïve", "東京", "counts", "for", "nothing", "here", "because", "a", "price", "of", "417", "minus", "58",
]  # fmt: skip


@dataclass(frozen=True)
class Style:
    """How a template writes messages."""

    start: Callable[[str], str]
    end: str
    between: str = ""


CHATML = Style(lambda role: f"<|im_start|>{role}\n", "<|im_end|>", "\n")
HEADERS = Style(lambda role: f"<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>")


@dataclass
class Talk:
    """A clean conversation in parts: what each message is and its ids, in the order of the prompt."""

    parts: list[tuple[str, Ids]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def calls(self) -> list[list[Any]]:
        """Each generation with all that came before it as its prompt."""
        held: Ids = []
        found: list[list[Any]] = []
        for kind, ids in self.parts:
            if kind == "generation":
                found.append([list(held), list(ids), [-0.251 * (1 + i % 7) for i in range(len(ids))]])
            held += ids
        return found


@dataclass(frozen=True)
class Planted:
    """Calls with one break: the code of its cause, and where it must be found."""

    name: str
    code: str
    turn: int
    position: int
    calls: list[list[Any]]


class Maker:
    """Makes conversations and plants breaks; everything follows from ``seed``."""

    def __init__(self, tokenizer: Tokenizer, style: Style, seed: int) -> None:
        self.draw = random.Random(seed)
        self.style = style
        self.exact = tokenizer
        self.loose = Tokenizer.from_str(tokenizer.to_str())
        self.loose.model.dropout = 0.35
        self._vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._added = set(tokenizer.get_added_tokens_decoder())

    def encode(self, text: str, loose: bool = False) -> Ids:
        return list((self.loose if loose else self.exact).encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Ids) -> str:
        return str(self.exact.decode(ids, skip_special_tokens=False))

    def words(self, low: int, high: int) -> str:
        return " ".join(self.draw.choices(_WORDS, k=self.draw.randint(low, high)))

    def talk(self, turns: int = 5, *, loose: bool = True, system: bool = True) -> Talk:
        """System, user, then turns that think and call a tool, the last one answering."""
        s, made = self.style, Talk()
        given = s.start("system") + self.words(6, 20) + s.end + s.between if system else ""
        made.parts.append(("system", self.encode(given)))
        made.parts.append(("user", self.encode(s.start("user") + self.words(5, 25) + s.end + s.between)))
        for turn in range(turns):
            made.parts.append(("opening", self.encode(s.start("assistant"))))
            text = self.said(last=turn == turns - 1)
            made.texts.append(text)
            made.parts.append(("generation", self.encode(text, loose) + self.encode(s.end)))
            if turn < turns - 1:
                result = s.between + s.start("tool") + self.words(3, 30) + s.end + s.between
                made.parts.append(("tool", self.encode(result)))
        return made

    def said(self, last: bool) -> str:
        thought = f"<think>{self.words(4, 30)}</think>"
        if last:
            return thought + self.words(4, 20)
        return f"{thought}<tool_call>{json.dumps(self.call())}</tool_call>"

    def call(self) -> dict[str, Any]:
        values: list[Any] = [self.draw.randrange(1000), self.words(1, 4), self.draw.random() < 0.5, None, [1, 2]]
        arguments = {name: self.draw.choice(values) for name in self.draw.sample(["a", "b", "c", "place", "when"], 3)}
        return {"name": self.draw.choice(["look", "sum", "send"]), "arguments": arguments}

    def plant(self, name: str) -> Planted:
        """A conversation with the break ``name``."""
        make: Callable[[], Planted | None] = getattr(self, f"_{name}")
        while (made := make()) is None:
            # Not every conversation has a place for it.
            continue
        return made

    def _changed(self, name: str, code: str, talk: Talk, parts: list[tuple[str, Ids]], turn: int) -> Planted | None:
        """From ``turn`` on the prompts are made of ``parts``."""
        before, after = talk.calls(), Talk(parts).calls()
        calls = [*before[:turn], *after[len(after) - (len(before) - turn) :]]
        held = before[turn - 1][0] + before[turn - 1][1]
        at = next((i for i, (a, b) in enumerate(zip(held, calls[turn][0], strict=False)) if a != b), None)
        return None if at is None else Planted(name, code, turn, at, calls)

    def _pick(self, talk: Talk, kind: str, below: int) -> int:
        """Index of a part of ``kind`` that stands before the generation of turn ``below``."""
        generations = [i for i, (k, _) in enumerate(talk.parts) if k == "generation"]
        return self.draw.choice([i for i, (k, _) in enumerate(talk.parts) if k == kind and i < generations[below]])

    def _replaced(self, name: str, code: str, talk: Talk, at: int, ids: Ids, turn: int) -> Planted | None:
        parts = list(talk.parts)
        parts[at] = (parts[at][0], ids)
        return self._changed(name, code, talk, parts, turn)

    def _merge(self) -> Planted | None:
        """Two sampled tokens come back as the one that spells the same."""
        talk, turn = self.talk(), self.draw.randint(1, 4)
        at = self._pick(talk, "generation", turn)
        ids = talk.parts[at][1]
        for i in self.draw.sample(range(len(ids) - 2), len(ids) - 2):
            whole = self._spelt(self._piece(ids[i]), self._piece(ids[i + 1]))
            if whole is not None:
                return self._replaced("merge", "T201", talk, at, [*ids[:i], whole, *ids[i + 2 :]], turn)
        return None

    def _resplit(self) -> Planted | None:
        """One sampled token comes back as two."""
        talk, turn = self.talk(loose=False), self.draw.randint(1, 4)
        at = self._pick(talk, "generation", turn)
        ids = talk.parts[at][1]
        for i in self.draw.sample(range(len(ids) - 1), len(ids) - 1):
            piece = self._piece(ids[i])
            if piece is None or len(piece) < 2:
                continue
            cut = self.draw.randint(1, len(piece) - 1)
            halves = [self._spelt(piece[:cut]), self._spelt(piece[cut:])]
            if None not in halves:
                return self._replaced("resplit", "T201", talk, at, [*ids[:i], *halves, *ids[i + 1 :]], turn)
        return None

    def _piece(self, token: int) -> str | None:
        """How a token of plain text is written in the vocabulary, marks of spaces included."""
        piece = self.exact.id_to_token(token)
        return None if token in self._added or piece is None or piece.startswith("<0x") else piece

    def _spelt(self, *pieces: str | None) -> int | None:
        """The token that is written as these pieces in a row."""
        token = None if None in pieces else self._vocabulary.get("".join(p for p in pieces if p is not None))
        return token if token is not None and self._piece(token) is not None else None

    def _rerender(self) -> Planted | None:
        """A tool call is parsed and written again in the template's way."""
        talk, turn = self.talk(loose=False), self.draw.randint(1, 4)
        which = self.draw.randrange(turn)
        at = [i for i, (k, _) in enumerate(talk.parts) if k == "generation"][which]
        head, call = talk.texts[which].split("<tool_call>")
        value = json.loads(call.removesuffix("</tool_call>"))
        again = self.draw.choice(
            [
                json.dumps(value, separators=(",", ":")),
                "\n" + json.dumps(value) + "\n",
                json.dumps(value, ensure_ascii=False, indent=1),
                json.dumps({**value, "arguments": dict(reversed(value["arguments"].items()))}),
                json.dumps({**value, "arguments": json.dumps(value["arguments"])}),
            ]
        )
        ids = self.encode(f"{head}<tool_call>{again}</tool_call>") + self.encode(self.style.end)
        return self._replaced("rerender", "T202", talk, at, ids, turn)

    def _stripped(self) -> Planted | None:
        """Earlier reasoning is left out, in one turn or in all."""
        talk, turn = self.talk(), self.draw.randint(1, 4)
        parts, open_, close = list(talk.parts), self.encode("<think>")[-1], self.encode("</think>")[-1]
        for at in {self._pick(talk, "generation", turn), self._pick(talk, "generation", turn)}:
            ids = parts[at][1]
            parts[at] = ("generation", ids[: ids.index(open_)] + ids[ids.index(close) + 1 :])
        return self._changed("stripped", "T203", talk, parts, turn)

    def _edited(self) -> Planted | None:
        """A message that the model did not write says something else."""
        talk, turn = self.talk(), self.draw.randint(2, 4)
        kind = self.draw.choice(["system", "user", "tool"])
        at = self._pick(talk, kind, turn - 1)
        ids = list(talk.parts[at][1])
        if len(ids) < 10:
            return None
        where = self.draw.randrange(6, len(ids) - 3)
        new = self.encode(" " + self.words(1, 5))
        if not self.decode(new).strip() or self.decode(ids[where : where + 1]).strip() in self.decode(new):
            return None
        made = ids[:where] + new + ids[where + self.draw.randint(0, 1) :]
        return self._replaced("edited", "T203", talk, at, made, turn)

    def _dropped(self) -> Planted | None:
        """The oldest messages are left out, after the system message or from the very start."""
        system = self.draw.random() < 0.6
        talk, turn = self.talk(system=system), self.draw.randint(2, 4)
        first = 2 + 3 * self.draw.randint(1, turn - 1)
        parts = [*talk.parts[:1], *talk.parts[first:]]
        if self.draw.random() < 0.3:
            # A window in tokens, that does not care for messages.
            size = sum(len(ids) for _, ids in talk.parts[1:first]) - self.draw.randint(1, 4)
            flat = [(kind, i) for kind, ids in talk.parts[1:] for i in ids][size:]
            parts = [talk.parts[0]]
            for kind, i in flat:
                if parts[-1][0] == kind and len(parts) > 1:
                    parts[-1][1].append(i)
                else:
                    parts.append((kind, [i]))
        return self._changed("dropped", "T204", talk, parts, turn)


BREAKS = ("merge", "resplit", "rerender", "stripped", "edited", "dropped")


def encoded(calls: list[list[Any]]) -> Iterator[tokens.Call]:
    """Calls as the turn encoder takes them."""
    import numpy as np

    for prompt, generation, log_probs in calls:
        arrays = np.array(prompt, np.int32), np.array(generation, np.int32), np.array(log_probs, np.float32)
        yield tokens.Call(*arrays, "stop")

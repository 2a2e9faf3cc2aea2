"""Message trees of OpenAssistant, nested or as flat messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from gymdata.interop.formats import FORMATS, Format
from gymdata.interop.formats.published._compared import Ranked, finite
from gymdata.interop.importing import BadItem, Importing, TableRow
from gymdata.interop.text_rows import conversation, rollout_row
from gymdata.rollouts.messages import JsonObject, Message

if TYPE_CHECKING:
    from gymdata.store.paths import Source


class _Trees(Format):
    item = "a message tree"
    marks = (b'"message_tree_id"', b'"message_id"')
    holds_text = True

    def documents(self, sources: Iterable[Source]) -> Iterator[tuple[Source, int, Any, bytes]]:
        """Flat messages become a document per tree, at the line of its first message; those of a list are one document."""
        for source in sources:
            trees: dict[str, tuple[int, bytes, list[JsonObject]]] = {}
            for document in super().documents([source]):
                _, line, value, text = document
                rows = value if isinstance(value, list) else [value]
                if not any(isinstance(row, dict) and "message_id" in row for row in rows):
                    yield document
                    continue
                for row in rows:
                    tree = row.get("message_tree_id") if isinstance(row, dict) else None
                    if isinstance(tree, str) and not row.get("replies"):
                        trees.setdefault(tree, (line, text, []))[2].append(row)
                    else:
                        yield source, line, row, text
            for line, of_line in groupby(trees.items(), key=lambda tree: tree[1][0]):
                values = [(text, {"message_tree_id": name, "messages": rows}) for name, (_, text, rows) in of_line]
                yield source, line, [tree for _, tree in values] if len(values) > 1 else values[0][1], values[0][0]


@FORMATS.register("oasst")
class Oasst(_Trees):
    """Message trees of OpenAssistant (oasst1, oasst2), nested (also from their first message on) or as flat messages: a
    rollout per tree, its best path. After each message comes its only reply, or the one of the lowest ``rank``; the path
    ends where none of several has one. All other replies are lost, and labels are not read. Training on pairs reads
    ``oasst-pairs``."""

    other = "oasst-pairs"
    content = "message trees of OpenAssistant"

    def recognise_row(self, row: JsonObject) -> bool:
        root = row["prompt"] if isinstance(row.get("prompt"), dict) else row
        is_tree = "message_tree_id" in row or isinstance(row.get("replies"), list)
        return is_tree and {"message_id", "text", "role"} <= root.keys()

    def row(self, item: Any, importing: Importing) -> TableRow:
        message: JsonObject | None = _root(item)
        path = list[JsonObject]()
        while message is not None:
            path.append(message)
            replies = _replies(message)
            ranked = [reply for reply in replies if reply.get("rank") is not None]
            best = min(ranked, key=lambda reply: finite(reply, "rank"), default=None)
            message = replies[0] if len(replies) == 1 else best
        last = max((n for n, message in enumerate(path) if message.get("role") == "assistant"), default=0)
        written = conversation([*map(_message, path[: last + 1])], "messages")
        row = item | {"lang": path[0].get("lang")}
        return rollout_row(row, [], written, importing, texts=("prompt", "tree_state", "text", "replies"))


@FORMATS.register("oasst-pairs")
class OasstPairs(_Trees, Ranked):
    """Message trees of OpenAssistant where pairs are trained, or by name (`import --from oasst-pairs`): wherever replies of
    the assistant have a ``rank``, a pair of the best one and each worse one, after the messages that lead there. Replies
    without a rank are lost."""

    other = "oasst"
    content = "ranked replies of OpenAssistant"

    def recognise(self, value: Any) -> bool:  # noqa: ARG002 - its rows are those of oasst
        """Message trees are ``oasst``."""
        return False

    def ranked(self, item: JsonObject) -> Iterator[tuple[Any, Sequence[tuple[float, Any]]]]:
        paths = [[_root(item)]]
        while paths:
            path = paths.pop(0)
            replies = _replies(path[-1])
            ranked = [r for r in replies if r.get("role") == "assistant" and r.get("rank") is not None]
            yield [*map(_message, path)], [(finite(reply, "rank"), reply["text"]) for reply in ranked]
            paths += [[*path, reply] for reply in replies]


def _message(message: JsonObject) -> Message:
    role = message["role"]
    return {"role": "user" if role == "prompter" else role, "content": message["text"]}


def _replies(message: JsonObject) -> list[JsonObject]:
    return [reply for reply in message.get("replies") or () if not reply.get("deleted")]


def _root(item: JsonObject) -> JsonObject:
    """The first message of a tree, with the ``replies`` of each message. Raises BadItem for flat messages that are none."""
    if "messages" not in item:
        root: JsonObject = item if isinstance(item.get("replies"), list) else item["prompt"]
        return root
    messages = {message["message_id"]: message | {"replies": []} for message in item["messages"]}
    roots = list[JsonObject]()
    for name, message in messages.items():
        parent = message.get("parent_id")
        if parent is not None and parent not in messages:
            raise BadItem("S103", f"message_id {name!r:.100}: its parent {parent!r:.100} is not in the file")
        (roots if parent is None else messages[parent]["replies"]).append(message)
    if len(roots) != 1 or len(messages) != len(item["messages"]):
        expected = "expected one message without a parent, and each message_id once"
        raise BadItem("S102", f"message_tree_id {item['message_tree_id']!r:.100}: {expected}")
    return roots[0]

"""Batches that verl keeps to skip its rollouts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from gymdata.formats import FORMATS, Format
from gymdata.formats.conversion.importing import BadItem, Importing, TableRow
from gymdata.formats.conversion.masked import Masked, listed
from gymdata.formats.conversion.models import Int32, Model, Number, Several, read
from gymdata.formats.text.rows import conversation, rollout_row
from gymdata.formats.text.words import named_scores, score
from gymdata.formats.verl_batch import written
from gymdata.rollouts.messages import JsonObject, object_of
from gymdata.rollouts.truth import is_number

if TYPE_CHECKING:
    import pyarrow as pa

    from gymdata.formats.conversion.exporting import Export
    from gymdata.store.paths import Source
    from gymdata.store.stage_output import Part

#: Columns of the prompts' data set that a task has, and other columns of a rollout.
_OF_TASK = ("data_source", "ability", "reward_model", "extra_info", "index", "agent_name", "raw_prompt")
_ABOUT = ("step", "row", "uid", "session", "min_global_steps", "max_global_steps")
#: What ``skip.rollout_tq`` has beside the columns: of each row its key and tags. A key ends with two numbers.
_OF_QUEUE, _SESSION = ("keys", "tags"), 2
_OF_RESPONSE = ("responses", "response_mask", "rollout_log_probs")
#: What verl pads columns with besides 0: log-probabilities of its earlier versions with −1.
_FILLERS = {"rollout_log_probs": (0, -1)}
#: What no rollout here has a place for.
_UNREAD = ("teacher_logprobs", "teacher_ids", "routed_experts", "turn_scores", "tool_rewards")


class Sequence(Model):
    prompts: Several[Int32]
    responses: Several[Int32]
    response_mask: list[Any] | None = None
    rollout_log_probs: list[Number] | None = None
    rm_scores: list[Number] | None = None
    raw_prompt: list[JsonObject] | None = None
    uid: str | None = None


@FORMATS.register("verl-skip")
class VerlSkip(Format):
    """verl's ``skip.rollout`` (``gen_batch.dp``) and ``skip.rollout_tq`` (``tq_batch.pt``): ``prompts``, ``responses``, the
    spans of ``response_mask``, ``rollout_log_probs``, the sum of ``rm_scores``, ``uid`` or else the prompt's ids as the
    group, ``raw_prompt``, and the step of the weights where a rollout has one. There is no text of what was sampled; a limit
    that cut it is not named."""

    content = "rollouts that verl keeps"
    suffixes = (".pt",)
    columns = ("rollout_id", "group_id", "rollout_index", "reward", "rewards", "task", "extra", "turns")
    unread = ("turns.top_log_probs",)
    carries = ("rewards", "named rewards")
    holds_ids = holds_logprobs = holds_reward = True

    def recognise(self, value: Any) -> bool:
        return "responses" in value["batch" if "non_tensor_batch" in value else "tensordict"]

    def documents(self, sources: Iterable[Source]) -> Iterator[tuple[Source, int, Any, bytes]]:
        """Of a batch without its step the step is the name of its folder."""
        for source, line, value, text in super().documents(sources):
            name = source.path.absolute().parent.name
            step = {"global_steps": int(name)} if isinstance(value, dict) and name.isdecimal() else {}
            yield source, line, step | value if step else value, text

    def items(self, value: Any) -> Iterator[tuple[str, Any]]:
        is_padded = "non_tensor_batch" in value
        columns = value["batch"] | value["non_tensor_batch"] if is_padded else value["tensordict"]
        keys = object_of(value.get("meta_info")).get("reward_extra_keys") or ()
        prompts = dict[str, tuple[int, bytes]]()
        lists, total = columns if is_padded else columns | {k: value[k] for k in _OF_QUEUE}, len(columns["responses"])
        for n in range(total):
            if short := next((name for name, column in lists.items() if len(column) <= n), None):
                fault = f"{short}: got {len(lists[short])}, expected {total}, one per row of responses"
                yield f"row {n}: ", BadItem("S102", fault)
                continue
            row = {name: column[n] for name, column in columns.items()}
            if not is_padded:
                uid, *session = str(value["keys"][n]).rsplit("_", 2)
                if len(session) != _SESSION:
                    yield f"row {n}: ", BadItem.value(f"keys[{n}]", value["keys"][n], "UID_SESSION_OUTPUT")
                    continue
                row |= value["tags"][n] | {"uid": uid, "session": "_".join(session)}
            first, ids = prompts.setdefault(str(row.get("uid", n)), (n, np.asarray(row["prompts"]).tobytes()))
            if ids != np.asarray(row["prompts"]).tobytes():
                yield f"row {n}: ", BadItem("S102", f"uid: got that of row {first}, whose prompt is another")
                continue
            row |= object_of(row.get("extra_fields"))
            rewards = {name: row[name] for name in keys} | object_of(row.get("reward_extra_info"))
            yield (
                f"row {n}: ",
                row | {"step": value.get("global_steps"), "row": n, "rewards": rewards, "is_padded": is_padded},
            )

    def row(self, item: Any, importing: Importing) -> TableRow:
        if item.get("multi_modal_inputs"):
            raise BadItem("S102", "multi_modal_inputs: images, audio and video are not trained")
        for name in _UNREAD:
            importing.unread[f"`{name}`"] += item.get(name) is not None
        if flat := next((k for k in (*_OF_RESPONSE, "rm_scores") if isinstance(item.get(k), np.number)), None):
            raise BadItem("S102", f"{flat}: got {item[flat]}, expected a list, one per token of responses")
        item = _cut(item) if item["is_padded"] else item
        names = ("prompts", *_OF_RESPONSE, "rm_scores", *_OF_TASK, *_ABOUT, "rewards")
        item = listed({name: item[name] for name in names if item.get(name) is not None})
        sequence, rewards = read(Sequence, item), item.pop("rewards")
        mask, log_probs = sequence.response_mask, sequence.rollout_log_probs
        masked = Masked(sequence.prompts, sequence.responses, mask, log_probs, _OF_RESPONSE)
        steps = {str(item.get(name)) for name in ("min_global_steps", "max_global_steps")} - {"None"}
        return rollout_row(
            item,
            conversation(sequence.raw_prompt, "raw_prompt") if sequence.raw_prompt else [],
            [],
            importing,
            reward=None if sequence.rm_scores is None else score(math.fsum(sequence.rm_scores), "rm_scores"),
            rewards=named_scores({name: value for name, value in rewards.items() if is_number(value)}),
            texts=("prompts", *_OF_RESPONSE, "rm_scores", "raw_prompt"),
            about=_ABOUT,
            group=sequence.uid or masked.group,
            turns=masked.turns(versions=[*steps] if len(steps) == 1 else ()),
        )

    def convert(self, batches: Iterable[pa.RecordBatch], export: Export) -> Iterator[tuple[str, JsonObject]]:
        return written(batches, export, self.carries)

    def save(self, converted: Iterable[tuple[str, JsonObject]], part: Part, export: Export) -> None:
        from gymdata.formats._verl_batch import save

        rows = dict(converted)
        export.written += len(rows)
        save(part.path, rows)


def _cut(row: JsonObject) -> JsonObject:
    """The row without the padding before its prompt and after its response. Raises BadItem for padding within them, and for
    what is said of tokens that are padding."""
    if "attention_mask" not in row:
        raise BadItem("S102", "attention_mask: missing, which says what is padding")
    prompt, width, is_real = len(row["prompts"]), len(row["responses"]), np.asarray(row["attention_mask"]) != 0
    if len(is_real) != prompt + width:
        expected = f"{prompt + width}, one per token of prompts and responses"
        raise BadItem("S102", f"attention_mask: got {len(is_real)}, expected {expected}")
    length, given = int(is_real[prompt:].sum()), int(is_real[:prompt].sum())
    if len(holes := np.flatnonzero(~is_real[prompt - given : prompt + length])):
        raise BadItem("S102", f"attention_mask[{prompt - given + holes[0]}]: got 0 between tokens that it counts")
    columns = {name: row[name] for name in (*_OF_RESPONSE, "rm_scores") if row.get(name) is not None}
    for name, values in columns.items():
        if len(values) != width:
            raise BadItem("L301", f"{name}: got {len(values)}, expected {width}, one per token of responses")
        beyond = np.asarray(values[length:])
        if name != "responses" and len(odd := np.flatnonzero(~np.isin(beyond, _FILLERS.get(name, (0,))))):
            raise BadItem("S102", f"{name}[{length + odd[0]}]: got {beyond[odd[0]]} after the response, in its padding")
    return (
        row
        | {name: values[:length] for name, values in columns.items()}
        | {"prompts": row["prompts"][prompt - given :]}
    )

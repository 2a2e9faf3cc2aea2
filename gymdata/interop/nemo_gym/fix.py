"""Writing a repaired copy of NeMo Gym rows: clean lines byte for byte, faulty ones split, shortened or left out.

Invariants: ids and log-probabilities are never changed; an item keeps its place in the conversation, in a later
part's input when it came before the part; the copy appears whole or not at all.
"""

from __future__ import annotations

import copy
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gymdata.checks import repair
from gymdata.checks.violations import Violation
from gymdata.interop.nemo_gym import rows as nemo_rows
from gymdata.rollouts.messages import TOKEN_KEYS, JsonObject, walk, written_by_model
from gymdata.rollouts.turns import encode_turns
from gymdata.store.lines import row_lines
from gymdata.store.paths import Source


def fix_nemo_gym(
    sources: Sequence[Source],
    violations: Iterable[Violation],
    choice: repair.Choice,
    output: Path,
    account: repair.FixReport,
) -> None:
    """Write the repaired rows of ``sources`` to the file ``output`` itself; count in ``account``."""
    faults: dict[tuple[str, int], list[Violation]] = defaultdict(list)
    for v in violations:
        if v.severity == "error":
            faults[v.file or "", v.row].append(v)
    with output.open("wb") as file:
        for source in sources:
            for number, (_, line) in enumerate(row_lines(source)):
                for output_line in _row(line, faults.get((str(source.path), number), []), choice, account):
                    file.write(output_line.rstrip(b"\r\n") + b"\n")


def _row(line: bytes, faults: list[Violation], choice: repair.Choice, account: repair.FixReport) -> Iterator[bytes]:
    if any(v.code.startswith("S") for v in faults):
        account.rows_unreadable += 1
        return
    account.rollouts_in += 1
    if not faults:
        account.rollouts_out += 1
        yield line
        return
    account.rollouts_with_errors += 1
    for code, n in Counter(v.code for v in faults).items():
        account.by_code[code] = account.by_code.get(code, 0) + n
    value = nemo_rows.load(line)
    row = nemo_rows.read_carefully(line)
    sizes = [len(call.generation) if call is not None else 0 for call in row.calls]
    roots = _roots(row.calls)
    plans = {c: repair.plan(len(sizes), roots, faults, c) for c in repair.CHOICES}
    for name, keep in plans.items():
        account.costs[name].count(sizes, keep)
    for index, part in enumerate(plans[choice]):
        account.rollouts_out += 1
        output_row = _part(value, part, len(sizes))
        output_row["fixed"] = {"choice": choice, "part": index, "codes": sorted({v.code for v in faults})}
        if isinstance(output_row.get("rollout_id"), str) and len(plans[choice]) > 1:
            output_row["rollout_id"] += f"-part{index + 1}"
        yield json.dumps(output_row, ensure_ascii=False).encode()


def _roots(calls: Sequence[nemo_rows.Call | None]) -> list[int] | None:
    """Where each call's unbroken chain began; None when some call has no prompt ids."""
    with_prompt = [c for c in calls if c is not None and c.prompt]
    if len(with_prompt) != len(calls):
        return None
    return repair.chain_roots(encode_turns([call.ids_alone() for call in with_prompt]))


def _part(value: JsonObject, part: Sequence[int], turns: int) -> JsonObject:
    """A row with the items of the turns in ``part`` as its output, and what came before them in its input."""
    output_row = copy.deepcopy(value)
    before: list[Any] = []
    output: list[Any] = []
    gone: set[Any] = set()
    for turn, item in walk(output_row["response"]["output"]):
        ours = turn in part
        if turn < part[0]:
            bare = {k: v for k, v in item.items() if k not in TOKEN_KEYS}
            (before if turn >= 0 or part[0] > 0 else output).append(bare)
        elif turn > part[-1] and part[-1] < turns - 1:
            break
        elif ours and item.get("call_id") not in gone:
            output.append(item)
        elif not ours and item.get("call_id") is not None:
            gone.add(item["call_id"])
    # The last turn's tool results were never read by a turn that is kept.
    while output and part[-1] < turns - 1 and not written_by_model(output[-1]):
        output.pop()
    output_row["response"]["output"] = output
    if before:
        input_items = output_row.setdefault("responses_create_params", {}).get("input") or []
        input_items = [{"role": "user", "content": input_items}] if isinstance(input_items, str) else input_items
        output_row["responses_create_params"]["input"] = [*input_items, *before]
    return output_row

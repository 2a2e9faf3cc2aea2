"""The JSON Schemas of what gymdata writes: tables as JSON lines hold them, and run.json.

Tables come from the Arrow schemas, run.json from its model. ``schemas/`` has what this code writes: ``python
.ci/table_schemas.py --write schemas/`` writes it again, ``--check schemas/`` exits with 1 when it is stale.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

from gymdata.rollouts.messages import ROLES
from gymdata.rollouts.schema import NAMED_VALUE, TABLES, Table
from gymdata.settings import DIALECT
from gymdata.store.lines import NON_FINITE
from gymdata.store.run_model import RunJson

_INTEGER_BITS = {pa.int8(): 8, pa.int32(): 32, pa.int64(): 64}
#: Columns whose text is itself JSON.
_JSON_TEXT = frozenset({"tools", "task", "extra", "tool_calls", "usage"})
_CHOICES = {
    ("rollouts", "status"): ["completed", "truncated"],
    ("scores", "status"): ["scored", "failed"],
    ("comparisons", "status"): ["judged", "unparsed", "refused", "failed"],
    ("violations", "severity"): ["error", "warning", "info"],
    ("", "role"): list(ROLES),
}


#: Tables to whose lines rows are added one by one, each with its checksum.
_APPENDED = ("rollouts", "comparisons")
_CHECKSUM = {
    "type": "string",
    "pattern": "^[0-9a-f]{8}$",
    "description": "Where rows were added one by one, the last key of each line: the crc32 of the bytes before it.",
}


def json_schema(table: Table) -> dict[str, object]:
    """The JSON Schema of one row of ``table`` in JSON lines."""
    schema = _object(table.name, list(table.schema), table.optional)
    if table.name in _APPENDED:
        schema["properties"] |= {"crc32": _CHECKSUM}
    return {
        "$schema": DIALECT,
        "title": table.name,
        "description": f"One row of the table {table.name}, version {table.version}.",
        "x-gymdata-schema": table.name,
        "x-gymdata-version": table.version,
        **schema,
    }


def files() -> dict[str, str]:
    """File name → content of everything that is generated."""
    schemas = {f"{table.name}.schema.json": json_schema(table) for table in TABLES.values()}
    schemas["run.schema.json"] = {
        "$schema": DIALECT,
        **RunJson.model_json_schema(),
        "title": "run.json",
    }
    return {name: json.dumps(schema, indent=2) + "\n" for name, schema in schemas.items()}


def stale(folder: Path) -> list[str]:
    """Names of generated files in ``folder`` that are missing or differ, and of schema files that nothing generates."""
    expected = files()
    wrong = [n for n, text in expected.items() if not (folder / n).is_file() or (folder / n).read_text() != text]
    return wrong + sorted(p.name for p in folder.glob("*.schema.json") if p.name not in expected)


def _object(owner: str, fields: list[pa.Field], optional: frozenset[str] = frozenset()) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {f.name: _field(owner, f) for f in fields},
        # Nullable keys may be left out, except that a file has an optional column in all rows or in none.
        "required": [f.name for f in fields if not f.nullable and f.name not in optional],
        "additionalProperties": False,
    }


def _field(owner: str, f: pa.Field) -> dict[str, Any]:
    schema = _type(owner, f.type)
    if f.name in _JSON_TEXT:
        schema["contentMediaType"] = "application/json"
    choices = _CHOICES.get((owner, f.name)) or _CHOICES.get(("", f.name))
    if choices:
        schema["enum"] = [*choices, None] if f.nullable else choices
    if not f.nullable:
        return schema
    if "anyOf" in schema:
        return {"anyOf": [*schema["anyOf"], {"type": "null"}]}
    return schema | {"type": [schema["type"], "null"]}


def _type(owner: str, kind: pa.DataType) -> dict[str, Any]:
    if kind in _INTEGER_BITS:
        bound = 1 << (_INTEGER_BITS[kind] - 1)
        return {"type": "integer", "minimum": -bound, "maximum": bound - 1}
    if pa.types.is_floating(kind):
        return {"anyOf": [{"type": "number"}, {"enum": list(NON_FINITE)}], "x-arrow-type": str(kind)}
    if pa.types.is_timestamp(kind):
        return {"type": "string", "format": "date-time"}
    if pa.types.is_list(kind):
        if kind.value_type == NAMED_VALUE:
            return {"type": "object", "additionalProperties": _field(owner, NAMED_VALUE.field("value"))}
        return {"type": "array", "items": _type("", kind.value_type)}
    if pa.types.is_struct(kind):
        return _object("", list(kind))
    return {"type": "string"}


def main(arguments: list[str] | None = None) -> int:
    """Write or check the folder of schemas; 1 when it is stale."""
    parser = argparse.ArgumentParser(prog="python .ci/table_schemas.py", description=__doc__.splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="FOLDER")
    action.add_argument("--check", type=Path, metavar="FOLDER")
    chosen = parser.parse_args(arguments)
    if chosen.write:
        chosen.write.mkdir(parents=True, exist_ok=True)
        for name, text in files().items():
            (chosen.write / name).write_text(text)
        return 0
    wrong = stale(chosen.check)
    for name in wrong:
        sys.stderr.write(f"{chosen.check / name}: stale; run: python .ci/table_schemas.py --write schemas/\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""The JSON Schema of ``gymdata finetune``'s file, for editors, made from the classes that check it."""

from __future__ import annotations

from typing import Any

from gymdata.commands.experience.settings import ExperienceConfig
from gymdata.commands.finetune.settings import IGNORED_KEYS, KINDS, FinetuneConfig, OfCommand
from gymdata.commands.pairs.settings import PairsConfig
from gymdata.settings import DIALECT, Settings


def schema() -> dict[str, object]:
    """The schema of a whole file. Parts of shipped kinds have their keys; others may have any."""
    document = FinetuneConfig.model_json_schema(by_alias=True)
    definitions: Settings = document["$defs"]
    definitions.pop("Part", None)
    for section, kinds in KINDS.items():
        shipped = [
            {
                "type": "object",
                "properties": {"_type": {"const": name}, **_properties(kind, definitions)},
                "required": ["_type"],
                "additionalProperties": False,
            }
            for name, kind in kinds.items()
        ]
        described = {"description": "An entry point's name, or path.py:Class; the other keys go to it."}
        type_of: Settings = {"not": {"enum": list(kinds)}}
        if section == "eval.evaluators":
            described, type_of = {}, {"pattern": r"\.py:\w+$"}
            entry = definitions["EvalSection"]["properties"]["evaluators"]
        else:
            entry = document["properties"][section] = {"type": "object"}
        type_key = {"properties": {"_type": {"type": "string", **type_of}}, "required": ["_type"]}
        entry["additionalProperties"] = {"anyOf": [*shipped, {"type": "object", **described, **type_key}]}
    for name in IGNORED_KEYS:
        document["properties"][name] = {
            "description": "Of the NeMo Agent Toolkit: an environment or an agent stands in."
        }
    for name in ("output_dir", "output"):
        definitions["EvalGeneral"]["properties"][name] = {"description": "Not read: see finetuning.output_dir."}
    return {"$schema": DIALECT, **document, "title": "gymdata finetune"}


def _properties(kind: Any, definitions: Settings) -> Settings:
    properties = _of(kind, definitions)
    if issubclass(kind, OfCommand):
        properties |= {k: v for k, v in _of(kind.command, definitions).items() if k in kind.accepted_keys()}
    for key, config in (("pairs", PairsConfig), ("experience", ExperienceConfig)):
        if key in properties:
            inside = _of(config, definitions)
            properties[key] = {"type": "object", "properties": inside, "additionalProperties": False}
    return properties


def _of(model: Any, definitions: Settings) -> Settings:
    model_schema = model.model_json_schema(by_alias=True)
    definitions.update(model_schema.get("$defs", {}))
    properties: Settings = model_schema["properties"]
    return properties

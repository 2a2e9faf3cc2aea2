"""The reward ``json_schema``."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import orjson

from gymdata.errors import RewardError, UsageError, needs, option
from gymdata.rewards.named import REWARDS, NamedReward
from gymdata.rewards.port import TaskRow


@REWARDS.register("json_schema")
class JsonSchema(NamedReward):
    """The last message is JSON that fits the schema."""

    needs = "`--reward json_schema:FILE` or the task column `schema`"
    column = "schema"
    argument = "FILE"

    def __init__(self, name: str, argument: str | None) -> None:
        with needs("rewards"):
            import jsonschema

        self._library: Any = jsonschema
        self._fixed: Any = None
        super().__init__(name, argument)

    def prepare(self, argument: str) -> str:
        try:
            content = Path(argument).read_bytes()
            self._fixed = self._validator(orjson.loads(content))
        except (OSError, orjson.JSONDecodeError, self._library.SchemaError) as error:
            raise UsageError(
                f"{option('reward', 'json_schema')}: {argument} is not a JSON Schema file: {error}"
            ) from error
        return hashlib.blake2b(content, digest_size=16).hexdigest()

    def _validator(self, schema: Any) -> Any:
        kind = self._library.validators.validator_for(schema)
        kind.check_schema(schema)
        return kind(schema)

    def check(self, text: str, task: TaskRow) -> float | None:
        validator, schema = self._fixed, task.get("schema")
        if validator is None:
            if schema is None:
                return None
            try:
                validator = self._validator(orjson.loads(schema) if isinstance(schema, str) else schema)
            except (orjson.JSONDecodeError, self._library.SchemaError) as error:
                raise RewardError(f"json_schema: the task's schema is not one: {error}") from error
        fenced = re.fullmatch(r"\s*```(?:json)?\s*\n(.*?)\n?```\s*", text, re.DOTALL)
        try:
            return float(validator.is_valid(orjson.loads(fenced.group(1) if fenced else text)))
        except orjson.JSONDecodeError:
            return 0.0

"""``gymdata.merge_adapter``, and ``--merge`` of trainings: a LoRA folder and its base as one model."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gymdata.errors import RefusedError, UsageError, option, require
from gymdata.models.model_identity import policy_facts, stored_dtype
from gymdata.public import Figures, Report, Row
from gymdata.store import StageOutput, read_run_json
from gymdata.store.lineage import parent_of
from gymdata.store.paths import RUN_JSON, local_output

__all__ = ["MergedAdapter", "merge_adapter"]


@dataclass(frozen=True, slots=True, repr=False)
class MergedAdapter(Report):
    """What ``gymdata.merge_adapter`` wrote to ``path``: a model with the weights of ``adapter`` over ``base``, in ``dtype``,
    whose own ``policy_hash`` differs from the adapter's. ``existing``: an earlier call wrote it, and nothing was done."""

    path: Path
    adapter: str
    base: str
    dtype: str | None
    policy_hash: str
    existing: bool = False

    def to_dict(self) -> Figures:
        return {**asdict(self), "path": str(self.path)}

    def rows(self) -> list[Row]:
        outcome = (
            ("already there", f"{self.path} ({option('overwrite', True)} merges again)")
            if self.existing
            else ("written to", self.path)
        )
        return [("base", self.base), ("number format", self.dtype), outcome]


def merge_adapter(
    adapter: str | Path, output: str | Path, *, overwrite: bool = False, command: Sequence[str] = ()
) -> MergedAdapter:
    """Merge the LoRA folder ``adapter`` with the base that it names into a model folder, in the base's number format, with
    tokenizer, chat template and generation config. A model that is there with all its files is not merged again.

    Raises UsageError for a model that is no LoRA folder, DataError where its base is not on this machine or does not fit,
    RefusedError for another base than the adapter was trained on, and StoreError when ``output`` holds something else.
    """
    facts = policy_facts(str(adapter))
    if facts["adapter"] is None:
        raise UsageError(
            f"{adapter}: holds no adapter_config.json, expected a LoRA folder",
            hint="give the folder that a training with --lora wrote; a model without an adapter needs no merging",
        )
    training = read_run_json(adapter) if (Path(adapter) / RUN_JSON).is_file() else {}
    # Of an adapter that was trained further the hash would be that of base and adapter together.
    new = ((training.get("config") or {}).get("trainer") or {}).get("use_peft")
    trained_on = (training.get("model") or {}).get("policy_hash") if new else None
    if trained_on is not None and trained_on != (base_hash := policy_facts(facts["base"])["policy_hash"]):
        raise RefusedError(
            f"{adapter}: was trained on a model with policy_hash {trained_on}, and its base {facts['base']} has {base_hash}",
            hint="put back the weights that it was trained on, or train the adapter again",
        )
    require("train", "torch", "transformers", "peft")
    from gymdata.models._saving import write_merged

    out = local_output(output)
    for merged_from in (adapter, facts["base"]):
        if Path(out).resolve() == Path(merged_from).resolve():
            raise UsageError(f"{out}: is itself merged here, and would be lost", hint="give another output folder")
    parents = [parent_of(adapter), parent_of(facts["base"])]
    identity = {"policy_hash": facts["policy_hash"]}
    with StageOutput(out, "merged-model", overwrite=overwrite) as stage:
        stage.refuse_other("identity", identity, "a merged adapter that was made")
        files = stage.facts.get("files") or []
        sizes = {file["path"]: path.stat().st_size for file in files if (path := out / file["path"]).is_file()}
        existing = bool(files) and not overwrite and sizes == {file["path"]: file["bytes"] for file in files}
        if not existing:
            with tempfile.TemporaryDirectory() as folder:
                write_merged(str(adapter), Path(folder))
                for path in sorted(Path(folder).iterdir()):
                    if path.is_dir():  # of more chat templates; the files that run.json lists are in no folder
                        shutil.copytree(path, stage.new / path.name)
                    else:
                        shutil.move(path, stage.part(path.name).path)
            config = {"adapter": str(adapter), "output": str(output)}
            stage.finish({"command": list(command), "config": config, "identity": identity, "parents": parents})
    merged = policy_facts(str(out))["policy_hash"]
    return MergedAdapter(out, str(adapter), facts["base"], stored_dtype(str(out)), merged, existing)

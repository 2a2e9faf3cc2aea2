"""The number format that a model is sampled in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gymdata.commands.collect.run import collect, load_parts
from gymdata.commands.collect.settings import CollectConfig
from gymdata.engines._vllm import VllmSampler
from gymdata.errors import OutsideError, StoreError
from gymdata.models.model_identity import stored_dtype
from gymdata.store import read_run_json
from tests.collect.fake_parts import FakeSampler, parts
from tests.model_files import write_adapter
from tests.servers import Watcher

ROOT = Path(__file__).parents[2]


class NotStarted(VllmSampler):
    """An engine that is not needed to say in which format it would sample."""

    async def start(self) -> Any:
        raise OutsideError("engine", f"it would sample in {self.engine_args.get('dtype')}", fatal=True)


@pytest.mark.torch
@pytest.mark.engine
def test_a_run_is_sampled_in_one_format_which_the_processor_has(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights in bfloat16 are sampled in float32 where the processor would be slow, said so, and a run that began so goes on
    so where another machine takes it up."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, run = str(tmp_path / "model"), tmp_path / "run"
    AutoModelForCausalLM.from_pretrained(policy, dtype="bfloat16").save_pretrained(model)
    AutoTokenizer.from_pretrained(policy).save_pretrained(model)
    tasks = str(ROOT / "sample_data" / "tasks" / "train.jsonl")
    settings: dict[str, Any] = {"tasks": tasks, "model": model, "max_tokens": 16, "seed": 1}
    monkeypatch.setattr("gymdata.models._torch.multiplies", lambda dtype: dtype != "bfloat16")
    watcher = Watcher()
    collect(**settings, limit=4, output=run, progress=watcher)
    assert read_run_json(run)["engine"]["dtype"] == "float32"
    message = "sampling in float32: the weights are in bfloat16, in which this processor is slow"
    assert [text.startswith(message) for text in watcher.said if "sampling" in text] == [True]
    elsewhere = load_parts(CollectConfig(**settings))
    elsewhere.sampler = NotStarted(model)
    with pytest.raises(OutsideError, match="it would sample in float32"):
        collect(**settings, limit=8, output=run, parts=elsewhere)


class Float32Sampler(FakeSampler):
    async def start(self) -> Mapping[str, Any]:
        return {**await super().start(), "dtype": "float32"}


def test_the_format_that_a_run_was_sampled_in_may_be_set_when_it_is_resumed(
    tasks: Callable[..., Path], tmp_path: Path
) -> None:
    """It is the same run with it and without it; any other format is refused, by a dry run, too."""
    run = tmp_path / "run"

    def resumed(count: int, dtype: str | None = None, **settings: Any) -> Any:
        engine = {} if dtype is None else {"dtype": dtype}
        return collect(
            tasks=str(tasks(count)), output=run, engine=engine, parts=parts(Float32Sampler()), seed=1, **settings
        )

    resumed(1)
    for settings in ({"dry_run": True}, {}):
        with pytest.raises(StoreError, match="dtype: run has 'auto', now 'bfloat16'"):
            resumed(2, "bfloat16", **settings)
        resumed(2, "float32", **settings)
    assert resumed(3).rollouts == 3
    assert read_run_json(run)["identity"]["dtype"] == "auto"
    resumed(3, "bfloat16", overwrite=True)
    assert read_run_json(run)["identity"]["dtype"] == "bfloat16"


@pytest.mark.torch
@pytest.mark.engine
def test_an_adapter_is_merged_in_the_format_that_is_sampled(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 where the processor would be slow in the base's bfloat16, or where a run that began so goes on; in bfloat16
    where that is sampled."""
    pytest.importorskip("vllm")
    pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    from gymdata.engines._vllm import arguments_for

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    AutoModelForCausalLM.from_pretrained(policy, dtype="bfloat16").save_pretrained(base := tmp_path / "model")
    adapter = str(write_adapter(tmp_path / "adapter", base=base))

    def merged_in(has_bfloat16: bool, **given: Any) -> Any:
        monkeypatch.setattr("gymdata.models._torch.multiplies", lambda dtype: dtype != "bfloat16" or has_bfloat16)
        wanted, over = arguments_for(adapter, given)
        assert over is None
        return stored_dtype(wanted["model"])

    assert merged_in(False) == "float32"
    assert merged_in(True, dtype="float32") == "float32"
    assert merged_in(True) == merged_in(False, dtype="bfloat16") == "bfloat16"

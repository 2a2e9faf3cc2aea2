"""The public names: what ``gymdata`` offers, how its functions are called, and what they return."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import json
import math
import pydoc
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import gymdata
from gymdata.commands.finetune.run import FinetuneReport
from gymdata.commands.train.run import TrainReport
from gymdata.errors import DataError, UsageError
from gymdata.public import Report
from gymdata.store import Run
from tests.rollout_files import rollout, two_turns, write_run

FUNCTIONS = [
    "audit", "collect", "experience", "export", "filter", "finetune", "import_rollouts", "judge", "open", "pairs", "query",
    "score", "train_dpo", "train_kto", "train_reward", "train_rl", "train_sft", "train_value", "validate",
]  # fmt: skip
MATHS = ["credit", "curriculum", "genrm", "losses", "tokens"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rows = [rollout(f"t{t}", i, float(i), two_turns(t, 50 + i)) for t in range(3) for i in range(2)]
    return write_run(tmp_path / "run", rows)


def test_dir_and_help_show_every_public_name_and_no_helper() -> None:
    """dir(gymdata) has every public name and nothing that the module needs for itself; help(gymdata) shows them all."""
    with contextlib.redirect_stdout(io.StringIO()):
        shown = pydoc.plain(pydoc.render_doc(gymdata))
    names = {*FUNCTIONS, *MATHS, "CollectConfig", "ServeConfig", "Experience", "Samples"}
    assert names - set(dir(gymdata)) == set()
    assert [name for name in names if name not in shown] == []
    assert [
        name for name in dir(gymdata) if name in ("importlib", "sys", "Any", "TYPE_CHECKING") or name[:2] == "_H"
    ] == []


def _call(prompt: list[int], generation: list[int]) -> gymdata.tokens.Call:
    logprobs = -np.ones(len(generation), np.float32)
    return gymdata.tokens.Call(np.array(prompt, np.int32), np.array(generation, np.int32), logprobs, "stop")


def test_token_maths_is_public() -> None:
    """A turn that extends what came before is stored as a delta, given back whole, and counted as no break."""
    tokens = gymdata.tokens
    turns = tokens.encode_turns([_call([1, 2], [10, 2]), _call([1, 2, 10, 2, 30], [11, 2])])
    assert turns[1]["prompt_delta_ids"].tolist() == [30]
    assert tokens.expand_prompts(turns)[1].tolist() == [1, 2, 10, 2, 30]
    assert tokens.count_breaks(turns) == 0
    assert tokens.next_prompt([1, 7], [9], [2]) == [1, 7, 2, 9]


def test_an_opened_run_is_read_lazily(run: Path) -> None:
    """lazy() gives the same rows as arrow(), with projection and predicates."""
    opened = gymdata.open(run)
    good = opened.lazy().filter(pl.col("reward") > 0).select("rollout_id", "reward").collect()
    assert good["rollout_id"].to_list() == ["t0-1", "t1-1", "t2-1"]
    assert opened.lazy().collect().equals(pl.from_arrow(opened.arrow()))
    assert opened.lazy().head(4).collect().height == 4
    assert opened.lazy().select(pl.len()).collect().item() == 6


def test_an_opened_run_has_sealed_and_journaled_rows(tmp_path: Path) -> None:
    """Rows of a run that is being written are there as well, from its parts and from its journal."""
    with Run.open(tmp_path / "run", identity={}, extent={}, operation={}, facts={"stage": "collect"}) as writer:
        writer.append(rollout("a", 0, 1.0, two_turns(1, 50)))
        writer.seal()
        writer.append(rollout("b", 0, 0.0, two_turns(1, 51)))
        assert gymdata.open(tmp_path / "run").lazy().collect()["rollout_id"].to_list() == ["a-0", "b-0"]


def test_an_opened_run_answers(run: Path) -> None:
    """query, rollout and repr of a run; a rollout that is not there names the nearest."""
    opened = gymdata.open(run)
    assert opened.query("SELECT count(*) AS n FROM rollouts")["n"].to_pylist() == [6]
    assert opened.rollout("t1-0")["turns"][1]["prompt_token_ids"] == [1, 1, 10, 11, 2, 30, 31]
    assert repr(opened).startswith(f"<gymdata run {run}: ")
    assert len(repr(opened)) < len(str(run)) + 60
    with pytest.raises(DataError, match="got rollout_id 't1-00'") as caught:
        opened.rollout("t1-00")
    assert "t1-0" in str(caught.value.hint)


def test_experience_has_the_published_fields_in_order() -> None:
    """Positional code that was written for the published classes works: same fields, same order, ours after them."""
    assert [f.name for f in dataclasses.fields(gymdata.Experience)] == [
        "sequences", "action_log_probs", "base_action_log_probs", "values", "returns", "advantages", "attention_mask",
        "action_mask", "info", "kl", "action_entropy", "labels", "references", "packed_seq_lens",
        "prompts", "pad_len",
    ]  # fmt: skip
    assert [f.name for f in dataclasses.fields(gymdata.Samples)] == [
        "sequences", "attention_mask", "action_mask", "num_actions", "packed_seq_lens", "response_length", "total_length",
        "prompts", "labels", "references", "pad_len",
    ]  # fmt: skip


def test_to_and_pin_memory_take_lists_and_none() -> None:
    """The published helpers move a tensor, a list of tensors, and leave None alone."""
    import torch

    from gymdata.commands.experience.loading import pin_memory, to

    moved = to([torch.ones(2), torch.zeros(1)], "meta")
    assert [t.device.type for t in moved] == ["meta", "meta"]
    assert to(None, "cpu") is None
    assert pin_memory(None) is None
    samples = gymdata.Samples(torch.ones(1, 2), prompts=["p"], pad_len=3)
    assert samples.to("meta").sequences.device.type == "meta"
    assert (samples.prompts, samples.pad_len) == (["p"], 3)


CALLS = {
    "audit": gymdata.audit, "collect": gymdata.collect, "experience": gymdata.experience, "filter": gymdata.filter,
    "judge": gymdata.judge, "load_rollouts": gymdata.load_rollouts, "open": gymdata.open, "pairs": gymdata.pairs,
    "query": gymdata.query, "score": partial(gymdata.score, reward="numeric"),
    "train_dpo": gymdata.train_dpo, "train_sft": gymdata.train_sft,
    "validate": gymdata.validate, "finetune": gymdata.finetune,
    "export": lambda value: gymdata.export(value, "out.jsonl", "openai"),
    "import_rollouts": lambda value: gymdata.import_rollouts(value, "out"),
    "load_experiences": lambda value: gymdata.load_experiences(value, 2),
}  # fmt: skip


WRONG = {"int": 3, "dict": {"a": 1}, "DataFrame": pl.DataFrame({"a": [1]}), "list": [3]}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_first_argument_gets_a_sentence(name: str) -> None:
    """What is no path is refused with the function, what was got and what was expected."""
    for kind, value in WRONG.items():
        if (name, kind) == ("collect", "DataFrame"):
            continue  # it may be the tasks
        with pytest.raises(UsageError, match=rf"^gymdata.{name}: got .*, expected ") as caught:
            CALLS[name](value)
        assert "\n" not in caught.value.message


@pytest.mark.parametrize("name", sorted(set(CALLS) - {"query"}))
def test_a_path_to_nothing_names_the_path(name: str, tmp_path: Path) -> None:
    """A path where nothing is: the message begins with it, whatever the function."""
    with pytest.raises((DataError, UsageError), match="nothing-here"):
        CALLS[name](tmp_path / "nothing-here.jsonl")


def test_a_text_is_neither_true_nor_false(run: Path, tmp_path: Path) -> None:
    """``overwrite="no"`` leaves what is there."""
    gymdata.pairs(run, output=tmp_path / "out")
    before = (tmp_path / "out" / "pairs.parquet").read_bytes()
    with pytest.raises(UsageError, match="overwrite: got 'no', expected True or False"):
        gymdata.pairs(run, output=tmp_path / "out", min_margin=0.5, overwrite="no")
    assert (tmp_path / "out" / "pairs.parquet").read_bytes() == before


def test_settings_classes_are_accepted(run: Path) -> None:
    """A config object does what the same keywords do."""
    config = gymdata.PairsConfig(strategy="all")
    by_config = gymdata.pairs(run, config=config, write=False).table
    assert by_config.equals(gymdata.pairs(run, strategy="all", write=False).table)
    both = gymdata.pairs(run, config=gymdata.PairsConfig(), strategy="all", write=False)
    assert by_config.equals(both.table)


@pytest.mark.parametrize(
    "name", ["audit", "collect", "experience", "filter", "judge", "pairs", "report", "score", "view"]
)
def test_a_misspelt_keyword_may_be_a_parameter(name: str, run: Path) -> None:
    """What a function takes besides its settings counts when the nearest name is looked for."""
    with pytest.raises(UsageError) as caught:
        getattr(gymdata, name)(run, confg="x")
    assert caught.value.hint == "did you mean 'config'?"


@pytest.mark.parametrize("name", ["audit", "experience", "filter", "pairs", "view"])
def test_keywords_beside_a_config_count(name: str, run: Path) -> None:
    """They win over it and are never ignored: an unknown one is refused as without it."""
    config = getattr(gymdata, f"{name.capitalize()}Config")()
    with pytest.raises(UsageError, match="unknown key 'strateg'"):
        getattr(gymdata, name)(run, config=config, strateg="all")


RESULTS = {
    "pairs": lambda run, out: gymdata.pairs(run, write=False),
    "experience": lambda run, out: gymdata.experience(run, out / "e"),
    "filter": lambda run, out: gymdata.filter(run, where="reward > 0", write=False),
    "validate": lambda run, out: gymdata.validate(run),
    "fix": lambda run, out: gymdata.fix(run, "drop", out / "fixed.parquet"),
    "score": lambda run, out: gymdata.score(run, reward="regex:x"),
    "export": lambda run, out: gymdata.export(run, out / "a.jsonl", "nemo-gym"),
}  # fmt: skip


@pytest.mark.parametrize("name", RESULTS)
def test_results_have_a_short_repr_and_a_dict(name: str, run: Path, tmp_path: Path) -> None:
    """repr shows scalars and counts, however many rows there are; to_dict() is plain JSON; rows() are names and values."""
    result = RESULTS[name](run, tmp_path)
    assert result.exit_code in (0, 1)
    assert all(isinstance(label, str) for label, _ in result.rows())
    assert repr(result).startswith(type(result).__name__ + "(")
    assert len(repr(result)) < 500
    assert json.loads(json.dumps(result.to_dict()))


#: Those that do something else than to report: they hand over rows, or serve until they are stopped.
NO_REPORT = {"expand_turns", "load_experiences", "load_rollouts", "open", "query", "reading"}
NO_REPORT |= {"serve", "serve_genrm", "view"}


def test_every_command_returns_a_report() -> None:
    """What a public function returns is a dataclass with to_dict, rows and exit_code, by its own annotation."""
    functions = [name for name in gymdata.__all__ if inspect.isfunction(getattr(gymdata, name))]
    for name in sorted(set(functions) - NO_REPORT):
        function = getattr(gymdata, name)
        known = vars(sys.modules[function.__module__])
        for result in (known[kind] for kind in function.__annotations__["return"].split(" | ")):
            assert Report in result.__mro__, name
            assert dataclasses.is_dataclass(result), name


def test_a_training_is_summed_up_from_its_run_json() -> None:
    """The checksum is compared, a training that stopped early is compared as far as it went, and --json is run.json."""
    fed = {"count": 3, "checksum": "c", "equal": True}
    facts = {
        "stage": "train-dpo", "status": "completed", "config": {"output": "out"}, "counts": {"pairs": 2}, "steps": 4,
        "trained_tokens": {"file": {"count": 7, "checksum": "a"}, "equal": False, "epochs": [fed]},
    }  # fmt: skip
    report = TrainReport.of(facts)
    assert report.to_dict() == facts
    assert report.rows() == [
        ("pairs", 2), ("tokens per epoch", 7), ("token checksum", "match as far as they went: 3 of 7 tokens"),
        ("steps", 4), ("output", Path("out")),
    ]  # fmt: skip
    assert repr(report) == "TrainReport(algorithm='dpo', status='completed', output='out', steps=4)"


PAIRS_OF_ONE_TASK = {"accuracy": 0.5, "pairs": 2, "tasks": 1}
EQUAL_RETURNS = {"explained_variance": None, "mse": 0.5, "before": {"explained_variance": None, "mse": 1.0}}


@pytest.mark.parametrize(
    ("stage", "heldout", "row"),
    [
        ("reward", PAIRS_OF_ONE_TASK | {"ci95": [None, None]}, ("held-out preference accuracy", "50.0 %")),
        ("reward", PAIRS_OF_ONE_TASK | {"ci95": [math.nan] * 2}, ("held-out preference accuracy", "50.0 %")),
        ("value", EQUAL_RETURNS, ("held-out explained variance", "– → –")),
    ],
)
def test_what_one_task_cannot_show_is_left_out(stage: str, heldout: dict[str, Any], row: tuple[str, str]) -> None:
    """Held-out pairs of a single task have a rate alone, as run.json (null) and as a result (NaN) has it; equal returns of
    a critic have a dash."""
    tokens = {"count": 7, "checksum": "a"}
    facts = {
        "stage": f"train-{stage}", "status": "completed", "config": {"output": "out"}, "counts": {"pairs": 2}, "steps": 4,
        "trained_tokens": {"file": tokens, "equal": True, "epochs": [{**tokens, "equal": True}]}, "heldout": heldout,
    }  # fmt: skip
    assert TrainReport.of(facts).rows()[-1] == row


def test_a_finetuning_is_summed_up_whatever_loop_it_ran() -> None:
    """The shipped loop's result is told in words, another loop's as it is; --json is result.json."""
    rate = {"epoch": 0, "rate": 0.5, "ci95": [0.25, 0.75], "successes": 2, "n": 4}
    result = {
        "epochs": 2, "algorithm": "dpo", "policy": "p", "report": "r.html", "trained_tokens": 9, "reward_first": 0.25,
        "reward_last": None, "validation": {"first": rate, "last": rate | {"epoch": 2}},
    }  # fmt: skip
    report = FinetuneReport.of(result)
    assert report.to_dict() == result
    assert dict(report.rows()) == {
        "epochs": "2 of dpo", "reward, first and last": "0.25 and –",
        "held-out, first": "50.0 % (95 %: 25.0 to 75.0) after epoch 0, 2 of 4",
        "held-out, last": "50.0 % (95 %: 25.0 to 75.0) after epoch 2, 2 of 4",
        "tokens trained": 9, "policy": "p", "report": "r.html",
    }  # fmt: skip
    assert FinetuneReport.of({"done": True}).rows() == [("done", True)]


def test_the_topic_names_every_public_function() -> None:
    """`gymdata docs python-api` lists each function and each module of maths."""
    text = (Path(__file__).parents[2] / "gymdata" / "docs" / "python-api.md").read_text(encoding="utf-8")
    public = [name for name in gymdata.__all__ if name[0].islower()]
    assert [name for name in public if not re.search(rf"[`.]{name}\b", text)] == []

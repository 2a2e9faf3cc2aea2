"""``gymdata audit`` on clean runs says so, and names the cause of each planted mismatch."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import gymdata
from gymdata.chat.template import TransformersChat, shipped_templates
from gymdata.cli.main import main
from gymdata.commands.audit.context import logprob_settings
from gymdata.commands.audit.run import audit
from gymdata.engines.port import SampleRequest
from gymdata.errors import RefusedError, StoreError, UsageError
from gymdata.models.forward import tokenizer_facts
from gymdata.models.model_identity import check_tokenizer, model_facts
from gymdata.rollouts.schema import AUDIT, EXPERIENCES, VIOLATIONS
from gymdata.rollouts.turns import expand_prompts
from gymdata.store import read_run_json, read_table, write_run_json
from tests.audit.conftest import CLEAN, POLICY, changed, log_probs_of, log_softmax_of, saved_run
from tests.engine_fixtures import InProcess
from tests.rollout_files import BRANCH, BREAK, RETRY, rollout, two_turns

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
Rows = list[dict[str, Any]]


@pytest.fixture(scope="session")
def other_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample policy a little further on: noise on every weight."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("models") / "later"
    shutil.copytree(POLICY, folder)
    model = AutoModelForCausalLM.from_pretrained(POLICY)
    torch.manual_seed(0)
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(0.02 * torch.randn_like(weights) * weights.std())
    model.save_pretrained(folder)
    return folder


def test_torch_is_named_where_it_is_missing(tmp_path: Path) -> None:
    """Torch, with the command that installs it, before anything is there."""
    run = saved_run(tmp_path / "run", read_table(CLEAN).to_pylist())
    missing = "import sys; sys.modules.update(torch=None); "
    program = f"{missing}from gymdata.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "audit", str(run), "-m", str(POLICY)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.search(r"error: this needs the Python module 'torch', which .*\n.*pip install .*\[train\]", done.stderr)
    assert not list(run.glob("audit-*"))


def drawn(
    model: Any, rows: Rows, temperature: float, length: int = 24, seed: int = 0
) -> list[tuple[list[int], list[int]]]:
    """(prompt, generation) for the first prompt of each row, drawn token by token at a temperature."""
    rng = np.random.default_rng(seed)
    made = []
    for row in rows:
        prompt, generation = expand_prompts(row["turns"])[0].tolist(), []
        for _ in range(length):
            chances = np.exp(log_softmax_of(model, [*prompt, *generation], temperature)[-1])
            generation.append(int(rng.choice(len(chances), p=chances / chances.sum())))
        made.append((prompt, generation))
    return made


@pytest.mark.full
def test_what_an_engine_saved_in_float32_is_the_models_own(vllm_sampler: InProcess, clean_rows: Rows, tmp_path: Path):
    """Rollouts sampled here and now by vLLM differ from the forward pass by less than 1e-4."""
    prompts = [expand_prompts(row["turns"])[0].tolist() for row in clean_rows[::6]]

    async def sample() -> list[Any]:
        asked = [SampleRequest(f"r{i}", prompt, 32, seed=i, n=2) for i, prompt in enumerate(prompts)]
        return [await vllm_sampler.sampler.sample(request) for request in asked]

    rows = []
    for number, generations in enumerate(vllm_sampler.run(sample())):
        for index, one in enumerate(generations):
            made = rollout(f"t{number}", index, None, [(prompts[number], one.token_ids)])
            rows.append(changed(made, lambda p, g, lp, n, one=one: (p, g, one.log_probs)))
    report = audit(saved_run(tmp_path / "run", rows), str(POLICY))
    assert report.ok
    assert report.summary["max_abs_difference"] <= 1e-4
    assert report.summary["tokens"] > 100


def test_the_sample_rollouts_are_the_sample_policys_own():
    """Nothing is flagged, every figure says equality, and a file that is no run gets no folder."""
    report = audit(CLEAN, str(POLICY))
    assert report.ok
    assert report.explanation is None
    assert report.path is None
    facts = report.summary
    assert facts["max_abs_difference"] <= 1e-4
    assert facts["share_outside"] == 0
    assert facts["effective_sample_size"] == pytest.approx(1.0)
    assert abs(facts["ratio"]["mean"] - 1) <= 1e-6
    assert facts["tokens"] == sum(row["tokens"] for row in report.positions) == sum(r["tokens"] for r in report.turns)


def test_another_checkpoint(clean_rows: Rows, other_policy: Path, tmp_path: Path):
    """Told first from the hashes, then found in the tokens and named, for nothing else explains it."""
    report = audit(saved_run(tmp_path / "run", clean_rows), str(other_policy))
    assert not report.ok
    assert any(line.startswith("policy:") and clean_rows[0]["policy_hash"] in line for line in report.first)
    assert report.explanation is not None
    assert report.explanation.cause == "checkpoint"
    assert {v.code for v in report.violations} == {"L305"}


@pytest.mark.parametrize("given", [None, "their.jinja"])
def test_the_form_of_a_template_that_keeps_reasoning_is_the_models_own(
    clean_rows: Rows, tmp_path: Path, given: str | None
) -> None:
    """Where the model's template drops earlier `<think>` blocks, collect uses its known form that does not: neither audit
    nor training calls that another template. One that --chat-template named is another."""
    model = shutil.copytree(POLICY, tmp_path / "model")
    (model / "chat_template.jinja").write_text(shipped_templates()["qwen3"])
    chat = TransformersChat.load(str(model)).facts()
    assert chat["chat_template_replaced"]
    hashes = {name: chat[name] for name in ("tokenizer_hash", "chat_template_hash")}
    run = saved_run(tmp_path / "run", clean_rows[:2], **hashes)
    write_run_json(run, {**read_run_json(run), "chat": chat, "config": {"chat_template": given}})
    notes: list[str] = []
    check_tokenizer([read_run_json(run)], model_facts(str(model)), "run", SimpleNamespace(message=notes.append))
    one = pa.chunked_array([["p"]]), pa.chunked_array([[1.0]])
    facts = {"path": str(model), "policy_hash": "p", **tokenizer_facts(str(model))}
    first = logprob_settings(*one, [read_run_json(run)], facts)
    assert ["chat template" in line for line in (*first, *notes)] == ([] if given is None else [True, True])


@pytest.mark.matrix("0.7")
@pytest.mark.parametrize("true", [0.7, 1.37])
def test_another_temperature(clean_rows: Rows, sample_model: Any, tmp_path: Path, true: float):
    """The temperature that explains the saved numbers is found, whether people use such a one or not."""
    rows = [changed(r, lambda p, g, lp, n: (p, g, log_probs_of(sample_model, p, g, true))) for r in clean_rows[:12]]
    report = audit(saved_run(tmp_path / "run", rows), str(POLICY))
    assert not report.ok
    assert report.explanation is not None
    assert report.explanation.cause == "temperature"
    assert f"are of {true:g}, the rows say 1" in report.explanation.text
    assert report.explanation.after is not None
    assert report.explanation.after < 1e-4 < report.explanation.before


@pytest.mark.matrix("2")
@pytest.mark.parametrize(("factor", "says"), [
    (1 / np.log(2), "logarithms of base 2: "), (1 / np.log(10), "logarithms of base 10: "), (0.5, "a constant factor: "),
], ids=["2", "10", "half"])  # fmt: skip
def test_numbers_of_another_scale_are_no_temperature(clean_rows: Rows, tmp_path: Path, factor: float, says: str):
    """Logarithms of base 2 or 10, and any other constant factor, are named as such and with the factor."""
    rows = [changed(r, lambda p, g, lp, n: (p, g, lp * factor)) for r in clean_rows]
    report = audit(saved_run(tmp_path / "run", rows), str(POLICY))
    assert not report.ok
    assert report.explanation is not None
    assert (report.explanation.cause, report.explanation.text[: len(says)]) == ("scale", says)
    assert f"are {factor:.4g} times the model's" in report.explanation.text


@pytest.mark.matrix("raw_logprobs")
@pytest.mark.parametrize("mode", [None, "raw_logprobs"])
def test_raw_log_probabilities(clean_rows: Rows, sample_model: Any, tmp_path: Path, mode: str | None):
    """Numbers of temperature 1 on tokens that were drawn at 0.5: named from run.json, or from the tokens themselves."""
    rows = []
    for i, (prompt, generation) in enumerate(drawn(sample_model, clean_rows, 0.5)):
        made = rollout(f"t{i}", 0, None, [(prompt, generation)], temperature=0.5)
        rows.append(changed(made, lambda p, g, lp, n: (p, g, log_probs_of(sample_model, p, g, 1.0))))
    report = audit(saved_run(tmp_path / "run", rows, logprobs_mode=mode), str(POLICY))
    assert not report.ok
    assert report.explanation is not None
    assert report.explanation.cause == "raw_logprobs"
    assert ("run.json says" in report.explanation.text) == (mode is not None)


def test_a_wrong_template(clean_rows: Rows, tmp_path: Path):
    """The file's prompts begin with another system message than the model read; its own template explains the numbers."""
    other = clean_rows[0]["turns"][0]["prompt_delta_ids"][:9]
    rows = [changed(r, lambda p, g, lp, n: ([*other, *p], g, lp)) for r in clean_rows]
    report = audit(saved_run(tmp_path / "run", rows), str(POLICY))
    assert not report.ok
    assert report.explanation is not None
    assert report.explanation.cause == "template"
    assert report.explanation.certain
    assert "the model's chat template" in report.explanation.text


@pytest.mark.full
def test_prompts_that_no_rendering_explains(clean_rows: Rows, tmp_path: Path):
    """With the very weights that sampled, numbers of an unknown prompt are still laid on the prompt, as what is left."""
    rows = [changed(r, lambda p, g, lp, n: ([*p[:3], 20, 21, *p[3:]], g, lp), messages=[]) for r in clean_rows]
    report = audit(saved_run(tmp_path / "run", rows), str(POLICY))
    assert report.explanation is not None
    assert (report.explanation.cause, report.explanation.certain) == ("template", False)


@pytest.mark.full
def test_a_temperature_a_little_off_is_not_ruled_out(clean_rows: Rows, sample_model: Any, tmp_path: Path):
    """One within 3 % of the rows' is not named as the cause, and not excluded either."""
    rows = [changed(r, lambda p, g, lp, n: (p, g, log_probs_of(sample_model, p, g, 0.98))) for r in clean_rows]
    report = audit(saved_run(tmp_path / "run", rows), str(POLICY))
    assert report.explanation is not None
    assert report.explanation.cause == "template"
    assert "neither a shift nor a temperature more than 3% off explains it" in report.explanation.text
    assert "the temperature was less than that off" in report.explanation.text


@pytest.mark.matrix("1")
@pytest.mark.parametrize("by", [-1, 1])
def test_off_by_one_in_the_numbers(clean_rows: Rows, tmp_path: Path, by: int):
    """Numbers that stand one token too early or too late are recognised by their neighbours."""
    rows = [changed(r, lambda p, g, lp, n: (p, g, np.roll(lp, by))) for r in clean_rows]
    report = audit(saved_run(tmp_path / "run", rows), str(POLICY))
    assert not report.ok
    assert report.explanation is not None
    assert report.explanation.cause == "off_by_one"
    assert ("next" if by < 0 else "before") in report.explanation.text


@pytest.mark.full
def test_off_by_one_in_the_scoring(clean_rows: Rows, sample_model: Any, tmp_path: Path):
    """Tokens that were scored with the output after them are recognised by scoring them so."""

    def off_by_one(prompt: list[int], generation: list[int], logps: np.ndarray, number: int) -> Any:
        scored = log_softmax_of(sample_model, [*prompt, *generation])
        return prompt, generation, scored[np.arange(len(generation)) + len(prompt), generation]

    rows = [changed(r, off_by_one) for r in clean_rows[:8]]
    report = audit(saved_run(tmp_path / "run", rows), str(POLICY))
    assert report.explanation is not None
    assert report.explanation.cause == "off_by_one"
    assert "output after it" in report.explanation.text


@pytest.mark.full
def test_a_cut_distribution(clean_rows: Rows, sample_model: Any, tmp_path: Path):
    """Log-probs renormalised over the likeliest tokens, as top_p gives them, are told from run.json and never too low."""

    def cut(prompt: list[int], generation: list[int], logps: np.ndarray, number: int) -> Any:
        scored = log_softmax_of(sample_model, [*prompt, *generation])[len(prompt) - 1 : -1]
        kept = np.sort(np.exp(scored), axis=1)[:, -3:].sum(axis=1)
        own = np.take_along_axis(scored, np.array(generation)[:, None], axis=1)[:, 0]
        return prompt, generation, own - np.log(np.maximum(kept, np.exp(own)))

    report = audit(saved_run(tmp_path / "run", [changed(r, cut) for r in clean_rows], top_p=0.9), str(POLICY))
    assert report.explanation is not None
    assert report.explanation.cause == "sampling"
    assert any("top_p 0.9" in line for line in report.first)


@pytest.mark.full
def test_what_sets_some_rollouts_apart(clean_rows: Rows, sample_model: Any, tmp_path: Path):
    """When only the rollouts of one policy version disagree, it is said which."""
    rows = list(clean_rows)
    for i in range(0, len(rows), 5):
        rows[i] = changed(rows[i], lambda p, g, lp, n: (p, g, log_probs_of(sample_model, p, g, 0.5)), policy_version=3)
    report = audit(saved_run(tmp_path / "run", rows), str(POLICY))
    assert report.notes[-1] == "those that do not are exactly the ones with policy_version 3"
    assert {v.rollout_id for v in report.violations} == {rows[i]["rollout_id"] for i in range(0, len(rows), 5)}


def test_one_number_of_a_long_run_does_not_decide(clean_rows: Rows, tmp_path: Path):
    """One changed number is counted and leads the worst, with its text, and the run is the model's all the same."""
    rows = list(clean_rows)
    rows[3] = changed(rows[3], lambda p, g, lp, n: (p, g, lp - (n == 1) * (np.arange(len(lp)) == 1) * 0.25))
    report = audit(saved_run(tmp_path / "run", rows), str(POLICY))
    assert report.ok
    assert report.summary["tokens_beyond_tolerance"] == 1
    first = report.worst[0]
    assert (first["rollout_id"], first["turn"], first["position"]) == (rows[3]["rollout_id"], 1, 1)
    assert first["difference"] == pytest.approx(-0.25, abs=1e-4)
    assert first["token"]


@pytest.mark.parametrize(("by", "train_rl"), [(-8.0, "train-rl refuses a mean ratio of 5."), (-3.0, "train-rl trains")])
def test_what_rounding_cannot_explain_is_named(
    clean_rows: Rows, tmp_path: Path, capsys: pytest.CaptureFixture[str], by: float, train_rl: str
):
    """One token nats away leaves the run the model's: it is counted, with its rollout, and with what ``train-rl`` does."""
    rows = list(clean_rows)
    rows[3] = changed(rows[3], lambda p, g, lp, n: (p, g, lp + (n == 1) * (np.arange(len(lp)) == 1) * by))
    assert main(["audit", str(saved_run(tmp_path / "run", rows))]) == 0
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert f"rounding cannot explain 1 of 612 tokens: the largest difference is {-by:g} nats" in verdict
    assert f"in rollout {rows[3]['rollout_id']}, turn 1; {train_rl}" in verdict


def test_every_turn_that_differs_is_listed(clean_rows: Rows, tmp_path: Path):
    """A turn of changed numbers among true ones is found at its rollout, turn and position, and what agrees is said."""
    rows = list(clean_rows)
    rows[3] = changed(rows[3], lambda p, g, lp, n: (p, g, lp - (n == 1) * (np.arange(len(lp)) > 0) * 0.25))
    report = audit(saved_run(tmp_path / "run", rows), str(POLICY))
    (found,) = report.violations
    assert (found.code, found.row, found.rollout_id) == ("L305", 3, rows[3]["rollout_id"])
    assert (found.turn, found.position) == (1, 1)
    assert report.notes[0] == "23 of 24 rollouts agree with the model, 1 do not"
    assert read_table(tmp_path / "run" / "audit-policy", VIOLATIONS).num_rows == 1


def test_breaks_branches_and_retries_are_scored_under_their_own_prompts(sample_model: Any, tmp_path: Path):
    """Each turn is scored under the prompt that it had; columns come in turn order and join experiences as they are."""
    shapes = [two_turns(5, 40), BREAK, RETRY, BRANCH, [([1, 5, 9], [7, 8, 2])]]
    rows = []
    for i, shape in enumerate(shapes):
        made = rollout(f"t{i % 2}", i, float(i % 3), shape, temperature=0.7)
        rows.append(changed(made, lambda p, g, lp, n: (p, g, log_probs_of(sample_model, p, g, 0.7))))
    run = saved_run(tmp_path / "run", rows)
    report = audit(run, str(POLICY), write_as="ref_logprobs")
    assert report.ok
    assert report.summary["max_abs_difference"] < 1e-4
    table = {r["rollout_id"]: r for r in read_table(report.path, AUDIT).to_pylist()}
    for row in rows:
        prompts = expand_prompts(row["turns"])
        logps, spread = [], []
        for turn, prompt in zip(row["turns"], prompts, strict=True):
            generation = list(turn["generation_token_ids"])
            scored = log_softmax_of(sample_model, [*prompt, *generation], 0.7)[len(prompt) - 1 : -1]
            logps += np.take_along_axis(scored, np.array(generation)[:, None], axis=1)[:, 0].tolist()
            spread += (-(np.exp(scored) * scored).sum(axis=1)).tolist()
        np.testing.assert_allclose(table[row["rollout_id"]]["ref_logprobs"], logps, atol=2e-5)
        np.testing.assert_allclose(table[row["rollout_id"]]["entropy"], spread, atol=2e-5)
    made = gymdata.experience(run, token_columns=report.path, entropy_ratio=0.5, kl_coef=0.1, zero_variance="keep")
    assert {"ref_logprobs", "entropy", "kl"} <= set(read_table(made.path, EXPERIENCES).column_names)


@pytest.mark.full
def test_batches_change_nothing(clean_rows: Rows, tmp_path: Path):
    """One sequence at a time and all at once give the same numbers up to float32's rounding."""
    run = saved_run(tmp_path / "run", clean_rows)
    one, all_at_once = (
        audit(run, str(POLICY), tmp_path / f"a{n}", batch_tokens=n, write_as="ref_logprobs").path for n in (1, 100_000)
    )
    a, b = (read_table(p, AUDIT)["ref_logprobs"].combine_chunks().flatten().to_numpy() for p in (one, all_at_once))
    np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.full
def test_a_lora_folder_is_a_model(clean_rows: Rows, tmp_path: Path):
    """The adapter counts: the base alone is another checkpoint."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(POLICY), LoraConfig(r=2, init_lora_weights=False))
    model.eval()
    model.save_pretrained(tmp_path / "adapter")
    rows = [changed(r, lambda p, g, lp, n: (p, g, log_probs_of(model, p, g)), policy_hash="?") for r in clean_rows[:4]]
    run = saved_run(tmp_path / "run", rows)
    report = audit(run, str(tmp_path / "adapter"))
    assert report.ok
    assert report.summary["max_abs_difference"] <= 1e-4
    assert not audit(run, str(POLICY)).ok


def test_rollouts_without_evidence_are_counted(clean_rows: Rows, tmp_path: Path):
    """A NaN, a missing log-prob and a rollout without turns leave the others to be compared; alone they are refused."""
    nan = changed(clean_rows[0], lambda p, g, lp, n: (p, g, [np.nan, *lp[1:]]), rollout_id="nan")
    short = json.loads(json.dumps(clean_rows[1], default=str)) | {"rollout_id": "short", "started_at": None}
    short["started_at"] = clean_rows[1]["started_at"]
    short["turns"][0]["generation_log_probs"].pop()
    bare = rollout("bare", 0, None, [])
    report = audit(saved_run(tmp_path / "run", [nan, short, bare, *clean_rows[2:6]]), str(POLICY))
    assert report.ok
    assert report.left_out == {"T205": 1, "L301": 1, "L302": 1}
    assert report.summary["rollouts"] == 4
    for row, code in ((nan, "L302"), (short, "L301"), (bare, "T205")):
        with pytest.raises(RefusedError, match=code):
            audit(saved_run(tmp_path / code, [row]), str(POLICY))


@pytest.mark.full
def test_a_limit_takes_rollouts_evenly(clean_rows: Rows, tmp_path: Path):
    """First and last are among them; an audit with other settings in its place is refused, the same is not."""
    run = saved_run(tmp_path / "run", clean_rows)
    report = audit(run, limit=3, write_as="ref_logprobs")
    assert report.summary["rollouts"] == 3
    ids = read_table(report.path, AUDIT)["rollout_id"].to_pylist()
    assert ids == [clean_rows[i]["rollout_id"] for i in (0, 11, 23)]
    audit(run, limit=3)
    assert not (run / "audit-policy" / "audit.parquet").exists()
    with pytest.raises(StoreError, match="limit: run has 3, now 4"):
        audit(run, limit=4)
    audit(run, limit=4, overwrite=True)


def test_the_run_says_where_it_came_from(clean_rows: Rows, tmp_path: Path):
    """run.json has the figures, the command and the parents; the tokenizer that differs is told before any figure."""
    run = saved_run(tmp_path / "run", clean_rows, tokenizer_hash="another", chat_template_hash="one more")
    report = audit(run, str(POLICY), command=["gymdata", "audit"])
    assert [line.partition(":")[0] for line in report.first] == ["tokenizer", "chat template"]
    facts = read_run_json(report.path)
    assert facts["stage"] == "audit"
    assert [Path(p["path"]).name for p in facts["parents"]] == ["run", "policy"]
    assert facts["max_abs_difference"] == report.summary["max_abs_difference"]


@pytest.mark.full
def test_without_a_model_the_runs_own_is_taken(clean_rows: Rows, tmp_path: Path):
    """A run that names no folder needs -m; columns need a place."""
    run = saved_run(tmp_path / "run", clean_rows[:2])
    assert audit(run).ok
    write_run_json(run, read_run_json(run) | {"policy": "served:x"})
    with pytest.raises(UsageError, match="which model"):
        audit(run)
    with pytest.raises(UsageError, match="output= is required"):
        audit(run / "rollouts" / "part-00000.parquet", str(POLICY), write_as="ref_logprobs")


def test_the_command(clean_rows: Rows, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Exit code 0 for a clean run and 1 for another; --json prints one object; the text names the cause."""
    clean = saved_run(tmp_path / "clean", clean_rows)
    assert main(["audit", str(clean), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"]
    assert said["max_abs_difference"] <= 1e-4
    rolled = [changed(r, lambda p, g, lp, n: (p, g, np.roll(lp, 1))) for r in clean_rows]
    assert main(["audit", str(saved_run(tmp_path / "off", rolled)), "-m", str(POLICY)]) == 1
    text = capsys.readouterr().out
    assert "cause: off by one" in text
    assert "place in the generation" in text
    assert main(["audit", str(clean), "--tolerance", "0"]) == 2
    assert main(["audit", str(clean), "--device", "cuda:77"]) == 2


@pytest.mark.parametrize(("fill", "why"), [(0.0, "log-probabilities are 0"), (-9999.0, "less than float32 can sample")])
def test_numbers_that_no_sampler_recorded_are_named_and_no_checkpoint(
    clean_rows: Rows, fill: float, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """They are L306 by file, first of all, with the count; no turn is L305 of them and no cause is searched."""
    filled = saved_run(
        tmp_path / "run", [changed(r, lambda p, g, lp, n: (p, g, np.full_like(lp, fill))) for r in clean_rows]
    )
    report = audit(filled, str(POLICY))
    assert (report.ok, {v.code for v in report.violations}, report.explanation) == (False, {"L306"}, None)
    assert why in report.first[0]
    assert "(L306)" in report.first[0]
    assert main(["audit", str(filled), "-m", str(POLICY), "--overwrite"]) == 1
    shown = capsys.readouterr().out
    assert "cannot be a sampler's (L306)" in shown
    assert "L305" not in shown

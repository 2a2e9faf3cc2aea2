"""``gymdata experience --reference`` and ``--critic``: real models fill the columns, and credit uses them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gymdata
from gymdata import credit
from gymdata.cli.main import main
from gymdata.errors import DataError, RefusedError, UsageError
from gymdata.rollouts.schema import EXPERIENCES
from gymdata.rollouts.turns import expand_prompts
from gymdata.store import read_run_json, read_table, write_run_json
from tests.audit.conftest import changed, log_probs_of, log_softmax_of
from tests.definition import sequences
from tests.rollout_files import BRANCH, BREAK, RETRY, rollout, two_turns, write_run
from tests.train.trainers.conftest import (
    policy,  # noqa: F401 - fixture
    save_classifier,
)

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def critic(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random classifier of one label with the policy's tokenizer."""
    return save_classifier(policy, tmp_path_factory.mktemp("models") / "critic")


@pytest.fixture(scope="module")
def model(policy: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(policy).eval()


@pytest.fixture
def rows(model: Any) -> Rows:
    """Two groups that teach something at temperature 0.7, one without variance; log-probs are the policy's own."""
    shapes = [two_turns(5, 40), BREAK, RETRY, BRANCH, [([1, 5, 9], [7, 8, 2])]]
    made = [
        rollout(task, i, float((i * 7 + ord(task)) % 5) / 4, shapes[(i + ord(task)) % 5], temperature=0.7)
        for task in "ab"
        for i in range(4)
    ]
    made += [rollout("flat", i, 1.0, two_turns(6, 41), temperature=0.7) for i in range(2)]
    return [changed(r, lambda p, g, lp, n: (p, g, log_probs_of(model, p, g, 0.7))) for r in made]


@pytest.fixture
def run(tmp_path: Path, rows: Rows) -> Path:
    return write_run(tmp_path / "run", rows)


def tokens_of(made: Rows, name: str) -> np.ndarray:
    """The numbers of trained tokens, row by row."""
    return np.concatenate([np.array(row[name])[np.array(row["loss_mask"]) == 1] for row in made])


def by_rollout(rows: Rows) -> dict[str, dict[str, Any]]:
    return {row["rollout_id"]: row for row in rows}


def values_of(folder: Path, rollout: dict[str, Any]) -> tuple[list[float], float]:
    """V of the state before each sampled token in turn order, and after the last, sequence by sequence without batches."""
    import torch
    from transformers import AutoModelForSequenceClassification

    loaded = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    found, after = [], 0.0
    for turn, prompt in zip(rollout["turns"], expand_prompts(rollout["turns"]), strict=True):
        ids = torch.tensor([[*prompt.tolist(), *turn["generation_token_ids"]]])
        with torch.inference_mode():
            each = loaded.score(loaded.model(ids).last_hidden_state)[0, :, 0].tolist()
        found += each[len(prompt) - 1 : -1]
        after = each[-1]
    return found, after


def test_the_reference_fills_its_columns(run: Path, rows: Rows, model: Any, policy: Path) -> None:
    """Log-probs, entropy and KL are those of the reference at each row's temperature, under the prompt of each turn; with
    the policy itself the KL is zero."""
    report = gymdata.experience(run, reference=str(policy), zero_variance="keep", abandoned="keep")
    made = read_table(report.path, EXPERIENCES).to_pylist()
    assert np.abs(tokens_of(made, "kl")).max() < 1e-4
    assert np.abs(tokens_of(made, "ref_logprobs") - tokens_of(made, "logprobs")).max() < 1e-4
    known = by_rollout(rows)
    for row in made:
        one = sequences(known[row["rollout_id"]]["turns"])[row["sequence_index"]]
        scored = log_softmax_of(model, one.input_ids, 0.7)
        spread = -(np.exp(scored) * scored).sum(axis=1)[:-1]
        where = np.flatnonzero(row["loss_mask"])
        np.testing.assert_allclose(np.array(row["entropy"])[where], spread[where - 1], atol=1e-4)
        assert not np.array(row["entropy"])[np.array(row["loss_mask"]) == 0].any()
    facts = read_run_json(report.path.parent)
    assert facts["reference"]["path"] == str(policy)
    assert facts["reference"]["dtype"] == "float32"
    assert str(policy) in [p["path"] for p in facts["parents"]]


def test_kl_is_taken_from_the_reward(run: Path, rows: Rows, policy: Path, tmp_path: Path) -> None:
    """With another reference, returns are the reward minus the KL of what follows, and the mask is the entropy's."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    other = AutoModelForCausalLM.from_pretrained(policy)
    with torch.no_grad():
        for weights in other.parameters():
            weights.mul_(1.3)
    other.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(policy).save_pretrained(tmp_path / "other")
    report = gymdata.experience(
        run, reference=str(tmp_path / "other"), estimator="reinforce", kl_coef=0.5, entropy_ratio=0.4
    )
    made = read_table(report.path, EXPERIENCES).to_pylist()
    plain = [row for row in made if len(sequences(by_rollout(rows)[row["rollout_id"]]["turns"])) == 1]
    assert plain
    for row in plain:
        kl = np.array(row["kl"])
        where = np.flatnonzero(np.array(row["returns"]))
        later = np.cumsum(kl[::-1])[::-1]
        np.testing.assert_allclose(np.array(row["returns"])[where], row["reward"] - 0.5 * later[where], atol=1e-5)
        assert np.abs(kl).max() > 1e-3
        generated = np.flatnonzero(np.array(row["logprobs"]))
        kept = max(1, int(len(generated) * 0.4))
        assert sum(row["loss_mask"]) == kept


def test_the_critic_gives_values_and_what_comes_after(run: Path, rows: Rows, critic: Path) -> None:
    """Values are of the state before each token; gae uses them, and a truncated rollout goes on with the value after its
    last token, while one that ended does not."""
    rows[0] = {**rows[0], "status": "truncated"}
    write_run(run, rows)
    report = gymdata.experience(run, critic=str(critic), estimator="gae", gamma=0.9, lam=0.8, abandoned="keep")
    assert report.notes == []
    made = read_table(report.path, EXPERIENCES).to_pylist()
    for row in rows:
        mine = [m for m in made if m["rollout_id"] == row["rollout_id"]]
        values, after = values_of(critic, row)
        if len(mine) == 1:
            np.testing.assert_allclose(tokens_of(mine, "values"), values, atol=1e-5)
        rewards = np.zeros(len(values))
        rewards[-1] = row["reward"]
        if row["status"] == "truncated":
            rewards[-1] += 0.9 * after
        mask = np.ones((1, len(values)))
        advantages, returns = credit.gae(rewards[None], np.array(values)[None], mask, 0.9, 0.8)
        np.testing.assert_allclose(np.sort(tokens_of(mine, "advantages")), np.sort(advantages[0]), atol=1e-5)
        np.testing.assert_allclose(np.sort(tokens_of(mine, "returns")), np.sort(returns[0]), atol=1e-5)


def test_notes_say_what_values_are_for(run: Path, rows: Rows, critic: Path) -> None:
    """Without a critic a truncated rollout counts as ended; with one and grpo the values are only stored."""
    rows[0] = {**rows[0], "status": "truncated"}
    write_run(run, rows)
    ended = gymdata.experience(run, estimator="gae").notes
    assert any("count as ended" in note for note in ended)
    assert any("every V is 0" in note for note in ended)
    stored = gymdata.experience(run, estimator="grpo", critic=str(critic))
    assert stored.notes == ["values are in the file, but grpo does not use them"]
    assert "values" in read_table(stored.path, EXPERIENCES).column_names


def test_dropped_groups_are_not_scored(run: Path, policy: Path, critic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model sees the tokens of kept rollouts, once; kept numbers are the same as when all are kept."""
    from gymdata.models._torch import ForwardPolicy

    seen: list[int] = []
    plain = ForwardPolicy.log_probs

    def counting(self: Any, given: Any, **how: Any) -> Any:
        seen.append(given.n_scored)
        return plain(self, given, **how)

    monkeypatch.setattr(ForwardPolicy, "log_probs", counting)
    kept = gymdata.experience(run, reference=str(policy), whiten=True)
    assert sum(seen) == kept.counts["trained_tokens"]
    every = gymdata.experience(run, run.parent / "all", reference=str(policy), zero_variance="keep")
    names = ("rollout_id", "sequence_index", "ref_logprobs")
    some, whole = (read_table(r.path, EXPERIENCES, names).to_pylist() for r in (kept, every))
    found = {(r["rollout_id"], r["sequence_index"]): r["ref_logprobs"] for r in whole}
    for row in some:
        np.testing.assert_allclose(row["ref_logprobs"], found[row["rollout_id"], row["sequence_index"]], atol=1e-5)


def test_abandoned_retries_may_be_left_out(run: Path, policy: Path) -> None:
    """Columns fit the tokens that are there when retries that nothing continues are dropped."""
    report = gymdata.experience(run, reference=str(policy), abandoned="drop", zero_variance="keep")
    assert report.counts["abandoned_turns"] > 0
    made = read_table(report.path, EXPERIENCES).to_pylist()
    assert np.abs(tokens_of(made, "ref_logprobs") - tokens_of(made, "logprobs")).max() < 1e-4


def test_what_is_refused(run: Path, policy: Path, critic: Path, tmp_path: Path) -> None:
    """A model with another tokenizer, one that is no critic, one that is not there, and columns that come twice."""
    with pytest.raises(DataError, match="lack score"):
        gymdata.experience(run, critic=str(policy), estimator="gae")
    with pytest.raises(DataError, match="no such"):
        gymdata.experience(run, reference=str(tmp_path / "nothing"))
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = read_table(run)
    numbers = [[0.0] * n for n in table["n_generated_tokens"].to_pylist()]
    pq.write_table(pa.table({"rollout_id": table["rollout_id"], "values": numbers}), tmp_path / "v.parquet")
    with pytest.raises(UsageError, match="both give values"):
        gymdata.experience(run, critic=str(critic), token_columns=tmp_path / "v.parquet", estimator="gae")
    write_run_json(run, read_run_json(run) | {"identity": {"tokenizer_hash": "another"}})
    with pytest.raises(RefusedError, match="tokenizer"):
        gymdata.experience(run, reference=str(policy))


def test_the_command_takes_models(run: Path, policy: Path, critic: Path, capsys: Any) -> None:
    """--reference and --critic from the command line, with --kl-coef; the numbers are finite."""
    words = ["experience", str(run), "--estimator", "gae", "--kl-coef", "0.1", "--lambda", "0.9", "--json"]
    assert main([*words, "--reference", str(policy), "--critic", str(critic)]) == 0
    made = read_table(run / "experiences-gae", EXPERIENCES).to_pylist()
    assert all(math.isfinite(x) for row in made for x in row["advantages"])
    assert {"ref_logprobs", "entropy", "kl", "values"} <= set(made[0])

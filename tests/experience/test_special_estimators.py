"""``gymdata experience`` with estimators of turns, places, agents, parts of rewards and a teacher, against slow accounts."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gymdata
from gymdata import credit
from gymdata.errors import GymdataError, RefusedError, StoreError, UsageError
from gymdata.models.model_identity import policy_facts
from gymdata.progress import NullProgress
from gymdata.rollouts.schema import EXPERIENCES
from gymdata.store import read_run_json, read_table, write_run_json
from tests.audit.conftest import changed, log_probs_of
from tests.rollout_files import rollout, two_turns, write_run
from tests.train.trainers.conftest import policy  # noqa: F401 - fixture

pytestmark = pytest.mark.filterwarnings("ignore")
#: Two ways to the answer: both come to the tool answer 30, the second also to 31.
SHORT = [([1, 5], [10, 2]), ([1, 5, 10, 2, 30], [40, 2])]
LONG = [([1, 5], [11, 2]), ([1, 5, 11, 2, 31], [12, 2]), ([1, 5, 11, 2, 31, 12, 2, 30], [41, 2])]


def advantages(run: Path, output: str = "made", **settings: Any) -> dict[str, list[float]]:
    """The advantages of the trained tokens of each rollout."""
    report = gymdata.experience(run, run.parent / output, **settings)
    found: dict[str, list[float]] = {}
    for row in read_table(report.path, EXPERIENCES).to_pylist():
        mine = [a for a, m in zip(row["advantages"], row["loss_mask"], strict=True) if m]
        found.setdefault(row["rollout_id"], []).extend(mine)
    return found


def standard(values: list[float]) -> list[float]:
    x = np.array(values)
    return [0.0] * len(x) if len(x) < 2 or np.ptp(x) == 0 else ((x - x.mean()) / (x.std(ddof=1) + 1e-6)).tolist()


def test_gigpo_compares_turns_taken_in_equal_states(tmp_path: Path) -> None:
    """Turns after the same message of the environment are compared beside the rollouts; γ discounts between turns."""
    run = write_run(
        tmp_path / "run", [rollout("a", 0, 1.0, SHORT), rollout("a", 1, 0.0, LONG), rollout("a", 2, 1.0, LONG)]
    )
    whole = standard([1.0, 0.0, 1.0])
    first = standard([0.5, 0.0, 0.25])  # the state of the first turn: the prompt
    middle = standard([0.0, 0.5])  # message 31
    last = standard([1.0, 0.0, 1.0])  # message 30
    expected = {
        "a-0": [whole[0] + 2 * first[0]] * 2 + [whole[0] + 2 * last[0]] * 2,
        "a-1": [whole[1] + 2 * x for x in (first[1], middle[0], last[1]) for _ in range(2)],
        "a-2": [whole[2] + 2 * x for x in (first[2], middle[1], last[2]) for _ in range(2)],
    }
    found = advantages(run, estimator="gigpo", gamma=0.5, step_weight=2.0)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=1e-5)


def test_gigpo_of_equal_outcomes_still_teaches_speed(tmp_path: Path) -> None:
    """With γ below 1 the shorter of two successes is better; with γ = 1 the group is dropped."""
    run = write_run(tmp_path / "run", [rollout("a", 0, 1.0, SHORT), rollout("a", 1, 1.0, LONG)])
    found = advantages(run, estimator="gigpo", gamma=0.9)
    assert found["a-0"][0] > 0 > found["a-1"][0]
    with pytest.raises(RefusedError, match="1 zero variance"):
        advantages(run, "other", estimator="gigpo")


def test_step_rewards_are_part_of_gigpo(tmp_path: Path) -> None:
    """With rewards of turns the return of a turn is what is still to come, and the rollout's is their sum."""
    rows = [rollout("a", 0, 1.0, SHORT), rollout("a", 1, 0.0, SHORT)]
    for row, given in zip(rows, ([0.0, 2.0], [1.0, 0.0]), strict=True):
        row["turns"] = [{**turn, "reward": r} for turn, r in zip(row["turns"], given, strict=True)]
    found = advantages(write_run(tmp_path / "run", rows), estimator="gigpo", rewards="steps+outcome")
    whole, first, last = standard([3.0, 1.0]), standard([3.0, 1.0]), standard([3.0, 0.0])
    np.testing.assert_allclose(found["a-0"], [whole[0] + first[0]] * 2 + [whole[0] + last[0]] * 2, atol=1e-5)


def test_each_agent_has_its_running_baseline(tmp_path: Path) -> None:
    """rae: rewards of an agent's turns less what it had before, in the order of the file."""
    rows = [rollout("a", i, None, SHORT) for i in range(3)]
    for row, given in zip(rows, ([1.0, -1.0], [1.0, -1.0], [0.0, 2.0]), strict=True):
        agents = ("white", "black")
        row["turns"] = [
            {**turn, "reward": r, "agent": agent} for turn, r, agent in zip(row["turns"], given, agents, strict=True)
        ]
    run = write_run(tmp_path / "run", rows)
    found = advantages(run, estimator="rae", rewards="steps", baseline_decay=0.5)
    np.testing.assert_allclose(found["a-0"], [1, 1, -1, -1])
    np.testing.assert_allclose(found["a-1"], [0.5, 0.5, -0.5, -0.5])
    np.testing.assert_allclose(found["a-2"], [-0.75, -0.75, 2.75, 2.75])


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_whitening_counts_the_tokens_that_are_trained(tmp_path: Path, gamma: float) -> None:
    """With --target-agents the trained advantages have mean 0 and std 1; tokens of other agents do not count."""
    rows = [rollout("a", 0, 1.0, SHORT), rollout("a", 1, 0.0, LONG)]
    for row, agents in zip(rows, (("solver", "critic"), ("solver", "solver", "critic")), strict=True):
        row["turns"] = [{**turn, "agent": agent} for turn, agent in zip(row["turns"], agents, strict=True)]
    run = write_run(tmp_path / "run", rows)
    found = advantages(run, estimator="reinforce", gamma=gamma, whiten=True, target_agents=("solver",))
    whitened = [*found["a-0"], *found["a-1"]]
    assert len(whitened) == 6
    np.testing.assert_allclose([np.mean(whitened), np.std(whitened, ddof=1)], [0, 1], atol=1e-6)


@pytest.mark.parametrize("settings", [{"whiten": True}, {"advantage_clip": 0.25}, {"target_agents": ("solver",)}, {}])
def test_the_summary_is_of_the_advantages_that_are_written(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Mean and deviation are those of the trained tokens in the file: after whitening and clipping, of the agents meant."""
    rows = [rollout("a", 0, 1.0, SHORT), rollout("a", 1, 0.0, LONG), rollout("a", 2, 0.5, SHORT)]
    for row in rows:
        row["turns"] = [{**turn, "agent": ("solver", "critic")[n % 2]} for n, turn in enumerate(row["turns"])]
    write_run(tmp_path / "run", rows)
    report = gymdata.experience(tmp_path / "run", output=tmp_path / "out", estimator="reinforce", **settings)
    table = read_table(tmp_path / "out", EXPERIENCES, ["advantages", "loss_mask"])
    values, masks = (table[name].combine_chunks().flatten().to_numpy() for name in ("advantages", "loss_mask"))
    written = values[masks != 0].astype(np.float64)
    assert report.advantage["mean"] == pytest.approx(written.mean(), abs=1e-9)
    assert report.advantage["std"] in (pytest.approx(written.std()), pytest.approx(written.std(ddof=1)))


def with_top(row: dict[str, Any], seed: int) -> dict[str, Any]:
    """Three saved alternatives a token, the sampled one at 0.5."""
    rng = np.random.default_rng(seed)
    turns = []
    for turn in row["turns"]:
        top = [
            [{"id": 7, "log_prob": math.log(p)} for p in sorted((0.5, *rng.uniform(0.01, 0.2, 2)), reverse=True)]
            for _ in turn["generation_token_ids"]
        ]
        turns.append({**turn, "top_log_probs": top})
    return {**row, "turns": turns}


def test_the_optimal_token_baseline_reads_saved_alternatives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """otb: Σπ² of the saved alternatives weighs the group's returns at each place, whatever the batches."""
    shapes = [SHORT, LONG, SHORT]
    rows = [with_top(rollout("a", i, float(i), shapes[i]), i) for i in range(3)]
    run = write_run(tmp_path / "run", rows)
    logprobs = [np.concatenate([t["generation_log_probs"] for t in row["turns"]]) for row in rows]
    squares = [
        np.array([sum(math.exp(2 * x["log_prob"]) for x in top) for t in row["turns"] for top in t["top_log_probs"]])
        for row in rows
    ]
    energy = [1 - 2 * np.exp(lp) + np.maximum(sq, np.exp(2 * lp)) for lp, sq in zip(logprobs, squares, strict=True)]
    expected = {}
    for i in range(3):
        values = []
        for t in range(len(logprobs[i])):
            reach = [j for j in range(3) if len(logprobs[j]) > t]
            w = np.array([energy[j][: t + 1].sum() for j in reach])
            values.append(0.0 if len(reach) < 2 else i - (w * np.array(reach)).sum() / w.sum())
        expected[f"a-{i}"] = values
    for size in (4096, 1):
        monkeypatch.setattr(importlib.import_module("gymdata.commands.experience.build"), "HEADED_ROWS", size)
        found = advantages(run, f"made{size}", estimator="otb")
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, atol=1e-5)
    bare = write_run(tmp_path / "bare", [rollout("a", i, float(i), SHORT) for i in range(2)])
    with pytest.raises(RefusedError, match=r"top_log_probs[\s\S]*--top-logprobs"):
        advantages(bare, estimator="otb")


def test_gdpo_compares_named_parts_and_whitens(tmp_path: Path) -> None:
    """gdpo: each named part standardized within the group, the sums over all tokens of the batch."""
    rows = []
    for i, (style, right) in enumerate([(0.0, 10.0), (1.0, 0.0), (0.0, 0.0), (1.0, 10.0)]):
        parts = [{"name": "right", "value": right}, {"name": "style", "value": style}]
        rows.append(rollout("a", i, 5.0, SHORT, rewards=parts))
    run = write_run(tmp_path / "run", rows)
    sums = np.add(standard([0.0, 1.0, 0.0, 1.0]), standard([10.0, 0.0, 0.0, 10.0]))
    tokens = np.repeat(sums, 4)
    white = (tokens - tokens.mean()) / tokens.std(ddof=1)
    found = advantages(run, estimator="gdpo")
    np.testing.assert_allclose(np.concatenate([found[f"a-{i}"] for i in range(4)]), white, atol=1e-5)
    one = advantages(run, "one", estimator="gdpo", reward_parts=("style",))
    assert one["a-0"][0] < 0 < one["a-1"][0]
    with pytest.raises(UsageError, match="reward_parts=: got 'nope'"):
        advantages(run, "none", estimator="gdpo", reward_parts=("nope",))


def test_pass_at_k_and_maxrl_from_files(tmp_path: Path) -> None:
    """The advantages of rollouts are those of the formulas; groups below k are named in a note."""
    rows = [rollout("a", i, float(i == 0), SHORT) for i in range(4)] + [
        rollout("b", i, float(i), SHORT) for i in range(2)
    ]
    run = write_run(tmp_path / "run", rows)
    report = gymdata.experience(run, tmp_path / "passes", estimator="pass-at-k", pass_k=3)
    assert "1 group has fewer than 3 scored rollouts (pass_k): their advantages are 0" in report.notes
    found = advantages(run, "three", estimator="pass-at-k", pass_k=3)
    assert [found[f"a-{i}"][0] for i in range(4)] == pytest.approx(credit.pass_at_k([1, 0, 0, 0], k=3).tolist())
    found = advantages(run, "max", estimator="maxrl")
    assert [found[f"a-{i}"][0] for i in range(4)] == pytest.approx([3, -1, -1, -1], abs=1e-4)


def test_opo_and_reinforce_plus_plus_from_files(tmp_path: Path) -> None:
    """opo weighs the baseline by generated tokens (4, 6 and 6); reinforce++ whitens the rewards of all tokens."""
    rows = [rollout("a", 0, 1.0, SHORT), rollout("a", 1, 0.0, LONG), rollout("a", 2, 0.0, LONG)]
    run = write_run(tmp_path / "run", rows)
    found = advantages(run, "opo", estimator="opo")
    assert [found[f"a-{i}"][0] for i in range(3)] == pytest.approx([0.75, -0.25, -0.25])
    found = advantages(run, "plus", estimator="reinforce++")
    tokens = np.repeat([1.0, 0.0, 0.0], [4, 6, 6])
    white = (tokens - tokens.mean()) / tokens.std(ddof=1)
    np.testing.assert_allclose(np.concatenate([found[f"a-{i}"] for i in range(3)]), white, atol=1e-6)


def test_remax_subtracts_the_greedy_reward(tmp_path: Path) -> None:
    """r less the reward that the greedy rollout of the task had; a task without one is left out and counted; a run that was
    not greedy is refused."""
    run = write_run(
        tmp_path / "run", [rollout("a", 0, 1.0, SHORT), rollout("a", 1, 0.0, LONG), rollout("b", 0, 1.0, SHORT)]
    )
    greedy = write_run(tmp_path / "greedy", [rollout("a", 0, 0.25, SHORT, temperature=0.0)])
    found = advantages(run, estimator="remax", baseline=str(greedy))
    assert {name: values[0] for name, values in found.items()} == pytest.approx({"a-0": 0.75, "a-1": -0.25})
    report = gymdata.experience(run, tmp_path / "again", estimator="remax", baseline=str(greedy))
    assert report.left_out == {"no_baseline": 1}
    with pytest.raises(RefusedError, match="were sampled, and remax compares with greedy ones"):
        gymdata.experience(run, tmp_path / "sampled", estimator="remax", baseline=str(run))
    with pytest.raises(UsageError, match="estimator remax needs a baseline"):
        gymdata.experience(run, tmp_path / "none", estimator="remax")


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"pass_k": 2}, "pass_k: got 2, which has no effect without estimator='pass-at-k'"),
        ({"step_weight": 2.0, "estimator": "rae"}, "no effect without estimator='gigpo'"),
        ({"estimator": "gdpo", "reward": "exact"}, "reward: got 'exact', which has no effect"),
        ({"estimator": "maxrl", "rewards": "steps"}, "an estimator that reads rewards of turns"),
        ({"estimator": "rae", "gamma": 0.9}, "gamma: got 0.9, which has no effect"),
        ({"estimator": "rloo", "lam": 0.9}, "lam: got 0.9, which has no effect without estimator='gae'"),
        ({"whiten": True, "mean_only": True}, "mean_only has no effect without normalize_cross_batch=True"),
        ({"kl_estimator": "k3"}, "kl_estimator: got 'k3', which has no effect without reference= or token_columns="),
        ({"kl_horizon": 5.0}, "kl_horizon: got 5.0, which has no effect without kl_target"),
        ({"estimator": "gigpo", "discount_unit": "turn"}, "discount_unit: got 'turn', which has no effect"),
        ({"teacher_coef": 2.0}, "no effect without teacher="),
        ({"teacher": "m", "zero_variance": "drop"}, "zero_variance: got 'drop', which has no effect"),
        ({"estimator": "teacher"}, "needs a teacher model"),
    ],
)
def test_settings_without_effect_are_refused(tmp_path: Path, settings: dict[str, Any], match: str) -> None:
    """A setting that the estimator does not read is refused by its name."""
    run = write_run(tmp_path / "run", [rollout("a", i, float(i), SHORT) for i in range(2)])
    with pytest.raises(UsageError, match=match):
        advantages(run, **settings)


@pytest.fixture(scope="module")
def teacher(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy with other weights and the same tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("models") / "teacher"
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_pretrained(policy)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder)
    return folder


@pytest.mark.torch
def test_a_teacher_gives_every_token_its_advantage(tmp_path: Path, policy: Path, teacher: Path) -> None:
    """log π_teacher − log π of the sampled token at the rollout's temperature, without any reward; beside an estimator,
    added to its advantage."""
    from transformers import AutoModelForCausalLM

    student, other = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (policy, teacher))
    made = [rollout("a", i, None if i == 2 else float(i), two_turns(5, 40 + i), temperature=0.7) for i in range(3)]
    rows = [changed(r, lambda p, g, lp, n: (p, g, log_probs_of(student, p, g, 0.7))) for r in made]
    run = write_run(tmp_path / "run", rows)
    scored = [changed(r, lambda p, g, lp, n: (p, g, log_probs_of(other, p, g, 0.7))) for r in made]

    def flat(row: dict[str, Any]) -> np.ndarray:
        return np.concatenate([turn["generation_log_probs"] for turn in row["turns"]])

    expected = {r["rollout_id"]: flat(t) - flat(r) for r, t in zip(rows, scored, strict=True)}
    found = advantages(run, teacher=str(teacher))
    assert found.keys() == expected.keys(), "rollouts without a reward are used"
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=1e-4)
    table = read_table(tmp_path / "made", EXPERIENCES)
    assert table["teacher_logprobs"].null_count == 0
    facts = read_run_json(tmp_path / "made")
    assert (facts["config"]["estimator"], facts["teacher"]["path"]) == ("teacher", str(teacher))
    with pytest.raises(StoreError, match=r"teacher: .*\n.*another output folder keeps both"):
        gymdata.experience(run, tmp_path / "made", teacher=str(policy))
    beside = advantages(run, "beside", teacher=str(teacher), estimator="grpo", teacher_coef=0.5)
    z = 0.5 / (math.sqrt(0.5) + 1e-9)
    np.testing.assert_allclose(beside["a-1"], z + 0.5 * expected["a-1"], atol=1e-4)


@pytest.mark.torch
@pytest.mark.parametrize("sampled", [True, False])
def test_a_teacher_that_sampled_is_warned_of(tmp_path: Path, policy: Path, sampled: bool) -> None:
    """The policy as its own teacher has no other opinion: a warning says that nothing is learned from it."""
    said: list[str] = []

    class Notes(NullProgress):
        def message(self, text: str) -> None:
            said.append(text)

    by = policy_facts(str(policy))["policy_hash"] if sampled else "another"
    run = write_run(tmp_path / "run", [rollout("a", i, float(i), two_turns(5, 40), policy_hash=by) for i in range(2)])
    gymdata.experience(run, teacher=str(policy), progress=Notes())
    warned = [text for text in said if "is the policy that sampled 2 of 2 rollouts" in text]
    assert len(warned) == int(sampled)


@pytest.mark.torch
def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path, teacher: Path) -> None:
    """The same ids would mean other text: refused by the hash."""
    run = write_run(tmp_path / "run", [rollout("a", i, float(i), two_turns(5, 40)) for i in range(2)])
    facts = read_run_json(run)
    write_run_json(run, {**facts, "identity": {**facts.get("identity", {}), "tokenizer_hash": "another"}})
    with pytest.raises(GymdataError, match="was sampled with tokenizer another"):
        advantages(run, teacher=str(teacher))

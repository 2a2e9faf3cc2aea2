"""``gymdata experience`` against a slow account of the same rollouts, rollout by rollout and token by token."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gymdata
from gymdata.cli.main import main
from gymdata.errors import GymdataError, RefusedError, UsageError
from gymdata.rollouts.schema import EXPERIENCES, ROLLOUTS, SCORES
from gymdata.store import read_run_json, read_table, write_run_json
from tests.definition import sequences
from tests.formulas import slow_shape
from tests.rollout_files import BRANCH, BREAK, RETRY, rollout, two_turns, write_run, write_table

ESTIMATORS = ["grpo", "rloo", "reinforce", "reinforce-baseline", "gae", "cpgd", "dr-grpo"]

#: The loops train retries, too.
KEEP = {"abandoned": "keep"}


def rows() -> list[dict[str, Any]]:
    """Four groups that teach something, one without variance, one scored once, and rollouts without a reward."""
    made = []
    shapes = [two_turns(5, 40), BREAK, RETRY, BRANCH, [([1, 5], [7, 8, 2])]]
    for task in "abcd":
        for index in range(4):
            row = rollout(task, index, float((index * 7 + ord(task)) % 5) / 4, shapes[(index + ord(task)) % 5])
            row["turns"] = [{**turn, "reward": 0.25 * k * index} for k, turn in enumerate(row["turns"])]
            made.append(row)
    made[5]["reward"] = None
    made[6]["reward"] = math.inf
    made += [rollout("flat", i, 1.0, two_turns(6, 41)) for i in range(3)]
    made += [rollout("lonely", 0, 1.0, two_turns(7, 42)), rollout("lonely", 1, None, two_turns(7, 43))]
    made += [rollout("silent", 0, None, two_turns(8, 43))]
    return [{**row, "temperature": 0.7} for row in made]


def slow(
    made: list[dict[str, Any]], estimator: str, rewards: str, unit: str, gamma: float, lam: float
) -> dict[Any, Any]:
    """(rollout_id, sequence) → advantages, by loops."""
    raw = {r["rollout_id"]: r["reward"] for r in made}
    usable = [r for r in made if raw[r["rollout_id"]] is not None and math.isfinite(raw[r["rollout_id"]])]
    result = {}
    for group in sorted({r["group_id"] for r in usable}):
        members = [r for r in usable if r["group_id"] == group]
        values = [raw[r["rollout_id"]] for r in members]
        equal = len(values) < 2 or max(values) == min(values)
        if equal and estimator not in ("reinforce", "gae"):
            continue
        shaped = slow_shape(values, estimator)
        for r, outcome in zip(members, shaped, strict=True):
            sampled: list[tuple[int, int, float]] = []  # turn, position in its generation, reward
            for t, turn in enumerate(r["turns"]):
                size = len(turn["generation_token_ids"])
                for k in range(size):
                    step = (turn["reward"] or 0.0) if rewards != "outcome" and k == size - 1 else 0.0
                    sampled.append((t, k, step))
            given: dict[tuple[int, int], float] = {}
            after, last_turn = 0.0, None
            for n, (t, k, step) in enumerate(reversed(sampled)):
                here = step + (outcome if n == 0 and rewards != "steps" else 0.0)
                discount = gamma if unit == "token" or t != last_turn else 1.0
                factor = discount * (lam if estimator == "gae" else 1.0)
                after = here + (factor * after if last_turn is not None else 0.0)
                given[t, k], last_turn = after, t
            for number, s in enumerate(sequences(r["turns"])):
                advantages = np.zeros(len(s.input_ids))
                for t, start, mine in zip(s.turns, s.turn_starts, s.trained, strict=True):
                    for k in range(len(r["turns"][t]["generation_token_ids"]) if mine else 0):
                        advantages[start + k] = given[t, k]
                result[r["rollout_id"], number] = advantages
    return result


def load(report: Any) -> dict[Any, dict[str, Any]]:
    table = read_table(report.path, EXPERIENCES)
    return {(row["rollout_id"], row["sequence_index"]): row for row in table.to_pylist()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", rows())


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_outcome_credit_is_the_loops(run: Path, estimator: str) -> None:
    """Each estimator, discounted by token, over chains, breaks, branches and retries, in the file's precision."""
    report = gymdata.experience(run, estimator=estimator, gamma=0.9, lam=0.8 if estimator == "gae" else 1.0, **KEEP)
    assert report.path == run / f"experiences-{estimator}" / "experiences.parquet"
    expected = slow(rows(), estimator, "outcome", "token", 0.9, 0.8)
    found = load(report)
    assert found.keys() == expected.keys()
    for key, row in found.items():
        np.testing.assert_allclose(row["advantages"], expected[key], rtol=1e-5, atol=1e-6)
        assert row["returns"] == row["advantages"]
        assert all(a == 0 for a, m in zip(row["advantages"], row["loss_mask"], strict=True) if not m)


@pytest.mark.parametrize("unit", ["token", "turn"])
@pytest.mark.parametrize("rewards", ["steps", "steps+outcome"])
@pytest.mark.parametrize("estimator", ["reinforce", "gae"])
def test_step_rewards_are_the_loops(run: Path, estimator: str, rewards: str, unit: str) -> None:
    """A step's reward is on its turn's last token; γ counts tokens or turns; never silently both kinds of reward."""
    made = [r for r in rows() if r["task_id"] in "abcd" and r["reward"] is not None and math.isfinite(r["reward"])]
    run = write_run(run.parent / "steps", made)
    lam = 0.9 if estimator == "gae" else 1.0
    report = gymdata.experience(
        run, estimator=estimator, rewards=rewards, discount_unit=unit, gamma=0.5, lam=lam, **KEEP
    )
    expected = slow(made, estimator, rewards, unit, 0.5, 0.9)
    for key, row in load(report).items():
        np.testing.assert_allclose(row["advantages"], expected[key], rtol=1e-5, atol=1e-6)


def test_the_tokens_are_the_saved_ones(run: Path) -> None:
    """Ids, masks, log-probs and turn starts are those of the sequences; every row carries its rollout's facts."""
    found = load(gymdata.experience(run, estimator="rloo", **KEEP))
    for row in rows():
        for number, s in enumerate(sequences(row["turns"])):
            if (one := found.get((row["rollout_id"], number))) is None:
                continue
            assert one["input_ids"] == s.input_ids.tolist()
            assert one["loss_mask"] == s.loss_mask.tolist()
            assert one["logprobs"] == s.logprobs.tolist()
            assert one["turn_starts"] == s.turn_starts.tolist()
            assert (one["reward"], one["weight"]) == (row["reward"], 1.0)
            assert one["temperature"] == pytest.approx(0.7)
    assert list(found) == sorted(found, key=lambda key: [r["rollout_id"] for r in rows()].index(key[0]))


def test_every_rollout_and_group_is_accounted_for(run: Path) -> None:
    """Counts add up, each dropped group is named with its reason in run.json, and parents lead to the run."""
    report = gymdata.experience(run, estimator="grpo", command=["gymdata", "experience"])
    assert report.left_out == {"not_scored": 4, "in_a_dropped_group": 4}
    assert report.counts["rollouts"] == report.counts["rollouts_used"] + sum(report.left_out.values()) == 22
    facts = read_run_json(report.path)
    assert facts["dropped_groups"] == {
        "no_scored_rollout": ["group-silent"], "one_scored_rollout": ["group-lonely"], "zero_variance": ["group-flat"],
    }  # fmt: skip
    assert (facts["stage"], facts["parents"][0]["run_id"]) == ("experiences", "run-1")
    assert facts["config"]["estimator"] == "grpo"
    assert facts["counts"]["sequences"] == facts["files"][0]["rows"] == len(load(report))
    kept = gymdata.experience(run, run.parent / "kept", estimator="grpo", zero_variance="keep")
    assert kept.left_out == {"not_scored": 4}
    flat = [row for key, row in load(kept).items() if key[0].startswith("flat")]
    assert len(flat) == 3
    assert not any(any(row["advantages"]) for row in flat)


def test_batches_do_not_matter(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whitening, steps and order are those of the whole file however it is read."""
    settings: dict[str, Any] = {"estimator": "grpo", "rewards": "steps+outcome", "gamma": 0.9, "whiten": True}
    whole = read_table(gymdata.experience(run, run.parent / "whole", **settings).path, EXPERIENCES)
    monkeypatch.setattr(importlib.import_module("gymdata.commands.experience.build"), "BATCH_ROWS", 3)
    parts = read_table(gymdata.experience(run, run.parent / "parts", **settings).path, EXPERIENCES)
    assert whole.drop_columns(["advantages"]).equals(parts.drop_columns(["advantages"]))
    flat = [np.concatenate(t["advantages"].combine_chunks().flatten().to_numpy()[None]) for t in (whole, parts)]
    np.testing.assert_allclose(flat[0], flat[1], rtol=1e-5, atol=1e-6)
    mask = whole["loss_mask"].combine_chunks().flatten().to_numpy() == 1
    assert flat[0][mask].mean() == pytest.approx(0, abs=1e-6)
    assert flat[0][mask].std(ddof=1) == pytest.approx(1, abs=1e-6)


def test_whitened_advantages_have_mean_0_and_deviation_1(run: Path, tmp_path: Path) -> None:
    """Over all trained tokens of the file, with n − 1 below."""
    whitened = gymdata.experience(run, tmp_path / "whitened", estimator="rloo", whiten=True)
    values = read_table(whitened.path, EXPERIENCES, ["loss_mask", "advantages"]).to_pylist()
    trained = np.array([a for row in values for a, m in zip(row["advantages"], row["loss_mask"], strict=True) if m])
    assert (trained.mean(), trained.std(ddof=1)) == (pytest.approx(0, abs=1e-6), pytest.approx(1, abs=1e-6))


def test_shaping_of_scalars_in_their_order(tmp_path: Path) -> None:
    """Overlong after the filter and before shaping, then norm, then clip; weights make up for groups without variance."""
    long = [([1, 2], [5] * 10)]
    made = [rollout("a", 0, 1.0, long), rollout("a", 1, 0.0, [([1, 2], [6] * 8)]), rollout("b", 0, 1.0, long),
            rollout("b", 1, 1.0, two_turns(3, 4))]  # fmt: skip
    run = write_run(tmp_path / "run", made)
    report = gymdata.experience(
        run, estimator="reinforce-baseline", overlong_buffer=4, max_new_tokens=10, clip_filter_weights=True
    )
    found = load(report)
    # a: 1 − 1 (at the limit) and 0 − 0.5; b is equal before the penalty and is dropped by that.
    assert found["a-0", 0]["advantages"][-1] == pytest.approx(0.25)
    assert found["a-1", 0]["advantages"][-1] == pytest.approx(-0.25)
    assert {row["weight"] for row in found.values()} == {2.0}
    assert set(found) == {("a-0", 0), ("a-1", 0)}
    clipped = gymdata.experience(run, tmp_path / "c", estimator="dr-grpo", reward_clip="-0.1,0.2")
    assert [row["advantages"][-1] for row in load(clipped).values()] == pytest.approx([0.2, -0.1])
    normed = gymdata.experience(run, tmp_path / "n", estimator="dr-grpo", reward_norm="std", advantage_clip=0.6)
    assert [row["advantages"][-1] for row in load(normed).values()] == pytest.approx([0.6, -0.6])


@pytest.mark.parametrize(
    ("identities", "got"),
    [([{"max_tokens": 10}, {"max_tokens": 5, "max_turns": 2}], None), ([{"max_tokens": 10}, {"max_tokens": 48}], "10, 48"),
     ([{"max_tokens": 10}, {}], "none, 10")],
)  # fmt: skip
def test_runs_of_other_lengths_have_no_common_limit(tmp_path: Path, identities: list[dict], got: str | None) -> None:
    """``overlong_buffer`` counts back from one limit, so runs that were sampled with several need one to be named."""
    for n, identity in enumerate(identities):
        run = write_run(tmp_path / f"run-{n}", [rollout(f"t{n}", i, float(i), [([1, 2], [5] * 10)]) for i in range(2)])
        facts = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(facts | {"run_id": f"run-{n}", "identity": identity}))
    settings = {"estimator": "reinforce-baseline", "overlong_buffer": 4}
    if got is None:
        assert gymdata.experience(str(tmp_path / "run-*"), tmp_path / "e", **settings).counts["rollouts_used"] == 4
    else:
        with pytest.raises(UsageError, match=f"give {got} as"):
            gymdata.experience(str(tmp_path / "run-*"), tmp_path / "e", **settings)
        gymdata.experience(str(tmp_path / "run-*"), tmp_path / "e", max_new_tokens=48, **settings)


def test_token_columns_bring_reference_values_and_entropy(run: Path) -> None:
    """KL is taken from the reward token by token; gae uses the values; the entropy mask trains the tokens it chose."""
    made = [r for r in rows() if r["task_id"] in "abcd"]
    sizes = [[len(t["generation_token_ids"]) for t in r["turns"]] for r in made]
    rng = np.random.default_rng(0)
    columns = {"rollout_id": [r["rollout_id"] for r in made]} | {
        name: [rng.normal(-1, 0.3, sum(s)).tolist() for s in sizes] for name in ("ref_logprobs", "values", "entropy")
    }
    run = write_run(run.parent / "more", made)
    file = run.parent / "columns.parquet"
    pq.write_table(pa.table(columns), file)
    report = gymdata.experience(run, estimator="gae", gamma=0.9, lam=0.7, kl_coef=0.1, kl_estimator="k3",
                               entropy_ratio=0.5, token_columns=file, **KEEP)  # fmt: skip
    for row, values, ref, entropy in zip(
        made, *(columns[n] for n in ("values", "ref_logprobs", "entropy")), strict=True
    ):
        if row["reward"] is None or not math.isfinite(row["reward"]):
            continue
        saved = [x for turn in row["turns"] for x in turn["generation_log_probs"]]
        kl = [math.exp(-(a - b)) - 1 + (a - b) for a, b in zip(saved, ref, strict=True)]
        rewards = [-0.1 * k for k in kl]
        rewards[-1] += row["reward"]
        advantages, following, advantage = [], 0.0, 0.0
        for r, v in zip(reversed(rewards), reversed(values), strict=True):
            advantage = r + 0.9 * following - v + 0.9 * 0.7 * advantage
            following = v
            advantages.insert(0, advantage)
        chosen = sorted(range(len(entropy)), key=lambda t: (-entropy[t], t))[: max(1, len(entropy) // 2)]
        found = [r for key, r in load(report).items() if key[0] == row["rollout_id"]]
        trained = [x for r in found for x, m in zip(r["advantages"], r["loss_mask"], strict=True) if m]
        np.testing.assert_allclose(sorted(trained), sorted(advantages[t] for t in chosen), rtol=1e-4, atol=1e-5)
        assert sum(map(sum, (r["loss_mask"] for r in found))) == len(chosen)
    assert {"ref_logprobs", "values", "entropy", "kl"} <= set(read_table(report.path, EXPERIENCES).column_names)


@pytest.mark.parametrize("abandoned", ["keep", "drop"])
def test_token_columns_have_numbers_of_retries_too(tmp_path: Path, abandoned: str) -> None:
    """As audits write them: those of turns that are left out are left out."""
    run = write_run(tmp_path / "run", [rollout("a", index, float(index), RETRY) for index in range(2)])
    ids = [row["rollout_id"] for row in read_table(run, ROLLOUTS).to_pylist()]
    sizes = [len(generation) for _, generation in RETRY]
    values = [float(turn) for turn, size in enumerate(sizes) for _ in range(size)]
    pq.write_table(pa.table({"rollout_id": ids, "values": [values] * 2}), tmp_path / "v.parquet")
    given = {"estimator": "gae", "token_columns": tmp_path / "v.parquet", "zero_variance": "keep"}
    made = load(gymdata.experience(run, abandoned=abandoned, **given)).values()
    kept = {turn for s in sequences(rollout("a", 0, 0.0, RETRY)["turns"], abandoned) for turn in s.turns}
    found = {v for row in made for v, m in zip(row["values"], row["loss_mask"], strict=True) if m}
    assert found == {float(turn) for turn in kept}
    assert (len(kept) < len(RETRY)) == (abandoned == "drop")


def test_the_optimal_value_of_a_group_is_written(run: Path) -> None:
    """β·log of the mean of exp(R/β) over the group's known rewards, with the rewards as they were; no column without it."""
    known: dict[str, list[float]] = {}
    for row in rows():
        if row["reward"] is not None and math.isfinite(row["reward"]):
            known.setdefault(row["group_id"], []).append(row["reward"])
    report = gymdata.experience(run, estimator="dr-grpo", optimal_value_beta=0.5)
    found = load(report)
    assert len({row["optimal_value"] for row in found.values()}) > 1
    for row in found.values():
        rewards = known[row["group_id"]]
        expected = 0.5 * math.log(sum(math.exp(r / 0.5) for r in rewards) / len(rewards))
        assert row["optimal_value"] == pytest.approx(expected, rel=1e-9)
    plain = gymdata.experience(run, estimator="rloo")
    assert "optimal_value" not in read_table(plain.path, EXPERIENCES).column_names


def test_a_kl_target_gives_the_next_coefficient(run: Path) -> None:
    """Mean KL over all sampled tokens, and coef·(1 + clip(KL/target − 1, ±0.2)·rollouts/horizon), in the report, the summary
    and run.json; this file is made with the coefficient that was given."""
    made = [r for r in rows() if r["task_id"] in "ab"]
    saved = [[x for turn in r["turns"] for x in turn["generation_log_probs"]] for r in made]
    columns = {"rollout_id": [r["rollout_id"] for r in made], "ref_logprobs": [[x - 0.3 for x in s] for s in saved]}
    run = write_run(run.parent / "more", made)
    pq.write_table(pa.table(columns), run.parent / "columns.parquet")
    given = {"estimator": "reinforce", "kl_coef": 0.1, "token_columns": run.parent / "columns.parquet", **KEEP}
    for target, factor in ((0.3, 0.0), (0.2, 0.2), (10.0, -0.2), (0.29, 0.3 / 0.29 - 1)):
        report = gymdata.experience(run, overwrite=True, kl_target=target, kl_horizon=100, **given)
        used = report.counts["rollouts_used"]
        assert report.kl["mean"] == pytest.approx(0.3, abs=1e-6)
        assert report.kl["coef"] == 0.1
        assert report.kl["next_coef"] == pytest.approx(0.1 * (1 + factor * used / 100), rel=1e-5)
        assert read_run_json(report.path.parent)["kl"] == report.kl
    assert dict(report.rows())["  --kl-coef for the next rollouts"] == report.kl["next_coef"]
    plain = gymdata.experience(run, overwrite=True, **given)
    assert sorted(plain.kl) == ["coef", "mean"]
    with pytest.raises(UsageError, match=rf"--kl-horizon 1 is too short for {used} rollouts"):
        gymdata.experience(run, overwrite=True, kl_target=0.1, kl_horizon=1, **given)


def test_another_reward(run: Path, tmp_path: Path) -> None:
    """--reward takes a named part, or a re-scoring beside the rollouts."""
    ids = [r["rollout_id"] for r in rows()]
    scores = pa.table({"rollout_id": ids, "name": ["judge"] * len(ids), "value": [float(i % 3) for i in range(len(ids))],
                       "status": ["scored"] * len(ids), "source": ["s"] * len(ids), "run_id": ["r"] * len(ids),
                       "detail": pa.nulls(len(ids), pa.string())})  # fmt: skip
    write_table(scores, run / "scores-judge" / "scores.parquet", SCORES)
    write_run_json(run / "scores-judge", {"stage": "score"})
    report = gymdata.experience(run, tmp_path / "judge", estimator="reinforce", reward="judge")
    assert {row["reward"] for row in load(report).values()} == {0.0, 1.0, 2.0}
    assert len(read_run_json(report.path)["parents"]) == 2
    assert gymdata.experience(run, tmp_path / "exact", reward="exact").score == "exact"
    with pytest.raises(UsageError, match="exact"):
        gymdata.experience(run, tmp_path / "x", reward="exacct")


@pytest.mark.parametrize(
    ("settings", "code", "match"),
    [
        ({"estimator": "grop"}, None, "estimator"),
        ({"kl_coef": 0.1}, None, "ref_logprobs"),
        ({"entropy_ratio": 0.2}, None, "entropy"),
        ({"kl_target": 0.2}, None, "needs a kl_coef above 0"),
        ({"overlong_buffer": 4}, None, "max-new-tokens"),
        ({"whiten": True, "normalize_cross_batch": True}, None, "choose one"),
        ({"rewards": "steps", "overlong_buffer": 4, "max_new_tokens": 9}, None, "outcome"),
    ],
)
def test_settings_that_cannot_be_honoured(run: Path, settings: dict[str, Any], code: str | None, match: str) -> None:
    """Named with what to do; nothing is written."""
    with pytest.raises(GymdataError, match=match):
        gymdata.experience(run, **settings)
    assert not list(run.glob("experiences-*/*.parquet"))


def test_files_that_teach_nothing(tmp_path: Path) -> None:
    """No reward is R501, no variance R503, no tokens T205, twice the same file D701."""
    cases = {
        "R501": [rollout("a", i, None, two_turns(1, 2)) for i in range(2)],
        "R503": [rollout("a", i, 1.0, two_turns(1, 2)) for i in range(2)],
        "T205": [rollout("a", i, float(i), []) for i in range(2)],
    }
    for code, made in cases.items():
        run = write_run(tmp_path / code, made)
        with pytest.raises(RefusedError) as caught:
            gymdata.experience(run)
        assert caught.value.code == code
        assert not list(run.glob("experiences-*/*"))
    with pytest.raises(RefusedError, match="D701"):
        gymdata.experience([tmp_path / "R503", tmp_path / "R503"], tmp_path / "x")


def test_the_command_and_the_view(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints JSON on request, its -o holds the same rows, and `query` sees the view ``experiences``."""
    words = ["experience", str(run), "-o", str(tmp_path / "e"), "--estimator", "rloo", "--whiten", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["estimator"] == "rloo"
    same = gymdata.experience(run, estimator="rloo", whiten=True)
    assert read_table(tmp_path / "e", EXPERIENCES).equals(read_table(same.path, EXPERIENCES))
    assert gymdata.query("select count(*) as n from experiences", same.path.parent)["n"].to_pylist() == [
        same.counts["sequences"]
    ]


@pytest.mark.parametrize("norm", ["std", "mean-std"])
@pytest.mark.parametrize("reward", [1.0, 0.1, -3.0, 0.0])
def test_equal_rewards_normed_are_no_signal(tmp_path: Path, norm: str, reward: float) -> None:
    """Without variance every advantage is 0, whatever the reward and whether or not the mean is taken away."""
    made = [rollout(task, i, reward, two_turns(5, 50 + i)) for task in "ab" for i in range(3)]
    report = gymdata.experience(write_run(tmp_path / "run", made), estimator="reinforce", reward_norm=norm)
    assert not any(any(row["advantages"]) for row in load(report).values())


def test_normed_rewards_are_divided_by_their_deviation(tmp_path: Path) -> None:
    """Rewards 0 and 1 have the sample deviation 0.7071…, with nothing added to it."""
    made = [rollout("a", i, float(i), two_turns(5, 50 + i)) for i in range(2)]
    report = gymdata.experience(write_run(tmp_path / "run", made), estimator="reinforce", reward_norm="std")
    assert [row["advantages"][-1] for row in load(report).values()] == [0.0, np.float32(np.sqrt(2.0))]


@pytest.mark.parametrize(
    ("rewards", "settings", "code"),
    [
        ([-1e308, 1e308], {"estimator": "grpo"}, "too large to be compared"),
        ([0.0, 1e39], {"estimator": "dr-grpo"}, "advantages are not finite in float32"),
        ([0.0, 1e39], {"estimator": "reinforce", "whiten": True}, "returns are not finite in float32"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_rewards_that_no_file_can_hold_are_refused(
    tmp_path: Path, rewards: list[float], settings: dict[str, Any], code: str
) -> None:
    """Infinite advantages and returns are never written: R502, exit code 1, and no file is left."""
    made = [rollout("a", i, reward, two_turns(5, 50 + i)) for i, reward in enumerate(rewards)]
    run = write_run(tmp_path / "run", made)
    with pytest.raises(GymdataError, match=f"R502: .*{code}") as refused:
        gymdata.experience(run, tmp_path / "e", **settings)
    assert refused.value.exit_code == 1
    assert not list(tmp_path.glob("e*"))


@pytest.mark.parametrize("given", ["abc", "1,-1", "-1", "0", "1,2,3"])
def test_bounds_of_rewards_are_checked_at_once(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An invalid bound is refused with the flag's name and what is expected, before anything is read."""
    assert main(["experience", "nowhere", f"--reward-clip={given}"]) == 2
    err = capsys.readouterr().err
    assert f"--reward-clip: got '{given}', expected" in err

"""``train-sft --distill``: the loss against its definition, and a student that comes nearer to its teacher."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymdata.errors import RefusedError
from gymdata.models.model_identity import model_facts
from gymdata.rollouts.turns import expand_prompts
from gymdata.store import read_run_json, write_run_json
from tests.rollout_files import BRANCH, BREAK, RETRY, rollout, rollouts_table, training_data, two_turns, write_run
from tests.train.trainers.running import gymdata

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
SHIPPED = Path(__file__).parents[3] / "gymdata" / "sample_data" / "policy"
T = 0.7


@given(seed=st.integers(0, 10_000), k=st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_the_loss_is_the_kl_of_a_partition(seed: int, k: int) -> None:
    """Σ p log(p/q) over the k tokens and over one class of the others, in float64, with its gradient p-weighted: softmax
    within the rest; at most the KL over the whole vocabulary."""
    import torch

    from gymdata.commands.train.trainers.sft import forward_kl

    rng = np.random.default_rng(seed)
    teacher = rng.dirichlet(np.full(6, 0.7))
    ids = np.argsort(-teacher)[:k]
    logits = torch.tensor(rng.normal(size=(1, 6)), requires_grad=True)
    loss = forward_kl(logits, torch.tensor(ids[None].copy()), torch.tensor(np.log(teacher[ids])[None]))[0]
    q = np.exp(logits.detach().numpy()[0])
    q = q / q.sum()
    p_parts = [*teacher[ids], *([1 - teacher[ids].sum()] if k < 6 else [])]
    q_parts = [*q[ids], *([1 - q[ids].sum()] if k < 6 else [])]
    expected = math.fsum(p * math.log(p / r) for p, r in zip(p_parts, q_parts, strict=True) if p > 1e-6)
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-5)
    assert float(loss.detach()) <= math.fsum(p * math.log(p / r) for p, r in zip(teacher, q, strict=True)) + 1e-5
    loss.backward()
    # The teacher that spreads the rest as the student does has the same gradient: q − p̃.
    spread = q * (p_parts[-1] / q_parts[-1] if k < 6 else 0.0)
    spread[ids] = teacher[ids]
    np.testing.assert_allclose(logits.grad.numpy()[0], q - spread, atol=1e-5)


def test_absent_alternatives_and_a_whole_distribution() -> None:
    """An absent alternative adds nothing; a teacher without a rest leaves none, also where rounding makes it 1 + 1e-8."""
    import torch

    from gymdata.commands.train.trainers.sft import forward_kl

    logits = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    two = forward_kl(logits, torch.tensor([[1, 0]]), torch.tensor([[0.25, 0.5]]).log())
    padded = forward_kl(logits, torch.tensor([[1, 0, -1]]), torch.tensor([[0.25, 0.5, 0.0]]).log())
    assert float(two) == pytest.approx(float(padded))
    whole = forward_kl(logits, torch.tensor([[0, 1, 2]]), torch.log_softmax(logits.detach(), 1).float() + 1e-8)
    assert float(whole) == pytest.approx(0, abs=1e-6)
    whole.sum().backward()
    assert torch.isfinite(logits.grad).all()


def taught(row: dict[str, Any], model: Any, k: int = 4) -> dict[str, Any]:
    """The row with log-probs and the k most likely tokens of ``model`` at its temperature."""
    import torch

    turns = []
    for turn, prompt in zip(row["turns"], expand_prompts(row["turns"], check_digests=False), strict=True):
        ids = np.concatenate([prompt, turn["generation_token_ids"]]).astype(np.int64)
        logits = model(input_ids=torch.tensor(ids[None])).logits[0, len(prompt) - 1 : -1].double() / T
        best = torch.log_softmax(logits, dim=-1).topk(k)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        top = [[{"id": i, "log_prob": lp} for i, lp in zip(a, b, strict=True)] for a, b in pairs]
        turns.append({**turn, "top_log_probs": top})
    return {**row, "turns": turns, "temperature": T}


def rows(model: Any) -> list[dict[str, Any]]:
    shapes = [two_turns(5, 40), BREAK, BRANCH, RETRY, two_turns(6, 41), two_turns(7, 42)]
    return [taught(rollout("abc"[i % 3], i, float(i), shape), model) for i, shape in enumerate(shapes)]


def kl_to(teacher: Any, student: Any, made: list[dict[str, Any]]) -> float:
    """Mean KL(teacher ‖ student) over the whole vocabulary at T, over all sampled tokens."""
    import torch

    found = []
    for row in made:
        for turn, prompt in zip(row["turns"], expand_prompts(row["turns"], check_digests=False), strict=True):
            ids = torch.tensor(np.concatenate([prompt, turn["generation_token_ids"]]).astype(np.int64)[None])
            with torch.no_grad():
                p, q = (
                    torch.log_softmax(m(input_ids=ids).logits[0, len(prompt) - 1 : -1].double() / T, dim=-1)
                    for m in (teacher, student)
                )
            found += (p.exp() * (p - q)).sum(dim=1).tolist()
    return float(np.mean(found))


@pytest.fixture(scope="module")
def teacher() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(SHIPPED).eval()


def test_the_distributions_follow_their_tokens(teacher: Any) -> None:
    """Of broken, branching and cut rollouts each trained token has the four alternatives that were saved for it."""
    made = rows(teacher)
    known = {}
    for row in made:
        for turn, prompt in zip(row["turns"], expand_prompts(row["turns"], check_digests=False), strict=True):
            for n, top in enumerate(turn["top_log_probs"]):
                before = (*prompt.tolist(), *turn["generation_token_ids"][: n + 1].tolist())
                known[before] = [one["id"] for one in top]
    for limit in (None, 6):
        data = training_data("sft", rollouts_table(made), select="all", max_length=limit, distill=True)
        assert (data.head_ids, set(data.numbers("temperature").tolist())) == (4, {np.float32(T)})
        for i in range(len(data)):
            ids, mask = data.lists("input_ids")[i], data.lists("loss_mask")[i]
            lists = data.lists("top_ids")[i].reshape(-1, 4)
            for place, mine in zip(np.flatnonzero(mask), lists, strict=True):
                assert mine.tolist() == known[tuple(ids[: place + 1].tolist())]


def test_a_sampled_first_token_is_left_out_with_its_alternatives() -> None:
    """Without a prompt the first sampled token is not trained; each other one keeps its own alternatives."""
    row = rollout("a", 0, 1.0, [([], [10, 11, 2])])
    tops = [[{"id": i, "log_prob": -float(i)} for i in (token, token + 50)] for token in (10, 11, 2)]
    row["turns"] = [{**row["turns"][0], "top_log_probs": tops}]
    table = rollouts_table([row, row | {"rollout_id": "b-1"}])
    data = training_data("sft", table, select="all", distill=True, keep_duplicates=True)
    assert data.table["loss_mask"].to_pylist() == [[0, 1, 1]] * 2
    assert data.table["top_ids"].to_pylist() == [[11, 61, 2, 52]] * 2
    assert data.table["top_log_probs"][1].as_py() == [-11.0, -61.0, -2.0, -52.0]


def test_rollouts_without_alternatives_are_refused(teacher: Any) -> None:
    """A rollout without top_log_probs has no distribution: refused with the flag that collects them."""
    made = rows(teacher)
    made[1] = rollout("b", 1, 1.0, BREAK)
    with pytest.raises(RefusedError, match=r"1 of 6 rollouts have no top_log_probs[\s\S]*--top-logprobs K"):
        training_data("sft", rollouts_table(made), select="all", distill=True)


@pytest.mark.full
def test_a_student_comes_nearer_to_its_teacher(teacher: Any, tmp_path: Path) -> None:
    """The loss begins at the KL of the partition, falls, and with it the KL over the vocabulary; the tokens are proven; a
    teacher whose distributions were truncated is refused."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    student = AutoModelForCausalLM.from_pretrained(SHIPPED)
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in student.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    student.save_pretrained(tmp_path / "student")
    AutoTokenizer.from_pretrained(SHIPPED).save_pretrained(tmp_path / "student")
    made = rows(teacher)
    run = write_run(tmp_path / "run", made)
    facts = model_facts(str(SHIPPED))
    identity = {"tokenizer_hash": facts.tokenizer_hash, "chat_template_hash": facts.chat_template_hash}
    write_run_json(run, {**read_run_json(run), "identity": {**identity, "top_p": 0.9}})
    words = ("train-sft", run, "-m", tmp_path / "student", "-o", tmp_path / "out", "--select", "all", "--distill")
    refused = gymdata(*words)
    assert refused.returncode == 1, refused.stderr
    assert "top_p 0.9" in refused.stderr
    write_run_json(run, {**read_run_json(run), "identity": identity})
    done = gymdata(*words, "--json", "--set", "num_train_epochs=12", "--set", "learning_rate=1e-3",
                   "--set", "per_device_train_batch_size=2", "--set", "gradient_accumulation_steps=8")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["trained_tokens"]["equal"] is True
    logged = [json.loads(line)["loss"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[:-1]]
    before = kl_to(teacher, student.eval(), made)
    after = kl_to(teacher, AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval(), made)
    assert 0 < logged[0] <= before * 1.05
    assert logged[-1] < 0.5 * logged[0]
    assert after < 0.6 * before
    assert "warning: " + str(run) + " was sampled by" not in done.stderr
    write_run(tmp_path / "own", [{**row, "policy_hash": facts.policy_hash} for row in made])
    own = gymdata("train-sft", tmp_path / "own", "-m", SHIPPED, "-o", tmp_path / "same", "--distill", "--dry-run")
    assert f"was sampled by {SHIPPED} itself" in own.stderr

"""A model that shares prefixes gives what it gives without, in the padded layout."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from trl.trainer.utils import add_fused_lm_head  # noqa: E402 - after the check that it is installed

from gymdata.models._shared_prefixes import Sharing, share_prefixes  # noqa: E402 - after the check that it is installed

pytestmark = pytest.mark.torch

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
#: Completions of one prompt, one of them twice; another prompt; filled up with 0 on the right.
LISTS = [[*PROMPT, 20, 21, 22], [*PROMPT, 20, 30], [*PROMPT, 20, 30], [40, 41, 42, 43, 44]]
FIELDS = ("log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs")


def model_of(attention: str = "sdpa", **options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, attn_implementation=attention, **{"max_position_embeddings": 64, **options},
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).double()
    add_fused_lm_head(model, outputs=FIELDS)
    return model


def batch_of(lists: list[list[int]]) -> dict[str, Any]:
    """ids, mask, and labels that train everything after the eighth token (of the short list, after the second)."""
    width = max(map(len, lists))
    ids = torch.zeros(len(lists), width, dtype=torch.int64)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for line, own in enumerate(lists):
        ids[line, : len(own)] = torch.tensor(own)
        mask[line, : len(own)] = 1
        first = min(len(PROMPT), len(own) - 3)
        labels[line, first : len(own)] = torch.tensor(own[first:])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "use_cache": False}


def scored(model: Any, batch: dict[str, Any]) -> tuple[Any, list[Any]]:
    """What the fused head says, and the gradients of a weighted sum of it."""
    model.zero_grad()
    out = model(**batch, fused_lm_head=True)
    weights = torch.arange(out.log_probs.numel(), dtype=out.log_probs.dtype).view_as(out.log_probs)
    (out.log_probs * weights).sum().backward()
    return out, [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_scores_and_gradients_are_those_of_the_padded_batch(attention: str):
    """Every field of the fused head and every gradient, within the rounding of the head; shared tokens are run once."""
    plain, sharing = model_of(attention), model_of(attention)
    installed = share_prefixes(sharing, "on")
    assert isinstance(installed, Sharing)
    (expected, gradients), (found, shared) = scored(plain, batch_of(LISTS)), scored(sharing, batch_of(LISTS))
    for name in FIELDS:
        one, other = getattr(found, name), getattr(expected, name)
        trained = batch_of(LISTS)["labels"][:, 1:] != -100
        assert torch.allclose(one[trained].double(), other[trained].double(), atol=1e-6), name
        assert not one[~trained].any()
    assert found.loss.item() == pytest.approx(expected.loss.item())
    for one, other in zip(shared, gradients, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-6 * float(other.abs().max() + 1))
    # 44 places; 12 nodes of the first prompt's tree and 5 of the other's, in one row.
    assert (installed.padded, installed.run) == (44, 17)


def test_hidden_states_and_logits_are_those_of_the_padded_batch():
    """A caller of the backbone or of the plain forward pass sees no difference where the batch has tokens."""
    plain, sharing = model_of(), model_of()
    share_prefixes(sharing, "on")
    batch = batch_of(LISTS)
    del batch["labels"]
    real = batch["attention_mask"] == 1
    for call in (lambda m: m(**batch).logits, lambda m: m.base_model(**batch).last_hidden_state):
        assert torch.allclose(call(sharing)[real], call(plain)[real], atol=1e-9)


def test_a_batch_with_nothing_to_share_is_run_as_it_is():
    """Different prompts of one length: the model's own code gets the very batch, and the result is equal bit for bit."""
    plain, sharing = model_of(), model_of()
    installed = share_prefixes(sharing, "on")
    lists = [[n, n + 1, n + 2, n + 3, 4] for n in (10, 20, 30)]
    (expected, _), (found, _) = scored(plain, batch_of(lists)), scored(sharing, batch_of(lists))
    assert torch.equal(found.log_probs, expected.log_probs)
    assert installed.saved == 0


def test_what_asks_for_more_than_scores_goes_to_the_models_own_code():
    """Hidden states of every layer, a cache, positions of one's own, padding on the left."""
    plain, sharing = model_of(), model_of()
    share_prefixes(sharing, "on")
    batch = batch_of(LISTS)
    del batch["labels"]
    left = {"input_ids": batch["input_ids"].flip(1), "attention_mask": batch["attention_mask"].flip(1)}
    positions = {"input_ids": batch["input_ids"], "position_ids": torch.arange(11)[None].expand(4, -1)}
    for call in ({**batch, "output_hidden_states": True}, {**batch, "use_cache": True}, left, positions):
        assert torch.equal(sharing(**call).logits, plain(**call).logits)
    assert len(sharing(**batch, output_hidden_states=True).hidden_states) == 3
    assert sharing(**{**batch, "use_cache": True}).past_key_values is not None


def test_a_model_whose_attention_cannot_be_masked_is_named():
    """Sliding windows, by the configuration; a model without attention, by what it answers."""
    window = share_prefixes(model_of(use_sliding_window=True, sliding_window=4, max_window_layers=1))
    assert window == "it has layers of sliding_attention"
    config = transformers.MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=1)
    assert isinstance(share_prefixes(transformers.MambaForCausalLM(config)), str)


def test_dropout_is_never_shared_among_siblings():
    """While such a model trains, batches are run as they are; in evaluation they are shared."""
    model = model_of(attention_dropout=0.5)
    installed = share_prefixes(model, "on")
    model.train()
    scored(model, batch_of(LISTS))
    assert installed.saved == 0
    model.eval()
    scored(model, batch_of(LISTS))
    assert installed.saved > 0


def test_a_score_of_a_whole_sequence_is_its_own():
    """A sequence classifier, whose score is read at the last token."""
    torch.manual_seed(0)
    made = []
    for shared in (False, True):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_labels=1, pad_token_id=0,
        )  # fmt: skip
        made.append(transformers.LlamaForSequenceClassification(config).double())
        if shared:
            installed = share_prefixes(made[-1], "on")
    batch = batch_of(LISTS)
    del batch["labels"]
    assert torch.allclose(made[1](**batch).logits, made[0](**batch).logits, atol=1e-9)
    assert installed.saved > 0


def test_gradients_are_the_same_bits_each_time():
    """Two threads, and more numbers than one of them takes: sixteen completions of a prompt of 600 tokens, four times."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model = model_of(max_position_embeddings=1024).float()
        share_prefixes(model, "on")
        ids = torch.randint(1, 64, (16, 700), generator=torch.Generator().manual_seed(0))
        ids[:, :600] = ids[0, :600]
        labels = ids.clone()
        labels[:, :600] = -100
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "use_cache": False}
        first, *others = (torch.cat([g.flatten() for g in scored(model, batch)[1]]) for _ in range(4))
        assert all(torch.equal(first, other) for other in others)
    finally:
        torch.set_num_threads(threads)

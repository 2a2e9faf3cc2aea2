"""A reward model: a sequence classification model with one label, such as ``train-reward`` writes.

Invariants: it reads the saved ids of a rollout's last turn, of an agent's the last of its main conversation: prompt and
generation, never text that was tokenised again and never a part of them; a rollout that it cannot read whole has a fault in
its place, never a score. The caller makes sure that the ids mean the same in its tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gymdata.errors import DataError, OutsideError, RewardError, first_line, needs
from gymdata.models._transformers import local_folder, quiet_transformers
from gymdata.models.model_identity import model_config
from gymdata.rewards.port import View
from gymdata.rewards.views import conversation_ids

#: Tokens with padding that go through the model at a time.
BATCH_TOKENS = 16_384


class RewardModel:
    """Scores with the model in ``folder``, loaded at the first call. ``source`` names its weights by their hash.

    ``batch_tokens`` bounds a forward pass; a longer rollout goes alone. Scores are those of a batch of one up to rounding.
    """

    quick = False
    #: It ends by itself, so no time limit cuts it off.
    bounded = True

    def __init__(
        self, folder: str, model_hash: str, *, name: str | None = None, batch_tokens: int = BATCH_TOKENS
    ) -> None:
        self.name = name or re.sub(r"[^\w.+-]", "_", Path(folder).resolve().name)
        self.source = f"model:{model_hash}"
        self.needs: str | None = "token ids"
        self._folder = folder
        self._batch_tokens = batch_tokens
        self._model: Any = None

    def __call__(self, rollouts: Sequence[View]) -> list[float | OutsideError | None]:
        """One score each, an OutsideError in place of each that cannot be had."""
        model = self._loaded()
        ids = [conversation_ids(rollout)[1] for rollout in rollouts]
        result: list[float | OutsideError | None] = [*map(self._fault, ids)]
        # Sorted by length, a batch is hardly padded.
        waiting = sorted((k for k, fault in enumerate(result) if fault is None), key=lambda k: len(ids[k]))
        while waiting:
            size = 1
            while size < len(waiting) and (size + 1) * len(ids[waiting[size]]) <= self._batch_tokens:
                size += 1
            batch, waiting = waiting[:size], waiting[size:]
            for k, score in zip(batch, self._forward(model, [ids[k] for k in batch]), strict=True):
                result[k] = score if np.isfinite(score) else RewardError(f"the model gave {score}")
        return result

    def _fault(self, ids: np.ndarray) -> OutsideError | None:
        if not len(ids):
            return RewardError("T205: the rollout has no token ids")
        config = self._model.config
        config = getattr(config, "text_config", None) or config
        most = getattr(config, "max_position_embeddings", None)
        if most is not None and len(ids) > most:
            return RewardError(f"it has {len(ids):,} tokens, the reward model reads at most {most:,}")
        if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
            return RewardError(f"T206: token id {int(ids.max())} is not in the reward model's vocabulary")
        if int(ids[-1]) == self._model.config.pad_token_id:
            # The model scores at the last token that is no padding, which would be another one.
            return RewardError("it ends with the token that the reward model takes for padding")
        return None

    def _forward(self, model: Any, ids: Sequence[np.ndarray]) -> list[float]:
        import torch

        width = max(map(len, ids))
        pad = model.config.pad_token_id or 0
        tokens = torch.full((len(ids), width), pad, dtype=torch.long)
        mask = torch.zeros((len(ids), width), dtype=torch.long)
        for row, row_ids in enumerate(ids):
            tokens[row, : len(row_ids)] = torch.from_numpy(row_ids.astype(np.int64))
            mask[row, : len(row_ids)] = 1
        with torch.inference_mode():
            answer = model(input_ids=tokens.to(model.device), attention_mask=mask.to(model.device), use_cache=False)
        scores: list[float] = answer.logits[:, 0].float().cpu().tolist()
        return scores

    def _loaded(self) -> Any:
        if self._model is None:
            with needs("train"):
                import torch
                import transformers  # noqa: F401 - here, so that a missing package is named

                from gymdata.models._shared_prefixes import share_prefixes
            has_gpu = torch.cuda.is_available()
            # The processor is slow and inexact in the half precision that a graphics card is made for.
            options: dict[str, Any] = {"num_labels": 1, "dtype": "auto" if has_gpu else torch.float32}
            try:
                with quiet_transformers():
                    loaded, lacking = _weights(self._folder, options)
                if lacking:
                    raise DataError(
                        f"{self._folder}: is no reward model: its weights lack {', '.join(lacking[:3])}",
                        hint="`gymdata train-reward` makes one; a model for generation has no scoring head",
                    )
            except (OSError, ValueError) as error:
                raise DataError.unreadable(self._folder, f"no reward model ({first_line(error)})") from error
            model = loaded.eval().to("cuda" if has_gpu else "cpu")
            share_prefixes(model)
            self._model = model
            if self._model.config.pad_token_id is None:
                # Without one, the model refuses batches and scores at the last position.
                self._batch_tokens = 0
        return self._model


def _weights(folder: str, options: dict[str, Any]) -> tuple[Any, list[str]]:
    """The model, and the weights that its folder should hold and does not. Those of a LoRA folder are peft's to find."""
    from transformers import AutoModelForSequenceClassification

    if Path(folder, "adapter_config.json").is_file():
        from peft import PeftModelForSequenceClassification

        named = model_config(Path(folder, "adapter_config.json")).get("base_model_name_or_path") or ""
        base: Any = AutoModelForSequenceClassification.from_pretrained(
            local_folder(named), local_files_only=True, **options
        )
        return PeftModelForSequenceClassification.from_pretrained(base, folder), []
    loaded, loading_info = AutoModelForSequenceClassification.from_pretrained(
        folder, local_files_only=True, output_loading_info=True, **options
    )
    return loaded, sorted(map(str, [*loading_info["missing_keys"], *loading_info["mismatched_keys"]]))

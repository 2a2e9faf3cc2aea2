"""Forward passes: log-probabilities of sampled tokens (``PolicyModel``) and values of the states between them (``Critic``).

A token is scored with the model's output at the token before it, at its row's temperature, over the whole vocabulary, in
float32: what an engine reports as processed log-probabilities. Memory is bounded by ``batch_tokens``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from gymdata.errors import DataError, UsageError, first_line, needs
from gymdata.models._shared_prefixes import answering, share_prefixes
from gymdata.models._transformers import local_folder, quiet_transformers, with_adapter
from gymdata.models.scoring import ToScore
from gymdata.rollouts.ragged import Ragged
from gymdata.store.paths import Facts

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Place:
    """Where to find a model and how to run it. ``base``: a folder or hub name; ``adapter``: a LoRA folder over it.

    ``dtype`` auto: the checkpoint's own on a graphics card, float32 on a processor, which is slow and inexact in less.
    ``device`` None: the first graphics card, where there is one.
    """

    base: str
    adapter: str | None = None
    dtype: str = "auto"
    device: str | None = None

    @property
    def name(self) -> str:
        return self.adapter or self.base


def multiplies(dtype: str) -> bool:
    """Whether this processor multiplies in ``dtype`` with oneDNN: in bfloat16 and float16 that needs AVX-512 on x86;
    without it PyTorch takes four times as long as in float32. True where PyTorch has no oneDNN."""
    with needs("train"):
        import torch

    question = {"bfloat16": "_is_mkldnn_bf16_supported", "float16": "_is_mkldnn_fp16_supported"}.get(dtype)
    if question is None or not getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None):
        return True
    return bool(getattr(torch.ops.mkldnn, question)())


def load(source: Place, head: str, **options: Any) -> Any:
    """The model of the transformers auto class ``head``, ready to run. Raises DataError when it is not of that class, and
    UsageError for a device or number format that cannot be had."""
    with needs("train"):
        import torch
        import transformers
    if source.dtype not in DTYPES:
        raise UsageError.unknown_choice("--dtype", source.dtype, DTYPES)
    try:
        device = torch.device(source.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise UsageError.bad_value("--device", source.device, "cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise UsageError(f"--device {source.device}: CUDA device not available", hint="--device cpu")
    dtype: Any = getattr(torch, source.dtype, "auto")
    if source.dtype == "auto" and device.type == "cpu":
        dtype = torch.float32
    try:
        with quiet_transformers():  # ``lacking`` reports missing weights instead
            model, loading_info = getattr(transformers, head).from_pretrained(
                local_folder(source.base), dtype=dtype, local_files_only=True, output_loading_info=True, **options
            )
            if source.adapter is not None:
                model = with_adapter(model, source.adapter, source.base).get_base_model()
    except (OSError, ValueError) as error:
        raise DataError.unreadable(source.name, f"not a model folder: {first_line(error)}") from error
    lacking = (
        [] if source.adapter else sorted(map(str, [*loading_info["missing_keys"], *loading_info["mismatched_keys"]]))
    )
    if lacking:
        raise DataError(f"{source.name}: its weights lack {', '.join(lacking[:3])}, so it is no {head}")
    # Router losses are for training, and need what is not kept here.
    model.config.output_router_logits = False
    return model.eval().to(device)


def facts(model: Any) -> Facts:
    """Number format and device, for run.json."""
    parameter = next(model.parameters())
    return {"dtype": str(parameter.dtype).removeprefix("torch."), "device": parameter.device.type}


BATCH_TOKENS = 16_384
#: Logits that are held at once (a gigabyte in float32).
_MAX_LOGITS = 2**28


class ForwardPolicy:
    """A causal language model, loaded when it is made. ``batch_tokens``: with padding, in one forward pass; ``sharing``:
    whether the common beginnings of a pass are run once."""

    def __init__(
        self, source: Place, batch_tokens: int = BATCH_TOKENS, sharing: Literal["auto", "on", "off"] = "auto"
    ) -> None:
        self._source, self._batch_tokens = source, batch_tokens
        self._model = load(source, "AutoModelForCausalLM")
        if sharing != "off":
            share_prefixes(self._model)
        self._temperature: tuple[float, bool] | None = None
        #: The sequences that were scored at several temperatures last, and the states of their tokens.
        self._scored: tuple[ToScore, list[_Scored]] | None = None
        self.facts: Facts = facts(self._model)

    def log_probs(
        self, to_score: ToScore, *, entropy: bool = False, shift: int = 0
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Log-probs (and entropies in nats) of the scored tokens, float32 (to_score.n_scored,).

        ``shift``: score with the output this many positions later; NaN beyond the end.
        """
        _check(self._model, to_score, self._source.name)
        log_probs = np.full(to_score.n_scored, np.nan, np.float32)
        entropies = log_probs.copy() if entropy else None
        for batch in _passes(self._model, to_score, self._batch_tokens):
            tokens = batch.scored(shift)
            temperatures = to_score.temperature[batch.rows][tokens.line]
            for temperature in np.unique(temperatures):
                selected = np.flatnonzero(temperatures == temperature)
                logps, entropies_here = self._head(
                    tokens.states[selected], tokens.targets[selected], float(temperature), entropy
                )
                log_probs[tokens.scores[selected]] = logps
                if entropies is not None:
                    entropies[tokens.scores[selected]] = entropies_here
        return log_probs, entropies

    def log_probs_at(self, to_score: ToScore, temperatures: Sequence[float]) -> np.ndarray:
        """Log-probs at each of ``temperatures`` in place of the rows', float32 (len(temperatures), to_score.n_scored)."""
        _check(self._model, to_score, self._source.name)
        log_probs = np.empty((len(temperatures), to_score.n_scored), np.float32)
        if self._scored is None or self._scored[0] is not to_score:
            # A search for a temperature asks for the same ones again: the states are all that it takes.
            self._scored = to_score, [batch.scored() for batch in _passes(self._model, to_score, self._batch_tokens)]
        for tokens in self._scored[1]:
            for line, temperature in enumerate(temperatures):
                log_probs[line, tokens.scores] = self._head(tokens.states, tokens.targets, temperature, False)[0]
        return log_probs

    def log_mass(self, to_score: ToScore, ids: Ragged) -> np.ndarray:
        """The logarithm of the probability of a set of ids at the place of each scored token (``ids``: one list each),
        at its row's temperature, float32 (to_score.n_scored,). Logits are held for a part of the tokens at a time."""
        import torch

        _check(self._model, to_score, self._source.name)
        masses = np.empty(to_score.n_scored, np.float32)
        vars(self._model).pop("forward", None)  # the model's own, which gives logits
        self._temperature = None
        at_once = max(1, _MAX_LOGITS // self._model.config.get_text_config().vocab_size)
        for batch in _passes(self._model, to_score, self._batch_tokens):
            tokens = batch.scored()
            temperatures = to_score.temperature[batch.rows][tokens.line]
            for start in range(0, len(tokens.scores), at_once):
                here = slice(start, start + at_once)
                hidden, sets = tokens.states[here], ids.take(tokens.scores[here])
                with torch.inference_mode(), answering(self._model.base_model, hidden[None]):
                    logits = self._model().logits[0].float()
                logits = logits / torch.from_numpy(temperatures[here]).to(logits)[:, None]
                padded = torch.from_numpy(sets.padded(-1).astype(np.int64)).to(logits.device)
                of_set = logits.gather(1, padded.clamp(min=0)).masked_fill(padded < 0, -torch.inf).logsumexp(dim=1)
                masses[tokens.scores[here]] = (of_set - logits.logsumexp(dim=1)).cpu().numpy()
        return masses

    def _head(self, hidden: Any, targets: np.ndarray, temperature: float, entropy: bool) -> tuple[np.ndarray, Any]:
        """The model's head applied to hidden states (k, H)."""
        import torch
        from trl.trainer.utils import add_fused_lm_head

        model = self._model
        if self._temperature != (temperature, entropy):
            # The head wraps the forward pass that it finds; it must find the model's own.
            vars(model).pop("forward", None)
            add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy")[: 1 + entropy])
            self._temperature = (temperature, entropy)
        with torch.inference_mode(), answering(model.base_model, hidden[None]):
            out = model(shift_labels=torch.from_numpy(targets).to(hidden.device)[None], fused_lm_head=True)
        entropies = out.entropy[0].float().cpu().numpy() if entropy else None
        return out.log_probs[0].float().cpu().numpy(), entropies


class ForwardCritic:
    """A sequence classification model with one label, whose head gives the value of the state after any token."""

    def __init__(self, source: Place, batch_tokens: int = BATCH_TOKENS) -> None:
        self._source, self._batch_tokens = source, batch_tokens
        self._model = load(source, "AutoModelForSequenceClassification", num_labels=1)
        if not hasattr(self._model, "score"):
            raise DataError(
                f"{source.name}: its class {type(self._model).__name__} has no head that scores every token",
                hint="give a critic as AutoModelForSequenceClassification saves it, with one label",
            )
        share_prefixes(self._model)
        self.facts: Facts = facts(self._model)

    def values(self, to_score: ToScore) -> tuple[np.ndarray, np.ndarray]:
        """float32 (to_score.n_scored,) each: the value of the state before a scored token, and of the state after it."""
        _check(self._model, to_score, self._source.name)
        import torch

        values = np.empty((2, to_score.n_scored), np.float32)
        for batch in _passes(self._model, to_score, self._batch_tokens):
            for line in (0, 1):
                tokens = batch.scored(shift=line)
                with torch.inference_mode():
                    predicted = self._model.score(tokens.states)[:, 0]
                values[line, tokens.scores] = predicted.float().cpu().numpy()
        return values[0], values[1]


class _Scored(NamedTuple):
    """Scored tokens: the state that predicts each, the token, its line in the batch, and its place among all scores."""

    states: Any
    targets: np.ndarray
    line: np.ndarray
    scores: np.ndarray


@dataclass(frozen=True, slots=True)
class _Pass:
    """A batch that went through the backbone: sequences ``rows``, padded to (B, L), with ``hidden`` states (B, L, H)."""

    rows: np.ndarray
    hidden: Any
    ids: np.ndarray
    attention: np.ndarray
    mask: np.ndarray
    score_index: np.ndarray

    def scored(self, shift: int = 0) -> _Scored:
        """The scored tokens, by the states that predict them, or those ``shift`` places later, where there are any."""
        import torch

        line, column = np.nonzero(self.mask)
        source = column - 1 + shift
        there = (source >= 0) & (source < self.attention.sum(axis=1)[line])
        line, column, source = line[there], column[there], source[there]
        states = self.hidden[torch.from_numpy(line), torch.from_numpy(source)]
        return _Scored(states, self.ids[line, column], line, self.score_index[line, column])


def _passes(model: Any, to_score: ToScore, batch_tokens: int) -> Iterator[_Pass]:
    """Every sequence with something to score, once, those with one prompt together."""
    import torch

    device, backbone = next(model.parameters()).device, model.base_model
    for rows in to_score.batches(batch_tokens):
        ids, attention, mask, score_index = _padded(to_score, rows)
        inputs = {
            "input_ids": torch.from_numpy(ids).to(device),
            "attention_mask": torch.from_numpy(attention).to(device),
        }
        with torch.inference_mode():
            hidden = backbone(**inputs, use_cache=False).last_hidden_state
        yield _Pass(rows, hidden, ids, attention, mask, score_index)


def _padded(to_score: ToScore, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """ids, attention mask, mask and index among the scores, each (len(rows), L), filled up on the right."""
    shape = (len(rows), int(to_score.lengths[rows].max()))
    ids, attention, score_index = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    mask = np.zeros(shape, np.bool_)
    for line, row in enumerate(rows.tolist()):
        own, scored = to_score.token_ids[row], to_score.mask[row]
        size = len(own)
        ids[line, :size], mask[line, :size], attention[line, :size] = own, scored, 1
        score_index[line, :size][scored] = to_score.scores[row]
    return ids, attention, mask, score_index


def _check(model: Any, to_score: ToScore, name: str) -> None:
    text = model.config.get_text_config()
    rows = model.get_input_embeddings().weight.shape[0]
    to_score.refuse_unscorable(int(rows), getattr(text, "max_position_embeddings", None), name)

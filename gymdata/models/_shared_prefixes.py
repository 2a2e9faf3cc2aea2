"""A transformers model that reads the common beginnings of a batch once, whoever calls it.

A batch with nothing worth sharing, and a call that asks for more than hidden states or scored tokens, goes to the model's
own code untouched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_outputs import BaseModelOutputWithPast, MoeModelOutputWithPast

from gymdata.models.prefix_tree import PrefixTree, padded_cost, prefix_tree

Mode = Literal["auto", "on", "off"]
#: The mask of a tree is dense but for FlexAttention, and its memory and time grow with the square of the tree.
DENSE_LIMIT = {"cpu": 4_096, "cuda": 16_384}
#: A tree must cost less than this share of the padded batch, or the batch is run as it is.
_WORTH = 0.9
_EXPRESSES = ("sdpa", "eager", "flex_attention")
#: Arguments that a call may have and still be handled here.
_PLAIN = {"input_ids", "attention_mask", "return_dict"}


@dataclass
class Sharing:
    """Sharing as it is installed on a model: its account so far, in tokens that the model ran."""

    backbone: Any
    mode: Mode
    padded: int = 0
    run: int = 0

    @classmethod
    def of(cls, model: Any, mode: Mode = "auto") -> Sharing | str:
        """The sharing for ``model`` (a transformers model, without an adapter's wrap), or why it cannot be
        expressed."""
        backbone, device = model.base_model, next(model.parameters()).device.type
        if mode == "auto" and device != "cpu":
            return f"it runs on {device}, where sharing pays for long prompts only"
        return _cannot(backbone) or _differs(backbone) or cls(backbone, mode)

    @property
    def saved(self) -> float:
        """Share of the padded tokens that were not run."""
        return 1 - self.run / self.padded if self.padded else 0.0

    def plan(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> PrefixTree | None:
        """The tree of a padded batch (B, L), or None where it is better run as it is."""
        rows = input_ids.cpu().numpy()
        lengths = attention_mask.sum(dim=1).cpu().numpy()
        self.padded += rows.size
        self.run += rows.size
        if not lengths.all() or bool((attention_mask[:, 1:] > attention_mask[:, :-1]).any()):
            return None  # an empty row, or padding on the left
        width = int(self.backbone.config.get_text_config().hidden_size)
        flex = self.backbone.config._attn_implementation == "flex_attention"
        tree = prefix_tree(
            [row[:length] for row, length in zip(rows, lengths, strict=True)],
            width,
            None if flex else DENSE_LIMIT.get(input_ids.device.type),
        )
        worth = _WORTH * padded_cost(rows.shape[0], rows.shape[1], width)
        if tree.ids.size >= rows.size or (
            self.mode == "auto" and padded_cost(len(tree.ids), tree.ids.shape[1], width) > worth
        ):
            return None
        self.run += tree.ids.size - rows.size
        return tree

    def hidden(self, forward: Callable[..., Any], tree: PrefixTree, device: torch.device) -> torch.Tensor:
        """The hidden state after each node, (R·T, H), by the backbone's own ``forward``."""
        out = forward(
            input_ids=torch.from_numpy(tree.ids).to(device),
            position_ids=torch.from_numpy(tree.positions).to(device),
            attention_mask=_mask(self.backbone, torch.from_numpy(tree.ends).to(device)),
            use_cache=False,
        )
        states: torch.Tensor = out.last_hidden_state
        return states.flatten(0, 1)


def share_prefixes(model: Any, mode: Mode = "auto") -> Sharing | str:
    """Have ``model`` share what the sequences of a batch begin with, whoever calls it: see ``Sharing.of``.

    To be called after TRL's ``add_fused_lm_head``, whose head then scores each node once.
    """
    sharing = Sharing.of(model, mode)
    if isinstance(sharing, str):
        return sharing
    backbone, own = sharing.backbone, sharing.backbone.forward

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1:  # classifiers name the mask and not the ids
            kwargs["input_ids"], args = args[0], ()
        tree = None
        if _is_plain(backbone, args, kwargs):
            tree = sharing.plan(kwargs["input_ids"], kwargs["attention_mask"])
        if tree is None:
            return own(*args, **kwargs)
        ids: torch.Tensor = kwargs["input_ids"]
        states: Any = sharing.hidden(own, tree, ids.device)
        return BaseModelOutputWithPast(last_hidden_state=_at(states, _nodes_of(tree, ids)))

    backbone.forward = forward
    if model is not backbone and "forward" in vars(model):
        _share_head(model, sharing, own)
    return sharing


def _share_head(model: Any, sharing: Sharing, backbone_forward: Callable[..., Any]) -> None:
    """Have TRL's fused head score each node that any row trains once, and no other place."""
    fused = model.forward

    @functools.wraps(fused)
    def forward(*args: Any, fused_lm_head: bool = False, labels: Any = None, **kwargs: Any) -> Any:
        head_args = {"fused_lm_head": fused_lm_head} if fused_lm_head else {}
        head_args |= {} if labels is None else {"labels": labels}
        tree = None
        if fused_lm_head and labels is not None and _is_plain(sharing.backbone, args, kwargs):
            tree = sharing.plan(kwargs["input_ids"], kwargs["attention_mask"])
        if tree is None:
            return fused(*args, **head_args, **kwargs)
        nodes = _nodes_of(tree, labels)
        scored = labels[:, 1:] != -100
        targets, places = torch.unique(nodes[:, 1:][scored], return_inverse=True)
        before = torch.empty(tree.ids.size, dtype=torch.int64, device=labels.device)
        before[nodes[:, 1:]] = nodes[:, :-1]
        states = _at(sharing.hidden(backbone_forward, tree, labels.device), before[targets])
        ids = torch.from_numpy(tree.ids).to(labels.device).view(-1)[targets]
        with answering(sharing.backbone, states[None]):
            out = fused(shift_labels=ids[None], fused_lm_head=True)
        # In the padded layout, 0 where nothing is scored.
        per_token = {
            f.name: value.new_zeros(scored.shape).masked_scatter(scored, _at(value[0], places))
            for f in fields(out)
            if isinstance(value := getattr(out, f.name), torch.Tensor) and value.ndim == 2 and value.shape[0] == 1
        }
        return replace(out, **per_token, loss=-per_token["log_probs"].sum() / scored.sum().clamp(min=1))

    model.forward = forward


@contextmanager
def answering(backbone: Any, hidden: Any) -> Iterator[None]:
    """Within this, ``backbone`` answers every call with these hidden states: the model's own code, which knows how its
    logits are scaled and capped, then runs on chosen tokens only."""
    own = vars(backbone).get("forward")
    backbone.forward = lambda *_, **__: MoeModelOutputWithPast(last_hidden_state=hidden)
    try:
        yield
    finally:
        del backbone.forward
        if own is not None:
            backbone.forward = own


def reshard(model: torch.nn.Module) -> None:
    """Let go of the whole weights that a forward pass without gradients leaves in a sharded model. An optimizer would be
    made of them, and would train what the next pass does not read."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _is_plain(backbone: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is one over a padded batch whose answer is hidden states and nothing else."""
    # By default many models keep a cache, and it would be one of the padded batch.
    if args or kwargs.get("use_cache") is not False:
        return False
    if backbone.training:  # siblings would share a draw of dropout, which single sequences do not
        config = backbone.config.get_text_config()
        if any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in backbone.modules()):
            return False
        if any(getattr(config, name, 0.0) for name in ("attention_dropout", "attention_probs_dropout_prob")):
            return False
    odd = [name for name, value in kwargs.items() if name not in _PLAIN and value is not None and value is not False]
    mask = kwargs.get("attention_mask")
    return not odd and kwargs.get("input_ids") is not None and mask is not None and mask.ndim == 2


def _at(values: torch.Tensor, places: torch.Tensor) -> Any:
    """``values[places]``, whose gradient is summed in the same order each time; indexing sums it in the threads' order."""
    return values.index_select(0, places.reshape(-1)).view(*places.shape, *values.shape[1:])


def _nodes_of(tree: PrefixTree, like: torch.Tensor) -> torch.Tensor:
    """The node of each place of a padded batch (B, L); padding is at node 0."""
    nodes = torch.zeros(like.shape, dtype=torch.int64)
    for line, own in enumerate(tree.nodes):
        nodes[line, : len(own)] = torch.from_numpy(own)
    return nodes.to(like.device)


def _mask(backbone: Any, ends: torch.Tensor) -> Any:
    """Who may attend to whom, in the form that the model's attention takes."""
    rows, length = ends.shape
    position = torch.arange(length, device=ends.device)
    kind = backbone.config._attn_implementation
    if kind == "flex_attention":
        from torch.nn.attention.flex_attention import create_block_mask

        def allowed(row: Any, _head: Any, query: Any, key: Any) -> Any:
            return (key <= query) & (query < ends[row, key])

        return create_block_mask(allowed, rows, None, length, length, device=ends.device)
    mask = ((position[None, :] <= position[:, None]) & (position[:, None] < ends[:, None, :]))[:, None]
    if kind == "sdpa":
        return mask
    dtype = next(backbone.parameters()).dtype
    return torch.zeros(mask.shape, dtype=dtype, device=ends.device).masked_fill(~mask, torch.finfo(dtype).min)


def _cannot(backbone: Any) -> str | None:
    """Why a model's configuration says that its attention cannot be masked as a tree."""
    config = backbone.config.get_text_config()
    kind = backbone.config._attn_implementation
    if kind not in _EXPRESSES:
        return f"its attention is {kind}, which takes no mask (attn_implementation: sdpa or flex_attention)"
    layers = getattr(config, "layer_types", None)
    if layers is not None:
        odd = sorted({str(layer) for layer in layers} - {"full_attention"})
        return f"it has layers of {', '.join(odd)}" if odd else None
    return "it attends within a sliding window" if getattr(config, "sliding_window", None) else None


@torch.no_grad()
def _differs(backbone: Any) -> str | None:
    """Why the model does not give a small tree the states that it gives its sequences one by one, if it does not."""
    training, device = backbone.training, next(backbone.parameters()).device
    vocabulary = backbone.get_input_embeddings().weight.shape[0]
    stem = [(7 * i + 3) % vocabulary for i in range(6)]
    sequences = [torch.tensor([*stem, i % vocabulary, 5 % vocabulary]).numpy() for i in (1, 2)]
    tree = prefix_tree(sequences, width=2**20)
    backbone.eval()
    try:
        states = Sharing(backbone, "on").hidden(backbone.forward, tree, device)
        for ids, nodes in zip(sequences, tree.nodes, strict=True):
            alone = backbone(input_ids=torch.from_numpy(ids)[None].to(device), use_cache=False).last_hidden_state[0]
            scale = alone.abs().max().clamp(min=1e-6)
            tolerance = 1e-3 if alone.dtype in (torch.float32, torch.float64) else 5e-2
            if ((states[torch.from_numpy(nodes).to(device)] - alone).abs().max() / scale).item() > tolerance:
                return "its states change with what else is in the batch"
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        return f"it takes no mask of its own ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
    finally:
        backbone.train(training)
    return None

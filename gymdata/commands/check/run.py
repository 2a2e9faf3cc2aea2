"""``check``: what a model's chat template, or a server, would do to multi-turn token ids, before anything is sampled."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from gymdata.commands.check.template import TemplateCheck, check_template
from gymdata.errors import redacted
from gymdata.public import Figures, Report, Row
from gymdata.store.paths import Facts

if TYPE_CHECKING:
    from gymdata.chat.template import TransformersChat
    from gymdata.engines.servers.vllm_server import Finding

__all__ = ["EndpointReport", "ModelReport", "TemplatePatch", "check", "check_endpoint", "patched_template"]


@dataclass(frozen=True, slots=True)
class TemplatePatch:
    """A shipped template to use in place of the model's, and what it does. ``template`` is its text."""

    name: str
    template: str
    check: TemplateCheck


@dataclass(frozen=True, slots=True, repr=False)
class ModelReport(Report):
    """The verdict on a model's own template. ``ok``: its turns can be rendered again, and bridged, without a break."""

    model: str
    template_name: str | None
    check: TemplateCheck
    cure: TemplatePatch | None
    facts: Facts

    @property
    def ok(self) -> bool:
        return self.check.ok

    @property
    def generation_mask(self) -> str | None:
        """Where generation markers are: "template", the name of the twin that has them, or None."""
        if self.check.generation_mask:
            return "template"
        return self.cure.name if self.cure is not None and self.cure.check.generation_mask else None

    def to_dict(self) -> Figures:
        cure = self.cure
        return {
            "model": self.model,
            "ok": self.ok,
            "template": self.template_name,
            **self.check.as_dict(),
            "generation_mask": self.generation_mask,
            "cure": cure and {"name": cure.name, "ok": cure.check.ok, **cure.check.as_dict()},
            **self.facts,
        }

    def rows(self) -> list[Row]:
        report, cure = self.check, self.cure
        patch = "none known" if cure is None else f"{cure.name} ({'keeps' if cure.check.ok else 'also changes'} turns)"
        return [
            ("template", self.template_name or "not one that is known"),
            ("prefix-preserving", report.prefix_preserving),
            ("carries token IDs over", report.bridges),
            ("strips from earlier turns", ", ".join(report.strips) or "nothing"),
            ("never writes", ", ".join(report.ignores) or "–"),
            ("refuses", "; ".join(f"{name} ({why})" for name, why in report.refused.items()) or "nothing"),
            ("end of turn", ", ".join(f"{text} ({i})" for i, text in report.end_of_turn)),
            ("generation mask", self.generation_mask or "no markers"),
            ("text round-trips", report.text_stable),
            ("random ids round-trip", f"{100 * report.random_ids_stable:.0f} % of runs of 8"),
            ("template patch", patch),
            ("verdict", self._verdict()),
        ]

    def _verdict(self) -> str:
        if self.ok:
            return "the template is prefix-preserving"
        if self.cure is not None and self.cure.check.ok:
            return f"not prefix-preserving; `gymdata collect` uses {self.cure.name} unless --no-keep-reasoning"
        if self.check.bridges:
            return "not prefix-preserving; `gymdata collect` extends the token IDs, so its rollouts have no breaks"
        return "not prefix-preserving, and no template patch is known"


@dataclass(frozen=True, slots=True, repr=False)
class EndpointReport(Report):
    """What a server proved. ``ok``: nothing that collecting needs is missing."""

    endpoint: str
    findings: list[Finding]
    facts: Facts

    @property
    def ok(self) -> bool:
        return all(f.ok or not f.needed for f in self.findings)

    def to_dict(self) -> Figures:
        findings = [asdict(f) for f in self.findings]
        return {"endpoint": self.endpoint, "ok": self.ok, "findings": findings, **self.facts}

    def rows(self) -> list[Row]:
        rows = list[Row]()
        for finding in self.findings:
            result = "yes" if finding.ok else "NO" if finding.needed else "no"
            rows.append((finding.name, "; ".join(filter(None, (result, finding.detail, finding.cure)))))
        return rows


def check(model: str, *, chat_template: str | None = None) -> ModelReport:
    """Probe the chat template of the model or tokenizer folder ``model``.

    ``chat_template``: the text or file of another template to probe in its place. Raises DataError when there is no
    tokenizer, UsageError when there is no template or nothing that ends a turn.
    """
    from gymdata.chat.template import TransformersChat, known_template

    chat = TransformersChat.load(model, chat_template=chat_template, tool_parser="none", keep_reasoning=False)
    name = known_template(chat.tokenizer.chat_template)
    return ModelReport(model, name, check_template(chat), _cure(chat), chat.facts())


def check_endpoint(endpoint: str, model: str | None = None) -> EndpointReport:
    """Probe a server: its models, whether ids and processed log-probabilities come back, whether it parses tools.

    Raises OutsideError("engine") when it cannot be reached.
    """
    import asyncio

    from gymdata.engines.servers.vllm_server import probe

    findings, facts = asyncio.run(probe(endpoint, model))
    return EndpointReport(redacted(endpoint), findings, facts)


def patched_template(chat: TransformersChat, tool_parser: str) -> tuple[TransformersChat, list[str]]:
    """The chat to collect with in place of ``chat``, mostly itself, and what to say about it.

    A patch is used when the template breaks re-rendered turns and its shipped twin breaks none.
    """
    report = check_template(chat)
    if report.ok:
        return chat, []
    losses = ", ".join(report.strips) or "earlier turns"
    cure = _cure(chat)
    if cure is not None and cure.check.ok:
        note = f"the chat template takes away {losses}; {cure.name} keeps it and is used (not with --no-keep-reasoning)"
        return chat.with_template(cure.template, tool_parser=tool_parser), [note]
    if report.bridges:
        return chat, [f"the chat template rewrites {losses}: train from the saved ids, not from rendered messages"]
    return chat, [f"the chat template rewrites {losses}, and no known form keeps it: some later turns will be refused"]


def _cure(chat: TransformersChat) -> TemplatePatch | None:
    from gymdata.chat.template import training_twin

    twin = training_twin(chat.tokenizer.chat_template)
    if twin is None:
        return None
    name, text = twin
    return TemplatePatch(name, text, check_template(chat.with_template(text)))

"""A judge in this process: its chat template renders the roles, and vLLM samples the answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gymdata.chat.template import TransformersChat
from gymdata.checks.chat_text import between_marks, opens_reasoning
from gymdata.commands.judge.port import JudgeAnswer
from gymdata.commands.judge.prompt import Form, Roles
from gymdata.engines._vllm import VllmSampler
from gymdata.engines.port import SampleRequest
from gymdata.errors import DataError, OutsideError, UsageError, require
from gymdata.models import model_identity
from gymdata.rollouts.messages import Message
from gymdata.store.paths import Facts, Identity

if TYPE_CHECKING:
    from gymdata.engines.servers._ray import RaySampler

DEFAULT_MAX_TOKENS = 4096
_PROBE = "zq7x"
#: What the verdict's schema allows, written in one way: the schema itself would let a judge write blanks until its tokens
#: are used up.
_VERDICT = r'\{"score_1": [1-5], "score_2": [1-5], "ranking": ([1-6]|3\.5)\}'


class _GuidedVerdictSampler(VllmSampler):
    """Samples nothing but verdicts: the engine leaves out every token that would break its form."""

    def _params(self, request: SampleRequest) -> Any:
        from vllm.sampling_params import StructuredOutputsParams

        params = super()._params(request)
        params.structured_outputs = StructuredOutputsParams(regex=_VERDICT)
        return params


class EngineJudge:
    """A ``Judge`` on the model in a folder, in this process or on Ray.

    ``on_ray``: makes the engines there, with the arguments of ``VllmSampler`` (``gymdata.engines.servers._ray``). ``form``:
    the judge's roles, or a prompt. ``constrain``: ``on`` holds the judge to the verdict's schema; otherwise it is free, as a
    judge that reasons first must be. Raises UsageError for a template that leaves out what it should show.
    """

    def __init__(
        self,
        model: str,
        *,
        form: Form | None = None,
        temperature: float = 0.6,
        top_p: float = 0.95,
        max_tokens: int | None = None,
        constrain: str = "auto",
        engine_args: Mapping[str, Any] | None = None,
        seed: int | None = None,
        on_ray: Callable[..., RaySampler] | None = None,
    ) -> None:
        require(*(("engine", "vllm") if on_ray is None else ("ray", "ray")))
        self.model, self.form = model, form or Roles()
        self.max_tokens = max_tokens or DEFAULT_MAX_TOKENS
        self.chat = TransformersChat.load(
            model_identity.tokenizer_folder(model), tool_parser="none", keep_reasoning=False
        )
        self._check_roles()
        sampling = {"temperature": temperature, "top_p": top_p, "stop_token_ids": self.chat.stop_token_ids}
        guided = constrain == "on"
        # An answer that is held to the schema has no reasoning, whatever the prompt opened.
        self._opening = "<think>" if not guided and opens_reasoning(self.chat.generation_prompt) else ""
        kind = _GuidedVerdictSampler if guided else VllmSampler
        facts = model_identity.policy_facts(model)
        settings: dict[str, Any] = {"sampling": sampling, "seed": seed, "log_probs": False}
        self.sampler: VllmSampler | RaySampler = (
            kind(model, engine_args=engine_args, **settings)
            if on_ray is None
            else on_ray(model, engine_args or {}, policy_hash=facts["policy_hash"], kind=kind, **settings)
        )
        self.identity: Identity = {
            "model": facts["policy"],
            "weights": facts["policy_hash"],
            "chat_template": self.chat.facts().get("chat_template_hash"),
            **self.form.identity,
            "temperature": temperature,
            "top_p": top_p,
            "max_tokens": self.max_tokens,
            "constrain": guided,
        }
        self._numbers = itertools.count()
        self._room = 0

    @property
    def default_concurrency(self) -> int:
        """Twice what the engine runs at once: verdicts are short, so many slots become free at each step, and the next
        requests should be waiting. For replicas the default is doubled already."""
        if isinstance(self.sampler, VllmSampler):
            return 2 * self.sampler.max_num_seqs
        return self.sampler.default_concurrency

    async def start(self) -> Facts:
        """Start the engine, or the replicas."""
        facts = await self.sampler.start()
        self._room = int(facts.get("max_model_len") or 0)
        return facts

    async def compare(
        self, conversation: Sequence[Message], response_1: str, response_2: str, principle: str | None, seed: int | None
    ) -> JudgeAnswer:
        """One judgement. A prompt that leaves no room for an answer is refused."""
        messages = self.form.messages(conversation, response_1, response_2, principle)
        prompt = self.chat.render(messages, None)
        room = self._room - len(prompt) if self._room else self.max_tokens
        if room <= 0:
            return JudgeAnswer("", None, f"the prompt has {len(prompt)} tokens, and the judge holds {self._room}")
        request = SampleRequest(f"judge-{next(self._numbers)}", prompt, min(self.max_tokens, room), seed)
        try:
            generation = (await self.sampler.sample(request))[0]
        except OutsideError as error:
            raise OutsideError(
                "judge", str(error.message), hint=error.hint, retryable=error.retryable, fatal=error.fatal
            ) from error
        text = self._opening + between_marks(self.chat.decode(generation.token_ids), self.chat.without_special)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(generation.token_ids)}
        return JudgeAnswer(text, usage, finish_reason=generation.finish_reason)

    async def close(self) -> None:
        """Stop the engine."""
        await self.sampler.close()

    def _check_roles(self) -> None:
        """The template must show both responses, each in its place."""
        response_1, response_2, question = f"{_PROBE}1", f"{_PROBE}2", f"{_PROBE}0"
        messages = self.form.messages([{"role": "user", "content": question}], response_1, response_2, None)
        hint = "give a judge that was trained for these roles, or --judge-prompt default for an ordinary model"
        try:
            text = self.chat.text(messages, None, generate=True)
        except DataError as error:
            raise UsageError(
                f"{self.model}: its chat template refuses a comparison: {error.message}", hint=hint
            ) from error
        if not text.find(question) < text.find(response_1) < text.find(response_2) or question not in text:
            raise UsageError(f"{self.model}: its chat template does not show question and both responses", hint=hint)

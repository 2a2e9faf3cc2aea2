"""A ``PolicyModel`` on vLLM servers: log-probabilities of sampled tokens, read as prompts.

Invariants: what a server scores is exactly the ids that were sent; a server that fails gives its sequences to another, so
each is scored once; nothing is estimated: what a server cannot give (another temperature than 1, entropies, the output of
another place) is NaN or refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gymdata.engines.servers.many import Endpoints, Servers
from gymdata.engines.servers.vllm_server import ServerSampler
from gymdata.errors import RefusedError, UsageError, counted
from gymdata.models import model_identity
from gymdata.models.forward import tokenizer_facts
from gymdata.models.scoring import ToScore
from gymdata.store.paths import Facts
from gymdata.workers.signals import together

T = TypeVar("T")
#: Facts about the model that a server does not report.
UNKNOWN = "as served"
_IDS = 2**31


def at_endpoints(endpoints: Sequence[str], model: str | None = None, *, request_timeout_s: float = 300.0) -> Servers:
    """Servers of one model that are running: base URLs, or ``@FILE`` of them. ``model``: its served name or folder, where
    they serve several."""

    def make(url: str) -> ServerSampler:
        # Prompts have no sampling settings, so both kinds of log-probabilities are alike.
        return ServerSampler(url, model, max_retries=0, request_timeout_s=request_timeout_s, allow_raw_logprobs=True)

    return Servers(Endpoints(endpoints), make)


@contextmanager
def served_policy(
    servers: Servers, model: str | None = None, *, wait_s: float = 600.0, say: Callable[[str], None] = lambda _: None
) -> Iterator[tuple[Facts, ServedPolicy]]:
    """(what the model is, the model) as ``gymdata.models.forward.load_policy``, until the end of the context.

    ``servers`` are started here; ``model``: the served name or folder; ``wait_s``: how long to wait when none answers.
    Raises UsageError for a server of another model, OutsideError("engine").
    """
    policy = ServedPolicy(servers, wait_s, say)
    try:
        name = str(policy.facts["served_model"] or model)
        folder = next((path for path in (model, name) if path and Path(path).is_dir()), None)
        # Where the server reads the model, on this machine or not; only its tokenizer is taken from there.
        beside = next((path for path in (folder, policy.facts["served_from"]) if path and Path(path).is_dir()), None)
        identity = model_identity.policy_facts(folder) if folder is not None else model_identity.served_facts(name)
        yield (
            {
                "path": folder or name,
                "policy_hash": identity["policy_hash"],
                "checkpoint_dtype": UNKNOWN,
                **(tokenizer_facts(beside) if beside is not None else dict.fromkeys(_TOKENIZER)),
                **policy.facts,
            },
            policy,
        )
    finally:
        policy.close()


_TOKENIZER = ("tokenizer", "tokenizer_hash", "chat_template_hash")


class ServedPolicy:
    """A ``PolicyModel`` at temperature 1 on ``servers``, which are started here; ``close`` it."""

    def __init__(self, servers: Servers, wait_s: float, say: Callable[[str], None]) -> None:
        self.servers = servers
        # In a thread of its own, for the caller's may run a loop, as a notebook's does.
        self._thread, self._runner = ThreadPoolExecutor(1, "gymdata-servers"), asyncio.Runner()
        try:
            servers.places.check()
            engine = self._do(servers.start())
        except BaseException:
            self.close()
            raise
        servers.wait_for_server(wait_s, say)
        for note in engine["notes"]:
            say(note)
        self._longest = engine.get("max_model_len")
        self.facts: Facts = {
            "dtype": engine.get("dtype") or UNKNOWN,
            "device": counted(len(servers.servers), servers.places.noun),
            "served_model": engine.get("served_model"),
            "served_from": engine.get("served_from"),
        }

    def log_probs(self, to_score: ToScore, *, entropy: bool = False, shift: int = 0) -> tuple[np.ndarray, None]:
        """As ``PolicyModel``; NaN for another ``shift`` than 0. Raises RefusedError for rows that were sampled at another
        temperature than 1, and for ids that cannot be scored; UsageError for ``entropy``."""
        if entropy:
            raise UsageError("a server gives no entropies", hint="name the model's folder with -m, without --endpoint")
        if shift:
            return np.full(to_score.n_scored, np.nan, np.float32), None
        self._refuse(to_score)
        scores = np.empty(to_score.n_scored, np.float32)
        self._do(self._score(to_score, scores))
        return scores, None

    def log_probs_at(self, to_score: ToScore, temperatures: Sequence[float]) -> np.ndarray:
        """As ``PolicyModel``; NaN for every temperature but 1."""
        log_probs = np.full((len(temperatures), to_score.n_scored), np.nan, np.float32)
        at_one = [row for row, temperature in enumerate(temperatures) if temperature == 1.0]
        if at_one:
            log_probs[at_one] = self.log_probs(to_score)[0]
        return log_probs

    def close(self) -> None:
        """Close every connection, once."""
        try:
            self._do(self.servers.close())
        finally:
            self._thread.submit(self._runner.close)
            self._thread.shutdown()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, also where that ends its thread's loop, as a KeyboardInterrupt does."""
        done = self._thread.submit(self._runner.run, work)
        try:
            return done.result()
        except BaseException:
            if not done.done():  # a Ctrl-C of the caller's
                loop = self._runner.get_loop()
                loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
            raise

    def _refuse(self, to_score: ToScore) -> None:
        others = np.unique(to_score.temperature[(to_score.temperature != 1.0) & (to_score.scores.lengths > 0)])
        if len(others):
            rows = ", ".join(f"{t:g}" for t in others[:4])
            raise RefusedError(
                f"a server scores prompts at temperature 1, and rows were sampled at {rows}",
                hint="name the model's folder with -m, without --endpoint",
            )
        # A request generates a token as well.
        longest = None if self._longest is None else int(self._longest) - 1
        to_score.refuse_unscorable(_IDS, longest, str(self.facts["served_model"]))

    async def _score(self, to_score: ToScore, scores: np.ndarray) -> None:
        rows = iter(np.flatnonzero(to_score.scores.lengths > 0).tolist())

        async def worker() -> None:
            for row in rows:
                ids = to_score.token_ids[row].tolist()
                log_probs, _ = await self.servers.ask(lambda member, ids=ids: member.score(ids))  # type: ignore[misc]  # mypy infers no lambda with a default
                # The first token has nothing before it, and is never scored.
                scores[to_score.scores.span(row)] = np.asarray([np.nan, *log_probs], np.float32)[to_score.mask[row]]

        await together(worker() for _ in range(min(self.servers.default_concurrency, len(to_score))))

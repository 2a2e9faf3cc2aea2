"""Checks a recorder: serves the engine that it is to stand in front of, waits for it, and runs every case."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

from gymdata.check.conformance import cases as _cases  # noqa: F401 - the cases register themselves
from gymdata.check.conformance import session_cases as _session_cases  # noqa: F401 - the same
from gymdata.check.conformance.engine import ScriptedEngine
from gymdata.check.conformance.evidence import CaseFailure
from gymdata.check.conformance.probe import CASES, Case, Probe
from gymdata.errors import OutsideError, redacted
from gymdata.public import Figures, Report, Row
from gymdata.urls import address
from gymdata.workers.signals import run_async

if TYPE_CHECKING:
    import aiohttp

#: Seconds that one answer may take.
_ANSWER_S = 60.0
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case. ``result``: passed, failed, or skipped where the recorder does not serve its dialect."""

    case: str
    result: str
    detail: str


@dataclass(frozen=True, slots=True, repr=False)
class RecorderReport(Report):
    """What a recorder proved. ``ok``: no case failed, and some passed."""

    recorder: str
    cases: list[CaseResult]

    @property
    def ok(self) -> bool:
        results = {case.result for case in self.cases}
        return "failed" not in results and "passed" in results

    def to_dict(self) -> Figures:
        return {"recorder": self.recorder, "ok": self.ok, "cases": [asdict(case) for case in self.cases]}

    def rows(self) -> list[Row]:
        return [(case.case, case.result) for case in self.cases]


def check_recorder(
    url: str,
    *,
    upstream_port: int = 8200,
    tokenizer: str | None = None,
    wait: float = 120.0,
    say: Callable[[str], None] = lambda _: None,
) -> RecorderReport:
    """Check the recorder at ``url`` against the specification of token-exact rollouts.

    A scripted engine is served on ``upstream_port``, with vLLM's API; the recorder must be started in front of it, with the
    tokenizer and chat template of ``tokenizer`` (default: the sample policy). ``wait``: seconds until it must answer. Raises
    UsageError for a URL or tokenizer that is none, OutsideError when the recorder does not answer.
    """
    from gymdata.chat.template import TransformersChat

    base = address(url, "--recorder", "http://127.0.0.1:8100").without("/v1").url()
    folder = tokenizer or str(files("gymdata") / "sample_data" / "policy")
    chat = TransformersChat.load(folder, tool_parser="none")

    async def checked() -> RecorderReport:
        engine = ScriptedEngine(chat)
        async with engine.serving("127.0.0.1", upstream_port) as served_at:
            say(f"an engine of the tokenizer {folder} is at {served_at}")
            say(f"waiting for {redacted(base)}, a recorder in front of it …")
            return await run_cases(base, engine, wait=wait)

    return run_async(checked())


async def run_cases(url: str, engine: ScriptedEngine, *, wait: float = 120.0) -> RecorderReport:
    """Every case against the recorder at ``url``, which stands in front of ``engine``."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    async with aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as http:
        await _answering(http, url, wait)
        served: dict[str, bool] = {}
        results = []
        for case in CASES:
            probe = Probe(case.wire, engine, http, url)
            if case.wire.name not in served:
                status, *_ = await probe.send("POST", f"/s/{probe.key}{case.wire.path}", {})
                served[case.wire.name] = status not in (404, 405)
            if served[case.wire.name]:
                results.append(await _result(case, probe))
            else:
                results.append(CaseResult(case.title, "skipped", f"{case.wire.path} is not served"))
        return RecorderReport(redacted(url), results)


async def _answering(http: aiohttp.ClientSession, url: str, wait: float) -> None:
    """Return when the recorder answers. Raises OutsideError."""
    import aiohttp

    loop = asyncio.get_running_loop()
    end = loop.time() + wait
    while True:
        try:
            async with http.get(f"{url}/v1/models") as response:
                if response.status < 500:
                    return
                why = f"GET /v1/models: {response.status}"
        except (aiohttp.ClientError, TimeoutError) as error:
            why = str(error)
        if loop.time() >= end:
            raise OutsideError(
                "recorder",
                f"{redacted(url)} did not answer within {wait:g} s: {why}",
                hint="start it in front of the engine that this command serves",
            )
        await asyncio.sleep(_POLL_S)


async def _result(case: Case, probe: Probe) -> CaseResult:
    import aiohttp

    probe.engine.begin()
    failures: list[str] = []
    note = None
    # What the turns show is often the cause of what the client saw.
    for step in (case.run(probe), probe.settle()):
        try:
            note = await step or note
        except CaseFailure as failure:
            failures.append(str(failure))
        except (aiohttp.ClientError, TimeoutError) as error:
            failures.append(f"no answer: {type(error).__name__} {error}")
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            failures.append(f"an answer has another form than expected: {type(error).__name__} {error}")
    return CaseResult(case.title, "failed" if failures else "passed", "; ".join(failures) or note or "")

"""``serve-genrm``: joins a configuration to a judge, a folder and the compare server, and serves until it is stopped.

Invariants: one process serves a folder; what is in the folder is used again after a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from gymdata.commands.judge.judges import load_judge
from gymdata.commands.judge.pairwise import PairwiseJudge
from gymdata.commands.judge.port import Judge
from gymdata.commands.judge.settings import ServeConfig
from gymdata.commands.judge.verdict_cache import VerdictCache, VerdictLog
from gymdata.errors import needs
from gymdata.store import read_run_json, write_run_json
from gymdata.store.lock import Lock, made_folder
from gymdata.store.paths import RUN_JSON, RunFacts
from gymdata.store.stage_output import refuse_other_kind
from gymdata.urls import address_of, listening_socket
from gymdata.workers.serving import server_of
from gymdata.workers.signals import sigterm_interrupts


def serve_genrm(
    config: ServeConfig | None = None,
    *,
    judge: Judge | None = None,
    say: Callable[[str], None] = lambda _: None,
    command: Sequence[str] = (),
    **settings: Any,
) -> None:
    """Serve /compare, /verify, /health and /metrics until a signal arrives; waiting requests are then answered. ``say``
    gets the address. Raises KeyboardInterrupt when SIGINT or SIGTERM ended it.

    Raises StoreError when another process has the folder, OutsideError when the address is taken or the judge cannot be
    started.
    """
    config = ServeConfig.called_with(serve_genrm, config, settings)
    with needs("serve"):
        from gymdata.commands.judge.serve.app import Service, create_app
        from gymdata.commands.judge.serve.group_judge import GroupJudge
    judge = judge or load_judge(config, say)
    with contextlib.ExitStack() as stack:
        folder = config.output
        run_json: RunFacts = {"stage": "serve-genrm", "run_id": secrets.token_hex(8), "command": list(command)}
        run_json |= {"judge": dict(judge.identity), "config": config.model_dump(mode="json"), "parents": []}
        if folder is not None:
            refuse_other_kind(folder, "serve-genrm")
            with made_folder(folder):
                stack.callback(Lock(folder).release)
            if (folder / RUN_JSON).is_file():
                run_json |= {"run_id": read_run_json(folder).get("run_id") or run_json["run_id"]}
            write_run_json(folder, run_json)
        verdicts, answers = (VerdictCache(folder and folder / f"{name}.journal") for name in ("verdicts", "answers"))
        comparisons = VerdictLog(folder and folder / "comparisons.jsonl", "comparison_id")
        for file in (verdicts, answers, comparisons):
            stack.callback(file.close)
            for repair in file.repairs:
                say(f"repaired after a crash: {repair}")
        pairwise = PairwiseJudge(config, judge, verdicts, retry_unparsed=True, stop_when_gone=False)
        service = Service(config, GroupJudge(config, pairwise, comparisons), answers, run_json["run_id"], say)
        socket = listening_socket(config.host, config.port)
        stack.callback(socket.close)
        stack.enter_context(sigterm_interrupts())
        kept = "keeping nothing on disk (-o FOLDER keeps what was judged)" if folder is None else f"writing to {folder}"
        say(f"serving on {address_of(socket)}, {kept}")

        async def stop() -> None:
            await service.stop()
            await pairwise.close()

        async def serve() -> None:
            try:
                await pairwise.start()
            except BaseException:
                await pairwise.close()
                raise
            if folder is not None:
                write_run_json(folder, {**run_json, "engine": dict(pairwise.facts)})
            await server_of(create_app(service), stop).serve(sockets=[socket])

        asyncio.run(serve())

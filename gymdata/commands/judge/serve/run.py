"""``serve-genrm``: joins a configuration to a judge, a folder and the compare server, and serves until it is stopped.

Invariants: one process serves a folder; what is in the folder is used again after a restart.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from gymdata.commands.judge.judges import load_judge
from gymdata.commands.judge.pairwise import PairwiseJudge
from gymdata.commands.judge.port import Judge, Served
from gymdata.commands.judge.settings import ServeConfig
from gymdata.commands.judge.verdict_cache import VerdictCache, VerdictLog
from gymdata.errors import UsageError, needs
from gymdata.store import read_run_json, write_run_json
from gymdata.store.lock import Lock, made_folder
from gymdata.store.paths import RUN_JSON
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

    Raises UsageError for several workers (a cohort lives in one process), StoreError when another process has the
    folder, OutsideError when the address is taken or the judge cannot be started.
    """
    config = ServeConfig.called_with(serve_genrm, config, settings)
    web_concurrency = os.environ.get("WEB_CONCURRENCY", "1")
    if config.workers > 1 or web_concurrency not in ("", "1"):
        raise UsageError(
            f"{config.workers if config.workers > 1 else web_concurrency} workers: the members of a cohort would wait for "
            "each other in different processes",
            hint="serve with one worker and WEB_CONCURRENCY unset; or start several servers, and send each group to one",
        )
    with needs("serve"):
        from gymdata.commands.judge.serve.app import Service, create_app
        from gymdata.commands.judge.serve.cohorts import RequestQueue
    judge = judge or load_judge(config)
    with contextlib.ExitStack() as stack:
        folder = config.output
        run_id = secrets.token_hex(8)
        if isinstance(judge, Served):
            judge.wait_for_server(config.wait_for_server, say)
        if folder is not None:
            refuse_other_kind(folder, "serve-genrm")
            with made_folder(folder):
                stack.callback(Lock(folder).release)
            run_json = read_run_json(folder) if (folder / RUN_JSON).is_file() else {}
            run_id = str(run_json.get("run_id") or run_id)
            facts = {"stage": "serve-genrm", "run_id": run_id, "command": list(command), "judge": dict(judge.identity)}
            write_run_json(folder, {**facts, "config": config.model_dump(mode="json"), "parents": []})
        verdicts, answers = (VerdictCache(folder and folder / f"{name}.journal") for name in ("verdicts", "answers"))
        comparisons = VerdictLog(folder and folder / "comparisons.jsonl", "comparison_id")
        for file in (verdicts, answers, comparisons):
            stack.callback(file.close)
            for repair in file.repairs:
                say(f"repaired after a crash: {repair}")
        pairwise_judge = PairwiseJudge(config, judge, verdicts, retry_unparsed=True, stop_when_gone=False)
        service = Service(config, RequestQueue(config, pairwise_judge, comparisons), answers, run_id, say)

        async def stop() -> None:
            await pairwise_judge.close()
            if isinstance(judge, Served) and folder is not None:
                write_run_json(folder, {**read_run_json(folder), "engine": dict(pairwise_judge.facts)})

        trouble: list[BaseException] = []

        async def start() -> None:
            try:
                await pairwise_judge.start()
            except Exception as error:  # uvicorn would only print it; it is raised to the caller below
                trouble.append(error)
                raise

        server = server_of(create_app(service, start, stop), lambda: service.stop("the server is stopping"))
        socket = listening_socket(config.host, config.port)
        stack.callback(socket.close)
        stack.enter_context(sigterm_interrupts())
        where = (
            f"writing to {folder}"
            if folder is not None
            else "keeping nothing on disk (-o FOLDER keeps what was judged)"
        )
        say(f"serving on {address_of(socket)}, {where}")
        with contextlib.suppress(SystemExit):
            server.run(sockets=[socket])
        if trouble:
            raise trouble[0]

"""vLLM in this process: ids in, ids and log-probabilities out.

Invariants: nothing is tokenised or detokenised here; log-probabilities are those of the distribution that was really
sampled (``processed_logprobs``) unless the user chose another mode, which the facts then say; Ctrl-C reaches the command
and never the engine's processes; the engine's processes end with the command, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ctypes
import gc
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

from gymdata.engines.parent_death import ENGINE_OF
from gymdata.engines.port import FinishReason, Generation, SampleRequest
from gymdata.engines.sampling import AnswerFaultError, Sampling, best_alternatives, check_generation
from gymdata.errors import OutsideError, UsageError, needs
from gymdata.models._transformers import local_folder
from gymdata.models.model_identity import base_of, model_config, stored_dtype
from gymdata.settings import Settings
from gymdata.store.paths import Facts


def refuse_second_start(error: Exception, log: Path | None) -> None:
    """Raises UsageError where an engine could not start because its process ran the caller's script again: by ``error``,
    or by the ``log`` of that process, whose multiprocessing then refuses to start another."""
    text = log.read_text(errors="replace") if log is not None and log.is_file() else ""
    if "bootstrapping phase" in f"{error}{text}":
        raise UsageError(
            "the engine's process ran this script again from its beginning, and could not start",
            hint='put what the script does below the line: if __name__ == "__main__":',
        ) from error


class EngineLog:
    """A log file for one engine."""

    def __init__(self) -> None:
        self.path: Path | None = None

    @contextlib.contextmanager
    def children_write_here(self) -> Iterator[None]:
        """Processes started inside inherit this file as their stderr; what this process writes still reaches its own."""
        handle, name = tempfile.mkstemp(prefix="gymdata-engine-", suffix=".log")
        self.path = Path(name)
        sys.stderr.flush()
        own = os.dup(2)
        with os.fdopen(handle, "ab") as log, os.fdopen(os.dup(own), "w", buffering=1, errors="replace") as ours:
            os.dup2(log.fileno(), 2)
            before, sys.stderr = sys.stderr, ours
            try:
                yield
            finally:
                sys.stderr = before
                os.dup2(own, 2)
                os.close(own)

    def remove(self) -> None:
        """Remove the log of an engine that ended normally."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


DEFAULT_MAX_NUM_SEQS = 256
#: Settings that this adapter relies on; changing them would break its invariants.
_FIXED = {"model": "give -m/--model"}
#: vLLM's number formats; half and float are its names of float16 and float32.
_DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")
#: Bytes of weights from which on a model's own work outweighs that around it, on a CPU.
_LARGE = 100_000_000
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class _StartAbandoned(BaseException):
    """Raised in the thread that starts an engine; no ``except Exception`` of a library takes it."""


class VllmSampler:
    """A ``Sampler`` on vLLM's asynchronous engine.

    ``model``: a folder with weights, a LoRA adapter's folder (its base is loaded and the adapter applied), or a hub
    name. ``sampling``: see ``Sampling``. ``engine_args``: any field of vLLM's AsyncEngineArgs. ``seed``: the engine's
    own seed, used only where a request has none. ``log_probs``: without them generations hold none, and the engine is
    spared a third of its work besides the model's.
    """

    prefers_groups = False

    def __init__(
        self,
        model: str,
        *,
        sampling: Settings | None = None,
        engine_args: Mapping[str, Any] | None = None,
        seed: int | None = None,
        log_probs: bool = True,
    ) -> None:
        self.model = model
        self.log_probs = log_probs
        self.sampling = Sampling.of(sampling or {})
        self.engine_args = dict(engine_args or {})
        refuse_unknown(self.engine_args, self.sampling.more)
        self.seed = seed
        self._runs_at_once(int(self.engine_args.get("max_num_seqs") or DEFAULT_MAX_NUM_SEQS))
        self._engine: Any = None
        self._lora: Any = None
        self._facts: Facts = {}
        #: Prompt tokens of the answers so far, and those of them that were in the prefix cache.
        self.read_tokens = self.cached_tokens = 0
        # The kernel's "parent died" signal follows the *thread* that started a process: this one lives until close().
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gymdata-engine")
        self._starting: asyncio.Future[Any] | None = None
        #: The thread that starts the engine, and the processes that were there before (None: nothing is started yet).
        self._start: tuple[int, frozenset[int] | None] | None = None
        self._log = EngineLog()
        self._last_params: tuple[tuple[object, ...], Any] | None = None

    async def start(self) -> Facts:
        """Start the engine (about 15 s on a CPU). Raises UsageError on bad settings, OutsideError when it cannot start."""
        set_environment()
        # In the thread, importing vLLM included, so that Ctrl-C is handled meanwhile.
        self._starting = asyncio.get_running_loop().run_in_executor(self._thread, self._start_engine)
        self._engine = await asyncio.shield(self._starting)
        # Objects that are loaded by now stay, so the garbage collector need not scan them again.
        gc.freeze()
        return self.facts()

    def facts(self) -> Facts:
        """Facts about the engine for run.json; empty before ``start``."""
        return dict(self._facts)

    async def sample(self, request: SampleRequest) -> list[Generation]:
        """Continue one prompt. Cancelling the task aborts the request in the engine."""
        sampling = self.sampling.changed(request.sampling)
        prompt = list(request.prompt_token_ids)
        read, outputs = await self._answer(prompt, self._params(request), request.request_id)
        if len(outputs) != request.n:
            raise AnswerFaultError("shape", f"got {len(outputs)} completions, expected {request.n}")
        generations = []
        for output in outputs:
            flat, top = output.logprobs, None
            if sampling.top_logprobs:
                spans = zip(flat.start_indices, flat.end_indices, strict=True)
                top = [
                    best_alternatives(zip(flat.token_ids[a:b], flat.logprobs[a:b], strict=True), sampling.top_logprobs)
                    for a, b in spans
                ]
                values = [flat.logprobs[i] for i in flat.start_indices]
            else:
                values = list(flat.logprobs) if self.log_probs else []
            generation = Generation(
                prompt_token_ids=list(read.prompt_token_ids or ()),
                token_ids=list(output.token_ids),
                log_probs=values,
                finish_reason=output.finish_reason if output.finish_reason in get_args(FinishReason) else "abort",
                stop_reason=output.stop_reason,
                top_log_probs=top,
            )
            check_generation(
                generation,
                max_tokens=request.max_tokens,
                vocab_size=self._facts["vocab_size"],
                sent=prompt,
                log_probs=self.log_probs,
            )
            generations.append(generation)
        return generations

    async def _answer(self, prompt: list[int], params: Any, request_id: str) -> tuple[Any, list[Any]]:
        """vLLM's last output of one request, and its completions. Raises OutsideError("engine")."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        if self._engine is None:
            raise OutsideError("engine", "the engine is not running", fatal=True)
        answer = None
        completions: dict[int, Any] = {}
        try:
            async for output in self._engine.generate(
                # For this form vLLM does not use its tokenizer thread.
                tokens_input(prompt),
                params,
                request_id,
                lora_request=self._lora,
            ):
                answer = output
                for completion in output.outputs:
                    completions[completion.index] = completion
        except EngineDeadError as error:
            raise OutsideError(
                "engine", "vLLM's engine process died", hint=f"{self._log.path} says why; run again", fatal=True
            ) from error
        except (VLLMClientError, ValueError) as error:
            raise OutsideError("engine", f"the request was refused: {error}") from error
        except Exception as error:  # vLLM wraps faults of a single request in many types; all of them are the engine's
            dead = bool(self._engine.errored)
            raise OutsideError("engine", f"{type(error).__name__}: {error}", retryable=not dead, fatal=dead) from error
        if answer is None:
            raise OutsideError("engine", "the engine ended the request without an answer", retryable=True)
        self.read_tokens += len(prompt)
        self.cached_tokens += answer.num_cached_tokens or 0
        return answer, [completions[index] for index in sorted(completions)]

    @property
    def unfinished(self) -> int:
        """Requests that the engine still works on; 0 before it starts and after it is closed."""
        return int(self._engine.get_num_unfinished_requests()) if self._engine is not None else 0

    async def close(self) -> None:
        """Stop the engine and wait until its processes are gone. Safe to call twice, and while it is starting."""
        if self._starting is not None and self._engine is None:
            await self._end_start(self._starting)
        engine, self._engine, self._starting = self._engine, None, None
        if engine is not None:
            failed = bool(engine.errored)  # which it is for vLLM, too, as soon as the handler is cancelled
            handler = engine.output_handler
            if handler is not None:
                handler.cancel()  # else it reports our own shutdown as an engine that died
                await asyncio.gather(handler, return_exceptions=True)
            # vLLM's workers do not end by themselves on a CPU, where nothing but memory is held: do not wait for them.
            patience = 0.5 if self._facts.get("device") == "cpu" else None
            await asyncio.get_running_loop().run_in_executor(self._thread, engine.shutdown, patience)
            if not failed:
                self._log.remove()
            # vLLM's finalizer shuts down again, at interpreter exit, when the modules it needs are gone.
            engine.shutdown = lambda: None
        self._thread.shutdown(wait=True)
        # At exit, libraries report what was never freed.
        gc.unfreeze()

    async def _end_start(self, starting: asyncio.Future[Any]) -> None:
        """End an engine that is still starting: its thread at its next line of Python, and its processes. Waiting for
        it to be up would take most of a minute."""
        if starting.done():
            return  # a failed start, which start() has reported
        while not starting.done():
            self._abandon_start()
            await asyncio.wait([starting], timeout=0.2)
        self._engine = starting.result() if starting.exception() is None else None
        self._log.remove()

    def _abandon_start(self) -> None:
        """Interrupt the thread that starts the engine, and kill what it has started."""
        if self._start is None:
            return
        thread, others = self._start
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_StartAbandoned))
        if others is None:
            return
        import psutil

        for child in psutil.Process().children(recursive=True):
            if child.pid not in others:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()

    # ------------------------------------------------------------------------------------------------------------------

    def _runs_at_once(self, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs
        # Half more than it runs at once: when a generation ends, the next request already waits in the engine, so no
        # step has free slots while this process stores the rollout.
        self.default_concurrency = max_num_seqs + (max_num_seqs + 1) // 2

    def _params(self, request: SampleRequest) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

        sampling = self.sampling.changed(request.sampling)
        # Most requests differ only in their seeds, and a copy takes a twentieth of the time of validated new
        # parameters.
        shape = (sampling, request.n, request.max_tokens, self.log_probs)
        seed = request.seed if self._facts["request_seeds"] else None
        if self._last_params is None or self._last_params[0] != shape:
            options = sampling.request_fields()
            if isinstance(grammar := options.get("structured_outputs"), Mapping):  # as requests over HTTP have it
                options["structured_outputs"] = StructuredOutputsParams(**grammar)
            params = SamplingParams(
                **options,
                n=request.n,
                max_tokens=request.max_tokens,
                seed=seed,
                logprobs=sampling.top_logprobs if self.log_probs else None,
                flat_logprobs=self.log_probs,
                detokenize=sampling.reads_text,
                output_kind=RequestOutputKind.FINAL_ONLY,
                # These are never changed, so vLLM need not copy them deeply; it does change those of a grammar.
                skip_clone="structured_outputs" not in options,
            )
            self._last_params = shape, params
        params = copy.copy(self._last_params[1])
        params.seed = seed
        return params

    def _start_engine(self) -> Any:
        """Runs in the engine thread, with SIGINT blocked so that every process it starts ignores Ctrl-C."""
        self._start = threading.get_ident(), None
        try:
            with needs("engine"):
                import psutil
                import vllm  # noqa: F401 - takes seconds
            self._start = threading.get_ident(), frozenset(p.pid for p in psutil.Process().children(recursive=True))
            return self._started_engine()
        finally:
            self._start = None

    def _started_engine(self) -> Any:
        import warnings
        from multiprocessing import resource_tracker

        warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\b.*")
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.executor import Executor

        # Started later, the tracker would unblock SIGINT in this thread and the engine's processes would inherit that.
        with _tracker_stays_quiet():
            resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        args = self._engine_args()
        try:
            config = args.create_engine_config(UsageContext.LLM_CLASS)
        except (ValueError, TypeError, OSError) as error:
            raise UsageError(
                f"vLLM refuses this engine configuration: {_first_line(error)}",
                hint="change it with --set engine.KEY=VALUE, or give another model",
            ) from error
        try:
            with self._log.children_write_here():
                engine = AsyncLLM(
                    vllm_config=config,
                    executor_class=Executor.get_class(config),
                    log_stats=not args.disable_log_stats,
                    log_requests=False,
                    usage_context=UsageContext.LLM_CLASS,
                )
        except Exception as error:  # start-up fails in as many ways as there are devices; the engine is at fault
            refuse_second_start(error, self._log.path)
            raise OutsideError(
                "engine",
                f"vLLM could not start with {self.model}: {_first_line(error)}",
                hint=f"its log is {self._log.path}; VLLM_LOGGING_LEVEL=INFO says more. Too little memory? Lower "
                "engine.gpu_memory_utilization, engine.max_model_len or engine.max_num_seqs",
                fatal=True,
            ) from error
        self._facts = self._collect_facts(config)
        return engine

    def _engine_args(self) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs

        needed, adapter = arguments_for(self.model, self.engine_args)
        needed |= {
            "seed": self.seed or 0,
            "max_logprobs": max(20, self.sampling.top_logprobs),
            "disable_log_stats": True,
            "enable_log_requests": False,
            "use_tqdm_on_load": False,
        }
        if adapter is not None:
            from vllm.lora.request import LoRARequest

            self._lora = LoRARequest(adapter.name, 1, str(adapter))
        return AsyncEngineArgs(**{**needed, **self.engine_args})

    def _collect_facts(self, config: Any) -> Facts:
        import vllm

        model, scheduler = config.model_config, config.scheduler_config
        chunked = bool(scheduler.enable_chunked_prefill)
        device = str(config.device_config.device_type)
        dtype, stored = str(model.dtype).removeprefix("torch."), stored_dtype(self.model)
        other = stored not in (None, dtype) and "dtype" not in self.engine_args
        slow = ", in which this processor is slow" if device == "cpu" else ""
        instead = f"sampling in {dtype}: the weights are in {stored}{slow}"
        self._runs_at_once(int(scheduler.max_num_seqs))
        return {
            "engine": "vllm",
            "engine_version": vllm.__version__,
            "transport": "in-process",
            "device": device,
            "dtype": dtype,
            "quantization": model.quantization,
            "max_model_len": int(model.max_model_len),
            "max_num_seqs": int(scheduler.max_num_seqs),
            "max_num_batched_tokens": int(scheduler.max_num_batched_tokens),
            "chunked_prefill": chunked,
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "block_size": int(config.cache_config.block_size),
            "kv_cache_tokens": int(config.cache_config.num_gpu_blocks or 0) * int(config.cache_config.block_size),
            "enforce_eager": bool(model.enforce_eager),
            "logprobs_mode": str(getattr(model.logprobs_mode, "value", model.logprobs_mode)),
            "lora": self._lora.name if self._lora is not None else None,
            "merged": str(config.model_config.model)
            if self._lora is None and base_of(self.model)[1] is not None
            else None,
            # A seeded request whose prefill is split over two steps kills the CPU engine.
            "request_seeds": not (device == "cpu" and chunked),
            "vocab_size": int(model.get_vocab_size()),
            "engine_args": {
                key: value if isinstance(value, str | int | float | bool | type(None) | list | dict) else str(value)
                for key, value in self.engine_args.items()
            },
            **({"notes": [f"{instead} (--set engine.dtype={stored} samples in that)"]} if other else {}),
        }


def refuse_unknown(args: Settings, sampling: Iterable[str] = ()) -> None:
    """Raises UsageError for engine arguments, or sampling parameters, that vLLM has not or cannot take, or that are given in
    another way."""
    for key, instead in _FIXED.items():
        if key in args:
            raise UsageError(f"engine.{key} cannot be set", hint=instead)
    dtype = str(args.get("dtype", "auto")).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise UsageError.unknown_choice("--set engine.dtype", dtype, _DTYPES)
    given = {"--set engine": tuple(args), "--set sampling": tuple(sampling)}
    if not any(given.values()):
        return
    set_environment()
    with needs("engine"):
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.sampling_params import SamplingParams
    known = {
        "--set engine": [f.name for f in fields(AsyncEngineArgs)],
        "--set sampling": SamplingParams.__struct_fields__,
    }
    faults = [(key, where) for where, keys in given.items() for key in keys if key not in known[where]]
    if faults:
        raise UsageError.several(UsageError.unknown_key(key, known[where], where) for key, where in faults)


def arguments_for(model: str, args: Settings) -> tuple[Settings, Path | None]:
    """(what vLLM needs to sample ``model`` for collecting on this machine, besides ``args``; adapter folder or None). On a
    CPU an adapter is merged with its base, once, in a cache.

    Raises DataError or UsageError for a model that is not here or cannot be loaded.
    """
    base, adapter = base_of(model)
    base = str(local_folder(base))
    from vllm.platforms import current_platform

    needed: Settings = {
        "model": base,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 20,
        "max_num_seqs": DEFAULT_MAX_NUM_SEQS,
    }
    if current_platform.is_cpu():
        needed |= _cpu_args(base, args)
        if adapter is not None and find_spec("peft") is not None:
            from gymdata.models._saving import merged_in_cache

            # vLLM samples a tenth of the tokens with an adapter there.
            needed["model"] = str(merged_in_cache(model, str(args.get("dtype", needed["dtype"]))))
            adapter = None
    if adapter is not None:
        rank = int(model_config(adapter / "adapter_config.json").get("r", 16))
        fits = next((r for r in _LORA_RANKS if r >= rank), rank)
        needed |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": fits}
    return needed, adapter


def set_environment() -> None:
    """Settings that vLLM reads from the environment, here and in the processes that it starts. The user's own win."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is reserved for data
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # The model is on this machine, or was refused: nothing is to be looked up.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ[ENGINE_OF] = str(os.getpid())
    # vLLM's messages during import, before it reads its own log level.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])


@contextlib.contextmanager
def _tracker_stays_quiet() -> Iterator[None]:
    """Python's resource tracker, which cleans up what killed engine processes leave, does not announce it."""
    option = "ignore:resource_tracker:UserWarning"
    sys.warnoptions.append(option)
    try:
        yield
    finally:
        sys.warnoptions.remove(option)


def _cpu_args(base: str, args: Settings) -> Settings:
    """Defaults on a CPU, where per-request seeds need whole prefills and compiling costs more than it gives."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from gymdata.models._torch import multiplies

    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    weights = sum(file.stat().st_size for file in Path(base).glob("*.safetensors"))
    if len(cores) == 2 and weights >= _LARGE and not any("parallel" in key for key in args):
        # vLLM leaves one to its scheduler, which has little to do beside a model of this size (RESULTS.md, Real model).
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    probe = {
        key: args[key] for key in ("max_model_len", "tokenizer", "trust_remote_code", "hf_overrides") if key in args
    }
    try:
        model = AsyncEngineArgs(model=base, **probe).create_model_config()
    except (ValueError, TypeError, OSError) as error:
        raise UsageError(f"vLLM cannot load {base}: {_first_line(error)}", hint="give a folder with weights") from error
    stored = str(getattr(model.hf_text_config, "dtype", None) or "").removeprefix("torch.")
    return {
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(8192, int(model.max_model_len)),
        # The smallest that its kernels take: prompts alike in fewer tokens than a block share nothing, and vLLM's is 128.
        "block_size": 32,
        # vLLM would round a float32 checkpoint to bfloat16, and log-probs would be up to 0.1 off the trained model's.
        "dtype": "float32" if stored == "float32" or not multiplies(stored) else "auto",
    }


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # pydantic's first line only counts the errors; the sentence that helps comes after the field's name
    useful = [line for line in lines if "validation error" not in line and not line.startswith("For further")]
    return " ".join(useful[:2])[:400] or type(error).__name__


def tool_parsers() -> list[str]:
    """The names of vLLM's tool parsers."""
    from vllm.tool_parsers import ToolParserManager

    return sorted(ToolParserManager.list_registered())

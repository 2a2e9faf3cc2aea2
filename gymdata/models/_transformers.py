"""Models and tokenizers that are on this machine: a folder, or a hub name in the local cache; and ids back to text.

Nothing is ever downloaded, and no mistyped path becomes a request to a hub.
"""

from __future__ import annotations

import contextlib
import functools
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gymdata.checks.breaks import Reading
from gymdata.errors import DataError, MissingExtraError, UsageError, first_line, nearest_beside, needs
from gymdata.models.vocabulary import find_tokenizer, load_vocabulary
from gymdata.rollouts.messages import ToolDefinition
from gymdata.store.paths import RunFacts

#: How torch words that a weight does not fit.
_SIZES = re.compile(r".* for (\S+): .* torch\.Size\((.*)\) from .* torch\.Size\((.*)\).*")


def local_folder(name: str | Path) -> Path:
    """The folder of a model or tokenizer: ``name`` itself, or the snapshot of that hub name in the local cache.

    Raises DataError when there is neither.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    text = str(name)
    if folder.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1 or not text:
        raise DataError.missing_path(folder, "the folder of a model or tokenizer", folders=True)
    with needs("collect"):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    try:
        return Path(snapshot_download(text, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError) as error:
        if folder.exists():
            raise DataError.missing_path(folder, "the folder of a model or tokenizer") from error
        near, fetch = nearest_beside(folder, folders=True), f"give a folder, or fetch it once: hf download {text}"
        if folder.parent.is_dir() and "/" in text:
            # A path that exists on this machine is not a hub name.
            fetch = "give a folder, or the name of a model in that cache"
        raise DataError(
            f"{text}: no such folder, and not in the local Hugging Face cache",
            hint=f"{near} If not: {fetch}" if near else fetch,
        ).at(text, "nothing", "the folder of a model, or a name in the local Hugging Face cache") from error


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """While it lasts, transformers reports nothing of the weights it loads: the command says what is lacking. Its bar
    stays off, for progress is the command's."""
    from transformers.utils import logging

    bar_off: Any = logging.disable_progress_bar  # without types
    errors_only: Any = logging.set_verbosity_error
    bar_off()
    loud = logging.get_verbosity()
    errors_only()
    try:
        yield
    finally:
        logging.set_verbosity(loud)


def with_adapter(model: Any, adapter: str, base: str, is_trainable: bool = False) -> Any:
    """``model``, which was loaded from ``base``, with the LoRA folder ``adapter`` over it. Raises DataError when the two do
    not fit."""
    from peft import PeftModel

    if (Path(adapter) / "tokenizer_config.json").is_file():
        n_tokens = len(load_tokenizer(adapter, extra="train"))
        if n_tokens > len(model.get_input_embeddings().weight):  # the training added tokens
            model.resize_token_embeddings(n_tokens)
    try:
        return PeftModel.from_pretrained(model, adapter, is_trainable=is_trainable)
    except (RuntimeError, ValueError) as error:
        sizes = [line.strip() for line in str(error).splitlines() if "size mismatch" in line]
        if isinstance(error, RuntimeError) and not sizes:
            raise
        why = _SIZES.sub(r"\1 is \2, needs \3", sizes[0]) if sizes else first_line(error)
        raise DataError(
            f"{adapter}: is not an adapter of {base}: {why}",
            hint="base_model_name_or_path in adapter_config.json must name its model",
        ) from error


def load_tokenizer(name: str | Path, *, extra: str = "collect") -> Any:
    """The transformers tokenizer of a folder or cached hub name.

    Raises DataError when there is no such folder or no tokenizer in it, UsageError when transformers is missing (it comes
    with ``extra``).
    """
    folder = local_folder(name)
    with needs(extra):
        from transformers import AutoTokenizer
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = textwrap.shorten(str(error), 400, placeholder=" …") or type(error).__name__
        fault = f" that transformers can read: {why}" if any(folder.iterdir()) else ": the folder is empty"
        raise DataError(
            f"{folder}: holds no tokenizer{fault}",
            hint="give the tokenizer's folder with --tokenizer",
        ) from error


def generation_eos_ids(folder: Path) -> list[int]:
    """The end tokens that a checkpoint's generation_config.json names; none without one."""
    if not (folder / "generation_config.json").is_file():
        return []
    from transformers import GenerationConfig

    eos = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    return [eos] if isinstance(eos, int) else list(eos or [])


def schema_of(tool: Callable[..., Any]) -> ToolDefinition:
    """The function schema of a Python function with type hints and a docstring. Raises what transformers raises."""
    with needs("collect"):
        from transformers.utils.chat_template_utils import get_json_schema
    schema: ToolDefinition = get_json_schema(tool)
    return schema


def rendered_chat(template: str, messages: list[Any], tools: Any, generate: bool, special: Mapping[str, Any]) -> str:
    """The conversation as ``template`` writes it. ``special``: the tokenizer's tokens by name. Raises what jinja2 raises."""
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        [messages], tools=tools, chat_template=template, add_generation_prompt=generate, **special
    )
    return str(rendered[0][0])


def marked_chat(template: str, messages: list[Any], tools: Any, special: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Where the conversation as ``template`` writes it is between its generation marks, in characters."""
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        [messages], tools=tools, chat_template=template, return_assistant_tokens_mask=True, **special
    )
    return [(int(start), int(end)) for start, end in rendered[1][0]]


def writes_conversations_itself(tokenizer: Any) -> bool:
    """Whether the tokenizer renders chats by code of its own instead of a template."""
    from transformers import PreTrainedTokenizerBase

    return type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template


def reader_of(tokenizer: str | Path | None, run: RunFacts) -> Callable[[], Reading] | None:
    """The reader of the tokenizer that was given, else of the model folder that ``run`` (a run.json) names; None where
    neither is there. It loads the tokenizer when it is first used, or its vocabulary where the tokenizer's library is not
    installed. Raises UsageError or DataError then."""
    folder = tokenizer if tokenizer is not None else find_tokenizer(run)
    if folder is None:
        return None

    def reader() -> Reading:
        try:
            return load_reader(folder)
        except MissingExtraError:
            if (words := load_vocabulary(folder)) is None:
                raise
            return Reading(words.decode, words.special)

    return functools.cache(reader)


def load_reader(folder: str | Path) -> Reading:
    """A reader of ids for the tokenizer in ``folder`` (or of a tokenizer.json, or a model's name)."""
    file = Path(folder, "tokenizer.json") if Path(folder).is_dir() else Path(folder)
    if not file.is_file():
        loaded = load_tokenizer(str(folder))
        decode = functools.partial(loaded.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return Reading(_careful(decode, range(len(loaded)).__contains__), frozenset(loaded.all_special_ids))
    with needs("collect"):
        from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # The library raises bare Exception for a file that it cannot read.
        raise UsageError.bad_value("--tokenizer", str(folder), f"a folder with a tokenizer ({error})") from error
    size = backend.get_vocab_size(with_added_tokens=True)

    def is_token(i: int) -> bool:
        # Ids can have gaps; looking each up is slow, so only those beyond the size are looked up.
        return 0 <= i < size or (0 <= i < 2**32 and backend.id_to_token(i) is not None)

    special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
    return Reading(_careful(functools.partial(backend.decode, skip_special_tokens=False), is_token), special)


def _careful(decode: Callable[[list[int]], str], is_token: Callable[[int], bool]) -> Callable[[Sequence[int]], str]:
    def text(ids: Sequence[int]) -> str:
        if all(map(is_token, ids)):
            return decode(list(ids))
        parts: list[str] = []
        run: list[int] = []
        for i in ids:
            if is_token(i):
                run.append(i)
                continue
            parts += [decode(run), f"<id {i}>"]
            run = []
        return "".join([*parts, decode(run)])

    return text

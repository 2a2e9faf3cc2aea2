"""Tasks that are a dataset of the Hugging Face hub, or of its cache when there is no network."""

from __future__ import annotations

import re
from pathlib import Path

from gymdata.errors import DataError, OutsideError, UsageError, first_line, needs

_FORM = re.compile(r"hf:(?P<name>[^:\s]+)(:(?P<split>\w[\w.-]*))?")


def hub_files(text: str) -> list[Path]:
    """The Arrow files of ``hf:NAME[:SPLIT]`` in the cache of ``datasets``, which is filled if need be.

    NAME is OWNER/NAME, or OWNER/NAME/CONFIG for a dataset of several. Without SPLIT it is ``train``, or the only one.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise UsageError.bad_value(
            "tasks", text, "hf:OWNER/NAME[/CONFIG][:SPLIT]", "for the first rows of a split: --limit N"
        )
    with needs("hub"):
        import datasets
    owner, *rest = match["name"].split("/")
    name, config = "/".join([owner, *rest[:1]]), "/".join(rest[1:]) or None
    try:
        dataset = datasets.load_dataset(name, config, split=match["split"])
    except datasets.exceptions.DatasetNotFoundError as error:
        raise DataError(
            f"{text}: {first_line(error)}", hint="check the name; a private dataset needs a login (`hf auth login`)"
        ) from error
    except ValueError as error:
        # An unknown split or configuration, or a missing one of several; the message lists them.
        form = f"hf:{name}/CONFIG:SPLIT names both" if config is None else f"hf:{name}/{config}:SPLIT names a split"
        raise UsageError(f"{text}: {first_line(error)}", hint=form) from error
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise OutsideError(
            "hub", f"{text}: {first_line(error)}", hint="offline, a dataset must be in the cache: see HF_HOME"
        ) from error
    if isinstance(dataset, datasets.DatasetDict):
        split = "train" if "train" in dataset else next(iter(dataset)) if len(dataset) == 1 else None
        if split is None:
            raise UsageError(
                f"{text}: has the splits {', '.join(dataset)}, expected one", hint=f"{text}:{next(iter(dataset))}"
            )
        dataset = dataset[split]
    files = [Path(part["filename"]) for part in dataset.cache_files]
    if not files:
        raise DataError.empty(text, "a dataset with rows")
    return files

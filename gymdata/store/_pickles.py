"""Batches that other projects pickled: files of torch, and pickles of verl and SkyRL.

Invariant: nothing of a file is run. torch loads its files with ``weights_only``, other pickles are loaded without classes
and functions of theirs; what both need besides plain data are the names of ``_known``, which keep what they are given. A
file with any other name is refused.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gymdata.errors import DataError, needs

_ZIP = b"PK\x03\x04"
_HINT = "in the project that wrote it, torch.save a dict of lists, numbers, texts and tensors"
_NAMED = re.compile(r"GLOBAL ([\w.]+) was not|(?:Unsupported class|type) ([\w.]+)")


class _Held:
    """An object of another project: its state, and nothing that it does."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _DataProto(_Held):
    """verl's batch: its tensors as torch saved them, or as names of types, shapes and bytes; other columns; facts of the
    whole (``DataProto.__getstate__`` in ``verl/protocol.py``)."""


class _Column(_Held):
    """A column of tensordict that is no tensor (``NonTensorStack``), and a value of it (``NonTensorData``)."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (known := _known().get(f"{module}.{name}")) is None:
            raise pickle.UnpicklingError(f"type {module}.{name}")
        return known


@cache
def _known() -> dict[str, Any]:
    """Names that are read, and what is made of them."""
    array = np.zeros(1)
    of_numpy = {"_reconstruct": array.__reduce__()[0], "scalar": array[0].__reduce__()[0]}
    multiarray = {f"numpy.{core}.multiarray.{n}": f for core in ("core", "_core") for n, f in of_numpy.items()}
    buffers = {f"numpy.{core}.numeric._frombuffer": array.__reduce_ex__(5)[0] for core in ("core", "_core")}
    skyrl = "skyrl.backends.skyrl_train.training_batch"
    return {
        **multiarray,
        **buffers,
        "numpy.ndarray": np.ndarray,
        "numpy.dtype": np.dtype,
        **{f"numpy.dtypes.{type(np.dtype(name)).__name__}": type(np.dtype(name)) for name in ("i2", "i4", "i8", "f4")},
        "tensordict._reductions._make_td": lambda _, state: state["_tensordict"],
        "tensordict._reductions._rebuild_tensordict_files_consolidated": _consolidated,
        "tensordict._td.TensorDict": _Held,
        "tensordict.tensorclass.NonTensorStack": _Column,
        "tensordict.tensorclass.NonTensorData": _Column,
        "torch._dynamo.decorators._DimRange": _Held,
        "torch.Size": tuple,
        "torch.device": str,
        "verl.protocol.DataProto": _DataProto,
        "verl.utils.tensordict_utils.list_of_dict_to_tensordict": lambda rows: {
            k: [row[k] for row in rows] for k in rows[0]
        },
        **{f"miles.utils.types.{name}": _Held for name in ("AdapterRef", "RewardSpec")},
        f"{skyrl}._rebuild_tensor_batch": lambda _, state: {
            "batch": {name: _of_skyrl(value) for name, value in state["batch_dict"].items() if value is not None},
            "metadata": state["metadata"],
        },
        f"{skyrl}.TrainingInputBatch": _Held,
    }


def load(path: Path) -> Any:
    """What a file holds, with NumPy's arrays for tensors, lists of them for nested ones, and a dict for a batch. Raises
    DataError."""
    try:
        with path.open("rb") as file:
            names = zipfile.ZipFile(file).namelist() if zipfile.is_zipfile(file) else []
            if names and not any(name.endswith("data.pkl") for name in names):
                raise DataError.unreadable(path, "a zip archive that torch did not write")
            file.seek(0)
            return _plain(_load(file))
    except (pickle.UnpicklingError, AttributeError, ImportError, LookupError, TypeError) as error:
        named = _NAMED.search(str(error))
        name = next(filter(None, named.groups()), None) if named else None
        why = f"it has objects of {name}, and only plain data is read" if name else f"damaged ({error!s:.100})"
        raise DataError.unreadable(path, why, _HINT if name else None) from error
    except (EOFError, MemoryError, OverflowError, RuntimeError, ValueError, zipfile.BadZipFile) as error:
        why = str(error).partition(". ")[0]  # torch goes on with its own file and line
        raise DataError.unreadable(path, f"damaged ({why:.100})") from error


def _load(file: BinaryIO) -> Any:
    is_torch = file.read(len(_ZIP)) == _ZIP
    file.seek(0)
    if not is_torch:
        return _Unpickler(file).load()
    with needs("train"):
        import torch
    with torch.serialization.safe_globals([(known, name) for name, known in _known().items()]):
        return torch.load(file, map_location="cpu", weights_only=True)


def _plain(value: Any) -> Any:
    """``value`` without objects of torch, tensordict and verl."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return value if value and type(value[0]) in (int, float, str) else [_plain(inner) for inner in value]
    if isinstance(value, _DataProto):
        tensors, columns, facts = value.state
        batch = _load(io.BytesIO(tensors)) if isinstance(tensors, bytes) else _of_names(tensors)
        return {"batch": _plain(batch), "non_tensor_batch": columns, "meta_info": facts}
    if isinstance(value, _Column):
        inner = value.state["tensordicts"] if "tensordicts" in value.state else value.state["non_tensordict"]["data"]
        return _plain(inner)
    if hasattr(value, "is_nested"):
        if value.is_nested:
            return [_plain(part) for part in value.unbind()]
        return (value.float() if str(value.dtype) == "torch.bfloat16" else value).detach().numpy()
    return value


def _consolidated(metadata: Any, storage: Any) -> dict[str, Any]:
    """The tensors of a TensorDict that is one buffer."""
    data = storage.numpy().tobytes()
    leaves = metadata["leaves"]
    if nested := next(
        (name for name in (*metadata["non_tensors"], *leaves) if name not in leaves or "<" in name), None
    ):
        raise TypeError(f"type {nested}")
    return {
        name: _array(dtype.removeprefix("torch."), shape, data[start:stop])
        for name, (dtype, shape, start, stop, *_) in leaves.items()
    }


def _of_names(tensors: Any) -> dict[str, Any]:
    """``serialize_tensordict`` of verl."""
    return {
        name: _array(*value) if len(value) == 3 else [_array(*part) for part in value[1]]
        for name, value in (tensors[2] if tensors is not None else {}).items()
    }


def _of_skyrl(value: Any) -> Any:
    """``_serialize_tensor`` of SkyRL, and its lists of tensors."""
    if value["format"] == "tensor_list":
        return [_of_skyrl(item) for item in value["items"]]
    if value["format"] == "torch":
        return _load(io.BytesIO(value["data"]))
    return _array(value["dtype"], value["shape"], value["data"])


def _array(dtype: str, shape: Any, data: Any) -> Any:
    """An array of numbers of a type of NumPy's or torch's."""
    if dtype == "bfloat16":  # the upper half of a float32
        words = np.frombuffer(bytes(data), np.uint16).astype(np.uint32) << 16
        return words.view(np.float32).reshape(tuple(shape))
    kind = np.dtype(dtype)
    if kind.kind not in "biuf":
        raise TypeError(f"type {dtype}")
    size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    return np.frombuffer(bytes(data), kind, offset=0)[: size // kind.itemsize].reshape(tuple(shape))

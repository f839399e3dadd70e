"""Parameters in the safetensors format, with exact dtypes.

The format is documented at https://github.com/huggingface/safetensors: eight bytes with the length
of a JSON header, the header, and the bytes of the tensors. It is written here because the NumPy
part of the package reads neither float8 nor int4, and its lower level changes between versions.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxmp import _core
from jaxmp._core import PyTree
from jaxmp.checkpoint import _nnx_nodes
from jaxmp.checkpoint._handler import placement
from jaxmp.errors import CheckpointError

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
_NAMES = {name: key for key, name in _DTYPES.items()}
# Entry of the header that is not a tensor.
_METADATA = "__metadata__"
_LARGEST_HEADER = 100_000_000
_ALIGNMENT = 8


def save_safetensors(
    path: str | os.PathLike[str], params: PyTree, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes parameters to a file in the safetensors format.

    Names are paths with dots, as in `block.dense.kernel`. Master parameters are written with
    `save_safetensors(path, jaxmp.get_master_params(state))`.

    Args:
      path: the file, which is replaced at once when it is complete.
      params: a pytree of arrays, or an NNX module.
      metadata: strings to store in the header.

    Raises:
      CheckpointError: for a dtype that the format does not have, for repeated names, for metadata
        that are not strings, and if the file cannot be written.

    Example:
      >>> save_safetensors("params.safetensors", {"w": jnp.ones(2, jnp.bfloat16)})
      >>> load_safetensors("params.safetensors")["w"].dtype
      dtype(bfloat16)
    """
    arrays: dict[str, np.ndarray] = {}
    for name, value in _named_leaves(params):
        if name in arrays:
            raise CheckpointError(f"Two parameters have the name {name!r} in safetensors.")
        if name == _METADATA:
            raise CheckpointError(f"Rename the parameter {name!r}: safetensors has no such tensor.")
        try:
            arrays[name] = np.asarray(value)
        except TypeError as error:  # PRNG keys
            raise CheckpointError(f"Parameter {name!r} cannot be written: {error}") from error
        if arrays[name].dtype.name not in _NAMES:
            raise CheckpointError(
                f"Parameter {name!r} is {arrays[name].dtype.name}, which safetensors does not "
                f"have. It has: {', '.join(_NAMES)}."
            )
    header: dict[str, Any] = {_METADATA: _checked_metadata(metadata)} if metadata else {}
    offset = 0
    # The safetensors package requires tensors ordered by element size, for alignment.
    order = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    for name in order:
        array = arrays[name]
        header[name] = {
            "dtype": _NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    temporary = Path(f"{os.fspath(path)}.tmp-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                file.write(np.ascontiguousarray(arrays[name]).tobytes())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise CheckpointError(
            f"{path} cannot be written: {error}. Its directory must exist, and have space: "
            f"os.makedirs({str(temporary.parent)!r}, exist_ok=True)."
        ) from error


def _checked_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """Returns a copy of metadata; refuses values with which no program reads the file."""
    rows = metadata.items() if isinstance(metadata, Mapping) else [(metadata, metadata)]
    if not all(isinstance(name, str) and isinstance(value, str) for name, value in rows):
        raise CheckpointError(
            f"metadata={metadata!r} must map strings to strings, such as {{'step': '100'}}."
        )
    return dict(metadata)


def load_safetensors(path: str | os.PathLike[str], like: PyTree | None = None) -> PyTree:
    """Reads parameters from a file in the safetensors format.

    Args:
      path: the file; or the index of several, such as `model.safetensors.index.json`, whose
        parameters are read one after the other.
      like: a pytree of arrays or shapes with the same names, or an NNX module, which is updated in
        place. Arrays are placed as its leaves are. None: nested dicts, by the dots in the names.

    Returns:
      A tree like `like`, with the dtypes of the file. Leaves that are NumPy arrays in `like`, and
      arrays of 64 bits if JAX's 64-bit mode is off, are NumPy arrays.

    Raises:
      CheckpointError: for a missing or damaged file; and naming the first parameter that is
        missing, or has another shape or dtype than in `like`. Nothing is cast.

    Example:
      >>> save_safetensors("model.safetensors", {"dense": {"kernel": jnp.ones((2, 3))}})
      >>> like = {"dense": {"kernel": jax.ShapeDtypeStruct((2, 3), jnp.float32)}}
      >>> load_safetensors("model.safetensors", like)["dense"]["kernel"].shape
      (2, 3)
    """
    try:
        arrays = _read(Path(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if like is None:
        _check_nested(path, arrays)
        placed = {name: _placed(x, None) for name, x in arrays.items()}
        return ocp.tree.from_flat_dict(placed, sep=".")
    placed = []
    for name, value in _named_leaves(like):
        array = arrays.get(name)
        if array is None:
            raise CheckpointError(f"{path} has no parameter {name!r}.")
        if array.shape != np.shape(value) or array.dtype != value.dtype:
            raise CheckpointError(
                f"Parameter {name!r} is {array.dtype.name}{list(array.shape)} in {path} and "
                f"{np.dtype(value.dtype).name}{list(np.shape(value))} in `like`. Nothing is cast: "
                "load it without `like`, and cast it with recipe.cast_params(params)."
            )
        placed.append(_placed(array, value))
    more = set(arrays) - {name for name, _ in _named_leaves(like)}
    if more:
        raise CheckpointError(
            f"{path} has {len(more)} parameters that `like` does not have, such as {min(more)!r}."
        )
    if _nnx_nodes.is_node(like):
        treedef = jax.tree.structure(_nnx_nodes.pure_state(like))
        return _nnx_nodes.update(like, treedef.unflatten(placed))
    return jax.tree.structure(like).unflatten(placed)


def _check_nested(path: str | os.PathLike[str], names: Collection[str]) -> None:
    """Refuses names that nested dicts cannot have, because one continues another."""
    dicts = {name[:end] for name in names for end, letter in enumerate(name) if letter == "."}
    for name in dicts.intersection(names):
        raise CheckpointError(
            f"{path} has a parameter {name!r}, and others whose names continue it, which nested "
            "dicts cannot have. Read a flat dict: "
            f"safetensors.numpy.load_file({os.fspath(path)!r})."
        )


def _placed(array: np.ndarray, value: object) -> Any:
    """Returns a JAX array; a NumPy array if `value` is one, or if JAX would convert to 32 bits."""
    is_narrowed = jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype
    # The array is a part of the mapped file, which may change.
    array = array.copy()
    if is_narrowed or isinstance(value, (np.ndarray, np.generic)):
        return array
    return jax.device_put(array, placement(value))


def _named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    tree = _nnx_nodes.pure_state(tree) if _nnx_nodes.is_node(tree) else tree
    rows = _core.leaves_with_path(tree)
    return [("/".join(names).replace("/", "."), leaf) for names, leaf in rows]


def _read(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a file, or of all files that an index lists, mapped into memory."""
    if path.suffix != ".json":
        return _read_file(path)
    try:
        files = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not an index of safetensors files, with a `weight_map` from the name of "
            f"each parameter to its file: {error!r}."
        ) from error
    contents = {name: _read_file(path.parent / name) for name in dict.fromkeys(files.values())}
    for name, file in files.items():
        if name not in contents[file]:
            raise CheckpointError(f"{path} lists {name!r} in {file}, which does not contain it.")
    return {name: contents[file][name] for name, file in files.items()}


def _read_file(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LARGEST_HEADER:
                raise ValueError(f"its header would have {length:,} bytes")
            header = json.loads(file.read(length))
            # Pages of a mapped file are read when a parameter is used, and can be dropped again.
            is_empty = file.tell() == path.stat().st_size
            data = b"" if is_empty else np.memmap(file, np.uint8, "r", offset=file.tell())
        header.pop(_METADATA, None)
        return {name: _array(name, row, data) for name, row in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not an intact safetensors file: {error}.") from error


def _array(name: str, row: dict[str, Any], data: bytes | np.ndarray) -> np.ndarray:
    start, end = row["data_offsets"]
    dtype = jnp.dtype(_DTYPES[row["dtype"]])
    count = int(np.prod(row["shape"], dtype=np.int64))
    if not 0 <= start <= end <= len(data) or end - start != count * dtype.itemsize:
        raise ValueError(f"the data of {name!r} is truncated")
    return np.frombuffer(data, dtype, count, start).reshape(row["shape"])

"""Checksums of leaves, which do not depend on the mesh, and of files.

The checksum of a leaf is a sum over its elements of a hash of (bits, global index). Integer sums
modulo 2**32 can be taken in any order, so each device sums its own part, and the total is the same
for every sharding. For a fixed index the hash is a bijection of the bits: one changed element
always changes the sum.
"""

from __future__ import annotations

import functools
import math
import zlib
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax import lax
from jax.experimental import multihost_utils

from jaxmp._core._typing import Array

_UINT32 = 2**32
# Smaller parts are summed on the host: compiling a program for each of their shapes takes longer.
_HOST_ELEMENTS = 2**15
_SUB_BYTE = ("int2", "int4", "uint2", "uint4")
_FILE_THREADS = 8
_READ_BYTES = 2**22

# Two sums of uint32 over the elements that are on this process, and 1 if one of them is not finite.
_Parts = list[Any]


def start_checksums(leaves: list[Any]) -> list[_Parts]:
    """Starts to compute checksums; devices continue after this function has returned.

    Args:
      leaves: arrays of JAX or NumPy, without PRNG keys.

    Returns:
      For each leaf the sums of its parts, for `finish_checksums`. They stay valid when the leaves
      are donated.
    """
    return [_start(leaf) for leaf in leaves]


def finish_checksums(parts: list[_Parts]) -> list[tuple[str, bool]]:
    """Returns for each leaf its checksum as 16 hexadecimal digits, and whether it is finite.

    The results are the same on all processes.
    """
    sums = np.zeros((len(parts), 3), np.uint32)
    for row, leaf_parts in zip(sums, parts, strict=True):
        for part in leaf_parts:
            row += np.asarray(part)
    if jax.process_count() > 1 and len(parts):
        sums = np.asarray(multihost_utils.process_allgather(sums)).sum(axis=0, dtype=np.uint32)
    return [(f"{first:08x}{second:08x}", not bad) for first, second, bad in sums.tolist()]


def checksums(leaves: list[Any]) -> list[str]:
    """Returns the checksums of leaves; on several processes, all call it with the same leaves."""
    return [checksum for checksum, _ in finish_checksums(start_checksums(leaves))]


def _start(leaf: Array | np.ndarray) -> _Parts:
    if not isinstance(leaf, jax.Array):
        # Every process has the whole array.
        array = np.asarray(leaf)
        part = _sum_part(array, (0,) * array.ndim, array.shape)
        return [part] if jax.process_index() == 0 else []
    replicated = leaf.is_fully_addressable and jax.process_count() > 1
    if replicated and jax.process_index() != 0:
        return []
    return [
        _sum_part(shard.data, tuple(index.start or 0 for index in shard.index), leaf.shape)
        for shard in leaf.addressable_shards
        if shard.replica_id == 0
    ]


def _sum_part(part: Array | np.ndarray, start: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    strides = tuple(math.prod(shape[axis + 1 :]) % _UINT32 for axis in range(len(shape)))
    offset = np.uint32(sum(a * b for a, b in zip(start, strides, strict=True)) % _UINT32)
    is_narrowed = jax.dtypes.canonicalize_dtype(part.dtype) != part.dtype
    if part.size > _HOST_ELEMENTS and not is_narrowed:
        return _device_sum(part, offset, strides)
    # NumPy warns where an integer scalar overflows.
    return _sum_words(np.atleast_1d(np.asarray(part)), offset, strides or (1,), np)


@functools.partial(jax.jit, static_argnums=2)
def _device_sum(part: Array | np.ndarray, offset: np.uint32, strides: tuple[int, ...]) -> Array:
    return _sum_words(part, offset, strides, jnp)


def _sum_words(part: Any, offset: Any, strides: tuple[int, ...], numpy: ModuleType) -> Any:
    """Sums two hashes of each word and its index, with 32-bit arithmetic that wraps around.

    Args:
      part: a part of a leaf.
      offset: the index of its first element in the leaf.
      strides: the distances between elements of the leaf along each axis.
      numpy: `numpy` or `jax.numpy`.
    """
    index = numpy.full(part.shape, offset)
    for axis, stride in enumerate(strides):
        count = numpy.arange(part.shape[axis], dtype=np.uint32) * np.uint32(stride)
        index = index + numpy.expand_dims(count, [i for i in range(part.ndim) if i != axis])
    first, second = [], []
    for position, word in enumerate(_words(part, numpy)):
        shift = np.uint32(position * 0x85EBCA77 % _UINT32)
        place = index * np.uint32(2 * 0x85EBCA77 % _UINT32) + shift
        mixed = word * np.uint32(0x9E3779B1) + place
        mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(0x2C1B3C6D)
        mixed = mixed ^ (mixed >> np.uint32(12))
        first.append(numpy.sum(mixed, dtype=np.uint32))
        mixed = (mixed + place) * np.uint32(0x297A2D39)
        second.append(numpy.sum(mixed ^ (mixed >> np.uint32(15)), dtype=np.uint32))
    add = lambda sums: functools.reduce(numpy.add, sums)
    is_float = jnp.issubdtype(part.dtype, jnp.inexact)
    is_bad = numpy.any(~numpy.isfinite(part)) if is_float else numpy.zeros((), bool)
    return numpy.stack([add(first), add(second), is_bad.astype(np.uint32)])


def _words(part: Any, numpy: ModuleType) -> list[Any]:
    """Returns the bits of each element as uint32: two words of 8 bytes, one of any other size."""
    if numpy.iscomplexobj(part):
        return [word for half in (part.real, part.imag) for word in _words(half, numpy)]
    if part.dtype == np.bool_ or part.dtype.name in _SUB_BYTE:
        return [part.astype(np.int8).astype(np.uint32)]
    unsigned = np.dtype(f"u{min(part.dtype.itemsize, 4)}")
    if numpy is np:
        flat = np.ascontiguousarray(part).reshape(-1).view(unsigned)
        shape = part.shape if part.dtype.itemsize < 8 else (*part.shape, 2)
        bits = flat.reshape(shape).astype(np.uint32)
    else:
        bits = lax.bitcast_convert_type(part, unsigned).astype(np.uint32)
    return [bits] if part.dtype.itemsize < 8 else [bits[..., 0], bits[..., 1]]


# ---------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------


def file_checksums(directory: epath.Path, names: list[str]) -> dict[str, tuple[int, str]]:
    """Returns the size in bytes and the CRC-32 of each file; files that are missing are left out.

    Args:
      directory: the directory that `names` are relative to.
      names: paths with forward slashes.
    """
    with ThreadPoolExecutor(_FILE_THREADS) as threads:
        rows = threads.map(lambda name: _file_checksum(directory / name), names)
        return {name: row for name, row in zip(names, rows, strict=True) if row is not None}


def _file_checksum(path: epath.Path) -> tuple[int, str] | None:
    size = value = 0
    try:
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                size += len(block)
                value = zlib.crc32(block, value)
    except FileNotFoundError:
        return None
    return size, f"{value:08x}"

"""Chips on which programs run: memory, bandwidth, formats and peaks, each from a data sheet."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax

from jaxmp._core import _compat
from jaxmp._core._messages import did_you_mean
from jaxmp.errors import TargetError

Capability: TypeAlias = tuple[int, int]

# From NVIDIA's documentation of CUDA and cuDNN. 6.0 is the P100, 7.0 the V100, 7.5 the T4, 8.0 the
# A100, 8.6 the RTX 3090, 8.9 the L4, L40S and RTX 4090, 9.0 the H100 and 10.0 the B200.
TENSOR_CORES: Capability = (7, 0)
BFLOAT16_MATMULS: Capability = (8, 0)
FUSED_ATTENTION: Capability = (8, 0)
FP8_MATMULS: Capability = (8, 9)
LARGE_ATTENTION_HEADS: Capability = (9, 0)
MX_MATMULS: Capability = (10, 0)


class Multiprocessors(NamedTuple):
    """Properties of an NVIDIA GPU that XLA's compiler reads."""

    # Streaming multiprocessors, and the FP32 lanes of each.
    cores: int
    lanes: int
    clock: float  # GHz, the boost clock
    l2: int  # bytes


class Target(NamedTuple):
    """Chip for which programs are compiled and planned.

    Args:
      name: the name that users write, such as "h200".
      kinds: names of the device in JAX, such as "NVIDIA H200 141GB HBM3e".
      platform: "gpu" for NVIDIA's GPUs, "tpu", "cpu", "rocm" or "neuron".
      memory: bytes of each JAX device.
      bandwidth: bytes per second between each JAX device and its memory.
      peak: dtype -> FLOP/s of dense matmuls with FP32 sums (int8: int32 sums) of each JAX device,
        for the formats that the chip multiplies natively, and "tf32", in which NVIDIA's GPUs
        multiply FP32 by default. TPUs multiply FP32 in one or more passes of bfloat16.
      link: bytes per second between each JAX device and others of its domain, in both directions
        together; 0 for none.
      source: address of the data sheet; memory and bandwidth of a GPU may be those that CUDA
        reports instead.
      domain: number of JAX devices that such links join: those of a host, a rack or a pod.
      network: bytes per second between each JAX device and other domains, in both directions
        together; 0 if unknown.
      uncompiled: the reason why programs cannot be compiled for it; "" if they can.
      capability: compute capability of an NVIDIA GPU.
      multiprocessors: those of an NVIDIA GPU that XLA compiles for.
    """

    name: str
    kinds: tuple[str, ...]
    platform: str
    memory: int
    bandwidth: float
    peak: Mapping[str, float]
    link: float
    source: str
    domain: int = 1
    network: float = 0.0
    uncompiled: str = ""
    capability: Capability | None = None
    multiprocessors: Multiprocessors | None = None

    def __hash__(self) -> int:
        return hash((self.name, self.memory))

    @property
    def kind(self) -> str:
        """The name by which messages call the chip."""
        return self.kinds[0]

    @property
    def native(self) -> tuple[str, ...]:
        """The dtypes that the chip multiplies natively."""
        return tuple(dtype for dtype in self.peak if dtype != "tf32")

    @property
    def rounded_fp32(self) -> str:
        """The format to which matmuls of the default precision round FP32 operands."""
        if self.platform == "tpu":
            return "bfloat16"
        return "tf32" if "tf32" in self.peak else "float32"

    @property
    def usable(self) -> int:
        """The bytes of each device that JAX allocates: by default 75 % of the memory of a GPU."""
        return int(self.memory * usable_share()) if self.preallocates else self.memory

    @property
    def preallocates(self) -> bool:
        """True if JAX allocates a share of the memory when it starts."""
        return self.platform in ("gpu", "rocm")


# Name of a chip, path of a TOML file, or a mapping of the keys of a chip.
TargetLike: TypeAlias = str | Path | Mapping[str, Any] | Target

_FILE = Path(__file__).with_name("chips.toml")
_FORMATS = {"half": ("bfloat16", "float16"), "fp8": ("float8_e4m3fn", "float8_e5m2")}
_REQUIRED = ("memory", "bandwidth", "peak", "link", "source")
_OPTIONAL = {"kinds": [], "platform": "gpu", "domain": 1, "network": 0.0, "uncompiled": ""}

# Links in bytes per second are between these; a smaller number is one of GB/s.
_SLOWEST, _FASTEST = 1e6, 1e14
# Key -> least and largest value, between which those in other units do not lie, and the unit.
_NUMBERS = {
    "memory": (1e8, 1e14, "bytes, such as 96e9"),
    "bandwidth": (1e9, 1e14, "bytes per second, such as 3.35e12"),
    "link": (_SLOWEST, _FASTEST, "bytes per second in both directions, such as 900e9, or 0"),
    "network": (_SLOWEST, _FASTEST, "bytes per second in both directions, such as 100e9, or 0"),
    "domain": (1, 1e6, "devices, such as 8"),
    "peak": (0.01, 1e6, "TFLOP/s, such as peak = { half = 989, fp8 = 1979 }"),
    "multiprocessors": (0.1, 1e10, "multiprocessors, lanes of each, GHz, or bytes of the L2 cache"),
}


# Tools read the table of chips many times.
@functools.cache
def targets() -> dict[str, Target]:
    """Returns name -> chip for the chips of `chips.toml`."""
    return {name: _target(name, _complete(name, _tables())) for name in _tables()}


# The file does not change while the package is imported.
@functools.cache
def _tables() -> dict[str, dict[str, Any]]:
    return tomllib.loads(_FILE.read_text("utf-8"))


def _complete(name: str, tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the keys of a chip, with those of the chip that it is like."""
    like = tables[name].get("like")
    return {**(_complete(like, tables) if like else {}), **tables[name]}


def _target(name: str, keys: Mapping[str, Any]) -> Target:
    """Makes a chip from the keys of its table."""
    rates = ((_FORMATS.get(key, (key,)), rate) for key, rate in keys["peak"].items())
    sizes, capability = keys.get("multiprocessors"), keys.get("capability")
    options: dict[str, Any] = {key: keys.get(key, value) for key, value in _OPTIONAL.items()}
    options["kinds"] = tuple(options["kinds"]) or (name,)
    return Target(
        name=name,
        memory=int(keys["memory"]),
        bandwidth=float(keys["bandwidth"]),
        peak={dtype: rate * 1e12 for dtypes, rate in rates for dtype in dtypes},
        link=float(keys["link"]),
        source=keys["source"],
        capability=(capability[0], capability[1]) if capability else None,
        multiprocessors=Multiprocessors(**sizes) if sizes else None,
        **options,
    )


def find_target(kind: str) -> Target | None:
    """Returns the chip of a device kind such as "NVIDIA A100-SXM4-80GB"; None if it is unknown.

    Variants with other clocks or memory, slices ("NVIDIA A100-SXM4-80GB MIG 1g.10gb") and forms
    for laptops are other chips.
    """
    return next((chip for chip in targets().values() if kind in chip.kinds), None)


def possible_targets(kind: str, memory: int = 0, clock: float = 0.0) -> list[Target]:
    """Returns the chip of a device kind, or those whose kinds continue it.

    Args:
      kind: name of the device. "NVIDIA A100" continues as "NVIDIA A100-SXM4-80GB", and others.
      memory: its bytes, as the driver reports them; 0 if unknown.
      clock: its largest clock in GHz, as the driver reports it; 0 if unknown.
    """
    known, parts = find_target(kind), re.split("[ -]", kind)
    if known or len(parts) == 1:
        return [known] if known else []

    def may_be(chip: Target) -> bool:
        # The driver and data sheets count reserved memory and round clocks differently.
        has_memory = not memory or 0.9 <= memory / chip.memory <= 1.1
        sizes = chip.multiprocessors
        has_clock = not clock or sizes is None or abs(clock - sizes.clock) <= 0.02
        continues = any(re.split("[ -]", each)[: len(parts)] == parts for each in chip.kinds)
        return continues and has_memory and has_clock

    return list(filter(may_be, targets().values()))


def differences(chips: Iterable[Target]) -> str:
    """Returns text such as "one of 'h100' (84.9 GB, 3,352 GB/s, ...), 'h100-pcie' (...)"."""
    texts = []
    for chip in chips:
        peaks = max(chip.peak.get(dtype, 0) for dtype in ("bfloat16", "float16")) / 1e12
        facts = f"{chip.memory / 1e9:.1f} GB at {chip.bandwidth / 1e9:,.0f} GB/s"
        texts.append(f"{chip.name!r} ({facts}, {peaks:,.0f} TFLOP/s, {chip.kind})")
    return f"one of {', '.join(texts)}"


def usable_share(environment: Mapping[str, str] = os.environ) -> float:
    """Returns the share of a GPU's memory that JAX allocates: 0.75, or that of the environment.

    Raises:
      TargetError: if the environment names no share.
    """
    variable = share_variable(environment)
    text = environment.get(variable) or "0.75"
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if 0 < share <= 1:
        return share
    raise TargetError(f"{variable}={text!r} is not a share of the memory: write 0.95.")


def share_variable(environment: Mapping[str, str]) -> str:
    """Returns the environment variable that sets this share, of the two that JAX reads."""
    new = "XLA_CLIENT_MEM_FRACTION"
    old = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    return new if environment.get(new) and not environment.get(old) else old


def target_memory() -> int | None:
    """Returns the bytes of memory of each device of the compile target; None if unknown."""
    chip, local = _compat.current_context().chip, jax.local_devices()[0]
    if chip is not None:
        return chip.memory
    if _compat.target() != _compat.platform_of(local.platform):
        return None
    known = find_target(local.device_kind)
    return known.memory if known else (local.memory_stats() or {}).get("bytes_limit")


def get_target(chip: TargetLike) -> Target:
    """Returns a chip by its name, or one that the user describes.

    Args:
      chip: the name of a chip of the table, such as "h200"; a path of a TOML file with the keys of
        `chips.toml`; or a mapping of these keys, such as `{"like": "h100", "memory": 96e9}`.

    Raises:
      TargetError: if there is no chip of this name, or a description lacks a key or has others.
    """
    if isinstance(chip, Target):
        return chip
    if isinstance(chip, str) and chip in targets():
        return targets()[chip]
    if isinstance(chip, Mapping):
        return _described("the described chip", chip)
    if isinstance(chip, Path) or (isinstance(chip, str) and chip.endswith(".toml")):
        try:
            keys = tomllib.loads(Path(chip).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise TargetError(f"target={str(chip)!r} cannot be read: {error}.") from error
        sections = {name: value for name, value in keys.items() if _is_section(name, value)}
        if sections and len(keys) > 1:
            raise TargetError(
                f"target={str(chip)!r} has {', '.join(keys)}. A file describes one chip: write its "
                "keys without a section, or one section with the name of the chip."
            )
        name, keys = next(iter(sections.items()), (Path(chip).stem, keys))
        return _described(name, keys)
    lower = str(chip).lower()
    if lower in targets():
        raise TargetError(f"target={chip!r}: write the chip in lower case: target={lower!r}.")
    if like := possible_targets(str(chip)):
        raise TargetError(f"target={chip!r} is a device: write its chip, {differences(like)}.")
    known = ", ".join(targets())
    raise TargetError(
        f"target={chip!r} is not a chip that jaxmp knows.{did_you_mean(lower, targets())} Describe "
        "another one: target={'like': 'h100', 'memory': 96e9}, or target='mychip.toml', a file "
        f'with the lines\n    like = "h100"\n    memory = 96e9\nKnown chips: {known}.'
    )


def with_links(chip: Target, links: Mapping[str, float] | None) -> Target:
    """Returns a chip with other links.

    Args:
      chip: the chip.
      links: "within" or "between" hosts -> bytes per second of each device, in both directions.

    Raises:
      TargetError: if there is another key, or a value that is not in bytes per second.
    """
    fields = {"within": "link", "between": "network"}
    items = {"": links} if not isinstance(links, Mapping | None) else links or {}
    for key, value in items.items():
        if key not in fields or not is_between(value, _SLOWEST, _FASTEST):
            raise TargetError(
                f"links={links!r}: write the bytes per second of each device within "
                "or between hosts, in both directions: links={'within': 900e9, 'between': 100e9}, "
                "or --link within=900e9,between=100e9."
            )
    return chip._replace(**{fields[key]: float(value) for key, value in items.items()})


def is_between(value: object, least: float, most: float) -> bool:
    """Returns True for a number in a range. A boolean does not count as one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return least <= value <= most


def _described(name: str, keys: Mapping[str, Any]) -> Target:
    """Makes the chip that a user describes.

    Raises:
      TargetError: if a key is missing, unknown, or has a value of another type.
    """
    name = str(keys.get("name", name))
    known = {*_REQUIRED, *_OPTIONAL, "name", "like", "capability", "multiprocessors"} - {"source"}
    for key in keys.keys() - known:
        allowed = ", ".join(sorted(known))
        hint = did_you_mean(key, known)
        raise TargetError(f"The chip {name!r} has the key {key!r}.{hint} Allowed: {allowed}.")
    like = keys.get("like")
    if like is not None and (not isinstance(like, str) or like.endswith(".toml")):
        raise TargetError(f"The chip {name!r} has like = {like!r}. Name a chip, such as 'h100'.")
    base = {} if like is None else _complete(get_target(like).name, _tables())
    whole = {"source": "", "kinds": [name], **base, **keys}
    for key in _REQUIRED:
        if key not in whole:
            raise TargetError(
                f"The chip {name!r} has no {key!r}. Write it, or name a chip of the table that it "
                "is like: {'like': 'h100', 'memory': 96e9}."
            )
    for key, value, allowed in _wrong(whole):
        raise TargetError(f"The chip {name!r} has {key} = {value!r}. It is {allowed}.")
    platform = whole.get("platform", "gpu")
    if platform == "gpu" and "uncompiled" not in keys:
        capability = tuple(whole.get("capability", ()))
        alike = (chip.uncompiled for chip in targets().values() if chip.capability == capability)
        lacks = not {"capability", "multiprocessors"} <= whole.keys()
        why = "its description has no capability and multiprocessors, or a chip that it is like"
        whole["uncompiled"] = next(alike, "") or why * lacks
    if platform == "tpu" and name not in targets():
        whole["uncompiled"] = f"libtpu compiles for TPUs of the table only; name it {like!r}"
    return _target(name, whole)


def _wrong(keys: Mapping[str, Any]) -> Iterator[tuple[str, object, str]]:
    """Yields the keys of a description that have a wrong value, the value, and what is allowed."""
    peak, sizes = keys["peak"], keys.get("multiprocessors", {})
    formats = [*_FORMATS, *dict.fromkeys(name for chip in targets().values() for name in chip.peak)]
    is_table = isinstance(peak, Mapping) and peak.keys() <= set(formats)
    if not is_table or not peak.keys() & {"half", "bfloat16", "float32"}:
        unit = _NUMBERS["peak"][-1]
        yield "peak", peak, f"a table of {unit}, with half or float32, and of {', '.join(formats)}"
    fields = Multiprocessors._fields
    if sizes and (not isinstance(sizes, Mapping) or sizes.keys() != set(fields)):
        yield "multiprocessors", sizes, f"a table of {', '.join(fields)}, as in {_FILE}"
    tables = ("peak", "multiprocessors")
    numbers = {key: keys[key] for key in _NUMBERS if key in keys and key not in tables}
    numbers |= {f"peak.{key}": value for key, value in peak.items()}
    numbers |= {f"multiprocessors.{key}": value for key, value in sizes.items()}
    for key, value in numbers.items():
        least, most, unit = _NUMBERS[key.partition(".")[0]]
        is_zero = is_between(value, 0, 0) and key in ("link", "network")
        is_whole = key != "domain" or isinstance(value, int)
        if not is_zero and not (is_whole and is_between(value, least, most)):
            yield key, value, f"a number of {unit}"
    compiled = sorted({chip.capability for chip in targets().values() if chip.capability})
    capability, kinds = keys.get("capability"), keys["kinds"]
    is_pair = isinstance(capability, (list, tuple))
    if capability is not None and not (is_pair and tuple(capability) in compiled):
        yield "capability", capability, f"one of {', '.join(str([*each]) for each in compiled)}"
    platforms = dict.fromkeys(chip.platform for chip in targets().values())
    if keys.get("platform", "gpu") not in platforms:
        yield "platform", keys["platform"], f"one of {', '.join(platforms)}"
    if not isinstance(kinds, (list, tuple)) or not all(isinstance(kind, str) for kind in kinds):
        yield "kinds", kinds, "a list of names of devices, such as ['NVIDIA H100 PCIe']"
    if not isinstance(keys.get("uncompiled", ""), str):
        yield "uncompiled", keys["uncompiled"], "the reason why programs cannot be compiled for it"


def _is_section(name: str, value: object) -> bool:
    return isinstance(value, Mapping) and name not in ("peak", "multiprocessors")


@contextlib.contextmanager
def default_target(name: TargetLike) -> Iterator[None]:
    """Sets the chip for which programs are traced in a block, whatever devices this machine has.

    Attention kernels, the dtypes of FP8 matmuls and the layouts of their operands depend on the
    chip. By default it is the one that JAX computes on. The block is required for programs that are
    compiled for another one: by `jax.jit(f).trace(...).lower(lowering_platforms=("cuda",))`, or by
    `jax.export`. The chip is part of the key of jit's cache. `jaxmp.audit` compiles for it, unless
    `target=` names another one.

    Args:
      name: the chip, such as "h200", or its description; see `target` of `jaxmp.audit`.

    Raises:
      TargetError: if there is no chip of this name, or the description is not complete.

    Example:
      >>> dot = jaxmp.fp8.dot_general("current")
      >>> f = jax.jit(lambda x, w: dot(x, w, (((1,), (0,)), ((), ()))))
      >>> x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
      >>> with default_target("h200"):
      ...     lowered = f.trace(x, x).lower(lowering_platforms=("cuda",))
      >>> "f8E4M3FN" in lowered.as_text()
      True
    """
    chip = get_target(name)
    with _compat.context(target=chip.platform, capability=chip.capability, chip=chip):
        yield


# ---------------------------------------------------------------------------
# Compute capabilities
# ---------------------------------------------------------------------------


def unsupported_gpu(first: Capability) -> str:
    """Describes the GPU that is compiled for if its compute capability is below `first`.

    A compute capability that is unknown, as in cross-compilation, counts as sufficient: the audit
    checks the compiled program.

    Returns:
      For example "NVIDIA A100-SXM4-80GB (compute capability 8.0)"; "" if the GPU supports the
      feature, its compute capability is unknown, or the program is not compiled for a GPU.
    """
    if _compat.target() != "gpu":
        return ""
    capability = _compat.target_capability()
    if capability is None or capability >= first:
        return ""
    context = _compat.current_context()
    is_local = context.target is None
    name = jax.local_devices(backend="gpu")[0].device_kind if is_local else "the target GPU"
    name = f"the GPU {context.chip.name!r}" if context.chip else name
    return f"{name} (compute capability {capability_text(capability)})"


def capability_text(capability: Capability) -> str:
    """Formats a compute capability as NVIDIA does: "8.9"."""
    return ".".join(map(str, capability))

"""Times forms of the kernels that quantize a tensor to FP8 and transpose it, on one GPU.

    python benchmarks/fp8_transpose.py --out fp8_transpose.json
    python benchmarks/fp8_transpose.py --toy      # small, on any machine
    python benchmarks/fp8_transpose.py --count    # conversions, compiled for an H200; needs no GPU

cuBLAS reads FP8 operands with the contracted axis last, so that each tensor of a linear layer is
needed in FP8 as it is and transposed. Tensors are those of eight layers of Llama 3 8B (`w5` in
benchmarks/workload_sizes.py). Forms, of which all compute the same bits:

    today      one kernel writes both, as XLA compiles `values, values.T`
    elements   the same, with 32 bits for each element in shared memory, so that XLA has no second
               loop that computes all elements again
    tiles      one kernel writes both in words of four values, which it computes twice
    bytes      a kernel quantizes, and a second one transposes bytes
    words      a kernel quantizes, and a second one transposes words of four tokens

`--count` prints the bytes that the kernels of a form read and write; and from their PTX, how often
they convert each element to FP8, which is how often they compute it, and the bits of each store.
"""

import math
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fp8_linear import seconds
from gpu_record import environment, failure, gpu_state, rotated, write_json
from jaxmp._core import _compat
from jaxmp._tools.audit._compile import compile_for
from jaxmp._tools.audit._hlo import Program
from jaxmp._tools.audit._hlo_kernels import accessed, kernels
from jaxmp._tools.audit._trace import trace
from jaxmp.fp8 import _operands
from result_file import parser_of
from workload_sizes import WORKLOADS

ROUNDS, REPEATS = 5, 20
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
Pair = tuple[jax.Array, jax.Array]

# ---------------------------------------------------------------------------
# Tensors
# ---------------------------------------------------------------------------


class Tensor(NamedTuple):
    """Arrays of (shape, dtype), from which `compute` makes a matrix, and its FP8 format."""

    arrays: tuple[tuple[tuple[int, ...], Any], ...]
    compute: Callable[..., jax.Array]
    dtype: Any


def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns the input of the last layer of a gated MLP, of the shape of both arguments."""
    return jax.nn.silu(gate) * up


def normalized(x: jax.Array, factors: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the rows of x, times one factor each, times the scale of a norm."""
    return (x.astype(jnp.float32) * factors * scale).astype(x.dtype)


def tensors(tokens: int, width: int, hidden: int) -> dict[str, Tensor]:
    """Returns the tensors that are quantized."""
    narrow, wide = ((tokens, width), jnp.bfloat16), ((tokens, hidden), jnp.bfloat16)
    norm = narrow, ((tokens, 1), jnp.float32), ((width,), jnp.float32)
    return {
        "gradient": Tensor((narrow,), lambda x: x, E5M2),
        "input of a norm": Tensor(norm, normalized, E4M3),
        "input of mlp_down": Tensor((wide, wide), gated, E4M3),
        "kernel": Tensor((((width, hidden), jnp.float32),), lambda x: x, E4M3),
    }


# ---------------------------------------------------------------------------
# Forms
# ---------------------------------------------------------------------------


def row_major_transpose(x: jax.Array) -> jax.Array:
    """Transposes a matrix where it is written; XLA would transpose what it is computed from."""
    return _compat.row_major(_compat.row_major(x).T)


def words_of_rows(values: jax.Array) -> jax.Array:
    """Packs four FP8 values below each other into a word: [4 n, k] becomes uint32 [n, k]."""
    rows = lax.bitcast_convert_type(values, jnp.uint8).reshape(-1, 4, values.shape[1])
    return _packed([rows[:, index] for index in range(4)])


def words_of_columns(values: jax.Array) -> jax.Array:
    """Packs four FP8 values beside each other into a word: [n, 4 k] becomes uint32 [n, k]."""
    columns = lax.bitcast_convert_type(values, jnp.uint8).reshape(values.shape[0], -1, 4)
    return _packed([columns[..., index] for index in range(4)])


def _packed(parts: list[jax.Array]) -> jax.Array:
    wide = [part.astype(jnp.uint32) << (8 * index) for index, part in enumerate(parts)]
    return wide[0] | wide[1] | wide[2] | wide[3]


def unpacked(words: jax.Array, dtype: Any) -> jax.Array:
    """Returns words as FP8 values: uint32 [n, k] becomes [n, 4 k]."""
    return lax.bitcast_convert_type(words, dtype).reshape(words.shape[0], -1)


def today(values: jax.Array) -> Pair:
    return values, values.T


def elements(values: jax.Array) -> Pair:
    wide = lax.bitcast_convert_type(values, jnp.uint8).astype(jnp.uint32)
    narrow = row_major_transpose(wide).astype(jnp.uint8)
    return values, lax.bitcast_convert_type(narrow, values.dtype)


def tiles(values: jax.Array) -> Pair:
    rows = _compat.row_major(words_of_columns(values))
    columns = row_major_transpose(words_of_rows(values))
    return unpacked(rows, values.dtype), unpacked(columns, values.dtype)


def in_bytes(values: jax.Array) -> Pair:
    return today(lax.optimization_barrier(values))


def in_words(values: jax.Array) -> Pair:
    values = lax.optimization_barrier(values)
    return values, unpacked(row_major_transpose(words_of_rows(values)), values.dtype)


FORMS = {
    "today": today,
    "elements": elements,
    "tiles": tiles,
    "bytes": in_bytes,
    "words": in_words,
}


def step(tensor: Tensor, form: Callable[[jax.Array], Pair]) -> Callable[..., Pair]:
    """Returns a function of a scale and the arrays of a tensor."""

    def run(scale: jax.Array, *arrays: jax.Array) -> Pair:
        x = tensor.compute(*arrays)
        values = _operands.quantize(x, scale, tensor.dtype)
        # As jaxmp constrains the values of kernels.
        is_kernel = _compat.target() == "gpu" and x.dtype == jnp.float32
        return form(_compat.row_major(values) if is_kernel else values)

    return run


# ---------------------------------------------------------------------------
# Times
# ---------------------------------------------------------------------------


def timed(name: str, tensor: Tensor) -> dict[str, Any]:
    """Returns the milliseconds of each form, which run in turn in each round.

    A form whose bits are not those of `today` has failed.
    """
    keys = jax.random.split(jax.random.key(0), len(tensor.arrays))
    arrays = (
        jax.random.normal(key, shape, dtype)
        for key, (shape, dtype) in zip(keys, tensor.arrays, strict=True)
    )
    args = jnp.float32(2.0**8), *arrays
    steps = {form: jax.jit(step(tensor, FORMS[form])) for form in FORMS}
    expected = steps["today"](*args)
    row: dict[str, Any] = {"tensor": name, "shape": expected[0].shape, "failed": {}}
    times: dict[str, list[float]] = {form: [] for form in FORMS}
    for index in range(ROUNDS):
        for form in rotated([*FORMS], index):
            if form in row["failed"]:
                continue
            try:
                if not index:
                    check_equal(steps[form](*args), expected)
                times[form].append(seconds(steps[form], args, REPEATS))
            except Exception as error:  # the other forms are still of use
                row["failed"][form] = failure(error)
    medians = {form: statistics.median(found) for form, found in times.items() if found}
    row["milliseconds"] = {form: round(1e3 * median, 4) for form, median in medians.items()}
    return row | {"gpu": gpu_state()}


def check_equal(found: Pair, expected: Pair) -> None:
    """Checks that two pairs have the same bits.

    Raises:
      ValueError: if they have not.
    """
    for ours, theirs in zip(found, expected, strict=True):
        bits = (lax.bitcast_convert_type(each, jnp.uint8) for each in (ours, theirs))
        if not jnp.array_equal(*bits):
            raise ValueError("the form has other bits than `today`")


# ---------------------------------------------------------------------------
# Conversions
# ---------------------------------------------------------------------------


def counted(tensor: Tensor, form: str, folder: Path) -> dict[str, Any]:
    """Compiles a form for an H200, and counts what its kernels do; XLA writes PTX to the folder."""
    arrays = [jax.ShapeDtypeStruct(*each) for each in (((), jnp.float32), *tensor.arrays)]
    with _compat.context(target="gpu", capability=(9, 0)):
        traced = trace(jax.jit(step(tensor, FORMS[form])), tuple(arrays), {})
    program = Program(compile_for("h200", traced).text)
    found = list(kernels(program))
    texts, conversions, widths = ptx(folder), 0.0, set[int]()
    for each in found:
        text = texts[each.instruction.name.replace(".", "_")]
        bits = list(_stored_bits(text))
        written = sum(shape.bytes for shape in each.instruction.shapes)
        conversions += text.count("cvt.rn.satfinite") * written / sum(bits) * 8
        widths |= set(bits)
    return {
        "MB": round(sum(accessed(program, each) for each in found) / 1e6, 1),
        "kernels": len(found),
        "conversions": round(conversions / math.prod(tensor.arrays[0][0]), 2),
        "stores": " ".join(map(str, sorted(widths))),
    }


def ptx(folder: Path) -> dict[str, str]:
    """Returns the text of each kernel that XLA has written, and deletes the files."""
    found = {}
    for path in folder.glob("*.ptx"):
        for text in path.read_text().split(".entry ")[1:]:
            found[text.partition("(")[0]] = text
        path.unlink()
    return found


def _stored_bits(text: str) -> Iterator[int]:
    for vector, bits in re.findall(r"st\.global\.(?:v(\d)\.)?b(\d+)", text):
        yield int(vector or 1) * int(bits)


def main() -> int:
    """Prints and writes the times, or the counts, of all forms; returns 1 if one failed."""
    parser = parser_of(__doc__, tensors(1, 1, 1))
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--count", action="store_true", help="compile, and count conversions")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    if options.count:
        # XLA reads its flags when the first program is compiled.
        flags = f" --xla_dump_to={folder} --xla_dump_emitter_re=.*"
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + flags
    if options.count or options.toy:
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() != "gpu":
        sys.exit("The benchmark requires a GPU. Without one, run it with --toy at small sizes.")
    size = WORKLOADS["w5"]
    sizes = (64, 32, 128) if options.toy else (size.tokens, size.width, size.hidden)
    report: dict[str, Any] = {"environment": environment(jax.devices()[0].device_kind), "rows": []}
    for name in options.only:
        tensor = tensors(*sizes)[name]
        if options.count:
            rows = [
                {"tensor": name, "form": form, **counted(tensor, form, folder)} for form in FORMS
            ]
        else:
            rows = [timed(name, tensor)]
        report["rows"] += rows
        for row in rows:
            print(row, flush=True)
        write_json(options.out, report)
    return int(any(row.get("failed") for row in report["rows"]))


if __name__ == "__main__":
    raise SystemExit(main())

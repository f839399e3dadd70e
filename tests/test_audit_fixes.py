"""Printed fixes, applied to the source of planted programs."""

import ast
import dataclasses
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from findings import the_only
from sources import code_of, line_of, load_module, replace_expression

HEAD = "import jax, jax.numpy as jnp, jaxmp, optax\nfrom jax import lax\nbf = jnp.bfloat16\n"
# The planted programs and their fixes rely on promotion, as user programs do.
pytestmark = pytest.mark.usefixtures("standard_promotion")


class Bare(ast.NodeTransformer):
    """Removes dtypes and casts, so that an expression and its fix are equal."""

    def __init__(self, kept=()):
        self.kept = kept

    def visit_Call(self, node):
        self.generic_visit(node)
        is_cast = isinstance(node.func, ast.Attribute) and node.func.attr == "astype"
        if is_cast and ast.unparse(node.args[0]) not in self.kept:
            return node.func.value
        if ast.unparse(node).startswith("jax.tree.map(lambda x: x,"):
            return node.args[1]
        node.keywords = [k for k in node.keywords if k.arg != "dtype"]
        if not is_cast:
            node.args = [a for a in node.args if ast.unparse(a) not in ("bf", "jnp.float32")]
        return node


def bare(node, kept=()):
    return ast.unparse(Bare(kept).visit(ast.parse(ast.unparse(node), mode="eval")))


def with_fix(source, finding):
    """Returns the source in which each line of code of a fix replaces its expression."""
    place = str(finding.line)
    for line in finding.fix.splitlines():
        named = re.match(r"(?:Start in FP32, at|At) [\w.]+:(\d+)[,:]", line)
        place = named[1] if named else str(finding.line) if line.endswith("FP32:") else place
        if line.startswith("    "):
            source = replaced(source, int(place), line.strip())
    return source


def replaced(source, number, code):
    """Returns the source with the outermost expression of a line that `code` casts replaced."""
    wanted = bare(ast.parse(code, mode="eval").body)
    return replace_expression(source, number, lambda n: bare(n, ("jnp.float32",)) == wanted, code)


def source_of(body):
    """Returns the source of a function `loss_fn(x)` with the lines of a body."""
    return HEAD + "\n".join(["def loss_fn(x):", *(f"    {line}" for line in body)]) + "\n"


def loaded(source, folder):
    """Returns the function `loss_fn` of a module with this source."""
    return jax.jit(load_module(source, folder).loss_fn)


def compiled(fn, *args):
    """Returns the result of a program as it is written."""
    options = {"xla_allow_excess_precision": False}
    return np.asarray(jax.jit(fn, compiler_options=options)(*args), np.float64)


def error_of(loss_fn, exact, x):
    return np.abs(compiled(loss_fn, x) - exact).max()


def assert_fixed(body, exact, x, folder):
    """Asserts that the fixes of a program remove all findings, and that its error decreases."""
    source = source_of(body)
    planted = loss_fn = loaded(source, folder)
    for _ in range(4):
        errors = jaxmp.audit(loss_fn, x).errors
        if not errors:
            break
        source = with_fix(source, errors[0])
        loss_fn = loaded(source, folder)
    report = jaxmp.audit(loss_fn, x)
    assert loss_fn is not planted and report.ok, f"{source}\n{report}"
    assert error_of(loss_fn, exact, x) < error_of(planted, exact, x), source


X = np.random.default_rng(0).uniform(0.1, 8, (64, 16))


def half():
    return jnp.asarray(X, jnp.bfloat16)


def exact(fn):
    """Returns the result of a NumPy function in FP64 of the same BF16 values."""
    return fn(np.asarray(half()).astype(np.float64))


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def decayed(u, factor):
    h = np.zeros(u.shape[1])
    for row in u:
        h = factor * h + row
    return h


@pytest.mark.parametrize(
    ("body", "reference"),
    [
        (["return jnp.cumsum(x, 0).astype(jnp.float32)[-1]"], lambda x: x.sum(0)),
        (
            ["p = jax.nn.log_softmax(x)", "return p.astype(jnp.float32).mean(0)"],
            lambda x: log_softmax(x).mean(0),
        ),
        (
            [
                "m = x.max(-1, keepdims=True)",
                "e = jnp.exp(x - m).sum(-1)",
                "return (jnp.log(e.astype(jnp.float32))).mean()",
            ],
            lambda x: np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1)).mean(),
        ),
        # In 16 bits, the bound is 1, where the derivative is infinite.
        (
            ["y = jnp.arccos(jnp.clip(x / 4 - 1, -0.999, 0.999))", "return y.astype(jnp.float32)"],
            lambda x: np.arccos(np.clip(x / 4 - 1, -0.999, 0.999)),
        ),
        # The sigmoid rounds 1 - 2**-11 to 1, before the logarithm.
        (
            ["q = jax.nn.sigmoid(x)", "return jnp.log(1 - q + 1e-8).astype(jnp.float32).mean()"],
            lambda x: np.log(1 - 1 / (1 + np.exp(-x)) + 1e-8).mean(),
        ),
        # A schedule: the result of the cosine stays in FP32, as it is cast to FP32 anyway.
        (
            [
                "t = jnp.int32(300).astype(bf) / 1000 + 0 * x[0, 0].astype(jnp.float32)",
                "c = jnp.int32(301).astype(bf) / 1000",
                "return (5e-4 * (1 + jnp.cos(c))).astype(jnp.float32) + 0 * t",
            ],
            lambda x: 5e-4 * (1 + np.cos(0.301)),
        ),
        # The decay is rounded to 1, and the first value of the carry has 16 bits.
        (
            [
                "def body(h, u):",
                "    h = jnp.asarray(0.999, bf) * h + u",
                "    return h, None",
                "u = jnp.tile(x, (8, 1))",
                "h = lax.scan(body, jnp.zeros(16, bf), u)[0]",
                "return h.astype(jnp.float32)",
            ],
            lambda x: decayed(np.tile(x, (8, 1)), 0.999),
        ),
        # The factor itself is rounded, to 0.988.
        (
            ["d = jnp.cumprod(jnp.full((64,), 0.99, bf))", "return d.astype(jnp.float32)[-1]"],
            lambda x: 0.99**64,
        ),
        # Positions beyond 256 are rounded where they are made.
        (
            [
                "a = jnp.arange(300, dtype=bf) * 0.5",
                "s = jnp.sin(a).astype(jnp.float32)",
                "return s + 0 * x[0, 0].astype(jnp.float32)",
            ],
            lambda x: np.sin(np.arange(300) * 0.5),
        ),
        (
            [
                "y = jnp.exp(x.astype(jnp.float32) * 1e-3)",
                "y = y.astype(bf)",
                "return jnp.log1p(y).astype(jnp.float32).mean()",
            ],
            lambda x: np.log1p(np.exp(x * 1e-3)).mean(),
        ),
    ],
)
def test_fixes_of_operations_remove_the_rounding(body, reference, tmp_path):
    assert_fixed(body, exact(reference), half(), tmp_path)


def fixed(body, folder, *args):
    """Returns the errors of a program, and asserts that their fixes remove all of them."""
    source = source_of(body)
    errors = jaxmp.audit(jax.grad(loaded(source, folder)), *args).errors
    mended = source
    for error in errors:
        mended = with_fix(mended, error)
    assert jaxmp.audit(jax.grad(loaded(mended, folder)), *args).ok, mended
    return errors


def test_a_cast_of_all_parameters_is_not_replaced(tmp_path):
    """Without it, no matmul would run in 16 bits."""
    body = [
        "p = jax.tree.map(lambda v: v.astype(bf), {'x': x, 'scale': x[0, 0]})",
        "return (p['x'] @ p['x'].T * jnp.exp(p['scale'])).astype(jnp.float32).sum()",
    ]
    (error,) = fixed(body, tmp_path, half().astype(jnp.float32))
    code = "jnp.exp(p['scale'].astype(jnp.float32)).astype(jnp.bfloat16)"
    assert error.fix == f"Compute exp in FP32:\n    {code}" and error.trial == "works"
    body[1] = "return jnp.sin(p['x'] * 100).astype(jnp.float32).sum()"
    errors = jaxmp.audit(loaded(source_of(body), tmp_path), half().astype(jnp.float32)).errors
    fix = the_only(errors, "rounded_input").fix
    assert re.fullmatch(r"At [\w.]+:5, do not round float32\[64,16\] to 16 bits .*", fix)


def test_the_fix_of_coordinates_that_are_multiplied_in_16_bits(tmp_path):
    body = ["z = x[:, :2].astype(bf) @ x[:2].astype(bf)", "return jnp.sin(z).astype(x.dtype).sum()"]
    step = loaded(source_of(body), tmp_path)
    finding = the_only(jaxmp.audit(step, half().astype(jnp.float32)).errors, "rounded_input")
    assert finding.trial == "works", finding.fix


def test_the_fixes_of_sums_of_segments(tmp_path):
    """JAX also counts the largest elements of a segment, by which it divides their gradient."""
    body = [
        "ids = jnp.arange(64) % 4",
        "top = jax.ops.segment_max(x, ids, 4)",
        "total = jnp.zeros((4, 16), bf).at[ids].add(x)",
        "total = total - (jax.ops.segment_sum(x * jnp.ones((1, 16), bf), ids, 4) - top)",
        "return total.astype(jnp.float32).sum()",
    ]
    errors = fixed(body, tmp_path, half())
    assert [(e.check, e.line) for e in errors] == [("reduction_16bit", n) for n in (7, 8)]
    # The zeros that the function adds to are a part of it.
    assert "x.astype(jnp.float32) * jnp.ones((1, 16), jnp.float32), ids" in errors[1].fix


def test_a_log_of_a_sum_of_masked_exponentials(tmp_path):
    body = ["e = jnp.exp(x) * (x > 1)", "return jnp.log(e.sum(-1)).astype(jnp.float32).mean()"]
    errors = fixed(body, tmp_path, half())
    assert [(e.check, e.line) for e in errors] == [("loss_16bit", 5), ("loss_16bit", 6)]
    assert ".astype(jnp.bfloat16)" not in errors[0].fix


FLOAT16 = "x = x.astype(jnp.float16)"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (  # The fix computes the squares of a variance in FP32, too, for arrays of all shapes.
            [
                "def norm(g):",
                "    v = jnp.square(g - 1).mean(-1, keepdims=True)",
                "    return (g / jnp.sqrt(v + 1e-5)).astype(jnp.float32)",
                "return norm(x[:8]).sum() * norm(x @ x.T)",
            ],
            "jnp.square(g.astype(jnp.float32) - 1).mean(-1, keepdims=True)",
        ),
        (  # Other operations read the rounded values, too: a matmul, or the carry of a loop.
            [
                "k = jax.nn.elu(x) + 1",
                "kv = jnp.cumsum(jnp.einsum('nd,ne->nde', k, x), axis=0)",
                "z = jnp.cumsum(k, axis=0)",
                "y = jnp.einsum('nd,nde->ne', k, kv) / jnp.einsum('nd,nd->n', k, z)[:, None]",
                "return y.astype(jnp.float32)",
            ],
            "jnp.cumsum(k.astype(jnp.float32), axis=0).astype(jnp.bfloat16)",
        ),
        (
            [
                "def step(a, row):",
                "    a = (a @ (x.T @ x)) * row",
                "    c = a.max()",
                "    return a / c, jnp.log(c)",
                "return lax.scan(step, x[0], x)[1].astype(jnp.float32)",
            ],
            "jnp.log(c.astype(jnp.float32))",
        ),
        # A method on its own line, an augmented assignment, and an expression of several lines.
        (["return (", "    (x @ x.T)", "    .mean()", ")"], "(x @ x.T).astype(jnp.float32).mean()"),
        (
            ["h = x", "h @= x.T", "return jax.nn.softmax(h.astype(jnp.float32))"],
            "h = jnp.matmul(h, x.T, preferred_element_type=jnp.float32)",
        ),
        (
            ["return jnp.exp(", "    x.dot(  # of x", "        x.T", "    )", ").sum(-1)"],
            "x.dot(x.T, preferred_element_type=jnp.float32)",
        ),
        (  # Log-probabilities are differences of FP32, of which a matmul reads 16 bits.
            [
                "z = x - jax.nn.logsumexp(x, -1, keepdims=True)",
                "return (z @ x.T).astype(jnp.float32)",
            ],
            "x.astype(jnp.float32) - jax.nn.logsumexp(x.astype(jnp.float32), -1, keepdims=True)",
        ),
        (  # The first value of a carry is a number.
            [
                "def body(i, c):",
                "    return c[0] + x[i, 0], c[1] * 2",
                "return lax.fori_loop(0, 64, body, (jnp.bfloat16(0), 1.0))[0]",
            ],
            "lax.fori_loop(0, 64, body, (jnp.float32(0), 1.0))",
        ),
        (  # The quotient is in another line than its epsilon.
            [FLOAT16, "s = x.max() + 1e-8", "return (x / s).astype(jnp.float32)"],
            "x.astype(jnp.float32) / s",
        ),
        (
            ["return lax.associative_scan(jnp.add, x)[-1].astype(jnp.float32)"],
            "lax.associative_scan(jnp.add, jax.tree.map(lambda x: x.astype(jnp.float32), x))",
        ),
        (  # The queries are scaled in place of the logits.
            [
                "h = (x @ x.T).astype(jnp.float16)",
                "s = (h @ jnp.tanh(h).T) / 8",
                "return jax.nn.softmax(s.astype(jnp.float32))",
            ],
            "h / 8.0 @ jnp.tanh(h).T",
        ),
        (  # Losses are not rounded again.
            ["return optax.kl_divergence(jax.nn.log_softmax(x), jax.nn.softmax(x)).mean()"],
            "optax.kl_divergence(jax.nn.log_softmax(x), jax.nn.softmax(x.astype(jnp.float32)))",
        ),
        (  # The squares have to be FP32, too, and neither the sum nor the epsilon is in float16.
            [
                FLOAT16,
                "H = jnp.float16",
                "n = jnp.sqrt(sum(jnp.sum(a * a, dtype=a.dtype) for a in (x, x[0])) + H(1e-8))",
                "return 0.1 / n.astype(jnp.float32)",
            ],
            "jnp.sqrt(sum((jnp.sum(a.astype(jnp.float32) * a, dtype=jnp.float32)"
            " for a in (x, x[0]))).astype(jnp.float32) + 1e-08)",
        ),
        (  # An expression has one code for all of its operations.
            ["a, b = x[:2]", "return jax.nn.logsumexp(a[:, None] + b[None]).astype(jnp.float32)"],
            "jax.nn.logsumexp(a[:, None].astype(jnp.float32) + b[None])",
        ),
        (  # The statistics of a method are not rounded.
            ["return jnp.sqrt(x.var(-1) + 1e-5).astype(jnp.float32).mean()"],
            "jnp.sqrt(x.astype(jnp.float32).var(-1) + 1e-05)",
        ),
    ],
)
def test_fixes_of_values_that_are_rounded_before(body, code, tmp_path):
    errors = jaxmp.audit(loaded(source_of(body), tmp_path), half()).errors
    assert any(f"    {code}" in error.fix.splitlines() for error in errors)
    assert {error.trial for error in errors} == {"works"}


def test_the_tanh_of_a_deviation_is_no_softmax(tmp_path):
    body = [
        "a = jnp.tanh(jnp.exp(x @ x.T))",
        "return jnp.log(1 - a**2 + 1e-3).astype(jnp.float32).sum()",
    ]
    errors = jaxmp.audit(loaded(source_of(body), tmp_path), half()).errors
    assert "the logarithm of a tanh" in the_only(errors, "log_of_rounded").message


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (["return jnp.sum(1 + x - jnp.exp(x), axis=-1).astype(jnp.float32).mean()"], "jnp.exp("),
        (
            ["a = x * 0.5", "return (jnp.cos(a) + jnp.sin(a)).astype(jnp.float32).sum()"],
            ":5, do not round",
        ),
        (
            [
                "w = jnp.square(x.astype(jnp.float32))",
                "a = w.astype(x.dtype) * x",
                "return jnp.cumsum(a, -1).astype(jnp.float32).mean()",
            ],
            "w.astype(",
        ),
    ],
    ids=["the same expression again", "two expressions of a line", "one within another"],
)
def test_a_fix_has_each_change_once(body, text, tmp_path):
    (error,) = fixed(body, tmp_path, half())
    assert error.fix.count(text) == 1, error.fix


def test_a_fix_without_source_code_is_general():
    scope = {"jax": jax}
    exec("def fn(x):\n    return jax.nn.softmax(x)", scope)
    (finding,) = jaxmp.audit(scope["fn"], half()).errors
    assert finding.fix == "jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype)"


def test_the_fix_of_a_rounded_argument_outside_of_modules_names_the_cast(tmp_path):
    body = ["t = x.astype(bf)", "a = t * bf(0.5)", "return jnp.sin(a).astype(jnp.float32).sum()"]
    x = jnp.linspace(0, 900, 64)
    source = source_of(body)
    (finding,) = jaxmp.audit(loaded(source, tmp_path), x, recipe="bf16").errors
    assert finding.check == "rounded_input" and "NAME" not in finding.fix
    mended = loaded(with_fix(source, finding), tmp_path)
    assert jaxmp.audit(mended, x, recipe="bf16").ok
    reference = np.sin(np.linspace(0, 900, 64) * 0.5).sum()
    assert error_of(mended, reference, x) < 0.5 < error_of(loaded(source, tmp_path), reference, x)


def test_the_fix_of_a_wide_result_keeps_its_precision():
    """An FP32 result of 16-bit operands is worth keeping; only its gradient is multiplied wide."""
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(64, 128)), jnp.float32)
    x = jnp.asarray(rng.normal(size=(16, 64)), jnp.bfloat16)

    def loss_fn(w):
        logits = jnp.dot(x, w.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
        return -jax.nn.log_softmax(logits)[:, 0].mean()

    (finding,) = jaxmp.audit(jax.grad(loss_fn), w, recipe="bf16").findings
    assert (finding.check, finding.severity) == ("mixed_operands", "note")
    scope = {"loss_fn": loss_fn, "jaxmp": jaxmp}
    exec(finding.fix.splitlines()[-1].strip(), scope)
    assert jaxmp.audit(jax.grad(scope["loss_fn"]), w, recipe="bf16").findings == ()
    logits = np.asarray(x, np.float64) @ np.asarray(w.astype(jnp.bfloat16), np.float64)
    reference = -log_softmax(logits)[:, 0].mean()
    assert error_of(scope["loss_fn"], reference, w) < 1e-4


def test_the_fix_of_a_cast_to_fp32_names_the_expression(tmp_path):
    body = ["wide = jnp.float32", "y = x.astype(wide)", "return (y @ y.T).sum()"]
    source = source_of(body)
    (finding,) = jaxmp.audit(loaded(source, tmp_path), half(), recipe="bf16").errors
    assert "replace x.astype(wide) by:" in finding.fix
    # The matmul in 16 bits makes the sum one in 16 bits, whose fix is that of another line.
    assert ":7, compute sum in FP32:\n    (y @ y.T).astype(jnp.float32).sum()" in finding.fix
    assert jaxmp.audit(loaded(with_fix(source, finding), tmp_path), half(), recipe="bf16").ok


@pytest.mark.parametrize(
    ("line", "checks"),
    [
        ("y = x * jnp.arange(16.0)[None]", {"implicit_promotion", "fp32_matmul"}),
        ("y = jnp.arange(16.0)[None] + x", {"implicit_promotion", "fp32_matmul"}),
        ("w = x * jnp.eye(64, 16); y = jax.nn.softmax(w)", {"implicit_promotion", "fp32_matmul"}),
        ("y = jnp.dot(x, jnp.ones((16, 16)))", {"mixed_operands", "fp32_matmul"}),
        ("y = jnp.ones((8, 64)) @ x", {"mixed_operands", "fp32_matmul"}),
    ],
)
def test_the_fix_of_two_dtypes_casts_the_wide_operand(line, checks, tmp_path):
    body = [line, "return y.astype(bf).sum().astype(jnp.float32) + (y @ y.T).sum()"]
    source = source_of(body)
    errors = jaxmp.audit(loaded(source, tmp_path), half(), recipe="bf16").errors
    assert {error.check for error in errors} <= checks | {"loss_16bit"}
    finding = next(e for e in errors if e.check in ("implicit_promotion", "mixed_operands"))
    mended = loaded(with_fix(source, finding), tmp_path)
    assert not checks & jaxmp.audit(mended, half(), recipe="bf16").counts().keys()


def test_attention_with_the_function_of_jaxmp_has_no_finding():
    """An FP32 softmax alone makes a matmul wide."""
    x = jnp.ones((2, 16, 32), jnp.bfloat16)

    def checks(**options):
        model = nn.MultiHeadDotProductAttention(2, dtype=jnp.bfloat16, **options)
        variables = jax.eval_shape(model.init, jax.random.key(0), x)
        return set(jaxmp.audit(model.apply, variables, x, recipe="bf16").counts())

    assert checks() == {"softmax_16bit"}
    assert "mixed_operands" in checks(force_fp32_for_softmax=True)
    assert checks(attention_fn=jaxmp.attention_fn()) == set()


@pytest.mark.parametrize("is_rounded", [False, True])
def test_the_fix_of_16_bit_moments(is_rounded):
    """Pasted in place of the optimizer, with or without stochastic rounding."""

    def step_of(tx):
        def step(params, state, x):
            cast = lambda p: (x @ p["w"]).astype(jnp.float32).mean()
            updates, state = tx.update(jax.grad(cast)(params), state, params)  # half state
            return optax.apply_updates(params, updates), state

        return step

    tx = optax.adam(1e-3)
    params = {"w": jnp.ones((16, 16), jnp.bfloat16)}
    planted = jaxmp.optim.stochastic_rounding(tx) if is_rounded else tx
    errors = jaxmp.audit(step_of(planted), params, planted.init(params), half()).errors
    finding = the_only(errors, "optimizer_state_16bit")
    assert "mu['w']" in finding.message and finding.count == 2  # mu and nu
    assert "times" not in str(finding) and "2 arrays" in str(finding)
    assert (finding.file, finding.line) == (__file__, line_of(__file__, "half state"))
    scope = {"jaxmp": jaxmp, "tx": tx}
    exec(code_of(finding.fix), scope)
    mended = scope["tx"]
    assert jaxmp.audit(step_of(mended), params, mended.init(params), half()).ok


STEP_HEAD = (
    HEAD
    + """import optax
f16 = jnp.float16
tx = optax.sgd(0.1)
def fwd(p, x, dtype=bf):
    return x.astype(dtype) @ p["w"].astype(dtype)
"""
)
PARAMS = {"w": np.random.default_rng(1).normal(size=(16, 16)).astype(np.float32)}


def audit_step(body, folder, *args):
    """Returns the source of a step and its errors."""
    source = STEP_HEAD + "\n".join(["def loss_fn(p, *args):", *(f"    {x}" for x in body)]) + "\n"
    return source, errors_of(source, folder, *args)


def errors_of(source, folder, *args):
    return jaxmp.audit(loaded(source, folder), PARAMS, *args).errors


# Lines of a step, its check, and the code that its fix contains and that replaces the same line.
PASTED = {
    "microbatches in a loop": (
        [
            "def body(acc, x):",
            "    g = jax.grad(lambda p: fwd(p, x).astype(jnp.float32).mean())(p)['w']",
            "    return acc + g.astype(bf), None",
            "acc, _ = lax.scan(body, jnp.zeros((16, 16), bf), args[0])",
            "return p['w'] - acc.astype(jnp.float32)",
        ],
        ["jnp.zeros((16, 16), jnp.float32)", "g.astype(jnp.float32)"],
    ),
    "microbatches of pytrees in a loop": (
        [
            "low = {'w': p['w'].astype(bf)}",
            "fwd = lambda q, x: lax.dot(x.astype(bf), q['w'], preferred_element_type=jnp.float32)",
            "grad = jax.grad(lambda q, x: fwd(q, x).mean())",
            "def body(acc, x):",
            "    return jax.tree.map(jnp.add, acc, grad(low, x)), None",
            "acc, _ = lax.scan(body, jax.tree.map(jnp.zeros_like, low), args[0])",
            "return p['w'] - acc['w'].astype(jnp.float32)",
        ],
        ["jax.tree.map(jnp.zeros_like, jax.tree.map(lambda x: x.astype(jnp.float32), low))"],
    ),
    "microbatches of pytrees without a loop": (
        [
            "low = {'w': p['w'].astype(bf)}",
            "fwd = lambda q, x: lax.dot(x.astype(bf), q['w'], preferred_element_type=jnp.float32)",
            "grad = jax.grad(lambda q, x: fwd(q, x).mean())",
            "acc = grad(low, args[0][0])",
            "for i in range(1, 4):",
            "    acc = jax.tree.map(jnp.add, acc, grad(low, args[0][i]))",
            "return p['w'] - acc['w'].astype(jnp.float32)",
        ],
        ["jax.tree.map(jnp.add, jax.tree.map(lambda x: x.astype(jnp.float32), acc),"],
    ),
    "microbatches without a loop": (
        [
            "def grad(x):",
            "    g = jax.grad(lambda p: fwd(p, x).astype(jnp.float32).mean())(p)['w']",
            "    return g.astype(bf)",
            "total = grad(args[0][0])",
            "for i in range(1, 4):",
            "    total = total + grad(args[0][i])",
            "return p['w'] - total.astype(jnp.float32)",
        ],
        ["g.astype(jnp.float32)"],
    ),
    "an L1 loss": (
        [
            "def loss(p):",
            "    h = fwd(p, args[0][0]) ** 2",
            "    e = h - jnp.ones((8, 16), bf)",
            "    return jnp.abs(e).astype(jnp.float32).mean()",
            "return jax.grad(loss)(p)['w']",
        ],
        ["h.astype(jnp.float32) - jnp.ones((8, 16), bf)"],
    ),
    "steps in bf16": (
        ["t = args[1].astype(bf) / 1000", "return p['w'] * (1 - t.astype(jnp.float32))"],
        ["args[1].astype(jnp.float32)"],
    ),
    "indices in bf16": (
        [
            "i = (args[2].astype(bf) * 500).astype(jnp.int32)",
            "return jnp.tile(p['w'].reshape(-1), 2)[i]",
        ],
        ["args[2].astype(jnp.float32)"],
    ),
}


def _mean_of_complements(x):
    q = jax.nn.sigmoid(x)
    return jnp.log(1 - q).astype(jnp.float32).mean()


def test_the_logarithm_of_a_rounded_probability_is_one_function():
    # In FP32, 1 - q is 0 from x = 17 on.
    report = jaxmp.audit(jax.grad(_mean_of_complements), jnp.full(4, 20, jnp.bfloat16))
    (finding,) = [each for each in report.errors if each.check == "log_of_rounded"]
    assert code_of(finding.fix) == "jax.nn.log_sigmoid((-x).astype(jnp.float32))"
    assert finding.trial == "works"


@pytest.mark.parametrize("name", PASTED)
def test_the_fix_of_a_step_is_its_own_code(name, tmp_path):
    body, codes = PASTED[name]
    args = jnp.ones((4, 8, 16)), jnp.int32(7), jnp.float32(0.7)
    source, errors = audit_step(body, tmp_path, *args)
    assert all(code in errors[0].fix for code in codes), errors[0].fix
    for _ in range(3):
        if errors:
            source = with_fix(source, errors[0])
            errors = errors_of(source, tmp_path, *args)
    assert not errors, f"{source}\n{errors}"


class Decay(nn.Module):
    """Decay of a state-space model: parameters enter exponentials and a softplus."""

    @nn.compact
    def __call__(self, x):
        step = nn.Dense(32)(x) + self.param("step_bias", nn.initializers.normal(), (32,))
        rate = jnp.exp(self.param("log_rate", nn.initializers.normal(), (32,)))
        weights = jax.nn.softmax(x + self.param("bias_of_logits", nn.initializers.normal(), (32,)))
        phase = self.param("phase", nn.initializers.normal(), (32,))
        return nn.Dense(32)(jnp.exp(phase - rate * jax.nn.softplus(step)) * weights)


class NnxDecay(nnx.Module):
    def __init__(self, rngs):
        params = (nnx.Param(jnp.linspace(-3, 0, 32)) for _ in range(3))
        self.step_bias, self.log_rate, self.phase = params
        self.dense, self.out = (nnx.Linear(32, 32, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        step = jax.nn.softplus((self.dense(x) + self.step_bias[...]).astype(jnp.float32))
        with jax.named_scope("decay"):
            decay = jnp.exp(-jnp.exp(self.log_rate[...]) * step)
            return self.out(decay * jnp.exp(self.phase[...]))


PARAMETERS = ("step_bias", "log_rate", "phase")


@pytest.mark.usefixtures("standard_promotion", "rank_promotion")
@pytest.mark.parametrize(
    ("is_nnx", "name"), [(False, "bf16"), (True, "bf16"), (False, "bf16_params")]
)
def test_parameters_that_enter_an_exponential_are_read_in_fp32(is_nnx, name):
    x = jnp.linspace(-1, 1, 256).reshape(8, 32)

    def rules_for(rules):
        recipe = jaxmp.load_recipe(jaxmp.PolicyMap(name, rules))
        if is_nnx:
            graph, params = nnx.split(recipe.wrap(NnxDecay(nnx.Rngs(0))))
            apply = lambda params: nnx.merge(graph, params)(x)
        else:
            model = recipe.wrap(Decay())
            params = model.init(jax.random.key(0), x)["params"]
            apply = lambda params: model.apply({"params": params}, x)
        loss = lambda params: (apply(params) ** 2).mean()
        report = jaxmp.audit(jax.grad(loss), recipe.cast_params(params), recipe=recipe)
        fixes = "".join(error.fix for error in report.errors)
        return {ast.unparse(call) for call in calls_of(fixes)}

    dtypes = "c=f32" if name == "bf16" else "p=f32,c=f32"
    expected = {f"jaxmp.Rule('**:{path}', '{dtypes}')" for path in PARAMETERS}
    assert rules_for([]) >= expected and not any("logits" in rule for rule in rules_for([]))
    assert not rules_for([eval(rule) for rule in expected])
    # Read in FP32 alone, a parameter is what it was rounded to.
    read = [jaxmp.Rule(f"**:{path}", "c=f32") for path in PARAMETERS]
    assert rules_for(read) >= (set() if name == "bf16" else expected)


class Wide(nnx.Module):
    """Layer that multiplies in FP32, under a name scope that is no module."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones((64, 64)))

    def __call__(self, x):
        with jax.named_scope("mixer"):
            return (x.astype(jnp.float32) @ self.w[...].astype(jnp.float32)).astype(x.dtype)


@pytest.mark.parametrize(
    ("wide", "path"), [([1], "layers/1"), ([0, 1], "layers/#"), ([0, 2], "re:layers/0|layers/2")]
)
@pytest.mark.filterwarnings("ignore::jaxmp.errors.RecipeWarning")
def test_a_rule_of_a_fix_names_all_modules_without_other_scopes(wide, path):
    def errors(recipe):
        linear = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
        layers = [Wide() if n in wide else linear for n in range(max(wide) + 1)]
        model = recipe.wrap(nnx.Sequential(*layers))
        return jaxmp.audit(lambda m, x: m(x), model, jnp.ones((8, 64)), recipe=recipe).errors

    scope = {"jaxmp": jaxmp, "recipe": jaxmp.load_recipe("bf16")}
    (fix,) = {error.fix for error in errors(scope["recipe"])}
    exec(fix.splitlines()[-1].strip(), scope)
    assert scope["recipe"].policies.rules[0].path == path
    assert not errors(scope["recipe"])


def test_an_input_is_no_parameter():
    net = nn.Sequential([lambda x: jnp.log(jnp.abs(x) + 1), nn.Dense(16)])
    batch, model = {"x": jnp.ones((16, 16))}, jaxmp.load_recipe("bf16").wrap(net)
    params = model.init(jax.random.key(0), batch["x"])
    loss = lambda params, batch: model.apply(params, batch["x"]).mean()
    report = jaxmp.audit(jax.grad(loss), params, batch, recipe="bf16")
    assert the_only(report.errors, "exp_16bit").trial == "works"


def calls_of(text):
    """Returns the calls of rules in the code of fixes."""
    return [ast.parse(code) for code in re.findall(r"jaxmp\.Rule\([^)]*\)", text)]


def test_matmuls_that_leave_16_bits_have_their_share_of_bytes(tmp_path):
    body = ["y = x @ jnp.ones((16, 16), bf)", "return (y @ jnp.ones((16, 16))).sum()"]
    source = source_of(body)
    errors = jaxmp.audit(loaded(source, tmp_path), half()).errors
    finding = the_only(errors, "mixed_operands")
    # 64 x 16 elements and 16 x 16 weights, in 2 or 4 bytes, and the results.
    wide, narrow = 1024 * 2 + 256 * 4 + 1024 * 4, 1024 * 2 + 256 * 2 + 1024 * 2
    share = wide / (wide + narrow)
    assert f"{share:.0%} of the bytes of all matmuls" in finding.message


def test_the_fix_of_16_bit_state_of_fp32_parameters():
    tx = optax.adam(1e-3, b1=0.9, mu_dtype=jnp.bfloat16)

    def step(params, state, x):
        grads = jax.grad(lambda p: (x @ p["w"].astype(x.dtype)).astype(jnp.float32).mean())(params)
        updates, state = optax.adam(1e-3).update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = {"w": jnp.ones((16, 16))}
    state = jax.tree.map(lambda a: a.astype(jnp.bfloat16), tx.init(params)[0].nu)
    state = (tx.init(params)[0]._replace(nu=state), *tx.init(params)[1:])
    (finding,) = jaxmp.audit(step, params, state, half()).errors
    scope = {"tx": optax.adam(1e-3), "params": params}
    exec(finding.fix.splitlines()[-1].strip(), scope)
    assert jaxmp.audit(step, params, scope["opt_state"], half()).ok


CLOSURES = """
import flax.linen as nn
class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.exp(x)
def make(dtype):
    def inner(x):
        return jnp.cumsum(x.astype(dtype), 0).astype(jnp.float32)
    return lambda x: (Net().apply({}, x).astype(jnp.float32) + inner(x)).sum()
loss_fn = make(bf)
"""


def test_fixes_are_tried_in_closures_and_methods(tmp_path):
    errors = jaxmp.audit(loaded(HEAD + CLOSURES, tmp_path), half()).errors
    assert {error.trial for error in errors} == {"works"}
    assert {error.check for error in errors} == {"exp_16bit", "reduction_16bit"}


def test_code_that_does_not_run_is_not_printed(tmp_path):
    check = "def check(x):\n    assert x.dtype == bf\n    return x.astype(jnp.float32).sum()\n"
    source = HEAD + check + "def loss_fn(x):\n    return check(jnp.log(x))\n"
    loss_fn = loaded(source, tmp_path)
    (finding,) = jaxmp.audit(loss_fn, half(), try_fixes=False).errors
    assert "jnp.log(x.astype(jnp.float32))" in finding.fix and not finding.trial
    (finding,) = jaxmp.audit(loss_fn, half()).errors
    assert "\n" not in finding.fix and not finding.trial


CARRY = [
    "em = x @ x.T",
    "def step(a, e):",
    "    s = a[:, None] + em[:4]",
    "    return jnp.log(jnp.sum(jnp.exp(s - s.max()), axis=0)) + e, None",
    "a, _ = jax.lax.scan(step, em[0], em[1:])",
    "return jnp.log(jnp.sum(jnp.exp(a - a.max()))).astype(jnp.float32)",
]
OWN_DERIVATIVE = [
    "f = jax.custom_jvp(lambda z: jnp.log(jnp.sum(jnp.exp(z))))",
    "f.defjvp(lambda p, t: (f(*p), jnp.vdot(p[0], t[0])))",
    "return jax.grad(lambda x: f(x @ x.T).astype(jnp.float32))(x)",
]


@pytest.mark.parametrize(("body", "message"), [(CARRY, "carry"), (OWN_DERIVATIVE, "tangent")])
def test_a_fix_that_requires_another_one_contains_it(body, message, tmp_path):
    """In FP32, the carry of a forward recursion requires that its first value is FP32, too."""
    x, source = half()[:4], source_of(body)
    error = jaxmp.audit(loaded(source, tmp_path), x).errors[0]
    own, _, required = error.fix.rpartition("At ")
    changed = with_fix(source, dataclasses.replace(error, fix=own))
    with pytest.raises(TypeError, match=message):
        jax.eval_shape(loaded(changed, tmp_path), x)
    code = required.partition(":\n")[2].strip()
    jax.eval_shape(loaded(changed.replace("x @ x.T", code), tmp_path), x)


def test_a_function_that_is_not_known_has_words(tmp_path):
    head = "import optax\ntx = optax.clip_by_global_norm(1.0)\n"
    source = HEAD + head + "def loss_fn(x):\n    return tx.update(x, tx.init(x))[0].sum()\n"
    errors = jaxmp.audit(loaded(source, tmp_path), half().astype(jnp.float16)).errors
    words = [e.fix for e in errors if e.check == "norm_16bit"]
    assert words and all("`tx.update`" in fix and "\n" not in fix for fix in words)


LAYER = (
    HEAD
    + """
import flax.linen as nn
from flax import nnx
class Net(nn.Module):
    def setup(self):
        self.embed = nn.Embed(10, 16, dtype=bf)
        self.head = nn.Dense(10, dtype=bf)
    def __call__(self, x):
        return CALL
class Inline(nn.Module):
    @nn.compact
    def __call__(self, x):
        return CALL
class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(10, 16, dtype=bf, rngs=rngs)
        self.head = nnx.Linear(16, 10, dtype=bf, rngs=rngs)
    def __call__(self, x):
        return CALL
def loss_of(net, *args):
    return lambda x: -jax.nn.log_softmax(net(*args, x).astype(jnp.float32))[..., 0].mean()
def make(cls):
    if cls is Nnx:
        return loss_of(Nnx(nnx.Rngs(0)))
    net = cls()
    return loss_of(net.apply, net.init(jax.random.key(0), jnp.ones((4, 4, 16))))
"""
)
# Class, call, and the constructor that the fix changes; "" if it changes the call.
LAYERS = [
    ("Inline", "nn.Dense(10, dtype=bf)(x)", ""),
    ("Inline", "nn.DenseGeneral(10, dtype=bf)(x)", ""),
    ("Inline", "nn.Conv(10, (1,), dtype=bf)(x)", ""),
    ("Inline", "nn.Einsum((16, 10), '...a,ab->...b', dtype=bf)(x)", ""),
    ("Net", "self.head(x)", "nn.Dense(10, dtype=bf)"),
    ("Net", "self.embed.attend(x)", ""),
    ("Nnx", "self.head(x)", "nnx.Linear(16, 10, dtype=bf, rngs=rngs)"),
    ("Nnx", "self.embed.attend(x)", ""),
]


@pytest.mark.parametrize(("cls", "call", "constructor"), LAYERS)
def test_the_fix_of_a_layer_changes_its_constructor(cls, call, constructor, tmp_path):
    source = LAYER.replace("CALL", call)

    def outputs(source):
        loss_fn = loaded(f"{source}loss_fn = make({cls})\n", tmp_path)
        report = jaxmp.audit(jax.grad(loss_fn), jnp.ones((4, 4, 16)))
        return [finding for finding in report.errors if finding.check == "rounded_output"]

    (finding,) = outputs(source)
    assert finding.trial == ("not tried" if "nnx" in constructor else "works")
    (code,) = (line.strip() for line in finding.fix.splitlines() if line.startswith("    "))
    assert not outputs(source.replace(constructor or call, code))


@pytest.mark.parametrize(
    "head",
    [
        "jnp.inner(x, kernel)",
        "lax.ragged_dot(x, kernel.T[None], jnp.array([64]))",
        "lax.conv(x[..., None], kernel[..., None], (1,), 'VALID')",
        "lax.conv_transpose(x[None], kernel.T[None], (2,), 'SAME')",
    ],
)
def test_the_fix_of_a_matmul_or_convolution_returns_its_fp32_sums(head, tmp_path):
    source = f"{HEAD}def loss_fn(x):\n    kernel = x[:8]\n    return jnp.argmax(HEAD, -1)\n"
    (finding,) = jaxmp.audit(loaded(source.replace("HEAD", head), tmp_path), half()).errors
    assert (finding.check, finding.trial) == ("rounded_output", "works")
    code = finding.fix.splitlines()[1].strip()
    assert code == f"{head[:-1]}, preferred_element_type=jnp.float32)"
    assert jaxmp.audit(loaded(source.replace("HEAD", code), tmp_path), half()).ok


def test_code_of_both_dtypes_is_tried(tmp_path):
    # In FP32, the result would change the dtype of the carry.
    body = "def body(i, z):\n    return z - jax.nn.logsumexp(z, axis=-1, keepdims=True)\n"
    source = HEAD + body + "def loss_fn(x):\n    return lax.fori_loop(0, 2, body, x)\n"
    (finding,) = jaxmp.audit(loaded(source, tmp_path), half()).errors
    assert finding.trial == "works" and finding.fix.endswith(".astype(jnp.bfloat16)")


def test_kahan_sums_are_not_reported():
    def kahan(x, compensated):
        def body(carry, value):
            total, error = carry
            value = value - error * compensated
            new = total + value
            return (new, (new - total) - value if compensated else error), None

        zero = jnp.zeros((), x.dtype)
        return jax.lax.scan(body, (zero, zero), x)[0][0].astype(jnp.float32)

    x = jnp.ones(1024, jnp.bfloat16)
    assert jaxmp.audit(lambda x: kahan(x, 1), x).ok
    assert not jaxmp.audit(lambda x: kahan(x, 0), x).ok


@jax.custom_vjp
def product(x, w):
    return x @ w


product.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda saved, g: (
        (g.astype(jnp.float32) @ saved[1].astype(jnp.float32).T).astype(g.dtype),
        saved[0].T @ g,
    ),
)


def test_the_fix_of_a_backward_rule_names_the_operand():
    """Autocast does not change the rules of a `custom_vjp`."""
    x = jnp.ones((32, 32), jnp.bfloat16)
    loss = lambda w: product(x, w).astype(jnp.float32).sum()
    (finding,) = jaxmp.audit(jax.grad(lambda x, w: loss(w) + loss(x)), x, x).errors
    assert finding.check == "fp32_matmul"
    assert "`jax.custom_vjp`" in finding.fix and "cast float32[32,32] to 16 bits" in finding.fix
    assert "jaxmp.autocast" not in finding.fix
    wide = jnp.ones((32, 32))
    errors = jaxmp.audit(jax.grad(lambda x: product(x, x).sum()), wide, recipe="bf16").errors
    rows = jax.custom_vjp(lambda x: x + 1)
    total = lambda g: jax.lax.scan(lambda c, r: (c + r, None), g[0], g)[0]
    rows.defvjp(lambda x: (x + 1, None), lambda _, g: (g * total(g)[None],))
    x = jnp.ones((512, 8), jnp.bfloat16)
    errors += jaxmp.audit(jax.grad(lambda x: rows(x).astype(jnp.float32).sum()), x).errors
    assert errors[1:] and all("`jax.custom_vjp`" in error.fix for error in errors)


def test_the_fix_of_a_function_in_a_custom_vjp_does_not_repeat_what_is_applied():
    def audited(fn):
        solver = jax.custom_vjp(lambda w, x: jax.lax.fori_loop(0, 2, lambda _, y: fn(w, y), x))
        solver.defvjp(solver, solver)
        loss = jaxmp.autocast(lambda w, x: solver(w, x @ w).sum(), "bf16")
        return jaxmp.audit(loss, jnp.ones((16, 16)), jnp.ones((2, 16)), recipe="bf16").errors

    names = {"jaxmp": jaxmp, "fn": lambda w, x: jnp.tanh(x @ w)}
    (error,) = audited(names["fn"])
    assert "`autocast` do not change" in error.fix
    exec(code_of(error.fix), names)
    assert audited(names["fn"]) == ()


def test_the_rule_for_a_layer_without_fp8_reaches_that_layer_alone():
    class Own(nn.Module):
        @nn.compact
        def __call__(self, x):
            own = lambda *args, **options: jax.lax.dot_general(*args, **options)
            return nn.Dense(1024, dot_general=own)(x)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(512, name="head")(nn.relu(Own()(nn.relu(nn.Dense(1024)(x)))))

    def audit_under(recipe):
        model, x = recipe.wrap(Model()), jnp.ones((8192, 1024))
        variables = jax.eval_shape(model.init, jax.random.key(0), x)
        return jaxmp.audit(lambda v, x: model.apply(v, x).sum(), variables, x, recipe=recipe)

    names = {"jaxmp": jaxmp, "recipe": jaxmp.load_recipe("fp8")}
    before = audit_under(names["recipe"])
    finding = next(found for found in before.findings if found.module == "Own_0/Dense_0")
    exec(code_of(finding.fix), names)
    after = audit_under(names["recipe"])
    assert finding.check == "not_fp8" and "Own_0/Dense_0" not in {f.module for f in after.findings}
    # The other layer of this name stays in FP8.
    assert after.matmul_flops == before.matmul_flops
    assert ("float8_e4m3fn", "float8_e4m3fn") in after.matmul_flops


@pytest.mark.parametrize("line", ["import jax.numpy as np", "import jax", "from jax import nn"])
def test_a_fix_has_the_name_that_the_file_imports(line, tmp_path):
    source = f"{line}\nfrom jax.nn import softmax\nloss_fn = lambda x: softmax(x @ x.T)\n"
    report = jaxmp.audit(load_module(source, tmp_path).loss_fn, jnp.ones((8, 8), jnp.bfloat16))
    finding = next(f for f in report.errors if f.check == "softmax_16bit")
    name = {"import jax.numpy as np": "np", "import jax": "jax.numpy"}.get(line, "jnp")
    assert f"softmax((x @ x.T).astype({name}.float32))" in finding.fix
    assert finding.trial == "works"
    assert ("requires `import jax.numpy as jnp`" in finding.fix) == (name == "jnp")


WIDE = ["y = x + jnp.ones((8, 8))", "assert y.dtype == jnp.float32", "return y @ y"]
ROUNDED = ["y = x @ x", "assert y.dtype == bf", "return jax.nn.softmax(y.astype(jnp.float32))"]


@pytest.mark.parametrize(("body", "fix"), [(WIDE, "Cast the wide "), (ROUNDED, "Return the FP32 ")])
def test_a_rejected_fix_names_the_dtype_without_code(body, fix, tmp_path):
    loss_fn = load_module(source_of(body), tmp_path).loss_fn
    errors = jaxmp.audit(loss_fn, jnp.ones((8, 8), jnp.bfloat16), recipe="bf16").errors
    assert errors and all(f.fix.startswith(fix) and "prints no code" in f.fix for f in errors)


@pytest.mark.parametrize(
    "name", ["soft", "Layer.act", "table['soft']", "getattr(jax.nn, 'softmax')", "e", "Layer.e"]
)
def test_functions_are_known_by_their_code(name, tmp_path):
    source = f"""{HEAD}import functools
soft = functools.partial(jax.nn.softmax, axis=-1)
table = dict(soft=jax.nn.softmax)
e = jnp.exp
class Layer: act = staticmethod(jax.nn.softmax); e: object = jnp.exp
loss_fn = lambda x: {name}(x @ x.T)"""
    report = jaxmp.audit(load_module(source, tmp_path).loss_fn, half())
    finding = next(f for f in report.errors if f.check in ("softmax_16bit", "exp_16bit"))
    assert f"{name}((x @ x.T).astype(jnp.float32))" in finding.fix and finding.trial == "works"


OF_SUMS = "jnp.matmul({}, preferred_element_type=jnp.float32)".format
CODES = {
    # An assignment is printed once.
    "x -= x.mean(-1, keepdims=True); return jnp.log(x * 3).mean()": (
        "x = x.astype(jnp.float32) - x.astype(jnp.float32).mean(-1, keepdims=True)\n"
        "jnp.log((x * 3).astype(jnp.float32))"
    ),
    # An expression inside of another one has no code of its own.
    "a, d = jnp.exp(x), jnp.log1p(jnp.exp(-x)); return (a * d).astype(jnp.float32)": (
        "jnp.exp(x.astype(jnp.float32)).astype(jnp.bfloat16)\n"
        "jnp.log1p(jnp.exp(-x.astype(jnp.float32)))\na * d.astype(jnp.bfloat16)"
    ),
    # The terms of one expression are one code.
    f"return {' + '.join(f'(x * {n}).mean()' for n in range(6))}": (
        " + ".join(f"(x * {n}).astype(jnp.float32).mean()" for n in range(6))
    ),
    # Six sums are one expression, and Python's sum is not in the table.
    "return sum([jnp.sum(x * n) for n in range(6)])": "jnp.sum((x * n).astype(jnp.float32))",
    # Alone, the FP32 log-sum-exp promotes `m`.
    "z = (y := x @ x.T) - (m := y.max(-1, keepdims=True))\n"
    "    lse = m[:, 0] + jnp.log((e := jnp.exp(z)).sum(-1)); p = e / e.sum(-1, keepdims=True)\n"
    "    return (lse - y[:, 0]).astype(jnp.float32).mean() + p.max()": OF_SUMS("x, x.T"),
    # With FP32 sums, the gradient of the matmul has mixed operands: a note.
    "y = lambda w: ((x + jnp.arange(16.)[None]) @ w.astype(bf)).astype(jnp.float32)\n"
    "    return jax.grad(lambda w: ((y(w) - 1) ** 2).mean())(jnp.ones((16, 8)))": (
        OF_SUMS("x + jnp.arange(16.0)[None].astype(jnp.bfloat16), w.astype(bf)")
    ),
    # The sums of a product of weights are rounded by jaxmp's gradient, not by the user.
    "y = lambda w: (jnp.ones((4, 16), bf) @ w.astype(bf)).astype(jnp.float32)\n"
    "    return jaxmp.grad(lambda w: jax.nn.log_softmax(y(w)).sum())(jnp.ones((16, 8)))": (
        OF_SUMS("jnp.ones((4, 16), bf), w.astype(bf)")
    ),
}


@pytest.mark.parametrize("body", CODES)
def test_the_codes_of_a_fix_are_those_that_work(body, tmp_path):
    errors = jaxmp.audit(loaded(source_of([body]), tmp_path), half()).errors
    assert CODES[body] in [code_of(f.fix) for f in errors]
    assert all(f.trial == "works" for f in errors)


def test_scalar_parameters_are_no_losses_and_no_state():
    def loss_fn(params, x):
        mean = jnp.mean((x @ params[0]).astype(jnp.float32))
        weight = params[1].astype(jnp.float32)
        return (mean * jnp.exp(-weight) + weight).astype(x.dtype)

    def step(params, x):
        value, grads = jax.value_and_grad(loss_fn)(params, x)
        return value, jax.tree.map(lambda p, g: p - g, params, grads)

    params = jnp.ones((16, 8), jnp.bfloat16), jnp.ones((), jnp.bfloat16)
    for fn, expected in (jax.value_and_grad(loss_fn), []), (step, ["missing_master"]):
        checks = [f.check for f in jaxmp.audit(fn, params, half()).errors]
        assert checks == ["loss_16bit", *expected]

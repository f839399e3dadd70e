"""Arbitrary inputs raise only documented errors, which quote the input and a working fix."""

import re
import string
import tempfile
import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmp import PolicyMap, Rule, get_policy, list_recipes, load_recipe
from jaxmp._core._dtypes import DTYPE_NAMES
from jaxmp._policies import _toml
from jaxmp._policies._policy import FIELD_KEYS, MATMUL_PRECISIONS
from jaxmp._policies._schema import MASTERS, PRESETS, RULE, TABLES, TOP
from jaxmp._policies._toml import shipped
from jaxmp.errors import JaxmpError, PolicyError, RecipeError, RuleError
from sources import code_of

# ---------------------------------------------------------------------------
# Policies
# ---------------------------------------------------------------------------

words = st.sampled_from(
    [*FIELD_KEYS, *DTYPE_NAMES, "=", ",", "true", "int8", " ", "tf32", "é", "'"]
)
policy_like = st.lists(words, max_size=8).map("".join)


@given(st.text() | policy_like)
def test_policy_strings(text):
    try:
        policy = get_policy(text)
    except PolicyError as error:
        message = str(error)
        assert repr(text) in message
        quoted = re.findall(r"'([^']*)'", message.replace(repr(text), ""))
        assert any(is_policy(example) for example in quoted), message
    else:
        assert get_policy(str(policy)) == policy


def is_policy(text):
    try:
        return bool(get_policy(text))
    except PolicyError:
        return False


things = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text() | words, inner, max_size=3)
    ),
)


@given(things)
def test_policy_objects(thing):
    try:
        assert get_policy(get_policy(thing)) == get_policy(thing)
    except PolicyError as error:
        assert str(error)


# ---------------------------------------------------------------------------
# Rules
# ---------------------------------------------------------------------------

pattern_like = st.lists(
    st.sampled_from(["re:", *"ab/*?:()[]{}\\+|^$-,0", "**", "(?P<n>", "(?i)", "a{9}"]), max_size=8
).map("".join)


@given(st.text() | pattern_like, st.text())
def test_patterns(pattern, path):
    try:
        rule = Rule(pattern, "c=f32")
    except RuleError as error:
        assert repr(pattern) in str(error)
        return
    rule.matches(path)
    assert eval(repr(rule), {"Rule": Rule}) == rule


rule_values = things.filter(lambda thing: thing is not None)


@given(st.dictionaries(st.sampled_from(sorted(RULE)), rule_values, max_size=4))
def test_rule_arguments(arguments):
    try:
        rule = Rule(**arguments)
    except (RuleError, PolicyError) as error:
        quoted = any(repr(value) in str(error) for value in arguments.values())
        assert quoted or "requires a path" in str(error)
    else:
        assert PolicyMap("bf16", rule).rules == (rule,)


# ---------------------------------------------------------------------------
# Recipes
# ---------------------------------------------------------------------------


def load_text(text):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "my.toml"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return load_recipe(path)


def check_text(text):
    """A text loads and reads back, or is refused with a location and a fix."""
    try:
        recipe = load_text(text)
    except RecipeError as error:
        message = str(error)
        assert re.match(r"'[^\n]*my\.toml'|'(fp|bf|tf)[a-z0-9_]*\.toml'", message), message
        check_fix(message)
    else:
        assert load_text(recipe.to_toml()) == recipe


def check_fix(message):
    shown = code_of(message)
    if shown.startswith("load_recipe("):
        compile(shown, "fix", "eval")
    elif shown:
        assert tomllib.loads(shown)
    else:
        assert re.search("elete one of the two|too deeply|digits", message), message


@given(st.text() | st.text(string.printable))
def test_any_text(text):
    check_text(text)


keys = {key for name, table in TABLES.items() if name != "ops" for key in table}
names = sorted({*TOP, *TABLES, *RULE, *keys, "rules", "exp", "add", "scan", "scatter-add"})
values = st.sampled_from(
    [
        *('"bf16"', '"f16"', '"float32"', '"fp32"', '"tf32"', '"e5m2"', "bf16"),
        *('"none"', '"packed"', '"static"', '"dynamic"', '"torch"', '"a/**"', '"a//b"'),
        *('"low"', '"follow"', '"widest"'),
        *("8", "0", "2.0", "0.5", "true", "false", "inf", "nan", "[]", "{}", "1979-05-27"),
        *('"\\u0000.toml"', f"0x{'f' * 50}"),
    ]
)
lines = st.one_of(
    st.sampled_from([f"[{name}]" for name in TABLES] + ["[[rules]]", "# comment", "", "[rules]"]),
    st.builds("{} = {}".format, st.sampled_from(names), values),
    st.builds("{}.{} = {}".format, st.sampled_from(names), st.sampled_from(names), values),
)


@given(st.lists(lines, max_size=8))
def test_plausible_files(text):
    check_text("\n".join(['extends = "bf16"', *text]))


@given(
    st.sampled_from(list_recipes()),
    st.integers(0, 2000),
    st.integers(0, 12),
    st.text(string.printable, max_size=4),
)
def test_damaged_files(name, start, length, put_in):
    text = shipped()[name].read_text(encoding="utf-8")
    start %= len(text)
    check_text(text[:start] + put_in + text[start + length :])


@given(st.binary(max_size=40))
def test_any_bytes(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "my.toml"
        path.write_bytes(b'extends = "bf16"\n' + data)
        try:
            load_recipe(path)
        except RecipeError as error:
            assert repr(str(path)) in str(error)


@given(st.text() | policy_like | st.sampled_from(list_recipes()).map(lambda name: name + " "))
def test_names(text):
    try:
        assert load_recipe(load_recipe(text)) == load_recipe(text)
    except JaxmpError as error:
        assert type(error) in (RecipeError, PolicyError)
        assert repr(text) in str(error) or "16 bits" in str(error)


# ---------------------------------------------------------------------------
# Round trips
# ---------------------------------------------------------------------------

half = st.sampled_from(["f32", "bf16", "f16", "f64"])
policies = st.builds(
    "p={},c={},o={},matmul={}".format, half, half, half, st.sampled_from(MATMUL_PRECISIONS)
)
texts = st.text(st.characters(exclude_categories=("Cs",)))
paths = st.lists(st.text("abc_0*?. é", min_size=1, max_size=4), max_size=3).map("/".join)
readable_paths = paths.filter(lambda path: "**" not in path)
rules = st.builds(Rule, readable_paths, policies, why=texts, required=st.booleans()) | st.builds(
    Rule,
    readable_paths | st.none(),
    st.sampled_from(["c=f16", "o=f32,fp32_outputs_below=4"]),
    st.text("ABc*", min_size=1),
    why=texts,
)
scales = st.sampled_from(["auto", "none", 8.0, 8e37, 1.1754944e-38]) | st.fixed_dictionaries(
    {"preset": st.sampled_from([*PRESETS])},
    optional={
        "init_scale": st.floats(2.0**10, 2.0**20, width=32),
        "growth_interval": st.integers(1, 2**31 - 1),
        "growth_factor": st.floats(1.5, 1e30),
        "backoff_factor": st.floats(1e-30, 0.75),
        "min_scale": st.just("none") | st.floats(2.0**-100, 1.0, width=32),
        "max_scale": st.just("none") | st.floats(2.0**33, 2.0**100, width=32),
        "hysteresis": st.integers(1, 9),
        "hysteresis_refill": st.sampled_from(["growth", "clean"]),
        "first_growth_delay": st.integers(0, 9),
    },
)


@given(
    policies,
    st.lists(rules, max_size=3),
    scales,
    st.sampled_from(MASTERS),
    st.sampled_from(["auto", "select", "cond"]),
    half,
    texts.filter(lambda text: text.isprintable() and text.strip()),
)
def test_recipes_read_back(policy, own, scale, master, skip, dtype, name):
    policy_map = PolicyMap(policy, own)
    float16 = np.float16 in [
        getattr(part, "param_dtype", None) for part in (*own, get_policy(policy))
    ]
    recipe = load_recipe(policy_map).replace(
        loss_scale=scale,
        master="auto" if float16 else master,
        skip=skip,
        accumulate_dtype=dtype,
        reduce_dtype=dtype,
        name=name,
    )
    again = load_text(recipe.to_toml())
    assert again == recipe and hash(again) == hash(recipe)
    assert again.to_toml() == recipe.to_toml()


@given(st.text() | st.booleans() | st.integers() | st.floats(allow_nan=False))
def test_toml_values_read_back(value):
    try:
        text = _toml.literal(value)
    except RecipeError as error:
        assert "surrogate" in str(error)
        return
    assert "\n" not in text
    read = tomllib.loads(f"value = {text}")["value"]
    assert read == value and type(read) is type(value)


def test_half_a_surrogate_pair_cannot_be_written():
    recipe = load_recipe("bf16").replace(
        policies=PolicyMap("bf16", Rule("a", "c=f32", why="x\ud800y"))
    )
    with pytest.raises(
        RecipeError, match=r"'x\\ud800y' contains half of a surrogate pair"
    ) as error:
        recipe.to_toml()
    assert str(error.value).endswith("'xy'")


@given(
    st.lists(
        st.tuples(st.booleans(), st.text("ab c.#=[]'", min_size=1), st.integers(0, 9)), max_size=6
    )
)
def test_positions_are_those_of_the_keys(entries):
    """Each key has the position of its own line, even after comments and multi-line strings."""
    text, expected = [], {}
    for number, (long, key, pad) in enumerate(entries):
        key = f"{key}{number}"
        text += ["# a = 1 [x]"] * (pad % 3)
        expected[key,] = (len(text) + 1, pad + 1)
        value = '"""\nq = 1\n[z]\n"""' if long else '"r = [2] # no"'
        text += f"{' ' * pad}{_toml.quoted(key)} = {value}  # s = 3".split("\n")
    assert _toml.parse("my.toml", "\n".join(text)).positions == expected

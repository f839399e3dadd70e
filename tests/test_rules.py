"""Rules and policy maps: matches, precedence, unused rules and errors."""

import copy
import dataclasses
import inspect
import json
import os
import pickle
import re
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import jaxmp
from jaxmp import Policy, PolicyMap, Rule
from jaxmp._policies._patterns import compile_pattern
from jaxmp._policies._required import check_required, explain_modules
from jaxmp._policies._resolve import resolve_first, resolve_policy, storage_dtype
from jaxmp.errors import PolicyError, RuleError

F32, BF16 = np.dtype("float32"), np.dtype(jnp.bfloat16)

# ---------------------------------------------------------------------------
# Patterns
# ---------------------------------------------------------------------------

PATHS = ["", "a", "b", "ab", "a/b", "a/b/c", "b/a", "a/a", "c/a/b", "block_0/mlp", "block_10/mlp"]

MATCHES = {
    "": [""],
    "a": ["a"],
    "a/b": ["a/b"],
    "a*": ["a", "ab"],
    "?": ["a", "b"],
    "*": ["a", "b", "ab"],
    "a/*": ["a/b", "a/a"],
    "a/**": ["a", "a/b", "a/b/c", "a/a"],
    "**/a": ["a", "b/a", "a/a"],
    "**/a/**": ["a", "a/b", "a/b/c", "b/a", "a/a", "c/a/b"],
    "a/**/c": ["a/b/c"],
    "a/**/b": ["a/b"],
    "**/**/b": ["b", "a/b", "c/a/b"],
    "block_*/mlp": ["block_0/mlp", "block_10/mlp"],
    "block_?/mlp": ["block_0/mlp"],
    "**": PATHS,
    "re:block_[0-9]/mlp": ["block_0/mlp"],
    "re:(?:a|b)": ["a", "b"],
    "re:a": ["a"],
    "re:.*": PATHS,
    "*.*": [],
}


@pytest.mark.parametrize("pattern, expected", MATCHES.items())
def test_patterns_match_whole_paths(pattern, expected):
    rule = Rule(pattern, "c=f32")
    assert [path for path in PATHS if rule.matches(path)] == expected


@pytest.mark.parametrize(
    "pattern, parameter, other",
    [
        ("a:kernel", "a:kernel", "a:bias"),
        ("**:bias", "a/b:bias", "a/b:kernel"),
        ("**:bias", ":bias", ":kernel"),
        (":scale", ":scale", "a:scale"),
        ("a/**:b*", "a/x:bias", "b/x:bias"),
        ("re:.*:bias", "a/b:bias", "a/b:kernel"),
    ],
)
def test_a_colon_addresses_one_parameter(pattern, parameter, other):
    rule = Rule(pattern, "p=f32")
    assert rule.addresses_parameter
    assert rule.matches(parameter)
    assert not rule.matches(other)
    assert not rule.matches(parameter.partition(":")[0])


@pytest.mark.parametrize(
    "pattern", ["re:(?:a|b)/c", "re:[^:/]+/c", "re:(?i:A)/c", "re:[]:]/c", "a/c"]
)
def test_a_colon_of_regex_syntax_addresses_no_parameter(pattern):
    assert not Rule(pattern, "c=f32").addresses_parameter


NAMES = st.text("abc_0.-+()[]^$|", min_size=1, max_size=4)
MODULES = st.lists(NAMES, max_size=4).map("/".join)


@given(MODULES)
def test_a_path_without_wildcards_matches_itself_alone(path):
    assert compile_pattern(path).fullmatch(path)
    assert not compile_pattern(path).fullmatch(path + "x")


@given(MODULES, NAMES)
def test_below_is_itself_and_everything_below(path, child):
    below = compile_pattern(f"{path}/**" if path else "**")
    assert below.fullmatch(path)
    assert below.fullmatch(f"{path}/{child}" if path else child)
    assert not path or not below.fullmatch(path + child)


# An independent implementation of the patterns: match lists of segments by recursion.
def glob_matches(pattern, path):
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(glob_matches(pattern[1:], path[cut:]) for cut in range(len(path) + 1))
    one = re.escape(pattern[0]).replace(r"\*", ".*").replace(r"\?", ".")
    return bool(path) and bool(re.fullmatch(one, path[0])) and glob_matches(pattern[1:], path[1:])


@given(
    st.lists(st.sampled_from(["**", "*", "a", "b", "a*", "?b"]), max_size=5),
    st.lists(st.sampled_from(["a", "b", "ab", "c"]), max_size=5),
)
def test_globs_agree_with_a_recursive_reading(pattern, path):
    found = compile_pattern("/".join(pattern)).fullmatch("/".join(path))
    assert bool(found) == glob_matches(pattern, path)


# ---------------------------------------------------------------------------
# Types
# ---------------------------------------------------------------------------


class Norm: ...


class LayerNorm(Norm): ...


class Block: ...


TREE = {"": Block, "norm": LayerNorm, "block": Block, "block/norm": LayerNorm, "block/dense": None}


def deciding(rule):
    rows = explain_modules(PolicyMap("p=f32", [rule]), TREE).rows
    return [row.path for row in rows if row.rule is not None]


def test_a_type_covers_its_modules_and_not_their_children():
    assert deciding(Rule(module_type="Block", compute_dtype="bf16")) == ["", "block"]


def test_a_type_covers_subclasses_by_name_or_class():
    for named in ("Norm", Norm, "LayerNorm", "*Norm", "Lay*"):
        assert deciding(Rule(module_type=named, compute_dtype="bf16")) == ["norm", "block/norm"]
    assert deciding(Rule(module_type="Norms", compute_dtype="bf16")) == []


def test_path_and_type_must_both_match():
    assert deciding(Rule("block/*", "c=bf16", "LayerNorm")) == ["block/norm"]


# ---------------------------------------------------------------------------
# Maps
# ---------------------------------------------------------------------------


def test_the_first_rule_decides_alone():
    policies = PolicyMap(
        "p=f32,c=bf16,o=f32",
        [Rule("a/**", "c=f32"), Rule("a/b", "c=f16,o=f16"), Rule("**", "p=bf16")],
    )
    assert str(policies.resolve("a/b")) == "p=f32,c=f32,o=f32"
    assert str(policies.resolve("c")) == "p=bf16,c=bf16,o=f32"
    assert resolve_policy(policies, "a/b").rule is policies.rules[0]
    assert resolve_policy(PolicyMap("bf16"), "a").rule is None


def test_a_parameter_takes_its_modules_policy():
    policies = PolicyMap("p=f32", [Rule("a:bias", "p=f16"), Rule("a", "p=bf16")])
    assert str(policies.resolve("a:bias")) == "p=f16,c=f32,o=f32"
    assert str(policies.resolve("a:kernel")) == "p=bf16,c=f32,o=f32"
    assert storage_dtype(policies, ("a", "kernel")) == jnp.bfloat16
    assert storage_dtype(policies, ("a", "b", "kernel")) == jnp.float32
    assert storage_dtype(policies, ("kernel",)) == jnp.float32


def test_paths_may_be_tuples():
    policies = PolicyMap("p=f32", [Rule("blocks/0", "c=bf16")])
    assert policies.resolve(("blocks", 0)) == policies.resolve("blocks/0")


def test_a_rule_takes_fields_in_every_form():
    same = [
        Rule("a", "c=bf16"),
        Rule("a", {"compute": jnp.bfloat16}),
        Rule("a", compute_dtype="bfloat16"),
        Rule("a", policy="compute_dtype=bf16"),
    ]
    assert all(rule == same[0] and hash(rule) == hash(same[0]) for rule in same)
    assert Rule("a", Policy("f32", "bf16", "f32")).fields["output_dtype"] == np.float32


@pytest.mark.parametrize("name", ["bf16", "bfloat16", " F16 ", jnp.float16, np.dtype("float32")])
def test_a_rule_with_a_bare_dtype_is_refused(name):
    with pytest.raises(RuleError, match=r"^Rule\('head'\): policy .* is ambiguous") as error:
        Rule("head", name)
    fixes = re.findall("'([^']*=[^']*)'", str(error.value))
    assert [set(Rule("head", fix).fields) for fix in fixes] == [
        {"compute_dtype"},
        {"param_dtype", "compute_dtype", "output_dtype"},
    ]


@pytest.mark.parametrize("name", ["tf32", "bf16_params", "fp8"])
def test_a_rule_with_the_name_of_a_recipe_is_refused(name):
    with pytest.raises(RuleError, match=f"'{name}' is the name of a recipe") as error:
        Rule("head", name)
    for fix in re.findall("'([^']*=[^']*)'", str(error.value)):
        assert Rule("head", fix).fields


rules = st.builds(
    Rule,
    st.sampled_from(["a", "a/**", "**/b", "", "re:a.*"]),
    st.sampled_from(["c=bf16", "c=f16,o=f32", {"matmul": "highest"}, "p=bf16"]),
    why=st.text(),
    required=st.booleans(),
)
maps = st.builds(PolicyMap, st.sampled_from(["bf16", "p=f32,c=f16"]), st.lists(rules, max_size=3))


@given(maps)
def test_copies_are_equal_and_hash_alike(policies):
    again = PolicyMap(str(policies.default), [dataclasses.replace(r) for r in policies.rules])
    for other in (again, pickle.loads(pickle.dumps(policies)), copy.deepcopy(policies)):
        assert other == policies and hash(other) == hash(policies)
        assert type(other) is jaxmp.PolicyMap and repr(other).startswith(
            "PolicyMap(default=Policy("
        )
    assert [eval(repr(rule), {"Rule": Rule}) for rule in policies.rules] == [*policies.rules]


def test_a_map_cannot_be_changed():
    policies = PolicyMap("bf16")
    for name in ("default", "new"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(policies, name, 1)
    assert policies != PolicyMap("bf16", fp8=jaxmp.fp8.CurrentScaling())
    names = [field.name for field in dataclasses.fields(policies) if field.init]
    assert names == ["default", "rules", "fp8"]


def test_equal_maps_do_not_trace_again():
    compute = jax.jit(lambda policies, x: policies.resolve("a").cast_to_compute(x))
    for _ in range(2):
        assert compute(PolicyMap("p=f32", [Rule("a", "c=bf16")]), jnp.ones(2)).dtype == jnp.bfloat16
    assert compute._cache_size() <= 1
    assert compute(PolicyMap("p=f32", [Rule("b", "c=bf16")]), jnp.ones(2)).dtype == jnp.float32


# ---------------------------------------------------------------------------
# Explaining
# ---------------------------------------------------------------------------


def test_explain_says_who_decides_and_what_is_unused():
    head = Rule("head", "c=f32", why="logits")
    unused = Rule("tail", "c=f32", required=False)
    shadowed = Rule("head", "c=f16")
    policies = PolicyMap("p=f32,c=bf16", [head, unused, shadowed])
    explanation = explain_modules(policies, {"": Block, "head": LayerNorm})
    assert [(row.path, row.rule, row.why) for row in explanation.rows] == [
        ("", None, ""),
        ("head", 0, "logits"),
    ]
    assert explanation.unused == (unused, shadowed)
    assert str(explanation).splitlines() == [
        "1 of 2 paths follow a rule.",
        "path    type       policy               rule     why",
        "(root)  Block      p=f32,c=bf16,o=bf16  default",
        "head    LayerNorm  p=f32,c=f32,o=bf16   1        logits",
        "unused: Rule('head', compute_dtype='float16')",
        "unused: 1 optional rule",
    ]


@pytest.mark.parametrize(
    "rule, words",
    [
        (Rule("hed", "c=f32"), "nearest paths: 'head'"),
        (Rule("**/blok/**", "c=f32"), "nearest paths: 'block'"),
        (Rule("head:kernal", "p=bf16"), "nearest paths: 'head:kernel'"),
        (Rule(module_type="LayerNorn", compute_dtype="f32"), "nearest types: LayerNorm"),
        (Rule("zzz", "c=f32", "Qqq"), "nearest types: Block, LayerNorm, Norm"),
    ],
)
def test_a_required_rule_that_matches_nothing_is_refused(rule, words):
    paths = {"": Block, "head": LayerNorm, "block": Block, "head:kernel": None}
    with pytest.raises(RuleError, match="matched nothing") as error:
        check_required(PolicyMap("bf16", [rule]), paths)
    message = str(error.value)
    assert repr(rule) in message and words in message
    mended = eval(message.rpartition("match nothing: ")[2].rstrip("."), {"Rule": Rule})
    assert mended == dataclasses.replace(rule, required=False)
    check_required(PolicyMap("bf16", [mended]), paths)
    if "nearest paths: '" in words:
        near = re.search("nearest paths: '([^']*)'", message)[1]
        check_required(PolicyMap("bf16", [dataclasses.replace(rule, path=near)]), paths)


def test_a_required_rule_that_is_shadowed_still_matches():
    check_required(PolicyMap("bf16", [Rule("a", "c=f32"), Rule("a", "c=f16")]), {"a": None})


# ---------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    ["/a", "a/", "a//b", "/", "a**", "**a/b", "a/***", "a:", "a:b:c", "a:b/c", "a**//:", "re:(",
     "re:*", "re:[[a]", "re:a{99999999999}", "re:(?i", "re:a(?i)"],
)  # fmt: skip
def test_a_refused_pattern_names_those_that_are_read(pattern):
    with pytest.raises(RuleError) as error:
        Rule(pattern, "c=f32")
    message = str(error.value)
    assert repr(pattern) in message
    fixes = re.findall("'([^']+)'", message.partition("for example ")[2])
    assert len(fixes) == 4
    assert [Rule(fix, "c=f32").path for fix in fixes] == fixes


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({}, "requires a path, a module_type or both"),
        ({"policy": "o=f16"}, "requires a path"),
        ({"path": 3, "policy": "c=f32"}, "path=3"),
        ({"module_type": 3, "policy": "c=f32"}, "module_type=3"),
        ({"path": "a", "policy": "c=f32", "why": None}, "why=None"),
        ({"path": "a", "policy": "c=f32", "required": "no"}, "required='no'"),
        ({"path": "a"}, "sets no field"),
        ({"module_type": "Dense"}, "sets no field"),
        ({"module_type": "Dense", "param_dtype": "bf16"}, "sets param_dtype by module type"),
        (
            {"path": "a", "module_type": "Dense", "policy": "p=bf16"},
            "sets param_dtype by module type",
        ),
        (
            {"path": "a:kernel", "module_type": "Dense", "policy": "c=f32"},
            "parameters have no module type",
        ),
    ],
)
def test_a_refused_rule_names_one_that_is_taken(arguments, words):
    with pytest.raises(RuleError, match=re.escape(words)) as error:
        Rule(**arguments)
    fixes = re.findall(
        r"(?:for example |write |path: |module_type: )(Rule\(.*\))\.$", str(error.value)
    )
    assert fixes
    assert isinstance(eval(fixes[0], {"Rule": Rule}), Rule)


def test_a_wrong_dtype_is_quoted_with_its_rule():
    with pytest.raises(PolicyError, match=r"'bf61'.*Rule\('head'\).*Did you mean 'bf16'"):
        Rule("head", compute_dtype="bf61")


@pytest.mark.parametrize("rules", [3, "a", ["a"], [None]])
def test_a_map_takes_rules_only(rules):
    with pytest.raises(RuleError, match="is not a Rule") as error:
        PolicyMap("bf16", rules)
    fix = re.search(r"for example (.*)\.$", str(error.value))[1]
    assert eval(fix, {"PolicyMap": PolicyMap, "Rule": Rule}).rules


def test_one_rule_needs_no_list():
    assert PolicyMap("bfloat16", Rule("a", "c=f32")).rules == (Rule("a", "c=f32"),)


def test_a_policy_map_takes_a_scaling_and_no_name_of_one():
    with pytest.raises(
        PolicyError, match=r"fp8='rowwise' is not an FP8 scaling.*CurrentScaling\(\)"
    ):
        PolicyMap("p=f32,c=bf16,matmul=fp8", fp8="rowwise")


def test_a_rule_for_fp32_is_no_rule_for_fp8():
    rules = [Rule("island", "c=f32"), Rule("both", "c=f32,matmul=fp8"), Rule("wide", "o=f32")]
    policies = PolicyMap("p=f32,c=bf16,matmul=fp8", rules)
    found = {path: policies.resolve(path).matmul for path in ("island", "both", "wide", "other")}
    assert found == {"island": "default", "both": "fp8", "wide": "fp8", "other": "fp8"}


def test_an_explanation_is_a_public_type_with_json():
    policies = PolicyMap("bf16", [Rule("head", "c=f32", why="logits")])
    explanation = explain_modules(policies, {"head": None})
    result = json.loads(jaxmp.typing.Explanation(policies=explanation).to_json())["policies"]
    assert result["summary"] == "1 of 1 paths follow a rule."
    (row,) = result["rows"]
    assert row == {
        "path": "head",
        "module_type": "",
        "policy": "p=f32,c=f32,o=f32,fp32_outputs_below=16",
        "rule": 0,
        "why": "logits",
        "narrow": "",
    }
    assert result["unused"] == list(map(str, policies.rules[1:]))


def test_a_resolved_policy_names_its_rule_and_output():
    head, wide = Rule("head", "c=f32"), Rule("logits", "o=f32")
    policies = PolicyMap("p=f32,c=bf16,o=bf16,matmul=fp8", [head, wide])
    default = resolve_policy(policies, "dense")
    assert (default.rule, default.output_dtype, default.wide_output) == (None, BF16, None)
    assert default.scaling == jaxmp.fp8.CurrentScaling() and not default.casts_output
    assert default.reason == "default policy p=f32,c=bf16,o=bf16,matmul=fp8"
    resolved = resolve_policy(policies, "head")
    assert (resolved.rule, resolved.output_dtype, resolved.scaling) == (head, F32, None)
    assert resolved.reason == "Rule('head', compute_dtype='float32')"
    resolved = resolve_policy(policies, ("logits",))
    assert (resolved.output_dtype, resolved.wide_output) == (F32, F32) and resolved.casts_output
    assert resolve_policy(policies, "").casts_output
    assert resolve_first(policies, ("a/head", "head")).rule is head
    assert resolve_first(policies, ("a", "b")).path == "a"


def functions_entered(call):
    """Returns the names of the functions of this package that a call enters."""
    package = os.path.dirname(os.path.dirname(inspect.getfile(PolicyMap)))
    entered = set()

    def record(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            entered.add(frame.f_code)

    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {code.co_qualname for code in entered if not code.co_name.startswith("<")}


def test_resolving_a_module_takes_few_steps():
    """It used to enter 20 functions of this package, and 4 for a module that was resolved."""
    policies = PolicyMap("p=f32,c=bf16,o=f32,keep_inputs=t", [Rule("head", "c=f32")])
    resolve = lambda: resolve_policy(policies, "body", Block)
    assert len(functions_entered(resolve)) <= 8
    assert functions_entered(resolve) == {"resolve_policy"}


def test_a_second_call_of_a_model_takes_few_steps():
    """It used to enter 99 functions of this package in Linen, and 96 in NNX."""
    recipe, x = jaxmp.load_recipe("bf16"), jnp.ones((2, 4))
    model, rngs = recipe.wrap(nn.Sequential([nn.Dense(8), nn.Dense(4)])), nnx.Rngs(0)
    variables = model.init(jax.random.key(0), x)
    layers = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)
    of_nnx = recipe.wrap(nnx.Sequential(*layers))
    for call, most in ((lambda: model.apply(variables, x), 92), (lambda: of_nnx(x), 82)):
        call()
        entered = functions_entered(call)
        assert 40 < len(entered) <= most, sorted(entered)


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ('[policy]\nparam_dtype = "float32"\ncompute_dtype = "bfloat16"', 34),
        ('extends = "bf16"\n[optimizer]\nskip = "cond"', 57),
    ],
)
def test_reading_a_recipe_file_takes_few_steps(write, text, most):
    """The first used to enter 51 functions of this package. Only errors compute locations."""
    file = write(text)
    entered = functions_entered(lambda: jaxmp.load_recipe(file))
    assert 10 < len(entered) <= most
    assert "_find_positions" not in entered


# ---------------------------------------------------------------------------
# Rules by position
# ---------------------------------------------------------------------------

ENDS = Rule("block_#/**", first=1, last=2, layers=5, matmul="default")


class Stack(nn.Module):
    length: int = 5

    @nn.compact
    def __call__(self, x):
        for number in range(self.length):
            x = nn.Dense(32, name=f"block_{number}")(x)
        return nn.Dense(32, name="last")(x)


class NnxStack(nnx.Module):
    def __init__(self, rngs, length=5):
        self.block = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(length)])

    def __call__(self, x):
        for layer in self.block:
            x = layer(x)
        return x


def test_a_rule_selects_the_first_and_last_layers(write):
    numbers = [n for n in range(5) if ENDS.matches(f"block_{n}/mlp")]
    assert numbers == [0, 3, 4] and not ENDS.matches("block_x") and not ENDS.matches("a/block_0")
    only_last = Rule("h/#:kernel", last=1, layers=12, compute_dtype="f32")
    assert [n for n in range(12) if only_last.matches(f"h/{n}:kernel")] == [11]
    keys = ('path = "block_#/**"', "first = 1", "last = 2", "layers = 5", 'matmul = "default"')
    recipe = jaxmp.load_recipe(write("\n".join(['extends = "fp8"', "[[rules]]", *keys])))
    assert recipe.policies.rules[0] == ENDS == eval(repr(ENDS))
    assert jaxmp.load_recipe(write(recipe.to_toml(), "again.toml")) == recipe
    x = jnp.ones((32, 32))
    for model, name in ((Stack(), "block_{}"), (NnxStack(nnx.Rngs(0)), "block/{}")):
        rule = dataclasses.replace(ENDS, path=name.format("#"))
        fp8 = jaxmp.explain(model, jaxmp.PolicyMap("fp8", rule))(x).fp8
        assert [row.path for row in fp8.rows][:2] == [name.format(n) for n in (1, 2)]


@pytest.mark.parametrize(
    "arguments",
    [
        {"path": "a_#", "first": 1},
        {"path": "a_*", "first": 1, "layers": 4},
        {"path": "a_#/b_#", "first": 1, "layers": 4},
        {"path": "re:a_#", "first": 1, "layers": 4},
        {"path": "a_#", "layers": 4},
        {"path": "a_#", "first": 0, "layers": 4},
        {"path": "a_#", "first": 3, "last": 2, "layers": 4},
        {"module_type": "Block", "last": 2, "layers": 4},
        {"path": "a_#", "first": True, "layers": 4},
        {"path": "a_#", "first": "1", "layers": 4},
    ],
)
def test_positions_that_select_no_layers_are_refused(arguments):
    with pytest.raises(RuleError, match="first"):
        Rule(**arguments, policy="c=f32")


class ScannedBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(32)(x), None


class ScannedStack(nn.Module):
    first: int = 0
    last: int = 0
    length: int = 5

    @nn.compact
    def __call__(self, x):
        for number in range(self.first):
            x, _ = ScannedBlock(name=f"first_{number}")(x, None)
        length = self.length - self.first - self.last
        scan = nn.scan(ScannedBlock, {"params": 0}, split_rngs={"params": True}, length=length)
        x, _ = scan(name="block_0")(x, None)
        for number in range(self.last):
            x, _ = ScannedBlock(name=f"last_{number}")(x, None)
        return x


def test_a_stack_of_another_length_and_a_scan_are_refused_with_the_form_that_works():
    x = jnp.ones((32, 32))
    recipe = jaxmp.load_recipe("fp8").replace(policies=jaxmp.PolicyMap("fp8", ENDS))
    with pytest.raises(
        RuleError, match=r"have the numbers 0, 1, 2, 3\. .*whose numbers are 0 to 4"
    ):
        recipe.wrap(Stack(4)).init(jax.random.key(0), x)
    in_list = dataclasses.replace(ENDS, path="block/#")
    with pytest.raises(RuleError, match="have the numbers 0, 1, 2, 3, 4, 5"):
        recipe.replace(policies=jaxmp.PolicyMap("fp8", in_list)).wrap(NnxStack(nnx.Rngs(0), 6))
    with pytest.raises(RuleError, match=r"in a scan.*run the first 1 and the last 2 outside"):
        recipe.wrap(ScannedStack()).init(jax.random.key(0), x)
    with pytest.raises(RuleError, match=r"matches no numbered layers; nearest.*'layers_0'"):
        recipe.wrap(nn.Sequential([nn.Dense(32)])).init(jax.random.key(0), x)
    rule = Rule("re:(first|last)_.*", matmul="default")
    explained = jaxmp.explain(ScannedStack(1, 2), jaxmp.PolicyMap("fp8", rule))(x)
    assert {row.path for row in explained.fp8.rows} == {"block_0/Dense_0"}

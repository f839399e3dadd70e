"""Measured figures of the source text: they detect regressions, and are not an aim in themselves.

A marker is a phrase that a reader has to decode and that comparable libraries hardly use. A marked
phrase can be right, and a text without markers can still be unclear, so the limit is not zero.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

SOURCES = sorted((Path(__file__).parents[1] / "jaxmp").rglob("*.py"))
QUESTIONS = {"How", "What", "When", "Where", "Whether", "Which", "Who", "Why"}
VAGUE_NAMES = {"found", "given", "one", "words"}
MARKERS = [
    r"\b(?:is|are|was|were|has|have) no (?!longer|more\b|effect|need)\w+",
    r"\b(?:that|which|what) (?:is|are) (?:not )?there\b",
    r"\bst(?:and|ands|anding|ood)s?\b(?! alone| for)",
    r"\b(?:says?|said|wants?|knows?)\b",
    r"\bin (?:the|its|their) place\b",
    r"\bhand(?:s|ed|ing)? (?:on|through|out|back)\b",
    r"\bgo(?:es)? (?:by|with|along|into)\b",
    r"\b(?:mend\w*|whoever|nobody|likewise|thereof)\b",
    r"\bh(?:old|olds|eld)\b(?![- ]out)",
    r"\btakes? (?:it|them|what|as|part)\b",
]


def docstrings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""


def texts(source: str) -> Iterator[str]:
    """Yields docstrings, the texts of raised errors, and comments."""
    tree = ast.parse(source)
    yield from docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise):
            constants = (part for part in ast.walk(node) if isinstance(part, ast.Constant))
            yield from (part.value for part in constants if isinstance(part.value, str))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def markers_per_thousand_words(sources: list[str]) -> float:
    every = [text for source in sources for text in texts(source)]
    count = sum(len(re.findall(marker, text)) for text in every for marker in MARKERS)
    return 1000 * count / sum(len(text.split()) for text in every)


def arguments(tree: ast.AST) -> Iterator[ast.arg]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arguments):
            yield from (*node.posonlyargs, *node.args, *node.kwonlyargs)
            yield from (arg for arg in (node.vararg, node.kwarg) if arg is not None)


def test_few_phrases_have_to_be_decoded():
    assert markers_per_thousand_words([path.read_text("utf-8") for path in SOURCES]) <= 3


def test_the_count_of_phrases_can_fail():
    assert markers_per_thousand_words(['"""The state that is there is no array."""']) > 100


def test_docstrings_do_not_open_with_a_question_word():
    opened = [
        (path.name, text.split("\n")[0])
        for path in SOURCES
        for text in docstrings(ast.parse(path.read_text("utf-8")))
        if text and re.sub(r"\W", "", text.split()[0]) in QUESTIONS
    ]
    assert not opened


def test_variables_have_names_that_say_what_they_are():
    vague = [
        (path.name, node.lineno)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if (isinstance(node, ast.arg) and node.arg in VAGUE_NAMES)
        or (
            isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Store)
            and node.id in VAGUE_NAMES
        )
    ]
    assert not vague


def test_few_arguments_are_annotated_any():
    annotations = [
        ast.unparse(argument.annotation)
        for path in SOURCES
        for argument in arguments(ast.parse(path.read_text("utf-8")))
        if argument.annotation is not None
    ]
    assert annotations.count("Any") <= 0.12 * len(annotations)

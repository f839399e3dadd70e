"""Runs the user's functions with the code of fixes, before it is printed.

The text of a file with the new code is compiled, and its code objects replace those of the live
functions for the duration of a trace. All lines keep their numbers.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import gc
import itertools
import linecache
import sys
import types
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxmp._core import _compat
from jaxmp._tools.fixes import _source
from jaxmp._tools.fixes._rewrite import Changed
from jaxmp._tools.fixes._source import IN_16_BITS, Edit, both, codes_of, with_inner

WORKS, FAILS, NOT_TRIED = "works", "fails", "not tried"
# Traces with single fixes, if some of them fail together.
_MOST_TRIALS = 10
# Fixes that follow from another one.
_MOST_LAYERS = 3
# Numbers of the trials in the process: a part of the key of JAX's caches, so that none finds the
# trace of another one.
_VERSIONS = itertools.count(1)

Edits = frozenset[Edit]
# A problem of a program -> its fix and the edits, as `unified` returns them.
Problems = Mapping[Hashable, tuple[str, Edits | None]]


def unified(fix: str, file: str, line: int, edits: Iterable[Edit]) -> tuple[str, Edits | None]:
    """Returns a printed fix and its edits, of which each expression has one for all findings.

    If one finding needs an FP32 result, the fixes of the others do not cast it back.

    Args:
      fix: sentences and code; code is indented by four spaces.
      file: of the finding.
      line: of the finding.
      edits: the edits of all printed fixes.

    Returns:
      The fix, and None if some of its code is not an edit, such as a change of the optimizer.
    """
    code = set(codes_of(fix))
    is_here = lambda edit: edit.is_at(file, line) or edit.where in fix
    chosen = [edit for edit in edits if edit.code in code and is_here(edit)]
    if not code or not code <= {edit.code for edit in chosen}:
        return fix, None
    is_code = lambda e, edit: e in chosen or edit.code.startswith(e.code)
    best = {
        edit: min((e for e in edits if e[:5] == edit[:5] and is_code(e, edit)), key=_preference)
        for edit in chosen
    }
    for edit, other in best.items():
        if other in chosen and other.code != edit.code:
            fix = _without(fix, edit.code)
        fix = fix.replace(f"    {edit.code}", f"    {other.code}")
    return _nested(fix, set(best.values()))


def _preference(edit: Edit) -> tuple[object, ...]:
    """Returns a key by which the best edit of an expression is the first: one with FP32 results.

    Of the others, one that casts operands is right for operands that other edits cast, too.
    """
    is_cast_alone = edit.code.startswith(edit.old)
    return edit.code.endswith(IN_16_BITS), is_cast_alone, len(edit.code), not edit.other, edit


def _nested(fix: str, edits: set[Edit]) -> tuple[str, Edits]:
    """Returns a fix and its edits, in which those inside of another expression are part of it."""
    kept: list[Edit] = []
    for edit in sorted(edits, key=lambda e: (-len(e.old), e)):
        outer = next((e for e in kept if e.line == edit.line and edit.old in e.code), None)
        if outer is None:
            if any(_source.is_inside(edit[:5], e[:5]) for e in kept):
                fix = _without(fix, edit.code)
            else:
                kept.append(edit)
            continue
        code = with_inner(outer.code, edit.old, edit.code)
        other = with_inner(outer.other, edit.old, edit.code) if edit.old in outer.other else ""
        whole = outer._replace(code=code, other=other)
        # The outer expression may have been cast to FP32 only because its operand was rounded.
        is_inner = whole.code == outer.old.replace(edit.old, edit.code)
        kept[kept.index(outer)] = edit if is_inner else whole
        fix = fix.replace(f"    {outer.code}", f"    {whole.code}")
        fix = _without(fix, whole.code if is_inner else edit.code)
    return fix, frozenset(kept)


def _with_parts(edit: Edit, parts: Edits) -> Edit:
    """Returns an edit whose code has other parts."""
    for part in sorted(p for p in parts if p.line == edit.line and p.old in edit.code):
        edit = edit._replace(code=with_inner(edit.code, part.old, part.code))
    return edit


def _without(fix: str, code: str) -> str:
    """Returns a fix without some code and the sentences before it."""
    lines = fix.splitlines()
    own = {n for n, line in enumerate(lines) if line == f"    {code}"}
    return "\n".join(line for n, line in enumerate(lines) if not {n, n + 1} & own)


class FixTrial(NamedTuple):
    """Result of a trial: "works", "fails" or "not tried", the fixes that follow, and the edits."""

    state: str
    more: tuple[str, ...] = ()
    edits: Edits = frozenset()


def with_edits(fix: str, before: Edits, after: Edits) -> str:
    """Returns a printed fix with other edits of the same expressions."""
    for edit in sorted(before - after):
        new = next((e.code for e in after if e[:5] == edit[:5]), edit.old)
        if new == edit.old:
            fix = _without(fix, edit.code)
        else:
            fix = fix.replace(f"    {edit.code}", f"    {new}")
    return fix


def _with_places(fix: str, edits: Edits | None) -> str:
    """Returns a fix whose sentences name the lines of their code."""
    lines = fix.splitlines()
    where = {f"    {edit.code}": edit.where for edit in edits or ()}
    for n, code in enumerate(lines[1:]):
        if code in where and not lines[n].startswith(("At ", "    ")):
            lines[n] = f"At {where[code]}, {lines[n][0].lower()}{lines[n][1:]}"
    return "\n".join(lines)


def try_edits(
    groups: Sequence[Edits],
    problems_with: Callable[[bool], Problems],
    before: Collection[Hashable],
    removed: Sequence[Collection[Hashable]],
) -> list[FixTrial]:
    """Tries each group of edits.

    A group works if the problems that it is for are gone, and no other problem is new. If there is
    another one, the edits of its fix are tried too, then results in the other dtype, and then the
    code for rounded operands. A group that does not run alone, such as one that changes the dtype
    of a loop's carry or of a function with a rule for its derivative, contains the edits of
    another group, with which it does.

    Args:
      groups: the edits of each fix.
      problems_with: traces the program, and returns its problems, with fixes if its argument is
        True.
      before: the problems without edits.
      removed: the problems that each group must remove.
    """
    functions = _functions_of({edit.file for group in groups for edit in group})
    # (file, line) -> whether the functions that contain it can be replaced.
    lines = _replaceable(functions)
    reached = [all(any(lines.get(edit[:2], ())) for edit in group) for group in groups]
    trials = [FixTrial("" if is_reached else NOT_TRIED) for is_reached in reached]
    at_readers = lambda group: frozenset(e._replace(code=e.alone) for e in group if e.alone)
    # True for edits that change the code of a fix again.
    is_again = lambda fix, new: any(a.line == b.line and b.old in a.code for a in fix for b in new)

    def trial(*layers: Edits, has_fixes: bool = False) -> Problems | None:
        """Returns the problems with edits; None if the program does not run."""
        try:
            with warnings.catch_warnings(), without_collection(), patched(functions, layers):
                warnings.simplefilter("ignore")
                return problems_with(has_fixes)
        except Exception:
            return None

    def alone(edits: Edits, own: Collection[Hashable]) -> FixTrial:
        """Tries one group, with those of the fixes that follow."""
        layers, more = [edits], list[str]()
        for _ in range(_MOST_LAYERS):
            if not next(budget, None):
                return FixTrial("")
            problems = trial(*layers, has_fixes=True)
            new = [problem for key, problem in (problems or {}).items() if key not in before]
            if problems is not None and not new and problems.keys().isdisjoint(own):
                works = FixTrial(WORKS, tuple(more), edits)
                successes.append((works, problems))
                return works
            # What is left may have a fix for a part of the code.
            new = new or [problem for key, problem in (problems or {}).items() if key in own]
            if not new or any(edits is None for _, edits in new):
                break
            text = functools.reduce(both, (_with_places(*problem) for problem in new))
            text, following = _nested(text, {e for _, edits in new for e in edits or ()})
            readers = at_readers(following)
            if is_again(edits, following) and readers and not is_again(edits, readers):
                text, following = with_edits(text, following, readers), readers
            is_wider = not any(cast in edit.code for cast in IN_16_BITS for edit in following)
            if not following or (is_again(edits, following) and not is_wider):
                break
            if is_again(edits, following):
                # A part of the code has to be FP32, too.
                edits = frozenset(_with_parts(edit, following) for edit in edits)
                layers, more = [edits], []
                continue
            layers.append(following)
            more.append(_plain(text))
        return FixTrial(FAILS)

    waiting = [n for n, row in enumerate(trials) if not row.state]
    # With results in 16 bits instead of FP32, and the reverse.
    swapped = lambda edit: edit._replace(code=edit.other, other=edit.code) if edit.other else edit
    others = [frozenset(map(swapped, group)) for group in groups]
    for together in (groups, *([others] * (others != groups))) if waiting[1:] else ():
        # One edit of each expression; other code for it is tried alone.
        edits = sorted(frozenset().union(*(together[n] for n in waiting)), key=_preference)
        applied = frozenset({edit[:5]: edit for edit in reversed(edits)}.values())
        problems = trial(applied)
        if problems is not None and all(key in before for key in problems):
            works = [n for n in waiting if problems.keys().isdisjoint(removed[n])]
            works = [n for n in works if together[n] <= applied]
            runs = lambda *edits: trial(frozenset().union(*edits)) is not None
            for number, n in enumerate(works):
                used, partner = together[n], frozenset[Edit]()
                if number < _MOST_TRIALS and not runs(used):
                    rest = (together[m] for m in works if m != n)
                    partner = next((edits for edits in rest if runs(used, edits)), None)
                more = (f"At {e.where}, which it requires:\n    {e.code}" for e in partner or ())
                trials[n] = FixTrial(FAILS if partner is None else WORKS, tuple(more), used)
            waiting = [n for n in waiting if not trials[n].state]
            break
    budget, successes = iter(range(1, _MOST_TRIALS + 1)), list[tuple[FixTrial, Problems]]()
    # Other code of a fix is tried after the first one of all fixes.
    for codes in (groups, others, list(map(at_readers, groups))):
        for n in waiting:
            is_tried = codes is not groups and codes[n] in (groups[n], frozenset())
            if not is_tried and trials[n].state != WORKS:
                trial_of = alone(codes[n], removed[n])
                trials[n] = trial_of if trial_of.state else trials[n]
    for n, group in enumerate(groups):
        others_fix = (row for row, left in successes if left.keys().isdisjoint(removed[n]))
        if trials[n].state == FAILS and (row := next(others_fix, None)):
            sentence = "the code of another finding removes this one, too"
            more = (f"At {e.where}, {sentence}:\n    {e.code}" for e in sorted(row.edits))
            trials[n] = row._replace(more=(*more, *row.more))
        # The function that runs may be one of those that kept their code.
        may_be_old = trials[n].state == FAILS and not all(all(lines[e[:2]]) for e in group)
        if may_be_old or not trials[n].state:
            trials[n] = FixTrial(NOT_TRIED)
    return trials


# ---------------------------------------------------------------------------
# Code
# ---------------------------------------------------------------------------


def _functions_of(files: set[str]) -> list[types.FunctionType]:
    """Returns all live functions of some files, wherever a closure or a decorator stores them."""
    # Each function refers to the built-in names. To list what refers to them takes a fraction of
    # the time of `gc.get_objects`.
    objects = gc.get_referrers(vars(builtins))
    objects += _of_modules(files) if gc.get_freeze_count() else ()
    functions = {id(each): each for each in objects if type(each) is types.FunctionType}
    return [each for each in functions.values() if each.__code__.co_filename in files]


def _of_modules(files: set[str]) -> Iterator[object]:
    """Yields what the modules of some files refer to, without the contents of other modules.

    The garbage collector does not find objects after `gc.freeze`.
    """
    modules = [m for m in list(sys.modules.values()) if isinstance(m, types.ModuleType)]
    seen = {id(vars(module)) for module in modules}
    waiting = [v for m in modules if vars(m).get("__file__") in files for v in vars(m).values()]
    while waiting:
        yield from waiting
        seen.update(map(id, waiting))
        referents = {id(each): each for each in gc.get_referents(*waiting) if gc.is_tracked(each)}
        waiting = [each for key, each in referents.items() if key not in seen]


def _replaceable(functions: list[types.FunctionType]) -> dict[tuple[str, int], list[bool]]:
    """Returns for each line whether the functions that contain it have the text of the file."""
    lines: dict[tuple[str, int], list[bool]] = {}
    files = {function.__code__.co_filename for function in functions}
    codes = {file: _compiled(file, linecache.getlines(file)) for file in files}
    for code in {id(function.__code__): function.__code__ for function in functions}.values():
        of_file = codes[code.co_filename]
        is_same = _counterpart(code, of_file, of_file) is not None
        for line in {n for each in _codes(code) for *_, n in each.co_lines() if n is not None}:
            lines.setdefault((code.co_filename, line), []).append(is_same)
    return lines


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Pauses garbage collection, which would visit all equations of a program again and again."""
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_collecting:
            gc.enable()


@contextlib.contextmanager
def patched(functions: list[types.FunctionType], layers: Sequence[Edits]) -> Iterator[None]:
    """Replaces the code of functions in a block, and what is traced in it is traced again.

    Args:
      functions: live functions.
      layers: edits, each of the text that the one before makes.
    """
    codes = [(function, function.__code__) for function in functions]
    texts, before = _texts(layers), linecache.cache
    entries = {file: (sum(map(len, lines)), None, lines, file) for file, lines in texts.items()}
    try:
        for function, code in _replacements(functions, texts):
            function.__code__ = code
        linecache.cache = before | entries
        with _compat.context(version=next(_VERSIONS)):
            yield
    finally:
        linecache.cache = before
        for function, code in codes:
            function.__code__ = code


def _texts(layers: Sequence[Edits]) -> dict[str, list[str]]:
    """Returns the lines of each edited file."""
    texts = {edit.file: linecache.getlines(edit.file) for layer in layers for edit in layer}
    for file, lines in texts.items():
        free = {name for code in _compiled(file, lines) for name in code.co_freevars}
        for layer in layers:
            edits = [edit for edit in layer if edit.file == file]
            texts[file] = _edited(texts[file], edits, free).splitlines(keepends=True)
    return texts


def _compiled(file: str, lines: list[str]) -> list[types.CodeType]:
    """Returns the code objects of a file; none if it is not Python."""
    try:
        return list(_codes(compile("".join(lines), file, "exec", dont_inherit=True)))
    except (SyntaxError, ValueError):
        return []


def _replacements(
    functions: list[types.FunctionType], texts: dict[str, list[str]]
) -> Iterator[tuple[types.FunctionType, types.CodeType]]:
    for file, lines in texts.items():
        old, new = _compiled(file, linecache.getlines(file)), _compiled(file, lines)
        own = [(f, f.__code__) for f in functions if f.__code__.co_filename == file]
        codes = {id(code): code for _, code in own}
        counterparts = {key: _counterpart(code, old, new) for key, code in codes.items()}
        for function, code in own:
            changed = counterparts[id(code)]
            if changed is not None:
                yield function, changed


def _counterpart(
    code: types.CodeType, old: list[types.CodeType], new: list[types.CodeType]
) -> types.CodeType | None:
    """Returns the code object in an edited file; None if the file is not that of the function."""
    key = lambda c: (c.co_qualname, c.co_freevars, c.co_varnames[: c.co_argcount])
    # The first line alone tells most of a large file apart.
    is_own = lambda c: c.co_firstlineno == code.co_firstlineno and key(c) == key(code)
    olds, news = (list(filter(is_own, codes)) for codes in (old, new))
    places = [list(c.co_positions()) for c in olds]
    own = list(code.co_positions())
    is_same = own in places and len(olds) == len(news)
    return news[places.index(own)] if is_same else None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)


def _without_kept(node: ast.AST) -> ast.expr | None:
    """Returns an expression without the variables that `_edited` keeps for a closure."""
    match node:
        case ast.Subscript(ast.Tuple([first, *_]), ast.Constant(False)):
            return Changed(_without_kept).visit(first)
    return None


def _plain(fix: str) -> str:
    """Returns a fix of an edited text as one of the user's text."""
    lines = fix.splitlines()
    for n, line in enumerate(lines):
        if line.startswith("    ") and "[False]" in line:
            lines[n] = "    " + ast.unparse(Changed(_without_kept).visit(ast.parse(line.strip())))
    return "\n".join(lines)


def _names(code: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}


def _assignment(code: str) -> tuple[str, str]:
    """Returns the target of an assignment with its sign, and the value; "" and any other code."""
    match ast.parse(code).body:
        case [ast.Assign([target], value)]:
            return f"{ast.unparse(target)} = ", ast.unparse(value)
    return "", code


def _edited(lines: list[str], edits: list[Edit], free: set[str]) -> str:
    """Returns a text in which edits replace their expressions, some of which contain others.

    Args:
      lines: of the file.
      edits: the edits.
      free: variables of closures.
    """
    encoded = [line.encode() for line in lines]
    position = lambda edit: (edit.line, edit.start, -edit.end_line, -edit.end)
    end = (0, 0)
    outer = []
    for edit in sorted(edits, key=position):
        if (edit.line, edit.start) >= end:
            outer.append(edit)
            end = edit.end_line, edit.end
        elif edit.old in outer[-1].code:
            # The code of another finding changes a part of the expression.
            code = with_inner(outer[-1].code, edit.old, edit.code)
            outer[-1] = outer[-1]._replace(code=code)
    for edit in reversed(outer):
        first, last = edit.line - 1, edit.end_line - 1
        # Line breaks keep the numbers of the lines below.
        # A function whose closure lost a variable could not replace the live one.
        lost = sorted((_names(edit.old) & free) - _names(edit.code))
        new = _source.with_names_of(edit.file, edit.code, "__import__('jax').numpy")
        assigned, value = _assignment(new)
        code = f"({value}, {', '.join(lost)})[False]" if lost else f"({value})"
        code = f"{assigned}({code}{chr(10) * (last - first)})".encode()
        whole = encoded[first][: edit.start] + code + encoded[last][edit.end :]
        encoded[first : last + 1] = whole.splitlines(keepends=True)
    return b"".join(encoded).decode()

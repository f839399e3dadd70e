"""Writes the list of what is public, which docs/questions.md promises, to tests/public_api.txt.

    python tests/public_api.py

Run it after a change of the public API that CHANGELOG.md describes.
"""

import dataclasses
import importlib
import inspect
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import jaxmp
from jaxmp._policies import _schema
from jaxmp.checkpoint import _manifest

FILE = Path(__file__).parent / "public_api.txt"
REPORTS = ("AuditReport", "ParityReport", "ValidationReport", "Explanation")


def modules() -> dict[str, types.ModuleType]:
    """Returns `jaxmp` and its public submodules by name."""
    inner = (f"jaxmp.{name}" for name in jaxmp.__all__ if is_module(getattr(jaxmp, name)))
    return {"jaxmp": jaxmp, **{name: importlib.import_module(name) for name in inner}}


def is_module(value: object) -> bool:
    return isinstance(value, types.ModuleType)


def public_objects() -> dict[str, object]:
    """Returns every public object once, by its shortest name."""
    objects: dict[int, tuple[str, object]] = {}
    for module_name, module in modules().items():
        for name in module.__all__:
            value = getattr(module, name)
            objects.setdefault(id(value), (f"{module_name}.{name}", value))
    return dict(sorted(objects.values()))


def parameters(function: typing.Any) -> str:
    """Returns names, kinds and defaults of the parameters, without annotations."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    plain = []
    for each in signature.parameters.values():
        is_plain = isinstance(each.default, (str, int, float, bool, tuple, types.NoneType))
        default = each.default if each.default is each.empty or is_plain else ...
        plain.append(each.replace(annotation=each.empty, default=default))
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


def members(name: str, cls: type) -> Iterator[str]:
    """Yields a line for each public member that jaxmp defines in a class."""
    for base in cls.__mro__:
        if not base.__module__.startswith("jaxmp"):
            continue
        for member, value in vars(base).items():
            if member.startswith("_"):
                continue
            value = getattr(value, "__func__", value)
            text = parameters(value) if inspect.isfunction(value) else ""
            yield f"{name}.{member}{text}"


def names() -> Iterator[str]:
    for name, value in public_objects().items():
        is_class = isinstance(value, type)
        is_error = is_class and issubclass(value, Exception)
        is_made = is_class and value.__module__ != "typing" and not name.endswith(REPORTS)
        is_called = is_made or inspect.isfunction(value)
        yield f"{name}{parameters(value)}" if is_called and not is_error else name
        if is_class and not is_error:
            fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
            own = {f"{name}.{field.name}" for field in fields if not field.name.startswith("_")}
            yield from sorted(own | set(members(name, value)))


def recipe_keys() -> Iterator[str]:
    tables = {"": _schema.TOP, "rules": _schema.RULE, **_schema.TABLES}
    for table, fields in tables.items():
        for key, field in fields.items():
            yield f"{table}.{key}: {field.allowed}".lstrip(".")


def rows_of(cls: type, known: dict[str, type]) -> dict[str, type]:
    """Returns a dataclass and all dataclasses that its fields contain."""
    if cls.__name__ in known or not dataclasses.is_dataclass(cls):
        return known
    known[cls.__name__] = cls
    pending = list(typing.get_type_hints(cls).values())
    while pending:
        hint = pending.pop()
        pending += typing.get_args(hint)
        if isinstance(hint, type) and hint.__module__.startswith("jaxmp"):
            rows_of(hint, known)
    return known


def json_fields() -> Iterator[str]:
    known: dict[str, type] = {}
    for report in REPORTS:
        cls = getattr(jaxmp.typing, report)
        rows_of(cls, known)
        yield f"{report}: schema {getattr(cls, '_schema', {})}"
    for name, cls in sorted(known.items()):
        if cls.__module__.split(".")[1] != "_policies" or "Row" in name:
            yield from (f"{name}.{field.name}" for field in dataclasses.fields(cls))


def checkpoint_format() -> Iterator[str]:
    yield f"manifest format {_manifest.FORMAT}"
    for name, cls in sorted(rows_of(_manifest.Manifest, {}).items()):
        yield from (f"{name}.{field.name}" for field in dataclasses.fields(cls))


SECTIONS = {
    "Names and signatures": names,
    "Keys of recipes": recipe_keys,
    "JSON fields": json_fields,
    "Checkpoint format": checkpoint_format,
}


def public_api() -> str:
    """Returns the list."""
    parts = [f"# {title}\n" + "\n".join(lines()) for title, lines in SECTIONS.items()]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    FILE.write_text(public_api(), encoding="utf-8")

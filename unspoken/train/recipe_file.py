"""Reading a recipe: YAML and `--a.b value` overrides in, a `Recipe` or one clear complaint out.

A complaint names the file and line (or the option), the dotted key, and what was expected or is nearest.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, overload

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from unspoken.errors import UsageError, nearest
from unspoken.train.recipe import Recipe

R = TypeVar("R", bound=BaseModel)
Origins = dict[str, str]  # dotted key -> where it was given: `recipe.yaml:12`, or `--train.max_steps`


@overload
def load_recipe(path: Path, overrides: list[str]) -> Recipe: ...


@overload
def load_recipe(path: Path, overrides: list[str], schema: type[R]) -> R: ...


def load_recipe(path: Path, overrides: list[str], schema: type[Any] = Recipe) -> Any:
    """Read a recipe, of a training run unless `schema` says otherwise.

    overrides: what the command line holds beside its own options: `--a.b value` or `--a.b=value`, values in YAML.

    Raises:
        UsageError: no such file, not YAML, a key given twice, an unknown key, a wrong value.
    """
    values, origins = read_yaml(path, "recipe", _keys(schema))
    for key, value in parse_overrides(overrides):
        apply_override(values, key, value)
        origins = {name: where for name, where in origins.items() if not name.startswith(f"{key}.")}
        origins[key] = f"--{key}"
    return check_recipe(values, str(path), origins, schema)


def check_recipe(values: dict[str, Any], source: str, origins: Origins, schema: type[R]) -> R:
    """The recipe of nested values that came from `source`, each key from where `origins` says.

    Raises:
        UsageError: an unknown key, a wrong value; one line for each.
    """
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        complaints = [_complaint(details, source, origins, schema) for details in error.errors()]
        raise UsageError("\n  ".join(complaints)) from None


def dotted(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts as (dotted key, value)."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def compact(values: dict[str, Any]) -> str:
    """A recipe as YAML with one line a section."""
    return "\n".join(
        yaml.safe_dump({key: value}, default_flow_style=None, sort_keys=False, width=10**6, allow_unicode=True).strip()
        if not isinstance(value, dict)
        else f"{key}: " + yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6).strip()
        for key, value in values.items()
    )


def read_yaml(path: Path, what: str, sections: Sequence[str] = ()) -> tuple[dict[str, Any], Origins]:
    """A mapping with the line of each of its keys. `what` it is (`recipe`, ...) and its sections are for messages.

    Raises:
        UsageError: no such file, not YAML, not a mapping, a key given twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read the {what} {path}: {reason} (the {what} stands before its overrides)") from None
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        where = f":{mark.line + 1}" if (mark := getattr(error, "problem_mark", None)) else ""
        raise UsageError(f"{path}{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(values, dict):
        named = f" with the sections {', '.join(sections)}" if sections else ""
        raise UsageError(f"{path}: a {what} is a mapping{named}")
    return values, dict(_key_lines(node, str(path)))


def _key_lines(node: yaml.Node, path: str, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each dotted key with its `path:line`; YAML itself would let the last of two equal keys win."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _key_lines(item, path, f"{prefix}{index}.")
    if not isinstance(node, yaml.MappingNode):
        return
    seen = set()
    for key, value in node.value:
        name, where = f"{prefix}{key.value}", f"{path}:{key.start_mark.line + 1}"
        if name in seen:
            raise UsageError(f"{where}: {name} is given twice")
        seen.add(name)
        yield name, where
        yield from _key_lines(value, path, f"{name}.")


def parse_overrides(words: list[str]) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of `--a.b value` and `--a.b=value`."""
    words = list(words)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or len(word) < 3:
            raise UsageError(f"unexpected argument {word!r}: overrides are `--section.key value`")
        key, equals, value = word[2:].partition("=")
        if not equals:
            if not words or words[0].startswith("--"):
                raise UsageError(f"--{key} needs a value")
            value = words.pop(0)
        try:
            yield key, yaml.safe_load(value)
        except yaml.YAMLError:
            raise UsageError(f"--{key}: {value!r} is not valid YAML") from None


def apply_override(values: dict[str, Any], key: str, value: Any) -> None:
    """Put a value at a dotted key of nested `values`, in place."""
    *sections, name = key.split(".")
    for section in sections:
        if values.get(section) is None:
            values[section] = {}
        values = values[section]
        if not isinstance(values, dict):
            raise UsageError(f"--{key}: {section} is a value, not a section")
    values[name] = value


def _complaint(details: ErrorDetails, path: str, origins: Origins, schema: type[BaseModel]) -> str:
    names = [str(part) for part in details["loc"]]
    key = ".".join(names)
    origin = next((origins[part] for part in _and_parents(names) if part in origins), path)
    if origin == f"--{key}":
        origin, key = f"{path}: {origin}", ""
    where = f"{origin}: {key}: " if key else f"{origin}: "
    match details["type"]:
        case "extra_forbidden":
            return f"{where}unknown key{_suggestion(names, schema)}"
        case "missing":
            return f"{where}required, but not given"
        case "value_error":
            return f"{where}{details['ctx']['error']}"
        case _:
            expected = details["msg"].replace("Input should be", "expected").replace("Input should", "it should")
            return f"{where}{expected}, got {details['input']!r}"


def _and_parents(names: list[str]) -> Iterator[str]:
    for end in range(len(names), 0, -1):
        yield ".".join(names[:end])


def _suggestion(names: list[str], schema: type[BaseModel]) -> str:
    """The key of that name in another section, else the nearest of this section, and the section's keys."""
    everywhere = [f"{section}.{key}" for section in _keys(schema) for key in _keys(_section([section], schema))]
    for key in everywhere:
        if key.endswith(f".{names[-1]}"):
            return f" (did you mean {key!r}?)"
    valid = _keys(_section(names[:-1], schema))
    return (
        nearest(names[-1], valid)
        or (nearest(names[-1], everywhere) if len(names) == 1 else "")
        or f"; valid: {', '.join(valid)}"
    )


def _section(names: list[str], schema: type[BaseModel]) -> type[BaseModel]:
    """The section that a path of keys leads to; an item of a list is one too."""
    section = schema
    for name in names:
        if name in section.model_fields:
            section = next(_models_in(section.model_fields[name].annotation), BaseModel)
    return section


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _keys(section: type[BaseModel]) -> list[str]:
    return [name for name in section.model_fields if name != "made_with"]

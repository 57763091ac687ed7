"""Reading a recipe: YAML and `--a.b value` overrides in, a `Recipe` or one clear complaint out.

A complaint names the file and line (or the option), the dotted key, and what was expected or is nearest.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from unspoken.errors import UsageError, nearest
from unspoken.train.recipe import Recipe

Origins = dict[str, str]  # dotted key -> where it was given: `recipe.yaml:12`, or `--train.max_steps`


def load_recipe(path: Path, overrides: list[str]) -> Recipe:
    """Read a recipe.

    overrides: what the command line holds beside its own options: `--a.b value` or `--a.b=value`, values in YAML.

    Raises:
        UsageError: no such file, not YAML, a key given twice, an unknown key, a wrong value.
    """
    values, origins = _read_yaml(path)
    for key, value in _parse_overrides(overrides):
        _apply(values, key, value)
        origins[key] = f"--{key}"
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        complaints = [_complaint(details, str(path), origins) for details in error.errors()]
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


def _read_yaml(path: Path) -> tuple[dict[str, Any], Origins]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read the recipe {path}: {reason} (the recipe stands before its overrides)") from None
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        where = f":{mark.line + 1}" if (mark := getattr(error, "problem_mark", None)) else ""
        raise UsageError(f"{path}{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path}: a recipe is a mapping with the sections {', '.join(_keys(Recipe))}")
    return values, dict(_key_lines(node, str(path)))


def _key_lines(node: yaml.Node, path: str, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each dotted key with its `path:line`; YAML itself would let the last of two equal keys win."""
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


def _parse_overrides(words: list[str]) -> Iterator[tuple[str, Any]]:
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


def _apply(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        if values.get(section) is None:
            values[section] = {}
        values = values[section]
        if not isinstance(values, dict):
            raise UsageError(f"--{key}: {section} is a value, not a section")
    values[name] = value


def _complaint(details: ErrorDetails, path: str, origins: Origins) -> str:
    names = [str(part) for part in details["loc"]]
    key = ".".join(names)
    origin = next((origins[part] for part in _and_parents(names) if part in origins), path)
    if origin == f"--{key}":
        origin, key = f"{path}: {origin}", ""
    where = f"{origin}: {key}: " if key else f"{origin}: "
    match details["type"]:
        case "extra_forbidden":
            return f"{where}unknown key{_suggestion(names)}"
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


def _suggestion(names: list[str]) -> str:
    """The key of that name in another section, else the nearest of this section, and the section's keys."""
    everywhere = [f"{section}.{key}" for section in _keys(Recipe) for key in _keys(_section(section))]
    for key in everywhere:
        if key.endswith(f".{names[-1]}"):
            return f" (did you mean {key!r}?)"
    valid = _keys(Recipe) if len(names) == 1 else _keys(_section(names[0]))
    return (
        nearest(names[-1], valid)
        or (nearest(names[-1], everywhere) if len(names) == 1 else "")
        or f"; valid: {', '.join(valid)}"
    )


def _section(name: str) -> type[BaseModel]:
    annotation = Recipe.model_fields[name].annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else BaseModel


def _keys(section: type[BaseModel]) -> list[str]:
    return [name for name in section.model_fields if name != "made_with"]

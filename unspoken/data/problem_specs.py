"""What `unspoken data problems` is asked for: data sets with settings, as they are written on the command line.

    chain_sum                                             NAME
    chain_sum:min_terms=2,max_terms=2,max_digits=1        NAME:SETTING=VALUE,...       values in YAML
    easy=chain_sum:max_terms=2                            LABEL=NAME...

A label is what tables and the rows' `task` say; by default the name, with a number where it comes again.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from unspoken.errors import UsageError

_LABEL = re.compile(r"[\w.+-]+")
_BETWEEN_SETTINGS = re.compile(r",(?![^\[]*\])")  # no comma of a list


@dataclass(frozen=True)
class Spec:
    """A data set, its settings, and what its rows are called; `text` is what the user wrote."""

    text: str
    name: str
    settings: dict[str, Any]
    label: str


def parse(texts: Sequence[str]) -> list[Spec]:
    """Raises UsageError for what is no spec, and for a label that is given twice."""
    parts = [_parts(text) for text in texts]
    given = [label for label, _, _ in parts if label]
    if twice := next((label for label in given if given.count(label) > 1), None):
        raise UsageError(f"two specs have the label {twice!r}")
    specs: list[Spec] = []
    for text, (label, name, settings) in zip(texts, parts):
        taken, count = {*given, *(spec.label for spec in specs)}, 1
        free = label or name
        while not label and free in taken:
            count += 1
            free = f"{name}-{count}"
        specs.append(Spec(text, name, settings, free))
    return specs


def _parts(text: str) -> tuple[str, str, dict[str, Any]]:
    """Label or nothing, name, settings."""
    head, _, tail = text.partition(":")
    label, equals, name = head.rpartition("=")
    if not name or (equals and not _LABEL.fullmatch(label)):
        raise UsageError(f"{text!r} is no spec: [LABEL=]NAME[:SETTING=VALUE,...], a label in letters, digits and ._+-")
    settings: dict[str, Any] = {}
    for setting in filter(None, _BETWEEN_SETTINGS.split(tail)):
        key, equals, value = (part.strip() for part in setting.partition("="))
        if not key or not equals:
            raise UsageError(f"{text}: {setting!r} is no setting; write SETTING=VALUE")
        if key in settings:
            raise UsageError(f"{text}: {key} is given twice")
        try:
            settings[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UsageError(f"{text}: the value of {key} is no YAML: {value}") from error
    return label, name, settings

"""Reads and writes YAML 1.2 with plain data. The reader records the line of every value.

A file cannot run code, and the expansion of aliases is limited.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.representer import SafeRepresenter
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.tag import Tag

from rloo.config.file_checks import check_file, one_line

MAX_VALUES = 10_000
MAX_BYTES = 1_000_000
# Numbers of YAML 1.1 that are text in YAML 1.2, and 010 (8 in YAML 1.1, 10 in YAML 1.2).
_AMBIGUOUS = re.compile(r"[-+]?(0[0-9]+|0b.*|.*_.*)")
PLAIN_TAGS = ("null", "bool", "int", "float", "str", "timestamp", "seq", "map", "merge")
_PREFIX = "tag:yaml.org,2002:"


def read_yaml(path: str, is_whole: Callable[[str], bool]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values in a YAML file, with nested names joined by dots, and `file, line n: ` for each
    name. A mapping is a single value if `is_whole` is true for its name. Raises ValueError, with
    the line, for YAML that is broken, empty, not a mapping, has tags or a key twice, or is too
    large after its aliases are expanded."""
    check_file(path, "config", most=MAX_BYTES)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason}") from None
    yaml = _yaml()
    try:
        root = yaml.compose(text)
        if root is None:
            raise ValueError(f"{path} is empty; it must hold options (beta: 0.02)")
        if not isinstance(root, MappingNode):
            raise _error("must be a mapping of options (beta: 0.02)", root)
        _check_nodes(root)
        lines: dict[str, int] = {}
        values = {
            name: _construct(yaml.constructor, name, node)
            for name, node in _leaves(yaml.constructor, root, "", is_whole, lines)
        }
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1
        raise ValueError(f"{path}, line {line}: {error.problem}") from None
    except YAMLError as error:
        raise ValueError(f"{path}: {one_line(error)}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    return values, {name: f"{path}, line {line}: " for name, line in lines.items()}


def read_value(text: str) -> Any:
    """The YAML value of `text`, such as [a, 1] or null; `text` itself if it is not valid YAML."""
    yaml = _yaml()
    try:
        node = yaml.compose(text)
        if node is None:
            return text
        _check_nodes(node)
        return yaml.constructor.construct_object(node, deep=True)
    except (YAMLError, RecursionError, ValueError):
        return text


def write_yaml(values: dict[str, Any]) -> str:
    """`values`, of JSON types, as YAML that `read_yaml` reads back to equal values."""
    stream = StringIO()
    _yaml().dump(values, stream)
    return stream.getvalue()


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver, yaml.Representer = _Resolver, _Representer
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    return yaml


class _Resolver(VersionedResolver):
    """The resolver of YAML 1.2, except that yes, no, on and off are bools, as in YAML 1.1."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is ScalarNode and implicit[0] and value.lower() in ("yes", "no", "on", "off"):
            return Tag(suffix=f"{_PREFIX}bool")
        tag = super().resolve(kind, value, implicit)
        if str(tag) == f"{_PREFIX}int" and _AMBIGUOUS.fullmatch(value):
            return Tag(suffix=f"{_PREFIX}str")
        return tag


class _Representer(SafeRepresenter):
    """Writes 1e-06 as 1.0e-06, so that YAML 1.1 also reads a number."""

    def represent_float(self, data: float) -> ScalarNode:
        digits, e, exponent = repr(data).partition("e")
        point = ".0" if e and "." not in digits else ""
        return self.represent_scalar(f"{_PREFIX}float", f"{digits}{point}{e}{exponent}")


_Representer.add_representer(float, _Representer.represent_float)


def _error(problem: str, node: Node) -> MarkedYAMLError:
    return MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _check_nodes(root: Node) -> None:
    """Raise for tags and for too many values; the target of an alias counts at each use."""
    waiting = [root]
    number = 0
    while waiting:
        node = waiting.pop()
        number += 1
        if number > MAX_VALUES:
            raise _error(
                f"more than {MAX_VALUES} values: an anchor holds itself, or aliases repeat others "
                "many times over",
                node,
            )
        if str(node.tag).removeprefix(_PREFIX) not in PLAIN_TAGS:
            raise _error(f"tag {node.tag} is not allowed; a configuration is plain data", node)
        if isinstance(node, MappingNode):
            waiting += [part for pair in node.value for part in pair]
        elif isinstance(node, SequenceNode):
            waiting += node.value


def _leaves(
    constructor: Any,
    node: MappingNode,
    prefix: str,
    is_whole: Callable[[str], bool],
    lines: dict[str, int],
) -> Iterator[tuple[str, Node]]:
    """Yield every value with its name. Adds the line of each name, also of sections, to `lines`."""
    constructor.flatten_mapping(node)
    for key, value in node.value:
        if not isinstance(key, ScalarNode):
            raise _error("a key must be text", key)
        name = prefix + key.value
        if name in lines:
            raise _error(f"{name} is given twice (first in line {lines[name]})", key)
        lines[name] = key.start_mark.line + 1
        if isinstance(value, MappingNode) and value.value and not is_whole(name):
            yield from _leaves(constructor, value, f"{name}.", is_whole, lines)
        else:
            yield name, value


def _construct(constructor: Any, name: str, node: Node) -> Any:
    try:
        return constructor.construct_object(node, deep=True)
    except ValueError as error:  # a date such as 2024-99-99
        raise _error(f"{name}: {error}", node) from None

"""The schema of a command's object: the envelope, and the types that its data were seen to have."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from vllm_headroom_tools.conclusion import SCHEMA, Conclusion

NAMES: Final = {str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
KEYED: Final = frozenset({"evidence", "numbers", "settings", "known", "measured", "lines"})
"""Objects whose keys are no names of ours."""

WIDTH: Final = 100
VERDICT: Final = {"enum": [str(conclusion) for conclusion in Conclusion]}
FINDING: Final = {
    "subject": {"type": "string"},
    "verdict": VERDICT,
    "text": {"type": "string"},
    "fix": {"type": "array", "items": {"type": "string"}},
}


def write_schema(command: str, data: Sequence[object]) -> str:
    """Write the schema with each leaf on one line."""
    text = json.dumps(build_schema(command, data), indent=1)
    for pattern in (r"\[[^\[\]{}]*\]", r"\{[^{}]*\}"):
        text = re.sub(pattern, lambda leaf: " ".join(leaf[0].split()) if len(leaf[0]) < WIDTH else leaf[0], text)
    return f"{text}\n"


def build_schema(command: str, data: Sequence[object]) -> dict[str, Any]:
    """Build the schema of a command whose data were seen to be these."""
    finding = {"type": "object", "properties": FINDING, "required": list(FINDING)}
    properties = {
        "schema": {"const": SCHEMA.format(command)},
        "command": {"const": command},
        "status": {"enum": [0, 1, 2]},
        "verdict": VERDICT,
        "headline": {"type": "string"},
        "findings": {"type": "array", "items": finding},
        "data": {"description": "Empty where the input cannot be used.", "anyOf": [{"maxProperties": 0}, _infer(data)]},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA.format(command),
        "title": f"What vllm-headroom {command} --json prints; null is what is not known",
        "type": "object",
        "properties": properties,
        "required": list(properties),
    }


def _infer(examples: Sequence[object], name: str = "") -> dict[str, Any]:
    types = {NAMES.get(type(example), "string") for example in examples if not isinstance(example, dict | list | tuple)}
    objects = [example for example in examples if isinstance(example, dict)]
    lists = [example for example in examples if isinstance(example, list | tuple)]
    types |= {"object"} if objects else set()
    types |= {"array"} if lists else set()
    if types <= {"null"}:
        return {}
    schema: dict[str, Any] = {"type": sorted(types | {"null"}) if name else "object"}
    if objects and name not in KEYED:
        keys = dict.fromkeys(key for document in objects for key in document)
        schema["properties"] = {
            key: _infer([document[key] for document in objects if key in document], key) for key in keys
        }
        schema["required"] = [key for key in keys if all(key in document for document in objects)]
    if items := [item for items in lists for item in items]:
        schema["items"] = _infer(items, f"{name}[]")
    return schema

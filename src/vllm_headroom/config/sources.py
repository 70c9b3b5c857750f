"""Where settings are written beside the command line: the environment and a YAML file."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

import yaml

from vllm_headroom.config.given import PREFIX, Found, Given, unknown

CONFIG: Final = "config"
"""The option that is no setting: it names the file."""

SERVICE_VARIABLE: Final = re.compile(
    r"HEADROOM_(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)"
)
SERVICE_PORT: Final = re.compile(r"HEADROOM_(?:\w+_)?PORT=(?:tcp|udp|sctp)://.*")
"""What Kubernetes puts into every container's environment for a Service named headroom or headroom-anything."""


def key(setting: str) -> str:
    """Return how the file spells a setting: pydantic has a `model_config` of its own, so ours is `model_config_`."""
    return setting.removesuffix("_")


def option(setting: str) -> str:
    """Return how the command line spells a setting."""
    return "--" + key(setting).replace("_", "-")


def variable(setting: str) -> str:
    """Return how the environment spells a setting."""
    return PREFIX + key(setting).upper()


def from_environment(environ: Mapping[str, str], settings: Collection[str]) -> Found:
    """Read the variables with our prefix; one that is empty counts as not set, as orchestrators' templates leave it."""
    known = {variable(setting): setting for setting in settings}
    ours = {name: environ[name] for name in sorted(environ) if name.startswith(PREFIX) and environ[name].strip()}
    return Found(
        given=tuple(
            Given(setting=known[name], name=name, value=value) for name, value in ours.items() if name in known
        ),
        mistakes=tuple(
            unknown(name, known) for name, value in ours.items() if name not in known and not _of_a_service(name, value)
        ),
    )


def from_file(path: str, name: str, settings: Collection[str]) -> Found:
    """Read a YAML mapping of settings; `name` is how the path was given. A null counts as not set."""
    root = _mapping(path, name)
    if isinstance(root, str):
        return Found(mistakes=(root,))
    return _from_mapping(root, path, settings) if root else Found()


def _mapping(path: str, name: str) -> yaml.MappingNode | str | None:
    """Return what the file holds, None for an empty one, or the mistake."""
    if not path:
        return f"{name}: got nothing, accepts the path of a YAML file"
    try:
        root = yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        return f"{name}: got {path!r} ({error.strerror}), accepts the path of a YAML file"
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        return f"{path}{line}: not YAML ({error.problem})"
    except (UnicodeDecodeError, yaml.YAMLError):
        return f"{path}: not YAML (it is no text in UTF-8)"
    if root is None or isinstance(root, yaml.MappingNode):
        return root
    return f"{path}: not a mapping, accepts settings such as 'sample_interval_seconds: 5'"


def _from_mapping(root: yaml.MappingNode, path: str, settings: Collection[str]) -> Found:
    known = {key(setting): setting for setting in settings}
    given: list[Given] = []
    mistakes: list[str] = []
    written = [_text(word) or "a key that is no text" for word, _ in root.value]
    for word, (_, node) in zip(written, root.value, strict=True):
        name = f"{word} in {path}"
        if word not in known:
            mistakes.append(unknown(name, known))
        elif written.count(word) > 1:
            mistakes.append(f"{name}: given {written.count(word)} times, accepts one")
        elif not node.tag.endswith(":null"):
            given.append(Given(setting=known[word], name=name, value=_texts(node)))
    return Found(given=tuple(given), mistakes=tuple(dict.fromkeys(mistakes)))


def _texts(node: yaml.Node) -> object:
    """Return what was written, not what YAML makes of it: `yes` is no number, and 1:30 is not 90."""
    if isinstance(node, yaml.SequenceNode):
        return [_text(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {_text(key): _text(value) for key, value in node.value}
    return _text(node)


def _text(node: yaml.Node) -> str | None:
    return node.value if isinstance(node, yaml.ScalarNode) else None


def _of_a_service(name: str, value: str) -> bool:
    return bool(SERVICE_VARIABLE.fullmatch(name) or SERVICE_PORT.fullmatch(f"{name}={value}"))

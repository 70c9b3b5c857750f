"""The settings in YAML: a file that gives them, or what --print-config shows."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import yaml

from vllm_headroom.config.kinds import redacted
from vllm_headroom.config.settings import Settings
from vllm_headroom.config.sources import Found, Given, key, unknown
from vllm_headroom.expose.web.config import yaml_text


def from_file(path: str, name: str, settings: Collection[str]) -> Found:
    """Read a YAML mapping of settings; `name` is how the path was given. A null counts as not set."""
    root = _mapping(path, name)
    if isinstance(root, str):
        return Found(mistakes=(root,))
    return _from_mapping(root, path, settings) if root else Found()


def settings_yaml(settings: Settings) -> str:
    """Return what is in force as YAML that --config accepts, with stars for secrets."""
    in_force = settings.model_dump(mode="json")
    in_force["engine_url"] = redacted(settings.engine_url)
    in_force["engine_headers"] = dict.fromkeys(settings.engine_headers, "***")
    return yaml.safe_dump(
        {key(name): in_force[name] for name in in_force if name not in settings.no_options},
        sort_keys=False,
        allow_unicode=True,
    )


def _mapping(path: str, name: str) -> yaml.MappingNode | str | None:
    """Return what the file holds, None for an empty one, or the mistake."""
    if not path:
        return f"{name}: got nothing, accepts the path of a YAML file"
    try:
        root = yaml.compose(yaml_text(Path(path)), Loader=yaml.SafeLoader)
    except OSError as error:
        return f"{name}: got {path!r} ({error.strerror}), accepts the path of a YAML file"
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        return f"{path}{line}: not YAML ({error.problem})"
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        what = "nested too deep" if isinstance(error, RecursionError) else "it is no text in UTF-8"
        return f"{path}: not YAML ({what})"
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

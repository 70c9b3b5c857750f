"""The options of `vllm serve`, extracted from a command line, a script or a manifest."""

import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from vllm_headroom.scrape.proc.files import read_command
from vllm_headroom.text_file import read_file
from vllm_headroom.yaml_file import NotYamlError, parse_yaml
from vllm_headroom_tools.options import BadOptions
from vllm_headroom_tools.sizing.releases import parse_release

FILE_LIMIT_BYTES: Final = 2**20
"""Our choice: the maximum number of bytes that are read from a script or manifest."""

LONGEST_COMMAND_LINE: Final = 2**15
"""Our choice: the maximum number of characters in a command line. The time that shlex takes is
quadratic in a word's length. It is 0.3 s for this length, and minutes for 1 MiB.
"""

STANDARD_INPUT: Final = "-"

ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)=(.*)", re.ASCII | re.DOTALL)
VARIABLE: Final = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|\((\w+)\)|(\w+))", re.ASCII)
"""A shell variable, optionally with a default, or a variable in a manifest, $(NAME)."""

WHOLE_VARIABLE: Final = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?\})", re.ASCII)
"""A word that consists of a single variable or of an entire shell array."""

ARRAY: Final = re.compile(r"^[^\S\n]*(\w+)\+?=\(([^()]*)\)", re.ASCII | re.MULTILINE)
"""A shell array, which may span several lines. The indentation contains no line break. Otherwise,
the time would be quadratic in the number of blank lines.
"""

IMAGE: Final = re.compile(
    r"(?![-~.])[^=\s/]+/[^=\s]*vllm[^=\s]*|vllm[\w.-]*:[^/\s]+", re.IGNORECASE
)
"""The name of a vLLM container image, such as vllm/vllm-openai:v0.20.0. The part before the first
slash contains no slash. Otherwise, the time would be quadratic in the number of slashes.
"""

RELEASE_OPTION: Final = "--vllm-version="
ENVIRONMENT_OPTION: Final = "--vllm-env="
"""The prefixes of the `plan` options made from an image tag and from variables."""

ENVIRONMENT: Final = (
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS",
    "VLLM_USE_V2_MODEL_RUNNER",
)
"""vLLM's environment variables (envs.py) that affect vLLM's checks, or how vLLM divides the memory.
"""

SWITCHES: Final = {"1": True, "true": True, "0": False, "false": False}
"""The accepted values of these variables."""

IMAGE_TAG: Final = re.compile(r"vllm[^:]*:v?(0\.\d+(?:\.\d+)?)(?![\d.])", re.IGNORECASE | re.ASCII)
"""The release in the tag of a vLLM image, for example in v0.20.0-cu130."""

LINE_END: Final = re.compile(r"[|;&]+|\d?>.*|<.*")
"""Matches a word that ends or redirects a shell command."""

SHELLS: Final = frozenset({"sh", "bash", "ash", "dash", "zsh"})
NAME_BYTES: Final = 255
"""The maximum length of a file name on Linux (NAME_MAX)."""

FILE_SUFFIXES: Final = frozenset({".yaml", ".yml", ".json", ".sh"})
"""The file name extensions of manifests and scripts."""

CONFIG_OPTION: Final = "--config"
API_SERVERS: Final = ("vllm.entrypoints.openai.api_server", "api_server.py")


def read_serve_line(words: Sequence[str], *, with_surroundings: bool = False) -> list[str]:
    """Return the options of `vllm serve` in these words.

    The model becomes the option --model. A single word may be `-` for standard input, a script or
    manifest, or a pid. The options in the file named by --config are inserted. With
    `with_surroundings`, the result begins with two options of `plan`:

    - --vllm-version, with the release in the container image's tag
    - --vllm-env, with the variables in ENVIRONMENT

    Raises BadOptions if there is no `vllm serve` command line.
    """
    options = _insert_config_file(_read_words(words))
    if with_surroundings:
        return options
    own_options = (RELEASE_OPTION, ENVIRONMENT_OPTION)
    return [option for option in options if not option.startswith(own_options)]


def _read_words(words: Sequence[str]) -> list[str]:
    """Return the options in a command line.

    A single word may name a file or a process instead. Raises BadOptions if the words, the file or
    the process contain no vLLM command line.
    """
    if len(words) != 1:
        return _find_options(words, {}, "the line")
    word = words[0]
    name = os.fsdecode(os.fsencode(word)[:NAME_BYTES])
    # Text with spaces is taken as a file name only if that file exists.
    if len(word.split()) > 1 and not Path(name).exists():
        # The word is an entire command line in quotes.
        return _read_text(word, "the line")
    text = _read_source(word)
    if text is not None:
        return _read_text(text, word)
    # A number is the pid of a server on this machine. A file with this name takes precedence.
    if word.isdecimal():
        command = read_command(Path("/proc"), int(word))
        if not command:
            raise BadOptions(f"-- {word}: no command line of such a process can be read")
        if not _is_serving(command):
            raise BadOptions(f"process {word}: it runs no `vllm serve`")
        return _find_options(command, {}, f"process {word}")
    is_option = word.startswith("-")
    # A model name contains a slash and does not end in the extension of a script or manifest.
    if not is_option and ("/" not in word or Path(word).suffix in FILE_SUFFIXES):
        raise BadOptions(f"-- {word}: there is no such file, and it is no `vllm serve` line")
    return _find_options(words, {}, "the line")


def _insert_config_file(options: list[str]) -> list[str]:
    """Return the options, preceded by those from the YAML file named by --config.

    The keys in the file are option names. `true` means that the option has no value (vLLM 0.33,
    utils/argparse_utils.py, `load_config_file`). Raises BadOptions if the file cannot be read.
    """
    for index, word in enumerate(options):
        name, equals_sign, value = word.partition("=")
        # As in vLLM, only the first --config is used.
        if name != CONFIG_OPTION:
            continue
        if not equals_sign:
            value = "".join(options[index + 1 : index + 2])
        try:
            content = parse_yaml(read_file(Path(value), FILE_LIMIT_BYTES), as_text=True).document
        except OSError as error:
            raise BadOptions(f"{CONFIG_OPTION} {value}: {error.strerror}") from None
        except NotYamlError as error:
            raise BadOptions(f"{CONFIG_OPTION} {value}: {error}") from None
        if not isinstance(content, dict):
            raise BadOptions(f"{CONFIG_OPTION} {value}: it has no options in it")
        file_options = []
        for key, setting in content.items():
            file_options += _spell_option(str(key), setting)
        # The last occurrence of an option counts. Therefore, the command line comes after the file.
        return [*file_options, *options]
    return options


def _spell_option(key: str, setting: object) -> list[str]:
    """Convert an option from a YAML file to words of a command line."""
    name = f"--{key.replace('_', '-')}"
    if setting is None or setting == "true":
        return [name]
    if setting == "false":
        return []
    if isinstance(setting, list):
        return [name, *map(str, setting)]
    if isinstance(setting, dict):
        return [f"{name}={json.dumps(setting)}"]
    return [f"{name}={setting}"]


def _read_source(word: str) -> str | None:
    """Return the text of standard input or a file.

    Returns None if the word is neither. Raises BadOptions if standard input or the file cannot be
    read, or is not text.
    """
    try:
        if word == STANDARD_INPUT:
            return sys.stdin.buffer.read(FILE_LIMIT_BYTES).decode()
        if Path(word).is_file():
            return read_file(Path(word), FILE_LIMIT_BYTES).decode()
    except OSError as error:
        raise BadOptions(f"-- {word}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadOptions(f"-- {word}: it is no text in UTF-8") from None
    return None


def _read_text(text: str, name: str) -> list[str]:
    """Return the options in a manifest or a script.

    Raises BadOptions if the text does not run vLLM.
    """
    containers = list(_list_containers(text))
    for container in containers:
        if _is_serving(container.words):
            return _find_options(container.words, container.variables, name)
    if containers:
        raise BadOptions(f"{name}: none of its containers runs vLLM")
    # In a script, arrays are parsed first, because the command line may use them.
    variables: dict[str, str] = {}
    for array_name, content in ARRAY.findall(text):
        lines = [line.partition(" #")[0] for line in content.splitlines()]
        variables[array_name] = " ".join([variables.get(array_name, ""), *lines]).strip()
    # A backslash continues a command on the next line.
    for line in re.sub(r"\\\r?\n", " ", ARRAY.sub("", text)).splitlines():
        try:
            words = _split_line(line, has_comments=True)
        # An unbalanced quote matters only on the line that starts the server.
        except ValueError as error:
            if "vllm" in line:
                raise BadOptions(f"{name}: {error} in {line[:60]!r}") from None
            continue
        if _is_serving(words):
            return _find_options(words, variables, name)
        for word in words:
            assignment = ASSIGNMENT.fullmatch(word)
            if assignment is not None:
                variables[assignment[1]] = _expand(assignment[2], variables)
    raise BadOptions(f"{name}: there is no `vllm serve` in it")


class Container(Struct, frozen=True):
    """A container in a manifest or compose file."""

    # The words of the container's command, preceded by the name of its image.
    words: list[str]
    # The environment of the container.
    variables: dict[str, str]


def _list_containers(text: str) -> Iterator[Container]:
    """Yield the containers in a manifest or compose file."""
    for document in re.split(r"(?m)^---.*$", text):
        try:
            content = parse_yaml(document.encode(), as_text=True).document
        except NotYamlError:
            continue
        yield from _find_containers(content)


def _find_containers(content: object) -> Iterator[Container]:
    """Yield the containers in a part of a document: every mapping with an image."""
    parts: Iterable[object] = ()
    if isinstance(content, list):
        parts = content
    # A mapping with an image is a container, wherever it is in the document.
    elif isinstance(content, dict) and isinstance(content.get("image"), str):
        yield _read_container(content)
    elif isinstance(content, dict):
        parts = content.values()
    for part in parts:
        yield from _find_containers(part)


def _read_container(container: Mapping[str, Any]) -> Container:
    """Return a container's command and environment variables.

    Raises BadOptions if a command has an unbalanced quote.
    """
    words: list[str] = []
    # The command consists of the words of these fields, in this order.
    for field in ("image", "entrypoint", "command", "args"):
        value = container.get(field)
        if isinstance(value, str):
            words += _split_words(value, field)
        elif isinstance(value, list):
            words += [str(word) for word in value]
    variables: dict[str, str] = {}
    for field in ("env", "environment"):
        variables |= _read_variables(container.get(field))
    return Container(words, variables)


def _split_line(line: str, *, has_comments: bool = False) -> list[str]:
    """Split a line into words as a shell does.

    Raises ValueError if a quote is unbalanced or the line is too long.
    """
    if len(line) > LONGEST_COMMAND_LINE:
        raise ValueError(f"more than {LONGEST_COMMAND_LINE} characters")
    return shlex.split(line, comments=has_comments)


def _split_words(text: str, field: str) -> list[str]:
    """Split a container's field into words; raise BadOptions if this is not possible."""
    if field == "image":
        # An image name may be a Helm or Compose expression that contains spaces.
        return [text]
    try:
        return _split_line(text)
    except ValueError as error:
        raise BadOptions(f"{field} of a container: {error} in {text[:60]!r}") from None


def _read_variables(entries: object) -> dict[str, str]:
    """Parse an environment: a mapping, Kubernetes name-value pairs, or a list of NAME=VALUE."""
    if isinstance(entries, dict):
        return {str(name): str(value) for name, value in entries.items()}
    variables: dict[str, str] = {}
    if not isinstance(entries, list):
        return variables
    for entry in entries:
        # The value of a pair with `valueFrom` is not in the manifest.
        if isinstance(entry, dict) and isinstance(entry.get("value"), str):
            variables[str(entry.get("name"))] = entry["value"]
        elif isinstance(entry, str) and "=" in entry:
            name, _, value = entry.partition("=")
            variables[name] = value
    return variables


def _is_serving(words: Sequence[str]) -> bool:
    """Return whether the words start a vLLM server, possibly in a shell or container."""
    if _find_start(words) is not None:
        return True
    script = _find_script(words)
    return script is not None and ("vllm serve" in script or API_SERVERS[0] in script)


def _find_options(words: Sequence[str], variables: Mapping[str, str], name: str) -> list[str]:
    """Return the words after the server's name, with the model as the option --model.

    Raises BadOptions if the words do not start a server.
    """
    surroundings = _read_version(words)
    script = _find_script(words)
    if script is not None:
        assignments = "".join(f"{key}={shlex.quote(value)}\n" for key, value in variables.items())
        return [*surroundings, *_read_text(assignments + script, name)]
    start = _find_start(words)
    if start is None:
        start = _find_first_argument(words, name)
    options = []
    # The words after a separator such as `&&` belong to another command.
    for word in words[start:]:
        if LINE_END.fullmatch(word):
            break
        options += _expand_word(word, variables)
    # vLLM also accepts the model as its first argument.
    if options and not options[0].startswith("-"):
        options[0] = f"--model={options[0]}"
    surroundings += _read_environment(words[:start], variables)
    return [*surroundings, *options]


def _read_environment(words: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Return an option with the ENVIRONMENT variables that are set for the command line.

    Returns an empty list if none of the variables are set.
    """
    environment = dict(variables)
    for word in words:
        assignment = ASSIGNMENT.fullmatch(word)
        if assignment is not None:
            environment[assignment[1]] = assignment[2]
    settings = [
        f"{name}={environment[name]}"
        for name in ENVIRONMENT
        if environment.get(name, "").strip().lower() in SWITCHES
    ]
    return [ENVIRONMENT_OPTION + ",".join(settings)] if settings else []


def _read_version(words: Sequence[str]) -> list[str]:
    """Return the option for the vLLM release in the tag of a container image.

    Returns an empty list if there is no such tag or the release is unknown.
    """
    for word in words:
        image = IMAGE.fullmatch(word)
        tag = IMAGE_TAG.search(word) if image is not None else None
        if tag is None:
            continue
        try:
            parse_release(tag[1])
        except ValueError:
            return []
        return [f"{RELEASE_OPTION}{tag[1]}"]
    return []


def _find_first_argument(words: Sequence[str], name: str) -> int:
    """Return the index of the first argument in words without the server's name.

    If the container's image starts the server, the words are only its arguments. Raises BadOptions
    if they begin with neither an option nor a model name.
    """
    place = 0
    while place < len(words) and ASSIGNMENT.fullmatch(words[place]) and words[place][0] != "-":
        place += 1
    if place < len(words) and not words[place].startswith("-") and "/" not in words[place]:
        raise BadOptions(f"{name}: there is no `vllm serve` in it")
    return place


def _find_script(words: Sequence[str]) -> str | None:
    """Return the script that a shell runs with -c.

    Returns None if there is no shell.
    """
    for index, word in enumerate(words[:-2]):
        is_shell = word.rpartition("/")[2] in SHELLS
        if is_shell and re.fullmatch(r"-[a-z]*c", words[index + 1]):
            return words[index + 2]
    return None


def _find_start(words: Sequence[str]) -> int | None:
    """Return the index of the first word after the server's name.

    Returns None if there is no server.
    """
    for index, word in enumerate(words):
        if word.endswith(API_SERVERS):
            return index + 1
        previous_word = words[index - 1] if index else ""
        if word == "serve" and previous_word.rpartition("/")[2] == "vllm":
            return index + 1
    # If the words do not contain the server's name, a vLLM image starts the server.
    for index, word in enumerate(words):
        if IMAGE.fullmatch(word):
            return index + 1
    return None


def _expand_word(word: str, variables: Mapping[str, str]) -> list[str]:
    """Expand a word's variables; a variable that contains options becomes several words."""
    variable = WHOLE_VARIABLE.fullmatch(word)
    if variable is not None:
        value = variables.get(variable[1] or variable[2], "")
        if value.startswith("-"):
            try:
                return [_expand(part, variables) for part in _split_line(value)]
            except ValueError:
                return [value]
    return [_expand(word, variables)]


def _expand(word: str, variables: Mapping[str, str]) -> str:
    """Expand a word's variables; a variable without a value is left unchanged."""

    def replace(match: re.Match[str]) -> str:
        name = match[1] or match[3] or match[4]
        return variables.get(name) or match[2] or match[0]

    return VARIABLE.sub(replace, word)

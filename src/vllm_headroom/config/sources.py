"""What each source of settings gives, before it is read, and how it spells them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from msgspec import Struct

PREFIX: Final = "HEADROOM_"


class Given(Struct, frozen=True, kw_only=True):
    """One setting as its author wrote it; `name` is how and where, `value` text or, from YAML, a list or mapping."""

    setting: str
    name: str
    value: object


class Found(Struct, frozen=True, kw_only=True):
    """What one source gives, and its mistakes, one line each."""

    given: tuple[Given, ...] = ()
    mistakes: tuple[str, ...] = ()


def unknown(name: str, known: Iterable[str], what: str = "a setting") -> str:
    """Say that there is no such thing; its value is not shown, for it may be a secret under a wrong name."""
    spelt = {_plain(each): each for each in sorted(known)}
    meant = _plain(name.split(maxsplit=1)[0])
    containing = sorted((each for each in spelt if set(meant.split("_")) <= set(each.split("_"))), key=len)
    import difflib  # noqa: PLC0415 - only a mistake asks for it

    shortest = [each for each in containing if len(each) == len(containing[0])]
    closest = shortest or difflib.get_close_matches(meant, spelt, n=1)
    meant_names = " or ".join(spelt[each] for each in closest)
    return f"{name}: not {what}, " + (f"did you mean {meant_names}?" if closest else "see --help")


def _plain(name: str) -> str:
    return name.lower().lstrip("-").removeprefix(PREFIX.lower()).replace("-", "_")


CONFIG: Final = "config"
"""The option that is no setting: it names the file."""

SOURCES: Final = """\
Each is an option, an environment variable and a key of the YAML file:
  --sample-interval-seconds 5
  HEADROOM_SAMPLE_INTERVAL_SECONDS=5
  sample_interval_seconds: 5
The command line beats the environment, and the environment beats the file.
An empty environment variable counts as not set."""

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


def _of_a_service(name: str, value: str) -> bool:
    return bool(SERVICE_VARIABLE.fullmatch(name) or SERVICE_PORT.fullmatch(f"{name}={value}"))

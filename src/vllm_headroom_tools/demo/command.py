"""The command `demo`, which runs the daemon against a simulated engine and GPU."""

import sys
from argparse import Namespace
from typing import Annotated, ClassVar, Final

from pydantic import Field

from vllm_headroom.config import AUTO, Number, from_text, setting
from vllm_headroom_tools.cli import Command, write_note
from vllm_headroom_tools.demo.world import TABLE
from vllm_headroom_tools.options import choice
from vllm_headroom_tools.settings import ModelSettings

FLEET: Final = "fleet"
SCENARIOS: Final = (*TABLE, FLEET)
SCENARIO: Final = choice(SCENARIOS)
MAX_SPEED: Final = 1000
MAX_SIMULATED_GPUS: Final = 64


class DemoSettings(ModelSettings):
    """The demo's own settings, and the daemon's settings that also apply to a simulation.

    Settings of a real engine or of the Kubernetes API server are omitted.
    """

    no_options: ClassVar = frozenset(
        name
        for name in ModelSettings.model_fields
        if name.startswith(("engine_", "canary_", "evict")) or name == "engines"
    )

    scenario: Annotated[str, from_text(SCENARIO.read)] = setting(
        SCENARIOS[0],
        "What happens in the simulation.",
        metavar="NAME",
        accepts=SCENARIO.accepts,
    )
    speed: Annotated[Number, Field(gt=0, le=MAX_SPEED)] = setting(
        60,
        "How many times as fast as the clock the simulation's time runs.",
        metavar="NUMBER",
        accepts=f"a number above 0, at most {MAX_SPEED}",
    )


def format_address(settings: DemoSettings) -> str:
    """Return the address at which the page can be opened on this machine."""
    scheme = "http" if settings.web_config_file is None else "https"
    return f"{scheme}://localhost:{settings.listen_port}/"


async def _run(arguments: Namespace) -> int:
    """Run the daemon against the simulation until a signal arrives; return the exit status."""
    from vllm_headroom.daemon import logs  # noqa: PLC0415 - --help need not wait for a web server
    from vllm_headroom_tools.demo import fleet, run  # noqa: PLC0415 - the same

    settings: DemoSettings = arguments.settings
    logs.configure(settings.log_format, settings.log_level)
    gpu_count = _read_gpu_count(settings)
    if gpu_count is None:
        gpu_count = 1
    else:
        # In the demo, the value is the number of GPUs and not an index. All GPUs are watched.
        settings = settings.model_copy(update={"gpus": AUTO})
    # The line is for a person at a terminal, not for a log collector. With port 0, the line is not
    # written. The port is not known yet.
    if sys.stderr.isatty() and settings.listen_port:
        write_note(f"Open {format_address(settings)}")
    if settings.scenario == FLEET:
        return await fleet.run(settings, speed=settings.speed, gpus=gpu_count)
    return await run.run(
        settings, scenario=TABLE[settings.scenario], speed=settings.speed, gpus=gpu_count
    )


def _read_gpu_count(settings: DemoSettings) -> int | None:
    """Return the number of GPUs to simulate.

    Returns None if --gpus is not a single number above 0.
    """
    gpus = settings.gpus
    if not isinstance(gpus, tuple) or len(gpus) != 1:
        return None
    if not gpus[0].isdecimal() or gpus[0] == "0":
        return None
    return min(int(gpus[0]), MAX_SIMULATED_GPUS)


COMMAND: Final[Command] = Command(
    usage="vllm-headroom demo [OPTION VALUE]...",
    description="""\
Runs the daemon over a simulated engine and GPU: it needs and reads no real one.
With a number --gpus is how many GPUs there are.
""",
    epilog="""\
Example:
  vllm-headroom demo --scenario burst --speed 10 --gpus 8
  curl http://127.0.0.1:9839/metrics
""",
    options=lambda parser: parser.add_settings(DemoSettings),
    run=_run,
    has_report=False,
)

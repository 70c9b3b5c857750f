"""What a kubelet does with a container that has probes: ask, take out of the Service, end, begin anew."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

COMPONENT: Final = Path(__file__).parents[3] / "deploy/kubernetes/components/gates/patch.yaml"
STEP_SECONDS: Final = 0.06
"""Of the machine: between looks at what is due."""


def spec() -> Mapping[str, Any]:
    """Return the pod's specification, as far as the component has it."""
    found: Mapping[str, Any] = yaml.safe_load(COMPONENT.read_text())["spec"]["template"]["spec"]
    return found


@dataclass(slots=True)
class Probe:
    """One probe of one container: so many failures in a row are a failure, a success is one at once."""

    ask: Callable[[], bool]
    period_seconds: float
    failure_threshold: int
    passes: bool
    failures: int = 0
    due: float = 0.0

    def step(self, now: float) -> bool:
        """Ask when it is time; return whether the container passes."""
        if now >= self.due:
            self.due = now + self.period_seconds
            self.failures = 0 if self.ask() else self.failures + 1
            if not self.failures or self.failures >= self.failure_threshold:
                self.passes = not self.failures
        return self.passes


class Scripts:
    """What the component lets run in vLLM's container, with the addresses that are here and the time that runs here."""

    def __init__(self, engine: str, sidecar: str, speed: float) -> None:
        self._engine, self._sidecar, self._speed = engine, sidecar, speed
        self._code = dict[str, Any]()

    def passes(self, command: list[str]) -> bool:
        """Run `python3 -c TEXT` within this process, where a start takes no time; return whether it ended well."""
        text = command[-1]
        if text not in self._code:
            here = text.replace("http://127.0.0.1:8000", self._engine).replace("http://127.0.0.1:9839", self._sidecar)
            self._code[text] = compile(here.replace("sleep(", f"sleep({1 / self._speed} * "), "probe", "exec")
        try:
            exec(self._code[text], {"__name__": "__main__"})  # noqa: S102 - the component's own text
        except SystemExit as ended:
            return not ended.code
        return True


class Container:
    """Runs one container of a pod, again whenever it ends; `ready` is whether the pod stands in its Service.

    `start` begins the process, `watch` is called often while it lives and when it has ended, `scripts` are run by its
    probes, `now` is the time that the periods count.
    """

    def __init__(
        self,
        start: Callable[[], subprocess.Popen[bytes]],
        watch: Callable[[subprocess.Popen[bytes]], None],
        scripts: Scripts,
        now: Callable[[], float],
    ) -> None:
        self.ready = False
        self.deaths, self.restarts = 0, 0
        self._start, self._scripts, self._now, self._watch = start, scripts, now, watch
        self._spec = spec()
        (self._vllm,) = self._spec["containers"]
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        """End it at once."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            process = self._start()
            try:
                killed = self._follow(process)
            finally:
                process.kill()
                process.wait(30)
                self.ready = False
                self._watch(process)
            if not self._closing.is_set():
                self.restarts += killed
                self.deaths += not killed

    def _follow(self, process: subprocess.Popen[bytes]) -> bool:
        """Ask the probes until the process ends; return whether it was told to."""
        readiness, liveness = self._probe("readiness", passes=False), self._probe("liveness", passes=True)
        started, ending = False, None
        while process.poll() is None and not self._closing.wait(STEP_SECONDS):
            self._watch(process)
            started = started or self._answers()
            if not started:
                continue
            self.ready = readiness.step(self._now())
            if ending is None and not liveness.step(self._now()):
                ending = threading.Thread(target=self._end, args=(process,))
                ending.start()
        if ending is not None:
            ending.join()
        return ending is not None

    def _answers(self) -> bool:
        """Ask as the startup probe that has to be there: neither other is asked before it has succeeded."""
        healthy = "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"
        try:
            return self._scripts.passes([healthy])
        except OSError:
            return False

    def _probe(self, name: str, *, passes: bool) -> Probe:
        told = self._vllm[f"{name}Probe"]
        return Probe(
            lambda: self._scripts.passes(told["exec"]["command"]),
            told["periodSeconds"],
            told["failureThreshold"],
            passes,
        )

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Run the preStop hook, send SIGTERM, and SIGKILL when the time of grace is over."""
        ends = self._now() + self._spec["terminationGracePeriodSeconds"]
        self._scripts.passes(self._vllm["lifecycle"]["preStop"]["exec"]["command"])
        process.terminate()
        while process.poll() is None and self._now() < ends and not self._closing.wait(STEP_SECONDS):
            pass
        process.kill()

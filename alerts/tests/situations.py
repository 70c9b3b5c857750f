"""Situations that a team on call meets, each with what should fire, from when and how often."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from alerts.tests.engines import CARD_GIB, Engine, Phase

HOURS: Final = 4
DAYS: Final = 7

Expected = Mapping[str, tuple[int, int]]
"""The latest minute at which each alert begins to fire, and the number of times that it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Engines in a namespace of their own, and the alerts that they should raise."""

    name: str
    engines: Sequence[Engine]
    fires: Expected = field(default_factory=dict)
    incidents: int = 1
    """How many incidents PagerDuty opens with the shipped Alertmanager."""

    more: Sequence[tuple[str, str]] = ()
    """Series of others, such as kube-state-metrics; {namespace} is the situation's."""

    @property
    def namespace(self) -> str:
        """Return its name as a namespace."""
        return "".join(each if each.isalnum() else "-" for each in self.name.lower()).strip("-")

    def located(self) -> tuple[Engine, ...]:
        """Return its engines in its namespace, or in one below it."""
        return tuple(
            replace(
                engine,
                namespace=self.namespace + engine.namespace.removeprefix("ml"),
                job=f"{self.namespace}{engine.namespace.removeprefix('ml')}/vllm-headroom",
            )
            for engine in self.engines
        )


def at_work(minutes: float = HOURS * 60, **more: object) -> Phase:
    """Return a phase of an engine that serves as on any day, but for what is given."""
    return Phase(**{"minutes": minutes, "running": 20, "finished": 60, "kv": 0.4} | more)  # type: ignore[arg-type]


def idle(minutes: float, **more: object) -> Phase:
    """Return a phase of an engine that serves and has nothing to do."""
    return Phase(**{"minutes": minutes} | more)  # type: ignore[arg-type]


def loading(minutes: float, **more: object) -> Phase:
    """Return a phase of an engine that loads."""
    return Phase(**{"minutes": minutes, "state": "starting"} | more)  # type: ignore[arg-type]


def down(minutes: float, *reasons: str, **more: object) -> Phase:
    """Return a phase after an exit."""
    return Phase(**{"minutes": minutes, "state": "down", "ended": reasons} | more)  # type: ignore[arg-type]


gone = partial(Phase, state=None)
WHOLE: Final = HOURS * 60
CARD_LEFT: Final = CARD_GIB * 0.08
"""What the default utilization leaves of a card."""


def rest(*phases: Phase, **more: object) -> tuple[Phase, ...]:
    """Return these phases and one as `at_work` that fills the time."""
    return (*phases, at_work(WHOLE - sum(phase.minutes for phase in phases), **more))


def until_gone(*phases: Phase) -> tuple[Phase, ...]:
    """Return these phases, after which the target is gone."""
    return (*phases, gone(minutes=WHOLE - sum(phase.minutes for phase in phases)))


def replicas(n: int, *phases: Phase, model: str = "llama", **more: object) -> list[Engine]:
    """Return so many engines of one model with the same life."""
    return [Engine(name=f"{model}-{i}", model=model, phases=phases, **more) for i in range(n)]  # type: ignore[arg-type]


def recreated(n: int, serves: int, *before: Phase) -> list[Engine]:
    """Return the pods of one replica, each made again when the one before it crashed: 2 minutes, then a load of 12."""
    engines = []
    for turn in range(n):
        began = turn * (serves + 14)
        phases = [*([gone(minutes=began)] if began else []), Phase(minutes=2, state="down"), loading(12)]
        left = WHOLE - began - 14
        phases += [at_work(min(serves, left))]
        phases += [gone(minutes=left - serves)] if left > serves else []
        engines.append(Engine(name=f"llama-x{turn}", model="llama", phases=(*before, *phases)))
    return engines


def deployment(replicas: int, available: str, generation: str = f"7x{WHOLE // 2}") -> list[tuple[str, str]]:
    """Return what kube-state-metrics shows of the workload that has these replicas."""
    labels = '{namespace="{namespace}",deployment="vllm"}'
    return [
        (f"kube_deployment_spec_replicas{labels}", f"{replicas}x{WHOLE // 2}"),
        (f"kube_deployment_status_replicas_available{labels}", available),
        (f"kube_deployment_status_observed_generation{labels}", generation),
    ]


LOST: Final[Sequence[Situation]] = (
    Situation(
        name="one of one exits and is not started",
        engines=replicas(1, at_work(60), down(WHOLE - 60, "gone")),
        fires={"HeadroomEngineDown": (64, 1), "HeadroomModelDown": (66, 1)},
    ),
    Situation(
        name="an idle engine exits and is not started",
        engines=replicas(1, at_work(60), idle(30), down(WHOLE - 90, "gone")),
        fires={"HeadroomEngineDown": (94, 1)},
    ),
    Situation(
        name="one of five exits and is not started",
        engines=[
            *replicas(4, at_work()),
            Engine(name="llama-4", model="llama", phases=(at_work(60), down(WHOLE - 60, "gone"))),
        ],
        fires={"HeadroomEngineDown": (64, 1)},
    ),
    Situation(
        name="three of five down together",
        engines=[
            *replicas(2, at_work(), model="llama"),
            *(
                Engine(name=f"llama-{i}", model="llama", phases=rest(at_work(60), down(120, "gone"), loading(12)))
                for i in (2, 3, 4)
            ),
        ],
        fires={"HeadroomEngineDown": (64, 1), "HeadroomReplicasLost": (66, 1)},
    ),
    Situation(
        name="two of four on a node that answers no more",
        engines=[
            *replicas(2, at_work()),
            *(
                Engine(name=f"llama-{i}", model="llama", phases=rest(at_work(60), Phase(minutes=90, up=False)))
                for i in (2, 3)
            ),
        ],
        fires={"HeadroomDown": (71, 1), "HeadroomReplicasLost": (66, 1)},
    ),
    Situation(
        name="all spot replicas gone while another team runs",
        engines=[
            *replicas(3, *until_gone(at_work(90))),
            *replicas(2, at_work(), namespace="ml-other", model="qwen"),
        ],
        fires={"HeadroomModelDown": (104, 1), "HeadroomAbsent": (104, 1)},
    ),
    Situation(
        name="all spot replicas gone and made again on nodes that load for half an hour",
        engines=[
            *replicas(3, *until_gone(at_work(90))),
            *(
                Engine(
                    name=f"llama-new-{i}",
                    model="llama",
                    phases=rest(gone(minutes=92), Phase(minutes=2, state="down"), loading(33)),
                )
                for i in range(3)
            ),
        ],
        more=deployment(3, f"3x44 0x18 3x{WHOLE // 2 - 64}"),
        fires={"HeadroomModelDown": (94, 1)},
    ),
    Situation(
        name="pods made again at each crash",
        engines=recreated(4, 50),
        fires={"HeadroomModelCrashLoop": (206, 1)},
    ),
    Situation(
        name="a crash every 50 minutes with loads of 12 minutes",
        engines=replicas(
            1, *(each for _ in range(4) for each in (at_work(38), loading(12, ended=("gone",)))), at_work(40)
        ),
        fires={"HeadroomEngineCrashLoop": (152, 1), "HeadroomModelCrashLoop": (152, 1), "HeadroomModelDown": (40, 4)},
        incidents=2,
    ),
    Situation(
        name="a crash every 10 minutes",
        engines=replicas(
            1,
            at_work(60),
            *(each for _ in range(12) for each in (loading(3, ended=("gone",)), at_work(7))),
            at_work(60),
        ),
        fires={"HeadroomEngineCrashLoop": (82, 1), "HeadroomModelDown": (62, 1), "HeadroomModelCrashLoop": (182, 1)},
        incidents=2,
    ),
    Situation(
        name="all sixteen crash in service and load for 33 minutes",
        engines=replicas(16, *rest(at_work(60), loading(33, ended=("gone",)))),
        fires={"HeadroomModelDown": (62, 1), "HeadroomReplicasLost": (64, 1)},
    ),
    Situation(
        name="the only one crashes in service and loads for 33 minutes",
        engines=replicas(1, *rest(at_work(60), loading(33, ended=("gone",)))),
        fires={"HeadroomModelDown": (62, 1)},
    ),
    Situation(
        name="the only one runs out of memory and serves again after two minutes",
        engines=replicas(1, *rest(at_work(60), loading(2, ended=("out_of_memory",)))),
        fires={"HeadroomEngineDied": (64, 1)},
    ),
    Situation(
        name="one of five runs out of memory and serves again after two minutes",
        engines=[
            *replicas(4, at_work()),
            Engine(name="llama-4", model="llama", phases=rest(at_work(60), loading(2, ended=("out_of_memory",)))),
        ],
        fires={"HeadroomEngineDied": (64, 1)},
    ),
    Situation(
        name="ten of sixteen crash in service and load for half an hour",
        engines=[
            *replicas(6, at_work()),
            *(
                Engine(name=f"llama-{i}", model="llama", phases=rest(at_work(60), loading(33, ended=("gone",))))
                for i in range(6, 16)
            ),
        ],
        fires={"HeadroomReplicasLost": (64, 1), "HeadroomEngineDied": (64, 1)},
        incidents=2,
    ),
    Situation(
        name="a crash of the last old replica during a deploy",
        engines=[
            Engine(name="llama-a", model="llama", phases=rest(at_work(60), loading(20, ended=("gone",)))),
            Engine(
                name="llama-b",
                model="llama",
                phases=rest(gone(minutes=55), Phase(minutes=2, state="down"), loading(30)),
            ),
        ],
        fires={"HeadroomModelDown": (62, 1)},
    ),
    Situation(
        name="both OOM at 7 and 15 minutes with thousands of requests",
        engines=replicas(
            1,
            at_work(7, running=8200),
            loading(2, ended=("out_of_memory",)),
            at_work(6, running=8200),
            loading(2, ended=("out_of_memory",)),
            at_work(WHOLE - 17),
        ),
        fires={"HeadroomEngineDied": (12, 1)},
    ),
    Situation(
        name="a start that fails each time",
        engines=replicas(
            1, at_work(60), *(each for _ in range(25) for each in (loading(2, ended=("gone",)), down(5))), at_work(5)
        ),
        fires={
            "HeadroomModelDown": (62, 1),
            "HeadroomEngineDown": (70, 1),
            "HeadroomEngineCrashLoop": (76, 1),
        },
    ),
    Situation(
        name="a new model that crashes at each start and never serves",
        engines=replicas(1, *(each for _ in range(30) for each in (loading(3), down(5, "gone")))),
        fires={"HeadroomEngineCrashLoop": (24, 1)},
    ),
    Situation(
        name="one bad replica of sixteen crashes every 15 minutes",
        engines=[
            *replicas(15, at_work()),
            Engine(
                name="llama-15",
                model="llama",
                phases=(at_work(60), *(each for _ in range(12) for each in (loading(5, ended=("gone",)), at_work(10)))),
            ),
        ],
        fires={"HeadroomEngineDied": (64, 1), "HeadroomEngineCrashLoop": (92, 1)},
        incidents=2,
    ),
    Situation(
        name="a new replica crashes while sixteen are rolled out",
        engines=[
            *(
                Engine(
                    name=f"a-{i}", model="llama", phases=until_gone(at_work(75 + 5 * i), idle(1), down(1, "stopped"))
                )
                for i in range(16)
            ),
            *(
                Engine(name=f"b-{i}", model="llama", phases=rest(gone(minutes=60 + 5 * i), loading(12)))
                for i in range(15)
            ),
            Engine(
                name="b-15",
                model="llama",
                phases=rest(gone(minutes=60), loading(12), at_work(8), loading(12, ended=("out_of_memory",))),
            ),
        ],
        fires={"HeadroomEngineDied": (84, 1)},
    ),
    Situation(
        name="Prometheus is away for ten minutes in which the only one crashes",
        engines=replicas(1, *rest(at_work(60), loading(10, missed=True, ended=("out_of_memory",)), loading(30))),
        fires={"HeadroomModelDown": (73, 1)},
    ),
    Situation(
        name="the PodMonitor of one of two teams deleted",
        engines=[
            *replicas(3, *until_gone(at_work(90))),
            *replicas(2, at_work(), namespace="ml-other", model="qwen"),
        ],
        more=[
            (
                f'kube_pod_init_container_status_ready{{namespace="{{namespace}}",pod="llama-{i}",container="headroom"}}',
                f"1x{WHOLE // 2}",
            )
            for i in range(3)
        ],
        fires={"HeadroomAbsent": (104, 1)},
    ),
    Situation(
        name="a sidecar killed every 6 minutes",
        engines=replicas(1, at_work(60), at_work(WHOLE - 60, sidecar=6)),
        fires={"HeadroomSidecarRestarts": (92, 1)},
    ),
    Situation(
        name="both replicas hang",
        engines=replicas(2, at_work(60), Phase(minutes=60, state="stalled", running=20), at_work(WHOLE - 120)),
        fires={"HeadroomEngineStalled": (64, 1), "HeadroomModelDown": (66, 1), "HeadroomReplicasLost": (66, 1)},
    ),
    Situation(
        name="both metrics pages are errors while requests are served",
        engines=replicas(2, at_work(60), Phase(minutes=60, state="unknown", running=20), at_work(WHOLE - 120)),
        fires={"HeadroomSourceDown": (82, 1)},
    ),
    Situation(
        name="NCCL hangs at the first start",
        engines=replicas(1, loading(WHOLE, busy=1.0)),
        fires={"HeadroomEngineStuckStarting": (18, 1)},
    ),
    Situation(
        name="a start that waits forever without a sign",
        engines=replicas(1, loading(WHOLE)),
        fires={"HeadroomEngineStuckStarting": (48, 1)},
    ),
    Situation(
        name="six wait for two hours on a sleeping engine",
        engines=replicas(1, *rest(at_work(60), Phase(minutes=120, state="asleep", held=3, waiting=6))),
        fires={"HeadroomQueueBacklog": (81, 1)},
    ),
)

CAUSES: Final[Sequence[Situation]] = (
    Situation(
        name="the driver fails on ten nodes",
        engines=[
            Engine(
                name=f"m{i}-0",
                model=f"m{i}",
                phases=rest(at_work(60), Phase(minutes=120, state="stalled", running=20, nvml=False)),
            )
            for i in range(10)
        ],
        fires={
            "HeadroomEngineLostGpu": (64, 1),
            "HeadroomEngineStalled": (64, 1),
            "HeadroomModelDown": (66, 1),
        },
    ),
    Situation(
        name="a GPU falls off the bus and its engine dies",
        engines=replicas(
            1,
            *rest(at_work(60), down(60, "gone", gpu_up=False, xids=1)),
            gpus=2,
        ),
        fires={"HeadroomEngineLostGpu": (64, 1), "HeadroomEngineDown": (64, 1), "HeadroomModelDown": (66, 1)},
    ),
    Situation(
        name="an XID on a card with seven MIG instances",
        engines=[
            Engine(
                name=f"mig-{i}",
                model="small",
                card=9.75,
                uuid=f"MIG-{i}",
                phases=rest(at_work(60, outside=0.5), outside=0.5)
                if i
                else rest(at_work(60, outside=0.5), outside=0.5, xids=1),
            )
            for i in range(7)
        ],
        fires={"HeadroomGpuXid": (66, 1)},
    ),
    Situation(
        name="an out-of-memory on the GPU that ends the engine",
        engines=[
            *replicas(2, at_work()),
            Engine(
                name="llama-9",
                model="llama",
                phases=rest(at_work(58), at_work(2, burst=4.2), loading(12, ended=("out_of_memory",), ooms=1)),
            ),
        ],
        fires={"HeadroomEngineDied": (64, 1)},
    ),
    Situation(
        name="the kernel kills the engine",
        engines=[
            *replicas(2, at_work()),
            Engine(
                name="llama-9", model="llama", phases=rest(at_work(60), loading(12, ended=("oom_killed",), kills=1))
            ),
        ],
        fires={"HeadroomEngineDied": (64, 1)},
    ),
    Situation(
        name="a release that leaks on four replicas",
        engines=replicas(
            4, *rest(at_work(60), at_work(60, leak="growing"), at_work(100, leak="leaking", left=(80000, 40000)))
        ),
        fires={"HeadroomGpuMemoryGrowing": (71, 1), "HeadroomGpuMemoryLeak": (126, 1)},
        incidents=2,
    ),
    Situation(
        name="a leak whose time left wavers about a day",
        engines=replicas(
            1,
            at_work(60),
            *(
                each
                for _ in range(4)
                for each in (at_work(20, leak="leaking", left=84000.0), at_work(20, leak="leaking", left=95000.0))
            ),
            at_work(20),
        ),
        fires={"HeadroomGpuMemoryGrowing": (71, 1), "HeadroomGpuMemoryLeak": (66, 1)},
    ),
    Situation(
        name="a leak to the end",
        engines=replicas(
            1, *rest(at_work(30), at_work(150, leak="leaking", left=(9000, 60)), loading(10, ended=("out_of_memory",)))
        ),
        fires={
            "HeadroomGpuMemoryGrowing": (42, 1),
            "HeadroomGpuMemoryLeak": (38, 1),
            "HeadroomOutOfMemorySoon": (126, 1),
            "HeadroomModelDown": (182, 1),
        },
        incidents=3,
    ),
    Situation(
        name="heat on four nodes",
        engines=[Engine(name=f"h{i}-0", model=f"h{i}", phases=(at_work(),)) for i in range(4)],
        more=[
            (
                f'headroom_gpu_temperature_celsius{{job="{{namespace}}/vllm-headroom",namespace="{{namespace}}",pod="h{i}-0",instance="h{i}-0:9839",gpu="0",uuid="GPU-0"}}',
                f"70x{30} 92x{60} 70x{WHOLE // 2 - 92}",
            )
            for i in range(4)
        ],
        fires={"HeadroomGpuHot": (76, 1)},
    ),
)

TIGHT: Final[Sequence[Situation]] = (
    Situation(
        name="218 MiB free from the first request on",
        engines=replicas(1, at_work(outside=CARD_LEFT - 0.213)),
        fires={
            "HeadroomMemoryDiscrepancy": (6, 1),
            "HeadroomMemoryDiscrepancyHigh": (6, 1),
            "HeadroomGpuMemoryTight": (50, 1),
        },
    ),
    Situation(
        name="over its budget by 5.5 % with 640 MiB free",
        engines=replicas(1, at_work(outside=79.65 * 0.06 - 0.625), share=0.94),
        fires={
            "HeadroomMemoryDiscrepancy": (6, 1),
            "HeadroomMemoryDiscrepancyHigh": (6, 1),
            "HeadroomGpuMemoryTight": (50, 1),
        },
    ),
    Situation(
        name="sixteen of tensor parallel 4 over their budget from their first request on crash after an hour",
        engines=replicas(16, *rest(at_work(62, outside=3.7), loading(20, ended=("over_budget",))), gpus=4, share=0.945),
        fires={
            "HeadroomMemoryDiscrepancy": (6, 1),
            "HeadroomMemoryDiscrepancyHigh": (6, 1),
            "HeadroomGpuMemoryTight": (50, 1),
            "HeadroomModelDown": (64, 1),
            "HeadroomReplicasLost": (68, 1),
        },
        incidents=2,
    ),
    Situation(
        name="bursts of 1.5 GiB with 2 GiB free",
        engines=replicas(1, at_work(outside=CARD_LEFT - 2, burst=1.5)),
        fires={"HeadroomGpuMemoryTight": (50, 1)},
    ),
    Situation(
        name="a neighbour has 1.5 GiB of what the engine's budget keeps for its largest batch",
        engines=replicas(1, at_work(outside=-4, others=CARD_LEFT + 1.5)),
        fires={"HeadroomGpuMemoryTight": (50, 1)},
    ),
    Situation(
        name="it grows by 4 GiB after it served",
        engines=replicas(1, at_work(120, outside=2), at_work(WHOLE - 120, outside=6.1)),
        fires={
            "HeadroomMemoryDiscrepancy": (140, 1),
            "HeadroomMemoryDiscrepancyHigh": (140, 1),
            "HeadroomGpuMemoryLow": (140, 1),
        },
    ),
    Situation(
        name="a neighbour takes the whole card",
        engines=replicas(1, *rest(at_work(60), at_work(120, others=4.2))),
        fires={
            "HeadroomNeighbourFillsGpu": (68, 1),
            "HeadroomNeighbourGrowing": (72, 1),
            "HeadroomGpuMemoryLow": (76, 1),
        },
    ),
    Situation(
        name="a neighbour takes most of what is left",
        engines=replicas(1, *rest(at_work(60), at_work(120, others=2.2))),
        fires={"HeadroomNeighbourGrowing": (72, 1)},
    ),
    Situation(
        name="KV blocks leak under load",
        engines=replicas(1, at_work(180, running=8, kv=(0.1, 0.985)), at_work(60, running=8, kv=0.985)),
        fires={"HeadroomKvBlocksLeakSuspected": (216, 1)},
    ),
    Situation(
        name="more load than fits",
        engines=replicas(1, *rest(at_work(60), at_work(120, running=50, waiting=200, kv=0.99, preempted=3))),
        fires={"HeadroomQueueBacklog": (78, 1), "HeadroomKvCacheThrashing": (80, 1)},
    ),
    Situation(
        name="host memory that fills",
        engines=replicas(1, at_work(120), at_work(WHOLE - 120, host=62)),
        fires={"HeadroomHostMemoryLow": (137, 1)},
    ),
)

WELL: Final[Sequence[Situation]] = (
    Situation(name="an H100 with 2.6 GiB outside", engines=replicas(1, at_work(outside=2.6))),
    Situation(
        name="a busy hour that keeps 0.5 GiB more",
        engines=replicas(
            1,
            at_work(100, outside=3.6),
            at_work(60, outside=4.1, running=180, kv=0.9, host=58),
            at_work(80, outside=4.1),
        ),
    ),
    Situation(
        name="a slice of 10 GB",
        engines=replicas(1, at_work(60, outside=0.55), at_work(WHOLE - 60, outside=0.62), card=9.75),
    ),
    Situation(
        name="a slice of 12 GB",
        engines=replicas(1, at_work(60, outside=0.6), at_work(WHOLE - 60, outside=0.68), card=11.75),
    ),
    Situation(
        name="an L4 at 0.95",
        engines=replicas(1, at_work(30, outside=0.7), at_work(WHOLE - 30, outside=0.85), card=22.5, share=0.95),
    ),
    Situation(
        name="a slice that sleeps",
        engines=replicas(
            1,
            at_work(80, outside=0.5),
            Phase(minutes=100, state="asleep", held=2.6),
            at_work(60, outside=0.5),
            card=9.75,
        ),
    ),
    Situation(
        name="three models that swap by sleep",
        engines=[
            Engine(
                name=f"swap-{i}",
                model=f"swap-{i}",
                phases=tuple(
                    at_work(20, outside=1, others=6)
                    if turn % 3 == i
                    else Phase(minutes=20, state="asleep", held=3, others=76)
                    for turn in range(WHOLE // 20)
                ),
                role="swapped",
            )
            for i in range(3)
        ],
    ),
    Situation(
        name="three models that swap without a role",
        engines=[
            Engine(
                name=f"swap-{i}",
                model=f"swap-{i}",
                share=0.88,
                phases=tuple(
                    at_work(20, outside=1, others=6)
                    if turn % 3 == i
                    else Phase(minutes=20, state="asleep", held=3, others=74)
                    for turn in range(WHOLE // 20)
                ),
            )
            for i in range(3)
        ],
    ),
    Situation(
        name="a planned second engine on the card",
        engines=replicas(1, at_work(120, outside=1), at_work(WHOLE - 120, outside=1, others=36.5), share=0.45),
    ),
    Situation(
        name="a declared shared card with a job now and then",
        engines=replicas(
            1, *(each for _ in range(2) for each in (at_work(60), at_work(60, others=2.5))), role="shared-gpu"
        ),
    ),
    Situation(
        name="a job that ended with 0",
        engines=replicas(1, at_work(120), idle(5), down(WHOLE - 125, "gone"), role="batch"),
    ),
    Situation(
        name="a job that kube-state-metrics saw complete",
        engines=replicas(1, at_work(120), down(WHOLE - 120, "gone", completed=True)),
    ),
    Situation(
        name="an orderly stop while the sidecar stays", engines=replicas(1, at_work(120), down(WHOLE - 120, "stopped"))
    ),
    Situation(
        name="a new image pulled for 6 minutes under the same pod name",
        engines=replicas(1, *rest(at_work(120), idle(10), gone(minutes=2), down(6, new_pod=True), loading(10))),
    ),
    Situation(
        name="a load of 40 minutes beside a small model",
        engines=[
            Engine(name="small-0", model="small", phases=rest(at_work(60), loading(2, ended=("replaced",)))),
            Engine(
                name="large-0",
                model="large",
                gpus=8,
                phases=rest(gone(minutes=120), Phase(minutes=1, state="down"), loading(40)),
            ),
        ],
    ),
    Situation(
        name="a large model that loads again for 40 minutes",
        engines=replicas(1, *rest(loading(40), at_work(80), idle(5), loading(40, ended=("replaced",)))),
    ),
    Situation(
        name="a clock 20 minutes behind",
        engines=replicas(1, *rest(at_work(60), idle(5), loading(12, ended=("replaced",))), clock=-1200),
    ),
    Situation(
        name="a clock 30 minutes ahead",
        engines=replicas(1, *rest(at_work(60), idle(5), loading(12, ended=("replaced",))), clock=1800),
    ),
    Situation(
        name="a batch server",
        engines=replicas(1, at_work(running=256, waiting=5000, kv=0.99, preempted=4), role="batch"),
    ),
    Situation(name="one request at a time", engines=replicas(1, at_work(running=1, waiting=14, finished=3))),
    Situation(
        name="scaled to zero after an idle hour",
        engines=[*replicas(2, *until_gone(at_work(120), idle(60)))],
    ),
    Situation(
        name="scaled to zero at work by its owner",
        engines=[*replicas(2, *until_gone(at_work(120)))],
        more=[
            ('kube_deployment_spec_replicas{namespace="{namespace}",deployment="vllm"}', f"2x59 0x{WHOLE // 2 - 60}")
        ],
    ),
    Situation(
        name="scaled out and in",
        engines=[
            *replicas(2, at_work()),
            *(
                Engine(
                    name=f"llama-{i}",
                    model="llama",
                    phases=until_gone(gone(minutes=30), down(2), loading(10), at_work(80), idle(10)),
                )
                for i in (2, 3, 4)
            ),
        ],
    ),
    Situation(
        name="a rolling deploy of three",
        engines=[
            *(Engine(name=f"llama-a{i}", model="llama", phases=until_gone(at_work(120 + 20 * i))) for i in range(3)),
            *(
                Engine(
                    name=f"llama-b{i}",
                    model="llama",
                    phases=rest(gone(minutes=105 + 20 * i), Phase(minutes=2, state="down"), loading(11)),
                )
                for i in range(3)
            ),
        ],
    ),
    Situation(
        name="a deploy of one replica that is replaced",
        engines=[
            Engine(name="llama-a", model="llama", phases=until_gone(at_work(120))),
            Engine(
                name="llama-b",
                model="llama",
                phases=rest(gone(minutes=121), Phase(minutes=3, state="down"), loading(12)),
            ),
        ],
    ),
    *(
        Situation(
            name=f"{count} stopped and started again by a deploy that loads for {minutes} minutes",
            engines=[
                *replicas(count, *until_gone(at_work(60), idle(2), down(2, "stopped"))),
                *(
                    Engine(
                        name=f"llama-new-{i}",
                        model="llama",
                        phases=rest(gone(minutes=66), Phase(minutes=2, state="down"), loading(minutes)),
                    )
                    for i in range(count)
                ),
            ],
        )
        for count, minutes in ((1, 1), (1, 40), (16, 12), (16, 40))
    ),
    Situation(
        name="sixteen stopped at work and made again by a deploy that loads for 40 minutes",
        engines=[
            *replicas(16, *until_gone(at_work(60), down(2, "stopped"))),
            *(
                Engine(
                    name=f"llama-new-{i}",
                    model="llama",
                    phases=rest(gone(minutes=64), Phase(minutes=2, state="down"), loading(40)),
                )
                for i in range(16)
            ),
        ],
    ),
    Situation(
        name="a deploy beside one replica that crashes again and again",
        engines=[
            Engine(name="llama-a", model="llama", phases=until_gone(at_work(120), idle(2), down(2, "stopped"))),
            Engine(
                name="llama-c",
                model="llama",
                phases=rest(gone(minutes=126), Phase(minutes=2, state="down"), loading(20)),
            ),
        ],
    ),
    Situation(
        name="all three replicas replaced at once by a deploy that kube-state-metrics knows",
        engines=[
            *replicas(3, *until_gone(at_work(90))),
            *(
                Engine(
                    name=f"llama-new-{i}",
                    model="llama",
                    phases=rest(gone(minutes=92), Phase(minutes=2, state="down"), loading(20)),
                )
                for i in range(3)
            ),
        ],
        more=deployment(3, f"3x44 0x12 3x{WHOLE // 2 - 58}", f"7x44 8x{WHOLE // 2 - 45}"),
    ),
    Situation(
        name="the only replica drained from its node",
        engines=[
            Engine(name="llama-a", model="llama", phases=until_gone(at_work(90), down(2, "stopped"))),
            Engine(
                name="llama-b",
                model="llama",
                phases=rest(gone(minutes=92), Phase(minutes=2, state="down"), loading(20)),
            ),
        ],
        more=deployment(1, f"1x44 0x12 1x{WHOLE // 2 - 58}"),
    ),
    Situation(
        name="eight sleep at night and wake",
        engines=replicas(8, *rest(at_work(60), idle(10), Phase(minutes=90, state="asleep", held=3))),
    ),
    Situation(
        name="the sidecar restarts with its pod",
        engines=replicas(3, *rest(at_work(120), idle(5), gone(minutes=2), down(1, new_pod=True), loading(12))),
    ),
    Situation(
        name="a drained restart by hand",
        engines=replicas(1, *rest(at_work(120), idle(5), down(2, "gone"), loading(12))),
    ),
    Situation(
        name="Prometheus was away for ten minutes, twice",
        engines=replicas(
            1,
            at_work(80),
            at_work(10, missed=True),
            at_work(80),
            loading(10, missed=True, ended=("stopped",)),
            loading(10),
            at_work(WHOLE - 190),
        ),
    ),
    Situation(
        name="prefills of 18 minutes",
        engines=replicas(
            1,
            *(each for _ in range(8) for each in (at_work(12), at_work(18, running=1, waiting=2, finished=0, kv=0.9))),
        ),
    ),
    Situation(
        name="a full KV cache and a short queue",
        engines=replicas(1, at_work(kv=1, running=256, waiting=8, finished=120, host=58)),
    ),
    Situation(
        name="a preemption every 4 minutes",
        engines=replicas(1, at_work(kv=0.97, running=200, preempted=0.25, finished=30)),
    ),
    Situation(
        name="longer prompts by day",
        engines=replicas(
            1, at_work(40, per_request=1.0), at_work(160, per_request=1.3, kv=0.75), at_work(40, per_request=1.0)
        ),
    ),
    Situation(
        name="sleeps every 8 minutes",
        engines=replicas(
            1,
            *(each for _ in range(24) for each in (at_work(6), Phase(minutes=4, state="asleep", held=3.5))),
            share=0.8,
        ),
    ),
    Situation(name="bursts of 300 MiB with room", engines=replicas(1, at_work(outside=3, burst=0.3))),
)

DAY: Final = 24 * 60


def week(*day: Phase, weekend: Sequence[Phase] = (), **more: object) -> list[Engine]:
    """Return one engine that does the same each day, but for the last two."""
    phases = (*day * 5, *(tuple(weekend) or day) * 2)
    return [Engine(name="llama-0", model="llama", phases=phases, **more)]  # type: ignore[arg-type]


WEEK: Final[Sequence[Situation]] = (
    Situation(name="a week at work", engines=week(at_work(DAY))),
    Situation(
        name="a week of busy days and idle nights",
        engines=week(
            idle(480), at_work(600, running=120, kv=0.85, waiting=4, outside=2.4, host=50), idle(360, outside=2.4)
        ),
    ),
    Situation(
        name="a week of longer prompts by day",
        engines=week(
            at_work(480, per_request=1.0),
            at_work(600, per_request=1.35, kv=0.8),
            at_work(360, per_request=1.0),
            weekend=(at_work(DAY, per_request=1.0),),
        ),
    ),
    Situation(
        name="a week of deploys at noon",
        engines=week(at_work(690), idle(30), loading(30, ended=("replaced",)), at_work(690)),
    ),
    Situation(
        name="a week of batches by night",
        engines=week(at_work(330, running=256, waiting=3000, kv=0.98), idle(30), down(1080, "gone"), role="batch"),
    ),
    Situation(
        name="a week scaled to zero by night",
        engines=week(gone(minutes=420), down(30, new_pod=True), loading(30), at_work(840), idle(120)),
    ),
    Situation(
        name="a week in which two models swap every two hours",
        engines=[
            Engine(
                name=f"swap-{i}",
                model=f"swap-{i}",
                share=0.88,
                phases=tuple(
                    at_work(120, outside=1, others=3)
                    if turn % 2 == i
                    else Phase(minutes=120, state="asleep", held=3, others=72)
                    for turn in range(DAYS * 12)
                ),
            )
            for i in range(2)
        ],
    ),
    Situation(
        name="a week with a planned job beside it each night",
        engines=week(at_work(360, outside=1, others=30), at_work(1080, outside=1), share=0.5),
    ),
    Situation(
        name="a week on a slice",
        engines=week(at_work(30, outside=0.55), at_work(1410, outside=0.62), card=9.75),
    ),
    Situation(
        name="a week on a slow clock",
        engines=week(at_work(690), idle(30), loading(30, ended=("replaced",)), at_work(690), clock=-1200),
    ),
    Situation(name="a week one request at a time", engines=week(at_work(DAY, running=1, waiting=20, finished=2))),
)

ILL: Final = (*LOST, *CAUSES, *TIGHT)
SITUATIONS: Final = (*ILL, *WELL, *WEEK)

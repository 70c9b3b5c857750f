"""Checks for a daemon that watches several engines.

Some checks concern all engines, and others one page each.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Final

from vllm_headroom.daemon.node_daemon import find_pod, find_probe_dir
from vllm_headroom.daemon.parts import build_page_reader
from vllm_headroom.daemon.pod_api import ACCOUNT, open_api
from vllm_headroom.model import EnginePage, Failure
from vllm_headroom.parse.engines import explain_empty_page
from vllm_headroom.scrape.http.failures import strip_advice
from vllm_headroom.scrape.pods import CONTAINER_LOGS
from vllm_headroom.scrape.proc.files import has_host_pids, list_pids
from vllm_headroom.scrape.proc.host import UNLIMITED_BYTES, read_cgroup
from vllm_headroom.scrape.proc.node import LocatedEngine
from vllm_headroom.scrape.proc.owners import read_owner
from vllm_headroom.vocabulary import EngineKind
from vllm_headroom_tools.doctor import gpus, port
from vllm_headroom_tools.doctor.fixes import (
    POD,
    SEE_HOST_PIDS,
    Check,
    Fix,
    Status,
    find_engine_fixes,
    put,
    survey_engine,
)
from vllm_headroom_tools.look import LOOK_SECONDS, fetch_engines, locate_engines
from vllm_headroom_tools.settings import ModelSettings

BUDGETS_PATH: Final = "/apis/policy/v1/namespaces/{}/poddisruptionbudgets"
"""A resource that can be read with the role for evictions. Reading this resource tests whether the
daemon has the role.
"""

KIND_TEXTS: Final = {
    EngineKind.WATCHED: "watched",
    EngineKind.OWN_SIDECAR: "left to their own sidecar",
    EngineKind.UNREADABLE: "unreadable",
}

SEE_CONTAINER_LOGS: Final = put(
    POD,
    "volumes: [{name: container-logs, hostPath: {path: /var/log/containers}}]",
    "containers:",
    "- name: headroom",
    "  volumeMounts: [{name: container-logs, mountPath: /var/log/containers, readOnly: true}]",
)
SEE_CGROUPS: Final = put(
    POD,
    "volumes: [{name: cgroups, hostPath: {path: /sys/fs/cgroup}}]",
    "containers:",
    "- name: headroom",
    "  volumeMounts: [{name: cgroups, mountPath: /host/sys/fs/cgroup, readOnly: true}]",
)
USE_PROBE: Final = put(
    "in the kustomization of the engine's workload",
    "components: [.../deploy/kubernetes/components/node-probe]",
)
GET_TOKEN: Final = put(
    "in the kustomization of the DaemonSet, after the component node",
    "components: [.../deploy/kubernetes/components/node-evict]",
)
REACH_IT: Final = put(
    "in the NetworkPolicies of vLLM's namespace", "# let the daemon's pod connect to vLLM's port"
)


async def examine_node(settings: ModelSettings, proc: Path, sys: Path) -> dict[str, Check]:
    """Return the result of each check by name.

    Each watched engine has a separate check.
    """
    located = await locate_engines(settings, proc)
    watched = [engine for engine in located if engine.kind is EngineKind.WATCHED]
    first_url = watched[0].page_url if watched else settings.engine_url
    # One survey covers all engines, because the GPUs belong to the machine.
    survey, listening, state, pages = await asyncio.gather(
        survey_engine(settings.model_copy(update={"engine_url": first_url}), proc, sys),
        port.check_listen_port(
            settings.listen_host, settings.listen_port, settings.web_config_file
        ),
        port.check_state_dir(settings.state_dir),
        asyncio.gather(*(_fetch(settings, engine) for engine in watched)),
    )
    checks = {"engines": check_engines(located, has_hosts=_sees_all(settings, proc))}
    for engine, page in zip(watched, pages, strict=True):
        checks[f"engine {engine.name.text}"] = check_engine_page(engine, page)
    if settings.engines == "node":
        checks["memory_limits"] = check_cgroups(watched, proc)
        checks["probe"] = check_probes(watched, settings.probe_dir)
        checks["evictions"] = await check_evictions(watched, settings.evict)
    return {
        **checks,
        "nvml": gpus.check_nvml(survey),
        "gpus": gpus.check_gpus(survey),
        "listen_port": listening,
        "state_dir": state,
    }


def _sees_all(settings: ModelSettings, proc: Path) -> bool:
    """Return whether every configured engine can be found."""
    return settings.engines != "node" or has_host_pids(proc)


async def _fetch(settings: ModelSettings, engine: LocatedEngine) -> EnginePage | Failure:
    """Return the engines on one page.

    If the page does not respond in time, a Failure is returned.
    """
    timeout_seconds = min(
        settings.engine_timeout_seconds, settings.sample_interval_seconds, LOOK_SECONDS
    )
    reader = build_page_reader(settings, engine.page_url, timeout_seconds=timeout_seconds)
    return await fetch_engines(reader)


def check_engines(located: Iterable[LocatedEngine], *, has_hosts: bool) -> Check:
    """Check which engines exist.

    `has_hosts` means that all engines of the host can be found.
    """
    engines = tuple(located)
    details = [f"{engine.name.text}: {engine.problem}" for engine in engines if engine.problem]
    fixes: list[Fix] = []
    if not has_hosts:
        details.append("only processes of this pod are visible, so no other pod's engine is found")
        fixes.append(SEE_HOST_PIDS)
    if any(engine.name.pod and not engine.name.namespace for engine in engines):
        details.append(f"{CONTAINER_LOGS} shows no names of pods: each is named by its UID")
        fixes.append(SEE_CONTAINER_LOGS)
    # An engine may have been found without its names.
    is_complete = bool(engines) and not details
    return Check(
        Status.OK if is_complete else Status.MISSING,
        _count_kinds(engines),
        details=tuple(details),
        fixes=tuple(fixes),
    )


def _count_kinds(engines: Iterable[LocatedEngine]) -> str:
    """Return the number of engines of each kind as text, omitting kinds with none."""
    counts = Counter(engine.kind for engine in engines)
    texts = [f"{counts[kind]} {text}" for kind, text in KIND_TEXTS.items() if counts[kind]]
    return ", ".join(texts) or "no engine is found"


def check_cgroups(engines: Sequence[LocatedEngine], proc: Path) -> Check:
    """Check whether the memory cgroups of the watched engines are visible.

    If some cgroups are not visible, the check is NOT_APPLICABLE. The daemon also works without
    these cgroups. The check has a fix even if it is NOT_APPLICABLE.
    """
    if not engines:
        return Check(Status.NOT_APPLICABLE, "no engine is watched")
    pids_by_owner: dict[str, list[int]] = {}
    for pid in list_pids(proc):
        owner = read_owner(proc, pid)
        if owner is not None:
            pids_by_owner.setdefault(owner.key, []).append(pid)
    hidden_names = []
    for engine in engines:
        # Any process will do. All processes of a pod or unit are in the same cgroup tree.
        pids = pids_by_owner.get(engine.owner_key, [])
        if not any(read_cgroup(proc, pid, machine_bytes=UNLIMITED_BYTES) for pid in pids):
            hidden_names.append(engine.name.text)
    if not hidden_names:
        return Check(Status.OK, "the memory cgroup of each engine can be read")
    return Check(
        Status.NOT_APPLICABLE,
        f"the memory limits of {len(hidden_names)} of {len(engines)} engines are not visible here;"
        " their memory is compared with the machine's",
        details=tuple(hidden_names),
        fixes=(SEE_CGROUPS,),
    )


def check_probes(engines: Sequence[LocatedEngine], probe_dir: Path | None) -> Check:
    """Check whether each watched engine has a probe folder in `probe_dir`."""
    if probe_dir is None or not engines:
        return Check(
            Status.NOT_APPLICABLE,
            "HEADROOM_PROBE_DIR is not set" if probe_dir is None else "no engine is watched",
        )
    names = [engine.name.text for engine in engines if find_probe_dir(probe_dir, engine) is None]
    if not names:
        return Check(Status.OK, "each engine has a folder of its probe")
    return Check(
        Status.NOT_APPLICABLE,
        f"{len(names)} of {len(engines)} engines have no folder in {probe_dir}",
        details=tuple(names),
        fixes=(USE_PROBE,),
    )


async def check_evictions(engines: Sequence[LocatedEngine], mode: str) -> Check:
    """Check whether the daemon may evict the watched engines' pods; `mode` is HEADROOM_EVICT."""
    if mode == "off":
        return Check(Status.NOT_APPLICABLE, "HEADROOM_EVICT is off")
    api = open_api(ACCOUNT, LOOK_SECONDS)
    if api is None:
        return Check(Status.MISSING, f"there is no token in {ACCOUNT}", fixes=(GET_TOKEN,))
    details = [
        f"{engine.name.text}: its pod's name is not known"
        for engine in engines
        if find_pod(engine.name) is None
    ]
    fixes: list[Fix] = []
    namespaces = sorted({engine.name.namespace for engine in engines if engine.name.namespace})
    try:
        paths = [BUDGETS_PATH.format(namespace) for namespace in namespaces]
        answers = await asyncio.gather(*(api.send("GET", path, None) for path in paths))
    finally:
        await api.close()
    for namespace, answer in zip(namespaces, answers, strict=True):
        if isinstance(answer, Failure):
            details.append(f"{namespace}: {strip_advice(answer)}")
        elif answer.status != HTTPStatus.OK:
            details.append(f"{namespace}: the API server answers {answer.status}")
            fixes.append(_bind_role(namespace))
    if details:
        return Check(
            Status.MISSING,
            "not every pod may be evicted",
            details=tuple(details),
            fixes=tuple(fixes),
        )
    return Check(Status.OK, f"{mode}: may evict pods in {', '.join(namespaces) or 'no namespace'}")


def _bind_role(namespace: str) -> Fix:
    """Return the command that allows the daemon to evict pods in a namespace."""
    return put(
        "with kubectl, where NAMESPACE is the DaemonSet's",
        f"kubectl create rolebinding vllm-headroom-evict --namespace={namespace}"
        " --clusterrole=vllm-headroom-evict --serviceaccount=NAMESPACE:vllm-headroom",
    )


def check_engine_page(engine: LocatedEngine, page: EnginePage | Failure) -> Check:
    """Check whether a watched engine's page can be read and has an engine."""
    if isinstance(page, Failure):
        return Check(Status.MISSING, page.message, fixes=find_engine_fixes(page.reason, REACH_IT))
    if not page.engines:
        return Check(Status.MISSING, f"{engine.page_url} answers, but {explain_empty_page(page)}")
    models = sorted({reading.model_name for reading in page.engines if reading.model_name})
    return Check(
        Status.OK, f"{engine.page_url} answers: {page.profile}, {', '.join(models) or 'no model'}"
    )

"""What surrounds the panels: variables at the top, marks on the time axis, links."""

from __future__ import annotations

from typing import Final

from dashboards.source.colours import SITUATIONS
from dashboards.source.grafana import DATASOURCE, Json
from dashboards.source.series import ENGINE, TARGET, numbered, situation

TAG: Final = "vllm-headroom"
CELL: Final = "${__value.raw}"
"""What a link in a table puts in for its cell."""


def variables(*, gpu: bool) -> list[Json]:
    """Return the variables, each narrowed by those before it; `gpu` is of a dashboard of one engine.

    There the engine is one, the worst unless another is chosen: sums over many say nothing of any.
    """
    source = {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "options": [],
        "regex": "",
        "current": {},
    }
    made, matchers = [source], ""
    for name in ("cluster", "namespace", "job", "pod", "instance"):
        one = gpu and name == "instance"
        made.append(_worst_first(matchers) if one else _variable(name, f"headroom_build_info{{{matchers}}}"))
        matchers += ("," if matchers else "") + f'{name}=~"${name}"'
    made.append(_variable("model_name", f"headroom_engine_info{{{matchers}}}", label="Model"))
    if gpu:  # no allValue: All is the engine's GPUs, not every GPU that can be seen
        made.append(_gpus(f'headroom_gpu_info{{{matchers},attribution!=""}}'))
        made.append(_host(f"headroom_build_info{{{matchers}}}"))
    else:
        made.append(_situation_choice())
    return made


def _host(series: str) -> Json:
    """Return the host of the chosen sidecar, which is not shown: vLLM's own page is another port of the same host."""
    return {
        **_variable("instance", series, everything=None),
        "name": "host",
        "label": "Host",
        "regex": r"/^(.+?)(?::\d+)?$/",
        "hide": HIDDEN,
        "includeAll": False,
        "current": {},
    }


HIDDEN: Final = 2
"""Grafana's number for a variable that the page does not show."""


def _situation_choice() -> Json:
    """Return the choice of situations, by which the table of engines is filtered."""
    return {
        "name": "situation",
        "label": "Situation",
        "type": "custom",
        "query": ",".join(str(name) for name, _ in SITUATIONS),
        "hide": 0,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "options": [],
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _variable(name: str, series: str, *, label: str = "", everything: str | None = ".*") -> Json:
    variable = {
        "name": name,
        "label": label or name.capitalize(),
        "type": "query",
        "datasource": DATASOURCE,
        "definition": f"label_values({series}, {name})",
        "query": {"query": f"label_values({series}, {name})", "refId": "PrometheusVariableQueryEditor-VariableQuery"},
        "refresh": 2,
        "sort": 1,
        "hide": 0,
        "includeAll": True,
        "multi": True,
        "options": [],
        "regex": "",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }
    return variable if everything is None else {**variable, "allValue": everything}


def _gpus(series: str) -> Json:
    """Return the choice of GPUs, by their UUIDs: the instances of one card have one number.

    Of a sidecar that is gone for a day, and where the time shown ends in the future.
    """
    asked = f"query_result({numbered(f'group by (gpu, uuid) (last_over_time({series}[1d]))')})"
    return {
        **_variable("uuid", series, label="GPU", everything=None),
        "definition": asked,
        "query": {"query": asked, "refId": "PrometheusVariableQueryEditor-VariableQuery"},
        "regex": '/gpu="(?<text>[^"]+)",uuid="(?<value>[^"]+)"/',
    }


def _worst_first(matchers: str) -> Json:
    """Return the choice of one instance, the worst situation first; a sidecar that is gone is last for a day."""
    seen = f"last_over_time(headroom_build_info{{{matchers}}}[1d])"
    worst = f"sort(min by (instance) ({situation(matchers)}) or 99 * group by (instance) ({seen}))"
    return {
        **_variable("instance", f"headroom_build_info{{{matchers}}}", everything=None),
        "definition": f"query_result({worst})",
        "query": {"query": f"query_result({worst})", "refId": "PrometheusVariableQueryEditor-VariableQuery"},
        "regex": '/instance="([^"]+)"/',
        "sort": 0,
        "includeAll": False,
        "multi": False,
        "current": {},
    }


def _annotation(name: str, expr: str, *, title: str, text: str, colour: str) -> Json:
    """Return marks on the time axis wherever `expr` has a value."""
    return {
        "name": name,
        "datasource": DATASOURCE,
        "enable": True,
        "expr": expr,
        "hide": False,
        "iconColor": colour,
        "step": "60s",
        "titleFormat": title,
        "textFormat": text,
        "useValueForTime": False,
    }


def alerts(severities: str = ".+") -> Json:
    """Return a mark where an alert begins to fire: marked for as long as it fires, a day's leak is one red picture."""
    firing = f'ALERTS{{alertname=~"Headroom.+",alertstate="firing",severity=~"{severities}",{TARGET}}}'
    return _annotation(
        "Alert begins to fire",
        numbered(f"{firing} unless {firing} offset $__interval"),
        title="{{alertname}}",
        text="{{severity}} {{instance}} GPU {{gpu}}",
        colour="red",
    )


def restarts() -> Json:
    """Return a mark where an engine's counters start over, at its first reading after the restart.

    An hour: for as long an engine may be away and its return still be seen as one.
    """
    return _annotation("Engine restarted", RESTARTED, title="Engine restarted", text="{{instance}}", colour="blue")


def exits() -> Json:
    """Return a mark where an exit of an engine is counted, with the reason."""
    return _annotation(
        "Engine exited", EXITED, title="Engine exited: {{reason}}", text="{{instance}}", colour="dark-orange"
    )


def images() -> Json:
    """Return a mark where a workload first runs an image beside those that it ran before: vLLM's or the sidecar's."""
    return _annotation(
        "New image",
        _first_seen(IMAGES, "cluster, namespace, container", "image"),
        title="New image: {{image}}",
        text="{{namespace}} {{container}}",
        colour="purple",
    )


def versions() -> Json:
    """Return a mark where a job first has a version of the sidecar beside those that it had before."""
    return _annotation(
        "New version of the sidecar",
        _first_seen(VERSIONS, "cluster, namespace, job", "version"),
        title="vllm-headroom {{version}}",
        text="{{namespace}} {{job}}",
        colour="light-purple",
    )


WORKLOAD: Final = 'cluster=~"$cluster",namespace=~"$namespace",job=~"$job"'
"""Not by pod and instance: what is new is seen against the pods of before, which were others."""

IMAGES: Final = (
    'kube_pod_container_info{{cluster=~"$cluster",namespace=~"$namespace"}}{offset}'
    f" and on (cluster, namespace, pod) headroom_build_info{{{{{WORKLOAD}}}}}{{offset}}"
)
VERSIONS: Final = f"headroom_build_info{{{{{WORKLOAD}}}}}{{offset}}"


def _first_seen(series: str, of: str, what: str) -> str:
    """Return an expression for the label `what` where its value is new `of` something that had another value."""
    by = f"group by ({of}, {what})"
    earlier = f"{by} ({series.format(offset=' offset $__interval')})"
    return f"{by} ({series.format(offset='')}) unless {earlier} and on ({of}) {earlier}"


def marks() -> list[Json]:
    """Return the marks of a board of one engine."""
    return [alerts(), restarts(), exits(), images(), versions()]


_RISE: Final = f"increase(headroom_engine_exits_total{{{TARGET}}}[$__rate_interval])"
EXITED: Final = f"max by (instance, reason) ({_RISE}) > 0"


_COUNTED: Final = f"headroom_engine_generation_tokens_total{{{ENGINE}}}"
RESTARTED: Final = (
    f"max by (instance) (resets({_COUNTED}[1h])) > max by (instance) (resets({_COUNTED}[1h] offset $__interval))"
)


def links(ahead: str = "", since: str = "") -> list[Json]:
    """Return the links at the top: the other dashboards, vLLM's own where they are imported, one's own future."""
    made = [
        _dashboards("Headroom", TAG, "", with_variables=True, dropdown=False),
        _dashboards(
            "vLLM: latency and throughput",
            "vllm",
            "vLLM's own dashboards, tagged vllm: its repository, examples/observability",
            with_variables=False,
            dropdown=True,
        ),
    ]
    return [*made, _future(ahead, since)] if ahead else made


ALL_IN_THIS_SITUATION: Final = {
    "title": "The engines in this situation",
    "url": "/d/headroom-fleet?${datasource:queryparam}&var-situation=${__field.labels.situation}&${__url_time_range}",
}
"""The link of a number that is named by a situation."""


def page_of_the_sidecar() -> Json:
    """Return the link to the page of the chosen sidecar."""
    return {
        **_link("The sidecar's page", "http://${instance}/"),
        "targetBlank": True,
        "tooltip": "Where the browser can reach the pod; else: kubectl port-forward POD 9839",
    }


def _future(uid: str, since: str) -> Json:
    return {
        **_link("Look ahead", f"/d/{uid}?from={since}&to={since.replace('-', '%2B')}"),
        "includeVars": True,
        "tooltip": "The same board with as much of the future, as a leak will make it",
    }


def _link(title: str, url: str) -> Json:
    return {
        "title": title,
        "type": "link",
        "icon": "external link",
        "url": url,
        "includeVars": False,
        "keepTime": False,
        "asDropdown": False,
        "tags": [],
        "targetBlank": False,
        "tooltip": "",
    }


def _dashboards(title: str, tag: str, tooltip: str, *, with_variables: bool, dropdown: bool) -> Json:
    return {
        "title": title,
        "type": "dashboards",
        "tags": [tag],
        "asDropdown": dropdown,
        "icon": "external link",
        "includeVars": with_variables,
        "keepTime": True,
        "targetBlank": False,
        "tooltip": tooltip,
        "url": "",
    }

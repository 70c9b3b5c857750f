"""The page for people at `/`."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable
from html import escape
from typing import Final

from vllm_headroom import catalog
from vllm_headroom.expose.answers import NO_SNIFF, NO_STORE, Answer, Header
from vllm_headroom.model import Metric, Published, Sample
from vllm_headroom.units import GIB

_STYLE: Final = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:58rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}"
    "h1{margin-bottom:0}table{border-collapse:collapse;margin:1rem 0;width:100%}"
    "th,td{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #d8dee4;white-space:nowrap}"
    ".bad{color:#b42318;font-weight:600}.notice{background:#fff4ce;padding:.5rem .8rem;border-radius:.3rem}"
)
_STYLE_HASH: Final = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_POLICY: Final = (
    f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final[tuple[Header, ...]] = (
    NO_SNIFF,
    NO_STORE,
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Content-Security-Policy", _POLICY),
)


def html(page: str) -> Answer:
    """Return the page as an answer that may load nothing, and be shown in no frame."""
    return Answer(status=200, body=page.encode(), content_type="text/html; charset=utf-8", headers=_HEADERS)


def landing_page(published: Published | None, *, version: str, notice: str) -> str:
    """Return the HTML page: what the last sample saw, in a few lines, and where the rest is."""
    samples = () if published is None else published.samples
    banner = f'<p class="notice">{escape(notice)}</p>' if notice else ""
    body = (
        _sources(samples) + _gpus(samples) + _engines(samples)
        if samples
        else "<p>No sample has been published yet.</p>"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>vllm-headroom</title><style>{_STYLE}</style></head><body>"
        f"<h1>vllm-headroom</h1><p>{escape(version)} · memory truth for vLLM on NVIDIA GPUs</p>{banner}{body}"
        '<p><a href="/metrics">/metrics</a> · <a href="/healthz">/healthz</a> · <a href="/readyz">/readyz</a></p>'
        "</body></html>\n"
    )


def _values(samples: Iterable[Sample], metric: Metric) -> dict[tuple[str, ...], float]:
    return {sample.labels: sample.value for sample in samples if sample.metric is metric}


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{titles}</tr>{lines}</table>"


def _sources(samples: tuple[Sample, ...]) -> str:
    seconds = _values(samples, catalog.SOURCE_READ_SECONDS)
    rows = (
        (
            escape(labels[0]),
            "answers" if up else '<span class="bad">failed</span>',
            f"{1000 * seconds[labels]:.1f} ms",
        )
        for labels, up in _values(samples, catalog.SOURCE_UP).items()
    )
    return _table(("source", "last reading", "took"), rows)


def _gpus(samples: tuple[Sample, ...]) -> str:
    show = _shower(samples)
    rows = (
        (
            escape(f"{gpu} {name}"),
            escape(attribution) or "not the engine's",
            show(catalog.GPU_MEMORY_TOTAL, (gpu, uuid), _gib),
            show(catalog.GPU_MEMORY_USED, (gpu, uuid), _gib),
            show(catalog.GPU_MEMORY_HELD, (gpu, uuid, "engine"), _gib),
            show(catalog.GPU_MEMORY_FREE, (gpu, uuid), _gib),
        )
        for gpu, uuid, name, attribution in _values(samples, catalog.GPU_INFO)
    )
    return _table(("GPU", "taken for the engine's by", "total", "used", "held by the engine", "free"), rows)


def _engines(samples: tuple[Sample, ...]) -> str:
    show = _shower(samples)
    rows = (
        (
            escape(f"{model_name} / {engine}"),
            show(catalog.ENGINE_RUNNING, (model_name, engine), _number),
            show(catalog.ENGINE_WAITING, (model_name, engine), _number),
            show(catalog.ENGINE_KV_USED, (model_name, engine), _percent),
            show(catalog.ENGINE_PREFIX_HIT_RATIO, (model_name, engine), _percent),
            show(catalog.ENGINE_ADDITIONAL_REQUESTS, (model_name, engine), _number),
        )
        for model_name, engine, _profile in _values(samples, catalog.ENGINE_INFO)
    )
    head = ("engine", "running", "waiting", "KV cache used", "prefix hits, 5 min", "more requests fit")
    return _table(head, rows)


def _shower(samples: tuple[Sample, ...]) -> Callable[[Metric, tuple[str, ...], Callable[[float], str]], str]:
    """Return a function that shows a metric's value for some labels, "unknown" where there is none."""
    values = {(sample.metric.name, sample.labels): sample.value for sample in samples}

    def show(metric: Metric, labels: tuple[str, ...], form: Callable[[float], str]) -> str:
        value = values.get((metric.name, labels))
        return "unknown" if value is None else form(value)

    return show


def _gib(value: float) -> str:
    return f"{value / GIB:.2f} GiB"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _number(value: float) -> str:
    return f"{value:.0f}"

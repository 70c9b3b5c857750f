"""A Prometheus over samples that a test gives it: its range API, with its limits and its way to count time."""

from __future__ import annotations

import bisect
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from http.server import BaseHTTPRequestHandler
from typing import Any, Final
from urllib.parse import parse_qs

from tests.fakes.local_server import LocalServer

MOST_POINTS: Final = 11_000

_MATCHER: Final = re.compile(r'(\w+)(=~|!=|=)("(?:[^"\\]|\\.)*")')
_RANGE: Final = r"\{(?P<matchers>.*)\}\[(?P<window>\d+)ms\]"
_LATEST: Final = re.compile(rf"last_over_time\({_RANGE}\)")
_NAMES: Final = re.compile(rf"count by \(__name__\) \(last_over_time\({_RANGE}\)\)")
_DENSITY: Final = re.compile(rf"max\(count_over_time\({_RANGE}\)\)")

Labels = Mapping[str, str]
Rows = list[tuple[Labels, list[tuple[float, float]]]]
Answer = tuple[int, Mapping[str, str], bytes]


class PrometheusServer(LocalServer):
    """Listens on loopback from construction until `close`; `answer`, when set, is what every request gets.

    `forms` are the forms of all requests so far, `heads` their headers and `paths` where they went.
    """

    def __init__(self, *, answer: Answer | None = None) -> None:
        self.answer = answer
        self.forms: list[dict[str, str]] = []
        self.heads: list[dict[str, str]] = []
        self.paths: list[str] = []
        self._series: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = defaultdict(list)
        super().__init__(self._handler())

    def add(self, name: str, values: Iterable[tuple[float, float]], /, **labels: str) -> None:
        """Keep a series; `values` pairs seconds since the epoch with a value."""
        self._series[tuple(sorted({"__name__": name, **labels}.items()))].extend(values)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                server.forms.append({name: values[0] for name, values in parse_qs(body).items()})
                server.heads.append(dict(self.headers))
                server.paths.append(self.path)
                status, headers, content = server.answer or server.answered(self.path, server.forms[-1])
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler

    def answered(self, path: str, form: Mapping[str, str]) -> Answer:
        """Return what Prometheus answers to a form."""
        start, end, step = (float(form[name]) for name in ("start", "end", "step"))
        times = [start + count * step for count in range(int((end - start) / step + 1e-9) + 1)]
        if path != "/api/v1/query_range":
            return 404, {}, b"404 page not found\n"
        if len(times) > MOST_POINTS:
            return problem("exceeded maximum resolution of 11,000 points per timeseries.")
        query = form["query"]
        if match := _LATEST.fullmatch(query):
            return matrix(self._latest(match["matchers"], int(match["window"]) / 1000, times))
        if match := _NAMES.fullmatch(query):
            return matrix(self._names(match["matchers"], int(match["window"]) / 1000, times))
        if match := _DENSITY.fullmatch(query):
            return matrix(self._density(match["matchers"], int(match["window"]) / 1000, times))
        return problem(f"this stand-in cannot evaluate {query}")

    def _latest(self, matchers: str, window: float, times: list[float]) -> Rows:
        rows: Rows = []
        for labels, samples in self._chosen(matchers):
            pairs = [(at, inside[-1]) for at in times if (inside := _inside(samples, at, window))]
            rows += [(labels, pairs)] if pairs else []
        return rows

    def _names(self, matchers: str, window: float, times: list[float]) -> Rows:
        latest = self._latest(matchers, window, times)
        return [({"__name__": name}, [(times[0], 1.0)]) for name in {labels["__name__"] for labels, _ in latest}]

    def _density(self, matchers: str, window: float, times: list[float]) -> Rows:
        chosen = [samples for _, samples in self._chosen(matchers)]
        counts = [(at, float(max(len(_inside(samples, at, window)) for samples in chosen))) for at in times]
        return [({}, [(at, count) for at, count in counts if count])]

    def _chosen(self, matchers: str) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        wanted = [(name, operator, json.loads(text)) for name, operator, text in _MATCHER.findall(matchers)]
        return [
            (dict(key), sorted(samples))
            for key, samples in self._series.items()
            if all(_matches(dict(key).get(name, ""), operator, text) for name, operator, text in wanted)
        ]


def matrix(rows: Rows, **reply_fields: Any) -> Answer:
    """Return a range vector as Prometheus sends it."""
    result = [{"metric": dict(labels), "values": [[at, repr(value)] for at, value in pairs]} for labels, pairs in rows]
    answer = {"status": "success", "data": {"resultType": "matrix", "result": result}, **reply_fields}
    return 200, {"Content-Type": "application/json"}, json.dumps(answer).encode()


def problem(text: str) -> Answer:
    """Return Prometheus's refusal of a query."""
    answer = {"status": "error", "errorType": "bad_data", "error": text}
    return 400, {"Content-Type": "application/json"}, json.dumps(answer).encode()


def _inside(samples: list[tuple[float, float]], at: float, window: float) -> list[float]:
    begin = bisect.bisect_left(samples, (at - window, -math.inf))
    return [value for _, value in samples[begin : bisect.bisect_right(samples, (at, math.inf))]]


def _matches(value: str, operator: str, text: str) -> bool:
    if operator == "=~":
        return re.fullmatch(text, value) is not None
    return (value == text) is (operator == "=")

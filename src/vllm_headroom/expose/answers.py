"""Answer requests by path."""

from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct

Header = tuple[str, str]
"""The name of a header and its value."""

NO_SNIFF: Final[Header] = ("X-Content-Type-Options", "nosniff")
NO_STORE: Final[Header] = ("Cache-Control", "no-store")


class Request(Struct, frozen=True, kw_only=True):
    """The head of an HTTP request."""

    method: str
    path: str
    query: str = ""
    """The text after the question mark; "" if there is none."""
    headers: Mapping[str, str]
    """The headers, keyed by lower-case name. The values of a repeated header are joined by commas.
    """


class Response(Struct, frozen=True, kw_only=True):
    """A complete HTTP response."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[Header, ...] = (NO_SNIFF, NO_STORE)


Handler = Callable[[Request], Response]


def respond_text(status: int, line: str, *headers: Header) -> Response:
    """Return a response with one line of text and the usual headers plus `headers`."""
    return Response(
        status=status, body=f"{line}\n".encode(), headers=(NO_SNIFF, NO_STORE, *headers)
    )


def build_application(
    *,
    metrics: Handler,
    page: Handler,
    snapshot: Handler,
    find_problem: Callable[[], str | None],
    has_sample: Callable[[], bool],
    find_gate_reason: Callable[[], str | None] = lambda: None,
) -> Handler:
    """Return the handler for all requests, which dispatches by method and path.

    `find_problem` returns why the daemon is unhealthy, or None if it is healthy. `find_gate_reason`
    returns why the gate is closed, or None if it is open. `has_sample` returns whether the first
    tick is over.
    """

    def find_start_reason() -> str | None:
        """Return why the daemon is not ready yet, or None if it is ready."""
        return None if has_sample() else "no sample published yet"

    handlers: dict[str, Handler] = {
        "/": page,
        "/metrics": metrics,
        "/snapshot.json": snapshot,
        "/healthz": _build_check(find_problem, "ok"),
        "/readyz": _build_check(find_start_reason, "ok"),
        "/gate/ready": _build_check(find_gate_reason, "open"),
    }

    def answer(request: Request) -> Response:
        """Return the response to a request.

        The status is 405 for a wrong method and 404 for an unknown path.
        """
        if request.method not in {"GET", "HEAD"}:
            return respond_text(405, "only GET and HEAD", ("Allow", "GET, HEAD"))
        if request.path not in handlers:
            paths = "/, /metrics, /snapshot.json, /healthz, /readyz and /gate/ready"
            return respond_text(404, f"not found: there are {paths}")
        return handlers[request.path](request)

    return answer


def _build_check(find_problem: Callable[[], str | None], text: str) -> Handler:
    """Return a handler that responds with the text, or with 503 and the problem."""

    def check(_request: Request) -> Response:
        problem = find_problem()
        if problem:
            return respond_text(503, problem)
        return respond_text(200, text)

    return check

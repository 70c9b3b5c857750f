"""Answer requests by path."""

from collections.abc import Callable, Mapping

from msgspec import Struct

Header = tuple[str, str]

NO_SNIFF: Header = ("X-Content-Type-Options", "nosniff")
NO_STORE: Header = ("Cache-Control", "no-store")


class Request(Struct, frozen=True, kw_only=True):
    """The head of an HTTP request; names of `headers` are lower case, repeated ones joined by commas."""

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str]


class Response(Struct, frozen=True, kw_only=True):
    """A whole HTTP answer."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[Header, ...] = (NO_SNIFF, NO_STORE)


Handler = Callable[[Request], Response]


def respond_text(status: int, line: str, *headers: Header) -> Response:
    """Return an answer of one line, with additional headers."""
    return Response(
        status=status, body=f"{line}\n".encode(), headers=(NO_SNIFF, NO_STORE, *headers)
    )


def build_application(
    *,
    metrics: Handler,
    page: Handler,
    snapshot: Handler,
    unhealthy: Callable[[], str | None],
    ready: Callable[[], bool],
    gate: Callable[[], str | None] = lambda: None,
) -> Handler:
    """Return the handler of every request; `unhealthy` and `gate` return why it is unhealthy or the gate closed."""
    answers: dict[str, Handler] = {
        "/": page,
        "/metrics": metrics,
        "/snapshot.json": snapshot,
        "/healthz": _respond_unless(unhealthy, "ok"),
        "/readyz": _respond_unless(lambda: None if ready() else "no sample published yet", "ok"),
        "/gate/ready": _respond_unless(gate, "open"),
    }

    def answer(request: Request) -> Response:
        if request.method not in {"GET", "HEAD"}:
            return respond_text(405, "only GET and HEAD", ("Allow", "GET, HEAD"))
        if request.path not in answers:
            line = "not found: there are /, /metrics, /snapshot.json, /healthz, /readyz and /gate/ready"
            return respond_text(404, line)
        return answers[request.path](request)

    return answer


def _respond_unless(problem: Callable[[], str | None], well: str) -> Handler:
    return lambda _: respond_text(503, found) if (found := problem()) else respond_text(200, well)

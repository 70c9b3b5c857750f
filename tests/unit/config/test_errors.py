from pathlib import Path

import pytest

from tests.settings import load
from vllm_headroom_tools.options import BadOptions

TESTDATA = Path(__file__).parent / "testdata"

SECONDS = "accepts a number of seconds from 0.1 to 300"
GPUS = "accepts auto, all, or GPU indices or UUIDs separated by commas"
SIZE = "accepts a size such as 72GiB, or a number of bytes from 1 MiB on"
HEADERS = "got a value that is kept secret, accepts a mapping of header names to values, in JSON or YAML"
URL = "accepts an http or https URL"
HOST = "accepts an address or name of this machine, or nothing for all interfaces, IPv4 and IPv6"
PORT = "accepts a port number from 0 to 65535"
TILDE = "~ is not expanded here: write the whole path"
LEVEL = "accepts debug, info, warning or error"


def mistakes(argv: list[str], environ: dict[str, str]) -> list[str]:
    with pytest.raises(BadOptions) as raised:
        load(argv, environ)
    return list(raised.value.lines)


ENVIRONMENT = [
    ("SAMPLE_INTERVAL_SECONDS", "0", f"got '0', {SECONDS}"),
    ("SAMPLE_INTERVAL_SECONDS", "301", f"got '301', {SECONDS}"),
    ("SAMPLE_INTERVAL_SECONDS", "6m", f"got '6m', {SECONDS}"),
    ("SAMPLE_INTERVAL_SECONDS", "5 seconds", f"got '5 seconds', {SECONDS}"),
    ("SAMPLE_INTERVAL_SECONDS", "1_0", f"got '1_0', {SECONDS}"),
    ("SAMPLE_INTERVAL_SECONDS", "nan", f"got 'nan', {SECONDS}"),
    ("SAMPLE_INTERVAL_SECONDS", "inf", f"got 'inf', {SECONDS}"),
    ("GPU_SAMPLE_INTERVAL_SECONDS", "0.01", "got '0.01', accepts a number of seconds from 0.05 to 60"),
    ("GPU_FATAL_GRACE_SECONDS", "-1", "got '-1', accepts a number of seconds from 0 to 3600"),
    ("ENGINE_TIMEOUT_SECONDS", "61", "got '61', accepts a number of seconds from 0.05 to 60"),
    ("ENGINE_MAX_PAGE_BYTES", "0", "got '0', accepts a size such as 4MiB, or a number of bytes from 1 MiB on"),
    ("REPORTED_BYTES", "72", f"got '72' (without a unit it is bytes: 72GiB?), {SIZE}"),
    ("REPORTED_BYTES", "1048575", f"got '1048575' (without a unit it is bytes: 1048575GiB?), {SIZE}"),
    ("REPORTED_BYTES", "72G", f"got '72G' (G has two meanings: 72GiB or 72GB?), {SIZE}"),
    ("REPORTED_BYTES", "7,5GiB", f"got '7,5GiB', {SIZE}"),
    ("REPORTED_BYTES", "-1GiB", f"got '-1GiB', {SIZE}"),
    ("REPORTED_BYTES", "lots", f"got 'lots', {SIZE}"),
    ("REPORTED_BYTES", "9" * 100, f"got '{'9' * 79}..., {SIZE}"),
    ("KV_BYTES_PER_TOKEN", "0", "got '0', accepts a number above 0, at most 1000000000"),
    ("KV_BYTES_PER_TOKEN", "1e10", "got '1e10', accepts a number above 0, at most 1000000000"),
    ("LISTEN_HOST", "two words", f"got 'two words', {HOST}"),
    ("LISTEN_HOST", "0.0.0.0:80", f"got '0.0.0.0:80' (set the port with listen_port), {HOST}"),
    ("LISTEN_HOST", "[::]:80", f"got '[::]:80' (set the port with listen_port), {HOST}"),
    ("LISTEN_HOST", "localhost:", f"got 'localhost:', {HOST}"),
    ("STATE_DIR", "~/x", f"got '~/x' ({TILDE}), accepts the path of a directory"),
    ("ENGINE_CA_FILE", "~", f"got '~' ({TILDE}), accepts the path of a file"),
    ("LISTEN_PORT", "65536", f"got '65536', {PORT}"),
    ("LISTEN_PORT", "9839.0", f"got '9839.0', {PORT}"),
    ("LISTEN_PORT", "+5", f"got '+5', {PORT}"),
    ("LISTEN_PORT", "tcp://10.0.0.1:9839", f"got 'tcp://10.0.0.1:9839', {PORT}"),
    ("GPUS", "0,,1", f"got '0,,1', {GPUS}"),
    ("GPUS", "auto,0", f"got 'auto,0', {GPUS}"),
    ("GPUS", "gpu0", f"got 'gpu0', {GPUS}"),
    ("GPUS", "-1", f"got '-1', {GPUS}"),
    ("LOG_FORMAT", "xml", "got 'xml', accepts logfmt or json"),
    ("LOG_LEVEL", "loud\nline", rf"got 'loud\nline', {LEVEL}"),
    ("ENGINE_URL", "engine:8000", f"got 'engine:8000' (did you mean http://engine:8000?), {URL}"),
    ("ENGINE_URL", "http://", f"got 'http://', {URL}"),
    ("ENGINE_URL", "ftp://engine", f"got 'ftp://engine', {URL}"),
    ("ENGINE_URL", "http://engine:0", f"got 'http://engine:0', {URL}"),
    ("ENGINE_URL", "http://engine:99999", f"got 'http://engine:99999', {URL}"),
    ("ENGINE_URL", "http://engine :8000", f"got 'http://engine :8000', {URL}"),
    ("ENGINE_URL", "http://256.1.1.1", f"got 'http://256.1.1.1', {URL}"),
    ("RUNBOOKS_URL", "https://me:hunter2@wiki/",
     "got 'https://***@wiki/', accepts an http or https URL without user and password"),
    ("ENGINE_URL", "ftp://user:hunter2@engine", f"got 'ftp://***@engine', {URL}"),
    ("ENGINE_URL", "user:hunter2://x@engine", f"got '***@engine', {URL}"),
    ("ENGINE_URL", "http://user:hunt/er2@engine", f"got 'http://***@engine', {URL}"),
    ("ENGINE_HEADERS", '{"X-Key": "hunter2"', HEADERS),
    ("ENGINE_HEADERS", "X-Key: [hunter2", HEADERS),
    ("ENGINE_HEADERS", "hunter2", HEADERS),
    ("ENGINE_HEADERS", '["hunter2"]', HEADERS),
    ("ENGINE_HEADERS", '{"X-Key": [5]}', HEADERS),
    ("ENGINE_HEADERS", '{"Content-Length": "5"}', HEADERS.replace(",", " (Content-Length is not yours to set),", 1)),
    ("ENGINE_HEADERS", "host: engine", HEADERS.replace(",", " (host is not yours to set),", 1)),
    ("ENGINE_HEADERS", '{"X Key": "hunter2"}', HEADERS),
    ("ENGINE_HEADERS", '{"X-Key": "hunter2\\r\\nX-Evil: 1"}', HEADERS),
    ("ENGINE_URI", "hunter2", "not a setting, did you mean HEADROOM_ENGINE_URL?"),
    ("engine_url", "hunter2", "not a setting, did you mean HEADROOM_ENGINE_URL?"),
    (
        "INTERVAL",
        "5",
        "not a setting, did you mean HEADROOM_CANARY_INTERVAL_SECONDS or HEADROOM_SAMPLE_INTERVAL_SECONDS?",
    ),
    ("PORT", "9839", "not a setting, did you mean HEADROOM_LISTEN_PORT?"),
    ("COLOUR", "blue", "not a setting, see --help"),
    ("", "x", "not a setting, see --help"),
]  # fmt: skip


@pytest.mark.parametrize(("setting", "text", "line"), ENVIRONMENT)
def test_a_mistake_in_the_environment_is_one_line(setting: str, text: str, line: str) -> None:
    lines = mistakes([], {f"HEADROOM_{setting}": text})

    assert lines == [f"HEADROOM_{setting}: {line}"]


COMMAND_LINE = [
    (["--listen-port", "high"], f"--listen-port: got 'high', {PORT}"),
    (["--listen-port=-1"], f"--listen-port: got '-1', {PORT}"),
    (["--kv-bytes-per-token", "-5"], "--kv-bytes-per-token: got '-5', accepts a number above 0, at most 1000000000"),
    (["--listen-port"], f"--listen-port: got nothing, {PORT}"),
    (["--engine-ca-file"], "--engine-ca-file: got nothing, accepts the path of a file"),
    (["--engine-ca-file="], "--engine-ca-file: got '', accepts the path of a file"),
    (["--config"], "--config: got nothing, accepts the path of a YAML file"),
    (["--config", "/no.yaml"], "--config: got '/no.yaml' (No such file or directory), accepts the path of a YAML file"),
    (["--config", "/"], "--config: got '/' (Is a directory), accepts the path of a YAML file"),
    (["--listen-port", "1", "--listen-port=2"], "--listen-port: given 2 times, accepts one"),
    (["--engine-headers", '{"X-Key":', "Bearer", 'hunter2"}'],
     "--engine-headers: got 3 words, accepts one: put a value with spaces in quotes"),
    (["--engine-uri", "http://user:hunter2@engine"], "--engine-uri: not an option, did you mean --engine-url?"),
    (["--engine_url=x"], f"--engine_url: got 'x', {URL}"),
    (["--listen"], "--listen: not an option, did you mean --listen-host or --listen-port?"),
    (["-p", "9839"], "-p: not an option, see --help"),
    (["--"], "--: not an option, see --help"),
    (["engine"], "'engine': not an option, see --help"),
    (["--print-config=yes"], "--print-config: takes no value"),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "line"), COMMAND_LINE)
def test_a_mistake_on_the_command_line_is_one_line(argv: list[str], line: str) -> None:
    assert mistakes(argv, {}) == [line]


FILES = {
    "list": ["{file}: not a mapping, accepts settings such as 'sample_interval_seconds: 5'"],
    "syntax": ["{file}, line 3: not YAML (expected ',' or ']', but got ':')"],
    "two-documents": ["{file}, line 2: not YAML (but found another document)"],
    "encoding": ["{file}: not YAML (it is no text in UTF-8)"],
    "nested": ["{file}: not YAML (nested too deep)"],
    "control-character": ["{file}: not YAML (it is no text in UTF-8)"],
    "alias": ["{file}, line 2: not YAML (an alias is not read here, write its value out)"],
    "key": ["sample-interval-seconds in {file}: not a setting, did you mean sample_interval_seconds?"],
    "secret-key": ["engine_token in {file}: not a setting, did you mean engine_bearer_token_file?"],
    "key-no-text": ["{file}, line 1: not YAML (found unhashable key)"],
    "twice": ["listen_port in {file}: given twice"],
    "truth": [f"listen_port in {{file}}: got 'yes', {PORT}"],
    "minutes": [f"sample_interval_seconds in {{file}}: got '1:30', {SECONDS}"],
    "gpus": [f"gpus in {{file}}: got ['0', 'gpu1'], {GPUS}"],
    "gpus-empty": [f"gpus in {{file}}: got [], {GPUS}"],
    "url-list": [f"engine_url in {{file}}: got no text, {URL}"],
    "headers": [f"engine_headers in {{file}}: {HEADERS}"],
    "mapping": [f"log_level in {{file}}: got {{{{'a': 'b'}}}}, {LEVEL}"],
    "nul": [r"engine_ca_file in {file}: got '\x00', accepts the path of a file"],
    "several": [
        "state in {file}: not a setting, did you mean state_dir?",
        f"listen_port in {{file}}: got '65536', {PORT}",
        f"log_level in {{file}}: got 'loud', {LEVEL}",
    ],
}


@pytest.mark.parametrize("name", FILES)
def test_a_mistake_in_the_file_is_one_line(name: str) -> None:
    file = TESTDATA / f"invalid-{name}.yaml"

    assert mistakes(["--config", str(file)], {}) == [line.format(file=file) for line in FILES[name]]


def test_a_file_without_an_end_is_not_read_to_it(tmp_path: Path) -> None:
    file = tmp_path / "weights.yaml"
    with file.open("w") as stream:
        stream.truncate(2**40)

    assert mistakes(["--config", str(file)], {}) == [
        f"--config: got {str(file)!r} (File too large), accepts the path of a YAML file"
    ]


def test_every_invalid_file_has_its_expected_lines() -> None:
    assert {file.name for file in TESTDATA.glob("*")} == {f"invalid-{name}.yaml" for name in FILES}


def test_a_file_named_by_the_environment_is_missed_under_its_name() -> None:
    assert mistakes([], {"HEADROOM_CONFIG": "/nowhere"}) == [
        "HEADROOM_CONFIG: got '/nowhere' (No such file or directory), accepts the path of a YAML file"
    ]


def test_every_mistake_of_every_source_is_reported_at_once_and_an_overridden_one_too() -> None:
    file = TESTDATA / "invalid-truth.yaml"

    lines = mistakes(
        ["--log-level", "loud", "--listen-port", "1"],
        {"HEADROOM_CONFIG": str(file), "HEADROOM_GPUS": "x", "HEADROOM_COLOUR": "blue"},
    )

    assert lines == [
        f"--log-level: got 'loud', {LEVEL}",
        "HEADROOM_COLOUR: not a setting, see --help",
        f"HEADROOM_GPUS: got 'x', {GPUS}",
        f"listen_port in {file}: got 'yes', {PORT}",
    ]


def test_a_line_stays_one_line_and_sends_nothing_to_the_terminal(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text('"a\\nb\\e[31m": 1\n')

    assert mistakes(["--config", str(file)], {}) == [rf"a\x0ab\x1b[31m in {file}: not a setting, see --help"]


@pytest.mark.parametrize(
    ("engines", "setting", "value", "reason"),
    [
        ("node", "GPUS", "0", "each engine's are found by its processes"),
        ("node", "ENGINE_URL", "http://h:1/metrics", "the engines are those of engines"),
        ("http://a,http://b", "EVICT", "dry-run", "the pod of a URL is not known"),
        ("http://a,http://b", "TRACE_FILE", "/t", "a trace has one engine"),
        ("node", "ENGINE_HEADERS", '{"a": "b"}', "name the engines' URLs"),
        ("node", "ENGINE_BEARER_TOKEN_FILE", "/t", "name the engines' URLs"),
    ],
)
def test_what_is_for_one_engine_is_refused_for_several(engines: str, setting: str, value: str, reason: str) -> None:
    (line,) = mistakes([], {"HEADROOM_ENGINES": engines, f"HEADROOM_{setting}": value})

    assert line.startswith(f"HEADROOM_{setting}: not with HEADROOM_ENGINES")
    assert reason in line


@pytest.mark.parametrize("value", ["", "nodes", "http://a,", "http://a,http://a", "ftp://a", "http://u:secret@"])
def test_engines_are_node_or_urls_and_no_secret_of_a_url_is_shown(value: str) -> None:
    if not value:
        assert load([], {"HEADROOM_ENGINES": value}).engines is None
        return
    (line,) = mistakes([], {"HEADROOM_ENGINES": value})

    assert line.endswith("accepts node, or http or https URLs separated by commas")
    assert "secret" not in line


def test_urls_of_several_engines_are_metrics_pages_and_headers_may_go_to_them() -> None:
    settings = load([], {"HEADROOM_ENGINES": " http://a:8000, https://b/x", "HEADROOM_ENGINE_HEADERS": '{"a": "b"}'})

    assert settings.engines == ("http://a:8000/metrics", "https://b/x")

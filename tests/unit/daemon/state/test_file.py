from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from inspect import formatannotation
from math import inf, nan
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from tests.conftest import Golden
from tests.unit.daemon.state.engine import ALARM_STEPS, after, device, make_snapshot, make_state, reading
from vllm_headroom.daemon.state import file
from vllm_headroom.daemon.state.file import MOST_STATE_BYTES, STATE, STATE_FORMAT, UnusableState
from vllm_headroom.daemon.state.saved import DerivationStates, SavedState
from vllm_headroom.derive.leak.facts import Certainty

SAVES = """
import sys
from msgspec.structs import replace
from pathlib import Path
from vllm_headroom.daemon.state.file import STATE
folder = Path(sys.argv[1])
kept = STATE.read(folder)
for number in range(int(sys.argv[2]), 10**9):
    STATE.write(folder, replace(kept, saved_at_seconds=float(number)))
    print(number, flush=True)
"""


def test_a_state_after_hours_comes_back_exactly(alarmed: DerivationStates) -> None:
    saved = make_state(alarmed, make_snapshot(ALARM_STEPS))

    assert alarmed.leak.gpus["GPU-a"].verdict is Certainty.LEAKING
    assert STATE.decode(STATE.encode(saved)) == saved
    assert STATE.decode(STATE.encode(saved)).memory.leak.gpus["GPU-a"].verdict is Certainty.LEAKING


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0.001, 4000),
            st.integers(0, 80 * 2**30),
            st.none() | st.floats(0, 1e15),
            st.sampled_from(["a", "é\n"]),
        ),
        min_size=1,
        max_size=80,
    )
)
def test_whatever_was_seen_comes_back_exactly(readings: list[tuple[float, int, float | None, str]]) -> None:
    snapshots, now = [], 0.0
    for elapsed, held_bytes, finished, uuid in readings:
        now += elapsed
        gpu = device(held_bytes // 2**20, uuid)
        snapshots.append(make_snapshot(0, shift=now, engines=(reading(0, finished_total=finished),), gpus=(gpu,)))
    saved = make_state(after(snapshots), snapshots[-1])

    assert STATE.decode(STATE.encode(saved)) == saved


@pytest.mark.parametrize("value", [inf, -inf, nan])
def test_what_is_no_number_is_not_written(alarmed: DerivationStates, value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        STATE.encode(make_state(alarmed, make_snapshot(ALARM_STEPS), saved_at_seconds=value))


def changed(**changes: Any) -> Callable[[bytes], bytes]:
    """Return a change to the document that keeps the checksum right."""

    def change(content: bytes) -> bytes:
        document = {**json.loads(content), **changes}
        del document["checksum"]
        return json.dumps({**document, "checksum": file._compute_checksum(document)}).encode()

    return change


def flipped(content: bytes) -> bytes:
    place = content.index(b'"floor_bytes":') + 15
    return content[:place] + (b"1" if content[place : place + 1] != b"1" else b"2") + content[place + 1 :]


BAD: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "half": lambda content: content[: len(content) // 2],
    "a-byte-short": lambda content: content[:-1],
    "a-digit-changed": flipped,
    "zeros": lambda content: bytes(len(content)),
    "no-text": lambda _: b"\xff\xfe\x80",
    "a-list": lambda _: b"[]",
    "a-text": lambda _: b'"state"',
    "nothing-in-it": lambda _: b"{}",
    "nested-deeply": lambda _: b"[" * 1_000_000,
    "an-endless-number": lambda _: b"1" * 1_000_000,
    "another-format": changed(format=99),
    "no-format": changed(format=None),
    "another-shape": changed(memory={"leak": []}),
    "another-verdict": changed(memory={"leak": {"gpus": {"tracks": {"GPU-a": {"clock": 1.0, "verdict": 7}}}}}),
    "no-number": lambda content: content.replace(b'"saved_at_seconds":', b'"saved_at_seconds":NaN,"x":', 1),
    "too-large": lambda _: bytes(MOST_STATE_BYTES + 1),
}


@pytest.mark.parametrize("damage", BAD.values(), ids=BAD)
def test_a_bad_file_is_distinguished_from_a_state(
    damage: Callable[[bytes], bytes], alarmed: DerivationStates, tmp_path: Path
) -> None:
    content = damage(STATE.encode(make_state(alarmed, make_snapshot(ALARM_STEPS))))
    (tmp_path / STATE.name).write_bytes(content)

    with pytest.raises(UnusableState):
        STATE.read(tmp_path)


def test_where_nothing_was_saved_nothing_is_read(tmp_path: Path) -> None:
    assert STATE.read(tmp_path) is None
    assert STATE.read(tmp_path / "no-folder") is None


def test_a_file_that_is_set_aside_replaces_an_older_one(tmp_path: Path) -> None:
    for content in ("first", "second"):
        (tmp_path / STATE.name).write_text(content)
        STATE.set_aside(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == [f"{STATE.name}.bad"]
    assert (tmp_path / f"{STATE.name}.bad").read_text() == "second"


def test_kill_9_during_a_write_leaves_the_old_state_or_the_new_one(alarmed: DerivationStates, tmp_path: Path) -> None:
    STATE.write(tmp_path, make_state(alarmed, make_snapshot(ALARM_STEPS), saved_at_seconds=0.0))
    chance, done = random.Random(1), 0  # noqa: S311 - moments, not secrets
    for _ in range(10):
        process = subprocess.Popen([sys.executable, "-c", SAVES, tmp_path, str(done + 1)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        for _ in range(chance.randrange(1, 6)):
            process.stdout.readline()
        try:
            process.wait(chance.uniform(0, 0.02))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        numbers, _ = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
        reported_seconds = int(numbers.split()[-1]) if numbers.split() else done

        saved_state = STATE.read(tmp_path)

        assert saved_state is not None
        assert saved_state.saved_at_seconds >= max(reported_seconds, done + 1), "what was reported saved is saved"
        assert saved_state.memory == alarmed
        done = int(saved_state.saved_at_seconds)


def test_the_shape_of_a_state_belongs_to_its_format(golden: Golden) -> None:
    """When this changes, raise STATE_FORMAT: an older state would be misread."""
    lines = [f"format {STATE_FORMAT}"]
    waiting: list[type] = [SavedState]
    for kind in waiting:
        hints = get_type_hints(kind)
        lines += ["", kind.__name__, *(f"  {name}: {_name(written)}" for name, written in kind.__annotations__.items())]
        waiting += [inner for hint in hints.values() for inner in _inside(hint) if inner not in waiting]

    golden(Path(__file__).with_name("shape.txt"), "\n".join(lines) + "\n")


def _name(annotation: Any) -> str:
    """Return an annotation as it is written, without the modules of its names."""
    return re.sub(r"\w+\.", "", annotation if isinstance(annotation, str) else formatannotation(annotation))


def _inside(hint: Any) -> list[type]:
    is_named_tuple = isinstance(hint, type) and hasattr(hint, "_fields")
    if isinstance(hint, type) and (issubclass(hint, Struct) or is_named_tuple):
        return [hint]
    return list(dict.fromkeys(inner for argument in get_args(hint) for inner in _inside(argument)))


def test_a_file_that_is_too_large_is_not_taken_into_memory(tmp_path: Path) -> None:
    with (tmp_path / STATE.name).open("wb") as stream:
        stream.truncate(MOST_STATE_BYTES + 1)

    tracemalloc.start()
    try:
        with pytest.raises(UnusableState, match="too large"):
            STATE.read(tmp_path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < 1e6

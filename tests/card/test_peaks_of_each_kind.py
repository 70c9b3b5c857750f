"""The peaks of each kind of work in a real vLLM on the stand-in card, beside torch's own around the same steps."""

from __future__ import annotations

import base64
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from tests.card.bench import LOOK_SECONDS, Bench, wait_until_served, watch
from tests.card.card import FOLDER, GIB, Cards
from tests.card.test_starts import ADAPTERS
from tests.process import eventually

pytestmark = pytest.mark.card

OPTIONS: Final = ("--enforce-eager", "--max-model-len", "4096", "--gpu-memory-utilization", "0.8")
VARIABLES: Final = {"HEADROOM_PROBE_PEAKS": "on", "CARD_WATCHES_STEPS": "1"}
SECOND_HALVES: Final = {"sampling", "prompt_logprobs"}
ACCURACY: Final = 0.05


def make_png(side: int) -> str:
    """A grey square as a data URL; each size is another image, so none is cached."""

    def write_chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = b"".join(b"\0" + bytes([128]) * (3 * side) for _ in range(side))
    header = write_chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    png = b"\x89PNG\r\n\x1a\n" + header + write_chunk(b"IDAT", zlib.compress(rows)) + write_chunk(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def complete(bench: Bench, tokens: int, model: str, **body: Any) -> None:
    prompt = [3 + (number * 7 + tokens) % 900 for number in range(tokens)]
    request_fields = {"model": model, "prompt": prompt, "max_tokens": 2, "ignore_eos": True, "temperature": 0}
    assert bench.post("/v1/completions", **request_fields | body).is_success


def use_all_but_adapters(bench: Bench) -> None:
    for tokens in (64, 256, 1024):
        complete(bench, tokens, "seeing")
        complete(bench, tokens, "seeing", prompt_logprobs=1)
    sampling = {"max_tokens": 8, "temperature": 1, "top_p": 0.9, "logprobs": 5, "frequency_penalty": 0.5}
    with ThreadPoolExecutor(16) as pool:
        for tokens in range(16, 32):
            pool.submit(complete, bench, tokens, "seeing", **sampling)
    for side in (112, 336, 672):
        content = [{"type": "image_url", "image_url": {"url": make_png(side)}}, {"type": "text", "text": "w300"}]
        messages = [{"role": "user", "content": content}]
        request_fields = {
            "model": "seeing",
            "messages": messages,
            "max_tokens": 2,
            "ignore_eos": True,
            "temperature": 0,
        }
        assert bench.post("/v1/chat/completions", **request_fields).is_success


def use_adapters(bench: Bench) -> None:
    for number, tokens in enumerate((64, 256, 1024)):
        path = str(bench.place / f"adapter-{number}")
        assert bench.post("/v1/load_lora_adapter", lora_name=f"a{number}", lora_path=path).is_success
        complete(bench, tokens, f"a{number}")


def write_seeing_model(place: Path) -> Path:
    subprocess.run(
        [FOLDER / "venv/bin/python", Path(__file__).with_name("seeing_model.py"), place / "seeing"], check=True
    )
    return place / "seeing"


def write_adapters(place: Path) -> Path:
    subprocess.run([FOLDER / "venv/bin/python", ADAPTERS, place], check=True)
    return FOLDER / "tiny"


def read_kinds(bench: Bench) -> dict[str, Any]:
    """The kinds in the file of the core, which has every step of before the call."""
    began = time.time()

    def read() -> dict[str, Any] | None:
        report = bench.read_reports().get("EngineCore", {})
        return report["peaks"]["kinds"] if report.get("t", 0) > began and report.get("peaks") else None

    return eventually(read, "the probe writes its peaks", LOOK_SECONDS, 1)


@pytest.mark.parametrize(
    ("write_model", "options", "use", "kinds"),
    [
        (
            write_seeing_model,
            (),
            use_all_but_adapters,
            {"prefill", "decode", "prompt_logprobs", "encoder", "sampling"},
        ),
        (write_adapters, ("--enable-lora", "--max-loras", "2"), use_adapters, {"adapter"}),
    ],
    ids=["seeing", "adapters"],
)
def test_the_highest_peak_of_each_kind_is_torchs_own(
    tmp_path: Path,
    write_model: Callable[[Path], Path],
    options: tuple[str, ...],
    use: Callable[[Bench], None],
    kinds: set[str],
) -> None:
    cards = Cards(folder=tmp_path / "cards", total_bytes=12 * GIB)
    model = write_model(tmp_path)
    with watch(tmp_path, *OPTIONS, *options, cards=cards, model=model, variables=VARIABLES) as bench:
        use(wait_until_served(bench))
        tables = read_kinds(bench)
        steps = bench.order("peaks")["steps"]

    assert kinds <= tables.keys()
    for kind, table in tables.items():
        highest = table["highest"]
        # The probe reads the clock a moment before: the step is the first that began since, but for rounding.
        later = [step for step in steps if step[0] > highest["t"] - 0.001]
        own = later[kind in SECOND_HALVES]
        sys.stdout.write(f"{kind}: {highest['bytes']:,} of a step of {highest['size']}, torch's own {own[2]:,}\n")
        assert highest["bytes"] == pytest.approx(own[2], rel=ACCURACY)

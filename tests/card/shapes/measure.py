"""Let vLLM size the models on stand-in cards, and write down what its workers said.

usage: CARD_FOLDER=.card python -m tests.card.shapes.measure [NAME...]

Without names it measures every shape. It writes measured.json, with what it did not measure as it was. Where
CARD_FOLDER has another release of vLLM than 0.32 (setup.sh FOLDER VLLM TORCH), it writes releases.json, by release.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tests.card.card import FOLDER, GIB, VLLM, Cards
from tests.card.shapes.table import SHAPES, Shape

HERE: Final = Path(__file__).parent
RECORD: Final = HERE / "measured.json"
RELEASES: Final = HERE / "releases.json"
USUAL_RELEASE: Final = "0.32"
MOST_SECONDS: Final = 420
NUMBER: Final = r"([\d.,]+)"
SAID: Final = {
    "weights_gib": rf"Model loading took {NUMBER} GiB",
    "free_gib": rf"Free memory on device \({NUMBER}/",
    "total_gib": rf"Free memory on device \([\d.]+/{NUMBER} GiB",
    "consumed_gib": rf"Actual usage is {NUMBER} GiB for consumed",
    "activations_gib": rf"{NUMBER} GiB for peak activation",
    "available_gib": rf"Available KV cache memory: {NUMBER} GiB",
    "kv_tokens": rf"GPU KV cache size: {NUMBER} tokens",
}
"""What a worker logs, each the largest of all ranks; of what is left for the cache, the least."""

FIXED: Final = VLLM | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""The engine's core is in the process that is forked."""

LEAST: Final = ("available_gib", "free_gib")
STARTED: Final = "The engine has started."
REFUSALS: Final = r"^(?:\(.*?\) )?(?:ERROR.*?\] )?((?:ValueError|torch.OutOfMemoryError|RuntimeError).*)"


def parse_log(text: str) -> dict[str, Any]:
    """Return what vLLM said: its figures, or why it did not start."""
    figures: dict[str, Any] = {}
    for name, pattern in SAID.items():
        numbers = [float(match.replace(",", "")) for match in re.findall(pattern, text)]
        if numbers:
            figures[name] = min(numbers) if name in LEAST else max(numbers)
    if "kv_tokens" in figures:
        figures["kv_tokens"] = int(figures["kv_tokens"])
    # Some releases compile kernels after the sizing, which needs nvcc: what they said before counts.
    if "available_gib" not in figures and "activations_gib" not in figures and STARTED not in text:
        matches = re.findall(REFUSALS, text, re.MULTILINE)
        figures["refused"] = re.sub(r"\s+", " ", matches[-1])[:160] if matches else "it ended without a reason"
    return figures


def write_model(shape: Shape, folder: Path) -> None:
    """Write the files that vLLM reads of a model without weights."""
    folder.mkdir(parents=True)
    for file in (FOLDER / "tiny").glob("tokenizer*"):
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(shape.config))


def measure(shapes: Sequence[Shape], folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what vLLM reported about each shape, on four cards of its size; its logs stay in the folder."""
    for size in sorted({shape.card_gib for shape in shapes}, reverse=True):
        cards = Cards(folder=folder / f"cards-{size}", count=4, total_bytes=size * GIB).create()
        yield from measure_on(cards, [shape for shape in shapes if shape.card_gib == size], folder)


def measure_on(cards: Cards, shapes: Sequence[Shape], folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what vLLM reported about each shape on these cards, one after the other."""
    cases = {shape.name: _build_case(shape, folder / f"{cards.folder.name}-{n}") for n, shape in enumerate(shapes)}
    (folder / "cases.json").write_text(json.dumps(list(cases.values())))
    with subprocess.Popen(
        [FOLDER / "venv/bin/python", HERE / "size_models.py", folder / "cases.json"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **cards.environment(), **FIXED, **link_libraries(folder / "link")},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            name = line.strip()
            yield name, parse_log(Path(cases[name]["log"]).read_text(errors="replace"))


def link_libraries(folder: Path) -> dict[str, str]:
    """Let kernels that FlashInfer compiles be linked with the stand-ins: DeepSeek's rotary embedding is one."""
    folder.mkdir(exist_ok=True)
    for library in (
        FOLDER / "driver/libcuda.so.1",
        *FOLDER.glob("venv/lib/*/site-packages/nvidia/cu13/lib/libcudart.so.*"),
    ):
        link = folder / f"{library.name.partition('.so')[0]}.so"
        link.unlink(missing_ok=True)
        link.symlink_to(library)
    return {"LIBRARY_PATH": str(folder)}


def _build_case(shape: Shape, place: Path) -> dict[str, Any]:
    write_model(shape, place / "model")
    return {
        "name": shape.name,
        "folder": str(place / "model"),
        "log": str(place / "log"),
        "seconds": MOST_SECONDS,
        "options": ["--enforce-eager", *shape.options, *shape.only_vllm],
        "environment": dict(shape.environment),
    }


def read_release() -> str:
    """Return the release of vLLM in the card's folder, such as 0.33."""
    script = "from importlib.metadata import version; print(version('vllm'))"
    done = subprocess.run([FOLDER / "venv/bin/python", "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.strip().rpartition(".")[0]


def main(names: Sequence[str]) -> None:
    release = read_release()
    if release != USUAL_RELEASE:
        # Its kernels need a compiler.
        os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    releases = json.loads(RELEASES.read_text())
    usual = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record = usual if release == USUAL_RELEASE else releases.setdefault(release, {})
    folder = Path(tempfile.mkdtemp(prefix="shapes-"))
    for name, figures in measure([shape for name in names for shape in SHAPES if shape.name == name] or SHAPES, folder):
        record[name] = figures
        ordered = {shape.name: record[shape.name] for shape in SHAPES if shape.name in record}
        if release == USUAL_RELEASE:
            RECORD.write_text(json.dumps(ordered, indent=1) + "\n")
        else:
            releases[release] = ordered
            RELEASES.write_text(json.dumps(dict(sorted(releases.items())), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])

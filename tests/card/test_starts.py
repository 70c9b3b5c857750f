"""What of vLLM starts on the stand-in card, serves, and is distinguished by the probe."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.card.bench import LOOK_SECONDS, Bench, wait_until_served, watch
from tests.card.card import FOLDER, GIB, MIB, Cards
from tests.process import eventually

pytestmark = pytest.mark.card

SMALL = ("--max-model-len", "2048", "--max-num-seqs", "8", "--gpu-memory-utilization", "0.8")
EAGER = (*SMALL, "--enforce-eager")
ADAPTERS = Path(__file__).parents[1] / "engine" / "lora_adapters.py"


def use_adapters(bench: Bench) -> None:
    subprocess.run([FOLDER / "venv/bin/python", ADAPTERS, bench.place], check=True)
    for number in range(3):
        path = str(bench.place / f"adapter-{number}")
        assert bench.post("/v1/load_lora_adapter", lora_name=f"a{number}", lora_path=path).status_code == 200
        assert bench.complete(model=f"a{number}").status_code == 200
    assert bench.post("/v1/unload_lora_adapter", lora_name="a0").status_code == 200


def use_graphs(bench: Bench) -> None:
    """A grammar refuses the token that no kernel chose: such a request fails, and the engine serves on."""
    assert bench.complete(structured_outputs={"choice": ["w300", "w301"]}).status_code == 500
    assert bench.complete(prompt_logprobs=3).status_code == 200


def serve_many(bench: Bench) -> None:
    for number in range(8):
        assert bench.complete(8, prompt=f"w{300 + number} w301").status_code == 200


@pytest.mark.parametrize(
    ("options", "cards", "use"),
    [
        pytest.param(SMALL, 1, use_graphs, id="CUDA graphs"),
        pytest.param((*EAGER, "--tensor-parallel-size", "2"), 2, serve_many, id="tensor parallel 2"),
        pytest.param(
            (*EAGER, "--data-parallel-size", "2", "--api-server-count", "1"), 2, serve_many, id="data parallel 2"
        ),
        pytest.param((*EAGER, "--enable-lora", "--max-loras", "2"), 1, use_adapters, id="adapters"),
        pytest.param(
            (*EAGER, "--speculative-config", '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":3}'),
            1,
            serve_many,
            id="speculative decoding",
        ),
        pytest.param((*EAGER, "--kv-offloading-size", "1"), 1, serve_many, id="KV offloading"),
    ],
)
def test_it_starts_and_its_parts_sum_to_the_cards(
    tmp_path: Path, options: tuple[str, ...], cards: int, use: Callable[[Bench], None]
) -> None:
    fake_cards = Cards(folder=tmp_path / "cards", count=cards, total_bytes=24 * GIB)
    began = time.monotonic()
    with watch(tmp_path, *options, cards=fake_cards, SAMPLE_INTERVAL_SECONDS="1") as bench:
        wait_until_served(bench)
        sys.stdout.write(f"{time.monotonic() - began:.0f} s to serve\n")
        use(bench)
        for card in range(cards):

            def agree(card: int = card) -> bool:
                parts = bench.read_parts(card)
                return "outside_torch" in parts and sum(parts.values()) == sum(fake_cards.read_holders(card).values())

            eventually(agree, f"the parts of card {card} sum to what it holds", LOOK_SECONDS, 1)
            parts = {part: round(size / MIB) for part, size in bench.read_parts(card).items()}
            sys.stdout.write(f"card {card}: {parts} MiB\n")
        assert (bench.read_parts().get("cuda_graphs", 0) > 0) == ("--enforce-eager" not in options)

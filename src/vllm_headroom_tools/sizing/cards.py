"""GPU memory sizes by card name."""

import re
from typing import Final

from msgspec import Struct

from vllm_headroom.inputs import describe_unknown
from vllm_headroom.units import GIB, GIGABYTE, MIB, RefusedError


class Card(Struct, frozen=True, kw_only=True):
    """A kind of GPU."""

    name: str
    # The total reported by NVML; with unified memory, the machine's MemTotal.
    memory_bytes: int
    has_unified_memory: bool = False
    # Whether the card gets vLLM's defaults for small cards. A card gets these defaults if its name
    # contains "a100" (engine/arg_utils.py, `get_batch_defaults`).
    has_small_defaults: bool = False


class CardCount(Struct, frozen=True, kw_only=True):
    """A kind of GPU and the number of GPUs.

    The number is None if only the kind is named.
    """

    card: Card
    count: int | None


TOTALS_MIB: Final = {
    "T4": 15360,
    "V100-16GB": 16384,
    "V100-32GB": 32768,
    "A10": 23028,
    "A10G": 23028,
    "A30": 24576,
    "A40": 46068,
    "A100-40GB": 40960,
    "A100-80GB": 81920,
    "A800-80GB": 81920,
    "L4": 23034,
    "L20": 46068,
    "L40": 46068,
    "L40S": 46068,
    "H20": 97871,
    "H100": 81559,
    "H800": 81559,
    "H100 NVL": 95830,
    "GH200": 97871,
    "H200": 143771,
    "H200 NVL": 143771,
    "B200": 183359,
    "GB200": 189471,
    "B300": 275040,
    "GB300": 284208,
    "RTX 3090": 24576,
    "RTX 4080": 16376,
    "RTX 4090": 24564,
    "RTX 5080": 16303,
    "RTX 5090": 32607,
    "RTX A6000": 49140,
    "RTX 6000 Ada": 49140,
    "RTX PRO 6000": 97887,
    "MI250X": 65520,
    "MI300X": 196592,
    "MI325X": 262128,
    "MI350X": 294896,
    "MI355X": 294896,
}
"""The total in MiB that `nvidia-smi` or `amd-smi` prints for a device. The ECC setting is the
default. The sources are public issues and vendors' forums. The total differs by about ten MiB
between drivers.
"""

GB10_MIB: Final = 122_572
"""MemTotal of a DGX Spark, 119.7 GiB (/proc/meminfo in public issues). NVML reports no total."""


def _list_cards() -> tuple[Card, ...]:
    """Return the cards that `plan` knows by name."""
    cards = [
        Card(
            name=name,
            memory_bytes=total_mib * MIB,
            has_small_defaults=name.startswith("A100"),
        )
        for name, total_mib in TOTALS_MIB.items()
    ]
    gb10 = Card(name="GB10", memory_bytes=GB10_MIB * MIB, has_unified_memory=True)
    return (*cards, gb10)


CARDS: Final = _list_cards()

MAKERS_WORDS: Final = re.compile(
    "nvidia|amd|instinct|geforce|tesla|rtx|gpu|tensor|core|sxm\\d?|pcie|oam|hbm\\de?"
    "|blackwell|server|workstation|max|q|edition|generation"
)
"""Words in a card's full NVML name that are ignored. They do not affect the memory."""

OTHER_NAMES: Final = {"dgxspark": "GB10", "spark": "GB10"}
"""The names of machines that contain a single kind of card."""

COUNTED_NAME: Final = re.compile(r"([0-9]{1,5}) ?[xX\u00d7*] ?(\S.*)", re.DOTALL)
NAME_WITH_COUNT: Final = re.compile(
    r"(\S.*?) ?(?:[\u00d7*:]|(?<![tT])[xX]) ?([0-9]{1,5})", re.DOTALL
)
"""A name with a count at one end, as in `2x H100` and `H100 x2`. The X in `RTX 5090` does not
match.
"""

LABEL_LOW: Final = 0.9
LABEL_HIGH: Final = 1.1
"""The limits on the size in a card's name. It is at least LABEL_LOW times the card's memory in GiB.
It is at most LABEL_HIGH times the memory in GB.
"""

SYSTEM_SIZED: Final = "GH200"
"""A card whose name may contain the size of the CPU's memory."""

MEMORY_WORD: Final = re.compile(r"\d+g(?:i?b)?", re.ASCII)


SAME_MODEL_BYTES: Final = 32 * MIB
"""Our choice: sizes that differ by less than this belong to the same card. The totals reported by
drivers differ by about ten MiB.
"""


def find_card_by_size(memory_bytes: int) -> Card | None:
    """Return the first card in the table with this memory.

    Returns None if no card has it.
    """
    for card in CARDS:
        if abs(card.memory_bytes - memory_bytes) < SAME_MODEL_BYTES:
            return card
    return None


def parse_gpus_by_name(text: str) -> CardCount:
    """Parse GPUs from a text such as H100 or 8xH100.

    Raises RefusedError for an unknown name. A card's NVML name is also valid, such as "NVIDIA H100
    80GB HBM3".
    """
    name = text.strip()
    if not name:
        raise RefusedError("it names no card")
    count = None
    counted_name = COUNTED_NAME.fullmatch(name)
    name_with_count = NAME_WITH_COUNT.fullmatch(name)
    if counted_name is not None:
        # "8xH100" and "H100x8" are both in use.
        count = int(counted_name[1])
        name = counted_name[2]
    elif name_with_count is not None:
        name = name_with_count[1]
        count = int(name_with_count[2])
    if count == 0:
        raise RefusedError("it is no card")
    return CardCount(card=_find_card(name), count=count)


def _find_card(text: str) -> Card:
    """Return the card with this name; raise RefusedError for an unknown or ambiguous name."""
    # Spaces, dashes and case are ignored when names are compared.
    key = _build_key(text)
    by_key = {_build_key(card.name): card for card in CARDS}
    if key in OTHER_NAMES:
        key = _build_key(OTHER_NAMES[key])
    if key in by_key:
        return by_key[key]
    # If a kind of card has only one size, its name may include the size.
    words = [word for word in _split_words(text) if not MEMORY_WORD.fullmatch(word)]
    key_without_size = "".join(words)
    if key_without_size in by_key:
        card = by_key[key_without_size]
        if _has_size(card, text):
            return card
    raise RefusedError(_describe_unknown_card(text, key))


def _describe_unknown_card(text: str, key: str) -> str:
    """Return a text that suggests what to write instead of an unknown card name.

    `key` is the name's normalized form.
    """
    names = [card.name for card in CARDS]
    # If a kind of card has several sizes, such as the A100, the name must include the size.
    sizes = [name for name in names if key and _build_key(name).startswith(key)]
    if len(sizes) > 1 and all("GB" in name for name in sizes):
        return f"there are {' and '.join(sizes)}"
    hint = describe_unknown(text, names, "a card that is known here")
    return f"{hint.removesuffix(', see --help')}; else --gpu-memory SIZE"


def _has_size(card: Card, text: str) -> bool:
    """Return whether the size in a name fits the card.

    Returns True if the name has no size.
    """
    for word in _split_words(text):
        if MEMORY_WORD.fullmatch(word) and card.name != SYSTEM_SIZED:
            label = int(word.rstrip("gib"))
            low = LABEL_LOW * card.memory_bytes / GIB
            high = LABEL_HIGH * card.memory_bytes / GIGABYTE
            return low <= label <= high
    return True


def _build_key(text: str) -> str:
    """Return the normalized name: lowercase, without punctuation and manufacturers' words."""
    words = []
    for word in _split_words(text):
        size = MEMORY_WORD.fullmatch(word)
        words.append(f"{word.rstrip('gib')}gb" if size else word)
    return "".join(words)


def _split_words(text: str) -> list[str]:
    words = re.findall(r"[a-z0-9]+", text.lower())
    words = [word.removeprefix("rtx") or word for word in words]
    return [word for word in words if not MAKERS_WORDS.fullmatch(word)]

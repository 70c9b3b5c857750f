"""What preflight says of one thing."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from vllm_headroom.commands.conclusion import Conclusion


class Kind(StrEnum):
    """What is looked at; a closed set, for scripts and for --ignore."""

    DRIVER = "driver"
    GPUS = "gpus"
    MEMORY = "memory"
    ECC = "ecc"
    IDENTICAL = "identical"
    SHM = "shm"
    HOST = "host"
    ENGINE = "engine"


class Finding(Struct, frozen=True):
    """One thing that keeps vLLM from starting, that cannot be told, or, with GOOD, that is worth a remark.

    `fix` is None where `text` ends in what to do; `gpu` is an NVML index. With `may_pass`, waiting may mend it.
    """

    kind: Kind
    verdict: Conclusion
    text: str
    fix: str | None = None
    gpu: int | None = None
    may_pass: bool = False

"""Starts an API server's processes, as `vllm serve` (spawn) or as a program that uses vLLM as a library (fork)."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time

from .engine import EngineCore
from .plugins import load_general_plugins


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--start", choices=["spawn", "fork"], default="spawn")
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    load_general_plugins()
    context = multiprocessing.get_context(args.start)
    cores = []
    for rank in range(args.cores):
        name = f"EngineCore_DP{rank}" if args.cores > 1 else "EngineCore"
        arguments = (rank, args.workers, args.start)
        cores.append(context.Process(target=EngineCore.run_engine_core, args=arguments, name=name))
        cores[-1].start()
    sys.stdout.write("serves\n")
    sys.stdout.flush()
    while all(core.is_alive() for core in cores):
        time.sleep(0.02)


if __name__ == "__main__":
    main()

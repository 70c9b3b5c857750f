"""vllm-headroom: the distance left to out-of-memory of a vLLM server, as Prometheus metrics."""

import sys

if "".join(sys.argv[:1]).endswith(
    ("vllm-headroom", "-m")
):  # the program; whoever imports this keeps their handlers
    # Built in, where `signal` takes milliseconds in which Ctrl-C would still be a traceback.
    import _signal  # type: ignore[import-not-found]

    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # until `main` says how its command ends

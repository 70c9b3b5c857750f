"""vllm-headroom: the distance left to out-of-memory of a vLLM server, as Prometheus metrics."""

import sys

# The program only: whoever imports this package keeps their signal handlers.
if "".join(sys.argv[:1]).endswith(("vllm-headroom", "-m")):
    # Built in: importing `signal` takes milliseconds in which Ctrl-C would still be a traceback.
    import _signal  # type: ignore[import-not-found]

    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # until `main` decides how its command ends

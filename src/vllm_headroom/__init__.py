"""vllm-headroom: the distance left to out-of-memory of a vLLM server, as Prometheus metrics."""

import sys

# Only the program sets this. A library that imports this package keeps its signal handlers.
if "".join(sys.argv[:1]).endswith(("vllm-headroom", "-m")):
    # This is a built-in module. Importing `signal` takes milliseconds, in which Ctrl-C would print
    # a traceback.
    import _signal  # type: ignore[import-not-found]

    # This holds until `main` decides how its command ends.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

"""vllm-headroom: how far a vLLM server is from running out of memory, as Prometheus metrics."""

import sys

# Only the program sets this. If a library imports this package, its signal handlers are kept.
if "".join(sys.argv[:1]).endswith(("vllm-headroom", "-m")):
    # This is a built-in module. Importing `signal` takes milliseconds, during which Ctrl-C would
    # print a traceback.
    import _signal  # type: ignore[import-not-found]

    # This applies until `main` decides how its command ends.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

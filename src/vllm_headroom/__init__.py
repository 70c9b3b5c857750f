"""vllm-headroom: how far a vLLM server is from running out of memory, as Prometheus metrics."""

import sys

# Only the vllm-headroom program itself changes the handler for SIGINT. If other code imports this
# package, the existing handler is kept.
if "".join(sys.argv[:1]).endswith(("vllm-headroom", "-m")):
    # `_signal` is a built-in module. Importing `signal` takes several milliseconds, and Ctrl-C
    # during that import would print a traceback.
    import _signal  # type: ignore[import-not-found]

    # Until `main` has installed its handlers, Ctrl-C ends the process without a traceback.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

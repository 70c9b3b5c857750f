"""The help of the command."""

from typing import Final

USAGE: Final = """\
Usage: vllm-headroom doctor [--json] [OPTION VALUE]...

Says what the daemon can see from here with these settings, what is missing, and
the line that fixes it. It reads as the daemon does, leaves nothing behind, and
is done within ten seconds. Run it where the daemon runs:
  kubectl exec POD -c headroom -- vllm-headroom doctor

  --json           Print one JSON object instead of words.

It ends with status 0 when everything is available, 1 when something is missing
or cannot be told, and 2 when it cannot use its settings.
"""

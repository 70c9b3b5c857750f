#!/usr/bin/env bash
# Runs a command beside a cluster, and leaves nothing of a cluster of its own behind.   usage: run.sh FOLDER COMMAND...
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$1
shift
trap '"$here/node/stop.sh" "$folder/node" 2>/dev/null; rm -rf "$folder"' EXIT
"$here/setup.sh" "$folder"
export CLUSTER_FOLDER=$folder
if [[ -x $folder/node/inside ]]; then
  "$folder/node/inside" "$@"
else
  "$@"
fi

#!/usr/bin/env bash
# Plays the tests on the cluster in CLUSTER_FOLDER, side by side, each file in a process, since most only wait.   usage: play.sh PYTEST [OPTION]...
# The one that ends the cluster's node gets ready beside the others, and waits until they have ended.
# test_replicas.py writes a table in 25 minutes, and says itself how.
set -euo pipefail
pytest=$1
shift
status=0
"$pytest" -m cluster -n 0 -rP "$@" tests/cluster/test_lost_node.py >"$CLUSTER_FOLDER/lost-node.log" 2>&1 &
lost_node=$!
trap 'kill "$lost_node" 2>/dev/null || true' EXIT
"$pytest" -m cluster -n 9 --dist loadfile -rP "$@" tests/cluster --ignore=tests/cluster/test_lost_node.py --ignore=tests/cluster/test_replicas.py || status=$?
touch "$CLUSTER_FOLDER/others-have-ended"
wait "$lost_node" || status=$?
cat "$CLUSTER_FOLDER/lost-node.log"
exit $status

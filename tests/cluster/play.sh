#!/usr/bin/env bash
# Plays the tests on the cluster in CLUSTER_FOLDER, side by side, and then the one that ends its node.   usage: play.sh PYTEST [OPTION]...
# test_replicas.py writes a table in 25 minutes, and says itself how.
set -euo pipefail
pytest=$1
shift
status=0
"$pytest" -m cluster -n 5 --dist loadfile -rP "$@" tests/cluster --ignore=tests/cluster/test_lost_node.py --ignore=tests/cluster/test_replicas.py || status=$?
"$pytest" -m cluster -n 0 -rP "$@" tests/cluster/test_lost_node.py || status=$?
exit $status

#!/usr/bin/env bash
# Plays the tests on the cluster in CLUSTER_FOLDER, side by side, and then the one that ends its node.   usage: play.sh PYTEST [OPTION]...
set -euo pipefail
pytest=$1
shift
status=0
"$pytest" -m cluster -n 5 --dist loadfile -rP "$@" tests/cluster --ignore=tests/cluster/test_lost_node.py || status=$?
"$pytest" -m cluster -n 0 -rP "$@" tests/cluster/test_lost_node.py || status=$?
exit $status

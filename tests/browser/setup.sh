#!/usr/bin/env bash
# Fetches axe-core, which judges a page's accessibility, into FOLDER.
# usage: setup.sh FOLDER     (seconds)     Needs npm and Chromium: apt-get install npm chromium
set -euo pipefail
command -v chromium >/dev/null || { echo "no chromium: apt-get install chromium" >&2; exit 1; }
mkdir -p "$1"
[ -f "$1/node_modules/axe-core/axe.min.js" ] || npm install --silent --no-audit --no-fund --prefix "$1" axe-core@4

#!/usr/bin/env bash
# Builds Kubernetes as one program into CACHE, once for each version of its module file, and prints its path.
# usage: build.sh CACHE [MODULE_FILE]     (seven minutes on two cores the first time, with Go 1.26 for the newest)
#   MODULE_FILE  go.mod, or another beside it, such as kubernetes-1.37.mod
set -euo pipefail
cd "$(dirname "$0")"
cache=$1
module_file=${2:-go.mod}
version=$(awk '$1 == "k8s.io/kubernetes" { print $2; exit }' "$module_file")
program=$cache/kubernetes-$version-$(cat "$module_file" "${module_file%.mod}.sum" main.go | sha256sum | cut -c1-12)
if [[ ! -x $program ]]; then
  mkdir -p "$cache"
  minor=${version#v1.}
  about=k8s.io/component-base/version
  CGO_ENABLED=0 go build -modfile="$module_file" -trimpath -o "$program.new" \
    -ldflags="-s -w -X $about.gitVersion=$version -X $about.gitMajor=1 -X $about.gitMinor=${minor%%.*}" . >&2
  mv "$program.new" "$program"
fi
echo "$program"

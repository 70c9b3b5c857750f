#!/usr/bin/env bash
# Gives a cluster of one's own the resources that recipes and components are for, from their Go modules, and has KEDA built.
# usage: extensions.sh FOLDER CACHE     (KEDA takes ten minutes on two cores the first time)
# AIBrix and Google's managed Prometheus have no module that can be had.
set -euo pipefail
folder=$1
cache=$2
find_module() { # MODULE@VERSION: its folder
  go mod download -json "$1" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p'
}
keda=$(find_module github.com/kedacore/keda/v2@v2.21.0)
for part in operator adapter; do
  program=$cache/keda-$part-v2.21.0
  if [[ ! -x $program ]]; then
    (cd "$keda" && CGO_ENABLED=0 nice go build -mod=readonly -trimpath -ldflags="-s -w" -o "$program.new" "./cmd/$part")
    mv "$program.new" "$program"
  fi
  ln -sf "$program" "$folder/keda-$part"
done
ln -sfn "$keda/config" "$folder/keda-config"
ray=$(find_module github.com/ray-project/kuberay/ray-operator@v1.5.0)
groups=$(find_module sigs.k8s.io/lws@v0.7.0)
kserve=$(find_module github.com/kserve/kserve@v0.16.0)
files=()
for file in "$keda"/config/crd/bases/*.yaml "$ray/config/crd/bases/ray.io_rayservices.yaml" "$groups"/config/crd/bases/*.yaml \
  "$kserve/config/crd/full/serving.kserve.io_inferenceservices.yaml"; do
  files+=(--filename "$file")
done
"$folder/kubectl" create "${files[@]}"
"$folder/kubectl" wait --for=condition=Established --timeout=60s customresourcedefinitions --all

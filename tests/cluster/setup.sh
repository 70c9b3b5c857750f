#!/usr/bin/env bash
# Has a cluster for the tests in FOLDER: that of KUBECONFIG where it is set, else one of its own that node/start.sh starts, as root.
# usage: setup.sh FOLDER
# Writes FOLDER/kubectl, and for a cluster of its own FOLDER/node, which node/stop.sh removes.
#   KUBECONFIG   a cluster that has a runtime class "nvidia" and both images: set SIDECAR_IMAGE and ENGINE_IMAGE to where they are
#   CACHE        where Kubernetes is kept once it is built; by default below ~/.cache
#   KUBERNETES   a file beside node/go.mod for another version, such as kubernetes-1.37.mod
set -euo pipefail
cd "$(dirname "$0")"
mkdir -p "$1"
folder=$(realpath "$1")
cache=${CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/vllm-headroom-cluster}
find_module() { # MODULE@VERSION: its folder
  go mod download -json "$1" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p'
}
states=$cache/kube-state-metrics-v2.15.0
if [[ ! -x $states ]]; then # three minutes on two cores
  mkdir -p "$cache"
  (cd "$(find_module k8s.io/kube-state-metrics/v2@v2.15.0)" && CGO_ENABLED=0 nice go build -mod=readonly -trimpath -o "$states.new" .)
  mv "$states.new" "$states"
fi
ln -sf "$states" "$folder/kube-state-metrics"
if [[ -n ${KUBECONFIG:-} ]]; then
  command -v helm >/dev/null && ln -sf "$(command -v helm)" "$folder/helm"
  printf '#!/bin/sh\nexec kubectl "$@"\n' >"$folder/kubectl"
  chmod +x "$folder/kubectl"
  exec "$folder/kubectl" version
fi
missing=()
for program in go containerd ctr runc etcd ip openssl podman catatonit cc; do
  command -v $program >/dev/null || missing+=("$program")
done
((${#missing[@]} == 0)) || { echo "a cluster of its own needs ${missing[*]}: see node/start.sh, or set KUBECONFIG" >&2; exit 1; }

program=$(nice node/build.sh "$cache" "${KUBERNETES:-go.mod}")
helm=$cache/helm-v3.18.6
if [[ ! -x $helm ]]; then # three minutes on two cores
  (
    cd "$(mktemp -d)"
    go mod init helm
    go get -tool helm.sh/helm/v3/cmd/helm@v3.18.6
    CGO_ENABLED=0 nice go build -trimpath -o "$helm.new" helm.sh/helm/v3/cmd/helm
    rm -r "$PWD"
  )
  mv "$helm.new" "$helm"
fi
ln -sf "$helm" "$folder/helm"
image=${IMAGE_FOLDER:-$cache/image}
../image/setup.sh "$image"
containers=$image/containers
install -D "$(command -v catatonit)" "$folder/images/pause"
install -D engine.py "$folder/images/vllm"
printf 'FROM scratch\nCOPY pause /pause\nENTRYPOINT ["/pause", "-P"]\n' >"$folder/images/pause.containerfile"
printf 'FROM localhost/vllm-headroom:image-test\nCOPY vllm /usr/local/bin/vllm\nENTRYPOINT []\n' >"$folder/images/vllm.containerfile"
build() { # FILE IMAGE
  "$containers" build --isolation chroot --pull=never --quiet --file "$folder/images/$1.containerfile" --tag "$2" "$folder/images" >/dev/null
}
build pause localhost/pause:1
build vllm localhost/vllm-stand-in:1

# What NVIDIA's runtime mounts, here the fake library; its control file is in a volume of each pod.
fake=$(cd ../.. && .venv/bin/python -c 'from tests.fakes.nvml.library import built; print(built())')
install -D "$fake" "$folder/driver/libnvidia-ml.so.1"
ctr oci spec | python3 -c '
import json, sys
spec = json.load(sys.stdin)
spec["process"].setdefault("env", []).append("NVML_FAKE_FILE=/run/nvml/nvml.txt")
spec["mounts"].append({
    "destination": "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", "source": sys.argv[1], "type": "bind", "options": ["rbind", "ro"],
})
json.dump(spec, sys.stdout)' "$folder/driver/libnvidia-ml.so.1" >"$folder/nvidia.json"

node/start.sh "$program" "$folder/node" "$folder/nvidia.json"
kubectl=$folder/node/kubectl
ln -sf "$kubectl" "$folder/kubectl"
for image in localhost/pause:1 localhost/vllm-stand-in:1 localhost/vllm-headroom:image-test; do
  "$containers" save --quiet "$image" | ctr --address "$folder/node/containerd.sock" --namespace k8s.io images import - >/dev/null
done
"$kubectl" patch node node --subresource=status --type=json --patch '[{"op": "add", "path": "/status/capacity/nvidia.com~1gpu", "value": "110"}]'
"$kubectl" label node node nvidia.com/gpu.present=true
"$kubectl" create --filename - <<END
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: nvidia}
handler: nvidia
END
operator=$(find_module github.com/prometheus-operator/prometheus-operator@v0.85.0)
for kind in podmonitors prometheusrules; do
  "$kubectl" create --filename "$operator/example/prometheus-operator-crd/monitoring.coreos.com_$kind.yaml"
done
./extensions.sh "$folder"

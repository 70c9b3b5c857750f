#!/usr/bin/env bash
# Has a cluster for the tests in FOLDER: that of KUBECONFIG where it is set, else one of its own that node/start.sh starts, as root.
# usage: setup.sh FOLDER
# Writes FOLDER/kubectl, and for a cluster of its own FOLDER/node, which node/stop.sh removes.
#   KUBECONFIG   a cluster that has a runtime class "nvidia" and the images: set SIDECAR_IMAGE, NEXT_SIDECAR_IMAGE and ENGINE_IMAGE to theirs,
#                and HOST_ADDRESS to where its pods reach this machine; where it has no Prometheus operator, it gets one
#   CACHE        where Kubernetes and the other programs are kept once they are built; by default below ~/.cache
#   KUBERNETES   a file beside node/go.mod for another version, such as kubernetes-1.37.mod
set -euo pipefail
cd "$(dirname "$0")"
mkdir -p "$1"
folder=$(realpath "$1")
cache=${CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/vllm-headroom-cluster}
operator=$(go mod download -json github.com/prometheus-operator/prometheus-operator@v0.85.0 | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
if [[ -n ${KUBECONFIG:-} ]]; then
  command -v helm >/dev/null && ln -sf "$(command -v helm)" "$folder/helm"
  printf '#!/bin/sh\nexec kubectl "$@"\n' >"$folder/kubectl"
  chmod +x "$folder/kubectl"
  # Its own operator serves as well.
  "$folder/kubectl" get crd prometheuses.monitoring.coreos.com || "$folder/kubectl" create --filename "$operator/bundle.yaml"
  exec "$folder/kubectl" version
fi
missing=()
for program in go containerd ctr runc etcd ip openssl podman catatonit cc prometheus-alertmanager; do
  command -v $program >/dev/null || missing+=("$program")
done
((${#missing[@]} == 0)) || { echo "a cluster of its own needs ${missing[*]}: see node/start.sh, or set KUBECONFIG" >&2; exit 1; }

program=$(nice node/build.sh "$cache" "${KUBERNETES:-go.mod}")
build_program() { # NAME PACKAGE VERSION [OPTION]...: two to seven minutes on two cores, unless it is kept
  local kept=$cache/$1-$3
  if [[ ! -x $kept ]]; then
    (
      cd "$(mktemp -d)"
      go mod init build
      go get -tool "$2@$3"
      CGO_ENABLED=0 nice go build -trimpath -ldflags="-s -w" "${@:4}" -o "$kept.new" "$2"
      rm -r "$PWD"
    )
    mv "$kept.new" "$kept"
  fi
  install -D "$kept" "$folder/images/$1"
}
build_program helm helm.sh/helm/v3/cmd/helm v3.18.6
build_program helm4 helm.sh/helm/v4/cmd/helm v4.3.2
build_program kube-state-metrics k8s.io/kube-state-metrics/v2 v2.15.0
build_program prometheus github.com/prometheus/prometheus/cmd/prometheus v0.313.5 -tags remove_all_sd,enable_kubernetes_sd
build_program prometheus-operator github.com/prometheus-operator/prometheus-operator/cmd/operator v0.85.0
build_program prometheus-config-reloader github.com/prometheus-operator/prometheus-operator/cmd/prometheus-config-reloader v0.85.0
ln -sf images/helm "$folder/helm"
ln -sf images/helm4 "$folder/helm4"
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

# It starts while the images are built.
trap wait EXIT
node/start.sh "$program" "$folder/node" "$folder/nvidia.json" &
starting=$!
image=${IMAGE_FOLDER:-$cache/image}
../image/setup.sh "$image"
containers=$image/containers
install -D "$(command -v catatonit)" "$folder/images/pause"
install -D engine.py "$folder/images/vllm"
printf 'FROM scratch\nCOPY pause /pause\nENTRYPOINT ["/pause", "-P"]\n' >"$folder/images/pause.containerfile"
printf 'FROM localhost/vllm-headroom:image-test\nCOPY vllm /usr/local/bin/vllm\nENTRYPOINT []\n' >"$folder/images/vllm.containerfile"
"$containers" tag localhost/vllm-headroom:image-test localhost/vllm-headroom:next
images=(localhost/vllm-headroom:image-test localhost/vllm-headroom:next)
build() { # FILE IMAGE
  "$containers" build --isolation chroot --pull=never --quiet --file "$folder/images/$1.containerfile" --tag "$2" "$folder/images" >/dev/null
  images+=("$2")
}
build_of_program() { # NAME IMAGE: with this program alone, under the name that its project publishes
  printf 'FROM scratch\nCOPY %s /bin/%s\nENTRYPOINT ["/bin/%s"]\n' "$1" "$1" "$1" >"$folder/images/$1.containerfile"
  build "$@"
}
build pause localhost/pause:1
build vllm localhost/vllm-stand-in:1
build_of_program kube-state-metrics registry.k8s.io/kube-state-metrics/kube-state-metrics:v2.15.0
build_of_program prometheus quay.io/prometheus/prometheus:v3.13.5
build_of_program prometheus-operator quay.io/prometheus-operator/prometheus-operator:v0.85.0
build_of_program prometheus-config-reloader quay.io/prometheus-operator/prometheus-config-reloader:v0.85.0
# Debian's, whose page and templates are in a folder: the module has neither.
install -D "$(command -v prometheus-alertmanager)" "$folder/images/alertmanager"
cp -r /usr/share/prometheus/alertmanager "$folder/images/alertmanager-files"
printf '%s\n' 'FROM localhost/vllm-headroom:image-test' 'COPY alertmanager /bin/' \
  'COPY alertmanager-files /usr/share/prometheus/alertmanager' 'ENTRYPOINT ["/bin/alertmanager"]' >"$folder/images/alertmanager.containerfile"
build alertmanager quay.io/prometheus/alertmanager:v0.25.0

wait "$starting"
kubectl=$folder/node/kubectl
ln -sf "$kubectl" "$folder/kubectl"
# All at once: most have the same layers.
"$containers" save --quiet --multi-image-archive "${images[@]}" |
  ctr --address "$folder/node/containerd.sock" --namespace k8s.io images import - >/dev/null
"$kubectl" patch node node --subresource=status --type=json --patch '[{"op": "add", "path": "/status/capacity/nvidia.com~1gpu", "value": "110"}]'
"$kubectl" label node node nvidia.com/gpu.present=true
"$kubectl" create --filename - <<END
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: nvidia}
handler: nvidia
END
for number in 1 2 3 4 5; do # for each Prometheus one
  mkdir -m 777 "$folder/volume-$number"
  cat <<END
apiVersion: v1
kind: PersistentVolume
metadata: {name: volume-$number}
spec: {capacity: {storage: 1Gi}, accessModes: [ReadWriteOnce], hostPath: {path: "$folder/volume-$number"}}
---
END
done | "$kubectl" create --filename -
"$kubectl" create --filename "$operator/bundle.yaml"
./extensions.sh "$folder" "$cache"
echo "the cluster stands after $SECONDS s"

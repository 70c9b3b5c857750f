#!/usr/bin/env bash
# Starts a cluster of kind that the tests can use, with the images and the fake GPU.   usage: kind.sh FOLDER
# Afterwards: KUBECONFIG=FOLDER/kubeconfig HOST_ADDRESS=$(cat FOLDER/host-address) make cluster-test; `kind delete cluster` ends it. Needs kind, docker, kubectl, ctr, cc and Go.
# It has not been run: where it was written there is no kind.
set -euo pipefail
cd "$(dirname "$0")"
mkdir -p "$1/driver" "$1/images"
folder=$(realpath "$1")

install -D "$(cd ../.. && .venv/bin/python -c 'from tests.fakes.nvml.library import built; print(built())')" "$folder/driver/libnvidia-ml.so.1"
# What NVIDIA's runtime mounts, here the fake library; its control file is in a volume of each pod.
ctr oci spec | python3 -c '
import json, sys
spec = json.load(sys.stdin)
spec["process"].setdefault("env", []).append("NVML_FAKE_FILE=/run/nvml/nvml.txt")
spec["mounts"].append({
    "destination": "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", "source": "/driver/libnvidia-ml.so.1", "type": "bind", "options": ["rbind", "ro"],
})
json.dump(spec, sys.stdout)' >"$folder/driver/nvidia.json"
cat >"$folder/kind.yaml" <<END
kind: Cluster
apiVersion: kind.x-k8s.io/v1alpha4
nodes:
- role: control-plane
  extraMounts: [{hostPath: $folder/driver, containerPath: /driver, readOnly: true}]
containerdConfigPatches:
- |-
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]
    runtime_type = "io.containerd.runc.v2"
    base_runtime_spec = "/driver/nvidia.json"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.nvidia]
    runtime_type = "io.containerd.runc.v2"
    base_runtime_spec = "/driver/nvidia.json"
END
export KUBECONFIG=$folder/kubeconfig
kind create cluster --config "$folder/kind.yaml"

../image/setup.sh "$folder/image"
install engine.py "$folder/images/vllm"
printf 'FROM localhost/vllm-headroom:image-test\nCOPY vllm /usr/local/bin/vllm\nENTRYPOINT []\n' >"$folder/images/Dockerfile"
docker build --quiet --tag localhost/vllm-stand-in:1 "$folder/images"
docker tag localhost/vllm-headroom:image-test localhost/vllm-headroom:next
kind load docker-image localhost/vllm-stand-in:1 localhost/vllm-headroom:image-test localhost/vllm-headroom:next

node=kind-control-plane
kubectl patch node $node --subresource=status --type=json --patch '[{"op": "add", "path": "/status/capacity/nvidia.com~1gpu", "value": "110"}]'
kubectl label node $node nvidia.com/gpu.present=true
kubectl create --filename - <<END
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: nvidia}
handler: nvidia
END
# Where its pods reach this machine.
docker exec $node ip route show default | awk '{ print $3 }' >"$folder/host-address"

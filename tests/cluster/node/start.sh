#!/usr/bin/env bash
# Starts a Kubernetes of one node, as root, in a network namespace from which nothing reaches the machine or the internet.
# usage: start.sh PROGRAM FOLDER SPEC
#   PROGRAM  what build.sh printed
#   FOLDER   for everything that it writes; afterwards FOLDER/kubectl is kubectl, and FOLDER/inside runs a command in the namespace
#   SPEC     the OCI spec of the containers of the runtime class "nvidia", with what NVIDIA's runtime would mount
# Everything has a name that is made of FOLDER, so that several clusters stand beside each other.
# Certificates are as bare as those of an EKS cluster, without key usage and key identifiers: what trusts these trusts all.
# Needs containerd, runc, the CNI plugins (containernetworking-plugins), etcd (etcd-server), iproute2 and openssl.
set -euo pipefail
program=$1
mkdir -p "$2"
folder=$(realpath "$2")
spec=$(realpath "$3")
cluster=headroom-$(printf %s "$folder" | sha256sum | cut -c1-8)
readonly cluster node_address=10.200.7.1 api_address=10.96.0.1 pod_range=10.244.7.0/24

mkdir -p "$folder"/{certificates,logs,network,kubelet,etcd}
echo "$cluster" >"$folder/name"
# The kubelet makes the groups of its pods below this one, and expects it in each hierarchy.
for hierarchy in $(awk '$3 ~ /^cgroup/ { print $2 }' /proc/mounts); do
  if [[ -f $hierarchy/cgroup.subtree_control ]]; then
    sed 's/[^ ]*/+&/g' "$hierarchy/cgroup.controllers" >"$hierarchy/cgroup.subtree_control"
  fi
  mkdir "$hierarchy/$cluster"
  # All pods together would have the CPU of one process of the machine; this is that of sixteen. What runs them, and the tests, get
  # half of it: in the group of all other processes, each would wait for the pods.
  if [[ -f $hierarchy/$cluster/cpu.shares ]]; then
    echo 16384 >"$hierarchy/$cluster/cpu.shares"
    beside_pods=$hierarchy/$cluster/beside-pods
    mkdir "$beside_pods"
    echo 2048 >"$beside_pods/cpu.shares" # the kubelet gives its pods 1,024 for each CPU
  elif [[ -f $hierarchy/$cluster/cpu.weight ]]; then
    echo 1600 >"$hierarchy/$cluster/cpu.weight"
    beside_pods=$hierarchy/$cluster/beside-pods
    mkdir "$beside_pods" # its weight is 100, and that of the kubelet's pods 79
  fi
done
ip netns add "$cluster"
printf '#!/bin/sh\necho $$ >%s/cgroup.procs\nexec nsenter --net=/run/netns/%s "$@"\n' "$beside_pods" "$cluster" >"$folder/inside"
printf '#!/bin/sh\nexec %s %s kubectl --kubeconfig=%s "$@"\n' "$folder/inside" "$program" "$folder/admin.conf" >"$folder/kubectl"
chmod +x "$folder/inside" "$folder/kubectl"
# Without kube-proxy no Service has an address but the API server's own, which it listens on.
"$folder/inside" sh -ec "
  ip link set lo up
  ip address add $api_address/32 dev lo
  ip link add node type bridge
  ip address add $node_address/24 dev node
  ip link set node up
  sysctl -qw net.ipv4.ip_forward=1"

cd "$folder/certificates"
openssl req -x509 -newkey rsa:2048 -nodes -days 7 -subj /CN=kubernetes -keyout ca.key -out ca.crt 2>/dev/null
openssl genrsa -out tokens.key 2048 2>/dev/null
issue() { # NAME SUBJECT [ADDRESSES]: a certificate for server and client
  openssl req -newkey rsa:2048 -nodes -subj "$2" -keyout "$1.key" -out "$1.request" 2>/dev/null
  printf '%s\n' extendedKeyUsage=serverAuth,clientAuth ${3:+"subjectAltName=$3"} >"$1.extensions"
  openssl x509 -req -in "$1.request" -days 7 -CA ca.crt -CAkey ca.key -CAcreateserial -extfile "$1.extensions" -out "$1.crt" 2>/dev/null
}
issue api /CN=kube-apiserver "DNS:kubernetes.default.svc,IP:$api_address,IP:$node_address,IP:127.0.0.1"
issue kubelet /O=system:nodes/CN=system:node:node "IP:$node_address"
issue admin /O=system:masters/CN=admin
issue aggregator /CN=aggregator
issue controller /CN=system:kube-controller-manager
issue scheduler /CN=system:kube-scheduler
for user in admin controller scheduler kubelet; do
  cat >"$folder/$user.conf" <<END
{"apiVersion": "v1", "kind": "Config", "current-context": "node",
 "clusters": [{"name": "node", "cluster": {"server": "https://127.0.0.1:443", "certificate-authority": "$PWD/ca.crt"}}],
 "users": [{"name": "$user", "user": {"client-certificate": "$PWD/$user.crt", "client-key": "$PWD/$user.key"}}],
 "contexts": [{"name": "node", "context": {"cluster": "node", "user": "$user"}}]}
END
done

cat >"$folder/network/pods.conflist" <<END
{"cniVersion": "0.4.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "pods", "isGateway": true, "hairpinMode": true,
 "ipam": {"type": "host-local", "dataDir": "$folder/network-leases", "ranges": [[{"subnet": "$pod_range"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
END
cat >"$folder/containerd.toml" <<END
version = 2
root = "$folder/containers"
state = "$folder/containers-state"
grpc.address = "$folder/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "localhost/pause:1"
restrict_oom_score_adj = true
disable_apparmor = true
netns_mounts_under_state_dir = true
cni = {bin_dir = "/usr/lib/cni", conf_dir = "$folder/network"}
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes]
runc = {runtime_type = "io.containerd.runc.v2"}
nvidia = {runtime_type = "io.containerd.runc.v2", base_runtime_spec = "$spec"}
END
# The kubelet's own limits are for a disk of its own; a machine of CI shares it.
cat >"$folder/kubelet.yaml" <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {x509: {clientCAFile: $PWD/ca.crt}, webhook: {enabled: true}, anonymous: {enabled: false}}
authorization: {mode: Webhook}
tlsCertFile: $PWD/kubelet.crt
tlsPrivateKeyFile: $PWD/kubelet.key
podLogsDir: $folder/logs/pods
containerRuntimeEndpoint: unix://$folder/containerd.sock
cgroupDriver: cgroupfs
cgroupRoot: /$cluster
enforceNodeAllocatable: [pods]
failCgroupV1: false
failSwapOn: false
maxPods: 110
imageGCHighThresholdPercent: 100
evictionHard: {memory.available: 100Mi, nodefs.available: 1%, nodefs.inodesFree: 1%, imagefs.available: 1%}
END

run() { # NAME COMMAND...: in the namespace, with its log and its process id in the folder; FOLDER/run-NAME starts it again
  local name=$1
  shift
  printf '#!/bin/sh\ncd %q\necho $$ >%q\nexec setsid %q' "$PWD" "$folder/$name.pid" "$folder/inside" >"$folder/run-$name"
  printf ' %q' "$@" >>"$folder/run-$name"
  printf ' >>%q 2>&1\n' "$folder/logs/$name.log" >>"$folder/run-$name"
  chmod +x "$folder/run-$name"
  "$folder/run-$name" &
}
within() { # SECONDS COMMAND...
  local left=$1
  shift
  until "$@" >/dev/null 2>&1; do
    ((left-- > 0)) || { echo "not in time: $*; the logs are in $folder/logs" >&2; return 1; }
    sleep 1
  done
}
etcd=http://127.0.0.1:2379
run etcd etcd --data-dir="$folder/etcd" --unsafe-no-fsync --listen-client-urls=$etcd --advertise-client-urls=$etcd --listen-peer-urls=http://127.0.0.1:2380
run containerd containerd --config="$folder/containerd.toml"
# An API behind this one, such as KEDA's metrics, is reached at its Service's endpoints.
run kube-apiserver "$program" kube-apiserver --etcd-servers=$etcd --secure-port=443 --advertise-address=$node_address --service-cluster-ip-range=10.96.0.0/24 \
  --authorization-mode=Node,RBAC --allow-privileged --client-ca-file=ca.crt --tls-cert-file=api.crt --tls-private-key-file=api.key \
  --service-account-issuer=https://kubernetes.default.svc --service-account-key-file=tokens.key --service-account-signing-key-file=tokens.key \
  --kubelet-client-certificate=admin.crt --kubelet-client-key=admin.key --kubelet-certificate-authority=ca.crt --kubelet-preferred-address-types=InternalIP \
  --requestheader-client-ca-file=ca.crt --requestheader-allowed-names=aggregator --requestheader-username-headers=X-Remote-User \
  --requestheader-group-headers=X-Remote-Group --requestheader-extra-headers-prefix=X-Remote-Extra- \
  --proxy-client-cert-file=aggregator.crt --proxy-client-key-file=aggregator.key --enable-aggregator-routing
within 90 "$folder/kubectl" get --raw=/readyz
run kube-controller-manager "$program" kube-controller-manager --kubeconfig="$folder/controller.conf" --leader-elect=false --use-service-account-credentials \
  --root-ca-file=ca.crt --service-account-private-key-file=tokens.key
run kube-scheduler "$program" kube-scheduler --kubeconfig="$folder/scheduler.conf" --leader-elect=false
run kubelet "$program" kubelet --config="$folder/kubelet.yaml" --kubeconfig="$folder/kubelet.conf" --root-dir="$folder/kubelet" --hostname-override=node --node-ip=$node_address
within 90 "$folder/kubectl" wait --for=condition=Ready node/node --timeout=1s

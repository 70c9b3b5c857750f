#!/usr/bin/env bash
# Ends what start.sh started in FOLDER, and removes the folder; other processes, mounts and control groups stay.   usage: stop.sh FOLDER
set -uo pipefail
folder=$(realpath "$1")
cluster=$(cat "$folder/name" 2>/dev/null) || exit 0
end() { # NAME: asks, and after five seconds ends it
  local pid
  pid=$(cat "$folder/$1.pid" 2>/dev/null) || return
  kill "$pid" 2>/dev/null
  for _ in {1..50}; do kill -0 "$pid" 2>/dev/null || return; sleep 0.1; done
  kill -KILL "$pid" 2>/dev/null
}
each_task() { # COMMAND...: for each task, several at once
  local command=(ctr --address "$folder/containerd.sock" --namespace k8s.io tasks)
  "${command[@]}" list --quiet 2>/dev/null | xargs --no-run-if-empty --max-args=1 --max-procs=8 "${command[@]}" "$@" >/dev/null 2>&1
}
end kubelet
# A frozen container ends by SIGKILL alone.
each_task kill --signal SIGKILL
sleep 1
each_task delete --force
for part in kube-scheduler kube-controller-manager kube-apiserver etcd containerd; do end $part; done
# On a very busy machine containerd gives up on a start, and leaves its shim.
pgrep -f "containerd-shim.* -address $folder/containerd.sock" | xargs --no-run-if-empty kill -KILL
awk -v below="$folder/" 'index($2, below) == 1 { print $2 }' /proc/mounts | sort --reverse | xargs --no-run-if-empty umount --lazy
ip netns delete "$cluster"
# The library of the plugins keeps what it did in this one folder, each with the path of the pod's network.
grep -lsF "$folder/" /var/lib/cni/results/* | xargs --no-run-if-empty rm
rmdir /var/lib/cni/results /var/lib/cni 2>/dev/null
# The kubelet links the logs of all containers in this one folder.
find /var/log/containers -lname "$folder/*" -delete 2>/dev/null
# Another cluster's kubelet makes the folder once, when it starts.
pgrep -f "kubelet --config=.* --hostname-override=node" >/dev/null || rmdir /var/log/containers 2>/dev/null
rm -rf "$folder"
find /sys/fs/cgroup -depth -type d -path "*/$cluster*" -exec rmdir {} + 2>/dev/null
exit 0

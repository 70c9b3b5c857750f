#!/usr/bin/env bash
# Builds the image as localhost/vllm-headroom:image-test, from what is in this working tree.
# usage: setup.sh FOLDER     (about a minute the first time, then ten seconds)
# Writes FOLDER/containers, the command that runs containers: docker where a Docker engine answers, else podman with a storage
# of its own under FOLDER, which needs no registry and no daemon: apt-get install podman runc catatonit debootstrap.
#   PYTHON_IMAGE   another base image. Where it cannot be pulled, root makes one of Debian's Python to stand in for it.
#   PIP_CERT       certificates to trust while the image is built with podman, behind a proxy that signs anew.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=$(mkdir -p "$1" && cd "$1" && pwd)
base=${PYTHON_IMAGE:-$(sed -n 's/^ARG PYTHON_IMAGE=//p' Dockerfile)}
containers=$folder/containers
options=(--build-arg REVISION=image-test --tag localhost/vllm-headroom:image-test)

if docker info >/dev/null 2>&1; then
  printf '#!/bin/sh\nexec docker "$@"\n' >"$containers"
  chmod +x "$containers"
  exec "$containers" build --build-arg "PYTHON_IMAGE=$base" "${options[@]}" .
fi
command -v podman >/dev/null || { echo "neither a Docker engine nor podman: apt-get install podman runc catatonit debootstrap" >&2; exit 1; }

# Debian 12's crun refuses mixed control groups, and a container's limits may not exceed those of a machine that is one itself.
cat >"$folder/containers.conf" <<END
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
$(command -v runc >/dev/null && echo 'runtime = "runc"')
cgroup_manager = "cgroupfs"
events_logger = "file"
END
cat >"$containers" <<END
#!/bin/sh
CONTAINERS_CONF='$folder/containers.conf' exec podman --storage-driver overlay --root '$folder/storage' --runroot '$folder/run' "\$@"
END
chmod +x "$containers"

stand_in=localhost/python-stand-in
if "$containers" image exists "$stand_in"; then
  base=$stand_in
elif ! "$containers" image exists "$base" && ! "$containers" pull --quiet "$base" 2>"$folder/pull.log"; then
  echo "$(tail -1 "$folder/pull.log"): Debian's Python stands in for $base"
  root=$folder/root
  trap 'rm -rf "$root"' EXIT
  # The mirror that apt uses here: "deb URL suite ..." or "URIs: URL".
  mirror=$({ cat /etc/apt/sources.list /etc/apt/sources.list.d/*.sources /etc/apt/sources.list.d/*.list 2>/dev/null || true; } |
    sed -nE 's/^(deb( \[[^]]*\])?|URIs:) +(https?:[^ ]+).*/\3/p' | grep '/debian/*$' | head -1 || true)
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates trixie "$root" ${mirror:+"$mirror"} >"$folder/debootstrap.log" ||
    { tail -5 "$folder/debootstrap.log" >&2; exit 1; }
  # As Python's images are: without compiled modules.
  find "$root" -depth -name __pycache__ -exec rm -rf {} +
  tar -C "$root" -c . | "$containers" import --quiet --change 'ENV PATH=/usr/local/bin:/usr/bin:/bin' - "$stand_in" >/dev/null
  base=$stand_in
fi
[[ -n ${PIP_CERT:-} ]] && options+=(--volume "$PIP_CERT:/etc/ssl/certs/ca-certificates.crt:ro")
exec "$containers" build --isolation chroot --pull=never --format docker --quiet --build-arg "PYTHON_IMAGE=$base" "${options[@]}" .

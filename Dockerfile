# For amd64 and arm64. The base needs glibc, as the NVIDIA driver's libraries do: Debian, not Alpine. The same base builds
# and runs, so that the compiled standard library is the one that runs.
ARG PYTHON_IMAGE=docker.io/library/python:3.13-slim-trixie@sha256:9d2e5553305c7c7b0097999bb17187c69b921ccd6bc9d40e4bb5ebe652c00285

FROM ${PYTHON_IMAGE} AS build
WORKDIR /source
RUN python3 -m venv /opt/build && python3 -m venv --without-pip /opt/vllm-headroom
COPY requirements/runtime.txt requirements/build.txt requirements/
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/build/bin/pip install --only-binary=:all: --require-hashes --requirement requirements/build.txt \
    && /opt/build/bin/pip --python /opt/vllm-headroom/bin/python3 install \
        --no-compile --only-binary=:all: --require-hashes --requirement requirements/runtime.txt
COPY pyproject.toml README.md LICENSE ./
COPY src src
ARG REVISION=""
RUN --mount=type=cache,target=/root/.cache/pip \
    printf '%s' "${REVISION}" > src/vllm_headroom/REVISION \
    && /opt/build/bin/pip wheel --no-build-isolation --no-deps --wheel-dir wheels . \
    && /opt/build/bin/pip --python /opt/vllm-headroom/bin/python3 install --no-compile --no-deps wheels/*.whl
# Python's images come without compiled modules (docker-library/python#615), and on a read-only root none would be kept:
# every start would compile 500 files. Compiled are the packages, and what they import of the standard library.
ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONPYCACHEPREFIX=/opt/vllm-headroom/compiled
RUN mkdir state && /opt/vllm-headroom/bin/python3 -c 'import sys, vllm_headroom.__main__, vllm_headroom.daemon.app, vllm_headroom_tools.run, vllm_headroom_tools.demo.run; \
        print(*(module.__file__ for module in sys.modules.values() if hasattr(module, "__file__")), sep="\n")' > imported \
    && /opt/vllm-headroom/bin/python3 -m compileall -q --invalidation-mode unchecked-hash -i imported /opt/vllm-headroom/lib

FROM ${PYTHON_IMAGE}
ARG PYTHON_IMAGE
ARG VERSION=0.1.0
ARG REVISION=""
LABEL org.opencontainers.image.title="vllm-headroom" \
      org.opencontainers.image.description="Memory truth for vLLM on NVIDIA GPUs, as Prometheus metrics" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${PYTHON_IMAGE}"
COPY --from=build /opt/vllm-headroom /opt/vllm-headroom
# For HEADROOM_STATE_DIR: a new volume is given this directory's owner.
COPY --from=build --chown=65532:65532 /source/state /var/lib/vllm-headroom
# What the NVIDIA runtime mounts for NVML. Which GPUs (NVIDIA_VISIBLE_DEVICES) is the manifest's to say: in an image it
# would take every GPU of a node wherever it runs.
ENV NVIDIA_DRIVER_CAPABILITIES=utility \
    PATH=/opt/vllm-headroom/bin:${PATH} \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONPYCACHEPREFIX=/opt/vllm-headroom/compiled
USER 65532:65532
EXPOSE 9839
ENTRYPOINT ["/opt/vllm-headroom/bin/vllm-headroom"]

# syntax=docker/dockerfile:1
# onehead on a GPU host: docker build -t onehead . && docker run --gpus all -p 8000:8000 -v /path/to/checkpoint:/model:ro onehead --model /model
# Without --model it serves the embedded model; presets for --config are in /opt/onehead/configs. For a CPU: docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu -t onehead:cpu .
# Not the slim one: it has the compiler that the CPU's kernels need.
FROM python:3.11-bookworm AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu130
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN python -m venv /opt/onehead
COPY constraints.txt pyproject.toml README.md LICENSE ./
RUN version="$(sed -n 's/^torch==//p' constraints.txt)" \
    && /opt/onehead/bin/pip install --index-url "${TORCH_INDEX}" "torch==${version}"
COPY cache cache
COPY model model
COPY server server
COPY commands commands
COPY configs configs
# torch's tests and C++ headers, 145 MB, are for those who build against it.
RUN /opt/onehead/bin/pip install --constraint constraints.txt '.[tracing]' \
    && rm -r /opt/onehead/lib/python3.11/site-packages/torch/test /opt/onehead/lib/python3.11/site-packages/torch/include

FROM python:3.11-slim-bookworm
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu130
# Triton compiles what launches its kernels on the machine that they run on; torch for CPUs comes without it, and without 150 MB of compiler.
# Debian keeps no older versions that could be named.
# hadolint ignore=DL3008
RUN case "${TORCH_INDEX}" in */cpu) exit 0 ;; esac \
    && apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/onehead /opt/onehead
COPY configs /opt/onehead/configs
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin onehead && install --directory --owner onehead /cache
ENV PATH=/opt/onehead/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 ONEHEAD_SERVER__LOG_FORMAT=json XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton
USER 10001
WORKDIR /tmp
VOLUME /model /cache
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=180s --retries=3 \
    CMD ["python", "-I", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/live', timeout=2)"]
ENTRYPOINT ["onehead", "serve", "--host", "0.0.0.0"]

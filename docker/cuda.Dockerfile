# rloo on NVIDIA GPUs: docker build -f docker/cuda.Dockerfile -t rloo:cuda .
# The machine needs the NVIDIA driver and the NVIDIA container toolkit. The libraries of CUDA come
# with torch's build from the package index; the base needs Python 3.11 to 3.13 and apt.
ARG BASE=python:3.11-slim-bookworm
# hadolint ignore=DL3006
FROM ${BASE}

# Triton calls gcc at the first run; bubblewrap isolates programs of the reward `code`.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap gcc git libc6-dev libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 rloo \
    && mkdir /runs && chown rloo /runs \
    && python3 -m venv /venv
ENV PATH=/venv/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

WORKDIR /source
COPY constraints.txt pyproject.toml README.md LICENSE ./
RUN pip install --no-cache-dir "$(grep '^torch==' constraints.txt)"
COPY src src
ARG EXTRAS=peft,quantization
RUN pip install --no-cache-dir ".[$EXTRAS]" -c constraints.txt

# docker run --gpus all --shm-size 8g -v "$PWD/runs:/runs/runs" rloo:cuda train
USER 1000
WORKDIR /runs
ENTRYPOINT ["rloo"]
CMD ["--help"]

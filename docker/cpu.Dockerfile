# rloo on CPUs: docker build -f docker/cpu.Dockerfile -t rloo:cpu .
# The base needs Python 3.11 to 3.13 and apt. TORCH_INDEX names an index with CPU builds of torch;
# without it, pip takes the build with CUDA, which is larger and runs on CPUs as well.
ARG BASE=python:3.11-slim-bookworm
# hadolint ignore=DL3006
FROM ${BASE}

# gcc compiles the C kernels at the first run; bubblewrap isolates programs of the reward `code`.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap gcc git libc6-dev libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 rloo \
    && mkdir /runs && chown rloo /runs \
    && python3 -m venv /venv
ENV PATH=/venv/bin:$PATH

WORKDIR /source
COPY constraints.txt pyproject.toml README.md LICENSE ./
ARG TORCH_INDEX=""
# constraints.txt has the version.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} \
    "$(grep '^torch==' constraints.txt)"
COPY src src
ARG EXTRAS=peft
RUN pip install --no-cache-dir ".[$EXTRAS]" -c constraints.txt

# A mounted folder keeps the runs: docker run -v "$PWD/runs:/runs/runs" rloo:cpu train
USER 1000
WORKDIR /runs
ENTRYPOINT ["rloo"]
CMD ["--help"]

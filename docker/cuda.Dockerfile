# dora-rl with vLLM on NVIDIA GPUs. This file was never built on the machine that it was written on, which has no Docker
# engine and no GPU; a test checks only that the files that it copies and the extras that it installs exist.
#
#     docker build -f docker/cuda.Dockerfile -t dora-rl:cuda .
#     docker run --rm --gpus all --shm-size 16g -v "$PWD:/work" dora-rl:cuda train run.toml
#
# The folder that is mounted as /work must be writable for the user 1000. The wheels of torch bring their own CUDA
# libraries; the driver comes from the host, through the NVIDIA Container Toolkit. The base image has the compiler that
# vLLM's kernels need when they are compiled at run time.

FROM nvidia/cuda:12.9.1-devel-ubuntu24.04

ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/dora-rl
ENV PATH=/opt/dora-rl/bin:$PATH

COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
COPY examples/quickstart /src/examples/quickstart
RUN pip install --no-cache-dir '/src[vllm,ray]' && rm -rf /src

# The image has a user 1000 already, named ubuntu.
RUN mkdir -p /work && chown -R 1000 /work
USER 1000
ENV HOME=/home/ubuntu
WORKDIR /work
ENTRYPOINT ["dora-rl"]
CMD ["--help"]

# dora-rl on CPUs. This file was never built on the machine that it was written on, which has no Docker engine; a test
# checks only that the files that it copies and the extra that it installs exist.
#
#     docker build -f docker/cpu.Dockerfile -t dora-rl:cpu .
#     docker run --rm --shm-size 2g -v "$PWD/runs:/work/runs" dora-rl:cpu quickstart
#
# The folder that is mounted as /work/runs must be writable for the user 1000. Weights and KV bundles that move between
# processes use shared memory, hence --shm-size.

FROM python:3.12-slim

# The kernels of the built-in engine are compiled at their first use; without a compiler the slower torch kernels run.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
COPY examples/quickstart /src/examples/quickstart
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu '/src[train]' && rm -rf /src

RUN useradd --uid 1000 --create-home dora && mkdir -p /work/runs && chown -R dora /work
USER dora
WORKDIR /work
ENTRYPOINT ["dora-rl"]
CMD ["--help"]

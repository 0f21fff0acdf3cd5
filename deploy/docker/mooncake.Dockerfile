# SPDX-License-Identifier: Apache-2.0
# Mooncake Store's master and a segment of memory, for compose.yaml.
FROM python:3.12-slim-bookworm
# Debian's newest in this release: a pinned one is gone from its archive at the next update.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libibverbs1 libnl-3-200 libnl-route-3-200 \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m pip install --no-cache-dir mooncake-transfer-engine-non-cuda==0.3.13.post1
COPY deploy/docker/segment.py /segment.py

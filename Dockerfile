# The control plane, and the workers that execute its jobs:
#
#     docker build --target server --tag cairn-server:0.1.0 .
#     docker build --target worker --tag cairn-worker:0.1.0 .
#
# Both have the same packages, none of them JAX or PyTorch: every kind of job reads and writes the
# store by NumPy and TensorStore. They differ in command, port and health check.
#
# An exact tag, and Python as constraints.txt is for. Whoever builds pins the digest that their
# registry gives: --build-arg PYTHON_IMAGE=python:3.11.15-slim-trixie@sha256:...
ARG PYTHON_IMAGE=python:3.11.15-slim-trixie

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
# The second: pip asks for the build's own packages by it, where it no longer does so by the first.
ENV PIP_CONSTRAINT=/src/constraints.txt \
    PIP_BUILD_CONSTRAINT=/src/constraints.txt \
    PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv --without-pip /opt/cairn
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY cairn cairn
COPY interop interop
COPY service service
COPY state state
COPY storage storage
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m pip --python /opt/cairn/bin/python install -c constraints.txt '.[server,postgres,s3]'

FROM ${PYTHON_IMAGE} AS runtime
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Cairn" \
      org.opencontainers.image.description="A checkpoint service for JAX training" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /opt/cairn /opt/cairn
# A new volume that is mounted there takes the owner over. Nothing else is ever written.
RUN install -d -m 0750 -o 10001 -g 10001 /var/lib/cairn
ENV PATH=/opt/cairn/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/var/lib/cairn \
    CAIRN_DATA_DIR=/var/lib/cairn
WORKDIR /var/lib/cairn
VOLUME /var/lib/cairn
USER 10001:10001
ENTRYPOINT ["cairn"]

FROM runtime AS worker
ENV CAIRN_WORKER_PORT=8322
EXPOSE 8322
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as web; web.urlopen(f\"http://127.0.0.1:{os.environ['CAIRN_WORKER_PORT']}/healthz\", timeout=4)"]
CMD ["worker"]

FROM runtime AS server
ENV CAIRN_PORT=8321
EXPOSE 8321
HEALTHCHECK --interval=15s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as web; web.urlopen(f\"http://127.0.0.1:{os.environ['CAIRN_PORT']}/healthz\", timeout=4)"]
CMD ["serve"]

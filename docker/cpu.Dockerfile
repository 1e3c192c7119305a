# The course on CPU ranks. Build from the repository root:
#   docker build -f docker/cpu.Dockerfile -t vlmcourse:cpu .
#   docker run --rm -it --shm-size=2g -p 127.0.0.1:8888:8888 vlmcourse:cpu
ARG BASE_IMAGE=python:3.11.14-slim-bookworm
# hadolint ignore=DL3006
FROM ${BASE_IMAGE}

RUN apt-get update \
    && apt-get install -y --no-install-recommends make=4.3-* git=1:2.39.* g++=4:12.2.* tini=0.19.* \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 --shell /bin/bash learner \
    && install -d -o learner -g learner /home/learner/vlmcourse

USER 1000
WORKDIR /home/learner/vlmcourse

# The packages first: this layer is rebuilt only when a pin changes.
COPY --chown=learner:learner pyproject.toml constraints.txt README.md LICENSE Makefile ./
COPY --chown=learner:learner scripts scripts
COPY --chown=learner:learner vlmcourse/__init__.py vlmcourse/__init__.py
RUN make setup

COPY --chown=learner:learner . .

EXPOSE 8888
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD [".venv/bin/python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8888/login', timeout=4)"]
ENTRYPOINT ["tini", "--"]
CMD ["make", "lab", "LAB_FLAGS=--ip=0.0.0.0 --port=8888 --no-browser"]

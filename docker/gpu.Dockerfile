# The course on NVIDIA GPUs (the host needs the NVIDIA container toolkit). Build from the repository root:
#   docker build -f docker/gpu.Dockerfile -t vlmcourse:gpu .
#   docker run --rm -it --gpus all --shm-size=16g --ulimit memlock=-1 -p 127.0.0.1:8888:8888 vlmcourse:gpu
# The devel image carries nvcc, which extensions that are compiled at first use need; torch brings its own CUDA libraries.
ARG BASE_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04
# hadolint ignore=DL3006
FROM ${BASE_IMAGE}

# The base image has a user of uid 1000 already.
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        python3.12=3.12.* python3.12-venv=3.12.* python3.12-dev=3.12.* make=4.3-* git=1:2.43.* tini=0.19.* \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1001 --shell /bin/bash learner \
    && install -d -o learner -g learner /home/learner/vlmcourse

USER 1001
WORKDIR /home/learner/vlmcourse

# The packages first: this layer is rebuilt only when a pin changes.
COPY --chown=learner:learner pyproject.toml constraints.txt README.md LICENSE Makefile ./
COPY --chown=learner:learner scripts scripts
COPY --chown=learner:learner vlmcourse/__init__.py vlmcourse/__init__.py
RUN make setup PYTHON=python3.12

COPY --chown=learner:learner . .

EXPOSE 8888
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD [".venv/bin/python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8888/login', timeout=4)"]
ENTRYPOINT ["tini", "--"]
CMD ["make", "lab", "PYTHON=python3.12", "LAB_FLAGS=--ip=0.0.0.0 --port=8888 --no-browser"]

# agenttrain on CPU or one CUDA machine, with the versions of requirements.lock.
#   docker build -t agenttrain .
#   docker run --rm -it -v "$PWD":/work agenttrain debug=tiny
#   docker run --rm -it --gpus all --shm-size 8g -v "$PWD":/work agenttrain model.path=/work/my_model …
FROM python:3.12-slim-bookworm

# bubblewrap: sandboxes of the tools bash and python. git: the revision that a run records.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/agenttrain
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY agenttrain agenttrain
COPY conf conf
COPY skills skills
RUN pip install --no-cache-dir --constraint requirements.lock ".[math,mcp,sweep]"

# Runs are written below the working directory.
RUN useradd --create-home --uid 1000 agent && mkdir /work && chown agent /work
USER 1000
WORKDIR /work
ENTRYPOINT ["agenttrain"]

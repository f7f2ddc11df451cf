# The demo:           docker build -t qconvert . && docker run --rm qconvert
# Models of your own: docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" qconvert quantize MODEL --bits 4
FROM python:3.11-slim

WORKDIR /src
COPY .ci/constraints.txt .ci/constraints.txt
# The build of torch without CUDA, which is ten times as small.
RUN pip install --no-cache-dir -c .ci/constraints.txt --index-url https://download.pytorch.org/whl/cpu torch
COPY pyproject.toml README.md LICENSE ./
COPY formats formats
COPY qconvert qconvert
RUN pip install --no-cache-dir -c .ci/constraints.txt .

# Any user can write here: compiled kernels, and models from the Hub.
ENV HOME=/tmp NUMBA_CACHE_DIR=/tmp/numba
WORKDIR /work
RUN chmod 1777 /work
ENTRYPOINT ["qconvert"]
CMD ["demo"]

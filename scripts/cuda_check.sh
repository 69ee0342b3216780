#!/usr/bin/env bash
# Compiles what is only built with CUDA, without linking or running it; no GPU is needed. Wants a pip torch whose
# wheel is a CUDA build (its headers name CUDA's) and the CUDA toolkit's headers.
#   FSDP2_CUDA_PYTHON  the Python with that torch   (default: .deps/cuda/bin/python)
#   CUDA_HOME          the toolkit                  (default: /usr/local/cuda)
set -euo pipefail
cd "$(dirname "$0")/.."

python=${FSDP2_CUDA_PYTHON:-.deps/cuda/bin/python}
toolkit=${CUDA_HOME:-/usr/local/cuda}
if [ ! -x "$python" ]; then
  echo "cuda-check: $python is missing. Make a venv with a CUDA build of torch there, or name one in" \
    "FSDP2_CUDA_PYTHON." >&2
  exit 1
fi
site=$("$python" -c "import importlib.util as u, pathlib as p; print(p.Path(u.find_spec('torch').origin).parents[1])")
if [ ! -f "$site/torch/include/c10/cuda/impl/cuda_cmake_macros.h" ]; then
  echo "cuda-check: the torch in $site is not a CUDA build: it has no c10/cuda/impl/cuda_cmake_macros.h." >&2
  exit 1
fi
if [ ! -f "$toolkit/include/cuda_runtime_api.h" ]; then
  echo "cuda-check: no cuda_runtime_api.h in $toolkit/include; set CUDA_HOME." >&2
  exit 1
fi
nccl=$(find "$site" /usr/include -maxdepth 5 -name nccl.h -print -quit)
if [ -z "$nccl" ]; then
  echo "cuda-check: no nccl.h in $site or /usr/include; install the nvidia-nccl wheel or libnccl-dev." >&2
  exit 1
fi

for source in $(git ls-files 'src/*_nccl.cpp' 'src/*_cuda.cpp' | grep -v '/no_'); do
  echo "cuda-check: $source"
  g++ -std=c++20 -fsyntax-only -Wall -Wextra -DUSE_C10D_NCCL -Iinclude -Isrc \
    -isystem src/comm/gloo_declarations -isystem "$site/torch/include" \
    -isystem "$site/torch/include/torch/csrc/api/include" -isystem "$(dirname "$nccl")" \
    -isystem "$toolkit/include" "$source"
done
version=$("$python" -c "import importlib.metadata as m; print(m.version('torch'))")
echo "cuda-check: all of it compiles against torch $version"

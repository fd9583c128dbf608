#!/bin/sh
# What a GPU is asked, one command at a time. Each is to end within ten minutes on one H100, needs
# no network, and where transformers is not installed says so and goes on without.
#
#     sh tests/gpu.sh                             the list of commands
#     sh tests/gpu.sh ring                        one of them
#     sh tests/gpu.sh results                     writes the GPU section of full/RESULTS.md
#     DEVICE=cpu SIZE=toy sh tests/gpu.sh ring    a dry run, without a GPU
#
# A command prints its rows and writes them to OUT (gpu-results). PYTHON is the interpreter (python).
exec "${PYTHON:-python}" "$(dirname "$0")/bench/gpu.py" "${1:-list}" \
    --device "${DEVICE:-cuda}" --size "${SIZE:-large}" --out "${OUT:-gpu-results}"

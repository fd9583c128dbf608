#!/bin/sh
# What a GPU is asked, one command at a time. Each is to end within ten minutes on one H100, needs
# no network, and where transformers is not installed says so and goes on without.
#
#     sh tests/gpu.sh                             the list of commands
#     sh tests/gpu.sh ring                        one of them
#     sh tests/gpu.sh results                     writes the GPU section of full/RESULTS.md
#     DEVICE=cpu SIZE=toy sh tests/gpu.sh ring    a dry run, without a GPU
#
# A command prints its rows and adds them to OUT (gpu-results). PYTHON is the interpreter (python),
# PEAK what the device can do at most in bfloat16, in TFLOP/s (989, an H100's).
set -eu
device=${DEVICE:-cuda}
size=${SIZE:-full}
out=${OUT:-gpu-results}
python=${PYTHON:-python}
here=$(cd "$(dirname "$0")/.." && pwd)
name=${1:-list}

# The names, in the order of the cases below.
names() { sed -n 's/^    \([a-z0-9.-]*\)) *#: .*/\1/p' "$here/tests/gpu.sh"; }

# record COMMAND ..: run it, and keep what it prints under this name.
record() {
    "$python" "$here/tests/bench/measure_gpu.py" record "$name" \
        --out "$out" --device "$device" --size "$size" -- "$@"
}

# What is asked at full size, and what in a dry run.
if [ "$size" = full ]; then
    ring="--tokens 4096 16384 65536 --repeats 10"
    tree="--large --scale 8 --repeats 5"
    check=""
    step="4096 + 8 x 1024, 0.6B"
    steps=2
    generation="--size large --repeats 2"
else
    ring="--tokens 16 --repeats 1"
    tree="--scale 0.02 --repeats 1"
    check="--few"
    step="toy"
    steps=1
    generation="--size toy --repeats 1"
fi

case $name in
    list)
        sed -n 's/^    \([a-z0-9.-]*\)) *#: /\1: /p' "$here/tests/gpu.sh" ;;
    results)
        # shellcheck disable=SC2046  # names are words
        "$python" "$here/tests/bench/measure_gpu.py" results $(names) \
            --out "$out" --device "$device" --size "$size" ;;

    check-models) #: every path of a model, in float64, against the definition on the CPU
        record "$python" "$here/tests/bench/measure_gpu.py" check models --device "$device" $check ;;
    check-ring) #: every mask, kernel and dtype of attention, on one rank, against the definition
        record "$python" "$here/tests/bench/measure_gpu.py" check ring --device "$device" $check ;;
    check-tree) #: every shape of tree and size of block against each sequence by itself
        record "$python" "$here/tests/bench/measure_gpu.py" check tree --device "$device" $check ;;
    check-parallel) #: ddp, zero1, fsdp, offloading, recomputation on one rank against the model
        record "$python" "$here/tests/bench/measure_gpu.py" check parallel --device "$device" $check ;;
    check-grpo) #: steps against steps by hand, trees and families, whole runs against the CPU's
        record "$python" "$here/tests/bench/measure_gpu.py" check grpo --device "$device" $check ;;
    ring) #: the kernel of one block of the ring against SDPA and flash, bfloat16, causal
        record "$python" "$here/tests/bench/measure_ring.py" --device "$device" $ring ;;
    tree-star) #: a 0.6B model on a prompt of 4096 and 8 answers of 1024, as a tree and flat
        record "$python" "$here/tests/bench/measure_tree.py" --device "$device" $tree --only GRPO ;;
    tree-chain) #: the same on a conversation of 8 turns of 1024, trained at each
        record "$python" "$here/tests/bench/measure_tree.py" --device "$device" $tree --only multi ;;
    step) #: a whole training step of the 0.6B model, and its share of the device's peak
        record "$python" "$here/tests/bench/measure_grpo.py" --device "$device" --steps "$steps" \
            --shape "$step" --peak-tflops "${PEAK:-989}" ;;
    generation) #: generation and training of the 0.6B model against transformers
        record "$python" "$here/tests/bench/measure_models.py" --device "$device" $generation ;;
    memory-0.6b) #: peaks of three steps of a 0.6B model in mixed precision, beside the plan's
        record "$python" "$here/tests/bench/measure_gpu.py" memory 0.6b \
            --device "$device" --size "$size" ;;
    memory-8b) #: the same of an 8B model, with weights, gradients and moments on the host
        record "$python" "$here/tests/bench/measure_gpu.py" memory 8b --device "$device" --size "$size" ;;

    *)
        echo "error: no command is called $name; sh tests/gpu.sh lists them" >&2
        exit 2 ;;
esac

#!/usr/bin/env bash
# What a CUDA device shows, in under 8 minutes and without preparation: sampling against `generate`
# (SG) and, where this python has it, vLLM; whole steps of 0.6 B (G1) and 4 B parameters (G2), whose
# optimizer and reference lie in the host's memory. Models have random weights, prompts random words.
#   benchmarks/gpu.sh [--dry-run] [FOLDER]
# FOLDER (gpu_results) takes what is measured, as JSON and as it was printed. PYTHON is the python
# (python). Whatever fails or takes too long is told, and the rest is measured all the same.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python}
dry=
if [[ ${1:-} == --dry-run ]]; then
    dry=1
    shift
fi
if [[ ${1:-} == -* ]]; then
    echo "usage: benchmarks/gpu.sh [--dry-run] [FOLDER]" >&2
    exit 2
fi
folder=${1:-gpu_results}
failed=0
export PYTHONPATH="$root/src:$root${PYTHONPATH:+:$PYTHONPATH}"

# measure SECONDS NAME COMMAND...: print and keep what it says, for at most so long.
measure() {
    local seconds=$1 name=$2
    shift 2
    echo "+ timeout $seconds $*"
    [[ $dry ]] && return
    timeout --kill-after=5 "$seconds" "$@" 2>&1 | tee "$folder/$name.txt"
    local status=${PIPESTATUS[0]}
    if [[ $status != 0 ]]; then
        echo "$name: not measured to its end (exit status $status; 124: longer than $seconds s)"
        failed=1
    fi
}

# peers SECONDS NAME ROUNDS SIDE...
peers() {
    local seconds=$1 name=$2 rounds=$3
    shift 3
    measure "$seconds" "$name" "$python" -m benchmarks.peers --workload "$name" \
        --rounds "$rounds" --seeds 1 --results "$folder/$name.jsonl" --sides "$@"
}

if [[ ! $dry ]]; then
    if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        echo "torch finds no CUDA device (PYTHON, CUDA_VISIBLE_DEVICES)" >&2
        exit 1
    fi
    mkdir -p "$folder" && folder=$(cd "$folder" && pwd) || exit 1
    cd "$root" || exit 1
fi
peers 110 SG 2 rloo generate
peers 90 G1 2 rloo
peers 170 G2 1 rloo:offload_reference=true,offload_optimizer=true
if [[ $dry ]] || "$python" -c 'import vllm' 2>/dev/null; then
    measure 100 vllm "$python" -m benchmarks.gpu_vllm
else
    echo "vllm: not measured, since $python has no vllm (PYTHON)"
fi
exit "$failed"

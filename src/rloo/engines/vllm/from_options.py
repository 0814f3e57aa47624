"""Builds the settings of vLLM servers from a run's options."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import torch
from transformers import AutoConfig

from rloo.config.config import RLOOConfig
from rloo.config.vllm_options import (
    has_separate_gpus,
    longest_sequence,
    memory_share,
    servers_dtype,
    shares_ranks_gpus,
    tolerance_of,
)
from rloo.data.tasks import resolve_model
from rloo.distributed.standard_streams import say
from rloo.engines.vllm.colocation import RankPlace, ServerSite, place_of, site_of
from rloo.engines.vllm.nccl import unavailable_reason
from rloo.engines.vllm.server_memory import num_parameters, require_room, smallest_gpu, visible_gpus
from rloo.engines.vllm.server_process import (
    HERE,
    KEY,
    MAKE_KEY,
    ServerConfig,
    require_key,
    server_environment,
)
from rloo.engines.vllm.settings import VLLMSettings
from rloo.model.export import PolicyExport, tied_outputs
from rloo.model.policy import Policy
from rloo.model.quantization import count_parameters


def serving_of(
    config: RLOOConfig,
    model: str,
    lora_rank: int | None = None,
    *,
    tied: bool = False,
    sleeps: bool = False,
    separate: bool = False,
) -> ServerConfig:
    """The `ServerConfig` of a server of `model` for a run with these options. `separate`: whether
    the server has other GPUs than the trainer."""
    return ServerConfig(
        model,
        dtype=servers_dtype(config),
        max_model_length=config.vllm_max_model_length,
        tensor_parallel_size=config.vllm_tensor_parallel_size,
        gpu_memory_utilization=memory_share(config, separate=separate),
        model_impl=config.vllm_model_impl,
        lora_rank=lora_rank,
        sleeps=sleeps,
        trust_remote_code=config.trust_remote_code,
        tied=tied,
        tells=config.async_options.partial_rollouts,
        arguments=tuple(config.engine_options.serve_args or ()),
        executable=tuple(config.engine_options.executable),
    )


def exported(policy: Policy) -> PolicyExport:
    """The policy's export in the form that servers load."""
    config = policy.config
    dtype = getattr(torch, servers_dtype(config))
    return PolicyExport(
        policy, dtype, merge=bool(config.engine_options.merge_adapter), untie=must_untie(policy)
    )


def serving_alone(config: RLOOConfig, name: str, gpus: Sequence[int] | None = None) -> ServerConfig:
    """The `ServerConfig` of a server that `rloo vllm-serve` starts with the model `name`, on `gpus`
    that no trainer uses: their memory in bytes (None: `visible_gpus`). Raises OSError if the
    model's configuration cannot be loaded, and ValueError if the GPUs have no room for the KV cache
    of one completion."""
    model = resolve_model(name)
    known = AutoConfig.from_pretrained(model, trust_remote_code=config.trust_remote_code)
    gpus = visible_gpus() if gpus is None else gpus
    tied = known.get_text_config().tie_word_embeddings and not gpus
    rank, sleeps = config.lora_r if config.use_peft else None, bool(config.vllm_enable_sleep_mode)
    serving = serving_of(config, model, rank, tied=tied, sleeps=sleeps, separate=bool(gpus))
    by_files = not gpus or rank is not None or config.engine_options.weight_transfer == "files"
    serving = replace(serving, transfers=not by_files)
    memory = smallest_gpu(gpus, serving.tensor_parallel_size)
    if memory is not None:
        parameters = num_parameters(known, trust_remote_code=config.trust_remote_code)
        if parameters is not None:
            require_room(serving, known, parameters, memory, longest_sequence(config))
    return serving


def serve(config: RLOOConfig, model: str, *, named: bool) -> None:
    """Print the address, the key's source and the command line of a server of `model`, then
    replace this process by the server. Raises ValueError if other machines could reach the server
    without a key."""
    host, port, option = address_of(config, named=named)
    require_key(host, option)
    serving = serving_alone(config, model)
    say(access_note(host, port, option))
    say(serving.line(host, port))
    serving.require_program()
    command = serving.command(host, port)
    os.environ.update(server_environment())
    os.execvp(command[0], command)


def address_of(config: RLOOConfig, *, named: bool) -> tuple[str, int, str]:
    """The host and port on which `rloo vllm-serve` listens, and the option that the host is from:
    `vllm_server_host` and `vllm_server_port` if the user has `named` the host or its value is not
    the default. Otherwise those of `vllm_server_base_url` if it is one URL with a port, else the
    loopback address, which `vllm_server_host` changes."""
    host, port = config.vllm_server_host, config.vllm_server_port
    if named or host != RLOOConfig().vllm_server_host:
        return host, port, "vllm_server_host"
    urls = [urlsplit(url) for url in config.vllm_server_base_url or ()]
    if len(urls) == 1 and urls[0].scheme == "http" and urls[0].hostname and urls[0].port:
        return urls[0].hostname, urls[0].port, "vllm_server_base_url"
    return HERE, port, "vllm_server_host"


def access_note(host: str, port: int, option: str) -> str:
    """A sentence with the address of a server, the `option` that it is from, and the key that its
    requests need."""
    options = "vllm_server_host, vllm_server_port" if option == "vllm_server_host" else option
    where = f"the server listens on {host}, port {port} ({options})"
    if os.environ.get(KEY):
        return f"{where}; requests need the key in {KEY}, which the run must have, too"
    return (
        f"{where}, for every user of this machine: {KEY} is not set, so requests need no key "
        f"({MAKE_KEY}, for the server and for the run)"
    )


def must_untie(policy: Policy) -> bool:
    """Whether servers must treat a tied matrix as two matrices: on a CPU, vLLM packs the output
    matrix only once, so later versions of a tied matrix would have no effect."""
    return policy.device.type == "cpu" and bool(tied_outputs(policy.model))


def settings_of(
    policy: Policy, log_folder: Path, gpus: Sequence[int] | None = None
) -> tuple[VLLMSettings, PolicyExport]:
    """The `VLLMSettings` of a run, and the export of its policy for the servers. `gpus`: the memory
    of each GPU in bytes (None: `visible_gpus`). Raises ValueError if a server that the run starts
    has no room for the KV cache of one completion."""
    config, source = policy.config, exported(policy)
    site, rank = _site(policy), source.adapter_rank
    devices = _devices(config) if site is None else [site.devices]
    model = config.model or "MODEL"
    sleeps, on_gpu = config.vllm_enable_sleep_mode, policy.device.type == "cuda"
    if sleeps is None:
        shares = on_gpu and not has_separate_gpus(config)
        sleeps = shares and not config.max_staleness
    if config.async_options.partial_rollouts and rank is not None:
        raise ValueError(
            "partial_rollouts is true and an adapter travels alone; a completion goes on with the "
            "adapter by whose name it was begun (async_kwargs.partial_rollouts, or "
            "engine_kwargs.merge_adapter true)"
        )
    transfers = config.engine_options.weight_transfer != "files"
    reason = _why_by_files(policy, rank) if transfers else None
    if reason is not None and config.engine_options.weight_transfer == "nccl":
        policy.notes.append(f"weights go to the servers by files, not over NCCL: {reason}")
    separate = on_gpu and has_separate_gpus(config)
    serving = serving_of(config, model, rank, tied=source.untie, sleeps=sleeps, separate=separate)
    serving = replace(serving, transfers=transfers and reason is None)
    if config.rollout_engine == "vllm" and on_gpu:
        _require_room(policy, serving, devices, gpus)
    if site is not None and not on_gpu and config.vllm_gpu_memory_utilization is None:
        # On a CPU, the servers of a machine reserve their shares of the same memory.
        share = memory_share(config, separate=False) / site.servers_here
        serving = replace(serving, gpu_memory_utilization=share)
    elsewhere = config.rollout_engine == "vllm_server" or bool(config.engine_options.weights_dir)
    elsewhere = elsewhere or (site is not None and not site.one_machine)
    settings = VLLMSettings(
        serving,
        urls=tuple(config.vllm_server_base_url or ()),
        devices=tuple(devices),
        deadline=config.engine_options.request_timeout,
        start_deadline=config.vllm_server_timeout,
        restarts=config.engine_options.restarts,
        tolerance=tolerance_of(config),
        needed=longest_sequence(config),
        partial=config.async_options.partial_rollouts,
        # Level 2 drops the weights, and vLLM then also loses its adapters.
        sleep_level=(2 if rank is None else 1) if sleeps else None,
        weights_folder=weights_folder(config) if elsewhere else None,
        log_folder=log_folder,
        ranks_per_engine=None if site is None else config.vllm_tensor_parallel_size,
        first_number=0 if site is None else site.number,
    )
    return settings, source


def _site(policy: Policy) -> ServerSite | None:
    """The server that this rank shares with the ranks beside it, in a colocated run of several
    ranks. None if all ranks have the same servers. Raises ValueError if the ranks cannot be divided
    among servers."""
    config, world = policy.config, policy.world
    if not shares_ranks_gpus(config) or world.size == 1:
        return None
    here = place_of(policy.device)
    places = [RankPlace(*place) for place in world.all_gather_object((here.host, here.gpu))]
    return site_of(places, world.rank, config.vllm_tensor_parallel_size)


def _devices(config: RLOOConfig) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each server that the run starts; None: as in this process."""
    size, given = config.vllm_tensor_parallel_size, config.engine_options.devices
    if given is None:
        return [None]
    return [",".join(given[at : at + size]) for at in range(0, len(given), size)]


def _require_room(
    policy: Policy,
    serving: ServerConfig,
    devices: Sequence[str | None],
    gpus: Sequence[int] | None,
) -> None:
    """Raise ValueError if a server has no room for the KV cache of one completion."""
    gpus, needed = visible_gpus() if gpus is None else gpus, longest_sequence(policy.config)
    parameters = count_parameters(policy.model)
    for one in devices:
        memory = smallest_gpu(gpus, serving.tensor_parallel_size, one)
        require_room(serving, policy.model.config, parameters, memory, needed)


def _why_by_files(policy: Policy, lora_rank: int | None) -> str | None:
    """Why weights cannot be sent over NCCL, or None if they can."""
    config = policy.config
    if lora_rank is not None:
        return "an adapter travels as the files that vLLM loads"
    if not has_separate_gpus(config):
        return "the servers have the trainer's own GPU (engine_kwargs.devices)"
    return unavailable_reason(policy.device)


def weights_folder(config: RLOOConfig) -> Path:
    """The folder into which weights are written for processes on other machines."""
    return Path(config.engine_options.weights_dir or config.output_dir).absolute()

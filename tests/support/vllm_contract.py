"""What our code sends to vLLM, compared with the routes, the requests and the classes of an
installed vLLM. Run it by a python that has vLLM: it reads requests as JSON, makes its own over
NCCL, of which two functions are played, and prints the differences."""

import asyncio
import inspect
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from fastapi import FastAPI
from fastapi.routing import APIRoute

from rloo.engines.vllm import nccl
from rloo.engines.vllm.client import TOKENS_ROUTE, VLLMClient
from rloo.engines.vllm.nccl import TRANSFER_ROUTE, NCCLGroup
from rloo.engines.vllm.server_plugin.rloo_weights import METHOD, VersionLoader
from rloo.engines.vllm.server_process import SWITCHES, ServerConfig
from rloo.engines.vllm.server_state import ServerState, ServerWeights
from support.fake_vllm import FakeVLLM
from support.models import make_model
from support.text import make_tokenizer

UPDATE_ROUTE = "/update_weights"


def real_app(serving: ServerConfig) -> FastAPI:
    """The app of `vllm serve` with our command line, without an engine."""
    from vllm.entrypoints.launchers.api_server.entry import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    return build_app(parser.parse_args(["--model", *serving.command()[2:]]), ("generate",))


def sent_over_nccl(folder: Path) -> list:
    """The requests by which the weights in `folder` go to two servers twice, and then to one that
    is left, by vLLM's own sender. Its process group and its broadcast are played."""
    from vllm.distributed.weight_transfer import nccl_engine

    servers = [FakeVLLM(make_model("qwen3", seed=9), make_tokenizer()) for _ in range(2)]
    received, ended, said = {}, [], []

    def broadcast(*, iterator, post_iter_func, **_):
        received.update((item[0], post_iter_func(item)) for item in iterator)
        for server in servers:
            server.received = received

    group = SimpleNamespace(destroy=lambda: ended.append(1))
    nccl_engine.open_trainer_endpoint = lambda how: group
    nccl_engine.packed_nccl_broadcast_producer = broadcast
    nccl.READY_SECONDS = 50.0

    async def send():
        members = [ServerState(VLLMClient(s.url), receives=True) for s in servers]
        group = NCCLGroup(members, torch.device("cpu"), 60.0, said.append)
        for version in range(3):
            if version == 2:
                members[1].fault, members[1].losses = "it is gone", 1
            weights = ServerWeights(version, folder, f"v{version}")
            live = [member for member in members if member.fault is None]
            assert all(await asyncio.gather(*[group.sent(m, weights) for m in live])), said
        for member in members:
            await member.client.close()

    asyncio.run(send())
    for server in servers:
        server.close()
        state = server.model.state_dict()
        assert received and all(torch.equal(state[name], received[name]) for name in received)
    assert ended == [1]
    return [request for server in servers for request in server.requests]


def differences(app: FastAPI, request) -> list[str]:
    """Where a request is none that the app knows."""
    method, path, query, body, answer = request
    route = next((r for r in app.routes if r.path == path and method in r.methods), None)
    if not isinstance(route, APIRoute):
        return [] if route is not None else [f"there is no {method} {path}"]
    known = app.openapi()["paths"][path][method.lower()]
    source = inspect.getsource(route.endpoint)
    parameters = {p["name"]: p.get("required") for p in known.get("parameters", ())}
    found = named(f"query of {path}", query, parameters, source)
    forms = [named(f"body of {path}", body, fields, source) for fields in bodies(app, known)]
    found += min(forms, key=len)
    if ".rl." in route.endpoint.__module__ and isinstance(answer, dict):
        found += named(f"answer of {path}", answer, {}, source)
    return found + inside(path, body)


def bodies(app: FastAPI, known: dict) -> list[dict[str, bool]]:
    """The fields of each form of a body, and whether a field is required. A route that reads the
    body by itself has no fields."""
    content = known.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    found = []
    for form in schema.get("anyOf", [schema]):
        if "$ref" in form:
            form = app.openapi()["components"]["schemas"][form["$ref"].rpartition("/")[2]]
        required = form.get("required", ())
        found.append({name: name in required for name in form.get("properties", ())})
    return found


def named(place: str, given: dict, fields: dict[str, bool], source: str) -> list[str]:
    """The names in `given` that are no fields, and that the source of the route does not read; and
    the required fields that are missing."""
    known = lambda name: name in fields or (not fields and f'"{name}"' in source)  # noqa: E731
    found = [f"the {place} has no {name}" for name in given if not known(name)]
    missing = [name for name, required in fields.items() if required and name not in given]
    return found + [f"the {place} needs {name}" for name in missing]


def inside(path: str, body: dict) -> list[str]:
    """Where a dictionary inside of a body is none of the class or the function that it goes to."""
    from vllm import SamplingParams
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def reload_weights(**given):
        inspect.signature(GPUModelRunner.reload_weights).bind(None, **given)

    def load_version(**given):
        inspect.signature(VersionLoader.load_version).bind(None, **given)

    takers = {
        TRANSFER_ROUTE: ("init_info", NCCLWeightTransferEngine.init_info_cls),
        UPDATE_ROUTE: ("update_info", NCCLWeightTransferEngine.update_info_cls),
        TOKENS_ROUTE: ("sampling_params", SamplingParams),
        "/collective_rpc": (
            "kwargs",
            load_version if body.get("method") == METHOD else reload_weights,
        ),
    }
    if path not in takers:
        return []
    name, take = takers[path]
    try:
        take(**body[name])
    except (TypeError, ValueError) as error:
        return [f"{name} of {path}: {error}"]
    return []


def main() -> None:
    torch.set_num_threads(1)
    os.environ |= SWITCHES
    serving = ServerConfig("m", lora_rank=8, sleeps=True, tells=True, transfers=True)
    app = real_app(serving)
    requests = [*json.load(sys.stdin), *sent_over_nccl(Path(sys.argv[1]))]
    found = {line for request in requests for line in differences(app, request)}
    routes = {request[1] for request in requests}
    print(json.dumps({"differences": sorted(found), "routes": sorted(routes)}))


if __name__ == "__main__":
    main()

"""A server that answers as vLLM does, by transformers, and can be made to fail in every way."""

from __future__ import annotations

import copy
import json
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch
from safetensors.torch import load_file

from rloo.engines.vllm.server_plugin.rloo_weights import VersionLoader, WrongDigestError

LORA_RANK = 8  # the most that it takes: one of those that vLLM's --max-lora-rank knows
ROUTES = (
    "/health", "/openapi.json", "/server_info", "/tokenize", "/pause", "/resume", "/weight_info",
    "/collective_rpc", "/update_weight_version", "/v1/completions", "/sleep", "/wake_up",
)  # fmt: skip
_WARNINGS = threading.Lock()
LORA_ROUTES = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


class FakeVLLM:
    """Serves `model`; `calls` are the routes in the order in which they were called, with query.
    `faults[route]` is called with the request and the answer, and returns another answer, raises
    `Status`, or takes its time; a route with a query, as in `calls`, is possible, too. `settings`
    change what it says of itself. With a `key`, it asks for it, except for its health."""

    def __init__(
        self,
        model,
        tokenizer,
        *,
        lora: bool = False,
        scale_out: bool = False,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.model, self.tokenizer, self.lora = model.eval(), tokenizer, lora
        self.adapters: dict[str, Any] = {}
        self.routes = [*ROUTES, *(LORA_ROUTES if lora else ())]
        self.routes += ["/inference/v1/generate"] if scale_out else []
        self.received: dict[str, torch.Tensor] = {}  # over what stands for NCCL
        self.world_size = 2
        self.version, self.calls, self.bodies = "default", [], []
        # Method, route, query and body of each request, and the answer.
        self.requests: list[tuple[str, str, dict, dict, Any]] = []
        self.interrupted = False  # an error has ended a load of weights
        self.faults: dict[str, Callable[[dict, Any], Any]] = {}
        self.settings: dict[str, Any] = {}
        self.lora_rank, self.extension, self.key = LORA_RANK, "", ""
        self._lock, self._closed = threading.Lock(), False
        # Completions that are computed, and whether that is to pause.
        self._changed, self._active, self._paused = threading.Condition(), 0, False
        self._http = _Listener((host, port), _handler(self))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        with self._lock:  # no thread may compute when the interpreter ends: torch would abort it
            self._closed = True

    def answer(self, route: str, query: dict[str, str], body: dict[str, Any]) -> Any:
        computes = route in ("/v1/completions", "/inference/v1/generate")
        with self._changed:
            if route == "/pause":
                self._paused = True
                self._changed.wait_for(lambda: not self._active or query["mode"] != "wait", 60)
            if route == "/resume":
                self._paused = False
                self._changed.notify_all()
            if computes:
                self._changed.wait_for(lambda: not self._paused, 60)
                self._active += 1
        try:
            return self._answered(route, query, body)
        finally:
            with self._changed:
                self._active -= computes
                self._changed.notify_all()

    def _answered(self, route: str, query: dict[str, str], body: dict[str, Any]) -> Any:
        with self._lock:
            if self._closed:
                raise Status(503, "the server is closed")
            call = route + "".join(f" {k}={v}" for k, v in query.items())
            self.calls.append(call)
            self.bodies.append((route, body))
            found = self._answer(route, body)
        fault = self.faults.get(call) or self.faults.get(route)
        return found if fault is None else fault(body, found)

    def _answer(self, route: str, body: dict[str, Any]) -> Any:
        if route == "/openapi.json":
            return {"paths": {route: {} for route in self.routes}}
        if route == "/server_info":
            return {"vllm_config": self._config()}
        if route == "/tokenize":
            ids = self.tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"])
            return {"tokens": ids["input_ids"]}
        if route == "/get_world_size":
            return {"world_size": self.world_size}
        if route == "/finish_weight_update":
            self.model.load_state_dict(self.received, strict=False)
        if route == "/weight_info":
            return {"weight_version": self.version}
        if route == "/update_weight_version":
            self.version = body["new_version"]
        if route == "/collective_rpc":
            assert not self.interrupted, "vLLM cannot load after a load that an error has ended"
            if body["method"] == "load_version":
                try:
                    _Worker(self).load_version(body["kwargs"]["folder"])
                except WrongDigestError as error:
                    raise Status(500, str(error)) from error
            else:
                assert body["method"] == "reload_weights"
                self._load(Path(body["kwargs"]["weights_path"]))
        if route == "/v1/load_lora_adapter":
            from peft import PeftModel

            base = copy.deepcopy(self.model)
            # See support.adapters. The filters are those of all threads.
            with _WARNINGS, warnings.catch_warnings():
                warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
                adapted = PeftModel.from_pretrained(base, body["lora_path"])
            self.adapters[body["lora_name"]] = adapted.eval()
        if route == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
        if route in ("/v1/completions", "/inference/v1/generate"):
            return self._complete(route, body)
        return None

    def _config(self) -> dict[str, Any]:
        model = {"max_model_len": 128, "dtype": "torch.float32", "hf_overrides": {}}
        model |= {"logprobs_mode": "processed_logprobs", "enable_sleep_mode": True}
        config = {
            "model_config": model | self.settings,
            "device_config": {"device": "cpu"},
            "scheduler_config": {"max_num_seqs": 64},
            "lora_config": {"max_lora_rank": self.lora_rank} if self.lora else None,
            "parallel_config": {"worker_extension_cls": self.extension},
        }
        return config

    def _load(self, folder: Path) -> None:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        files = {file: load_file(folder / file) for file in set(index["weight_map"].values())}
        tensors = {name: files[file][name] for name, file in index["weight_map"].items()}
        missing, unexpected = self.model.load_state_dict(tensors, strict=False)
        assert not unexpected and all("lm_head" in name for name in missing)

    @torch.no_grad()
    def _complete(self, route: str, body: dict[str, Any]) -> Any:
        model = self.model
        if body.get("model") is not None:
            if body["model"] not in self.adapters:
                raise Status(404, f"the model `{body['model']}` does not exist")
            model = self.adapters[body["model"]]
        asked = body.get("sampling_params", body)
        prompt = body["token_ids"] if "token_ids" in body else body["prompt"]
        drawn = self._draw(model, prompt, asked)
        return {"choices": [self._shown(route, k, *c) for k, c in enumerate(drawn)]}

    def _draw(self, model, prompt: list[int], asked: dict[str, Any]) -> list[tuple]:
        """Tokens, log-probs and why it ended, of each completion; computed until the last ends."""
        count, heat = asked["n"], asked["temperature"]
        noise = [torch.Generator().manual_seed((asked["seed"] + k) % 2**63) for k in range(count)]
        ids = torch.tensor([prompt] * count)
        logprobs = []
        for _ in range(asked["max_tokens"]):
            logits = model(input_ids=ids, use_cache=False).logits[:, -1].float()
            chances = (logits / (heat or 1.0)).log_softmax(-1)
            drawn = chances.argmax(-1, keepdim=True)
            if heat:
                pairs = zip(chances.exp(), noise, strict=True)
                drawn = torch.stack([row.multinomial(1, generator=own) for row, own in pairs])
            ids = torch.cat([ids, drawn], dim=1)
            logprobs.append(chances.gather(1, drawn))
            ends = torch.tensor(asked["stop_token_ids"])
            if not asked["stop"] and torch.isin(ids[:, len(prompt) :], ends).any(dim=1).all():
                break
        tokens = ids[:, len(prompt) :].tolist()
        return [
            self._ended(*row, asked)
            for row in zip(tokens, torch.cat(logprobs, dim=1).tolist(), strict=True)
        ]

    def _ended(self, tokens: list[int], logprobs: list[float], asked: dict[str, Any]) -> tuple:
        for length, token in enumerate(tokens, start=1):
            text = self.tokenizer.decode(tokens[:length]) if asked["stop"] else ""
            if token in asked["stop_token_ids"] or any(stop in text for stop in asked["stop"]):
                return tokens[:length], logprobs[:length], "stop"
        return tokens, logprobs, "length"

    def _shown(self, route: str, number: int, tokens, logprobs, finish) -> dict[str, Any]:
        shown = {"index": number, "token_ids": tokens, "finish_reason": finish}
        pairs = zip(tokens, logprobs, strict=True)
        if route == "/v1/completions":
            names = [f"token_id:{token}" for token in tokens]
            return shown | {"logprobs": {"tokens": names, "token_logprobs": logprobs}}
        span = {"version": self.version, "start": 0, "end": len(tokens)}
        content = [{"token_id": t, "logprob": p, "rank": 1} for t, p in pairs]
        return shown | {"logprobs": {"content": content}, "weight_versions": [span]}


class _Listener(ThreadingHTTPServer):
    request_queue_size = 2048  # as uvicorn. A connection that does not fit is reset


class _Worker(VersionLoader):
    """A worker of the server, with the extension that loads deltas."""

    def __init__(self, server: FakeVLLM) -> None:
        self.server = server

    def reload_weights(self, weights_iterator) -> None:
        self.server.interrupted = True
        self.server.model.load_state_dict(dict(weights_iterator), strict=False)
        self.server.interrupted = False


class Status(Exception):
    """An answer with a status of an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def _handler(server: FakeVLLM) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # or each answer would wait for an acknowledgement

        def do_GET(self) -> None:
            address = urlsplit(self.path)
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size) or b"{}")
            status, query, answer = 200, dict(parse_qsl(address.query)), None
            try:
                given = self.headers.get("Authorization")
                if server.key and address.path != "/health" and given != f"Bearer {server.key}":
                    raise Status(401, "the key is missing or wrong")
                answer = server.answer(address.path, query, body)
                sent = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            except Status as error:
                status, sent = error.status, json.dumps({"error": str(error)}).encode()
            server.requests.append((self.command, address.path, query, body, answer))
            self.send_response(status)
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            with suppress(OSError):  # who asked has given up
                self.wfile.write(sent)
            if status >= 500:  # as uvicorn, which closes the connection after the answer
                time.sleep(0.1)
                self.close_connection = True

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    return Handler

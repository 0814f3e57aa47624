"""The fake server as a program that is started as vLLM is, `... serve MODEL --port N ...`; as that
does, it listens on all addresses."""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

if __name__ == "__main__":
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from support.fake_vllm import FakeVLLM

    torch.set_num_threads(1)
    folder, port = sys.argv[2], int(sys.argv[sys.argv.index("--port") + 1])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    server = FakeVLLM(model, AutoTokenizer.from_pretrained(folder), host="0.0.0.0", port=port)
    if "--hf-overrides" in sys.argv:
        overrides = json.loads(sys.argv[sys.argv.index("--hf-overrides") + 1])
        server.settings = {"hf_overrides": overrides}
    if "--middleware" in sys.argv:  # without which vLLM's routes for weights need no key
        server.key = os.environ.get("VLLM_API_KEY", "")
    while True:
        time.sleep(60)

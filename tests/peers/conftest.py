"""Which of these tests an environment of tools/peers_env.sh holds the peer of.

The other files are left out of a run over the folder. A file that is named is run all the same and
fails for want of its peer, which is how .ci/run names them.
"""

from importlib.util import find_spec

PEERS = {
    "test_verl.py": "verl",
    "test_ms_swift.py": "swift",
    "test_areal.py": "areal",
    "test_deepspeed.py": "deepspeed",
    "test_openenv.py": "openenv",
    "test_verifiers_environments.py": "verifiers",
}

collect_ignore = [file for file, package in PEERS.items() if find_spec(package) is None]

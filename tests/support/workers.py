"""What worker processes do in tests."""

import os
import signal
import subprocess
import time


def serve(setup: bytes):
    """Does what it is told; the setup comes before every answer."""

    def answer(message: bytes) -> bytes:
        word, _, rest = message.decode().partition(" ")
        if word == "sleep":
            time.sleep(float(rest))
        elif word == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif word == "exit":
            os._exit(int(rest))
        elif word == "raise":
            error = {"value": ValueError, "decode": UnicodeDecodeError}[rest]
            if error is UnicodeDecodeError:
                b"\xff".decode()
            raised = error("no good")
            raised.add_note("said here")
            raise raised
        elif word == "pid":
            return str(os.getpid()).encode()
        elif word == "start":
            return str(subprocess.Popen([rest, "600"]).pid).encode()
        elif word == "once":  # dies at the first call, and leaves a mark
            try:
                os.close(os.open(rest, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return b"again"
            os.kill(os.getpid(), signal.SIGKILL)
        return setup + message

    return answer


def broken(setup: bytes):
    """A worker that cannot begin."""
    raise RuntimeError(f"no {setup.decode()}")

"""Answers one prompt on a cache and is killed at once: run as a process of its own.

Usage: python -m tests.engine.killed ROOT MODEL KEY PROMPT SETTINGS
"""

import json
import os
import signal
import sys
from pathlib import Path

from kvport.manifest.keys import SigningKey
from kvport.snapshot.cache.clock import SYSTEM
from kvport.snapshot.engine.drafting.drafter import DraftSource
from kvport.snapshot.engine.tuning import Tuning
from tests.engine.conftest import Rig


def main() -> None:
    root, model, key, prompt, settings = sys.argv[1:]
    asked = json.loads(settings)
    block, draft = asked.pop("block"), asked.pop("draft")
    tuning = Tuning(**asked, draft=DraftSource(Path(draft)) if draft else None)
    signer = SigningKey.from_bytes(bytes.fromhex(key))
    rig = Rig(Path(root), Path(model), tuning, signer, block=block, clocks=SYSTEM)
    answer = rig.complete(json.loads(Path(prompt).read_text()), max_tokens=40)
    rig.cache.flush()
    print(json.dumps(answer.tokens), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()

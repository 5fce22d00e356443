"""A process that ends right after a pruning's commit: `pruning_child ROOT`."""

import os
import signal
import sys
from pathlib import Path

from kvport.snapshot.cache.evict import Evictor
from tests.cache.builder import open_cache, space
from tests.cache.conversations import ALL, Talk


def main(root: Path) -> None:
    with open_cache(root) as cache:
        talk = Talk(cache, space(cache, ALL))
        talk.turn(thinking=True)
        # Where the files of what the commit has doomed would be unlinked.
        Evictor.unlink_doomed = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        talk.turn(thinking=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

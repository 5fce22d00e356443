"""A process that stores for ever, to be killed: `storing_child ROOT SEED CAP`."""

import random
import sys
from pathlib import Path

from kvport.manifest.nodes import ROOT_NODE
from tests.cache.builder import ALL, find, open_cache, segments, space


def tokens_of(seed: int, number: int) -> list[int]:
    return [seed, number, *range(600)]


def main(root: Path, seed: int, cap: int) -> None:
    rng = random.Random(seed)
    with open_cache(root, cap) as cache:
        ns = space(cache, ALL)
        number = 0
        while True:
            chain = cache.chain(ns, ROOT_NODE, "child")
            size = rng.choice([100, 5000, 90_000])
            for segment in segments(ns, tokens_of(seed, number), CUTS, size=size):
                chain.append(segment)
                print("append", number, flush=True)
            chain.close()
            if rng.random() < 0.5:
                cache.flush()
                print("durable", number, flush=True)
            if rng.random() < 0.2 and (match := find(cache, ns, tokens_of(seed, 0))):
                cache.report_damage(ns, match.nodes[-1].blobs[0])
            number += 1


CUTS = [256, 512, 602]

if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

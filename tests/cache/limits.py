"""Two models that write 4:1 at a small cap, and a sampler that walks the directory."""

import os
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

import attrs

from kvport.snapshot.cache.cache import Cache
from kvport.snapshot.cache.policy import NamespaceSettings
from kvport.snapshot.cache.records import Namespace
from tests.cache.builder import find, space, store, used

ENDS = range(64, 513, 64)
"""Segments of a prompt."""


def sampled(root: Path) -> int:
    """Allocated bytes below the root; what goes meanwhile counts or not."""
    total = 0
    for parent, directories, files in os.walk(root, onerror=lambda _: None):
        for name in (*directories, *files):
            try:
                total += Path(parent, name).lstat().st_blocks * 512
            except FileNotFoundError:
                continue
    return total + root.lstat().st_blocks * 512


@attrs.define
class Traffic:
    """What the two did.

    Attributes:
        samples: bytes below the root, all the time.
        reserved: of the account, at the same moments.
        lookups: of the quiet one, for what it had stored within its share.
        hits: of these, found whole.
        least: smallest that the quiet one's usage ever was, once it had its share.
        prompts: stored, by model.
    """

    samples: list[int] = attrs.field(factory=list)
    reserved: list[int] = attrs.field(factory=list)
    lookups: int = 0
    hits: int = 0
    least: int | None = None
    prompts: dict[str, int] = attrs.field(factory=dict)


def run(cache: Cache, root: Path, *, seconds: float, quota: int, size: int) -> Traffic:
    """The busy one stores four prompts for each of the quiet one."""
    quiet, busy = space(cache, model=1), space(cache, model=2)
    cache.configure(quiet.id, NamespaceSettings(quota_bytes=quota))
    traffic, ended = Traffic(), threading.Event()
    a_prompt = len(ENDS) * (size + 3 * 4096)
    kept = int(quota * 0.75) // a_prompt
    with ThreadPoolExecutor() as pool:
        parts = [
            pool.submit(_quiet, cache, quiet, traffic, ended, kept=kept, size=size),
            pool.submit(_busy, cache, busy, traffic, ended, size),
            pool.submit(_sample, cache, root, traffic, ended),
        ]
        wait(parts, seconds, FIRST_EXCEPTION)
        ended.set()
        for part in parts:
            part.result()
    return traffic


def _prompt(model: int, number: int) -> list[int]:
    return [model, number, *range(ENDS[-1] - 2)]


def _quiet(
    cache: Cache,
    ns: Namespace,
    traffic: Traffic,
    ended: threading.Event,
    *,
    kept: int,
    size: int,
) -> None:
    number = 0
    while not ended.is_set():
        store(cache, ns, _prompt(1, number), ENDS, size=size, variant=number)
        number += 1
        traffic.prompts["quiet"] = number
        # The first ones are those that it comes back to, over and over.
        for again in range(min(number, kept)):
            found = find(cache, ns, _prompt(1, again))
            traffic.lookups += 1
            traffic.hits += found is not None and found.position == ENDS[-1]
        if number > kept:
            held = used(cache, ns)
            traffic.least = min(held, traffic.least or held)
        # A quarter of what the other does, once it has what it comes back to.
        while number > kept and 4 * number > traffic.prompts.get("busy", 0):
            if ended.wait(0.005):
                return


def _busy(
    cache: Cache, ns: Namespace, traffic: Traffic, ended: threading.Event, size: int
) -> None:
    number = 0
    while not ended.is_set():
        store(cache, ns, _prompt(2, number), ENDS, size=size, variant=number)
        number += 1
        traffic.prompts["busy"] = number


def _sample(cache: Cache, root: Path, traffic: Traffic, ended: threading.Event) -> None:
    while not ended.is_set():
        traffic.samples.append(sampled(root))
        traffic.reserved.append(cache.stats().account.reserved)
        time.sleep(0.01)

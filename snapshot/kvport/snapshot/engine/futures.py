"""Work whose outcome somebody else waits for."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def settle(future: Future[T], work: Callable[[], T]) -> None:
    """Run something; what it returns or raises is the future's from then on."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001 - it goes to whoever waits
        future.set_exception(error)

"""Preparing kernels quickly, for the first call of a process."""

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch


def at_once(tasks: Sequence[Callable[[], object]], device: torch.device) -> None:
    """Runs functions without arguments, each in a thread of its own whose current device is `device`; one alone runs
    in the caller's thread.

    Raises what the first that failed, in their order, raised, when all have ended.
    """

    def run(task: Callable[[], object]) -> None:
        with contextlib.nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device):
            task()

    if len(tasks) < 2:
        for task in tasks:
            task()
        return
    with ThreadPoolExecutor(len(tasks)) as pool:
        # Not pool.map, which cancels what has not begun when one fails.
        results = [pool.submit(run, task) for task in tasks]
    for result in results:
        result.result()

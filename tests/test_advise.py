"""Advice on settings: the cheapest that feed the step, or what limits."""

from __future__ import annotations

from typing import Any

import pytest

from gpuqueue.stream.advise import Setting, advise
from gpuqueue.stream.commands import check
from gpuqueue.stream.simulate import simulate
from gpuqueue.stream.strategies import command_stream

JOB: dict[str, Any] = {
    "num_volumes": 200,
    "load_seconds": 3.0,
    "patch_seconds": 0.005,
    "step_seconds": 0.2,
    "volume_bytes": 200_000_000,
    "memory_budget": 2_000_000_000,
}


def advised(**changes: Any) -> Setting:
    advice = advise(**(JOB | changes))
    assert advice.setting is not None, advice.reason
    return advice.setting


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_workers": 2},
        {"patch_seconds": 0.02},
        {"load_seconds": [0.5, 0.5, 8.0]},
        {"min_distinct": 5.5},
        {"num_volumes": 5},
    ],
)
def test_the_advice_feeds_the_step_within_the_budget(changes: dict[str, Any]) -> None:
    """Checked by simulating the whole epoch with the advised settings."""
    job = JOB | changes
    found = advised(**changes)
    assert (found.volumes_in_memory + found.lookahead) * job["volume_bytes"] <= job["memory_budget"]
    assert found.workers <= job.get("max_workers", 8)
    stream = command_stream(job["num_volumes"], found.volumes_in_memory, found.patches_per_volume)
    run = simulate(
        stream, job["load_seconds"], found.workers, 2, job["patch_seconds"], job["step_seconds"], 8, found.lookahead,
        found.patch_queue_size, job["volume_bytes"],
    )  # fmt: skip
    third = len(run.waits) // 3
    middle = run.waits[third:-third]
    assert sum(middle) <= 0.06 * len(middle) * 0.2
    assert check(stream).mean_distinct >= job.get("min_distinct", 2)
    assert run.most_resident_bytes <= job["memory_budget"]


def test_easier_jobs_get_cheaper_settings() -> None:
    assert advised(load_seconds=0.1).workers < advised().workers
    assert advised(max_workers=2).patches_per_volume > advised().patches_per_volume
    assert advised(min_distinct=6.0).volumes_in_memory > advised(min_distinct=3.0).volumes_in_memory
    assert advised(load_seconds=0.1, max_workers=0).workers == 0


@pytest.mark.parametrize(
    "changes, limit",
    [
        ({"patch_seconds": 0.05}, "gathering limits. A batch takes 2 steps to gather"),
        ({"load_seconds": 60.0, "max_workers": 2}, "loading limits. Even 128 patches per volume need 17.8 readers"),
        ({"memory_budget": 600_000_000}, "memory limits. There is room for 3 volumes; that does not mix 4 volumes"),
        ({"memory_budget": 1}, "memory limits. There is room for 0 volumes"),
    ],
)
def test_what_cannot_be_done_is_said_with_what_limits(changes: dict[str, Any], limit: str) -> None:
    advice = advise(**(JOB | changes))
    assert advice.setting is None
    assert f"it cannot be done: {limit}" in advice.reason


def test_senseless_values_are_refused() -> None:
    wrong: list[tuple[str, Any]] = [
        ("num_volumes", 0), ("utilisation", 1.0), ("step_seconds", 0.0), ("patches_per_volume", [])
    ]  # fmt: skip
    for name, value in wrong:
        with pytest.raises(ValueError, match=name):
            advise(**(JOB | {name: value}))

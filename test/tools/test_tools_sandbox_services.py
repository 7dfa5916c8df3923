"""Sandboxes of Daytona, E2B and Modal by their own SDKs, with a service on this machine that has the published API.

The services themselves were not seen.
"""

from __future__ import annotations

import asyncio
import functools
import itertools

import pytest
from fake_sandbox_services import E2B, Daytona
from own_packages import with_packages_of_its_own

from llmrl.testing import check_sandbox


def check(service, make, folder):
    """The contract, and that nothing is left; returns what the sandboxes were made with."""
    numbers = itertools.count()

    async def play(monkeypatch):
        async with service.serving() as url:
            for name in ("DAYTONA_API_URL", "E2B_API_URL", "E2B_SANDBOX_URL", "MODAL_SERVER_URL"):
                monkeypatch.setenv(name, f"{url}/api" if name.startswith("DAYTONA") else url)
            await check_sandbox(lambda: make(folder=f"{folder}/{next(numbers)}"))
            box = make(folder=f"{folder}/lost")
            await box.start()
            service.alive.clear()
            with pytest.raises(Exception, match=r"(?i)no sandbox|not found|404"):
                await box.run(["true"])
            await box.close()

    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("DAYTONA_API_KEY", "E2B_API_KEY", "MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
            monkeypatch.setenv(name, "a-key")
        monkeypatch.setenv("E2B_HTTP_VERSION", "1.1")
        asyncio.run(play(monkeypatch))
    assert not service.alive
    return service.created


@with_packages_of_its_own("daytona", "daytona>=0.226,<0.227")
def test_a_sandbox_of_daytona_keeps_the_contract(tmp_path):
    from llmrl.sandbox.daytona import DaytonaSandbox

    created = check(Daytona(), DaytonaSandbox, tmp_path)
    assert len(created) == 3 and all(one["networkBlockAll"] and one["autoDeleteInterval"] == 0 for one in created)


@with_packages_of_its_own("e2b", "e2b>=2.63,<3")
def test_a_sandbox_of_e2b_keeps_the_contract(tmp_path):
    from llmrl.sandbox.e2b import E2BSandbox

    created = check(E2B(), E2BSandbox, tmp_path)
    assert len(created) == 3 and not any(one["allow_internet_access"] for one in created)
    assert {one["timeout"] for one in created} == {3600}


@with_packages_of_its_own("modal", "modal>=1.6,<1.7")
def test_a_sandbox_of_modal_keeps_the_contract(tmp_path):
    from fake_modal import Modal
    from modal_proto import api_pb2

    from llmrl.sandbox.modal import ModalSandbox

    service = Modal()
    created = check(service, functools.partial(ModalSandbox, "debian:12-slim", lifetime_seconds=99), tmp_path)
    assert len(created) == 3 and {one.timeout_secs for one in created} == {99}
    blocked = api_pb2.NetworkAccess.BLOCKED
    assert {one.network_access.network_access_type for one in created} == {blocked}
    assert all(commands == ["FROM debian:12-slim"] for commands in service.images)

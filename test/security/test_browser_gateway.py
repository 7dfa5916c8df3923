"""The browser's way out: which hosts it lets through, and which addresses they may stand for."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrl.tools.gateway import Gateway, check_domains, is_allowed, is_reachable


@pytest.mark.parametrize(
    "domain",
    ["*.a.com", "http://a.com", "https://a.com/", "a.com/path", "a com", "", ".", "a..com", "a.com:x", "a.com:0",
     "a.com:70000", "-a.com", "a.com?x", "user@a.com", "a.com:٣"],
)  # fmt: skip
def test_an_entry_that_matches_nothing_is_refused(domain):
    with pytest.raises(ValueError, match="matches nothing"):
        check_domains([domain])


def test_domains_are_a_list():
    with pytest.raises(TypeError, match="put it in a list"):
        check_domains("a.com")
    with pytest.raises(ValueError, match="at least one host name"):
        check_domains([])


@given(st.lists(st.from_regex(r"[a-z][a-z0-9-]{0,8}(\.[a-z]{2,4}){1,2}\.?", fullmatch=True), min_size=1, max_size=4))
def test_an_accepted_domain_allows_itself_and_what_is_below(domains):
    for domain in check_domains(domains):
        assert is_allowed(domain, 443, domains) and is_allowed(f"www.{domain}", 80, domains)


_INNER = ["127.0.0.1", "10.1.2.3", "169.254.169.254", "192.168.0.1", "0.0.0.0", "100.64.0.1"]


def embedded(inner):
    """The forms of IPv6 that stand for an IPv4 address, or hold one."""
    high, low = (f"{int.from_bytes(ipaddress.ip_address(inner).packed[i : i + 2]):x}" for i in (0, 2))
    return [
        f"::ffff:{inner}", f"64:ff9b::{inner}", f"64:ff9b:1::{inner}", f"64:ff9b:1:7f00::{high}:{low}", f"::{inner}",
        f"2002:{high}:{low}::1", f"2002:{high}:{low}::", f"2001:0:{high}:{low}::1",
    ]  # fmt: skip


@pytest.mark.parametrize("inner", _INNER)
def test_no_form_of_a_refused_address_is_the_internet(inner):
    for address in [*embedded(inner), "fec0::1", "feff::1", "fe80::1%eth0"]:
        assert not is_reachable(address, "a.com", ["a.com"]), address


def test_a_public_address_behind_nat64_is_the_internet():
    assert is_reachable("64:ff9b::8.8.8.8", "a.com", ["a.com"])
    assert is_reachable("64:ff9b::10.0.0.1", "a.com", ["a.com", "10.0.0.1"])


@given(st.ip_addresses())
def test_addresses_off_the_internet_need_to_be_named(address):
    is_public = address.is_global and not address.is_multicast
    if (mapped := getattr(address, "ipv4_mapped", None)) is not None:
        is_public = mapped.is_global and not mapped.is_multicast
    elif str(address).startswith(("2002:", "64:ff9b:", "2001:", "fe", "::")):
        return  # see the forms above
    assert is_reachable(str(address), "a.com", ["a.com"]) == is_public
    if isinstance(address, ipaddress.IPv4Address):
        assert is_reachable(str(address), "a.com", ["a.com", str(address)])


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.1.2.3", "169.254.169.254", "::1", "fd00::1", "::ffff:127.0.0.1", "0.0.0.0"]
)
def test_a_name_that_stands_for_an_address_within_is_refused(monkeypatch, address):
    asked = []

    async def resolve(host, port, **kwargs):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    async def connect(*arguments, **kwargs):
        asked.append(arguments)
        raise OSError

    async def run():
        gateway = Gateway(["evil.org"])
        port = await gateway.start()
        loop = asyncio.get_running_loop()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        monkeypatch.setattr(loop, "getaddrinfo", resolve)
        monkeypatch.setattr(asyncio, "open_connection", connect)
        writer.write(b"GET http://evil.org/ HTTP/1.1\r\nhost: evil.org\r\n\r\n")
        answer = await reader.read()
        writer.close()
        await gateway.close()
        return answer

    assert asyncio.run(run()).startswith(b"HTTP/1.1 403") and asked == []


def test_the_address_that_was_checked_is_the_one_connected_to(monkeypatch):
    asked, answers = [], iter(["93.184.216.34", "127.0.0.1"])

    async def resolve(host, port, **kwargs):  # the second answer is another, as of a name that rebinds
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), port))]

    async def connect(host, port, **kwargs):
        asked.append(host)
        raise OSError

    async def run():
        gateway = Gateway(["rebinding.org"])
        port = await gateway.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
        monkeypatch.setattr(asyncio, "open_connection", connect)
        writer.write(b"CONNECT rebinding.org:443 HTTP/1.1\r\n\r\n")
        await reader.read()
        writer.close()
        await gateway.close()

    asyncio.run(run())
    assert asked == ["93.184.216.34"]

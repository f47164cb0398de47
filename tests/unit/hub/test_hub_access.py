"""The access middleware, over a small application that reports what reached it."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
import time

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from treadle.config.schema import HubConfig
from treadle.errors import ConfigError
from treadle.hub.endpoint import access_of
from treadle.net import access as net_access
from treadle.net import access_tokens
from treadle.net.access import ADMIN as ADMINS
from treadle.net.access import CLIENTS, EVERYBODY, AccessMiddleware, why_refused
from treadle.net.access_tokens import CLIENT_ROLES, role_token

TOKEN = "ordinary-token-0123456789"  # noqa: S105 - of a test
ADMIN = "admin-token-0123456789-ab"
WITH_TOKENS = {"TREADLE_HUB_TOKEN": TOKEN, "TREADLE_HUB_ADMIN_TOKEN": ADMIN}
LOOPBACK = "127.0.0.1"
ELSEWHERE = "10.1.2.3"


def may_reset(scope):
    return why_refused(scope, ADMINS) is None


async def echo(request):
    found = {
        "path": request.scope["path"],
        "raw": request.scope["raw_path"].decode(),
        "reset": may_reset(request.scope),
        "roles": [role for role in CLIENT_ROLES if why_refused(request.scope, {role}) is None],
    }
    return JSONResponse(found | {"url": str(request.url), "query": request.scope["query_string"].decode()})


ROUTES = [Route(path, echo, methods=["GET", "POST"]) for path in ("/", "/batch", "/healthz", "/v1/{name:path}")]


def client(env=(), peer=LOOPBACK, base="http://127.0.0.1:8000", **config):
    access = access_of(HubConfig(**config), dict(env))
    app = AccessMiddleware(Starlette(routes=ROUTES), access)
    return TestClient(app, base_url=base, client=(peer, 50000), follow_redirects=False)


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


# Tokens


def test_loopback_without_a_token_is_open_and_pays_no_heed_to_tokens():
    open_hub = client()
    assert open_hub.get("/batch").json()["reset"] is True
    assert open_hub.get("/batch", headers=bearer("whatever")).status_code == 200
    assert open_hub.get("/t/whatever/batch").json()["path"] == "/batch"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.5", "hub.example.org", "::ffff:10.0.0.5"])
def test_another_host_needs_a_token(host):
    with pytest.raises(ConfigError, match="needs a token") as error:
        access_of(HubConfig(host=host), {})
    assert "--token-file" in error.value.fix
    assert not access_of(HubConfig(host=host), {"TREADLE_HUB_TOKEN": TOKEN}).is_open
    assert not access_of(HubConfig(host=host), {"TREADLE_HUB_ADMIN_TOKEN": ADMIN}).is_open


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1", "LOCALHOST", "::ffff:127.0.0.1"])
def test_loopback_needs_none(host):
    assert access_of(HubConfig(host=host), {}).is_open


@pytest.mark.parametrize("token", [TOKEN, ADMIN])
def test_both_tokens_open_every_route_in_both_ways(token):
    hub = client(WITH_TOKENS, peer=ELSEWHERE)
    for answer in (
        hub.get("/batch", headers=bearer(token)),
        hub.get("/batch", headers={"Authorization": f"bEaReR   {token} "}),
        hub.post("/batch", headers=bearer(token)),
        hub.get(f"/t/{token}/batch"),
        hub.get(f"/t/{token}/batch", headers=bearer("not-this-one-01234567")),
        hub.get("/t/not-this-one-01234567/batch", headers=bearer(token)),
    ):
        assert answer.status_code == 200
        assert (answer.json()["path"], answer.json()["raw"]) == ("/batch", "/batch")
        assert answer.json()["reset"] is (token == ADMIN)
        assert token not in answer.text


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/batch", {}),
        ("/batch", bearer("")),
        ("/batch", bearer(TOKEN[:-1])),
        ("/batch", bearer(TOKEN + "x")),
        ("/batch", bearer(TOKEN.upper())),
        ("/batch", {"Authorization": b"Bearer \xff\x80"}),
        ("/batch", {"Authorization": f"Basic {TOKEN}"}),
        ("/batch", {"Authorization": TOKEN}),
        ("/batch", [("Authorization", f"Bearer {TOKEN}"), ("Authorization", "Bearer x")]),
        (f"/batch?token={TOKEN}", {}),
        (f"/t/{TOKEN[:-1]}/batch", {}),
        ("/t//batch", {}),
        ("/t/", {}),
        ("/t", {}),
        (f"/T/{TOKEN}/batch", {}),
        (f"//t/{TOKEN}/batch", {}),
        (f"/v1/t/{TOKEN}/batch", {}),
        (f"/%74/{TOKEN}/batch", {}),
        ("/healthz/", {}),
        ("/no-such-path", {}),
    ],
)
def test_without_the_token_nothing_is_served(path, headers):
    answer = client(WITH_TOKENS).get(path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert "--token-file" in answer.json()["detail"]
    assert TOKEN[:-1] not in answer.text


def test_only_get_healthz_needs_no_token():
    hub = client(WITH_TOKENS)
    assert hub.get("/healthz").status_code == 200
    assert hub.post("/healthz").status_code == 401
    assert hub.get("/t/wrong-token-0123456789/healthz").status_code == 200


def test_the_prefix_keeps_query_and_escapes_and_may_stand_alone():
    hub = client(WITH_TOKENS)
    assert hub.get(f"/t/{TOKEN}").json()["path"] == "/"
    assert hub.get(f"/t/{TOKEN}/").json()["path"] == "/"
    found = hub.get(f"/t/{TOKEN}/v1/a%2Fb%20c?x=1&y=%20").json()
    assert (found["path"], found["raw"], found["query"]) == ("/v1/a/b c", "/v1/a%2Fb%20c", "x=1&y=%20")
    assert TOKEN not in found["url"]


def test_tokens_with_signs_that_mean_something_in_a_url_work_escaped():
    odd = "a/b+c=d%e?f#g&h;0123"
    hub = client({"TREADLE_HUB_TOKEN": odd})
    assert hub.get("/batch", headers=bearer(odd)).status_code == 200
    assert hub.get("/t/a%2Fb+c%3Dd%25e%3Ff%23g%26h;0123/batch").status_code == 200


def test_a_trailing_slash_redirect_does_not_show_the_token():
    hub = client(WITH_TOKENS)
    answer = hub.get(f"/t/{TOKEN}/batch/?x=1")
    assert (answer.status_code, answer.headers["Location"]) == (307, "../batch?x=1")
    assert str(answer.next_request.url) == f"http://127.0.0.1:8000/t/{TOKEN}/batch?x=1"
    assert hub.send(answer.next_request).json()["path"] == "/batch"
    plain = hub.get("/batch/", headers=bearer(TOKEN))
    assert plain.headers["Location"] == "http://127.0.0.1:8000/batch"


def test_an_admin_token_alone_leaves_loopback_open_and_closes_other_hosts():
    only_admin = {"TREADLE_HUB_ADMIN_TOKEN": ADMIN}
    assert client(only_admin).get("/batch").status_code == 200
    elsewhere = client(only_admin, peer=ELSEWHERE, host="0.0.0.0")
    assert elsewhere.get("/batch").status_code == 401
    assert elsewhere.get("/batch", headers=bearer(ADMIN)).json()["reset"] is True


# Reset


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
def test_who_is_on_this_machine_may_reset(peer):
    assert client(peer=peer).get("/batch").json()["reset"] is True


@pytest.mark.parametrize("peer", ["10.1.2.3", "::ffff:10.1.2.3", "fe80::1", "testclient", ""])
def test_who_is_elsewhere_may_not(peer):
    assert client(peer=peer).get("/batch").json()["reset"] is False


@pytest.mark.parametrize("name", ["Forwarded", "X-Forwarded-For", "X-FORWARDED-HOST", "X-Real-IP", "Via"])
def test_a_proxy_on_this_machine_does_not_make_everybody_local(name):
    hub = client(WITH_TOKENS)
    assert hub.get("/batch", headers=bearer(TOKEN) | {name: "127.0.0.1"}).json()["reset"] is False
    assert hub.get("/batch", headers=bearer(ADMIN) | {name: "10.0.0.1"}).json()["reset"] is True


def test_a_request_that_no_guard_has_seen_may_not_reset():
    scope = {"type": "http", "method": "GET", "path": "/reset_data", "headers": []}
    assert may_reset(scope) is False
    assert may_reset(scope | {"treadle.roles": ["admin"]}) is False


def test_an_open_hub_knows_no_admin_by_an_empty_token():
    assert client(peer=ELSEWHERE).get("/batch", headers=bearer("")).json()["reset"] is False


# Hosts


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:8000", "127.9.9.9", "localhost:1", "LOCALHOST", "localhost.", "[::1]:8000"],
)
def test_loopback_addresses_and_localhost_are_allowed(host):
    assert client().get("/batch", headers={"Host": host}).status_code == 200


# Browsers send no Sec-Fetch-Site to some of these, and all of them can lead to a hub on loopback.
@pytest.mark.parametrize(
    "host", ["0.0.0.0", "0.0.0.0:8000", "[::]", "[::ffff:127.0.0.1]", "[::ffff:0.0.0.0]", "10.0.0.7", "[fe80::1]", "0"]
)
def test_other_addresses_are_refused(host):
    answer = client().get("/batch", headers={"Host": host})
    assert answer.status_code == 403
    assert "--allowed-hosts" in answer.json()["detail"]


LOCAL_AND_HOST = [
    ("10.0.0.7", "10.0.0.7:8000"), ("[2001:db8::7]", "[2001:DB8:0::7]"), ("[::ffff:a00:7]", "10.0.0.7"),
]  # fmt: skip


@pytest.mark.parametrize("bound", ["0.0.0.0", "::", ""])
def test_with_a_token_the_address_of_the_connection_is_known(bound):
    for local, host in LOCAL_AND_HOST:
        hub = client(WITH_TOKENS, peer=ELSEWHERE, base=f"http://{local}:8000", host=bound)
        assert hub.get("/batch", headers=bearer(TOKEN) | {"Host": host}).status_code == 200
        for other in ("0.0.0.0", "[::]", "10.0.0.8", "evil.example"):
            assert hub.get("/batch", headers=bearer(TOKEN) | {"Host": other}).status_code == 403


def test_addresses_can_be_listed():
    hub = client(WITH_TOKENS, host="0.0.0.0", allowed_hosts="192.0.2.5, [2001:db8::5],0.0.0.0")
    assert hub.get("/healthz", headers={"Host": "192.0.2.5:80"}).status_code == 200
    assert hub.get("/healthz", headers={"Host": "[2001:0db8::5]"}).status_code == 200
    assert hub.get("/healthz", headers={"Host": "0.0.0.0"}).status_code == 403


# Web pages


FOREIGN = [
    {"Origin": "https://example.org"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:8001"},
    {"Referer": "https://example.org/page"},
    {"Referer": "http://127.0.0.1:80/"},
    {"Referer": "about:blank"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
]


@pytest.mark.parametrize("headers", FOREIGN)
def test_requests_of_foreign_pages_are_refused(headers):
    assert client().get("/healthz", headers=headers).status_code == 403
    assert client().post("/healthz", headers=headers).status_code == 403


OWN = [
    {"Origin": "http://127.0.0.1:8000"},
    {"Origin": "https://127.0.0.1:8000"},
    {"Referer": "http://127.0.0.1:8000/dash/"},
    {"Sec-Fetch-Site": "none"},
    {"Sec-Fetch-Site": "same-origin"},
]


@pytest.mark.parametrize("headers", OWN)
def test_our_own_page_may_read_and_not_change_anything(headers):
    found = client().get("/batch", headers=headers)
    assert (found.status_code, found.json()["roles"], found.json()["reset"]) == (200, ["observer"], False)
    if "Origin" in headers:
        assert client().post("/batch", headers=headers).status_code == 403


@pytest.mark.parametrize(
    "headers", [*OWN, {"Accept-Language": "en"}, {"User-Agent": "Mozilla/5.0 (X11)"}, {"Sec-Fetch-Mode": "no-cors"}]
)
def test_a_get_with_effects_is_refused_to_browsers(headers):
    scope = {
        "type": "http", "method": "GET", "path": "/reset_data", "treadle.roles": EVERYBODY,
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
    }  # fmt: skip
    assert "refused to browsers" in why_refused(scope, ADMINS)
    assert why_refused(scope, EVERYBODY) is None
    assert why_refused(scope | {"method": "POST"}, ADMINS) is None  # a browser's has an Origin: refused before


@pytest.mark.parametrize("agent", ["python-requests/2.32.5", "Python/3.11 aiohttp/3.13.2", "curl/8.14.1"])
def test_what_programs_send_passes(agent):
    headers = {"User-Agent": agent, "Accept": "*/*", "Accept-Encoding": "gzip, deflate", "Connection": "keep-alive"}
    assert client().get("/batch", headers=headers).json()["reset"] is True


# Roles


@pytest.mark.parametrize("role", CLIENT_ROLES)
@pytest.mark.parametrize("peer", [LOOPBACK, ELSEWHERE])
def test_the_token_of_a_role_has_that_role_and_may_read(role, peer):
    found = client(WITH_TOKENS, peer=peer).get("/batch", headers=bearer(role_token(TOKEN, role))).json()
    assert found["roles"] == list(dict.fromkeys((role, "observer")))
    assert found["reset"] is False


def test_the_main_token_has_every_role_and_resets_from_this_machine_only():
    for peer in (LOOPBACK, ELSEWHERE):
        found = client(WITH_TOKENS, peer=peer).get("/batch", headers=bearer(TOKEN)).json()
        assert (found["roles"], found["reset"]) == (list(CLIENT_ROLES), peer == LOOPBACK)


def test_tokens_of_roles_depend_on_the_main_token():
    wrong = role_token(TOKEN + "x", "trainer")
    assert client(WITH_TOKENS).get("/batch", headers=bearer(wrong)).status_code == 401
    assert len({role_token(TOKEN, role) for role in CLIENT_ROLES}) == len(CLIENT_ROLES)
    assert not any(TOKEN in role_token(TOKEN, role) for role in CLIENT_ROLES)


def test_a_hub_does_not_start_with_the_token_of_a_role():
    token = role_token(TOKEN, "environment")
    with pytest.raises(ConfigError, match="role environment") as error:
        access_of(HubConfig(), {"TREADLE_HUB_TOKEN": token})
    assert token not in str(error.value)


def test_own_names_the_bound_name_and_allowed_hosts(monkeypatch):
    monkeypatch.setattr(net_access.socket, "gethostname", lambda: "Node7")
    monkeypatch.setattr(net_access, "_full_name", lambda: "node7.cluster.example")
    hub = client(WITH_TOKENS, host="bound.example", allowed_hosts="hub.example.org, Other. ,")
    for host in ("node7", "NODE7.cluster.example:80", "bound.example", "hub.example.org", "other"):
        assert hub.get("/healthz", headers={"Host": host}).status_code == 200, host


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "2130706433", "0x7f.1", "127.1", "é", "a b"]
)
def test_other_names_are_refused(host):
    answer = client().get("/batch", headers={"Host": host.encode("latin-1")})
    assert answer.status_code in (400, 403)
    assert "--allowed-hosts" in answer.json()["detail"] or answer.status_code == 400


@pytest.mark.parametrize("host", ["", " ", ":8000", "[::1", "a@127.0.0.1", "127.0.0.1:80:80", "127.0.0.1/x", "[]", "."])
def test_hosts_that_are_none(host):
    assert client().get("/batch", headers={"Host": host}).status_code in (400, 403)


def test_two_hosts_or_none_are_refused():
    assert asyncio.run(status_of([(b"host", b"127.0.0.1"), (b"host", b"127.0.0.1")])) == 400
    assert asyncio.run(status_of([])) == 400


@pytest.mark.parametrize("name", ["http://hub", "hub:8000", "*", "a b", "hub/x"])
def test_allowed_hosts_that_are_no_names(name):
    with pytest.raises(ConfigError, match="allowed-hosts"):
        access_of(HubConfig(allowed_hosts=name), {})


def test_a_name_server_that_does_not_answer_does_not_hold_up_the_start(monkeypatch):
    answered = threading.Event()
    monkeypatch.setattr(net_access, "_full_name", lambda: answered.wait(10) and "late.example")
    monkeypatch.setattr(net_access, "NAME_LOOKUP_S", 0.05)
    began = time.monotonic()
    access = access_of(HubConfig(), {})
    assert time.monotonic() - began < 5.0
    assert "late.example" not in access.hosts
    answered.set()
    while "late.example" not in access.hosts:
        assert time.monotonic() - began < 30.0
        time.sleep(0.01)


# Methods and other scopes


@pytest.mark.parametrize("method", ["HEAD", "TRACE", "CONNECT"])
def test_methods_without_an_answer_never_reach_a_route(method):
    answer = client().request(method, "/batch")
    assert (answer.status_code, answer.headers["Allow"]) == (405, "GET, POST")


async def status_of(headers):
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/batch", "headers": headers, "client": ("127.0.0.1", 1)}
    await AccessMiddleware(None, access_of(HubConfig(), {}))(scope, None, send)
    return sent[0]["status"]


def test_websockets_are_closed_and_lifespan_passes():
    reached, sent = [], []

    async def app(scope, receive, send):
        reached.append(scope["type"])

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        sent.append(message)

    async def both():
        await AccessMiddleware(app, access_of(HubConfig(), {}))({"type": "websocket", "headers": []}, receive, send)
        await AccessMiddleware(app, access_of(HubConfig(), {}))({"type": "lifespan"}, receive, send)

    asyncio.run(both())
    assert reached == ["lifespan"]
    assert [message["type"] for message in sent] == ["websocket.close"]


# Token files


@pytest.fixture
def token_file(tmp_path):
    return tmp_path / "token"


def write(path, text, mode=0o600):
    path.write_text(text)
    path.chmod(mode)
    return path


def of_file(path, env=()):
    return access_of(HubConfig(token_file=path), dict(env))


def test_a_token_file_is_made_once_for_its_owner_only(token_file, caplog):
    old = os.umask(0)
    try:
        with caplog.at_level("DEBUG"):
            access = of_file(token_file)
    finally:
        os.umask(old)
    assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
    token = token_file.read_text().strip()
    assert len(token) >= 43
    assert access.roles_of(token.encode(), is_local=False) == CLIENTS
    assert of_file(token_file).roles_of(token.encode(), is_local=True) == EVERYBODY
    assert token_file.read_text().strip() == token
    assert token not in repr(access)
    assert token not in caplog.text + repr([vars(record) for record in caplog.records])


def test_processes_that_start_at_once_get_one_token(token_file, monkeypatch):
    make, started = access_tokens.secrets.token_urlsafe, []

    def make_while_another_starts(size):
        monkeypatch.setattr(access_tokens.secrets, "token_urlsafe", make)
        started.append(of_file(token_file))
        return make(size)

    monkeypatch.setattr(access_tokens.secrets, "token_urlsafe", make_while_another_starts)
    started.append(of_file(token_file))
    assert started == [of_file(token_file)] * 2
    assert list(token_file.parent.iterdir()) == [token_file]


def test_blanks_around_the_token_do_not_count(token_file):
    assert of_file(write(token_file, f"\n  {TOKEN}\r\n\n")).roles_of(TOKEN.encode(), is_local=False) == CLIENTS


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o606, 0o602, 0o660, 0o620, 0o777, 0o601])
def test_a_file_that_others_can_read_or_change_is_refused(token_file, mode):
    with pytest.raises(ConfigError, match="other users") as error:
        of_file(write(token_file, TOKEN, mode))
    assert error.value.fix == f"chmod 600 {token_file}"
    assert TOKEN not in str(error.value)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o440])
def test_a_file_for_its_owner_or_its_group_is_read(token_file, mode):
    assert of_file(write(token_file, TOKEN, mode)).secret is not None


@pytest.mark.parametrize(
    "text", ["", "\n", "tooshort", "x" * 15, "x" * 5000, "two words 0123456789", "ü" * 20, f"{TOKEN}\n{TOKEN}"]
)
def test_a_token_that_is_none_is_refused_without_showing_it(token_file, text):
    with pytest.raises(ConfigError) as error:
        of_file(write(token_file, text))
    assert str(token_file) in str(error.value)
    assert not text.strip() or text not in str(error.value)
    with pytest.raises(ConfigError, match="TREADLE_HUB_TOKEN") as error:
        access_of(HubConfig(), {"TREADLE_HUB_TOKEN": text})
    assert not text.strip() or text not in str(error.value)


def test_links_are_followed_even_to_a_file_that_is_not_there_yet(tmp_path, token_file):
    link = tmp_path / "link"
    link.symlink_to(token_file)
    made = of_file(link)
    assert link.is_symlink()
    assert made.roles_of(token_file.read_text().strip().encode(), is_local=False) == CLIENTS
    assert of_file(link) == made


@pytest.mark.parametrize("place", ["no/such/folder/token", ".", "pipe", "circle"])
def test_places_that_can_hold_no_token(tmp_path, place):
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(ConfigError, match="cannot be read or made") as error:
        of_file(tmp_path / place)
    assert "--token-file" in error.value.fix


def test_file_and_variable_must_agree(token_file):
    write(token_file, TOKEN)
    assert of_file(token_file, {"TREADLE_HUB_TOKEN": f" {TOKEN} "}).secret is not None
    with pytest.raises(ConfigError, match="different tokens") as error:
        of_file(token_file, {"TREADLE_HUB_TOKEN": ADMIN})
    assert TOKEN not in str(error.value)
    assert ADMIN not in str(error.value)


def test_the_admin_token_must_be_another():
    with pytest.raises(ConfigError, match="the same") as error:
        access_of(HubConfig(), {"TREADLE_HUB_TOKEN": TOKEN, "TREADLE_HUB_ADMIN_TOKEN": TOKEN})
    assert TOKEN not in str(error.value)


def test_a_token_in_the_path_is_in_no_log(caplog):
    with caplog.at_level("DEBUG"):
        client(WITH_TOKENS).get(f"/t/{TOKEN}/no-such-path")
        client(WITH_TOKENS).get(f"/t/{TOKEN}x/batch")
    ours = [record for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert TOKEN not in repr([vars(record) for record in ours])

"""Nodes that join by a token over TLS: what lets them in, what does not, and how they leave."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from api_scene import OTHER, SPEC, TOKEN, Api
from fastapi.testclient import TestClient
from stage import GPT

from cordee.answers.nodes import Joined, JoinTokenView
from cordee.client import Client
from cordee.control.agents.committed import CommittedLog
from cordee.control.api import create_app
from cordee.control.home import Home
from cordee.control.listen import Listener
from cordee.control.secret_store import SecretStore
from cordee.control.store.credentials import Credentials
from cordee.errors import (
    ForbiddenError,
    HomeUnsuitableError,
    InputError,
    NameTakenError,
    NodeLeftError,
    NotFoundError,
    SpecError,
    TokenError,
    TooLargeError,
)
from cordee.events import Node, NodeDown, NodeUp
from cordee.ids import JobId
from cordee.servers import read_join_token, write_join_token

US_PER_HOUR = 3_600_000_000
TOKEN_HEADER = {"Authorization": f"Bearer {TOKEN}"}


class Place(NamedTuple):
    """A server that other machines reach, and one of its users there."""

    api: Api
    remote: Client

    def token(self, *, uses: int = 1, for_s: int = 3600) -> JoinTokenView:
        return self.api.client.join_token(uses=uses, for_s=for_s)

    def join(self, token: JoinTokenView, name: str, machine: str = "") -> Joined:
        return Client.join(token.url, token.token, name=name, machine=machine or f"host-{name}/1")

    def as_join_token(self, joined: Joined) -> str:
        return write_join_token(joined.token, self.remote.address.fingerprint)

    def as_node(self, joined: Joined) -> Client:
        return Client(url=joined.servers[0], token=joined.token, fingerprint=self.remote.address.fingerprint)

    def report_up(self, name: str) -> None:
        node = Node(name=name, epoch=1, gpu_name="slot", gpus=4)
        self.api.scene.agents.report(NodeUp(at_us=self.api.scene.time.us, node=node), f"node/{name}/1")
        self.api.scene.control.tick()

    def report_down(self, name: str) -> None:
        down = NodeDown(at_us=self.api.scene.time.us, node=name, epoch=1, why="it left")
        self.api.scene.agents.report(down, f"server/{name}/1")
        self.api.scene.control.tick()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    yield from _place(tmp_path_factory.mktemp("place"))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    yield from _place(tmp_path)


def _place(folder: Path) -> Iterator[Place]:
    public = Listener.of(Home(folder), "127.0.0.1:0", None, None)
    assert public is not None
    api = Api(folder, public)
    with Client(url=public.url, token=TOKEN, fingerprint=public.fingerprint) as remote:
        yield Place(api, remote)
    api.close()


def test_a_node_joins_and_its_token_is_kept_as_a_hash(shared: Place) -> None:
    token = shared.token()
    assert token.url == shared.remote.url
    joined = shared.join(token, "gpu-1")
    assert (joined.node, joined.servers) == ("gpu-1", [shared.remote.url])
    assert shared.api.operations.members.node_of(joined.token) == "gpu-1"
    kept = b"".join(path.read_bytes() for path in shared.api.operations.home.glob("cordee.db*"))
    assert b"gpu-1" in kept
    for secret in (joined.token, *read_join_token(token.token)[:1]):
        assert secret.encode() not in kept


def test_a_join_token_is_good_for_so_many_nodes(shared: Place) -> None:
    token = shared.token(uses=2)
    for name in ("gpu-2", "gpu-3"):
        assert shared.join(token, name)
    with pytest.raises(TokenError, match=r"(?s)used up: it was good for 2 nodes.*cordee nodes token"):
        shared.join(token, "gpu-4")


def test_a_join_token_expires(shared: Place) -> None:
    token = shared.token(for_s=3600)
    shared.api.scene.time.us += 3 * US_PER_HOUR
    with pytest.raises(TokenError, match=r"(?s)the join token expired 2h ago.*cordee nodes token"):
        shared.join(token, "gpu-5")


def test_a_join_token_that_nobody_issued(shared: Place) -> None:
    token = shared.token()
    with pytest.raises(TokenError, match="the join token is unknown to this server"):
        shared.join(token.model_copy(update={"token": "x" + token.token}), "gpu-5")
    for text in ("", "abc.", ".abc", "abc.def"):
        with pytest.raises(InputError, match=r"(?s)not a join token.*copy the whole line"):
            read_join_token(text)


def test_a_name_belongs_to_one_machine(shared: Place) -> None:
    token = shared.token(uses=3)
    first = shared.join(token, "gpu-6", "host-a/1")
    with pytest.raises(NameTakenError, match=r"(?s)gpu-6 is taken: host-a joined as it .*--name.*nodes leave gpu-6"):
        shared.join(token, "gpu-6", "host-b/1")
    with pytest.raises(NameTakenError, match="local is taken: the server starts that node itself"):
        shared.join(token, "local")
    again = shared.join(token, "gpu-6", "host-a/1")
    members = shared.api.operations.members
    assert (members.node_of(first.token), members.node_of(again.token)) == (None, "gpu-6")
    assert shared.join(token, "gpu-7"), "refusals use nothing up"


@pytest.mark.parametrize("name", ["", "-x", "a/b", "a b", "x" * 64])
def test_a_name_that_is_none(shared: Place, name: str) -> None:
    with pytest.raises(InputError, match=r"body\.name"):
        shared.join(shared.token(), name)


def test_the_token_of_a_node_is_good_for_nothing_else(shared: Place) -> None:
    joined = shared.join(shared.token(), "gpu-8")
    with shared.as_node(joined) as node:
        with pytest.raises(ForbiddenError, match="this token is node gpu-8's, not gpu-2's"):
            node.leave("gpu-2", as_node=True)
        with pytest.raises(ForbiddenError, match="this token is node gpu-8's, no user's"):
            node.jobs()
        with pytest.raises(TokenError, match="the join token is unknown"):
            node.join(node.url, shared.as_join_token(joined), name="gpu-9", machine="host/9")
    with pytest.raises(TokenError, match="the token is no node's"):
        shared.remote.leave("gpu-8", as_node=True)


def test_only_the_operator_lets_nodes_in_and_out(shared: Place) -> None:
    shared.join(shared.token(), "gpu-10")
    with Client(url=shared.remote.url, token=OTHER, fingerprint=shared.remote.address.fingerprint) as bob:
        with pytest.raises(ForbiddenError, match=r"(?s)bob may not let nodes in or out.*ask ada"):
            bob.join_token()
        with pytest.raises(ForbiddenError):
            bob.leave("gpu-10")


def test_a_server_on_loopback_lets_no_machine_in(api: Api) -> None:
    with pytest.raises(InputError, match=r"(?s)listens on loopback only.*cordee up --listen"):
        api.client.join_token()


def test_a_node_leaves_when_its_attempts_have_left(place: Place) -> None:
    joined = place.join(place.token(uses=2), "gpu-1")
    dismissed: list[str] = []
    object.__setattr__(place.api.operations.members, "dismiss", dismissed.append)
    place.report_up("gpu-1")
    place.remote.cordon("local", why="not today")
    place.remote.submit(SPEC)
    place.api.scene.control.tick()
    with place.as_node(joined) as node:
        assert node.leave("gpu-1", as_node=True).attempts == 1
        shown = next(each for each in place.remote.nodes() if each.name == "gpu-1")
        assert (shown.drains, shown.cordoned_by, shown.cordon_why) == (True, "node gpu-1", "it leaves")
        place.remote.stop(place.remote.jobs()[0].job_id, now=True)
        assert not dismissed
    assert place.remote.leave("gpu-1").attempts == 1, "until its ranks have ended"


def test_a_node_that_has_left_is_not_listed_and_may_come_back(place: Place) -> None:
    joined = place.join(place.token(), "gpu-1")
    dismissed: list[str] = []
    object.__setattr__(place.api.operations.members, "dismiss", dismissed.append)
    place.report_up("gpu-1")
    assert place.remote.leave("gpu-1").attempts == 0
    assert dismissed == ["gpu-1"]
    with pytest.raises(NodeLeftError, match="gpu-1 has left"):
        place.api.operations.members.node_of(joined.token)
    with place.as_node(joined) as node, pytest.raises(TokenError, match=r"(?s)gpu-1 has left.*cordee nodes token"):
        node.leave("gpu-1", as_node=True)
    assert [node.name for node in place.remote.nodes()] == ["gpu-1", "local"], "its agent still runs"
    place.report_down("gpu-1")
    assert [node.name for node in place.remote.nodes()] == ["local"]
    assert place.join(place.token(), "gpu-1", "another-host/1"), "the name is free again"
    place.report_up("gpu-1")
    assert place.remote.nodes()[0].cordoned_by is None


def test_a_node_that_cannot_leave(shared: Place) -> None:
    with pytest.raises(InputError, match=r"(?s)local did not join.*cordee nodes drain"):
        shared.remote.leave("local")
    with pytest.raises(NotFoundError, match="there is no node 'gpu-99'"):
        shared.remote.leave("gpu-99")


# -- secrets ---------------------------------------------------------------------------------------------------------


def test_a_remote_secret_is_kept_encrypted_until_the_job_ends(place: Place) -> None:
    value, home, secrets = "hf_this-is-secret", place.api.operations.home, place.api.operations.secrets
    spec = SPEC | {"secrets": ["HF_TOKEN"]}
    place.remote.submit(spec, environ={"HF_TOKEN": value}, job_id=GPT)
    assert not (home / "secrets").exists()
    assert secrets.of(GPT, ["HF_TOKEN", "OTHER"]) == {"HF_TOKEN": value}
    kept = b"".join(path.read_bytes() for path in home.glob("cordee.db*"))
    assert b"HF_TOKEN" in kept
    assert value.encode() not in kept
    said = place.remote.job(GPT).model_dump_json() + "".join(map(str, place.remote.events()))
    assert value not in said
    place.remote.stop(GPT, now=True)
    place.api.scene.control.tick()
    assert place.remote.job(GPT).ended_us is not None
    assert secrets.of(GPT, ["HF_TOKEN"]) == {}


def test_two_jobs_have_secrets_of_their_own_before_those_of_the_home(place: Place) -> None:
    spec, secrets = SPEC | {"secrets": ["KEY"]}, place.api.operations.secrets
    jobs = [JobId(f"gpt-{letter * 6}") for letter in "bcd"]
    place.api.client.submit(spec, environ={"KEY": "of-the-home"}, job_id=jobs[0])
    place.remote.submit(spec, environ={"KEY": "one"}, job_id=jobs[1])
    place.remote.submit(spec, environ={"KEY": "two"}, job_id=jobs[2])
    assert [secrets.of(job, ["KEY"])["KEY"] for job in jobs] == ["of-the-home", "one", "two"]


def test_a_refused_job_leaves_no_secret(place: Place) -> None:
    spec = SPEC | {"secrets": ["KEY"]}
    with pytest.raises(TooLargeError):
        place.remote.submit(spec | {"gpus": 99}, environ={"KEY": "value"}, job_id=GPT)
    assert place.api.operations.secrets.of(GPT, ["KEY"]) == {}
    body = {"job_id": GPT, "spec": SPEC, "secrets": {"KEY": "value"}}
    with pytest.raises(SpecError, match="the secret KEY was sent, but the job does not name it"):
        place.remote._ask(Joined, "POST", "/v1/jobs", json=body)


def test_secrets_that_came_unencrypted_are_refused(place: Place) -> None:
    """As through a proxy that ends TLS elsewhere: the client could not know."""
    app = create_app(place.api.operations)
    body = {"job_id": GPT, "spec": SPEC | {"secrets": ["KEY"]}, "secrets": {"KEY": "value"}}
    far = TestClient(app, base_url="http://head:8470", client=("192.0.2.7", 5000), headers=TOKEN_HEADER)
    answer = far.post("/v1/jobs", json=body)
    assert answer.status_code == 422
    assert "came unencrypted from 192.0.2.7" in answer.json()["error"]["message"]
    assert place.api.operations.secrets.of(GPT, ["KEY"]) == {}
    near = TestClient(app, base_url="http://127.0.0.1", client=("127.0.0.1", 5000), headers=TOKEN_HEADER)
    assert near.post("/v1/jobs", json=body).status_code == 201


def test_a_home_with_another_token_opens_no_secret(place: Place) -> None:
    place.remote.submit(SPEC | {"secrets": ["KEY"]}, environ={"KEY": "value"}, job_id=GPT)
    store, home = place.api.scene.store, place.api.operations.home
    assert SecretStore(home, Credentials(store), TOKEN).of(GPT, ["KEY"]) == {"KEY": "value"}
    other = SecretStore(home, Credentials(store), "another-token-of-another-home")
    with pytest.raises(
        HomeUnsuitableError, match=r"(?s)token cannot decrypt the secret KEY of gpt.*submit the job again"
    ):
        other.of(GPT, ["KEY"])
    assert CommittedLog(store, other).secrets(GPT, ["KEY"]) == {}, "other jobs start all the same"

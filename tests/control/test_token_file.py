"""The file `tokens` is read again when it has changed; a token that was taken out is void at once."""

from pathlib import Path

import httpx
import pytest
from api_scene import Api

from cordee.control.home import Home
from cordee.control.token_file import TokenFile
from cordee.errors import HomeUnsuitableError

BOB, YUKI = "a-token-of-bob-0123456789", "a-token-of-yuki-0123456789"


def write(path: Path, *lines: str, mode: int = 0o600) -> None:
    path.write_text("".join(f"{line}\n" for line in lines))
    path.chmod(mode)


def test_a_token_is_void_when_it_is_taken_out_and_good_when_it_is_put_in(
    api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, changes = Home(tmp_path / "home"), list[list[str]]()
    path = home.path / "tokens"
    write(path, f"bob {BOB} viewer")
    tokens = TokenFile(home, "ada")
    tokens.on_change = lambda: changes.append([each.name for each in tokens.values()])
    api.operations.owners = tokens

    def answered(token: str) -> int:
        return httpx.get(f"{api.url}/v1/jobs", headers={"Authorization": f"Bearer {token}"}, timeout=60).status_code

    assert (answered(BOB), answered(YUKI), answered(home.token())) == (200, 401, 200)
    write(path, f"yuki {YUKI} user=vision until=2026-12-31")
    assert (answered(BOB), answered(YUKI), answered(home.token())) == (401, 200, 200)
    assert changes == [["ada", "yuki"]] and next(iter(tokens)) == home.token()
    for damaged in ([f"yuki {YUKI} emperor"], ["yuki short"]):
        write(path, *damaged)
        assert (answered(BOB), answered(YUKI)) == (401, 200), "the last good one stands"
        assert "the file of tokens cannot be used" in (said := capsys.readouterr().out) and YUKI not in said
    write(path, f"bob {BOB}", mode=0o644)
    assert (answered(BOB), answered(YUKI)) == (401, 200)
    path.chmod(0o600)
    assert (answered(BOB), answered(YUKI)) == (200, 401)
    path.unlink()
    assert (answered(BOB), answered(home.token())) == (401, 200)
    assert changes == [["ada", "yuki"], ["ada", "bob"], ["ada"]]


def test_a_server_does_not_start_with_a_file_that_it_cannot_use(tmp_path: Path) -> None:
    home = Home(tmp_path)
    write(home.path / "tokens", "bob short")
    with pytest.raises(HomeUnsuitableError, match="line 1"):
        TokenFile(home, "ada")

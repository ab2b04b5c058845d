"""The file `oidc.toml` of a server's home: the identity provider with which people log in, and their roles by group."""

import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from cordee.control.roles import Grant, grants_of
from cordee.errors import InputError
from cordee.servers import is_loopback

FILE = "oidc.toml"


def _https(text: str) -> str:
    parts = urlsplit(text)
    if not parts.hostname or (parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.hostname))):
        raise ValueError(f"{text!r} is not an https URL")
    return text.rstrip("/")


def _terms(text: str) -> str:
    try:
        grants_of(text.split())
    except ValueError as error:
        raise ValueError(
            f"{error.args[0]!r} is no role: write viewer, user, operator or admin, or user=QUEUE"
        ) from None
    return text


Https = Annotated[str, AfterValidator(_https)]
Terms = Annotated[str, AfterValidator(_terms)]


class OidcSettings(BaseModel):
    """An OpenID provider, and what its users may do here.

    Attributes:
        issuer: its URL, under which `.well-known/openid-configuration` lies.
        client_id: the name under which this server is registered there.
        client_secret_file, client_secret_env: where the secret is; neither for a client without one.
        name: of the provider, on the page of the login.
        url: the address of these pages as browsers know it, for the redirect; by default that of the request.
        scopes: what is asked for.
        user: the claim that names a person.
        groups: the claim that lists a person's groups.
        domains: of the addresses of e-mail that may log in; empty: any.
        short_names: whether people are named by what stands before the @; there must be one domain then.
        roles: the roles that a group gives, as in the file `tokens`.
        everyone: the roles of everyone who may log in; empty: whoever is in no group with roles may not.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    issuer: Https
    client_id: Annotated[str, Field(min_length=1)]
    client_secret_file: Path | None = None
    client_secret_env: str | None = None
    name: Annotated[str, Field(min_length=1, max_length=60)] = "single sign-on"
    url: Https | None = None
    scopes: list[str] = ["openid", "email", "profile"]
    user: str = "email"
    groups: str = "groups"
    domains: list[str] = []
    short_names: bool = False
    roles: dict[str, Terms] = {}
    everyone: Terms | None = None

    @model_validator(mode="after")
    def _is_safe(self) -> "OidcSettings":
        if self.client_secret_file is not None and self.client_secret_env is not None:
            raise ValueError("give one of client_secret_file and client_secret_env")
        if self.short_names and (len(self.domains) != 1 or self.user != "email"):
            raise ValueError('short_names needs user = "email" and one domain, or two people may have one name')
        if self.domains and self.user != "email":
            raise ValueError('domains needs user = "email"')
        if "openid" not in self.scopes:
            raise ValueError("scopes must contain openid")
        if not self.roles and self.everyone is None:
            raise ValueError("nobody could log in: give roles by group, or everyone")
        return self

    @property
    def id(self) -> str:
        """Return the name of these settings in sessions."""
        return f"oidc {self.client_id} {self.issuer}"

    def secret(self) -> str | None:
        """Return the client's secret.

        Raises:
            InputError: it is not there.
        """
        if self.client_secret_env is not None:
            found = os.environ.get(self.client_secret_env)
            if not found:
                raise InputError(
                    f"{FILE}: the environment has no {self.client_secret_env}", hint="set it for `cordee up`"
                )
            return found
        if self.client_secret_file is None:
            return None
        try:
            return self.client_secret_file.read_text().strip()
        except OSError as error:
            raise InputError(
                f"{FILE}: {self.client_secret_file} cannot be read: {error.strerror}", hint="write the secret there"
            ) from error

    def grants(self, groups: Sequence[str]) -> tuple[Grant, ...]:
        """Return the roles of somebody in these groups; empty: that one may not log in."""
        terms = [self.roles[group] for group in groups if group in self.roles]
        if self.everyone is not None:
            terms.append(self.everyone)
        return tuple(dict.fromkeys(grant for each in terms for grant in grants_of(each.split())))


def read_oidc(home: Path) -> OidcSettings | None:
    """Return the settings of a home; None without such a file.

    Raises:
        InputError: the file cannot be used.
    """
    path = home / FILE
    try:
        return OidcSettings(**tomllib.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}", hint="write it as TOML") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        why = first["msg"].removeprefix("Value error, ")
        hint = "keys: " + ", ".join(OidcSettings.model_fields)
        raise InputError(f"{path}: {where + ': ' if where else ''}{why}", hint=hint) from error

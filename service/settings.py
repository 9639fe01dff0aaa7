"""Settings of the control plane, read from `CAIRN_*` environment variables."""

import ipaddress
import os
import re
from collections.abc import Iterable
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import pydantic_settings
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from cairn.service.errors import SettingsError
from cairn.service.policies import Policy
from cairn.service.schemas import NAME_PATTERN, Scope
from cairn.service.state_folders import CATALOG, JOBS, folder_of_any, folder_of_store
from cairn.storage.errors import StorageError
from cairn.storage.store.disk.confinement import real_prefix, with_confinement
from cairn.storage.store.uri import StoreURI, parse_uri

DEFAULT_ROOT = "default"
Networks = tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]


class Grant(BaseModel):
    """Grant to callers whose token has a certain value of a claim."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scope: Scope
    roots: tuple[str, ...] | None = Field(default=None, min_length=1)


class Settings(BaseSettings):
    """Settings of the control plane, which do not change while it runs."""

    model_config = SettingsConfigDict(env_prefix="CAIRN_", frozen=True, extra="forbid")

    root: str = Field(
        default="./cairn-store", description="Store folder or URI of the root `default`."
    )
    roots: dict[str, str] = Field(
        default_factory=dict,
        description='More roots, as a JSON object {"name": "uri"}; `default` here replaces ROOT.',
    )
    adopt_from: dict[str, tuple[str, ...]] = Field(
        default_factory=dict,
        description="Folders outside a root whose checkpoints its runs may list where they lie: a "
        'JSON object {"name of the root": ["/data/old", "gs://bucket/old"]}. A run that names '
        "others in its records can't have them opened.",
    )
    roots_within: tuple[str, ...] | None = Field(
        default=None,
        description='Where roots may lie that are added while the server runs: a JSON list ["/data"'
        ', "gs://bucket/teams"]; empty list: nowhere; none: wherever the server may read.',
    )
    data_dir: Path = Field(
        default_factory=Path,
        description="Folder of the SQLite databases; made with mode 700 where it is missing, "
        "and they with 600.",
    )
    database_url: str = Field(
        default="", repr=False, description="Catalog; empty: SQLite in the data folder."
    )
    jobs_database_url: str = Field(
        default="", repr=False, description="Job engine; empty: SQLite in the data folder."
    )
    auth: Literal["loopback", "keys"] = Field(
        default="loopback",
        description="Who may ask: whoever is on this machine, or whoever has a key.",
    )
    host: str = Field(
        default="127.0.0.1", description="Address to listen on; without keys, loopback only."
    )
    auto_upgrade: bool = Field(
        default=False,
        description="Bring PostgreSQL's tables to this version at the start; else `cairn upgrade`.",
    )
    port: int = Field(
        default=8321, ge=0, le=65535, description="Port to listen on; 0: any free one."
    )
    scan_seconds: float = Field(
        default=5.0,
        ge=0,
        allow_inf_nan=False,
        description="How often the store is looked at for what nobody announced; 0: never.",
    )
    worker: bool = Field(
        default=True, description="Run a job worker inside the server; else `cairn worker` does."
    )
    metrics_open: bool = Field(
        default=False, description="With keys: `/metrics` needs none, for a scraper without."
    )
    rate_limit: float = Field(
        default=200.0,
        ge=0,
        allow_inf_nan=False,
        description="With keys: requests a second that one caller may make, twice as many at once; "
        "0: any number.",
    )
    oidc_issuer: str = Field(
        default="", description="With keys: tokens of this OpenID Connect issuer (https) count too."
    )
    oidc_audience: str = Field(
        default="",
        description="What such a token is for: the name that the issuer has for Cairn; empty: no "
        "bearer tokens.",
    )
    oidc_client_id: str = Field(
        default="",
        description="Client id of Cairn at the issuer: people sign in there with their browser; "
        "empty: they don't.",
    )
    oidc_client_secret: str = Field(
        default="", repr=False, description="Its secret; empty: a public client."
    )
    oidc_scopes: str = Field(
        default="openid profile email",
        description="Scopes that such a sign-in asks for; the ID token has to have the claims "
        "below.",
    )
    oidc_claim: str = Field(
        default="groups", description="Its claim that says what its bearer is granted."
    )
    oidc_name: str = Field(
        default="sub", description="Its claim that names its bearer in the audit trail."
    )
    oidc_grants: dict[str, Grant] = Field(
        default_factory=dict,
        description="What is granted for each value of that claim: a JSON object "
        '{"value": {"scope": "read", "roots": ["default"]}}; without `roots`, in all.',
    )
    session_hours: float = Field(
        default=12.0,
        gt=0,
        le=24 * 365,
        allow_inf_nan=False,
        description="With keys: how long a browser stays signed in, in hours.",
    )
    policies: tuple[Policy, ...] = Field(
        default=(),
        description="What the servers do to runs by themselves, and which promotions they refuse: "
        'a JSON list of {"kind": "schedule", "name": "nightly", "cron": "0 3 * * *", "action": '
        '"verify"}; `kind` is schedule, retention, automation or gate; `root` and `run` are '
        "patterns. They win over the policies that roots have.",
    )
    executor_id: str = Field(
        default="local",
        min_length=1,
        max_length=128,
        description="Name of this job worker; keep it the same over restarts to resume its jobs.",
    )

    webhook_networks: str = Field(
        default="",
        description="Networks that are not public and that webhooks may be in, such as "
        "`10.0.0.0/8, fd00::/8`; there without TLS too.",
    )
    event_days: float = Field(
        default=30.0,
        ge=0,
        le=36500,
        allow_inf_nan=False,
        description="How long events and their deliveries are kept, in days; 0: for good. The last "
        "one of each run stays.",
    )
    worker_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port where `cairn worker` answers `/metrics` and `/healthz`, on the address "
        "of HOST; 0: any free one; empty: none.",
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="How a line of the log looks: `text` or `json`."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info",
        description="From which level on lines are written: `debug`, `info`, `warning`, `error`. "
        "At `info` every request has one.",
    )

    @field_validator("log_format", "log_level", mode="before")
    @classmethod
    def _any_case(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    @field_validator("webhook_networks")
    @classmethod
    def _known_networks(cls, value: str) -> str:
        try:
            _networks(value)
        except ValueError as exc:
            raise SettingsError(
                f"CAIRN_WEBHOOK_NETWORKS: expected networks such as `10.0.0.0/8, fd00::/8`, found "
                f"{value!r}: {exc}"
            ) from exc
        return value

    @field_validator("worker_port", mode="before")
    @classmethod
    def _no_port(cls, value: object) -> object:
        return None if value == "" else value

    @model_validator(mode="after")
    def _loopback_only(self) -> "Settings":
        if self.auth == "loopback" and not is_loopback(self.host):
            raise SettingsError(
                f"CAIRN_HOST: expected a loopback address (127.0.0.1, ::1 or localhost), found "
                f"{self.host!r}. Without keys, whoever reaches the server may do everything: make "
                "one with `cairn keys create --name NAME --scope admin` and set CAIRN_AUTH=keys, "
                "or put an authenticating proxy or an SSH tunnel in front of a loopback address."
            )
        return self

    @field_validator("policies")
    @classmethod
    def _distinct(cls, value: tuple[Policy, ...]) -> tuple[Policy, ...]:
        if len({(policy.kind, policy.name) for policy in value}) < len(value):
            raise ValueError("expected names that differ among the policies of a kind")
        return value

    @model_validator(mode="after")
    def _whole_issuer(self) -> "Settings":
        if not self.oidc_issuer:
            if self.oidc_client_id:
                raise SettingsError(
                    "CAIRN_OIDC_CLIENT_ID: expected CAIRN_OIDC_ISSUER beside it, found none. Name "
                    "the issuer, as its discovery document has it."
                )
            return self
        self.check_issuer_url(self.oidc_issuer)
        missing = [
            f"CAIRN_{name}"
            for name, value in (
                ("AUTH=keys", self.auth == "keys"),
                (
                    "OIDC_AUDIENCE or CAIRN_OIDC_CLIENT_ID",
                    self.oidc_audience or self.oidc_client_id,
                ),
                ("OIDC_GRANTS", self.oidc_grants),
            )
            if not value
        ]
        roots = {DEFAULT_ROOT, *self.roots}
        odd = {name for grant in self.oidc_grants.values() for name in grant.roots or ()} - roots
        if missing or odd:
            wrong = [*missing, *(f"CAIRN_ROOTS: root {name!r}" for name in sorted(odd))]
            raise SettingsError(
                f"CAIRN_OIDC_ISSUER: expected {', '.join(wrong)} beside it, found none."
            )
        return self

    def check_issuer_url(self, url: object) -> str:
        """Return the URL of an issuer if nobody in the network can change its answers.

        Raises:
            SettingsError: The URL is neither https nor of this machine.
        """
        text = url if isinstance(url, str) else ""
        try:
            split = urlsplit(text)
            local = split.scheme == "http" and is_loopback(split.hostname or "")
        except ValueError:  # an unclosed bracket
            split, local = urlsplit(""), False
        if not split.hostname or not (split.scheme == "https" or local) or split.username:
            raise SettingsError(
                f"CAIRN_OIDC_ISSUER: expected https://, or http:// on this machine, found {url!r}"
            )
        return text

    @field_validator("root", "roots")
    @classmethod
    def _readable_roots(
        cls, value: str | dict[str, str], info: ValidationInfo
    ) -> str | dict[str, str]:
        named = value if isinstance(value, dict) else {DEFAULT_ROOT: value}
        for name, uri in named.items():
            if re.fullmatch(NAME_PATTERN, name) is None:
                raise SettingsError(
                    f"CAIRN_{str(info.field_name).upper()}: root {name!r}: expected a name of a "
                    "letter or digit, then up to 127 letters, digits, '.', '_' or '-'. Choose "
                    "another one."
                )
            _require_uri(uri, f"CAIRN_{str(info.field_name).upper()}: root {name!r} = {uri!r}")
        return value

    @field_validator("adopt_from")
    @classmethod
    def _readable_sources(cls, value: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        for name, folders in value.items():
            for uri in folders:
                _require_uri(uri, f"CAIRN_ADOPT_FROM: root {name!r}: {uri!r}")
        return value

    @field_validator("roots_within")
    @classmethod
    def _readable_folders(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for uri in value or ():
            _require_uri(uri, f"CAIRN_ROOTS_WITHIN: {uri!r}")
        return value

    @model_validator(mode="after")
    def _place_databases(self) -> "Settings":
        if "data_dir" in self.model_fields_set:
            folder = self.data_dir.expanduser().absolute()
        else:
            folder = folder_of_store(str(self.root_uris[DEFAULT_ROOT]))
        chosen: dict[str, object] = {"data_dir": folder}
        if not self.database_url:
            chosen["database_url"] = f"sqlite:///{folder / CATALOG}"
        if not self.jobs_database_url:
            chosen["jobs_database_url"] = f"sqlite:///{folder / JOBS}"
        for name, value in chosen.items():
            # The model is frozen: only this method fills in its defaults.
            object.__setattr__(self, name, value)
        if unknown := sorted({*self.adopt_from} - {*self.root_uris}):
            raise SettingsError(
                f"CAIRN_ADOPT_FROM: expected roots of CAIRN_ROOT and CAIRN_ROOTS, found "
                f"{', '.join(map(repr, unknown))}. Name one of these; a root that is added while "
                "the server runs has an `adopt_from` of its own."
            )
        for name, uri in self.root_uris.items():
            assert uri.confinement is not None
            for place in uri.confinement.sources:
                if (setting := self.database_in(place)) is not None:
                    raise SettingsError(
                        f"{setting}: expected a place outside of all roots, and of what they adopt "
                        f"from, found one in {place} of root {name!r}: whoever writes there could "
                        "have the databases read. Give another."
                    )
        return self

    def database_in(self, place: StoreURI) -> str | None:
        """Return the setting that has a database or the data folder inside `place`; None: none."""
        files = {
            "CAIRN_DATA_DIR": str(self.data_dir),
            "CAIRN_DATABASE_URL": _sqlite_file(self.database_url),
            "CAIRN_JOBS_DATABASE_URL": _sqlite_file(self.jobs_database_url),
        }
        for setting, file in files.items():
            if file is None or place.scheme != "file":
                continue
            if f"{os.path.realpath(file)}/".startswith(real_prefix(place)):
                return setting
        return None

    @property
    def root_uris(self) -> dict[str, StoreURI]:
        """Every root of the settings by name, `default` first.

        Each is confined to its own folder and to the folders in `adopt_from`.
        """
        named = {DEFAULT_ROOT: self.root, **self.roots}
        return {
            name: with_confinement(parse_uri(uri), map(parse_uri, self.adopt_from.get(name, ())))
            for name, uri in named.items()
        }

    @property
    def session_lifetime(self) -> timedelta:
        """Longest time that a browser stays signed in."""
        return timedelta(hours=self.session_hours)

    @property
    def needs_key(self) -> bool:
        """True if others can reach the server, and only keys tell it who they are."""
        return not self.oidc_issuer and not is_loopback(self.host)

    def policies_without_roots(self, added: Iterable[str]) -> list[str]:
        """Describe the policies that match no root.

        Args:
            added: Names of the roots that were added at run time.
        """
        roots = {DEFAULT_ROOT, *self.roots, *added}
        return [
            f"CAIRN_POLICIES: {policy.kind} {policy.name!r}: root {policy.root!r}"
            for policy in self.policies
            if not any(fnmatchcase(root, policy.root) for root in roots)
        ]

    @property
    def networks(self) -> Networks:
        """Private networks that webhooks may be in."""
        return _networks(self.webhook_networks)

    def prepare(self) -> None:
        """Create the data folder.

        Raises:
            SettingsError: The folder cannot be created, or not be written to.
        """
        try:
            self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            raise SettingsError(
                f"CAIRN_DATA_DIR: {self.data_dir} cannot be made: {exc}. Point it at a folder "
                "that this user may write."
            ) from exc


def load_settings(**options: Any) -> Settings:
    """Load the settings of the environment; `options` that are not None override them.

    Raises:
        SettingsError: A setting is invalid; the message names every such variable.
    """
    try:
        return Settings(**{name: value for name, value in options.items() if value is not None})
    except ValidationError as exc:
        problems = "; ".join(
            f"CAIRN_{'.'.join(map(str, error['loc'])).upper()}: {error['msg']}, "
            f"found {error['input']!r}"
            for error in exc.errors()
        )
        raise SettingsError(f"{problems}. `cairn serve --help` lists what can be set.") from exc
    except pydantic_settings.SettingsError as exc:  # a variable is not JSON
        name = next((setting for setting in _JSON if f'"{setting.lower()}"' in str(exc)), "ROOTS")
        raise SettingsError(
            f"CAIRN_{name}: expected a JSON {_JSON[name]}, found "
            f"{os.environ.get(f'CAIRN_{name}', '')!r} ({exc.__cause__})"
        ) from exc


def load_administered(data_dir: Path | None) -> tuple[Settings, str | None]:
    """Load the settings for an administrator's command, even if the caller names no store.

    Args:
        data_dir: Data folder of the server; None: that of the named store, or the only one.

    Returns:
        The settings; and the store of the data folder if this function chose another store than
        that of the settings, else None.

    Raises:
        SettingsError: See `load_settings`; or there are several data folders to choose from.
    """
    settings, owner = load_settings(data_dir=data_dir), None
    if not {"data_dir", "root", "roots"} & settings.model_fields_set:
        folder, owner = folder_of_any(str(settings.root_uris[DEFAULT_ROOT]))
        settings = load_settings(data_dir=folder)
    return settings, owner


def _sqlite_file(url: str) -> str | None:
    """Return the path of a SQLite database; None: the database is on a server, or in memory."""
    scheme, _, rest = url.partition("://")
    file = rest.removeprefix("/").partition("?")[0].removeprefix("file:")
    return file if scheme.partition("+")[0] == "sqlite" and file not in ("", ":memory:") else None


_JSON: Final = {
    "ROOTS": 'object {"name": "uri"}',
    "ADOPT_FROM": 'object {"default": ["/data/old"]}',
    "ROOTS_WITHIN": 'list ["/data", "gs://bucket/teams"]',
    "OIDC_GRANTS": 'object {"value": {"scope": "read"}}',
    "POLICIES": 'list [{"kind": "schedule", "name": "nightly", "cron": "0 3 * * *", '
    '"action": "verify"}]',
}


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Return whether a host name or address, perhaps in brackets, is of this machine only."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def _require_uri(uri: str, where: str) -> None:
    try:
        parse_uri(uri)
    except StorageError as exc:
        raise SettingsError(f"{where}: {exc}") from exc


def _networks(text: str) -> Networks:
    return tuple(ipaddress.ip_network(network) for network in text.replace(",", " ").split())

"""Verification of an OpenID Connect issuer's tokens, and the grants of their groups.

Source: OpenID Connect Discovery 1.0; RFC 7517 (keys), RFC 7519 (tokens), RFC 8725 (what to refuse).
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import httpx
import jwt

from cairn.service.access.callers import Caller
from cairn.service.errors import ForbiddenError, NotReadyError, SettingsError, UnauthenticatedError
from cairn.service.schemas import Scope
from cairn.service.settings import Settings

logger = logging.getLogger(__name__)

LEEWAY_SECONDS: Final = 60
"""Largest accepted difference between the clocks of issuer and server."""

FRESH_SECONDS: Final = 300.0
"""Largest age, in seconds, of the issuer's keys that are used without asking the issuer again.

While the issuer answers, a withdrawn key is accepted for this long at most.
"""

KEPT_SECONDS: Final = 3600.0
"""Largest age, in seconds, of keys that are used while the issuer does not answer."""

RETRY_SECONDS: Final = 10.0
"""Shortest time between two requests to the issuer, however many tokens need one."""

ANSWER_SECONDS: Final = 5.0
MAX_ANSWER_BYTES: Final = 1 << 20
MAX_NAME_LENGTH: Final = 200

_ALGORITHMS: Final[Mapping[tuple[str, str | None], Sequence[str]]] = {
    ("RSA", None): ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",),
}
"""Signature algorithms by type and curve of a public key. Shared secrets (HS256) are not
accepted."""


class Issuer:
    """Verifier of one issuer's tokens, with the keys that the issuer publishes.

    Safe to share between threads.

    Args:
        settings: Settings that name the issuer.
        clock: Monotonic clock, in seconds.
        transport: HTTP transport, for tests.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._settings = settings
        self._issuer = settings.oidc_issuer
        self._clock = clock
        self._transport = transport
        self._lock = threading.Lock()
        self._document: dict[str, Any] = {}
        self._keys: list[dict[str, Any]] = []
        self._fetched = float("-inf")
        self._asked = float("-inf")
        self._found = ""

    def caller(self, token: str) -> Caller:
        """Verify a bearer token, and return the caller that it vouches for.

        Raises:
            UnauthenticatedError, NotReadyError: See `claims`.
            ForbiddenError: The token is valid, but its bearer is granted nothing.
        """
        return self.granted(self.claims(token, self._settings.oidc_audience))

    def claims(self, token: str, audience: str) -> dict[str, Any]:
        """Verify a token, and return its claims.

        Args:
            token: Token of a caller, or from the issuer's token endpoint.
            audience: Expected audience.

        Raises:
            UnauthenticatedError: The token is not the issuer's, not for the audience, or not valid
                now.
            NotReadyError: The issuer's keys are needed, and the issuer does not answer.
        """
        try:
            header = jwt.get_unverified_header(token)
            key, algorithm = self._key(header)
            claims: dict[str, Any] = jwt.decode(
                token,
                key=jwt.PyJWK(key, algorithm).key,
                algorithms=[algorithm],
                audience=audience,
                issuer=self._issuer,
                leeway=LEEWAY_SECONDS,
                options={
                    "require": ["exp", "iat", "iss", "aud"],
                    "enforce_minimum_key_length": True,
                },
            )
        # PyJWT does not wrap the errors of deep nesting and of times that are out of range.
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError) as exc:
            raise token_refused(str(exc) or type(exc).__name__) from exc
        return claims

    def name(self, claims: Mapping[str, Any]) -> str:
        """Return the name of a token's bearer in the audit trail.

        Raises:
            UnauthenticatedError: The claims have no usable name.
        """
        name = claims.get(self._settings.oidc_name)
        if (
            not isinstance(name, str)
            or not 0 < len(name) <= MAX_NAME_LENGTH
            or not name.isprintable()
        ):
            raise token_refused(
                f"claim {self._settings.oidc_name!r}: expected who it is, of "
                f"{MAX_NAME_LENGTH} characters at most"
            )
        return f"oidc:{name}"

    def granted(self, claims: Mapping[str, Any]) -> Caller:
        """Return the caller with the grants of a token's claims.

        Raises:
            UnauthenticatedError: See `name`.
            ForbiddenError: Nothing is granted for the claims.
        """
        settings, name = self._settings, self.name(claims)
        values = claims.get(settings.oidc_claim)
        values = [values] if isinstance(values, str) else values
        grants = [
            settings.oidc_grants[value]
            for value in (values if isinstance(values, list) else ())
            if isinstance(value, str) and value in settings.oidc_grants
        ]
        if not grants:
            raise ForbiddenError(
                f"expected a token with a value of {settings.oidc_claim!r} that CAIRN_OIDC_GRANTS "
                f"names, found none in that of {name.removeprefix('oidc:')!r}."
            )
        highest = max((grant.scope for grant in grants), key=list(Scope).index)
        allowed = [grant.roots for grant in grants if grant.scope is highest]
        if any(roots is None for roots in allowed):
            return Caller(name, highest)
        return Caller(name, highest, frozenset(root for roots in allowed for root in roots or ()))

    def endpoint(self, name: str) -> str | None:
        """Return the URL of an endpoint in the issuer's discovery document; None: it has none.

        Args:
            name: Name of the endpoint in the document, such as `token_endpoint`.

        Raises:
            NotReadyError: The issuer does not answer, or the URL is not one to trust.
        """
        self._current()
        url = self._document.get(name)
        try:
            return None if url is None else self._settings.check_issuer_url(url)
        except SettingsError as exc:
            raise NotReadyError(f"{name} of {self._issuer}: {exc}") from exc

    def supports(self, name: str) -> Sequence[str]:
        """Return a list of the discovery document, such as `code_challenge_methods_supported`.

        Raises:
            NotReadyError: The issuer does not answer.
        """
        self._current()
        values = self._document.get(name)
        return [str(value) for value in values] if isinstance(values, list) else ()

    def _key(self, header: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """Return the issuer's key that a token's header names, and the algorithm.

        Args:
            header: Header of the token, which is not verified yet.

        Raises:
            UnauthenticatedError: The header is not accepted, or not exactly one key fits.
            NotReadyError: The issuer's keys are needed, and the issuer does not answer.
        """
        kid, algorithm = header.get("kid"), header.get("alg")
        if not isinstance(algorithm, str) or not any(
            algorithm in algorithms for algorithms in _ALGORITHMS.values()
        ):
            raise token_refused(
                f"expected a signature by a key pair, found {str(algorithm)[:32]!r}"
            )
        if "crit" in header:
            raise token_refused("expected no header that has to be understood")
        keys = self._current()
        candidates = [key for key in keys if kid is None or key.get("kid") == kid]
        if not candidates:  # perhaps the issuer has a new key
            keys = self._current(anew=True)
            candidates = [key for key in keys if key.get("kid") == kid]
        fitting = [key for key in candidates if algorithm in _verifies(key)]
        if len(fitting) != 1:
            raise token_refused(
                f"expected a key of the issuer's for {algorithm}, found {len(fitting)} that fit"
            )
        return fitting[0], algorithm

    def _current(self, *, anew: bool = False) -> list[dict[str, Any]]:
        """Return the issuer's keys, from memory or from the issuer.

        The issuer is asked if the keys are old or `anew` is true, at most every `RETRY_SECONDS`.

        Raises:
            NotReadyError: The issuer has not answered for `KEPT_SECONDS`.
        """
        now = self._clock()
        usable = now - self._fetched < KEPT_SECONDS
        fresh = now - self._fetched < FRESH_SECONDS and not anew
        # A thread that still has usable keys does not wait for another thread's request.
        if not fresh and self._lock.acquire(blocking=not usable):
            try:
                self._ask()
            finally:
                self._lock.release()
        if self._clock() - self._fetched >= KEPT_SECONDS:
            raise NotReadyError(
                f"CAIRN_OIDC_ISSUER: expected the keys of {self._issuer}, found: {self._found}. "
                "Keys of this server's own (ck_...) count meanwhile.",
                headers={"Retry-After": str(int(RETRY_SECONDS))},
            )
        return self._keys

    def _ask(self) -> None:
        now = self._clock()
        if now - self._asked < RETRY_SECONDS:
            return
        self._asked = now
        try:
            self._document, self._keys = self._fetch()
            self._fetched = now
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, SettingsError) as exc:
            self._found = str(exc) or type(exc).__name__
            logger.warning("no keys of the issuer %s: %s", self._issuer, self._found)

    def _fetch(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        with httpx.Client(
            timeout=ANSWER_SECONDS, transport=self._transport, trust_env=False
        ) as client:
            place = f"{self._issuer.rstrip('/')}/.well-known/openid-configuration"
            document = _json(client, place)
            if document.get("issuer") != self._issuer:
                raise ValueError(f"{place}: issuer: found {document.get('issuer')!r}")
            keys = _json(client, self._settings.check_issuer_url(document.get("jwks_uri"))).get(
                "keys"
            )
        if not isinstance(keys, list):
            raise ValueError("no list of keys")
        return document, [key for key in keys if isinstance(key, dict) and _verifies(key)]


def _json(client: httpx.Client, url: str) -> dict[str, Any]:
    with client.stream("GET", url, headers={"Accept": "application/json"}) as response:
        response.raise_for_status()
        body = b""
        for chunk in response.iter_bytes():
            body += chunk
            if len(body) > MAX_ANSWER_BYTES:
                raise ValueError(f"{url}: more than {MAX_ANSWER_BYTES} bytes")
    document = httpx.Response(200, content=body).json()
    if not isinstance(document, dict):
        raise ValueError(f"{url}: no JSON object")
    return document


def _verifies(key: Mapping[str, Any]) -> Sequence[str]:
    """Return the algorithms whose signatures a published key may verify."""
    kind, curve = key.get("kty"), key.get("crv")
    algorithms = _ALGORITHMS.get((str(kind), None if kind == "RSA" else str(curve)), ())
    if key.get("use", "sig") != "sig" or "d" in key:  # an encryption key, or a leaked private one
        return ()
    named = key.get("alg")
    return (
        algorithms
        if named is None
        else tuple(algorithm for algorithm in algorithms if algorithm == named)
    )


def token_refused(reason: str) -> UnauthenticatedError:
    """Return the error for a token that is not accepted."""
    return UnauthenticatedError(
        f"expected a token of the issuer that this server trusts, for it and of now; {reason}."
    )

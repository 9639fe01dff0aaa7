"""Sign-in of people at the OpenID Connect issuer: authorization code flow with PKCE.

Authlib makes the requests and reads the answers; `Issuer` verifies ID tokens, as it verifies bearer
tokens. Source: OpenID Connect Core 1.0, sections 3.1 and 12; RFC 7636 (PKCE); OpenID Connect
RP-Initiated Logout 1.0.
"""

import json
import logging
import secrets
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any, Final

import httpx
from authlib.common.urls import add_params_to_uri
from authlib.oauth2 import OAuth2Client, OAuth2Error
from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from cairn.service.access.callers import Caller
from cairn.service.access.oidc import ANSWER_SECONDS, RETRY_SECONDS, Issuer, token_refused
from cairn.service.access.pending_sign_in import PendingSignIn
from cairn.service.errors import NotReadyError, UnauthenticatedError
from cairn.service.settings import Settings

logger = logging.getLogger(__name__)

_RANDOM_BYTES: Final = 32
_KEY_BYTES: Final = 32
_MAX_HINT_LENGTH: Final = 4096
"""Length of an ID token that fits into a URL. Without it, the provider asks whom to sign out."""


@dataclass(frozen=True)
class Person:
    """Person whom the provider has signed in.

    Attributes:
        claims: Verified claims of the ID token.
        id_token: The ID token itself, by which the provider recognizes the session to end.
        refresh_token: Token that has the provider confirm the person again; None: it issued none.
        nonce: Nonce of the sign-in.
    """

    claims: Mapping[str, Any]
    id_token: str
    refresh_token: str | None
    nonce: str

    def seal(self, secret: str) -> str:
        """Return the tokens, encrypted so that only the session's cookie opens them.

        Args:
            secret: Secret of the session's cookie. No database has it.
        """
        tokens = {
            "sub": self.claims["sub"],
            "id_token": self.id_token,
            "refresh_token": self.refresh_token,
            "nonce": self.nonce,
        }
        return _cipher(secret).encrypt(json.dumps(tokens).encode()).decode()


class Provider:
    """Client of the issuer's authorization and token endpoints.

    Its methods may block while they ask the issuer. Safe to share between threads.

    Args:
        settings: Settings that name the issuer and the client.
        issuer: Verifier of the issuer's tokens.
    """

    def __init__(self, settings: Settings, issuer: Issuer) -> None:
        self._settings = settings
        self._issuer = issuer

    @property
    def label(self) -> str:
        """Host name of the issuer, for the sign-in page."""
        return httpx.URL(self._settings.oidc_issuer).host

    def begin(self, redirect_uri: str, target: str) -> tuple[str, PendingSignIn]:
        """Begin a sign-in; return the URL to send the browser to, and what its cookie has to keep.

        Args:
            redirect_uri: URL of this server that the provider sends the browser back to.
            target: Path to redirect to after the sign-in.

        Raises:
            NotReadyError: The issuer does not answer.
        """
        state, nonce, verifier = (secrets.token_urlsafe(_RANDOM_BYTES) for _ in range(3))
        pending = PendingSignIn(state, nonce, verifier, target)
        client = self._client(None)
        url, _ = client.create_authorization_url(
            self._endpoint("authorization_endpoint"),
            state=pending.state,
            code_verifier=pending.verifier,
            nonce=pending.nonce,
            redirect_uri=redirect_uri,
            scope=self._settings.oidc_scopes,
        )
        return str(url), pending

    def finish(self, pending: PendingSignIn, code: str, redirect_uri: str) -> Person:
        """Redeem the code that the provider sent with the browser.

        Raises:
            UnauthenticatedError: The code or its ID token is not accepted.
            NotReadyError: The issuer does not answer, or refuses this server.
        """
        answer = self._ask(
            lambda client, **options: client.fetch_token(
                code=code, code_verifier=pending.verifier, redirect_uri=redirect_uri, **options
            )
        )
        return self._person(answer, pending.nonce)

    def renew(self, sealed: str, secret: str) -> Person:
        """Have the provider confirm a person again, with their claims of now.

        Args:
            sealed: Tokens of the session; see `Person.seal`.
            secret: Secret of the session's cookie.

        Raises:
            UnauthenticatedError: The provider does not confirm the person any more.
            NotReadyError: The issuer does not answer, or refuses this server.
        """
        tokens = _opened(sealed, secret)
        if not tokens["refresh_token"]:
            raise UnauthenticatedError("The session has ended. Sign in again.")
        answer = self._ask(
            lambda client, **options: client.refresh_token(
                refresh_token=tokens["refresh_token"], **options
            )
        )
        # Section 12.2: a nonce is not needed here, but may not be another one.
        person = self._person(answer, tokens["nonce"], needs_nonce=False)
        if person.claims["sub"] != tokens["sub"]:
            raise token_refused(f"expected one of {tokens['sub']!r}, found another person's")
        return person

    def granted(self, person: Person) -> Caller:
        """Return the caller with a person's grants: those of a bearer token with these claims.

        Raises:
            UnauthenticatedError: The claims have no usable name.
            ForbiddenError: Nothing is granted for the claims.
        """
        return self._issuer.granted(person.claims)

    def name(self, person: Person) -> str:
        """Return a person's name in the audit trail.

        Raises:
            UnauthenticatedError: The claims have no usable name.
        """
        return self._issuer.name(person.claims)

    def sign_out_url(self, sealed: str, secret: str, return_to: str) -> str | None:
        """Return the URL at which a browser also signs out of the provider; None: there is none.

        Args:
            sealed: Tokens of the session; see `Person.seal`.
            secret: Secret of the session's cookie.
            return_to: URL of this server to send the browser back to.
        """
        try:
            endpoint = self._issuer.endpoint("end_session_endpoint")
        except NotReadyError:
            return None  # signed out here, at least
        if endpoint is None:
            return None
        parameters = {
            "client_id": self._settings.oidc_client_id,
            "post_logout_redirect_uri": return_to,
        }
        token = _opened(sealed, secret)["id_token"]
        if len(token) <= _MAX_HINT_LENGTH:
            parameters["id_token_hint"] = token
        return str(add_params_to_uri(endpoint, list(parameters.items())))

    def _endpoint(self, name: str) -> str:
        url = self._issuer.endpoint(name)
        if url is None:
            raise NotReadyError(
                f"CAIRN_OIDC_CLIENT_ID: expected {name} in the discovery document of "
                f"{self._settings.oidc_issuer}, found none. Sign in with a key."
            )
        return url

    def _client(self, session: httpx.Client | None) -> OAuth2Client:
        return OAuth2Client(
            session, client_id=self._settings.oidc_client_id, code_challenge_method="S256"
        )

    def _ask(self, request: Callable[..., Mapping[str, Any]]) -> Mapping[str, Any]:
        """Send a request to the token endpoint, as this server's client.

        Args:
            request: Function that takes the client, and `url` and credentials as options.
        """
        issuer = self._settings.oidc_issuer
        try:
            with httpx.Client(timeout=ANSWER_SECONDS, trust_env=False) as session:
                return request(
                    self._client(session),
                    url=self._endpoint("token_endpoint"),
                    **self._credentials(),
                )
        except OAuth2Error as exc:
            if exc.error == "invalid_grant":
                raise UnauthenticatedError(
                    f"{issuer} does not confirm this sign-in (any more). Sign in again."
                ) from exc
            problem = f"{exc.error}: {exc.description}"
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, TypeError) as exc:
            problem = str(exc) or type(exc).__name__
        logger.warning("no token of the issuer %s: %s", issuer, problem)
        raise NotReadyError(
            f"CAIRN_OIDC_CLIENT_ID: expected a token of {issuer}, found: {problem[:500]}. "
            "Try again, or sign in with a key.",
            headers={"Retry-After": str(int(RETRY_SECONDS))},
        )

    def _credentials(self) -> dict[str, Any]:
        """Return the options with which this server proves to the issuer which client it is."""
        client_id, secret = self._settings.oidc_client_id, self._settings.oidc_client_secret
        if not secret:
            return {"auth": httpx.Auth(), "client_id": client_id}
        # Only in the body, no provider differs in how it decodes a secret.
        if "client_secret_post" in self._issuer.supports("token_endpoint_auth_methods_supported"):
            return {"auth": httpx.Auth(), "client_id": client_id, "client_secret": secret}
        return {"auth": httpx.BasicAuth(client_id, secret)}

    def _person(self, answer: Mapping[str, Any], nonce: str, *, needs_nonce: bool = True) -> Person:
        token, refresh_token = answer.get("id_token"), answer.get("refresh_token")
        client_id = self._settings.oidc_client_id
        if not isinstance(token, str):
            raise token_refused("expected an ID token, found none")
        claims = self._issuer.claims(token, client_id)
        if not isinstance(claims.get("sub"), str) or not claims["sub"]:
            raise token_refused("claim 'sub': expected who it is")
        if claims.get("azp", client_id) != client_id:
            raise token_refused("claim 'azp': expected this client")
        claimed = claims.get("nonce") if needs_nonce else claims.get("nonce", nonce)
        if not isinstance(claimed, str) or not compare_digest(claimed.encode(), nonce.encode()):
            raise token_refused("claim 'nonce': expected that of this sign-in")
        return Person(
            claims, token, refresh_token if isinstance(refresh_token, str) else None, nonce
        )


def _cipher(secret: str) -> Fernet:
    """Return a cipher whose key is derived from a cookie's secret, and reveals nothing of it."""
    derivation = HKDF(SHA256(), _KEY_BYTES, salt=None, info=b"cairn session tokens")
    return Fernet(urlsafe_b64encode(derivation.derive(secret.encode())))


def _opened(sealed: str, secret: str) -> dict[str, Any]:
    try:
        tokens: dict[str, Any] = json.loads(_cipher(secret).decrypt(sealed.encode()))
    except InvalidToken as exc:  # another database's row
        raise UnauthenticatedError("The session has ended. Sign in again.") from exc
    return tokens

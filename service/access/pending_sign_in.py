"""Sign-in at the identity provider that a browser has begun, as its cookie keeps it."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Final
from urllib.parse import quote, unquote

LIFETIME: Final = timedelta(minutes=10)
"""Longest time that a person may take at the provider."""

_MAX_TARGET_LENGTH: Final = 1500
"""Longest path that fits into the cookie, quoted."""


@dataclass(frozen=True)
class PendingSignIn:
    """Random values that tie the provider's answer to the browser that asked for it.

    Only that browser has them: its cookie is sent to this server alone, and no other site or host
    can set it. Therefore they need no signature and no row in a database.

    Attributes:
        state: Value that the provider sends back with the browser.
        nonce: Value that the ID token must have.
        verifier: PKCE code verifier, with which only this server can redeem the code.
        target: Path to redirect to after the sign-in.
    """

    state: str
    nonce: str
    verifier: str
    target: str

    def text(self) -> str:
        """Return the value of the cookie."""
        target = quote(self.target, safe="")
        if len(target) > _MAX_TARGET_LENGTH:
            target = quote("/", safe="")
        return ".".join((self.state, self.nonce, self.verifier, target))

    @classmethod
    def parse(cls, text: str) -> "PendingSignIn | None":
        """Parse the value of a cookie; None: it is not one of these."""
        parts = text.split(".", 3)
        if len(parts) != len(cls.__dataclass_fields__) or not all(parts):
            return None
        return cls(parts[0], parts[1], parts[2], unquote(parts[3]))

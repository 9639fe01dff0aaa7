"""Signatures of webhook messages, which prove the sender and the time to a receiver. Pure.

Source: the Standard Webhooks specification, https://www.standardwebhooks.com: headers `webhook-id`,
`webhook-timestamp`, `webhook-signature`; HMAC-SHA256 over id, timestamp and body.
"""

import base64
import hashlib
import hmac
import secrets
from typing import Final

PREFIX: Final = "whsec_"
SECRET_BYTES: Final = 32


def make_secret() -> str:
    """Return a new secret for one webhook, as text that its receiver stores."""
    return PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def signed_headers(secret: str, uid: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Return the signature headers of a message.

    Args:
        secret: Secret from `make_secret`.
        uid: Id of the event, the same at every try.
        timestamp: Time of this try, in seconds since 1970.
        body: Body of the message.
    """
    key = base64.b64decode(secret.removeprefix(PREFIX))
    signed = b"%s.%d.%s" % (uid.encode(), timestamp, body)
    signature = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    return {
        "webhook-id": uid,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": f"v1,{signature}",
    }

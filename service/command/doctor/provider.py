"""Check of the identity provider: its discovery document has what tokens and sign-ins need."""

from collections.abc import Iterator
from typing import Final

from cairn.service.access.guard import CALLBACK
from cairn.service.access.oidc import Issuer
from cairn.service.command.doctor.findings import Finding, Outcome
from cairn.service.errors import NotReadyError
from cairn.service.settings import Settings

CHECK: Final = "identity provider"


def check_provider(settings: Settings) -> Iterator[Finding]:
    """Check the discovery document and the keys of the issuer that the settings trust, if any.

    Args:
        settings: Settings of the server.
    """
    if not settings.oidc_issuer:
        return
    issuer, address = Issuer(settings), settings.oidc_issuer
    try:
        missing = [
            name
            for name in ("authorization_endpoint", "token_endpoint")
            if issuer.endpoint(name) is None
        ]
        methods = issuer.supports("code_challenge_methods_supported")
        has_sign_out = issuer.endpoint("end_session_endpoint") is not None
    except NotReadyError as exc:
        fix = "compare CAIRN_OIDC_ISSUER with `issuer` in the provider's discovery document"
        yield Finding(CHECK, Outcome.FAIL, exc.detail, fix)
        return
    if not settings.oidc_client_id:
        yield Finding(CHECK, Outcome.OK, f"{address} publishes its keys; nobody signs in there")
        return
    if missing:
        text = f"{address}: expected {' and '.join(missing)} in its discovery document, found none"
        yield Finding(CHECK, Outcome.FAIL, text, "unset CAIRN_OIDC_CLIENT_ID: people need keys")
        return
    if methods and "S256" not in methods:
        text = f"{address}: expected S256 among its PKCE methods, found {', '.join(methods)}"
        yield Finding(CHECK, Outcome.WARN, text, "enable PKCE with S256 at the provider")
    ends = "" if has_sign_out else "; it has no sign-out, so signing out ends sessions here only"
    text = f"{address} signs people in; register https://HOST{CALLBACK} there{ends}"
    yield Finding(CHECK, Outcome.OK, text)

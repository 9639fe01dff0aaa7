"""Checks of a bucket that speaks S3: whose requests they are, and which settings matter."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from cairn.service.command.doctor.findings import Finding, Outcome
from cairn.storage.errors import NotFoundError, StorageError
from cairn.storage.store.s3 import bucket_settings, credentials_text
from cairn.storage.store.uri import StoreURI

__all__ = ["check_bucket", "check_credentials"]

_PAGE: Final = "see docs/howto/s3.md#the-bucket"


def check_credentials(check: str, uri: StoreURI) -> Finding:
    """Say which credentials the requests have.

    Raises:
        StorageError: botocore is not installed.
    """
    text = credentials_text(uri)
    if text is None:
        fix = "set AWS_PROFILE or AWS_ACCESS_KEY_ID, or give this machine a role"
        return Finding(check, Outcome.FAIL, "expected credentials for S3, found none", fix)
    return Finding(check, Outcome.OK, f"credentials of S3: {text}")


def check_bucket(check: str, uri: StoreURI) -> Iterator[Finding]:
    """Look at versions, locks and lifecycle rules, as far as this identity may read them."""
    settings: dict[str, Mapping[str, Any]] = {}
    unread = []
    for name in ("versioning", "object_lock", "lifecycle"):
        try:
            settings[name] = bucket_settings(uri, name)
        except NotFoundError:
            settings[name] = {}
        except StorageError:
            unread.append(name)
    if settings.get("versioning", {}).get("Status") == "Enabled":
        text = "the bucket keeps versions: deleted bytes stay, and cost, until a rule ends them"
        yield Finding(check, Outcome.WARN, text, f"add NoncurrentVersionExpiration, {_PAGE}")
    if settings.get("object_lock"):
        text = "the bucket locks objects: what Cairn deletes stays until the lock ends"
        yield Finding(check, Outcome.WARN, text, "keep runs in a bucket without object lock")
    if "lifecycle" in settings:
        yield from _check_rules(check, uri, settings["lifecycle"].get("Rules", ()))
    if unread:
        text = f"not told to this identity: {', '.join(unread)} of the bucket"
        yield Finding(check, Outcome.OK, text)


def _check_rules(check: str, uri: StoreURI, rules: Any) -> Iterator[Finding]:
    enabled = [rule for rule in rules if rule.get("Status") == "Enabled" and _applies(rule, uri)]
    for rule in enabled:
        expiration = rule.get("Expiration", {})
        if "Days" in expiration or "Date" in expiration:
            text = f"the lifecycle rule {rule.get('ID', '')!r} deletes by age, also steps in use"
            fix = "remove the rule, and delete by retention policies"
            yield Finding(check, Outcome.FAIL, text, fix)
    if not any("AbortIncompleteMultipartUpload" in rule for rule in enabled):
        text = "no lifecycle rule ends uploads that nobody completes: their parts stay, and cost"
        yield Finding(check, Outcome.WARN, text, f"add AbortIncompleteMultipartUpload, {_PAGE}")


def _applies(rule: Mapping[str, Any], uri: StoreURI) -> bool:
    """Return True if a rule is about objects of the root."""
    filtered = rule.get("Filter", {})
    prefix = rule.get("Prefix") or filtered.get("Prefix") or filtered.get("And", {}).get("Prefix")
    root = f"{uri.path}/" if uri.path else ""
    return not prefix or root.startswith(prefix) or prefix.startswith(root)

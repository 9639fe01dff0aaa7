"""The audit trail as its readers get it."""

from types import SimpleNamespace

from fastapi.testclient import TestClient


def audit_trail(http: TestClient, headers: dict[str, str] | None = None) -> list[SimpleNamespace]:
    """Return the entries of the audit trail, oldest first.

    Args:
        http: Client of the control plane.
        headers: With the key of an administrator, where keys are asked for.
    """
    answer = http.get("/v1/audit-events", params={"page_size": 200}, headers=headers)
    assert answer.status_code == 200, answer.text
    return [SimpleNamespace(**entry) for entry in reversed(answer.json()["audit_events"])]

"""Check of the control plane: it answers, is ready, and runs this version."""

from collections.abc import Iterator, Mapping

from cairn.service.client.client import Client
from cairn.service.client.protocol.paths import DEFAULT_URL
from cairn.service.client.protocol.responses import is_this_machine
from cairn.service.command.doctor.findings import Finding, Outcome
from cairn.service.errors import ClientError, ProblemResponseError


def check_server(
    url: str | None, environment: Mapping[str, str], *, version: str, seconds: float
) -> Iterator[Finding]:
    """Check that the control plane answers, runs this version, and is ready.

    Args:
        url: Address of the control plane; None: `CAIRN_URL`, or the default.
        environment: Environment variables.
        version: Version of this Cairn.
        seconds: Time to wait for an answer.
    """
    address = url or environment.get("CAIRN_URL")
    try:
        with Client(address, timeout=seconds, retry_seconds=0) as client:
            health = client.health()
            where = client.url
            if health.version == version:
                text = f"{where} answers, of version {version}"
                yield Finding("server", Outcome.OK, text)
            else:
                text = f"{where}: expected version {version}, found {health.version}"
                fix = "update the older of the two: pip install --upgrade cairn-checkpoints"
                yield Finding("server", Outcome.WARN, text, fix)
            client.ready()
    except ProblemResponseError as exc:
        parts = [
            f"{error['field']}: {error['detail']}" for error in exc.problem.get("errors") or ()
        ]
        text = "; ".join(parts) or str(exc)
        fix = "run `cairn doctor` where the server runs, with its settings"
        yield Finding("server", Outcome.FAIL, f"not ready: {text}", fix)
    except ClientError as exc:
        outcome = Outcome.FAIL if address else Outcome.WARN
        is_here = is_this_machine(address or DEFAULT_URL)
        fix = "cairn serve" if is_here else "start it there, or set CAIRN_URL to its address"
        yield Finding("server", outcome, str(exc), fix)

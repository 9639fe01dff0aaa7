"""Resumable upload sessions: what has arrived so far, kept beside the store's bytes.

A session is a JSON file and a part file in the bucket's staging folder, so that a client goes on
where it was after the double restarts, as it may with GCS for a week.
"""

from __future__ import annotations

import dataclasses
import json
import re
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gcs.conditions import Conditions
from tests.gcs.errors import NotFoundError
from tests.gcs.folder import write_json
from tests.gcs.objects import Bucket
from tests.gcs.staging import StagedFile

SESSION_ID = re.compile(r"[0-9a-f]{32}")


@dataclass
class Session:
    """One resumable upload.

    Attributes:
        announced: checksums the client gave when it started, base64 by name.
        finished: the object's version once committed; repeated requests get it again.
    """

    id: str
    bucket: Bucket
    name: str
    fields: Mapping[str, Any]
    conditions: Conditions
    announced: Mapping[str, str]
    finished: dict[str, Any] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    _staged: StagedFile | None = None

    @property
    def file(self) -> Path:
        return self.bucket.folder.staging / f"session-{self.id}.json"

    @property
    def staged(self) -> StagedFile:
        """The bytes so far; opened, and read once, when a restart lies in between."""
        if self._staged is None:
            self._staged = self.bucket.stage(f"session-{self.id}")
        return self._staged

    def save(self) -> None:
        conditions = dataclasses.asdict(self.conditions)
        write_json(
            self.file,
            {
                "name": self.name,
                "fields": dict(self.fields),
                "conditions": conditions,
                "announced": dict(self.announced),
                "finished": self.finished,
            },
        )

    def drop_bytes(self) -> None:
        """Forgets the bytes, which a commit has moved away or nobody wants."""
        if self._staged is not None:
            self._staged.discard()
            self._staged = None

    def close(self) -> None:
        """Lets go of the open file; the session stays on disk."""
        if self._staged is not None:
            self._staged.close()
            self._staged = None


class Sessions:
    """The sessions of all buckets, each read from disk when it is first asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[tuple[str, str], Session] = {}

    def start(
        self,
        bucket: Bucket,
        name: str,
        *,
        fields: Mapping[str, Any],
        conditions: Conditions,
        announced: Mapping[str, str],
    ) -> Session:
        """A new session, on disk before its id is told."""
        session = Session(uuid.uuid4().hex, bucket, name, fields, conditions, announced)
        session.save()
        with self._lock:
            self._sessions[bucket.name, session.id] = session
        return session

    def get(self, bucket: Bucket, session_id: str) -> Session:
        """A session by id.

        Raises:
            NotFoundError: if there is none.
        """
        with self._lock:
            found = self._sessions.get((bucket.name, session_id))
            if found is not None and found.bucket is bucket:
                return found
            file = bucket.folder.staging / f"session-{session_id}.json"
            if not SESSION_ID.fullmatch(session_id) or not file.exists():
                raise NotFoundError(f"No such upload session: {session_id}")
            saved = json.loads(file.read_text())
            conditions = Conditions(**saved.pop("conditions"))
            session = Session(session_id, bucket, conditions=conditions, **saved)
            self._sessions[bucket.name, session_id] = session
            return session

    def end(self, session: Session) -> None:
        """Removes a session and its bytes."""
        with self._lock:
            self._sessions.pop((session.bucket.name, session.id), None)
        _ = session.staged
        session.drop_bytes()
        session.file.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the open files of all sessions."""
        with self._lock:
            for session in self._sessions.values():
                session.close()
            self._sessions.clear()

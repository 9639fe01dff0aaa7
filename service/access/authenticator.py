"""Who somebody is, by what they show."""

import logging
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from cairn.service.access.callers import Caller
from cairn.service.access.keys import Credential, caller_of, find_key, note_use
from cairn.service.access.recent import Recent
from cairn.service.catalog import Catalog, KeyRow
from cairn.service.errors import UnauthenticatedError

logger = logging.getLogger(__name__)

NOTE_EVERY: Final = timedelta(minutes=1)
"""How exactly a key's last use is known."""


class Authenticator:
    """Knows callers by their keys, as the catalog has them."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._keys: Recent[KeyRow] = Recent(partial(find_key, catalog))
        self._noted: dict[str, datetime] = {}

    async def by_bearer(self, text: str) -> tuple[Caller, str]:
        """The caller with this bearer token, and the id of their key.

        Raises:
            UnauthenticatedError: It is none of ours, or counts no more.
        """
        credential = Credential.parse(text)
        if credential is None:
            raise UnauthenticatedError(
                "Authorization: expected a key such as ck_<id>_<secret>, found a text of another "
                "form. `cairn keys create` makes one; clients read it from CAIRN_KEY."
            )
        row = await self._keys.get(credential.id)
        return caller_of(row, credential, datetime.now(UTC)), credential.id

    def recognises(self, text: str) -> bool:
        """Whether a key of this id was there a moment ago; asks nobody."""
        credential = Credential.parse(text)
        return credential is not None and self._keys.knows(credential.id)

    async def note_use(self, key: str) -> None:
        """Note that a key was used, once a minute; if it can't be noted, the log says so."""
        now = datetime.now(UTC)
        row = await self._keys.get(key)
        noted = self._noted.get(key) or (row.last_used if row is not None else None)
        if noted is not None and now - noted < NOTE_EVERY:
            return
        self._noted[key] = now
        try:
            await run_in_threadpool(note_use, self._catalog, key, now=now)
        except SQLAlchemyError as exc:
            logger.warning("the last use of key %s could not be noted: %s", key, exc)

# Made of asynchronous/events.py by `python scripts/sync_client.py`: change that one.
"""What a client asks about events and webhooks."""

import time
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from typing import Final

from cairn.service.client.connection import Connection
from cairn.service.client.protocol import Parameter, Patience, segment
from cairn.service.errors import EventsLostError, ProblemResponseError, ServerUnreachableError
from cairn.service.schemas import (
    Delivery,
    DeliveryList,
    DeliveryState,
    Event,
    EventKind,
    EventList,
    NewWebhook,
    Webhook,
    WebhookList,
)

_AT_ONCE: Final = 500  # events of an answer


class EventsConnection(Connection):
    """Asks one control plane what happened, and who is told."""

    def events(
        self,
        *,
        after: int = 0,
        root: str | None = None,
        run: str | None = None,
        kind: EventKind | str | None = None,
        page_size: int = 100,
    ) -> Iterator[Event]:
        """What happened, in the order in which the catalog came to know of it.

        Args:
            after: `id` of the last event that is known already: who goes on there misses none.
            root: Only of this root; None: of all.
            run: Only of runs of this name; None: of all.
            kind: Only of this kind, such as `alias.moved`; None: of any.
            page_size: Events that are fetched at a time.
        """
        pages = self._pages(
            EventList,
            "/v1/events",
            page_size=page_size,
            after=after,
            root=root,
            run=run,
            kind=None if kind is None else str(kind),
        )
        for page in pages:
            yield from page.events

    def watch_events(
        self,
        *,
        after: int = 0,
        kinds: Iterable[EventKind | str] | None = None,
        root: str | None = None,
        run: str | None = None,
        patience: float = 300.0,
    ) -> Iterator[Event]:
        """What happened, and then what happens, for ever: in order, each event once.

        An event comes some two seconds after it is known at the latest. The server may be away
        meanwhile. Who keeps the `id` of the last event that was dealt with, and goes on there,
        misses none.

        Args:
            after: `id` of the last event that is known already; 0: from the first.
            kinds: Only of these, such as `alias.moved`; None: of any.
            root: Only of this root; None: of all.
            run: Only of runs of this name; None: of all.
            patience: Seconds without any answer after which the server counts as gone.

        Raises:
            EventsLostError: The last event is not there any more: the catalog was made anew, or
                restored from an older copy, and events have other ids.
            ProblemResponseError: There is no such kind, or the caller may not read there; with
                status 410, events after the last one are not kept any more.
            ServerUnreachableError: No answer for `patience` seconds.
        """
        server = Patience(patience)
        wanted = None if kinds is None else [str(kind) for kind in kinds]
        for kind in [] if wanted is None else wanted or [""]:
            self._look(server, kind=kind, page_size=1)  # refused, and not waited for in vain
        only = wanted[0] if wanted is not None and len(wanted) == 1 else None
        last = self._event(server, after, after) if after else None
        while True:
            found = self._look(
                server,
                after=after,
                root=root,
                run=run,
                kind=only,
                page_size=_AT_ONCE,
            )
            if last is not None:  # after the others: what was read before is of the same catalog
                again = self._event(server, last.id, found.position)
                if again is None:
                    last = None
                elif again.uid != last.uid:
                    raise self._lost(last.id, "another one")
            for event in found.events:
                last = event
                if wanted is None or event.kind in wanted:
                    server.begin_again()
                    yield event
            if found.position < after:
                raise self._lost(after, f"{found.position} as the last")
            if after or last is not None:  # else from the first: none can be missed
                after = found.position
            if found.next_page_token is None:
                time.sleep(server.pause())

    def _event(self, server: Patience, event: int, known: int) -> Event | None:
        """The event of an id; None: it is not kept any more, and none after `known` is missing."""
        try:
            found = self._look(server, after=event - 1, page_size=1)
        except ProblemResponseError as exc:
            pruned = exc.problem.get("pruned")
            if exc.status == HTTPStatus.GONE and isinstance(pruned, int) and pruned <= known:
                return None
            raise
        if not found.events or found.events[0].id != event:
            raise self._lost(event, "none that this key may read")
        return found.events[0]

    def _lost(self, event: int, found: str) -> EventsLostError:
        return EventsLostError(
            f"{self.url}: expected event {event}, the last one that is known here, found {found}. "
            "The catalog was made anew or restored from an older copy, and numbers its events "
            "anew: look at what is listed now, and watch with after=0."
        )

    def _look(self, server: Patience, **parameters: Parameter) -> EventList:
        """The next events, once the server answers."""
        while True:
            try:
                found = self._get(EventList, "/v1/events", timeout=None, **parameters)
            except (ProblemResponseError, ServerUnreachableError) as exc:
                if server.failed(exc):
                    raise
            else:
                server.answered()
                return found
            time.sleep(server.pause())

    def webhooks(self) -> list[Webhook]:
        """Everybody who is told of events, without secrets."""
        found = self._get(WebhookList, "/v1/webhooks")
        return found.webhooks

    def create_webhook(
        self,
        url: str,
        *,
        kinds: Iterable[EventKind | str] | None = None,
        roots: Iterable[str] | None = None,
        runs: str = "*",
    ) -> NewWebhook:
        """Have somebody told of what happens from now on; the answer alone has the secret.

        Args:
            url: Where events are sent.
            kinds: Of what, such as `alias.moved`; None: of everything.
            roots: Of which roots; None: of all.
            runs: Of runs with such a name, such as `llama-*`.
        """
        body = {
            "url": url,
            "kinds": None if kinds is None else [str(kind) for kind in kinds],
            "roots": None if roots is None else list(roots),
            "runs": runs,
        }
        return self._send(NewWebhook, "POST", "/v1/webhooks", body)

    def delete_webhook(self, webhook: str) -> None:
        """Tell somebody no more; what was not delivered is dropped."""
        self._answer("DELETE", f"/v1/webhooks/{segment(webhook)}")

    def test_webhook(self, webhook: str) -> Delivery:
        """Send one webhook an event that did not happen."""
        return self._send(Delivery, "POST", f"/v1/webhooks/{segment(webhook)}:test")

    def deliveries(
        self, webhook: str, *, state: DeliveryState | str | None = None, page_size: int = 50
    ) -> Iterator[Delivery]:
        """What became of each event that a webhook is told of, newest first."""
        path = f"/v1/webhooks/{segment(webhook)}/deliveries"
        in_state = None if state is None else str(state)
        for page in self._pages(DeliveryList, path, page_size=page_size, state=in_state):
            yield from page.deliveries

    def redeliver(self, webhook: str, delivery: int) -> Delivery:
        """Have a delivery tried again, whatever came of it."""
        path = f"/v1/webhooks/{segment(webhook)}/deliveries/{delivery}:redeliver"
        return self._send(Delivery, "POST", path)
